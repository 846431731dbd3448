"""The processes that share a run: which windows each has, how their sums are merged, and which of them writes.

A run of one process uses the same class: it then has all windows, and every method returns the process's own values.
So the other modules make the same calls for one process and for several.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import OtherRankError, UserError
from ..notes import noted, warn
from .sums import Sums

T = TypeVar("T")
GROUPS = 16  # of windows; constant, so that the number of processes does not change the sums


class Group(NamedTuple):
    """Neighbouring windows that one process adds up.

    Attributes:
        number: of the group, from 0.
        windows: their positions.
    """

    number: int
    windows: range


class Node(NamedTuple):
    """The merged groups [index << level, (index + 1) << level), in the order of the windows."""

    level: int
    index: int

    @property
    def first(self) -> int:
        return self.index << self.level

    @property
    def sibling(self) -> Node:
        return Node(self.level, self.index ^ 1)

    @property
    def parent(self) -> Node:
        return Node(self.level + 1, self.index >> 1)


class Merging:
    """Merges the sums of groups in pairs of neighbours: groups 0 and 1, 2 and 3, then these pairs, and so on.

    The order of the additions does not depend on which process has which group: a process merges the pairs that it has,
    and Ranks.merge() merges the rest. At most one node of each level waits for its sibling.

    Args:
        sums: used to merge: what they hold is overwritten.
    """

    def __init__(self, sums: Sums):
        self._sums = sums
        self.nodes: dict[Node, dict[str, Tensor]] = {}

    def add(self, node: Node, tensors: Mapping[str, Tensor]) -> None:
        """Adds the sums of a node, and merges it with its sibling if that is there."""
        if node.sibling not in self.nodes:
            self.nodes[node] = dict(tensors)
            return
        other = self.nodes.pop(node.sibling)
        self.add(node.parent, self._merged(*((other, tensors) if node.index & 1 else (tensors, other))))

    def total(self) -> dict[str, Tensor]:
        """The sums of all nodes, in order; those without a sibling come last."""
        found: dict[str, Tensor] = {}
        for node in sorted(self.nodes, key=lambda node: node.first):
            found = self._merged(found, self.nodes[node])
        return found

    def _merged(self, earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._sums.load(earlier)
        self._sums.merge(later)
        return self._sums.tensors()


class Ranks:
    """One process of a run, and the operations that it performs together with the others.

    Every method must be called by all processes, in the same order.

    Args:
        rank: number of this process.
        size: number of processes.
        group: of torch.distributed, for values and tensors on the CPU; None if this process is alone.
        cuda: whether torch.distributed also carries tensors on GPUs.

    Attributes:
        rank, size: as given.
        alone: whether there is no process group. All windows are then one group.
        first: whether this process writes files and shows progress.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, *, cuda: bool = False):
        self.rank, self.size = rank, size
        self.alone, self.first = group is None, rank == 0
        self._group, self._cuda = group, cuda

    @property
    def started(self) -> str:
        """How this process was started. The order in which sums add up depends on it."""
        return "without torchrun" if self.alone else "by torchrun"

    @classmethod
    def current(cls) -> Ranks:
        """The process group of torch.distributed that this process has joined; alone if there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        backends = str(dist.get_backend_config())
        return cls(dist.get_rank(), dist.get_world_size(), _cpu_group(backends), cuda="nccl" in backends)

    def groups(self, count: int, unit: int = 1) -> list[Group]:
        """The groups of this process; it may have none.

        Args:
            count: number of windows.
            unit: windows in a pass. Groups consist of whole passes, so that all passes but the last have equal sizes.
        """
        groups = self._all_groups(count, unit)
        return groups[-(-self.rank * len(groups) // self.size) : -(-(self.rank + 1) * len(groups) // self.size)]

    def _all_groups(self, count: int, unit: int) -> list[Group]:
        if self.alone:
            return [Group(0, range(count))]
        passes = -(-count // unit)
        number = min(GROUPS, passes)
        ends = [min(count, group * passes // number * unit) for group in range(number + 1)]
        return [Group(group, range(ends[group], ends[group + 1])) for group in range(number)]

    def pass_sizes(self, count: int, unit: int) -> list[int]:
        """The different numbers of windows in passes of `unit` windows, over the groups of all processes."""
        lengths = {len(group.windows) for group in self._all_groups(count, unit)}
        return sorted({size for length in lengths for size in (min(unit, length), length % unit)} - {0})

    def share(self, compute: Callable[[], T]) -> T:
        """Returns on all processes what the first one computes. Tensors must lie on the CPU.

        Raises:
            UserError: on all processes, if `compute` raises it on the first.
        """
        if self.alone:
            return compute()
        outcome: list = [None, None]
        if self.first:
            try:
                outcome[0] = compute()
            except UserError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        value, error = outcome
        if error is not None:
            raise error if self.first else OtherRankError(str(error))
        return value

    def gather(self, value: T) -> list[T]:
        """The value of each process, by rank."""
        if self.alone:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def share_notes(self) -> None:
        """Gives every process the warnings of all others; the first shows them."""
        if not self.alone:
            for note in [note for notes in self.gather(noted()) for note in notes]:
                warn(note)

    def check_same(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Refuses a run whose processes differ.

        Args:
            facts: gives name -> what must be the same on all processes; not called if there is one process.

        Raises:
            UserError: naming the process and what differs.
        """
        if self.size == 1:
            return
        first, *others = self.gather(dict(facts()))
        for rank, theirs in enumerate(others, 1):
            for name in {**first, **theirs}:
                if theirs.get(name) != first.get(name):
                    raise UserError(f"rank {rank} differs from rank 0 in {name}: give all ranks the same")

    def merge(self, sums: Sums, merging: Merging, device: torch.device) -> None:
        """Replaces the sums by those of all processes, in the order of the windows.

        A tensor for which sums.cost() gives a cost goes to one process only: see Sums.owners.

        Args:
            sums: of this process.
            merging: holds the sums of its groups.
            device: where to put received tensors that did not lie on the CPU.
        """
        if self.alone:
            return
        own = {node: {name: _Form.of(t) for name, t in tensors.items()} for node, tensors in merging.nodes.items()}
        held = {node: (rank, forms) for rank, nodes in enumerate(self.gather(own)) for node, forms in nodes.items()}
        nodes = sorted(held, key=lambda node: node.first)
        forms = {name: form for node in nodes for name, form in held[node][1].items()}
        owners = self._owners({name: sums.cost(name, form.shape) for name, form in forms.items()})
        everywhere = [name for name, owner in owners.items() if owner is None]
        received = Merging(sums)
        for node in nodes:
            source, there = held[node]
            tensors = merging.nodes.get(node, {})
            part = [name for name in everywhere if name in there]
            got = self._broadcast([tensors.get(name) for name in part], [there[n] for n in part], source, device)
            received.add(node, dict(zip(part, got, strict=True)))
        total = received.total()
        for name in (name for name, owner in owners.items() if owner is not None):
            received = Merging(sums)
            for node in nodes:
                source, there = held[node]
                tensor = merging.nodes.get(node, {}).pop(name, None)
                if name in there:
                    tensor = self._moved(tensor, there[name], source, owners[name], device)
                received.add(node, {} if tensor is None else {name: tensor})
            if owners[name] == self.rank:
                total |= received.total()
        sums.load(total)
        sums.owners = {name: owner for name, owner in owners.items() if owner is not None}

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Overwrites a tensor by that of the process `source`."""
        if self.size > 1:
            form = _Form.of(tensor)
            (got,) = self._broadcast([tensor], [form], source, tensor.device)
            if self.rank != source:
                tensor.copy_(got)

    def _owners(self, costs: Mapping[str, float | None]) -> dict[str, int | None]:
        """name -> the process that gets the tensor; None: all. Costly ones first, each to the least loaded process."""
        loads = [0.0] * self.size
        owners: dict[str, int | None] = dict.fromkeys(costs)
        for name in sorted((n for n, cost in costs.items() if cost is not None), key=lambda n: -costs[n]):
            owners[name] = owner = loads.index(min(loads))
            loads[owner] += costs[name]
        return owners

    def _broadcast(
        self, tensors: Sequence[Tensor | None], forms: Sequence[_Form], source: int, device: torch.device
    ) -> list[Tensor]:
        """The tensors of one process, on all of them: one message for those on the CPU, one for those on GPUs."""
        found: dict[int, Tensor] = {}
        for on_cpu in (True, False):
            places = [i for i, form in enumerate(forms) if form.on_cpu is on_cpu]
            if not places:
                continue
            wanted = torch.device("cpu") if on_cpu else device
            sizes = [forms[i].bytes for i in places]
            if self.rank == source:
                flat = torch.cat([_bytes(tensors[i]) for i in places]).to(self._carrier(wanted))
            else:
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._carrier(wanted))
            dist.broadcast(flat, src=source, group=self._carrying(flat))
            ends = [0, *accumulate(sizes)]
            for place, start, end in zip(places, ends, ends[1:], strict=False):
                found[place] = forms[place].view(flat[start:end]).to(wanted)
        return [found[i] for i in range(len(forms))]

    def _moved(
        self, tensor: Tensor | None, form: _Form, source: int, owner: int, device: torch.device
    ) -> Tensor | None:
        """A tensor of the process `source`, on the process `owner`; None on all others."""
        if owner == source:
            return tensor
        wanted = torch.device("cpu") if form.on_cpu else device
        if self.rank == source:
            flat = _bytes(tensor).to(self._carrier(wanted))
            dist.send(flat, dst=owner, group=self._carrying(flat))
        elif self.rank == owner:
            flat = torch.empty(form.bytes, dtype=torch.uint8, device=self._carrier(wanted))
            dist.recv(flat, src=source, group=self._carrying(flat))
            return form.view(flat).to(wanted)
        return None

    def _carrier(self, device: torch.device) -> torch.device:
        """Device of a message that carries tensors of a device."""
        return device if self._cuda else torch.device("cpu")

    def _carrying(self, message: Tensor) -> dist.ProcessGroup | None:
        return self._group if message.device.type == "cpu" else None  # None: all processes, by NCCL


ALONE = Ranks()


class _Form(NamedTuple):
    """What a process must know of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """A tensor of its own from [bytes] uint8."""
        return flat.clone().view(self.dtype).view(self.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


_cpu_groups: dict[Hashable, dist.ProcessGroup] = {}  # of the process groups that carry no tensors on the CPU


def _cpu_group(backends: str) -> dist.ProcessGroup:
    """A process group that carries values and tensors on the CPU."""
    world = dist.group.WORLD
    if "gloo" in backends or "mpi" in backends:
        return world
    if world not in _cpu_groups:
        _cpu_groups.clear()
        _cpu_groups[world] = dist.new_group(backend="gloo")
    return _cpu_groups[world]
