"""Verdicts, and the results that they are derived from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.studies.measuring import MEASUREMENTS
from benchmarks.studies.store import Result

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "not reproduced", "undecided"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
VERDICTS = (CONFIRMED, REFUTED, UNDECIDED, NOT_COMPARABLE, NOT_MEASURED)


ONE_CORE = frozenset({
    "additivity", "gradients", "keras", "ladder", "layers-by-accuracy", "minibatches", "profile",
    "profiling-cost", "update-share", "variant-steps",
})  # fmt: skip
"""Measurements of a single thread, whatever the number of cores."""


@dataclass(frozen=True)
class Verdict:
    """What our measurement says about a published result.

    Attributes:
        verdict: one of `VERDICTS`.
        ours: our value.
        reason: why.
        hardware: what measured it.
    """

    verdict: str
    ours: str
    reason: str = ""
    hardware: str = ""

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS, self.verdict


class MissingResultError(Exception):
    """A result that a verdict needs was not measured yet."""


@dataclass(frozen=True)
class Row:
    """A published result or claim.

    Attributes:
        id: identifier, such as ``A1`` or ``Q7``; study: ``A``, ``B`` or ``D``.
        title: what was measured or claimed.
        published: the published value.
        mark: its origin, such as ``T, C``.
        judge: returns the verdict from all results.
    """

    id: str
    study: str
    title: str
    published: str
    mark: str
    judge: Callable[[Results], Verdict]

    def verdict(self, results: Results) -> Verdict:
        """Return the verdict; `NOT_MEASURED` with the reason if a result is missing."""
        try:
            return self.judge(results)
        except MissingResultError as missing:
            return Verdict(NOT_MEASURED, "–", str(missing))
        except KeyError as missing:
            reason = f"a stored result has no value {missing}; measure it with `--again`"
            return Verdict(NOT_MEASURED, "–", reason)


def same_as(row_id: str, judge: Callable[[Results], Verdict]) -> Callable[[Results], Verdict]:
    """Return a judge of a claim that a published result contains, which refers to this result."""

    def refer(results: Results) -> Verdict:
        return Verdict(judge(results).verdict, f"as {row_id}")

    return refer


class Results:
    """All results, by kind of machine and name of the measurement."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)

    def find(self, name: str, prefix: str = "") -> Result:
        """Return a result; of those of several machines, that of the most cores.

        Measurements of one thread come from the machine with the least load.

        Args:
            name: name of the measurement.
            prefix: of the kind of machine, such as ``gpu``.

        Raises:
            MissingResultError: there is none.
        """
        found = [r for r in self.all if r.name == name and r.kind.startswith(prefix)]
        if not found:
            needs = MEASUREMENTS[name].needs if name in MEASUREMENTS else "measurement"
            raise MissingResultError(f"`{name}` was not measured yet; it needs: {needs}")
        if name in ONE_CORE:
            return min(found, key=_load_of_a_core)
        return max(found, key=lambda r: (_number(r.kind), r.kind))

    def values(self, name: str) -> Mapping[str, Any]:
        """Return the values of the result that `find` returns."""
        return self.find(name).values

    def on_each_machine(self, name: str) -> list[Result]:
        """Return the results of all machines that made a measurement, the least loaded first."""
        self.find(name)
        found = [r for r in self.all if r.name == name]
        return sorted(found, key=_load_of_a_core)

    def hardware(self, *names: str) -> str:
        """Return the hardware of results, each once."""
        return ", ".join(dict.fromkeys(hardware(self.find(name)) for name in names))

    def has(self, name: str) -> bool:
        """Return True if the measurement was made on some machine."""
        return any(r.name == name for r in self.all)


def _load_of_a_core(result: Result) -> float:
    return float(result.about["load"][0]) / _number(result.kind)


def _number(kind: str) -> int:
    match = re.search(r"cpu-(\d+)", kind)
    return int(match[1]) if match else 1


def hardware(result: Result) -> str:
    """Return the hardware of a result in a few words."""
    if result.kind == "exact":
        return "any"
    if result.kind.startswith("gpu"):
        return result.kind.removeprefix("gpu-").upper()
    cores = 1 if result.name in ONE_CORE else int(result.about["cores"])
    return f"{cores} cores" if cores > 1 else "1 core"


def times(value: float) -> str:
    """Format a ratio."""
    return f"{value:.3g}×" if value < 100 else f"{value:,.0f}×"


def percent(value: float, digits: int = 1) -> str:
    """Format a share."""
    return f"{100 * value:.{digits}f}%"


def duration(seconds: float) -> str:
    """Format a time with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def decide(condition: bool) -> str:
    """Return `CONFIRMED` or `REFUTED`."""
    return CONFIRMED if condition else REFUTED


def absolute(ours: str, reason: str, hardware: str = "") -> Verdict:
    """Return the verdict on seconds or bytes of other hardware or software: not comparable."""
    return Verdict(NOT_COMPARABLE, ours, reason, hardware)


def exactly(pairs: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    """Return the verdict and the reason for counts that must match to the digit.

    Args:
        pairs: our value and the published one by name.
    """
    different = [f"{name}: {ours} instead of {published}"
                 for name, (ours, published) in pairs.items() if ours != published]  # fmt: skip
    if different:
        return REFUTED, "these counts differ: " + "; ".join(different)
    return CONFIRMED, f"all {len(pairs)} values match to the digit"
