"""What there is to prune in a causal language model: its repeated blocks and the linear layers inside them."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..errors import UserError, one_line
from .experts import CannotSplit, Slice, count_experts, split_experts

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Target:
    """One weight matrix to prune.

    Attributes:
        name: dotted path of the module; also the key of its statistics. Of a slice of fused experts: the path of
            the experts, the number of the expert and the name of the parameter, as `...experts.3.down_proj`.
        block: index of the decoder block that holds it.
        module: nn.Linear, or the transposed Conv1D of GPT-2.
        slice_of: where the matrix lies, if it is a slice of a 3-D parameter.
    """

    name: str
    block: int
    module: nn.Module
    slice_of: Slice | None = None

    @property
    def weight(self) -> Tensor:
        """[R, C] view of the parameter: R outputs, C inputs."""
        weight = self.module.weight.detach()
        return weight if isinstance(self.module, nn.Linear) else weight.T

    @property
    def parameter(self) -> str:
        """Dotted path of the parameter that holds the matrix."""
        return f"{self.name}.weight" if self.slice_of is None else self.slice_of.parameter


@dataclass(frozen=True)
class Skipped:
    """A matrix inside a block, or a part of a multimodal model, that is not pruned, and why."""

    name: str
    parameters: tuple[Tensor, ...]
    reason: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the one parameter; of several (their weights,)."""
        if len(self.parameters) == 1:
            return tuple(self.parameters[0].shape)
        return (sum(p.numel() for p in self.parameters),)


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The model's list of decoder blocks, by structure.

    Of the ModuleLists beside the embedding of the tokens, which the towers of other modalities are not, the outermost
    that holds most parameters.

    Raises:
        UserError: the model has no ModuleList.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of decoder blocks (nn.ModuleList); this model cannot be pruned"
        )
    prefix = _language_model(model, lists)
    # max() returns the first of equals, and named_modules() lists the outer before the inner
    beside = [(name, module) for name, module in lists.items() if name.startswith(prefix)]
    return max(beside, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _language_model(model: nn.Module, lists: Iterable[str]) -> str:
    """Path of the innermost module that holds the token embedding and a list of blocks, "" or ending with a dot."""
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    while path:
        path = path.rpartition(".")[0]
        if path and any(name.startswith(f"{path}.") for name in lists):
            return f"{path}."
    return ""


def find_targets(model: nn.Module) -> tuple[list[Target], list[Skipped]]:
    """All linear layers and experts inside the decoder blocks, and what is left alone there with the reason.

    Embeddings and the output head lie outside the blocks and are never touched. Of a multimodal model the parts beside
    the language model are listed as left alone.

    Raises:
        UserError: there is nothing to prune, or a weight is quantised or not floating.
    """
    prefix, blocks = find_blocks(model)
    shared = _shared_weights(model)
    targets, skipped = [], []
    for index, block in enumerate(blocks):
        routers = _routers(block)
        for name, module in block.named_modules(prefix=f"{prefix}.{index}"):
            if id(module) in routers:
                skipped += _left_alone(name, module, "a router to the experts, which stays dense")
            elif isinstance(module, (nn.Linear, _conv1d())):
                _check_linear(name, module)
                if id(module.weight) in shared:
                    skipped.append(Skipped(name, (module.weight,), "its weight is shared with another module"))
                else:
                    targets.append(Target(name, index, module))
            else:
                found, left = _split(name, index, module)
                targets += found
                skipped += left
    if not targets:
        raise UserError(f"{type(model).__name__} has no linear layers in {prefix}; this model cannot be pruned")
    return targets, skipped + _other_modalities(model, prefix)


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of the weights that several modules use."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    uses = Counter(id(weight) for weight in weights if isinstance(weight, Tensor))
    return {weight for weight, count in uses.items() if count > 1}


def _check_linear(name: str, module: nn.Module) -> None:
    if not isinstance(module.weight, nn.Parameter) or not module.weight.is_floating_point():
        kind = f"{type(module).__name__} with a weight of {module.weight.dtype}"
        raise UserError(
            f"{name} is quantised or parametrised ({kind}); prune the original checkpoint, or remove the "
            f"parametrisation first"
        )
    _check_dtype(f"{name}.weight", module.weight)


def _check_dtype(name: str, weight: Tensor) -> None:
    if weight.dtype not in _DTYPES:
        raise UserError(f"{name} is {weight.dtype}; load the model in bf16, fp16 or fp32")


def _split(name: str, block: int, module: nn.Module) -> tuple[list[Target], list[Skipped]]:
    """The experts of a module that is no linear layer, and the matrices in it that are none."""
    try:
        experts = split_experts(module)
    except CannotSplit as error:
        return [], _left_alone(name, module, str(error))
    if experts is None:
        return [], _left_alone(name, module, f"a parameter of {type(module).__name__}, which is not a linear layer")
    targets = []
    for index in range(count_experts(module)):
        for key, layers in experts.layers.items():
            _check_dtype(f"{name}.{key}", layers[index].weight)
            path = f"{name}.{index}" if key == "weight" else f"{name}.{index}.{key}"
            targets.append(Target(path, block, layers[index], Slice(experts, f"{name}.{key}", index)))
    return targets, []


def _left_alone(name: str, module: nn.Module, reason: str) -> list[Skipped]:
    """The module's own matrices; vectors are not worth a line."""
    matrices = [(key, p) for key, p in module.named_parameters(recurse=False) if p.dim() > 1]
    return [Skipped(f"{name}.{key}", (p,), reason) for key, p in matrices]


def _routers(block: nn.Module) -> set[int]:
    """Ids of the modules that route to experts: a single matrix beside E experts that gives E outputs, or one."""
    found: set[int] = set()
    for parent in block.modules():
        counts = {count_experts(child) for child in parent.children()} - {0}
        for child in parent.children() if counts else ():
            matrices = [p for p in child.parameters() if p.dim() > 1]
            if len(matrices) == 1 and matrices[0].dim() == 2 and matrices[0].shape[0] in counts | {1}:
                found |= {id(module) for module in child.modules()}
    return found


def _other_modalities(model: nn.Module, blocks: str) -> list[Skipped]:
    """The towers and projectors beside the language model, one line each."""
    if not is_multimodal(model):
        return []
    heads = (model.get_output_embeddings(), model.get_input_embeddings())
    found, path = [], ""
    for step in _language_model(model, [f"{blocks}."]).split(".")[:-1]:
        parent = model.get_submodule(path)
        for name, child in parent.named_children():
            parameters = tuple(child.parameters())
            if name != step and child not in heads and parameters:
                reason = "not part of the language model, left dense"
                found.append(Skipped(f"{path}.{name}".lstrip("."), parameters, reason))
        path = f"{path}.{step}".lstrip(".")
    return found


def is_multimodal(model: nn.Module) -> bool:
    """Whether the language model is a part of the model."""
    return model.config.get_text_config() is not model.config


def select_targets(
    targets: list[Target], skipped: list[Skipped], config: PruneConfig
) -> tuple[list[Target], list[Skipped]]:
    """The targets that --include and --exclude leave; the others join what is skipped.

    Raises:
        UserError: a glob matches no target, or none is left.
    """
    names = [target.name for target in targets]
    for flag, globs in (("include", config.include), ("exclude", config.exclude)):
        for glob in globs:
            if not fnmatch.filter(names, glob):
                some = ", ".join([*names[:2], names[-1]])
                raise UserError(f"--{flag} {glob!r} matches none of {len(names)} matrices, e.g. {some}")
    chosen, left = [], []
    for target in targets:
        excluding = next((glob for glob in config.exclude if fnmatch.fnmatchcase(target.name, glob)), None)
        if excluding is not None:
            left.append(Skipped(target.name, (target.weight,), f"excluded by --exclude {excluding}"))
        elif config.include and not any(fnmatch.fnmatchcase(target.name, glob) for glob in config.include):
            left.append(Skipped(target.name, (target.weight,), "not matched by --include"))
        else:
            chosen.append(target)
    if not chosen:
        raise UserError("--include and --exclude leave no matrix to prune")
    return chosen, left + skipped


def check_model(model: nn.Module, targets: list[Target], config: PruneConfig) -> None:
    """Refuse parameters with NaN or inf, columns that the pattern does not divide, and blocks that text does not reach.

    Raises:
        UserError: naming the matrix or the block.
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
    if is_multimodal(model):
        _check_runs_on_text(model, {target.block for target in targets})


@torch.no_grad()
def _check_runs_on_text(model: nn.Module, needed: set[int]) -> None:
    """Refuse a multimodal model that does not run the needed blocks on text alone."""
    prefix, blocks = find_blocks(model)
    called = set()
    handles = [
        block.register_forward_pre_hook(lambda *_args, index=index: called.add(index))
        for index, block in enumerate(blocks)
    ]
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
        model(input_ids=ids, use_cache=False)
    except Exception as error:  # whatever a model raises that misses its images
        line = one_line(error, 200)
        raise UserError(f"{type(model).__name__} cannot run on text alone, which pruning it needs ({line})") from error
    finally:
        for handle in handles:
            handle.remove()
    if missed := sorted(needed - called):
        raise UserError(
            f"{type(model).__name__} does not run {prefix}.{missed[0]} on text alone, so text cannot tell what to "
            f"prune there; leave {len(missed)} of {len(blocks)} blocks out, as by --exclude '{prefix}.{missed[0]}.*'"
        )


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
