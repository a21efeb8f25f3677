"""Simulated measurements: 95% intervals contain the truth in at least 92% of cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dptrain.audit.coverage import Coverage, cases, coverage_of
from dptrain.audit.kinds import KINDS, Size, efficiency_truth, launch_walls
from dptrain.audit.noise import NOISES, Times
from dptrain.measure.statistics import FEWEST_TO_SEE, Estimate
from dptrain.scaling.pairing import Walls, compare_walls
from dptrain.scaling.scale import FEWEST_FOR_RANGE
from tests.tiers import tiered

LEAST = 0.92
QUICK = {
    ("median step", "bursts"),
    ("median step", "coarse clock"),
    ("median run of bench", "two groups of steps"),
    ("efficiency of train", "rare interruptions"),
    ("efficiency of scale", "slow launches"),
    ("efficiency of scale", "two groups of launches"),
    ("step of scale", "correlated launches"),
    ("step of scale", "AR 0.8"),
    ("POP parallel", "bursts"),
    ("POP serialisation", "bursts"),
    ("load imbalance by experiment", "independent"),
    ("energy", "bursts"),
    ("energy", "AR 0.8"),
}
"""Cases of the quick tier: those that failed before, and easy ones."""


EASY = ("independent", "AR 0.5", "AR 0.8")
"""Noise in which a method withholds its interval in few cases only."""


def check(found: Coverage, *, given: float) -> None:
    assert found.given >= given * found.replications, found
    assert found.share >= LEAST, found


@pytest.mark.parametrize(("kind", "noise"), tiered(cases(), QUICK))
def test_intervals_contain_the_truth(kind: str, noise: str) -> None:
    check(coverage_of(kind, noise, replications=200), given=0.95 if noise in EASY else 0.5)


@pytest.mark.parametrize("kind", ["efficiency of train", "efficiency of scale", "step of scale"])
@pytest.mark.parametrize(
    "noise", ["rare interruptions", "exponential lateness", "Pareto(3) lateness"]
)
@pytest.mark.parametrize("ranks", tiered([2, 16, 64, 512], [16]))
def test_efficiencies_contain_rare_noise_on_any_number_of_ranks(
    kind: str, noise: str, ranks: int
) -> None:
    check(coverage_of(kind, noise, replications=100, ranks=ranks), given=0.95)


@pytest.mark.parametrize("launches", tiered([5, 8, 15, 30], [8]))
@pytest.mark.parametrize("kind", ["efficiency of scale", "step of scale"])
def test_launches_that_are_rarely_slow_are_covered(kind: str, launches: int) -> None:
    check(coverage_of(kind, "slow launches", replications=400, launches=launches), given=0.95)


@pytest.mark.more
@pytest.mark.parametrize("until", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize(
    "noise", ["independent", "slow launches", "two groups of launches", "correlated launches"]
)
def test_studies_that_stop_at_a_small_interval_contain_the_truth(noise: str, until: float) -> None:
    """Rounds are added as by ``--until``, and must suffice without the last one, too."""
    chosen = replace(NOISES[noise], slow_factor=2.0)
    size, covered, series = Size(steps=50, launches=30), 0, 300
    random = np.random.default_rng(5)
    base = launch_walls(chosen.of_base(), size, random, series, 1)
    point = launch_walls(chosen, size, random, series, size.ranks)
    truth = efficiency_truth(chosen, size)
    for one, two in zip(base, point, strict=True):

        def at(n: int, sides: tuple[Times, Times] = (one, two)) -> tuple[Estimate, bool]:
            return compare_walls(*(Walls(side[:n], 50 * n) for side in sides), paired=True)

        def ends(n: int, at: Callable[[int], tuple[Estimate, bool]] = at) -> bool:
            if at(n)[1] and n >= FEWEST_FOR_RANGE:
                return True
            widths = [at(count)[0].high - at(count)[0].low for count in (n, n - 1)]
            return max(widths) / 2 <= until and n >= FEWEST_TO_SEE

        rounds = next((n for n in range(5, 30) if ends(n)), 30)
        found = at(rounds)[0]
        covered += found.low <= truth <= found.high
    assert covered >= LEAST * series


def test_intervals_of_more_launches_are_shorter() -> None:
    widths = [
        coverage_of("efficiency of scale", "independent", replications=50, launches=n).width
        for n in (3, 5, 30)
    ]
    assert widths[0] > 1.2 * widths[1] > 2 * widths[2]


@pytest.mark.parametrize("ranks", [2, pytest.param(16, marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("POP")])
def test_efficiencies_of_the_pop_hierarchy_hold_in_bursts(kind: str, ranks: int) -> None:
    check(coverage_of(kind, "bursts", replications=100, ranks=ranks), given=0.5)


def test_the_documented_table_has_every_interval_and_noise() -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "intervals.md"
    text = page.read_text(encoding="utf-8").partition("| noise | median step |")[2]
    lines = text.partition("\n\n")[0].splitlines()[2:]
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines}
    assert list(cells) == list(NOISES)
    filled = {
        (kind, noise)
        for noise, row in cells.items()
        for kind, cell in zip(KINDS, row, strict=True)
        if cell.strip()
    }
    assert filled == set(cases())
