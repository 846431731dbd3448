"""Package layout and the optional native code; everything static is in pyproject.toml."""

import os
import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
native = runpy.run_path(str(ROOT / "fwanda_kernels" / "_build.py"))


class BuildPy(build_py):
    """Copies the packages, then builds what FWANDA_BUILD asks for beside them."""

    def run(self):
        super().run()
        out_dir = ROOT / "fwanda_kernels" if self.editable_mode else Path(self.build_lib).resolve() / "fwanda_kernels"
        native["build_for_install"](os.environ.get("FWANDA_BUILD", "auto"), out_dir, keep=self.editable_mode)


class BdistWheel(bdist_wheel):
    """Tags a wheel that holds a native library for its platform, and every Python 3. Cubins fit every platform."""

    def get_tag(self):
        if not any(Path(self.bdist_dir, "fwanda_kernels").glob("*.so")):
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[*find_packages(include=["fwanda_kernels*"]), *find_packages("python"), "fwanda_kernels.csrc"],
    package_dir={"fwanda_kernels.csrc": "csrc", "fwanda_pruner": "python/fwanda_pruner"},
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)
