"""What limits training is the largest part of the table, and the advice can help."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest

from dptrain.measure.input_times import InputCost
from dptrain.measure.profile.profile import Parts, StepParts
from dptrain.training.data_settings import AugmentationSettings
from dptrain.training.output.limits import ACCEPTABLE, NAMES, training_limit
from dptrain.training.settings import settings

PARTS = [field.name for field in fields(Parts)]
CHANGES = [field.name for field in fields(AugmentationSettings)]


def random_parts(random_: random.Random) -> StepParts:
    """Return parts of random times; some are zero, and one may be far larger than the others."""
    times = [random_.choice((0.0, 1.0, 1.0, 30.0)) * random_.random() for _ in PARTS]
    parts = Parts(**dict(zip(PARTS, times, strict=True)))
    imbalance = random_.random()
    return StepParts({}, parts, parts, imbalance, 1 - imbalance)


def random_job(random_: random.Random) -> tuple[Any, Any]:
    """Return settings and data of a job, as far as the advice depends on them."""
    epoch_steps = random_.randint(1, 500)
    steps = epoch_steps * random_.randint(1, 40)
    spec = SimpleNamespace(
        steps=steps, epoch_steps=epoch_steps, evaluate_every=random_.randint(0, 3),
        checkpoint_seconds=random_.choice((0.0, 5.0, 30.0, 1000.0)),
        **{name: random_.choice((0, 1)) for name in CHANGES},
    )  # fmt: skip
    validation = random_.choice((None, object()))
    return spec, SimpleNamespace(
        validation=validation, train=SimpleNamespace(decodes=random_.random() < 0.5)
    )


def random_cost(random_: random.Random) -> InputCost | None:
    times = [random_.random() * random_.choice((0, 1, 10)) for _ in range(6)]
    return random_.choice((None, InputCost(*times)))


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_the_largest_part_is_named_and_flags_in_the_advice_change_something(first: int) -> None:
    known = {setting.flag for setting in settings()}
    for seed in range(first, first + 500):
        random_ = random.Random(seed)
        parts, (spec, data) = random_parts(random_), random_job(random_)
        found = training_limit(parts, spec, data, random_cost(random_))
        times = asdict(parts.all_steps)
        if found is None:
            assert not any(times.values()), seed
            continue
        assert times[found.part] == max(times.values()), seed
        share = max(times.values()) / sum(times.values())
        text = str(found)
        assert f"limited by {NAMES[found.part]}: {share:.0%} of the time" in text, seed
        assert "\n" not in text
        words = text.replace("`", " ").replace(",", " ").split()
        flags = {word for word in words if word.startswith("--")} - {"--losses"}
        assert flags <= known, seed
        epochs = math.ceil(spec.steps / spec.epoch_steps)
        for name, most in (("checkpoint_seconds", math.inf), ("evaluate_every", epochs)):
            flag = "--" + name.replace("_", "-")
            if flag in flags:
                value = int(words[words.index(flag) + 1])
                assert getattr(spec, name) < value <= most, seed


@pytest.mark.parametrize("share", [0.55, 0.73, 0.95])
def test_the_advice_makes_checkpoints_acceptable(share: float) -> None:
    """Each checkpoint takes share / (1 - share) of the 40 s of steps before it."""
    parts = Parts(1 - share, 0, 0, 0, 0, checkpoint=share)
    spec: Any = SimpleNamespace(checkpoint_seconds=40.0)
    data: Any = SimpleNamespace()
    found = training_limit(StepParts({}, parts, parts, 0, 0), spec, data, None)
    assert found is not None
    seconds, checkpoint_s = int(found.advice.split()[1]), 40.0 * share / (1 - share)
    assert checkpoint_s / (checkpoint_s + seconds) == pytest.approx(ACCEPTABLE, rel=0.1)


def test_copies_to_a_device_that_take_as_long_as_a_step_are_named() -> None:
    spec, data = random_job(random.Random(0))
    for part in ("data_wait", "other"):
        parts = Parts(**{**dict.fromkeys(PARTS, 0.1), part: 9.0})
        cost = InputCost(10.0, 9.0, 0.0, 1.0, 1.0, early_copy_ms=9.8)
        found = training_limit(StepParts({}, parts, parts, 0.5, 0.5), spec, data, cost)
        assert found is not None
        assert (found.part, "copying a minibatch to the device takes 9.8 ms" in found.advice) == (
            part, True,
        )  # fmt: skip
