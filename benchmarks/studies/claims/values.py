"""The values that a claim, a table or a plot names: rows, ratios, sums and leads, by case."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import stdev
from typing import Any

import numpy as np

from benchmarks.studies.claims.judgements import pairs
from benchmarks.studies.claims.results import PUBLISHED, MissingResultError, Results
from benchmarks.studies.claims.spreads import (
    Row,
    as_row,
    median_of,
    product_of,
    quartiles_of,
    ratio,
    rounds_of,
)
from dptrain.measure.statistics import Estimate
from dptrain.measure.student import student

LAUNCHES = 0.05
"""Share by which single runs of the same program may differ."""
KEYS = frozenset({
    "of", "over", "pair", "count", "above", "cases", "by", "parts", "label", "skip", "per", "scale",
    "launches", "reduce",
})  # fmt: skip
"""Keys of the specification of a value; `Values.compute` explains them."""

Case = str | int | float | Sequence[Any]
Spec = Mapping[str, Any]


class Values:
    """Computes values from specifications, and knows which measurements they came from."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.used: dict[str, None] = {}
        self.known: dict[str, Any] = {}
        self.row: Case = ""

    def add(self, specs: Mapping[str, Spec]) -> None:
        """Compute values by name; a specification may name those before it."""
        for name, spec in specs.items():
            self.known[name] = self.compute(spec)

    def compute(self, spec: Spec) -> Any:
        """Return a value, or a mapping of values by case.

        A specification has `of`, a path in which ``{case}`` is a case, and may have

        - ``over``: a path; the value is the ratio `of` ÷ `over`. Paths in a list are multiplied,
        - ``cases``: a list, or a text: ``keys PATH``, ``words PATH`` for the words of keys, or
          ``machines NAME …``; ``by``: a list, with whose elements the cases are combined;
          ``label``: how a case is named, where ``@NAME`` is the hardware of a measurement;
          ``skip``: leave out cases that were not measured,
        - ``parts``: ``{part}``, as the cases, over which `of` and `over` are summed,
        - ``per``: a key of the rows by which times are divided; ``scale``: a factor,
        - ``launches``: single runs may differ, by `LAUNCHES`; rounds are launches of their own,
        - ``reduce``: one of `REDUCTIONS`, applied to all cases.

        Instead of `of` it may have ``pair``, two paths whose values stay next to each other, or
        ``count``, the name of a value whose cases `above` a number or another value are counted.

        Raises:
            MissingResultError: a result is missing.
        """
        if "count" in spec:
            limit = self.known.get(spec["above"], spec["above"])
            return sum(
                own.low > other.high for own, other in pairs(self.known[spec["count"]], limit)
            )
        if "cases" not in spec:
            return self.one(spec, "")
        found, missing = {}, None
        for case in self._cases(spec):
            try:
                found[self.label(spec, case)] = self.one(spec, case)
            except MissingResultError as error:
                if not spec.get("skip"):
                    raise
                missing = error
        if not found and missing is not None:
            raise missing
        return REDUCTIONS[spec["reduce"]](list(found.values())) if "reduce" in spec else found

    def at(self, path: str, **fields: Any) -> Any:
        """Return what a path selects, and remember the measurement."""
        path = path.format(row=self.row, **fields)
        found = self.results.at(path)
        name = self.results.first(path.partition("/")[0])
        if name != PUBLISHED:
            self.used[name] = None
        return found

    def _cases(self, spec: Spec) -> list[Case]:
        cases = self.listed(spec["cases"])
        return list(product(cases, spec["by"])) if "by" in spec else cases

    def listed(self, cases: str | Sequence[Case]) -> list[Case]:
        """Return the cases of a specification."""
        if not isinstance(cases, str):
            return list(cases)
        how, _, rest = cases.partition(" ")
        if how == "machines":
            found: list[Case] = [m for name in rest.split() for m in self.results.machines(name)]
            if not found:
                raise MissingResultError(f"`{rest.split()[0]}` was not measured yet")
            return found
        keys = list(self.at(rest))
        return [key.split() for key in keys] if how == "words" else keys

    def label(self, spec: Spec, case: Case) -> str:
        """Return how a case is named."""
        if "label" in spec:
            label = str(spec["label"]).format(case=case)
            return re.sub("@([a-z-]+[a-z])", lambda m: self.results.hardware(m[1]), label)
        parts = [case] if isinstance(case, str | int | float) else list(case)
        texts = [f"{p:,}" if isinstance(p, int) else str(p) for p in parts]
        return ", ".join(t.rpartition("@")[2] for t in texts)

    def one(self, spec: Spec, case: Case) -> Any:
        """Return the value of one case."""
        if "pair" in spec:
            return [self.at(path, case=case) for path in spec["pair"]]
        top = self._selected(spec, spec["of"], case)
        scale = spec.get("scale", 1)
        if "over" not in spec:
            if "per" in spec:
                scale = scale / top[spec["per"]]
            return top if scale == 1 else _scaled(top, scale)
        bottom = self._selected(spec, spec["over"], case)
        if "per" in spec:
            scale = scale * bottom[spec["per"]] / top[spec["per"]]
        if top is bottom:
            return Estimate(1.0, 1.0, 1.0, 1)
        found = ratio(as_row(top), as_row(bottom)).times(scale)
        if spec.get("launches") and found.n == 1:
            low, high = found.low / (1 + LAUNCHES), found.high * (1 + LAUNCHES)
            return Estimate(found.value, low, high, 1)
        return found

    def _selected(self, spec: Spec, paths: str | Sequence[str], case: Case) -> Any:
        """Return what a path selects; the product of several, and the sum over parts."""
        if not isinstance(paths, str):
            return product_of([as_row(self.at(path, case=case)) for path in paths])
        if "parts" not in spec:
            return self.at(paths, case=case)
        return total([as_row(each) for part in self.listed(spec["parts"])
                      for each in all_of(self.at(paths, case=case, part=part))])  # fmt: skip


def all_of(value: Any) -> Iterable[Any]:
    """Return the values of a mapping that ``*`` selected, or a value alone."""
    is_row = not isinstance(value, Mapping) or any(not isinstance(v, Mapping | float | int)
                                                   for v in value.values())  # fmt: skip
    return [value] if is_row or "median" in value or "median_ms" in value else value.values()


def _scaled(value: Any, scale: float) -> Any:
    if isinstance(value, int | float):
        return scale * value
    return product_of([as_row(value), as_row(scale)])


def total(rows: Sequence[Row]) -> Row:
    """Return the sum of rows; of quartiles, those of rows without them are their medians."""
    quartiles = [quartiles_of(row) or (median_of(row),) * 2 for row in rows]
    low, high = (sum(each[i] for each in quartiles) for i in (0, 1))
    return {"median": sum(map(median_of, rows)), "low": low, "high": high}


def lead(rows: Sequence[Any]) -> Estimate:
    """Return how much more the first row has than the best other: a 95% t interval over rounds.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908), for paired differences.
    """
    first, *others = ([float(v) for v in rounds_of(as_row(row))] for row in rows)
    best = max(others, key=lambda own: sum(own) / len(own))
    gaps = [a - b for a, b in zip(first, best, strict=True)]
    mean, n = sum(gaps) / len(gaps), len(gaps)
    half = student(n - 1) * stdev(gaps) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def geometric_mean(found: Sequence[Any]) -> Estimate:
    """Return the geometric mean of ratios and of the ends of their intervals."""
    all_ends = [(e, e, e) if isinstance(e, int | float) else (e.value, e.low, e.high)
                for e in found]  # fmt: skip
    value, low, high = np.exp(np.log(np.array(all_ends)).mean(axis=0))
    return Estimate(float(value), float(low), float(high), len(all_ends))


def deviation(found: Sequence[Any]) -> float:
    """Return the largest factor between times and a power law of a size, (time, size) in each."""
    times, sizes = np.log([[median_of(as_row(each)) for each in pair] for pair in found]).T
    slope, level = np.polyfit(sizes, times, 1)
    return math.exp(float(np.abs(times - slope * sizes - level).max()))


REDUCTIONS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "deviation": deviation,
    "lead": lead,
    "mean": geometric_mean,
    "largest": lambda found: max(max(all_of(each)) for each in found),
    "spread": lambda found: max(map(median_of, found)) / min(map(median_of, found)),
}
"""Functions of all cases of a value by name."""
