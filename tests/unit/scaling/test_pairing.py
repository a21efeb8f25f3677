"""Intervals of paired launches: how often they contain the truth, and when they are withheld."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dptrain.measure.statistics import Estimate, ratio_of_launches, ratio_of_walls
from dptrain.scaling.analysis import analyse
from dptrain.scaling.pairing import common_rounds, difference, mean_ratio, split
from dptrain.scaling.points import Measured
from dptrain.scaling.study import OLD_STEPS, UNITY, Study
from dptrain.scaling.tables import study_report
from tests.unit.scaling.synthetic import Law, make_launches, make_profile

TRIALS, LAUNCHES, STEPS = 1000, 5, 50
Effect = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Launches that differ in memory placement, for example."""
    return 0.02 * random.standard_normal(shape)


def skewed(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Launches of which some are far slower."""
    return 0.04 * random.standard_exponential(shape)


def absent(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Launches that differ only by their steps."""
    return np.zeros(shape)


def mean_steps(
    random: np.random.Generator, effects: np.ndarray, rho: float, *, bursts: bool
) -> np.ndarray:
    """Return the mean step of launches, whose steps are autocorrelated and slow in bursts."""
    noise = random.standard_normal((STEPS, *effects.shape))
    burst = np.zeros(effects.shape, bool)
    state, steps = noise[0], []
    for step in range(STEPS):
        state = rho * state + np.sqrt(1 - rho**2) * noise[step] if step else state
        # A burst begins in 3% of the steps and lasts 8 on average.
        chance = random.random(effects.shape)
        burst = np.where(burst, chance > 1 / 8, chance < 0.03) & bursts
        steps.append(np.exp(effects + 0.03 * state) * np.where(burst, 1.4, 1.0))
    return np.asarray(np.mean(steps, axis=0))


def two_points(
    seed: int, effect: Effect, rho: float, *, bursts: bool = False, rounds: float = 0.05
) -> tuple[np.ndarray, np.ndarray]:
    """Return the launches of two equal points, (trials, launches) each, in common rounds."""
    random = np.random.default_rng(seed)
    slow = rounds * random.standard_normal((TRIALS, LAUNCHES))
    one, two = (
        mean_steps(random, slow + effect(random, slow.shape), rho, bursts=bursts) for _ in range(2)
    )
    return one, two


@pytest.mark.parametrize("effect", [absent, normal, skewed])
@pytest.mark.parametrize(("rho", "bursts"), [(0.0, False), (0.5, True), (0.9, False), (0.9, True)])
def test_intervals_of_five_launches_contain_the_truth(
    effect: Effect, rho: float, bursts: bool
) -> None:
    base, point = two_points(1, effect, rho, bursts=bursts)
    found = [ratio_of_walls(a, b) for a, b in zip(base, point, strict=True)]
    coverage = np.mean([each.low <= 1 <= each.high for each in found])
    assert 0.92 <= coverage <= 0.99


@pytest.mark.parametrize("effect", [normal, skewed])
def test_geometric_means_of_five_launches_contain_the_truth(effect: Effect) -> None:
    random = np.random.default_rng(6)
    logs = effect(random, (TRIALS, LAUNCHES)) - effect(random, (TRIALS, LAUNCHES))
    found = [mean_ratio(ratios) for ratios in np.exp(logs)]
    assert 0.92 <= np.mean([each.low <= 1 <= each.high for each in found]) <= 0.99


def test_pairs_exclude_the_effect_of_rounds() -> None:
    base, point = two_points(2, normal, 0.5, rounds=0.1)
    paired = np.median([e.high / e.low for e in map(ratio_of_walls, base, point)])
    chosen = [ratio_of_launches(a, b) for a, b in zip(base[:300], point[:300], strict=True)]
    independent = np.median([e.high / e.low for e in chosen])
    assert paired < 1.08
    assert independent > 1.3


def test_a_round_that_misses_a_launch_is_no_pair() -> None:
    one, two = ["a/1", "a/2", "a/3", "a/4"], ["a/2", "a/3", "a/4"]
    assert common_rounds(one, two) == two
    assert common_rounds(one, ["b/1", "b/2", "b/3"]) == []
    assert common_rounds(one, two[:2]) == []


def test_two_groups_of_launches_are_found() -> None:
    random = np.random.default_rng(3)
    single = np.exp(0.02 * random.standard_normal((TRIALS, 8)))
    groups = single * np.where(np.arange(8) < 4, 1.0, 1.3)
    assert np.mean([split(row) is not None for row in single]) < 0.01
    assert np.mean([split(row) is not None for row in groups]) > 0.6
    assert split([1.0, 1.001, 1.002, 1.1, 1.101]) == pytest.approx(1.05, rel=0.01)
    assert split([1.0, 1.001, 1.002, 1.003, 1.101]) is None  # A single launch is an outlier.
    assert split([1.0, 1.001, 1.1, 1.101]) is None


def weak_launches(times: dict[int, list[float]], steps: int = 50) -> list[Measured]:
    """Return launches of weak scaling with these steps in ms, by the number of ranks."""
    return [
        Measured(f"launches/weak-r{ranks}-t1-{k + 1}", 2 * k + ranks - 1,
                 make_profile(Law(), ranks=ranks, batch_size=32 * ranks, step_ms=step, steps=steps))
        for ranks, of_ranks in times.items()
        for k, step in enumerate(of_ranks)
    ]  # fmt: skip


def test_a_study_names_the_range_of_two_groups() -> None:
    times = {1: [10.0, 10.1, 9.9, 10.05, 9.95], 2: [11.0, 14.0, 11.1, 14.1, 11.05]}
    study = analyse(weak_launches(times))
    point = study.points[1]
    assert point.two_groups
    assert point.efficiency.low == pytest.approx(10.05 / 14.1)
    text = "\n".join(line for line in study_report(study) if isinstance(line, str))
    assert "weak-r2-t1 fall into two groups, 3 with 11 to 11.1 ms and 2 with 14 to 14.1 ms" in text
    assert "range of the launches 71% to" in text


def test_step_times_in_two_groups_leave_the_interval_of_paired_efficiencies() -> None:
    # All points of a round are slow together, so ratios of a round do not fall into two groups.
    slow = [1.0, 1.4, 1.0, 1.4, 1.0]
    times = {
        ranks: [factor * (10 + ranks + 0.01 * (k * ranks % 3)) for k, factor in enumerate(slow)]
        for ranks in (1, 2)
    }
    study = analyse(weak_launches(times, steps=5000))
    point = study.points[1]
    assert point.two_groups
    assert not point.efficiency_has_range
    assert point.has_range("step_ms")
    assert not point.has_range("efficiency")
    assert point.step_ms.high / point.step_ms.low > 1.3
    # The interval has room for slow launches, of which five may contain none, and for little else.
    assert point.efficiency.high / point.efficiency.low < 1.01 * 1.05**2
    text = "\n".join(line for line in study_report(study) if isinstance(line, str))
    assert "the interval of its step time is the range" in text
    assert "95% interval 87% to 96%" in text
    assert "range of the launches" not in study.conclusion[0]


def test_unpaired_launches_in_two_groups_have_a_range() -> None:
    times = {1: [10.0, 10.1, 9.9, 10.05, 9.95], 2: [11.0, 14.0, 11.1, 14.1, 11.05]}
    launches = [
        Measured(f"single-{ranks}-{k}", 2 * k + ranks - 1,
                 make_profile(Law(), ranks=ranks, batch_size=32 * ranks, step_ms=step))
        for ranks, steps in times.items()
        for k, step in enumerate(steps)
    ]  # fmt: skip
    point = analyse(launches).points[1]
    assert point.efficiency_has_range
    assert point.efficiency.low == pytest.approx(9.9 / 14.1)
    assert point.efficiency.high == pytest.approx(10.1 / 11.0)


def test_two_studies_of_the_same_points_agree() -> None:
    base, one = two_points(4, normal, 0.5, bursts=True)
    other_base, other = two_points(5, normal, 0.5, bursts=True)
    found = [
        difference(ratio_of_walls(a, b), ratio_of_walls(c, d))
        for a, b, c, d in zip(base, one, other_base, other, strict=True)
    ]
    agree = np.array([each.low <= 0 <= each.high for each in found])
    # 17 of 20 points is the requirement; 95% intervals give 19 on average.
    assert 0.92 <= agree.mean() <= 0.99
    assert np.mean(agree.reshape(-1, 20).sum(axis=1) >= 17) > 0.95


@pytest.mark.parametrize("without", [Estimate(1.0, 0.9, 1.1, 2), Estimate(1.0, 0.0, np.inf, 5)])
@pytest.mark.parametrize("is_first", [True, False])
def test_without_an_interval_there_is_no_difference(without: Estimate, is_first: bool) -> None:
    known = Estimate(1.0, 0.9, 1.1, 5)
    found = difference(without, known) if is_first else difference(known, without)
    assert (found.low, found.high) == (-np.inf, np.inf)


def test_the_columns_of_a_row_multiply_if_rounds_lack_launches() -> None:
    times = {1: [10.0, 11.0, 12.0, 9.0, 30.0], 2: [12.0, 14.0, 13.0, 11.0]}
    base, point = analyse(weak_launches(times)).points
    assert base.efficiency == base.speed_up == UNITY
    assert point.efficiency is not None
    assert point.efficiency.value == pytest.approx(sum(times[1][:4]) / sum(times[2]))
    assert point.efficiency.value * point.step_ms.value == pytest.approx(base.step_ms.value)
    assert point.parts.total == pytest.approx(point.step_ms.value)
    assert point.ideal.total + point.loss.total == pytest.approx(point.step_ms.value)


@pytest.mark.parametrize("launches", [1, 2])
def test_fewer_than_three_launches_have_no_efficiency(launches: int) -> None:
    study = analyse(make_launches(Law(), launches=launches))
    assert {p.efficiency for p in study.points if p.ranks > 1} == {None}
    assert {p.karp_flatt for p in study.points} == {None}
    text = "\n".join(line for line in study_report(study) if isinstance(line, str))
    assert "the efficiency at 4 ranks is not known from fewer than 3 launches" in text
    assert "inf" not in text
    for scaling in ("weak", "strong"):
        table = next(
            part
            for part in study_report(study)
            if not isinstance(part, str) and str(part.title).startswith(scaling.capitalize())
        )
        assert [row[table.heads.index("efficiency")] for row in table.texts] == [
            "base", "–", "–",
        ]  # fmt: skip


def test_studies_of_older_versions_state_that_steps_are_medians(tmp_path: Path) -> None:
    study = analyse(make_launches(Law(noise=0.01), (1, 2), launches=2))
    old = Estimate(0.8, 0.0, np.inf, 2)
    points = [
        replace(
            point,
            efficiency=Estimate(1.0, 1.0, 1.0, 2) if point.ranks == 1 else old,
            launches=tuple(replace(m, median_step_ms=None) for m in point.launches),
        )
        for point in study.points
    ]
    replace(study, points=tuple(points)).write(tmp_path / "study.json")
    found = Study.read(tmp_path / "study.json")
    assert [p.efficiency for p in found.points] == [UNITY, None] * 2
    assert OLD_STEPS in found.notes
