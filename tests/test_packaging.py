"""What an install yields: the wheel's contents and tag under each FWANDA_BUILD, and the build's errors."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "csrc", "fwanda_kernels", "python"]
build = runpy.run_path(str(ROOT / "fwanda_kernels" / "_build.py"))
compiling = runpy.run_path(str(ROOT / "fwanda_kernels" / "_backends" / "cuda" / "compile.py"))
try:
    compiling["compiler"]()
    no_cuda_compiler = ""
except compiling["CompileError"] as error:
    no_cuda_compiler = str(error)
needs_cuda_compiler = pytest.mark.skipif(bool(no_cuda_compiler), reason=no_cuda_compiler)
needs_compiler = pytest.mark.skipif(not (shutil.which("c++") or os.environ.get("CXX")), reason="no C++ compiler")


@pytest.fixture
def source_tree(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    return tree


def build_wheel(tree, mode, what="wheel", **environment):
    code = f"import setuptools.build_meta as backend; backend.build_{what}('dist')"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={**os.environ, "FWANDA_BUILD": mode, **environment},
        capture_output=True,
        text=True,
    )


def only_wheel(tree):
    (wheel,) = (tree / "dist").iterdir()
    return wheel, set(zipfile.ZipFile(wheel).namelist())


def test_pure_wheel_holds_both_packages_and_the_sources_and_no_library(source_tree):
    (source_tree / "fwanda_kernels" / build["CPU_LIBRARY"]).write_bytes(b"left by an earlier build")
    (source_tree / "fwanda_kernels" / build["CUBINS"]).mkdir(exist_ok=True)
    (source_tree / "fwanda_kernels" / build["CUBINS"] / "old.cubin").write_bytes(b"left by an earlier build")
    done = build_wheel(source_tree, "0")
    assert done.returncode == 0, done.stderr
    wheel, names = only_wheel(source_tree)
    assert wheel.name.endswith("-py3-none-any.whl")
    folders = {
        "fwanda_kernels": (source_tree / "fwanda_kernels", "*.py"),
        "fwanda_kernels/csrc": (source_tree / "csrc", "*.*"),
        "fwanda_pruner": (source_tree / "python" / "fwanda_pruner", "*.py"),
    }
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, (folder, glob) in folders.items()
        for path in folder.rglob(glob)
    }
    assert {"fwanda_kernels/_backends/triton/obs.py", "fwanda_kernels/csrc/bad.h"} <= expected
    assert expected | {"fwanda_kernels/py.typed", "fwanda_pruner/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".cubin"))]


def test_source_archive_holds_sources_and_tests_and_builds_the_same_wheel(source_tree, tmp_path):
    for name in ("tests", "docs", "examples"):
        shutil.copytree(ROOT / name, source_tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert build_wheel(source_tree, "0", "sdist").returncode == 0
    (archive,) = (source_tree / "dist").iterdir()
    shutil.unpack_archive(archive, tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    for name in ("csrc/cpu.cpp", "csrc/columns.cuh", "tests/tiny.py", "docs/methods.md", "examples/nn_prune.py"):
        assert (unpacked / name).is_file(), name
    assert not [path for path in unpacked.rglob("*") if path.suffix in (".so", ".pyc", ".cubin")]
    archive.unlink()
    for tree in (source_tree, unpacked):
        assert build_wheel(tree, "0").returncode == 0
    assert only_wheel(source_tree)[1] == only_wheel(unpacked)[1]


def test_auto_installs_without_a_compiler(source_tree):
    done = build_wheel(source_tree, "auto", PATH="", CXX="", CUDA_HOME="")
    assert done.returncode == 0, done.stderr
    assert "installing without the cpu library: no C++ compiler found" in done.stdout
    assert only_wheel(source_tree)[0].name.endswith("-py3-none-any.whl")


@needs_compiler
def test_cpu_build_tags_the_wheel_for_its_platform_only(source_tree):
    done = build_wheel(source_tree, "cpu")
    assert done.returncode == 0, done.stderr
    wheel, names = only_wheel(source_tree)
    assert "-py3-none-" in wheel.name and "any" not in wheel.name
    assert f"fwanda_kernels/{build['CPU_LIBRARY']}" in names
    assert build_wheel(source_tree, "0").returncode == 0
    assert any(path.name.endswith("-py3-none-any.whl") for path in (source_tree / "dist").iterdir())


def test_explicit_build_without_a_compiler_fails_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(build["BuildError"], match="no C\\+\\+ compiler found: install g\\+\\+"):
        build["build_for_install"]("cpu", tmp_path)
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_failed_compile_shows_the_compiler_and_keeps_the_old_library(tmp_path, monkeypatch):
    old = tmp_path / build["CPU_LIBRARY"]
    old.write_bytes(b"old")
    monkeypatch.setenv("CXX", "c++ -fno-such-option")
    with pytest.raises(build["BuildError"], match="no-such-option"):
        build["build"]("cpu", tmp_path)
    assert old.read_bytes() == b"old" and list(tmp_path.iterdir()) == [old]


def test_unknown_modes_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="FWANDA_BUILD must be auto, 0, cpu, cuda or all, got 'gpu'"):
        build["build_for_install"]("gpu", tmp_path)
    with pytest.raises(ValueError, match="got 'gpu'"):
        build["build"]("gpu", tmp_path)


def test_cuda_build_without_a_compiler_fails_and_says_what_to_do(tmp_path):
    """Without its site-packages, Python finds no NVRTC of a wheel."""
    if list(Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*")):
        pytest.skip("the toolkit has NVRTC")
    script = str(ROOT / "fwanda_kernels" / "_build.py")
    code = f"import runpy, pathlib; runpy.run_path({script!r})['build']('cuda', pathlib.Path({str(tmp_path)!r}))"
    environment = {"PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, env=environment)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("pip install nvidia-cuda-nvrtc; or set CUDA_HOME or PATH, so that nvcc is found")
    assert not list(tmp_path.iterdir())


@needs_cuda_compiler
@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("8.0;19.9+PTX", "builds for 90, .*, got 199"),
        ("7.5 8.0", "the CUDA kernels need 9.0 or newer"),
        ("Hopper", "expected entries such as 9.0 or 9.0.PTX, got 'Hopper'"),
    ],
)
def test_cuda_architectures_follow_torch_cuda_arch_list(listed, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(build["BuildError"], match=message):
        build["build"]("cuda", tmp_path)
    assert not list(tmp_path.iterdir())


@needs_cuda_compiler
def test_cuda_build_puts_a_cubin_of_each_module_into_a_wheel_for_every_platform(source_tree):
    done = build_wheel(source_tree, "cuda", TORCH_CUDA_ARCH_LIST="9.0")
    assert done.returncode == 0, done.stderr
    wheel, names = only_wheel(source_tree)
    assert wheel.name.endswith("-py3-none-any.whl")
    expected = {f"fwanda_kernels/cubins/{'-'.join(module)}-sm_90.cubin" for module in compiling["MODULES"]}
    assert {name for name in names if name.endswith(".cubin")} == expected


def test_the_extra_prune_holds_no_package_that_only_some_runs_need():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer have it")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {name: [re.match(r"[\w-]+", item)[0] for item in items] for name, items in extras.items()}
    assert not {"datasets", "gguf", "accelerate", "lm-eval", "matplotlib", "jinja2", "torchao"} & set(names["prune"])
    assert {"transformers", "safetensors", "tqdm", "pyyaml"} <= set(names["prune"])
    whole = re.search(r"\[(.*)\]", extras["all"][0])[1].split(",")
    assert set(whole) == {"prune", "gguf", "datasets", "report", "eval"}


def test_make_alone_lists_every_target():
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert [line.split()[1] for line in listed.splitlines()] == targets


def test_the_command_names_the_packages_of_the_extra_prune():
    (line,) = re.findall(r"^prune = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    from fwanda_pruner.cli import NEEDED

    assert set(NEEDED.values()) == set(re.findall(r'"(.*?)"', line))
