"""The names under which a model holds its tensors, compared with those that loading it again looks for."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..errors import UserError
from .packed import EXPERT, packed_weights


def check_names(model: nn.Module) -> None:
    """Refuses a model that lacks a tensor of its class and config: what is saved of it would not load.

    A module that was wrapped or compiled has its tensors under other names, and one that is parametrised computes its
    weight from others. A class that cannot be made from its config alone is not compared.

    Raises:
        UserError: naming the first such tensor, and its module.
    """
    held = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    packed = filter(None, (EXPERT.fullmatch(name) for name, _, _ in packed_weights(model)))
    held |= {f"{match[1]}.{match[2]}" for match in packed}
    lost = next((name for name in _expected_names(model) if name not in held), None)
    if lost is None:
        return
    modules = dict(model.named_modules())
    path = lost
    while path not in modules:
        path = path.rpartition(".")[0]
    raise UserError(
        f"{path or 'the model'} ({type(modules[path]).__name__}) does not hold {lost}, which the saved model needs to "
        f"be loaded; undo what wraps, compiles or parametrises the module, and save again"
    )


def _expected_names(model: nn.Module) -> list[str]:
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return list(type(model)(copy.deepcopy(model.config)).state_dict())
    except Exception:  # the code of a model can raise anything
        return []
