"""What adds up while windows go through a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn


class Sums:
    """Named tensors that add up over calibration windows.

    The window loop enters the sums before its first window and leaves them after its last. In between, the hooks of a
    subclass add what each window contributes. All other code sees only named tensors: an interrupted run saves
    tensors() and goes on from load(); merge() adds the sums of other windows, for example of another length.

    Attributes:
        modules: the modules that the hooks watch.
        uncompiled: what cannot be measured in blocks that torch.compile has compiled; None: the hooks work there too.
        knows_inputs: whether compiled blocks may run right after entering. Otherwise an uncompiled pass must first show
            which modules share an input.
        owners: name -> the only rank that has the tensor after the loop, for tensors that cost() gives a cost.
    """

    modules: Sequence[nn.Module] = ()
    uncompiled: str | None = None
    knows_inputs = False

    def __init__(self):
        self._totals: dict[str, Tensor] = {}
        self.owners: dict[str, int] = {}

    def begin(self, first: int, last: int) -> None:
        """Called before the sums are entered: the next tokens are [first, last) of all windows."""

    def __enter__(self) -> Sums:
        return self

    def __exit__(self, *_) -> None:
        pass

    def tensors(self) -> dict[str, Tensor]:
        """The sums so far, by unique names, on the device where they add up."""
        return dict(self._totals)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the sums by these; the tensors may be added to."""
        self._totals = dict(tensors)

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors() of other windows."""
        for name, tensor in tensors.items():
            self._totals[name] = self._totals[name] + tensor if name in self._totals else tensor

    def clear(self) -> None:
        """Start again from nothing."""
        self._totals = {}

    def token_counts(self) -> dict[str, int]:
        """Tokens that each module saw, by its name, where the sums know it."""
        return {}

    def cost(self, name: str, shape: tuple[int, ...]) -> float | None:
        """Relative time of the work on a tensor, which one rank does for all; None: every rank needs the tensor."""
        return None
