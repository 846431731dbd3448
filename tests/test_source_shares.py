"""SOURCE[:SHARE]: exact counts of windows by shares, their order, and what is refused."""

from fractions import Fraction

import pytest

from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.source_shares import SourceShare, counts_of, interleaved, parse_sources


def counts(*texts: str, total: int) -> list[int]:
    return counts_of(parse_sources(texts), total)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("c4", ("c4", 1)),
        ("c4:3", ("c4", 3)),
        ("self:0.5", ("self", Fraction(1, 2))),
        ("c4:1/3", ("c4", Fraction(1, 3))),
        ("c4:2.5e-1", ("c4", Fraction(1, 4))),
        ("my/set.v2:7", ("my/set.v2", 7)),
        ("a:b:2", ("a:b", 2)),
    ],
)
def test_a_source_has_a_share_or_the_share_1(text, expected):
    assert parse_sources([text]) == (SourceShare(*expected),)


def test_a_file_whose_name_holds_a_colon_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("notes:2", "notes:final.txt", "notes:2:0.txt"):
        (tmp_path / name).write_text("text")
        assert parse_sources([name]) == (SourceShare(name),)
        assert parse_sources([f"{name}:3"]) == (SourceShare(name, Fraction(3)),)
    (tmp_path / "notes:2").unlink()
    assert parse_sources(["notes:2"]) == (SourceShare("notes", Fraction(2)),)


@pytest.mark.parametrize(
    "share",
    [
        "0",
        "-1",
        "nan",
        "inf",
        "",
        "half",
        "1e400",
        "1e999999999",
        "1e-999999999",
        "1/0",
        "0x2",
        "1,5",
        "9" * 30,
        "1e10",
        " ",
        "1/",
        "2\n3",
    ],
)
def test_a_share_that_is_no_positive_number_is_refused(share):
    with pytest.raises(UserError, match="the share after the colon must be a positive number, got ") as error:
        parse_sources(["sample", f"c4:{share}"])
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    with pytest.raises(UserError, match="^--calibration "):
        PruneConfig(calibration=("sample", f"c4:{share}"))


@pytest.mark.parametrize("text", ["", " ", ":", ":2", "\t:1"])
def test_an_empty_source_is_refused(text):
    with pytest.raises(UserError, match="^--calibration"):
        parse_sources(["c4", text])


@pytest.mark.parametrize("texts", [("c4", "c4"), ("c4:2", "self", "c4:3"), ("self", "self:1")])
def test_a_source_given_twice_is_refused(texts):
    with pytest.raises(UserError, match="--calibration names .* twice; give each text once"):
        parse_sources(texts)


def test_one_file_by_two_paths_is_given_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "other.txt").write_text("text")
    for other in ("./a.txt", str(tmp_path / "a.txt"), "link.txt:2"):
        with pytest.raises(UserError, match="twice"):
            parse_sources(["a.txt", other])
    assert len(parse_sources(["a.txt", "other.txt"])) == 2


@pytest.mark.parametrize("flag", ["guard", "eval"])
def test_other_lists_of_texts_are_checked_in_the_same_way(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for names in (("c4", "c4"), ("a.txt", "./a.txt")):
        with pytest.raises(UserError, match=f"--{flag} names .* twice"):
            PruneConfig(**{flag: names})
    with pytest.raises(UserError, match=f"--{flag} has an empty name"):
        PruneConfig(**{flag: ("c4", "")})


# Counts


@pytest.mark.parametrize(
    "texts, total, expected",
    [
        (["a"], 5, [5]),
        (["a", "b"], 128, [64, 64]),
        (["a:3", "b"], 128, [96, 32]),
        (["a", "b", "c"], 128, [43, 43, 42]),  # of equal remainders the first
        (["a:0.5", "b:0.3", "c:0.2"], 7, [4, 2, 1]),  # 3.5, 2.1, 1.4
        (["a:0.6", "b:0.2", "c:0.2"], 4, [2, 1, 1]),  # 2.4, 0.8, 0.8
        (["a:1e9", "b:1e9"], 3, [2, 1]),
        (["a:1/3", "b:2/3"], 3, [1, 2]),  # exactly, where binary fractions round
    ],
)
def test_counts_are_exact_and_the_largest_remainders_get_what_is_left(texts, total, expected):
    assert counts(*texts, total=total) == expected and sum(expected) == total


@pytest.mark.parametrize("total", range(4, 60))
def test_counts_differ_from_the_exact_part_by_less_than_one(total):
    shares = (Fraction(7, 10), Fraction(2, 10), Fraction(1, 2))
    found = counts("a:0.7", "b:0.2", "c:0.5", total=total)
    assert sum(found) == total
    assert all(abs(n - total * share / sum(shares)) < 1 for n, share in zip(found, shares, strict=True))


def test_a_source_that_would_get_no_window_is_named():
    with pytest.raises(UserError, match="--calibration b gets none of 8 windows by its share; use a larger --nsamples"):
        counts("a:100", "b", total=8)
    with pytest.raises(UserError, match="--calibration code gets none of 1 windows"):
        PruneConfig(calibration=("c4", "code"), nsamples=1)


# Order


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ([3], [0, 0, 0]),
        ([2, 1], [0, 1, 0]),
        ([1, 1], [0, 1]),
        ([2, 2], [0, 1, 0, 1]),
        ([4, 2], [0, 1, 0, 0, 1, 0]),
        ([1, 3], [1, 0, 1, 1]),
    ],
)
def test_windows_of_all_sources_alternate_in_a_fixed_order(sizes, expected):
    assert interleaved(sizes) == expected


def test_every_part_of_the_order_has_nearly_the_share_of_each_source():
    sizes = [50, 30, 20]
    order = interleaved(sizes)
    assert [order.count(source) for source in range(3)] == sizes
    for end in range(1, 101):
        for source, size in enumerate(sizes):
            assert abs(order[:end].count(source) - end * size / 100) <= 1.5
