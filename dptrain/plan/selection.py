"""The selection of one algorithm, and of its configuration, for a stage.

A backend has a table of algorithms for each operation. An algorithm states which cases it computes
and estimates their time. By default the lowest estimate decides, so that the selection follows from
the plan and the processor alone. A selection that was measured names configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from dptrain.plan.lowering import Phase

MAX_CANDIDATES, MAX_RELATIVE_COST = 4, 1.3
"""Candidates of a stage that are measured: at most so many, with at most this multiple of the
lowest estimate."""

Candidates = Callable[[Iterable[tuple[float, Any]]], list[tuple[float, Any]]]
"""Returns the candidates that are measured, from all of a stage with their estimates."""

MEASURED = "measured to be the fastest"
"""`KernelSelection.reason` of names that measurements chose."""

T = TypeVar("T")
C = TypeVar("C")


@dataclass(frozen=True)
class Gain:
    """What an algorithm gains for a network that it serves.

    Attributes:
        network: name of the network.
        factor: time of a training step without the algorithm, divided by that with it.
        conditions: batch size, threads, processor, repeats and date.
    """

    network: str
    factor: float
    conditions: str


@dataclass(frozen=True)
class Algorithm(Generic[C]):
    """An algorithm of an operation: a row of a table.

    Attributes:
        name: the name that users see.
        phases: the phases that it computes.
        supports: returns whether it computes a case, whose type the operation defines.
        estimate: returns estimated times, in the unit of the table, with the configurations that
            they belong to, in any order; the first is selected among equal ones. It is `alone` for
            an algorithm without configurations, and empty if no configuration fits the case. A time
            is infinite if it cannot be compared with those of other algorithms, which precede.
        bind: returns the kernel; its arguments are those of all algorithms of the table.
        serves: networks of the zoo with the measured gain. An algorithm that saves no network 3% of
            a step is removed.
    """

    name: str
    phases: tuple[Phase, ...]
    supports: Callable[[C], bool]
    estimate: Callable[[C], Sequence[tuple[float, Any]]]
    bind: Callable[..., Any]
    serves: tuple[Gain, ...] = ()


def alone(time: float) -> Sequence[tuple[float, str]]:
    """Return the estimate of an algorithm without configurations."""
    return ((time, ""),)


@dataclass(frozen=True)
class Choice(Generic[C]):
    """An algorithm with one of its configurations.

    Attributes:
        algorithm: the algorithm.
        configuration: an object that `str` names uniquely in the table; empty if the algorithm has
            no configurations.
        estimate: of the time, in the unit of the table; infinity if it cannot be compared.
    """

    algorithm: Algorithm[C]
    configuration: Any
    estimate: float

    def __str__(self) -> str:
        return str(self.configuration) or self.algorithm.name


def rank(table: Iterable[Algorithm[C]], phase: Phase, case: C) -> list[Choice[C]]:
    """Return all configurations of the algorithms that support a case, the fastest first."""
    found = [
        Choice(algorithm, configuration, time)
        for algorithm, estimates in _estimates(table, phase, case)
        for time, configuration in estimates
    ]
    return sorted(found, key=lambda choice: choice.estimate)


def fastest(table: Iterable[Algorithm[C]], phase: Phase, case: C) -> list[Choice[C]]:
    """Return the fastest configuration of each algorithm that supports a case, sorted by time."""
    found = []
    for algorithm, estimates in _estimates(table, phase, case):
        time, configuration = min(estimates, key=lambda pair: pair[0])
        found.append(Choice(algorithm, configuration, time))
    return sorted(found, key=lambda choice: choice.estimate)


def _estimates(
    table: Iterable[Algorithm[C]], phase: Phase, case: C
) -> Iterator[tuple[Algorithm[C], Sequence[tuple[float, Any]]]]:
    """Yield the algorithms that support a case, with their estimates."""
    for algorithm in table:
        if phase in algorithm.phases and algorithm.supports(case):
            estimates = algorithm.estimate(case)
            if estimates:
                yield algorithm, estimates


def select(
    table: Iterable[Algorithm[C]],
    phase: Phase,
    case: C,
    selection: KernelSelection | None = None,
    stage: str = "",
) -> Choice[C]:
    """Return the configuration for a stage: that with the lowest estimate, or a measured one.

    Args:
        table: algorithms, of which one supports every case.
        phase, case: what is computed.
        selection: names configurations by stage.
        stage: name of the stage, as `dptrain.plan.plan.Stage.name`.
    """
    candidates = fastest(table, phase, case)
    chosen = selection or KernelSelection()
    return pick(candidates, lambda: rank(table, phase, case), chosen, stage)


def pick(
    candidates: Sequence[Choice[C]],
    ranked: Callable[[], Iterable[Choice[C]]],
    selection: KernelSelection,
    stage: str,
) -> Choice[C]:
    """Return the choice for a stage, of which a selection may name algorithm or configuration.

    Args:
        candidates: what `fastest` returned.
        ranked: function that returns all configurations among which measurements select.
        selection, stage: see `select`.
    """
    named = selection.named(stage)
    fixed = (each for each in candidates if each.algorithm.name == named)
    best = next(fixed, candidates[0])
    return selection.pick(stage, best, lambda: [(each.estimate, each) for each in ranked()])


def worthwhile(ranked: Iterable[tuple[float, T]]) -> list[tuple[float, T]]:
    """Return the candidates that are measured, those with the lowest estimates first.

    Args:
        ranked: estimates of any unit, and candidates with distinct names.
    """
    found = sorted(ranked, key=lambda pair: pair[0])
    by_name: dict[str, tuple[float, T]] = {}
    for cost, candidate in found:
        if cost <= MAX_RELATIVE_COST * found[0][0]:
            by_name.setdefault(str(candidate), (cost, candidate))
    return list(by_name.values())[:MAX_CANDIDATES]


@dataclass(frozen=True)
class KernelSelection:
    """Selects a kernel for each stage of a plan.

    Attributes:
        names: names of algorithms or of their configurations by stage, as pairs. Other stages use
            the lowest estimate.
        reason: why these names were chosen, as `dptrain layers --explain` shows it.
    """

    names: tuple[tuple[str, str], ...] = ()
    reason: str = field(default="fixed by the selection", compare=False)

    def named(self, stage: str) -> str | None:
        """Return the name of the candidate for a stage; None uses the lowest estimate."""
        return dict(self.names).get(stage)

    def pick(self, stage: str, best: T, ranked: Callable[[], Iterable[tuple[float, T]]]) -> T:
        """Return the candidate for a stage.

        Args:
            stage: name of the stage, as `dptrain.plan.plan.Stage.name`.
            best: the candidate with the lowest estimate.
            ranked: function that returns all candidates with their estimates.

        Returns:
            `best` if no candidate is named, or if none has that name.
        """
        wanted = self.named(stage)
        if wanted is None:
            return best
        return next((each for _, each in ranked() if str(each) == wanted), best)


@dataclass(frozen=True)
class RankedSelection(KernelSelection):
    """Selects the candidate with the n-th lowest estimate, and records all that are worthwhile.

    Attributes:
        rank: n, from 0; a stage with fewer candidates uses the lowest estimate.
        found: candidates that are measured, with their estimates, by stage; `pick` with rank 0 adds
            to it, the last time when all that they depend on is known.
        candidates: returns the candidates that are measured from all of them.
    """

    rank: int = 0
    found: dict[str, list[tuple[float, Any]]] = field(default_factory=dict, compare=False)
    candidates: Candidates = field(default=worthwhile, compare=False)

    def pick(self, stage: str, best: T, ranked: Callable[[], Iterable[tuple[float, T]]]) -> T:
        if self.rank == 0 or stage not in self.found:
            self.found[stage] = self.candidates(ranked())
        pairs: list[tuple[float, T]] = self.found[stage]
        return pairs[self.rank][1] if self.rank < len(pairs) else best
