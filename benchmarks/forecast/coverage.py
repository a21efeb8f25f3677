"""Compare forecasts from 1 to 8 ranks with the simulated truths.

python -m benchmarks.forecast.coverage [--cases held-back|tuned|all] [--each]

Print for each number of ranks the number of cases, how many have a forecast, and how often its
interval contains the truth.

python -m benchmarks.forecast.coverage --cases tuned --causes

Print how many forecasts would be given if one cause of the width of the intervals were absent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from benchmarks.forecast.simulate import MOST_MEASURED, TRUTHS, TUNED
from dptrain.scaling.ensemble import (
    CONGESTION,
    GROWTH_ERROR,
    Ensemble,
    Figures,
    Observed,
    Predicted,
    obstacle,
)

SIZES = tuple(2.0**power for power in range(-6, 3))
"""Sizes of the sweep over that of a bucket, as in ``step.c``."""
BATCH = 6400
KNOWN_CONGESTION = (1 / 6,)
CAUSES = (
    ("nothing is known", CONGESTION, GROWTH_ERROR),
    ("congestion known", KNOWN_CONGESTION, GROWTH_ERROR),
    ("congestion known, growth of all-reduces within 20%", KNOWN_CONGESTION, 0.1),
    ("congestion known, growth within 10%", KNOWN_CONGESTION, 0.05),
    ("congestion and growth known", KNOWN_CONGESTION, 0.0),
)
"""Name, exponents of congestion, and standard deviation of the growth, of `--causes`."""


@dataclass(frozen=True)
class Checked:
    """A forecast and the truth.

    Attributes:
        case, ranks: which.
        truth: simulated efficiency.
        predicted: None if the measured points do not allow a forecast.
    """

    case: int
    ranks: int
    truth: float
    predicted: Predicted | None

    @property
    def is_given(self) -> bool:
        """True if a forecast is given."""
        return self.predicted is not None and self.predicted.is_known

    @property
    def holds(self) -> bool:
        """True if the interval contains the truth."""
        assert self.predicted is not None
        return self.predicted.low <= self.truth <= self.predicted.high


def observed(case: dict[str, Any]) -> list[Observed]:
    """Return the measured points of a case."""
    parameters = case["parameters"]
    size, count = parameters["bucket_bytes"], parameters["buckets"]
    weak = parameters["scaling"] == "weak"
    found = []
    for point in case["points"]:
        ranks = point["ranks"]
        if ranks > MOST_MEASURED:
            continue
        columns = zip(
            point["step_ms"], point["compute"], point["transfer"], point["imbalance"],
            point["sweep_ms"], strict=True,
        )  # fmt: skip
        launches = tuple(
            Figures(
                step, busy, transfer if ranks > 1 else 0.0, waiting,
                count * sweep[SIZES.index(1.0)] if sweep else 0.0,
                tuple((round(size * s), ms) for s, ms in zip(SIZES, sweep, strict=bool(sweep))),
            )
            for step, busy, transfer, waiting, sweep in columns
        )  # fmt: skip
        nodes = -(-ranks // parameters["ranks_per_node"])
        batch = BATCH * ranks if weak else BATCH
        library = {"mpich": "MPICH", "ompi": "Open MPI"}[parameters["library"]]
        found.append(
            Observed(ranks, nodes, batch, batch / ranks, ((size, count),), launches, library)
        )
    return found


def check(case: dict[str, Any]) -> list[Checked]:
    """Return the forecasts of a case with the truths."""
    points = observed(case)
    weak = case["parameters"]["scaling"] == "weak"
    ensemble = None if obstacle(points) else Ensemble(points)
    base = np.median(case["points"][0]["step_ms"])
    found = []
    for point in case["points"]:
        ranks = point["ranks"]
        if ranks > MOST_MEASURED:
            truth = float(base / np.median(point["step_ms"]) / (1 if weak else ranks))
            predicted = None if ensemble is None else ensemble.predict(ranks)
            found.append(Checked(case["case"], ranks, truth, predicted))
    return found


def count_given(
    cases: list[dict[str, Any]], congestion: Sequence[float], growth_error: float
) -> dict[int, int]:
    """Return the number of forecasts by number of ranks, if so much is known about the network.

    The assumed congestion need not be the true one, so only the widths of the intervals count.
    """
    given: Counter[int] = Counter()
    for case in cases:
        points = observed(case)
        if obstacle(points):
            continue
        ensemble = Ensemble(points, congestion, growth_error)
        for ranks in (point["ranks"] for point in case["points"]):
            if ranks > MOST_MEASURED:
                given[ranks] += ensemble.predict(ranks).is_known
    return dict(given)


def summary(found: list[Checked], ranks: int) -> tuple[int, int, int]:
    """Return the cases with this number of ranks, the forecasts given, and those that hold."""
    chosen = [each for each in found if each.ranks == ranks]
    given = [each for each in chosen if each.is_given]
    return len(chosen), len(given), sum(each.holds for each in given)


@click.command()
@click.option("--cases", type=click.Choice(["held-back", "tuned", "all"]), default="held-back")
@click.option("--each", is_flag=True, help="Print every forecast.")
@click.option("--causes", is_flag=True, help="Print how many forecasts more knowledge allows.")
def main(cases: str, each: bool, causes: bool) -> None:
    """Print the coverage of forecasts that are given, and of all."""
    chosen = {"held-back": (False,), "tuned": (True,), "all": (False, True)}[cases]
    truths = json.loads(TRUTHS.read_text())
    truths = [case for case in truths if (case["case"] < TUNED) in chosen]
    if causes:
        for name, congestion, growth_error in CAUSES:
            by_ranks = count_given(truths, congestion, growth_error)
            numbers = ", ".join(f"{count} at {ranks} ranks" for ranks, count in by_ranks.items())
            click.echo(f"{name}: {numbers}, of {len(truths)} cases")
        return
    found = [checked for case in truths for checked in check(case)]
    for one in found if each else ():
        at = one.predicted
        text = "impossible" if at is None else f"{at.low:.3f} {at.efficiency:.3f} {at.high:.3f}"
        mark = "" if not one.is_given else "holds" if one.holds else "MISSES"
        click.echo(f"case {one.case:2} ranks {one.ranks} truth {one.truth:.3f}: {text} {mark}")
    for ranks in sorted({one.ranks for one in found}):
        count, given, holds = summary(found, ranks)
        every = [one.holds for one in found if one.ranks == ranks and one.predicted]
        click.echo(
            f"{ranks} ranks: {count} cases, {given} given, {holds} contain the truth; of all "
            f"{len(every)} intervals, also those too wide to be given, {sum(every)} do"
        )


if __name__ == "__main__":
    main()
