"""Verdicts on known losses: right if the instrument is, and refused if it is wrong or too noisy."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.measure.profile.known import (
    DELAY,
    INJECTED,
    LOST_CORE,
    MESSAGE,
    KnownLoss,
    Recovery,
    judge,
    slowed,
)
from dptrain.measure.profile.known_tables import known_lines, why_withheld


def measured(
    generator: np.random.Generator, name: str = DELAY, *, factor: float = 1.0, noise: float = 0.2,
    rounds: int = 10, injected: float = 5.0,
) -> KnownLoss:  # fmt: skip
    """A loss of which the instrument finds the share `factor`, with `noise` in ms."""
    known = injected * generator.uniform(0.9, 1.1, rounds)
    found = factor * known + noise * generator.standard_normal(rounds)
    return KnownLoss(name, tuple(known), tuple(found))


def test_a_delay_costs_what_exceeds_the_waiting_of_its_rank() -> None:
    generator = np.random.default_rng(0)
    for ranks in (2, 3, 8):
        busy, delays = generator.exponential(4.0, (ranks, 7)), generator.exponential(3.0, 5)
        for rank in range(ranks):
            total = 0.0
            for delay in delays:
                for step in range(7):
                    late = busy[:, step].copy()
                    late[rank] += delay
                    total += late.max() - busy[:, step].max()
            assert slowed(busy, rank, delays) == pytest.approx(total / 35)
            assert 0 <= slowed(busy, rank, delays) <= delays.mean() * (1 + 1e-12)


def test_a_right_instrument_recovers_all_losses_in_95_of_100_launches() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(1000):
        found = judge([measured(generator, name) for name in INJECTED])
        held += all(recovery.is_recovered for recovery in found)
    assert held >= 930


@pytest.mark.parametrize("factor", [0.0, 0.6, 0.8, 1.3, 2.0])
def test_an_instrument_that_is_wrong_is_found(factor: float) -> None:
    generator = np.random.default_rng(2)
    passed = 0
    for _ in range(200):
        losses = [measured(generator, n, factor=factor if n == LOST_CORE else 1) for n in INJECTED]
        verdicts = {recovery.name: recovery.is_recovered for recovery in judge(losses)}
        passed += verdicts[LOST_CORE] is True
    assert passed <= 2


def test_an_instrument_that_is_too_noisy_is_refused_although_its_interval_is_right() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        (found,) = judge([measured(generator, noise=15.0)])
        assert found.is_recovered is False
        assert "wider than" in found.reason


def test_rounds_of_launches_count_together() -> None:
    generator = np.random.default_rng(4)
    launches = [measured(generator, rounds=2) for _ in range(5)]
    (found,) = judge(launches)
    assert found.recovered_ms is not None
    assert found.recovered_ms.n == 10
    (one,) = judge(launches[:1])
    assert one.is_recovered is None
    assert "2 rounds of steps are too few" in one.reason


def test_more_comparisons_widen_the_intervals() -> None:
    loss = measured(np.random.default_rng(5))
    widths = []
    for comparisons in (1, 3, 30):
        (found,) = judge([loss], comparisons)
        assert found.recovered_ms is not None
        widths.append(found.recovered_ms.high - found.recovered_ms.low)
    assert widths == sorted(set(widths))


def test_the_reason_names_what_was_missed_and_the_load() -> None:
    generator = np.random.default_rng(6)
    found = judge([
        measured(generator),
        measured(generator, LOST_CORE, factor=0.2),
        KnownLoss(MESSAGE, reason="one rank loses nothing to others"),
    ])  # fmt: skip
    assert [recovery.is_recovered for recovery in found] == [True, False, None]
    assert why_withheld(found, 0.0, 2) == "a known loss was not recovered (lost core)"
    assert why_withheld(found, 1.4, 2).endswith("other programs used 1.4 cores meanwhile")
    first, second, third = known_lines(found, " at weak-r2-t1")
    assert first.startswith("known loss at weak-r2-t1, delay: recovered ")
    assert "lost core: not recovered, because " in second
    assert third.endswith("message: not verified, because one rank loses nothing to others")


def test_a_loss_that_cannot_be_injected_withholds_nothing() -> None:
    unknown = Recovery(LOST_CORE, None, None, None, "ranks share cores")
    assert why_withheld([unknown], 1.4, 2) == ""
    assert "are not verified" in known_lines([])[0]
