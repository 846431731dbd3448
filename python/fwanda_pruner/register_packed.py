"""Registers packed models with transformers when that is imported, so that importing fwanda_pruner stays cheap."""

from __future__ import annotations

import importlib
import sys

# Without registration, transformers prints this name before it fails on the shapes of the weights.
METHOD = "fwanda_packed (install fwanda-kernels, then import fwanda_pruner)"
_HOME = "transformers.modeling_utils"  # every loader of models imports it, after the tables of quantizers


def register_when_possible() -> None:
    """Register now if transformers is imported, else right after it has imported what loads models."""
    if getattr(sys.modules.get(_HOME), "PreTrainedModel", None) is not None:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    importlib.import_module(".model.packed_quantizer", __package__).register()


class _Finder:
    """A finder that makes the loader of one module call _register() afterwards, and finds no other module."""

    def find_spec(self, name, path=None, target=None):
        if name != _HOME:
            return None
        import importlib.util  # takes 8 ms

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        _register()
