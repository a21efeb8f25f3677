"""Units that rounding decides are found, their effect is exact, and no other error is explained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kinks
from benchmarks.batch import random_batch
from benchmarks.coarse_check import WrongResultError, require_agreement
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU

pytestmark = pytest.mark.more

N, MARGIN = 16, 4000.0
NETWORK = Network(
    (2, 11, 10),
    [
        Conv2d(3, 3), ReLU(), MaxPool2d(3, 2, "same"), Conv2d(4, 3), ReLU(), Dropout(0.25),
        Conv2d(3, 2), MaxPool2d(2), Flatten(), Dense(6), ReLU(), Dense(3),
    ],
    name="kinks",
)  # fmt: skip


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """More units than rounding can decide."""
    monkeypatch.setattr(kinks, "MARGIN", MARGIN)
    modules, x, y = _reference()
    return sorted(kinks._find_units(NETWORK, modules, x, y, MARGIN * kinks.rounding(NETWORK, 1)))


def _reference() -> Any:
    x, y = random_batch(NETWORK, N)
    modules = kinks._float64_modules(NETWORK, N)
    return modules, torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y)


def _gradients(unit: Any = None) -> dict[str, Any]:
    """Gradients; the inputs of `unit` are moved to the other side of the kink."""
    modules, z, y = _reference()
    parameters = {}
    for i, (name, module) in enumerate(modules):
        if unit is not None and i == unit[1]:
            move = torch.zeros_like(z)
            values, elements = z[unit[2]].detach().reshape(-1), [p for p, _ in unit[3]]
            first = elements[0]
            other = values[elements[1]] if len(elements) > 1 else 0.0
            move[unit[2]].view(-1)[first] = 2 * (other - values[first])
            z = z + move
        z = module(z)
        parameters |= {f"{name}.{kind}": value for kind, value in module.named_parameters()}
    loss = torch.nn.functional.cross_entropy(z, y)
    found = torch.autograd.grad(loss, list(parameters.values()))
    return {name: g.numpy() for name, g in zip(parameters, found, strict=True)}


def test_the_change_by_a_unit_is_that_of_moving_it_over_its_kink(units: list[Any]) -> None:
    modules, x, _ = _reference()
    exact, seen = _gradients(), set()
    for unit in units:
        change, moved = kinks._change(modules, x, unit, 1.0), _gradients(unit)
        kind = type(modules[unit[1]][1]).__name__
        for name, value in change.items():
            size = np.linalg.norm(value)
            # Moving the unit also changes the outputs by its distance from the kink.
            assert np.linalg.norm(moved[name] - exact[name] - value) < 0.05 * size + 1e-4
            seen |= {kind} if size > 1e-3 else set()
    assert seen == {"ReLU", "MaxPool2d"}


def test_flipped_units_are_accepted_and_other_errors_are_not(units: list[Any]) -> None:
    flips = kinks.gradient_flips(NETWORK, N)
    exact, name = _gradients(), "conv1.weight"
    sizes = [np.linalg.norm(flip[name]) for flip in flips]
    chosen = flips[int(np.argmax(sizes))]
    flipped = {k: v + chosen[k] if k in chosen else v for k, v in exact.items()}
    with pytest.raises(WrongResultError, match=r"differ in conv"):
        require_agreement("case", flipped, exact)
    assert require_agreement("case", flipped, exact, flips=lambda: flips) < 1e-6
    # Half a flip, and an error of one array by 1e-3.
    half = {k: v + 0.5 * chosen[k] if k in chosen else v for k, v in exact.items()}
    scaled = {**flipped, name: 1.001 * flipped[name]}
    for wrong in (half, scaled):
        with pytest.raises(WrongResultError, match=r"differ in conv"):
            require_agreement("case", wrong, exact, flips=lambda: flips)
