"""Whether dptrain computes what PyTorch computes in float64: asked before anything is timed.

A right program gives the exact result of slightly changed numbers (Higham, "Accuracy and stability
of numerical algorithms", 2002, section 1.5). How much the numbers may change is known: a sum of n
terms is off by u·√n of its size, u the unit roundoff, where roundings are independent (Higham and
Mary, "A new approach to probabilistic rounding error analysis", 2019). How far results then move,
units at the kink of a ReLU and near-equal maxima included, is measured: the exact program runs
again on parameters and inputs that are changed at random by that much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dptrain
from benchmarks.torch_network import (
    LOSSES,
    fix_dropout,
    parameter_names,
    random_batch,
    torch_network,
)
from dptrain.network import Conv2d, Dense, Dropout, Network
from dptrain.plan.random import dropout_keep

SEED = 0
DRAWS = 2
MARGIN = 4.0
"""Times the largest movement seen in `DRAWS` draws, which are few."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One network at one batch size.

    Attributes:
        network: its name.
        batch_size: samples.
        quantity: what is farthest from exact, in units of what is allowed.
        error: its distance from exact, relative to the size of the exact array.
        allowed: what that may be.
    """

    network: str
    batch_size: int
    quantity: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether every quantity is right; NaN is not."""
        return self.error <= self.allowed


class WrongResultError(Exception):
    """dptrain and PyTorch differ by more than rounding."""


def check(network: Network, batch_size: int) -> Check:
    """Compare loss, outputs and every gradient of one batch."""
    x, y = random_batch(network, batch_size)
    replica = dptrain.compile(network, batch_size=batch_size, seed=SEED)
    parameters = {name: np.asarray(value, np.float64) for name, value in replica.parameters.items()}
    loss = replica.forward_backward(x, y)
    ours = {"loss": np.array(loss), "output": replica.output(), **replica.gradients}
    return compare(network, batch_size, ours, parameters, x.astype(np.float64), y)


def compare(
    network: Network,
    batch_size: int,
    ours: Mapping[str, NDArray[Any]],
    parameters: Mapping[str, Array],
    x: Array,
    y: NDArray[Any],
) -> Check:
    """The worst of what `ours` names, against PyTorch in float64."""
    exact = _compute(network, parameters, x, y)
    epsilon = rounding(network, batch_size)
    rng = np.random.default_rng(1)
    allowed = dict.fromkeys(exact, epsilon)
    for _ in range(DRAWS):
        changed = {name: _change(rng, value, epsilon) for name, value in parameters.items()}
        moved = _compute(network, changed, _change(rng, x, epsilon), y)
        for name, value in exact.items():
            allowed[name] = max(allowed[name], _distance(moved[name], value))
    errors = {name: _distance(np.asarray(ours[name]), value) for name, value in exact.items()}
    worst = max(exact, key=lambda name: np.nan_to_num(errors[name] / allowed[name], nan=np.inf))
    return Check(network.name, batch_size, worst, errors[worst], MARGIN * allowed[worst])


def rounding(network: Network, batch_size: int) -> float:
    """u·Σ√n over the layers, n the length of a layer's longest sum."""
    total = 0.0
    for node in network.nodes:
        layer = node.layer
        if isinstance(layer, Conv2d):
            pixels = batch_size * math.prod(node.output_shape[1:])
            total += math.sqrt(max(node.parameters[0].fan_in, pixels))
        elif isinstance(layer, Dense):
            total += math.sqrt(max(node.parameters[0].fan_in, layer.units, batch_size))
        else:
            total += 1.0
    return 0.5 * float(np.finfo(np.float32).eps) * total


def _change(rng: np.random.Generator, array: Array, epsilon: float) -> Array:
    return array * (1.0 + epsilon * rng.standard_normal(array.shape))


def _distance(array: NDArray[Any], exact: Array) -> float:
    """‖array − exact‖ / ‖exact‖; where exact is 0, anything but 0 is infinitely far."""
    difference = float(np.linalg.norm((array - exact).ravel()))
    size = float(np.linalg.norm(exact.ravel()))
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)


def _compute(
    network: Network, parameters: Mapping[str, Array], x: Array, y: NDArray[Any]
) -> dict[str, Array]:
    modules = torch_network(network, parameters)
    fix_dropout(modules, network, _dropout_factors(network, len(x)))
    z = modules(torch.from_numpy(x))
    target = torch.from_numpy(y)
    loss = LOSSES[network.loss.targets](z, target if y.dtype.kind == "i" else target.double())
    gradients = torch.autograd.grad(loss, list(modules.parameters()))
    named = zip(parameter_names(network), gradients, strict=True)
    return {
        "loss": loss.detach().numpy(),
        "output": z.detach().numpy(),
        **{name: gradient.numpy() for name, gradient in named},
    }


def _dropout_factors(network: Network, n: int) -> dict[str, torch.Tensor]:
    """Our masks: PyTorch's own random numbers cannot be keyed by sample."""
    factors = {}
    for node in network.nodes:
        if isinstance(node.layer, Dropout):
            channels, height, width = node.output_maps
            keep = dropout_keep(
                node.layer.rate, channels * height * width, seed=SEED, step=0, layer=node.index,
                samples=np.arange(n, dtype=np.int64),
            )  # fmt: skip
            maps = keep.reshape(n, height, width, channels).transpose(0, 3, 1, 2)
            factor = torch.from_numpy(maps / (1.0 - node.layer.rate))
            factors[node.name] = factor.reshape(n, *node.output_shape)
    return factors
