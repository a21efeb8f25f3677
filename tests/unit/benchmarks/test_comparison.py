"""The two programs that are compared: nothing wrong is timed, and no mode ends the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import comparison
from benchmarks.batch import random_batch
from benchmarks.coarse_check import WrongResultError
from benchmarks.programs.own_programs import Training, dptrain_training
from benchmarks.programs.torch_programs import Mode, torch_training
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU

pytestmark = pytest.mark.more

NETWORK = Network((2, 9, 8), [Conv2d(4, 3, weight_decay=0.1), ReLU(), MaxPool2d(2), Flatten(),
                              Dense(5)], name="small")  # fmt: skip
EAGER = Mode("eager")
LAST = Mode("channels_last", channels_last=True)
COMPILED = Mode("compile", compiled=True)


def broken_compiler(*arguments: Any, **options: Any) -> Any:
    def fail(*inputs: Any) -> Any:
        raise RuntimeError("no code for this\nand many lines more")

    return fail


@pytest.mark.parametrize("compare", [comparison.compare_training, comparison.compare_inference])
def test_a_mode_that_cannot_be_compiled_is_left_out_and_named(
    compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", broken_compiler)
    found = compare(NETWORK, 3, (EAGER, LAST, COMPILED), steps=2)
    # Other libraries are compared too, or fail, depending on what is installed.
    assert {"eager", "channels_last"} <= set(found.probes_ms)
    assert "compile" not in found.probes_ms
    assert found.failed["compile"] == "RuntimeError: no code for this"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda step: lambda rate: step(0.0),
        lambda step: lambda rate: step(1.01 * rate),
        lambda step: lambda rate: 1.01 * step(rate),
    ],
    ids=["no update", "another rate", "another loss"],
)
def test_a_program_that_trains_otherwise_is_not_timed(
    spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> Training:
        right = dptrain_training(*arguments)
        return replace(right, step=spoil(right.step))

    monkeypatch.setattr(comparison, "dptrain_training", wrong)
    with pytest.raises(WrongResultError, match=r"small, batch 3, training, eager: .* differ in"):
        comparison.compare_training(NETWORK, 3, (EAGER,), steps=2)


@pytest.mark.parametrize("mode", [EAGER, LAST], ids=lambda mode: mode.name)
def test_both_programs_make_the_same_steps(mode: Mode) -> None:
    x, y = random_batch(NETWORK, 3)
    ours, theirs = dptrain_training(NETWORK, x, y), torch_training(NETWORK, x, y, mode)
    for _ in range(3):
        ours.step(0.1)
        theirs.step(0.1)
    expected = theirs.parameters()
    for name, value in ours.parameters().items():
        # Three steps on sums of a few hundred terms in float32.
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)


def test_losses_under_different_masks_are_not_compared() -> None:
    network = Network((6,), [Dense(8), Dropout(0.5), Dense(3)], name="drops")
    found = comparison.compare_training(network, 4, (EAGER,), steps=2)
    assert found.mode == "eager"


def test_modes_that_are_far_behind_are_named() -> None:
    found = comparison.compare_inference(NETWORK, 3, (EAGER,), steps=2)
    probes = {"eager": 2.0, "compile": 4.9, "channels_last": 5.1}
    assert replace(found, probes_ms=probes).too_slow == {"channels_last"}
