"""What a long computation needs to survive an interruption. run/stage.py implements it on files."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Unfinished(Protocol):
    """Holds the state of one unfinished computation, saved about every minute."""

    def load(self) -> tuple[dict[str, Tensor], dict] | None:
        """The state where an interrupted run left it; None at a fresh start."""

    def due(self) -> bool:
        """Whether it is time to save again."""

    def save(self, tensors: dict[str, Tensor], values: dict) -> None:
        """Replaces the state."""


class Steps(Protocol[T]):
    """Holds the results of the steps of a computation, by their number."""

    def load(self, index: int) -> T | None:
        """The result of a step that an interrupted run finished; None where there is none."""

    def save(self, index: int, result: T) -> None:
        """Keeps the result of a step."""


class NoSteps(Generic[T]):
    """Keeps nothing: an interruption loses all steps."""

    def load(self, index: int) -> T | None:
        return None

    def save(self, index: int, result: T) -> None:
        pass
