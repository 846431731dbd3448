"""Finding what to prune in a causal language model: its decoder blocks, and the weight matrices inside them."""

from __future__ import annotations

import copy
import fnmatch
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..errors import UserError, is_lost_connection, one_line
from .attributes import uncached
from .experts import CannotSplit, Slice, count_experts, fused_names, split_experts
from .shares import whole

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Target:
    """One weight matrix to prune.

    Attributes:
        name: dotted path of the module; also the key of its statistics. A slice of fused experts is named by the path
            of the experts, the index of the expert and the parameter, as in `...experts.3.down_proj`.
        block: index of the decoder block that holds the matrix.
        module: nn.Linear, or GPT-2's Conv1D, whose weight is transposed.
        slice_of: the place of the matrix if it is a slice of a 3-D parameter, else None.
    """

    name: str
    block: int
    module: nn.Module
    slice_of: Slice | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C): outputs and inputs."""
        rows, cols = self.module.weight.shape
        return (rows, cols) if isinstance(self.module, nn.Linear) else (cols, rows)

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
    """A matrix inside a block, or a part of a multimodal model, that is not pruned.

    Attributes:
        name: dotted path of the parameter, module or part.
        parameters: one matrix, or all parameters of a part.
        reason: why it is not pruned.
        block: index of the decoder block whose weights must be in memory to read a slice of fused experts; else None.
    """

    name: str
    parameters: tuple[Tensor, ...]
    reason: str
    block: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a single parameter. Of several: the total number of their weights, as a tuple of one."""
        if len(self.parameters) == 1:
            return tuple(self.parameters[0].shape)
        return (sum(p.numel() for p in self.parameters),)


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the path and the list of the model's decoder blocks, by structure alone.

    Candidates are the ModuleLists inside the module that also holds the token embedding, without those of a module that
    has a config for vision or audio: this leaves out the towers of other modalities. The one with the most parameters
    wins; if lists are nested, the outermost.

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
    prefix = _language_model_path(model, lists)
    # max() returns the first of equal items, and named_modules() lists outer modules before inner ones.
    inside = [item for item in lists.items() if item[0].startswith(prefix)]
    candidates = [item for item in inside if not _is_of_tower(model, item[0])] or inside
    return max(candidates, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _is_of_tower(model: nn.Module, path: str) -> bool:
    """Whether a module belongs to a tower for images or sound, by the class of the config of the module around it."""
    while path:
        path = path.rpartition(".")[0]
        config = getattr(model.get_submodule(path), "config", None)
        if config is not None:
            return any(word in type(config).__name__ for word in ("Vision", "Audio"))
    return False


def _language_model_path(model: nn.Module, lists: Iterable[str]) -> str:
    """Path of the innermost module that holds the token embedding and one of `lists`: "" or a path with a final dot."""
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    while path:
        path = path.rpartition(".")[0]
        if path and any(name.startswith(f"{path}.") for name in lists):
            return f"{path}."
    return ""


def find_targets(model: nn.Module) -> tuple[list[Target], list[Skipped]]:
    """List the linear layers and experts inside the decoder blocks, and the matrices there that are not pruned.

    Embeddings and the output head lie outside the blocks: they are neither pruned nor listed. The other parts of a
    multimodal model are listed as skipped. Packed matrices are left out.

    Raises:
        UserError: there is nothing to prune, or a weight is quantised or has another dtype than bf16, fp16 and fp32.
    """
    from .packed import PackedExperts, PackedLinear, packed_weights  # imports transformers

    prefix, blocks = find_blocks(model)
    shared = _shared_weights(model)
    targets, skipped = [], []
    for index, block in enumerate(blocks):
        routers = _routers(block)
        for name, module in block.named_modules(prefix=f"{prefix}.{index}"):
            if isinstance(module, PackedLinear | PackedExperts):
                continue
            if id(module) in routers:
                skipped += _skip_matrices(name, module, "a router to the experts, which stays dense")
            elif isinstance(module, (nn.Linear, _conv1d())):
                _check_linear(name, module)
                if not module.weight.numel():
                    skipped.append(Skipped(name, (module.weight,), "it has no weights"))
                elif id(module.weight) in shared:
                    skipped.append(Skipped(name, (module.weight,), "its weight is shared with another module"))
                elif not _is_linear(module):
                    reason = f"a {type(module).__name__}, which computes something else than a linear layer"
                    skipped.append(Skipped(name, (module.weight,), reason))
                else:
                    targets.append(Target(name, index, module))
            else:
                expert_targets, dense = _find_experts(name, index, block, module)
                targets += expert_targets
                skipped += dense
    if not targets and next(packed_weights(model), None) is None:
        raise UserError(f"{type(model).__name__} has no linear layers in {prefix}; this model cannot be pruned")
    return targets, skipped + _other_modalities(model, prefix)


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _is_linear(module: nn.Module) -> bool:
    """Whether a class derived from a linear layer gives outputs of its shape, [n, C] -> [n, R], without computing any.

    n is R, which the groups of a grouped layer divide. On an error the layer is taken for a linear one.
    """
    if type(module).forward in (nn.Linear.forward, _conv1d().forward) or "forward" in vars(module):
        return True
    rows, cols = Target("", 0, module).shape
    memo = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    memo |= {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=False)
        for p in module.parameters()
    }
    try:
        twin = copy.deepcopy(module, memo)  # of all but its tensors: forward() may change what it finds
        y = twin.forward(torch.empty(rows, cols, dtype=module.weight.dtype, device="meta"))
    except Exception:  # it may have no code for tensors without values
        return True
    return not isinstance(y, Tensor) or tuple(y.shape) == (rows, rows)


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of the weights that more than one module uses."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    uses = Counter(id(weight) for weight in weights if isinstance(weight, Tensor))
    return {weight for weight, count in uses.items() if count > 1}


def _check_linear(name: str, module: nn.Module) -> None:
    if not isinstance(module.weight, Tensor):
        raise UserError(f"{name}.weight must be a tensor, got {type(module.weight).__name__}; load the model again")
    if not isinstance(module.weight, nn.Parameter) and "weight" in module._buffers:
        raise UserError(f"{name}.weight is a buffer; make it a parameter: module.weight = nn.Parameter(weight)")
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


def _find_experts(name: str, index: int, block: nn.Module, module: nn.Module) -> tuple[list[Target], list[Skipped]]:
    """The experts of a module of a block that is not a linear layer; if it holds none, its matrices as skipped."""
    try:
        with whole(block) if fused_names(module) else nullcontext():
            experts = split_experts(module)
    except CannotSplit as error:
        return [], _skip_matrices(name, module, str(error))
    if experts is None:
        return [], _skip_matrices(name, module, f"a parameter of {type(module).__name__}, which is not a linear layer")
    targets = []
    for expert in range(count_experts(module)):
        for key, layers in experts.layers.items():
            _check_dtype(f"{name}.{key}", layers[expert].weight)
            path = f"{name}.{expert}" if key == "weight" else f"{name}.{expert}.{key}"
            targets.append(Target(path, index, layers[expert], Slice(experts, f"{name}.{key}", expert)))
    return targets, []


def _skip_matrices(name: str, module: nn.Module, reason: str) -> list[Skipped]:
    """The module's own matrices as skipped. Vectors, such as biases, are not listed."""
    matrices = [(key, p) for key, p in module.named_parameters(recurse=False) if p.dim() > 1]
    return [Skipped(f"{name}.{key}", (p,), reason) for key, p in matrices]


def _routers(block: nn.Module) -> set[int]:
    """Ids of routers and their submodules: modules beside E experts whose only matrix has E outputs, or one."""
    routers: set[int] = set()
    for parent in block.modules():
        counts = {count_experts(child) for child in parent.children()} - {0}
        for child in parent.children() if counts else ():
            matrices = [p for p in child.parameters() if p.dim() > 1]
            if len(matrices) == 1 and matrices[0].dim() == 2 and matrices[0].shape[0] in counts | {1}:
                routers |= {id(module) for module in child.modules()}
    return routers


def _other_modalities(model: nn.Module, blocks: str) -> list[Skipped]:
    """The parts of a multimodal model beside the language model, such as its vision tower, as skipped."""
    if not is_multimodal(model):
        return []
    heads = (model.get_output_embeddings(), model.get_input_embeddings())
    skipped, path = [], ""
    for step in _language_model_path(model, [f"{blocks}."]).split(".")[:-1]:
        parent = model.get_submodule(path)
        for name, child in parent.named_children():
            parameters = tuple(child.parameters())
            if name != step and child not in heads and parameters:
                reason = "not part of the language model, left dense"
                skipped.append(Skipped(f"{path}.{name}".lstrip("."), parameters, reason))
        path = f"{path}.{step}".lstrip(".")
    return skipped


def is_multimodal(model: nn.Module) -> bool:
    """Whether the language model is only a part of the model."""
    return model.config.get_text_config() is not model.config


def select_targets(
    targets: list[Target], skipped: list[Skipped], config: PruneConfig
) -> tuple[list[Target], list[Skipped]]:
    """Apply config.include and config.exclude: targets that are not selected become skipped.

    Raises:
        UserError: a glob matches no target, or no target is left.
    """
    names = [target.name for target in targets]
    for flag, globs in (("include", config.include), ("exclude", config.exclude)):
        for glob in globs:
            if not fnmatch.filter(names, glob):
                some = ", ".join([*names[:2], names[-1]])
                raise UserError(f"--{flag} {glob!r} matches none of {len(names)} matrices, e.g. {some}")
    selected, unselected = [], []
    for target in targets:
        excluding = next((glob for glob in config.exclude if fnmatch.fnmatchcase(target.name, glob)), None)
        if excluding is not None:
            unselected.append(_unselected(target, f"excluded by --exclude {excluding}"))
        elif config.include and not any(fnmatch.fnmatchcase(target.name, glob) for glob in config.include):
            unselected.append(_unselected(target, "not matched by --include"))
        else:
            selected.append(target)
    if names and not selected:
        raise UserError("--include and --exclude leave no matrix to prune")
    return selected, unselected + skipped


def _unselected(target: Target, reason: str) -> Skipped:
    return Skipped(target.name, (target.weight,), reason, None if target.slice_of is None else target.block)


def check_model(model: nn.Module, targets: list[Target], config: PruneConfig) -> None:
    """Refuse columns that the pattern does not divide, blocks that text never reaches, and dtypes that do not fit.

    Raises:
        UserError: naming the matrix, the block or the dtypes.
    """
    check_columns(targets, config)
    check_dtypes(model)
    if is_multimodal(model):
        _check_runs_on_text(model, {target.block for target in targets})


def check_columns(targets: Iterable[Target], config: PruneConfig) -> None:
    """Refuse columns that the pattern does not divide.

    Raises:
        UserError: naming the matrix.
    """
    for target in targets:
        _, cols = target.shape
        if config.nm and config.nm_tail == "error" and cols % config.nm[1]:
            raise UserError(
                f"{target.name} has {cols} columns, pattern {config.pattern} needs a multiple of {config.nm[1]}; "
                f"choose another pattern or --nm-tail dense"
            )


def check_target_dtypes(targets: Iterable[Target]) -> None:
    """Refuse to prune matrices of several dtypes: a model that casts between them is not walked block by block.

    Raises:
        UserError: naming a matrix of each dtype, and what to do.
    """
    first: dict[torch.dtype, str] = {}
    for target in targets:
        first.setdefault(target.weight.dtype, target.name)
    if len(first) > 1:
        raise UserError(
            f"the matrices to prune have {len(first)} dtypes ({_examples(first)}); convert all to one, e.g. by "
            f"model.to(torch.{_short(next(iter(first)))}), or leave those of the others out by exclude"
        )


def check_dtypes(model: nn.Module) -> None:
    """Refuse a model whose weights have several dtypes, if it does not run with them. Some do, as with fp32 routers.

    Raises:
        UserError: naming a weight of each dtype, and what to do.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            first.setdefault(parameter.dtype, name)
    if len(first) < 2:
        return
    try:
        run_two_tokens(model)
    except (RuntimeError, TypeError, ValueError) as error:
        if is_lost_connection(error):
            raise
        raise UserError(
            f"the weights have {len(first)} dtypes ({_examples(first)}), and the model cannot run with them "
            f"({one_line(error, 100)}); convert all to one, e.g. by model.to(torch.{_short(next(iter(first)))})"
        ) from error


def _examples(first: dict[torch.dtype, str]) -> str:
    return ", ".join(f"{name} is {_short(dtype)}" for dtype, name in first.items())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def run_two_tokens(model: nn.Module) -> None:
    """Runs a model on a window of two tokens; it raises what the model raises."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    model(input_ids=ids, **uncached(model))


def _check_runs_on_text(model: nn.Module, needed: set[int]) -> None:
    """Refuse a multimodal model that does not run all `needed` blocks if it gets text alone."""
    prefix, blocks = find_blocks(model)
    called = set()
    handles = [
        block.register_forward_pre_hook(lambda *_args, index=index: called.add(index))
        for index, block in enumerate(blocks)
    ]
    try:
        run_two_tokens(model)
    except Exception as error:  # models that miss their images raise anything
        line = one_line(error, 200)
        raise UserError(
            f"{type(model).__name__} cannot run on text alone, as pruning it would need ({line})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if missed := sorted(needed - called):
        raise UserError(
            f"{type(model).__name__} does not run {prefix}.{missed[0]} on text alone, so text cannot show what to "
            f"prune there; exclude these {len(missed)} of {len(blocks)} blocks, e.g. --exclude '{prefix}.{missed[0]}.*'"
        )


def check_length(model: nn.Module, seqlen: int) -> None:
    """Refuse windows that are longer than a model's table of learned positions.

    Raises:
        UserError: seqlen is too large; the message names the largest.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or seqlen <= most:
        return
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # OPT has two rows more than positions.
    if any(0 <= table.num_embeddings - most <= 8 for table in tables):
        raise UserError(
            f"{type(model).__name__} has {most} positions, got windows of {seqlen} tokens; use --seqlen {most}"
        )
