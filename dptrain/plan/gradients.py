"""Which group writes, adds or shares the gradient of each tensor.

The gradient of a tensor that several groups read is the sum of their contributions. In the order
of the backward pass the first contribution is written and the others are added: by the group
itself, or by a further stage if its kernels can only write. The gradients of the inputs of a sum
equal that of its output and share its memory, unless something changes one of them while another
one is still needed. A gradient that is written element by element may overwrite the one that it is
computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dptrain.plan.lowering import Access, Group, GroupNeeds, Phase, input_name

_NOTHING = Access()


@dataclass(frozen=True)
class Addition:
    """A contribution that a stage adds to a gradient.

    Attributes:
        target, source: names of tensors.
        copies: True if the target is overwritten, because this is its first contribution.
    """

    target: str
    source: str
    copies: bool


@dataclass(frozen=True)
class Gradients:
    """How the gradients of all tensors are collected.

    Attributes:
        groups: the groups with `Group.adds` and `Group.separate`.
        trained: names of the tensors that depend on trained parameters, and so have a gradient.
        shared: gradients that share memory with another one, by name of the former.
        additions: the contributions that a stage of a group adds to gradients, by its name.
    """

    groups: tuple[Group, ...]
    trained: frozenset[str]
    shared: dict[str, str]
    additions: dict[str, tuple[Addition, ...]]


@dataclass(frozen=True)
class _Contribution:
    """What a group contributes to the gradient of one of its inputs.

    Attributes:
        position: of the group in the backward pass.
        group: the group.
        local: local name of the gradient.
        tensor: name of the input.
    """

    position: int
    group: Group
    local: str
    tensor: str


def collect_gradients(
    groups: tuple[Group, ...],
    needs: Mapping[str, GroupNeeds],
    adds_gradient: Callable[[Group, str], bool],
    *,
    concurrent_weight_gradients: bool,
) -> Gradients:
    """Decide how the gradients of all tensors are collected.

    Args:
        groups: all groups in the order of the forward pass.
        needs: what each group needs, by name.
        adds_gradient: whether a group can add to an input gradient with a local name.
        concurrent_weight_gradients: weight gradients may still be computed, and read ``dy``, while
            later stages run.
    """
    return _Collector(groups, needs, adds_gradient, concurrent_weight_gradients).collect()


@dataclass
class _Collector:
    groups: tuple[Group, ...]
    needs: Mapping[str, GroupNeeds]
    adds_gradient: Callable[[Group, str], bool]
    concurrent: bool
    positions: dict[str, int] = field(init=False)
    producers: dict[str, Group] = field(init=False)
    contributions: dict[str, list[_Contribution]] = field(init=False)

    def collect(self) -> Gradients:
        trained = frozenset(group.tail.name for group in self.groups if group.trained)
        backward = [g for g in reversed(self.groups) if g.tail.name in trained]
        self.positions = {g.tail.name: i for i, g in enumerate(backward)}
        self.producers = {g.tail.name: g for g in self.groups}
        self.contributions = {name: [] for name in trained}
        for group in backward:
            for each in self._of(group, trained):
                self.contributions[each.tensor].append(each)
        shared: dict[str, str] = {}
        additions: dict[str, tuple[Addition, ...]] = {}
        changed: dict[str, Group] = {}
        for group in backward:
            listed = tuple(self._of(group, trained))
            if self._shares(group):
                names = {f"d{tensor}": f"d{group.tail.name}" for tensor in self._shareable(listed)}
                shared.update(names)
                left = [each for each in listed if f"d{each.tensor}" not in names]
                additions[group.name] = tuple(
                    self._addition(each, f"d{group.tail.name}") for each in left
                )
                continue
            later = [each for each in listed if not self._is_first(each)]
            adds = {each.local for each in later if self.adds_gradient(group, each.local)}
            separate = [each for each in later if each.local not in adds]
            if later:
                names_of_separate = frozenset(each.local for each in separate)
                group = replace(group, adds=frozenset(adds), separate=names_of_separate)
                changed[group.name] = group
                additions[group.name] = tuple(
                    self._addition(each, group.tensors[each.local]) for each in separate
                )
        groups = tuple(changed.get(group.name, group) for group in self.groups)
        overwritten = self._overwritten(backward, trained, shared)
        return Gradients(groups, trained, {**shared, **overwritten}, additions)

    def _overwritten(
        self, backward: list[Group], trained: frozenset[str], shared: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the input gradients that overwrite dy of their group, and the name of that dy."""
        unavailable = {*shared, *shared.values()}
        found = {}
        for group in backward:
            dy, listed = f"d{group.tail.name}", tuple(self._of(group, trained))
            for each in listed:
                dx = f"d{each.tensor}"
                is_only = sum(other.tensor == each.tensor for other in listed) == 1
                is_free = is_only and self._is_first(each) and unavailable.isdisjoint((dx, dy))
                if is_free and each.local == self.needs[group.name].overwrites_dy:
                    found[dx] = dy
        return found

    def _of(self, group: Group, trained: frozenset[str]) -> Iterator[_Contribution]:
        for number, tensor in enumerate(group.inputs, 1):
            if tensor in trained:
                position = self.positions[group.tail.name]
                yield _Contribution(position, group, f"d{input_name(number)}", tensor)

    def _shares(self, group: Group) -> bool:
        needs = self.needs[group.name]
        return needs.shares_gradient or needs.alias

    def _is_first(self, contribution: _Contribution) -> bool:
        return self.contributions[contribution.tensor][0] == contribution

    def _addition(self, contribution: _Contribution, source: str) -> Addition:
        return Addition(f"d{contribution.tensor}", source, self._is_first(contribution))

    def _shareable(self, listed: tuple[_Contribution, ...]) -> list[str]:
        """Return the inputs of a group whose gradients may share the memory of ``dy``.

        At most one of them may be changed afterwards, and only when the others have been read.
        """
        tensors = [each.tensor for each in listed]
        first = [each for each in listed if self._is_first(each) and tensors.count(each.tensor) < 2]
        changes = {each.tensor: self._first_change(each) for each in first}
        only_read = [tensor for tensor, when in changes.items() if when is None]
        for tensor, when in changes.items():
            if when is not None and all(self._is_read_before(r, when) for r in only_read):
                return [*only_read, tensor]
        return only_read

    def _first_change(self, contribution: _Contribution) -> int | None:
        """Return the position at which the memory of this gradient changes first; None if never."""
        tensor = contribution.tensor
        producer = self.producers[tensor]
        needs = self.needs[producer.name]
        writes = any("dy" in access.writes for access in needs.phases.values())
        changes = [each.position for each in self.contributions[tensor][1:]]
        if writes or needs.in_place or self._shares(producer):
            changes.append(self.positions[tensor])
        return min(changes, default=None)

    def _is_read_before(self, tensor: str, position: int) -> bool:
        """Return whether the group that wrote a tensor has read its gradient before a position."""
        phases = self.needs[self.producers[tensor].name].phases
        if self.concurrent and "dy" in phases.get(Phase.BACKWARD_WEIGHT, _NOTHING).reads:
            return False
        return self.positions[tensor] < position
