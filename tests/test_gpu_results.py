"""The section of docs/reliability.md on a GPU machine: what it says of a file of results."""

import gpu_results
import pytest

SUITE = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">
<testsuite name="NVIDIA H200, torch 2.11" tests="5" time="240.0" timestamp="2026-11-29T10:00:00.1+00:00">
<testcase classname="tests.test_cuda_obs" name="test_a[0:3]" time="1"/>
<testcase classname="tests.test_triton" name="test_on_gpu[x]" time="1"/>
<testcase classname="tests.test_ops" name="test_b" time="1"/>
<testcase classname="tests.test_cuda" name="test_c"><skipped message="not built | run x">more</skipped></testcase>
<testcase classname="" name="tests.test_cuda"><skipped message="not built | run x">more</skipped></testcase>
<testcase classname="tests.test_save" name="test_e" time="1"><failure message="AssertionError:
 /home/me/x differs">trace</failure></testcase>
</testsuite></testsuites>"""


def test_the_section_counts_and_gives_the_reasons(tmp_path):
    (tmp_path / "junit.xml").write_text(SUITE)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_results.BEGIN}old\n{gpu_results.END}after\n")
    gpu_results.write(tmp_path / "junit.xml", page)
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    told = "NVIDIA H200, torch 2.11, 2026-11-29: 3 passed, 2 skipped, 1 failed, in 4.0 minutes. 2 of those that passed"
    assert lines[2].startswith(told)
    assert "| failed | 1 | AssertionError: ... differs | `test_save.py` |" in lines
    assert "| skipped | 2 | not built \\| run x | `test_cuda.py` |" in lines


@pytest.mark.parametrize(
    "suite, page, message",
    [
        (SUITE.replace("NVIDIA H200, torch 2.11", "no CUDA device"), None, "without a GPU"),
        (SUITE, "x\n", "has no lines"),
    ],
)
def test_results_that_do_not_belong_there_change_nothing(suite, page, message, tmp_path):
    (tmp_path / "junit.xml").write_text(suite)
    page = page or f"{gpu_results.BEGIN}{gpu_results.END}"
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(ValueError, match=message):
        gpu_results.write(tmp_path / "junit.xml", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == page


def test_the_page_has_a_place_for_the_section():
    text = gpu_results.PAGE.read_text(encoding="utf-8")
    assert gpu_results.BEGIN in text and gpu_results.END in text.partition(gpu_results.BEGIN)[2]
