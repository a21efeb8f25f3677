"""Losses of schedules whose values are known."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.files import parse_json
from dptrain.measure.profile import losses
from dptrain.measure.profile.analysis import Measured
from dptrain.measure.profile.loss_tables import loss_tables, losses_report
from dptrain.measure.profile.profile_files import LOSSES
from dptrain.measure.step_record import EXPOSED, SPANS, STEP
from dptrain.tables import Number

ROUNDS = 10


def rounds(*by_rank: float, noise: float = 0.0, seed: int = 0) -> NDArray[np.float64]:
    """Times of all rounds, (ROUNDS, ranks)."""
    generator = np.random.default_rng(seed)
    return np.array(by_rank) + noise * generator.standard_normal((ROUNDS, len(by_rank)))


def known(noise: float = 0.0) -> dict[str, NDArray[np.float64]]:
    values = {
        losses.ALONE: (4.0, 0.0),
        losses.UNSUMMED: (5.0, 7.0),
        losses.ONE_NUMBER: (9.0, 9.0),
        losses.LATENCY: (0.5, 0.5),
        losses.AFTER: (12.0, 12.0),
        losses.DURING: (11.0, 11.0),
        losses.DELAYED_RANK: (14.0, 14.0),
        losses.DELAYED_IN_TURN: (13.0, 13.0),
    }
    return {
        name: rounds(*times, noise=noise, seed=seed)
        for seed, (name, times) in enumerate(values.items())
    }


def measured(busy: NDArray[np.float64], transfer: float) -> Measured:
    """Steps of ranks that wait for the slowest, and then communicate."""
    names = ("compute", *SPANS)
    step = np.broadcast_to(busy.max(axis=0) + transfer, busy.shape)
    columns = {"compute": busy, EXPOSED: step - busy, STEP: step}
    table = np.stack([columns.get(name, 0 * busy) for name in names], axis=2)
    return Measured(names, table, table, (1.0,) * len(busy))


def test_losses_are_the_differences_of_the_experiments() -> None:
    found = {loss.name: loss.time_ms.value for loss in losses.find_losses(known())}
    assert found == pytest.approx({
        "contention": 2.0, "load imbalance": 1.0, "serialisation": 1.5, "latency": 0.5,
        "sums": 3.0, "saved by overlap": -1.0,
    })  # fmt: skip


def test_batch_statistics_are_a_loss_of_their_own() -> None:
    times = {**known(), losses.STATISTICS_SUMS: known()[losses.ONE_NUMBER] + 0.75}
    found = {loss.name: loss.time_ms.value for loss in losses.find_losses(times)}
    assert found["batch statistics"] == pytest.approx(0.75)
    assert found["sums"] == pytest.approx(2.25)
    assert losses.STATISTICS_SUMS in losses.mean_steps(times)


def test_losses_add_up_to_the_step_of_the_job() -> None:
    times = known(noise=0.3)
    found = losses.find_losses(times)
    steps = losses.mean_steps(times)
    total = steps[losses.ALONE].value + sum(loss.time_ms.value for loss in found)
    assert total == pytest.approx(steps[losses.DURING].value)
    assert sum(loss.share for loss in found) + steps[losses.ALONE].value / total == (
        pytest.approx(1.0)
    )
    for loss in found:
        assert loss.time_ms.low < loss.time_ms.value < loss.time_ms.high


def test_efficiencies_of_both_kinds_agree_if_ranks_are_late_only_in_their_work() -> None:
    # Rank 1 takes 7, rank 0 takes 5, and in every fifth step 12.5, so the slowest takes 8.1.
    busy = np.broadcast_to(np.array([[5.0], [7.0]]), (2, 100)).copy()
    busy[0, ::5] = 12.5
    mean = busy.mean(axis=1)
    times = {
        losses.UNSUMMED: rounds(*mean, noise=1e-3),
        losses.ONE_NUMBER: rounds(*[busy.max(axis=0).mean() + 0.5] * 2, noise=1e-3, seed=1),
        losses.LATENCY: rounds(0.5, 0.5),
        losses.AFTER: rounds(*[busy.max(axis=0).mean() + 2] * 2, noise=1e-3, seed=2),
    }
    found = losses.compare_efficiencies(times, measured(busy, 2.0))
    assert [factor.name for factor in found] == [
        "parallel", "load_balance", "serialisation", "transfer"
    ]  # fmt: skip
    for factor in found:
        assert factor.agree
        assert factor.by_experiment.value == pytest.approx(factor.by_busy_times.value, abs=0.01)


@pytest.mark.parametrize("name", [losses.DELAYED_RANK, losses.DELAYED_IN_TURN])
def test_a_delay_appears_as_waiting_of_the_others(name: str) -> None:
    ranks, steps, delay = 4, 40, 3.0
    busy = np.full((ranks, steps), 5.0)
    late = busy.copy()
    if name == losses.DELAYED_RANK:
        late[-1] += delay
    else:
        late[np.arange(steps) % ranks, np.arange(steps)] += delay
    found = losses.find_delay(name, delay, known(), measured(late, 1.0), measured(busy, 1.0))
    assert found.waiting_ms.value == pytest.approx(delay)
    lost = (5 + delay / ranks) / (5 + delay)
    factors = found.load_balance.value, found.serialisation.value
    expected = (lost, 1.0) if name == losses.DELAYED_RANK else (1.0, lost)
    assert factors == pytest.approx(expected)
    assert found.cost_ms.value == pytest.approx(3.0 if name == losses.DELAYED_RANK else 2.0)


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_intervals_over_rounds_contain_the_difference(drift: float) -> None:
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(1000):
        # What changes from round to round is common to all experiments.
        common = drift * generator.standard_normal((ROUNDS, 1)).cumsum(axis=0)
        times = {
            losses.AFTER: 12 + common + 0.1 * generator.standard_normal((ROUNDS, 2)),
            losses.DURING: 11 + common + 0.1 * generator.standard_normal((ROUNDS, 2)),
        }
        found = losses.over_rounds(
            lambda t: float(t[losses.AFTER].mean() - t[losses.DURING].mean()), times
        )
        held += found.low <= 1.0 <= found.high
    assert 920 <= held <= 980


@pytest.mark.parametrize(
    "means",
    [
        np.full(2, 5.0),
        np.full(4, 5.0),
        pytest.param(np.full(16, 5.0), marks=pytest.mark.more),
        # Slower by three standard errors of its mean.
        5 + 0.15 * (np.arange(16) == 0),
        pytest.param(5 + 0.15 * (np.arange(16) % 2), marks=pytest.mark.more),
    ],
    ids=["2 equal", "4 equal", "16 equal", "one of 16 slower", "half of 16 slower"],
)
def test_intervals_with_the_slowest_rank_contain_the_truth(means: NDArray[np.float64]) -> None:
    generator, replications = np.random.default_rng(5), 150
    shape = (ROUNDS, len(means))
    truth = np.array([means.max() - means.mean(), 8.5 - means.max()])
    held = np.zeros(2)

    def imbalance(t: losses.Times) -> float:
        return float(t[losses.SLOWEST].mean() - t[losses.UNSUMMED].mean())

    def late(t: losses.Times) -> float:
        return 8.5 - float(t[losses.SLOWEST].mean())

    for _ in range(replications):
        times = {losses.UNSUMMED: means + 0.15 * generator.standard_normal(shape)}
        balance, serialisation = (
            losses.over_rounds_with_slowest(function, times, least=0.0)
            for function in (imbalance, late)
        )
        assert 0 <= balance.low <= balance.value <= balance.high
        held += [e.low <= t <= e.high for e, t in zip((balance, serialisation), truth, strict=True)]
    # The standard error is 1.8%.
    assert (held / replications).min() >= 0.92


def test_only_ranks_that_may_be_the_slowest_widen_an_interval() -> None:
    times = rounds(5.0, 5.0, 7.0, noise=0.1)
    assert losses.possibly_slowest(times).tolist() == [2]
    assert losses.possibly_slowest(times - [[0, 0, 2]]).tolist() == [0, 1, 2]


def test_load_balance_by_experiment_is_at_most_one() -> None:
    times = known() | {losses.UNSUMMED: rounds(5.0, 5.0, noise=1.0)}
    found = losses.compare_efficiencies(times, measured(np.full((2, 40), 5.0), 1.0))
    balance = next(factor.by_experiment for factor in found if factor.name == "load_balance")
    assert balance.low < balance.value <= balance.high <= 1


def test_efficiencies_by_experiment_are_at_least_zero() -> None:
    times = known()
    times[losses.AFTER][0] = 500.0  # Another program interrupts one round.
    found = losses.compare_efficiencies(times, measured(np.full((2, 40), 5.0), 1.0))
    assert min(factor.by_experiment.low for factor in found) == 0


def test_the_record_can_be_written() -> None:
    estimate = losses.over_rounds(lambda t: float(t["a"].mean()), {"a": rounds(1.0, 2.0)})
    assert asdict(estimate) == {"value": 1.5, "low": 1.5, "high": 1.5, "n": ROUNDS}


def test_factors_of_the_computation_scaling_multiply_to_it() -> None:
    times = known(noise=0.1)
    for seed, (name, values) in enumerate({
        "instructions alone": (8e6, 0.0), "cycles alone": (4e6, 0.0),
        "instructions unsummed": (9e6, 9e6), "cycles unsummed": (6e6, 6e6),
    }.items()):  # fmt: skip
        times[name] = rounds(*values, noise=1e3, seed=seed)
    factors = losses.computation_factors(times)
    assert factors["instructions"].value == pytest.approx(8 / 9, rel=1e-2)
    assert factors["instructions_per_cycle"].value == pytest.approx(1.5 / 2, rel=1e-2)
    product = np.prod([factor.value for factor in factors.values()])
    assert product == pytest.approx(losses.computation_scaling(times).value)


def record(times: losses.Times) -> losses.Losses:
    busy = np.full((2, 100), 5.0)
    steps = measured(busy, 1.0)
    return losses.Losses(
        job={"ranks": 2, "transport": "mpi"},
        rounds=ROUNDS,
        steps=10,
        step_ms=losses.mean_steps(times),
        losses=losses.find_losses(times),
        computation_scaling=losses.computation_scaling(times),
        computation_factors={},
        counters_missing="no counters",
        efficiencies=losses.compare_efficiencies(times, steps),
        delays=tuple(
            losses.find_delay(name, 3.0, times, steps, steps)
            for name in (losses.DELAYED_RANK, losses.DELAYED_IN_TURN)
        ),
        overlaps=True,
        environment={},
    )


def test_the_file_and_the_tables_of_a_report_have_the_same_numbers(tmp_path: Path) -> None:
    found = record(known(noise=0.1))
    found.write(tmp_path / LOSSES)
    assert losses.Losses.read(tmp_path / LOSSES) == found
    values = parse_json((tmp_path / LOSSES).read_text())
    tables = loss_tables(found, LOSSES)
    assert [len(table.rows) for table in tables] == [8, 4, 2]
    for table in tables:
        for part in (part for row in table.rows for cell in row for part in cell):
            if isinstance(part, Number) and part.source:
                value = values
                for key in part.source.split("."):
                    value = value[int(key)] if isinstance(value, list) else value[key]
                assert value == part.value


def test_a_report_omits_what_overlap_saves_if_nothing_overlaps() -> None:
    table = loss_tables(replace(record(known()), overlaps=False), LOSSES)[0]
    assert len(table.rows) == 7
    assert "with transport mpi all gradients" in table.note


def test_few_steps_are_the_reason_if_efficiencies_cannot_be_compared() -> None:
    found = record(known())
    unknown = tuple(replace(factor, agree=None) for factor in found.efficiencies)
    printed = losses_report(replace(found, efficiencies=unknown))
    table = next(part for part in printed if not isinstance(part, str)
                 and part.heads[0] == "efficiency")  # fmt: skip
    assert [row[-1] for row in table.texts] == ["too few steps"] * 4


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_printed_tables_name_every_loss(overlaps: bool) -> None:
    parts = losses_report(replace(record(known()), overlaps=overlaps))
    lines = [part for part in parts if isinstance(part, str)]
    assert any("no counters" in line for line in lines)
    notes = [part.note for part in parts if not isinstance(part, str)]
    assert any("Saved by overlap: nothing" in note for note in notes) != overlaps
    names = [name for table in parts if not isinstance(table, str)
             for name, *_ in table.texts]  # fmt: skip
    for name in ("contention", "load imbalance", "serialisation", "latency", "sums", "transfer"):
        assert name in names
    assert ("saved by overlap" in names) == overlaps
