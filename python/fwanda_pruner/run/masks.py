"""The masks of a pruned model, read from its weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ..errors import UserError
from ..model.arguments import expect_model, expect_type
from ..model.packed import expect_dense
from ..model.shares import whole
from ..model.targets import find_blocks, find_targets
from ..report.record import Report


def masks(model: nn.Module, report: Report) -> Iterator[tuple[str, Tensor]]:
    """Masks of the pruned matrices of a model, one at a time, so that no more than one takes memory.

    `mask.sum(1)` is how many weights each row keeps.

    Args:
        model: that prune() has pruned.
        report: what prune() returned, or Report.load() of the saved folder.

    Yields:
        The name of each matrix, as in report.matrices; and its mask, [R, C] bool on the device of the weight, R outputs
        and C inputs: True where the weight is not 0. So a kept weight that is 0 counts as removed.

    Raises:
        UserError: the model has not the matrices of the report, is packed, or was changed between two masks.
    """
    expect_model(model)
    expect_dense(model)
    expect_type("report", report, Report, "give what prune() returned", needed=True)
    blocks = find_blocks(model)[1]
    weights = {target.name: target for target in find_targets(model)[0]}
    for row in report.matrices:
        if row.skipped is not None:
            continue
        target = weights.get(row.name)
        try:
            if target is None or tuple(target.shape) != tuple(row.shape):
                raise UserError(f"the model has no matrix {row.name} {list(row.shape)}: the report is of another model")
            with whole(blocks[target.block]):
                mask = target.weight != 0
        except (AttributeError, IndexError) as error:
            raise UserError(f"{row.name} is gone: the model was changed between two masks; read them again") from error
        yield row.name, mask
