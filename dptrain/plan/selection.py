"""The selection of one kernel among the candidates of a stage.

A backend estimates the time of each candidate. By default the lowest estimate decides, so that the
selection follows from the plan and the GPU alone. A selection that was measured names candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

MAX_CANDIDATES, MAX_RELATIVE_COST = 4, 1.3
"""Candidates of a stage that are measured: at most so many, with at most this multiple of the
lowest estimate."""

T = TypeVar("T")


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
        names: names of candidates by stage, as pairs. Other stages use the lowest estimate.
    """

    names: tuple[tuple[str, str], ...] = ()

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
        found: worthwhile candidates with their estimates by stage; `pick` adds to it.
    """

    rank: int = 0
    found: dict[str, list[tuple[float, Any]]] = field(default_factory=dict, compare=False)

    def pick(self, stage: str, best: T, ranked: Callable[[], Iterable[tuple[float, T]]]) -> T:
        if stage not in self.found:
            self.found[stage] = worthwhile(ranked())
        pairs: list[tuple[float, T]] = self.found[stage]
        return pairs[self.rank][1] if self.rank < len(pairs) else best
