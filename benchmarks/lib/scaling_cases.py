"""What bench_scaling.py runs, and what the cost model says of it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from . import cost
from .cost import Cost, Engine, Text
from .rates import Card
from .shapes import SHAPES
from .sizes import shape_of

SETTINGS = {
    "fwanda": {"method": "fwanda", "allocation": "row", "compile": "on", "micro_batch": "2"},
    "sparsegpt": {"method": "sparsegpt"},
    "auto": {"method": "fwanda", "allocation": "auto", "compile": "off"},
    "sharded": {"method": "fwanda", "allocation": "row", "compile": "off"},
}


@dataclass(frozen=True)
class Case:
    """A key of SETTINGS, and a key of SHAPES."""

    kind: str
    shape: str

    @classmethod
    def parse(cls, text: str) -> Case:
        kind, _, shape = text.partition(":")
        if kind not in SETTINGS or shape not in SHAPES:
            raise argparse.ArgumentTypeError(f"must be KIND:SHAPE of {', '.join(SETTINGS)} and a shape, got {text!r}")
        return cls(kind, shape)

    @property
    def measures(self) -> bool:
        """Whether statistics are what is timed."""
        return self.kind in ("fwanda", "sharded")


def engine_of(case: Case, card: Card | None, ranks: int, text: Text) -> Engine:
    """How the ranks run a case: blocks run again in the backward pass only where the memory demands it."""
    if case.kind != "sharded" or ranks == 1:
        return Engine("resident", ranks, compiled=case.kind == "fwanda")
    engine = Engine("sharded", ranks)
    return engine if fits(case, card, engine, text) else replace(engine, checkpointing=True)


def predicted(case: Case, card: Card | None, engine: Engine, text: Text) -> Cost | None:
    """None on a card that the cost model does not know, and for a search."""
    if card is None or case.kind == "auto":
        return None
    stage = cost.calibration if case.measures else cost.sparsegpt
    return stage(card, shape_of(case.shape), engine, text)


def fits(case: Case, card: Card | None, engine: Engine, text: Text) -> bool:
    """Whether a GPU has the memory; True on a card that the cost model does not know."""
    expected = predicted(case, card, engine, text)
    return expected is None or cost.fits(card, expected.peak)
