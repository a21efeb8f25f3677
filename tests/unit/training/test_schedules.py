"""Schedules against their equations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.training.schedules import Schedule

bases = st.floats(1e-6, 10.0)
steps = st.integers(0, 10_000)


@given(bases, steps)
def test_constant(base: float, step: int) -> None:
    assert Schedule(base).rate(step) == base


@given(bases, st.integers(1, 500), steps)
def test_the_ramp_is_a_straight_line_that_meets_the_base_rate(
    base: float, warmup: int, step: int
) -> None:
    schedule = Schedule(base, warmup_steps=warmup)
    assert schedule.rate(step) == pytest.approx(base * min(step + 1, warmup) / warmup, rel=1e-15)
    assert schedule.rate(warmup - 1) == schedule.rate(warmup) == base


@given(bases, st.integers(0, 50), st.integers(1, 100), st.integers(0, 12), st.data())
def test_step_is_a_power_of_the_factor(
    base: float, warmup: int, every: int, falls: int, data: st.DataObject
) -> None:
    schedule = Schedule(base, "step", warmup_steps=warmup, step_every=every, step_factor=0.5)
    step = warmup + falls * every + data.draw(st.integers(0, every - 1))
    # Powers of two are exact.
    assert schedule.rate(step) == base / 2**falls


@given(bases, st.integers(0, 50), st.integers(1, 1000), st.floats(0.0, 1.0), st.data())
def test_cosine(
    base: float, warmup: int, length: int, fraction: float, data: st.DataObject
) -> None:
    low = base * fraction
    schedule = Schedule(
        base, "cosine", warmup_steps=warmup, total_steps=warmup + length, minimum=low
    )
    t = data.draw(st.integers(0, length))
    # The half-angle form of the same curve; it cancels near the end, hence the absolute term.
    expected = low + (base - low) * math.cos(math.pi * t / length / 2) ** 2
    assert schedule.rate(warmup + t) == pytest.approx(expected, rel=1e-12, abs=1e-15 * base)
    assert schedule.rate(warmup + length + 7) == pytest.approx(low, rel=1e-12, abs=1e-15 * base)


@given(st.sampled_from(["step", "cosine"]), bases, st.integers(0, 20), steps)
def test_after_warm_up_the_rate_only_falls_and_not_below_the_minimum(
    kind: str, base: float, warmup: int, step: int
) -> None:
    schedule = Schedule(
        base, kind, warmup_steps=warmup, total_steps=9000, step_every=17, minimum=base / 8
    )
    step += warmup
    rounding = 1 + 1e-15
    assert base / 8 <= schedule.rate(step + 1) * rounding
    assert schedule.rate(step + 1) <= schedule.rate(step) * rounding <= base * rounding


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cosin"}, "no schedule 'cosin'.*did you mean 'cosine'"),
        ({"base": 0.0}, r"learning rate is 0\.0"),
        ({"base": math.nan}, "learning rate is nan"),
        ({"base": math.inf}, "learning rate is inf"),
        ({"warmup_steps": -1}, "warm-up is -1"),
        ({"minimum": 0.2}, r"minimum learning rate is 0\.2"),
        ({"kind": "step"}, "every 0 steps"),
        ({"kind": "step", "step_every": 3, "step_factor": 1.5}, r"multiplies by 1\.5"),
        ({"kind": "cosine", "total_steps": 5, "warmup_steps": 5}, "5 steps and 5 of warm-up"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as info:
        Schedule(**{"base": 0.1, **fields})  # type: ignore[arg-type]
    assert "\n" not in str(info.value)
