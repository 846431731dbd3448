"""The methods and allocations by name, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """Properties of a pruning method.

    Attributes:
        title: its name in the literature.
        allocations: the allocations that the method accepts; the first is its default.
        order: its default order.
        reads_inputs: it needs x2, the squared norms of the input columns.
        scores_inputs: it ranks weights by |W| times the norm of their input column, as Wanda does. It reads inputs.
        updates_weights: it prunes with a Hessian and updates the weights that stay, so it reads the calibration text
            block by block. Then `uniform` rounds in each matrix, not in each row.
        weighs_rows: it multiplies the error of each row by omega^p, so it needs omega under every allocation. Under a
            pattern, where that factor cancels, it weighs tokens instead.
    """

    title: str
    allocations: tuple[str, ...]
    order: str
    reads_inputs: bool = False
    scores_inputs: bool = False
    updates_weights: bool = False
    weighs_rows: bool = False


@dataclass(frozen=True)
class Allocation:
    """Properties of an allocation.

    Attributes:
        fixes_matrix_totals: the settings alone say how many weights each matrix keeps.
        reads_fisher: it needs omega.
        responds: it runs text through the pruned model.
    """

    fixes_matrix_totals: bool = False
    reads_fisher: bool = False
    responds: bool = False


ALLOCATIONS = {
    "layer": Allocation(fixes_matrix_totals=True),
    "uniform": Allocation(fixes_matrix_totals=True),
    "row": Allocation(fixes_matrix_totals=True, reads_fisher=True),
    "global": Allocation(reads_fisher=True),
    "response": Allocation(reads_fisher=True, responds=True),
    "auto": Allocation(reads_fisher=True, responds=True),
}
METHODS = {
    "magnitude": Method("Magnitude pruning", ("layer",), "onepass"),
    "wanda": Method("Wanda", ("uniform",), "onepass", reads_inputs=True, scores_inputs=True),
    "fwanda": Method(
        "F-Wanda",
        ("global", "row", "uniform", "response", "auto"),
        "onepass",
        reads_inputs=True,
        scores_inputs=True,
    ),
    "sparsegpt": Method("SparseGPT", ("uniform",), "sequential", updates_weights=True),
    "fsparsegpt": Method(
        "F-SparseGPT",
        ("uniform", "row", "global", "response", "auto"),
        "sequential",
        updates_weights=True,
        weighs_rows=True,
    ),
}
