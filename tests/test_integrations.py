"""What all adapters share: hosts imported late, tested versions, the meaning of n:m, and examples that run."""

import importlib
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import fwanda_kernels as fk
from fwanda_pruner import UserError
from fwanda_pruner.integrations import check_version, kept_of
from fwanda_pruner.integrations.wanda_style import wanda_mask

ROOT = Path(__file__).parents[1]
EXAMPLES = ("nn_prune", "ao_sparsifier", "wanda_style")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "python")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.fault("n:m meaning")
def test_prune_one_of_four_is_keep_three_of_four():
    assert [kept_of(1, 4), kept_of(2, 4), kept_of(3, 4), kept_of(0, 4), kept_of(4, 4)] == [3, 2, 1, 4, 0]
    weight, ones = torch.randn(4, 16), torch.ones(16)
    kept = ~wanda_mask(weight, ones, 0, 1, 4)
    assert torch.equal(kept, fk.nm_mask(weight, ones, 3, 4))
    assert (kept.view(4, 4, 4).sum(2) == 3).all()


@pytest.mark.parametrize("pattern", [(5, 4), (-1, 4), (0, 0)])
def test_a_pattern_that_prunes_more_than_there_is_is_refused(pattern):
    with pytest.raises(UserError, match="prunes n of m"):
        kept_of(*pattern)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.1+cu128", "2.11.0a0", "2.13"])
def test_tested_versions_pass_in_silence(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("torch", version, "2.10", "2.13")


@pytest.mark.parametrize("version", ["2.9.1", "2.14.0", "3.0"])
def test_an_untested_version_gives_one_warning_that_names_both(version):
    with pytest.warns(UserWarning, match=f"torch {version} .* 2.10 to 2.13") as caught:
        check_version("torch", version, "2.10", "2.13")
    assert len(caught) == 1


def test_the_pruner_imports_no_adapter():
    loaded = python(
        "import sys; sys.path.insert(0, '..')\n"
        "import fwanda_pruner, fwanda_pruner.run.pipeline\n"
        "print([m for m in sys.modules if m.startswith('fwanda_pruner.integrations')])"
    )
    assert loaded == "[]"


def test_the_package_imports_no_host_and_the_adapters_of_torch_nothing_but_torch():
    loaded = python(
        "import sys; sys.path.insert(0, '..')\n"
        "import fwanda_pruner.integrations\n"
        "print([m for m in sys.modules if m.startswith('fwanda_pruner.integrations.')],"
        " 'torch.ao.pruning' in sys.modules, 'llmcompressor' in sys.modules)\n"
        "from fwanda_pruner.integrations import nn_prune, wanda_style, ao_sparsifier\n"
        "print([m for m in ('transformers', 'datasets', 'safetensors') if m in sys.modules])"
    )
    assert loaded == "[] False False\n[]"


def test_a_torch_without_the_host_gives_an_import_error_that_names_the_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "fwanda_pruner.integrations.ao_sparsifier", raising=False)
    monkeypatch.setitem(sys.modules, "torch.ao.pruning", None)
    with pytest.raises(ImportError, match=r"no torch\.ao\.pruning.*pip install 'torch>=2\.10,<2\.14'") as error:
        importlib.import_module("fwanda_pruner.integrations.ao_sparsifier")
    assert torch.__version__ in str(error.value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prunes_half(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = [int(line.split()[-2].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert printed and all(30 <= percent <= 70 for percent in printed)
