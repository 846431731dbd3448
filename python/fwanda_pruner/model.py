"""What there is to prune in a causal language model: its repeated blocks and the linear layers inside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import PruneConfig
from .errors import UserError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Target:
    """One weight matrix to prune.

    Attributes:
        name: dotted path of the module; also the key of its statistics.
        block: index of the decoder block that holds it.
        module: nn.Linear, or the transposed Conv1D of GPT-2.
    """

    name: str
    block: int
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """[R, C] view of the parameter: R outputs, C inputs."""
        weight = self.module.weight.detach()
        return weight if isinstance(self.module, nn.Linear) else weight.T


@dataclass(frozen=True)
class Skipped:
    """A matrix inside a block that is not pruned, and why."""

    name: str
    parameter: Tensor
    reason: str


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The model's list of decoder blocks, by structure: the outermost ModuleList that holds most parameters.

    Raises:
        UserError: the model has no ModuleList.
    """
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of decoder blocks (nn.ModuleList); this model cannot be pruned"
        )
    # max() returns the first of equals, and named_modules() lists the outer before the inner
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def find_targets(model: nn.Module) -> tuple[list[Target], list[Skipped]]:
    """All linear layers inside the decoder blocks, and the other matrices there with the reason they are left alone.

    Embeddings and the output head lie outside the blocks and are never touched.

    Raises:
        UserError: there is nothing to prune, or a weight is quantised or not floating.
    """
    from transformers.pytorch_utils import Conv1D

    prefix, blocks = find_blocks(model)
    uses = Counter(
        id(module.weight) for module in model.modules() if isinstance(getattr(module, "weight", None), Tensor)
    )
    targets, skipped = [], []
    for index, block in enumerate(blocks):
        for name, module in block.named_modules(prefix=f"{prefix}.{index}"):
            if isinstance(module, (nn.Linear, Conv1D)):
                if not isinstance(module.weight, nn.Parameter) or not module.weight.is_floating_point():
                    kind = f"{type(module).__name__} with a weight of {module.weight.dtype}"
                    raise UserError(
                        f"{name} is quantised or parametrised ({kind}); prune the original checkpoint, or remove the "
                        f"parametrisation first"
                    )
                if module.weight.dtype not in _DTYPES:
                    raise UserError(f"{name}.weight is {module.weight.dtype}; load the model in bf16, fp16 or fp32")
                if uses[id(module.weight)] > 1:
                    skipped.append(Skipped(name, module.weight, "its weight is shared with another module"))
                else:
                    targets.append(Target(name, index, module))
                continue
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() >= 2:
                    reason = f"a parameter of {type(module).__name__}, which is not a linear layer"
                    skipped.append(Skipped(f"{name}.{key}", parameter, reason))
    if not targets:
        raise UserError(f"{type(model).__name__} has no linear layers in {prefix}; this model cannot be pruned")
    return targets, skipped


def check_model(model: nn.Module, targets: list[Target], config: PruneConfig) -> None:
    """Refuse parameters with NaN or inf, and columns that the pattern does not divide.

    Raises:
        UserError: naming the matrix.
    """
    for target in targets:
        cols = target.weight.shape[1]
        if config.nm and config.nm_tail == "error" and cols % config.nm[1]:
            raise UserError(
                f"{target.name} has {cols} columns, pattern {config.pattern} needs a multiple of {config.nm[1]}; "
                f"choose another pattern or --nm-tail dense"
            )
    named = dict(model.named_parameters())
    finite = torch.stack([torch.isfinite(p).all() for p in named.values()]).tolist()
    for name, good in zip(named, finite, strict=True):
        if not good:
            raise UserError(f"{name} has NaN or inf values: the checkpoint is broken, or too large for its dtype")


def check_length(model: nn.Module, seqlen: int) -> None:
    """Refuse windows longer than the table of a model with learned positions.

    Raises:
        UserError: saying how long they may be.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or seqlen <= most:
        return
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # OPT keeps two rows more than it has positions
    if any(0 <= table.num_embeddings - most <= 8 for table in tables):
        raise UserError(
            f"{type(model).__name__} has {most} positions, got windows of {seqlen} tokens; use --seqlen {most}"
        )
