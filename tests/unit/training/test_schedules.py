"""Schedules against their equations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.tools.reference import schedules as described_schedules
from dptrain.errors import UserError
from dptrain.training.schedules import SCHEDULES, Schedule, parse_fractions, scaled_rate
from dptrain.training.settings import settings
from tests.lazy import LazyModule

torch = LazyModule("torch")

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


@given(
    st.sampled_from(["step", "cosine", "polynomial", "exponential"]),
    bases,
    st.integers(0, 20),
    steps,
)
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
        (
            {"kind": "polynomial", "total_steps": 5, "warmup_steps": 5},
            "the polynomial schedule has 5",
        ),
        ({"kind": "polynomial", "total_steps": 5, "power": 0.0}, r"power of the schedule is 0\.0"),
        ({"kind": "one-cycle", "total_steps": 3}, "3 steps; expected at least 4"),
        (
            {"kind": "one-cycle", "total_steps": 9, "warmup_steps": 1},
            "warm-up is 1 steps; expected 0",
        ),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as info:
        Schedule(**{"base": 0.1, **fields})  # type: ignore[arg-type]
    assert "\n" not in str(info.value)


def test_fractions_of_the_run_reduce_the_rate() -> None:
    schedule = Schedule(
        1.0, "step", total_steps=12, step_at=parse_fractions("1/3, 0.75"), step_factor=0.5
    )
    expected = [1.0] * 4 + [0.5] * 5 + [0.25] * 4
    assert [schedule.rate(step) for step in range(13)] == expected
    warm = Schedule(
        1.0, "step", warmup_steps=2, total_steps=12, step_at=parse_fractions("1/2"), step_factor=0.1
    )
    assert [warm.rate(step) for step in (0, 1, 5, 6, 11)] == [0.5, 1.0, 1.0, 0.1, 0.1]


def rates_of_pytorch(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    base: float,
    count: int,
) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], base)
    scheduler = make(optimizer)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("total", [4, 5, 10, 97])
def test_one_cycle_equals_pytorch(total: int) -> None:
    ours = Schedule(0.3, "one-cycle", total_steps=total)
    theirs = rates_of_pytorch(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.3, total_steps=total, cycle_momentum=False
        ),
        0.3,
        total - 1,
    )
    found = [ours.rate(step) for step in range(total)]
    assert found[:-1] == pytest.approx(theirs, rel=1e-12)
    assert found[-1] == pytest.approx(0.3 / 250_000)
    assert ours.rate(total + 3) == found[-1]


@pytest.mark.parametrize("power", [1.0, 0.9, 2.0])
def test_polynomial_equals_pytorch(power: float) -> None:
    ours = Schedule(0.3, "polynomial", total_steps=40, power=power)
    theirs = rates_of_pytorch(
        lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 40, power), 0.3, 50
    )
    assert [ours.rate(step) for step in range(50)] == pytest.approx(theirs, rel=1e-9)
    warm = Schedule(0.3, "polynomial", total_steps=43, warmup_steps=3, power=power)
    assert [warm.rate(step) for step in range(3, 53)] == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("warmup", [0, 3])
def test_exponential_equals_pytorch(warmup: int) -> None:
    """The factor of a step is the root of that of all steps, which are 40 after the warm-up."""
    ours = Schedule(
        0.3, "exponential", warmup_steps=warmup, total_steps=40 + warmup, step_factor=0.01
    )
    theirs = rates_of_pytorch(
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / 40)),
        0.3,
        41,
    )
    found = [ours.rate(step) for step in range(warmup, warmup + 41)]
    assert found == pytest.approx(theirs, rel=1e-9)


@given(bases, st.integers(1, 9), st.integers(1, 9))
def test_scaling_rules(base: float, factor: int, reference: int) -> None:
    batch = factor * factor * reference
    assert scaled_rate(base, "none", batch, reference) == base
    assert scaled_rate(base, "sqrt", batch, reference) == base * factor
    assert scaled_rate(base, "linear", batch, reference) == base * factor**2


def test_choices_help_and_documentation_follow_from_the_table() -> None:
    declared = next(each for each in settings() if each.name == "schedule")
    assert declared.limits.choices == tuple(SCHEDULES)
    documented = described_schedules()
    for name, kind in SCHEDULES.items():
        assert f"{name}: {kind.summary}" in declared.help
        assert f"| `{name}` | {kind.summary} |" in documented
        assert kind.rate.__doc__
