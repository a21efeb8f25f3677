"""Compare forecasts from 1 to 8 ranks with the simulated truths.

python -m benchmarks.forecast.coverage [--cases held-back|tuned|all] [--replications 1] [--each]

Print for each number of ranks how many forecasts are given, how often the interval contains the
truth, and its width; the same for those that are not called wide. Networks that saturate beyond the
measured ranks are counted apart, because the printed assumption excludes them.

python -m benchmarks.forecast.coverage --node [--cases held-back|tuned|all]

Print the same for forecasts within one simulated node (`benchmarks.forecast.node`).

python -m benchmarks.forecast.coverage --cases tuned --causes

Print how many forecasts would be given if one cause of the width of the intervals were absent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from benchmarks.forecast import node
from benchmarks.forecast.node import draw, study_of
from benchmarks.forecast.simulate import MOST_MEASURED, TUNED, read_truths
from dptrain.scaling.forecasts.cluster_fit import CONGESTION
from dptrain.scaling.forecasts.ensemble import (
    GROWTH_ERROR,
    Ensemble,
    Predicted,
    hindcasts,
    is_trusted,
    obstacle,
)
from dptrain.scaling.forecasts.observed import Figures, Observed
from dptrain.scaling.study import WIDE

SIZES = tuple(2.0**power for power in range(-6, 3))
"""Sizes of the sweep over that of a bucket, as in ``step.c``."""
BATCH = 6400
STUDY_LAUNCHES = 5
"""Launches of each number of ranks of a study, the default of `dptrain scale`."""
LIBRARIES = {"mpich": "MPICH", "ompi": "Open MPI"}
NODES = {
    "held-back": (node.TUNED, node.CASES), "tuned": (0, node.TUNED), "all": (0, node.CASES),
}  # fmt: skip
"""First and last simulated node, and one more."""
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
        is_given: True if `dptrain scale` prints it.
    """

    case: int
    ranks: int
    truth: float
    predicted: Predicted | None
    is_given: bool

    @property
    def holds(self) -> bool:
        """True if the interval contains the truth."""
        assert self.predicted is not None
        return self.predicted.low <= self.truth <= self.predicted.high

    @property
    def is_wide(self) -> bool:
        """True if `dptrain scale` calls the interval wide."""
        assert self.predicted is not None
        return self.predicted.high > WIDE * self.predicted.low


def observed(case: dict[str, Any], replication: int = 0) -> list[Observed]:
    """Return the measured points of a case in one replication of the study.

    Each replication draws `STUDY_LAUNCHES` of the simulated launches of each number of ranks,
    without replacement.
    """
    parameters = case["parameters"]
    size, count = parameters["bucket_bytes"], parameters["buckets"]
    weak = parameters["scaling"] == "weak"
    random = np.random.Generator(np.random.Philox(key=[case["case"], replication]))
    found = []
    for point in case["points"]:
        ranks = point["ranks"]
        if ranks > MOST_MEASURED:
            continue
        chosen = random.permutation(len(point["step_ms"]))[:STUDY_LAUNCHES]
        columns = zip(
            point["step_ms"], point["compute"], point["transfer"], point["imbalance"],
            point["sweep_ms"], strict=True,
        )  # fmt: skip
        launches = [
            Figures(
                step, busy, transfer if ranks > 1 else 0.0, waiting,
                count * sweep[SIZES.index(1.0)] if sweep else 0.0,
                tuple((round(size * s), ms) for s, ms in zip(SIZES, sweep, strict=bool(sweep))),
            )
            for step, busy, transfer, waiting, sweep in columns
        ]  # fmt: skip
        nodes = -(-ranks // parameters["ranks_per_node"])
        batch = BATCH * ranks if weak else BATCH
        own = tuple(launches[i] for i in chosen)
        library = LIBRARIES.get(parameters["library"], "")
        found.append(Observed(ranks, nodes, batch, batch / ranks, ((size, count),), own, library))
    return found


def check(case: dict[str, Any], replications: int = 1) -> list[Checked]:
    """Return the forecasts of a case with the truths, of so many replications of its study."""
    weak = case["parameters"]["scaling"] == "weak"
    base = np.mean(case["points"][0]["step_ms"])
    truths = {
        point["ranks"]: float(base / np.mean(point["step_ms"]) / (1 if weak else point["ranks"]))
        for point in case["points"]
        if point["ranks"] > MOST_MEASURED
    }
    found = []
    for replication in range(replications):
        found += check_study(case["case"], observed(case, replication), truths)
    return found


def check_study(
    case: int, points: Sequence[Observed], truths: Mapping[int, float]
) -> list[Checked]:
    """Return the forecasts of one study with the true efficiencies by number of ranks."""
    ensemble = None if obstacle(points) else Ensemble(points)
    is_given = ensemble is not None and is_trusted(hindcasts(points))
    found = []
    for ranks, truth in truths.items():
        predicted = None if ensemble is None else ensemble.predict(ranks)
        # A forecast ends at the first unknown efficiency.
        is_given = is_given and predicted is not None and predicted.is_known
        found.append(Checked(case, ranks, truth, predicted, is_given))
    return found


def check_node(first: int, last: int) -> dict[str, list[Checked]]:
    """Return the forecasts of simulated nodes by what was measured and how far they reach."""
    found: dict[str, list[Checked]] = {}
    for number in range(first, last):
        case, (points, truths) = draw(number), study_of(number)
        for one in check_study(number, points, truths):
            times = f"up to ×{2 ** math.ceil(math.log2(one.ranks / case.measured[-1]))}"
            full = "full" if one.ranks == case.slots else "not full"
            kind = f"{case.kind}, {len(case.measured)} numbers of ranks"
            for name in ("all", times, f"{kind}, {full}"):
                found.setdefault(name, []).append(one)
    return dict(sorted(found.items()))


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


def summary(found: Sequence[Checked]) -> str:
    """Return how many forecasts are given, how often they contain the truth, and how wide they are.

    The median half-width of those that are given is in points of the efficiency; that of all, also
    those that are too wide to be given, is a share of it.
    """
    known = [(each, each.predicted) for each in found if each.predicted is not None]
    if not known:
        return f"no forecast is possible ({len(found)} replications)"
    given = [(each, at) for each, at in known if each.is_given]
    close = [(each, at) for each, at in given if not each.is_wide]
    widths = [(at.high - at.low) / (2 * at.efficiency) for _, at in known]
    return (
        f"given {len(given) / len(found):.0%} of {len(found)}: {_covered(given)}; not wide: "
        f"{_covered(close)}; {sum(each.holds for each, _ in known) / len(known):.1%} of all "
        f"{len(known)}, median half-width {np.median(widths):.1%} of the efficiency"
    )


def _covered(found: Sequence[tuple[Checked, Predicted]]) -> str:
    if not found:
        return "none"
    width = float(np.median([(at.high - at.low) / 2 for _, at in found]))
    return (
        f"{len(found)}, {sum(each.holds for each, _ in found) / len(found):.1%} of them contain "
        f"the truth, median half-width {100 * width:.1f} points"
    )


@click.command()
@click.option("--cases", type=click.Choice(["held-back", "tuned", "all"]), default="held-back")
@click.option("--replications", default=1, show_default=True, help="Studies of each case.")
@click.option("--each", is_flag=True, help="Print every case.")
@click.option("--causes", is_flag=True, help="Print how many forecasts more knowledge allows.")
@click.option("--node", "on_node", is_flag=True, help="Forecasts within one simulated node.")
def main(cases: str, replications: int, each: bool, causes: bool, on_node: bool) -> None:
    """Print the coverage of forecasts that are given, and of all."""
    if on_node:
        first, last = NODES[cases]
        for name, found_there in check_node(first, last).items():
            click.echo(f"{name}: {summary(found_there)}")
        return
    chosen = {"held-back": (False,), "tuned": (True,), "all": (False, True)}[cases]
    truths = [case for number, case in read_truths().items() if (number < TUNED) in chosen]
    if causes:
        for name, congestion, growth_error in CAUSES:
            by_ranks = count_given(truths, congestion, growth_error)
            numbers = ", ".join(f"{count} at {ranks} ranks" for ranks, count in by_ranks.items())
            click.echo(f"{name}: {numbers}, of {len(truths)} cases")
        return
    found: list[Checked] = []
    for case in truths:
        new = check(case, replications)
        found += new
        for ranks in sorted({one.ranks for one in new}) if each else ():
            at = [one for one in new if one.ranks == ranks]
            click.echo(f"case {case['case']} {ranks} ranks, {at[0].truth:.3f}: {summary(at)}")
    excluded = {case["case"] for case in truths if case["parameters"].get("backbone")}
    for name, is_excluded in (("saturating networks", True), ("other networks", False)):
        for ranks in sorted({one.ranks for one in found}):
            at = [o for o in found if o.ranks == ranks and (o.case in excluded) == is_excluded]
            click.echo(f"{name}, {len({o.case for o in at})} cases, {ranks} ranks: {summary(at)}")


if __name__ == "__main__":
    main()
