"""Which activations are computed again in the backward pass, instead of being kept until then.

A *cut* is a position between two groups after which only one of the tensors before it is read,
apart from the input of the network: in a residual network, the output of a block. Some cuts are
selected, and their tensors are kept. They divide the groups into segments. Before the backward pass
of a segment, the forward pass of its groups runs again, from the kept tensor on. What it writes has
second buffers, so the first ones are free after the forward pass. The groups after the last
selected cut run only once, because their backward pass follows at once.

Statistics over the minibatch are kept, and dropout masks follow from the step. Therefore both
passes compute the same bits.

Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dptrain.network.network import INPUT
from dptrain.plan.lowering import BACKWARD_ORDER, Access, Group, GroupNeeds, Phase

SECOND = "recomputed/"
"""Prefix of the names of second buffers."""

_NOTHING = Access()


@dataclass(frozen=True)
class Recomputation:
    """What is computed again.

    Attributes:
        buffers: names of the buffers that have a second one.
        segments: the groups whose forward pass runs again before the backward pass of a group, by
            the position of the latter; positions count groups in the order of the forward pass.
    """

    buffers: frozenset[str] = frozenset()
    segments: Mapping[int, tuple[int, ...]] | None = None

    def second(self, name: str) -> str:
        """Return the name of the buffer that the backward pass reads."""
        return f"{SECOND}{name}" if name in self.buffers else name

    def before(self, position: int) -> tuple[int, ...]:
        """Return the groups that run again before the backward pass of the group at a position."""
        return (self.segments or {}).get(position, ())


class Recomputer:
    """Selects cuts and collects what is computed again between them.

    Args:
        groups: in the order of the forward pass.
        needs: what each group needs, by name.
        trained: names of the tensors that have a gradient.
        buffer_of: returns the buffer of a local name of a group.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        needs: Mapping[str, GroupNeeds],
        trained: frozenset[str],
        buffer_of: Callable[[Group, str], str],
    ) -> None:
        self.groups, self.needs, self.trained = groups, needs, trained
        self.buffer_of = buffer_of
        self.lives = self._lives()

    def _lives(self) -> dict[str, tuple[int, int]]:
        """Return the first group that writes each tensor, and the last one that reads it."""
        lives: dict[str, tuple[int, int]] = {}
        for position, group in enumerate(self.groups):
            inputs = [local for local in group.tensors if local.startswith("x")]
            for name in (self.buffer_of(group, local) for local in (*inputs, "y")):
                lives[name] = lives.get(name, (position, position))[0], position
        output = self.buffer_of(self.groups[-1], "y")
        lives[output] = lives[output][0], len(self.groups)  # The loss reads it.
        lives.pop(INPUT, None)
        return lives

    def cuts(self) -> list[int]:
        """Return the positions of the groups after which only one tensor is read."""
        changes = [0] * (len(self.groups) + 1)
        for first, last in self.lives.values():
            changes[first] += 1
            changes[last] -= 1
        counts = list(accumulate(changes))
        return [position for position in range(len(self.groups) - 1) if counts[position] == 1]

    def select(self, sizes: Sequence[int], limit: int) -> list[int]:
        """Return cuts that divide the groups into segments of about `limit` bytes.

        Args:
            sizes: bytes that the forward pass of each group writes.
            limit: a segment ends at the first cut at which it has this size.
        """
        total, selected, cuts = 0, [], set(self.cuts())
        for position, size in enumerate(sizes):
            total += size
            if position in cuts and total >= limit:
                selected.append(position)
                total = 0
        return selected

    def collect(self, cuts: Sequence[int]) -> Recomputation:
        """Return what is computed again between selected cuts."""
        if not cuts:
            return Recomputation()
        buffers = frozenset(self._buffers(cuts))
        segments: dict[int, tuple[int, ...]] = {}
        for first, last in pairwise([-1, *cuts]):
            again = self._needed_again(range(first + 1, last + 1), buffers)
            reader = self._first_reader(last, again, buffers)
            segments[reader] = (*again, *segments.get(reader, ()))
        return Recomputation(buffers, segments)

    def _first_reader(self, last: int, again: Sequence[int], buffers: frozenset[str]) -> int:
        """Return the group whose backward pass is the first to read results of a segment.

        It is the last group of the segment, or one after it that computes sums for that.
        """
        written: set[str] = set()
        for position in again:
            written |= self._names(self.groups[position], Phase.FORWARD, writes=True) & buffers
        following = range(last + 1, len(self.groups))
        readers = (p for p in following if not written.isdisjoint(self._backward_reads(p)))
        return max(readers, default=last)

    def _buffers(self, cuts: Sequence[int]) -> set[str]:
        """Return the buffers that get a second one: all that is written again."""
        found: set[str] = set()
        for group in self.groups[: cuts[-1] + 1]:
            y = self.buffer_of(group, "y")
            if y == INPUT or any(self._is_live(y, cut) for cut in cuts):
                continue
            needs = self.needs[group.name]
            access = needs.phases.get(Phase.FORWARD, _NOTHING)
            kept = {*needs.kept, *needs.phases.get(Phase.STATISTICS, _NOTHING).writes}
            own = {*access.reads, *access.writes} & needs.buffers.keys()
            found |= {y, *(self.buffer_of(group, local) for local in own - kept)}
        return found

    def _is_live(self, tensor: str, cut: int) -> bool:
        first, last = self.lives[tensor]
        return first <= cut < last

    def _needed_again(self, positions: range, buffers: frozenset[str]) -> tuple[int, ...]:
        """Return the groups of a segment whose results the backward pass of the segment reads."""
        # A group after the segment may compute sums for a normalisation in it.
        needed: set[str] = set()
        for position in range(positions.start, len(self.groups)):
            needed |= self._backward_reads(position) & buffers
        again = []
        for position in reversed(positions):
            group = self.groups[position]
            if not needed.isdisjoint(self._names(group, Phase.FORWARD, writes=True)):
                again.append(position)
                needed |= self._names(group, Phase.FORWARD, writes=False) & buffers
        return tuple(reversed(again))

    def _backward_reads(self, position: int) -> set[str]:
        """Return the buffers that the backward pass of a group reads."""
        group = self.groups[position]
        if group.tail.name not in self.trained:
            return set()
        return set().union(*(self._names(group, phase, writes=False) for phase in BACKWARD_ORDER))

    def _names(self, group: Group, phase: Phase, *, writes: bool) -> set[str]:
        access = self.needs[group.name].phases.get(phase, _NOTHING)
        return {
            self.buffer_of(group, local) for local in (access.writes if writes else access.reads)
        }
