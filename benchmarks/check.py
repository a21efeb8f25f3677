"""Check that dptrain computes what PyTorch computes in float64, before anything is timed.

A backward stable program computes the exact result of slightly changed inputs (Higham, "Accuracy
and stability of numerical algorithms", 2002, section 1.5). The size of this change is known: if
roundings are independent, the error of a sum of n terms is u·√n of its size, with the unit roundoff
u (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). The effect on
the results, including units at the kink of a ReLU and near-equal maxima, is measured: the reference
runs again with parameters and inputs that are changed at random by this amount.
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
from benchmarks.batch import SEED, dropout_factors, random_batch
from benchmarks.coarse_check import WrongResultError
from benchmarks.programs.torch_network import LOSSES, TorchNetwork, fix_dropout, parameter_names
from dptrain.network import BatchNorm2d, Conv2d, Dense, Network

DRAWS = 2
MARGIN = 4.0
"""Factor of the largest change, because `DRAWS` is a small sample."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """The result of a check of one network at one batch size.

    Attributes:
        network: its name.
        batch_size: samples.
        quantity: quantity with the largest ratio of error to allowed error.
        error: its error relative to the norm of the reference.
        allowed: the allowed error.
    """

    network: str
    batch_size: int
    quantity: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether every quantity is right; NaN is wrong."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error, relative to the allowed one."""
        return self.error / self.allowed


def require(found: Check) -> None:
    """Raise `WrongResultError` if a check has failed."""
    if not found.passed:
        raise WrongResultError(
            f"{found.network}, batch {found.batch_size}: the relative error of {found.quantity} "
            f"is {found.error:.1e}; rounding explains at most {found.allowed:.1e}"
        )


def check(network: Network, batch_size: int) -> Check:
    """Compare loss, outputs and every gradient of one batch."""
    x, y = random_batch(network, batch_size)
    replica = dptrain.make_replica(network, batch_size=batch_size, seed=SEED)
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
    """Compare arrays with PyTorch in float64 and return the worst."""
    return judge(network.name, batch_size, ours, expect(network, parameters, x, y))


@dataclass(frozen=True)
class Expected:
    """Reference loss, output and gradients of a batch, and the allowed errors.

    Attributes:
        exact: arrays by name.
        allowed: errors by name, relative to the norm of the reference.
    """

    exact: Mapping[str, Array]
    allowed: Mapping[str, float]


def expect(
    network: Network,
    parameters: Mapping[str, Array],
    x: Array,
    y: NDArray[Any],
    *,
    operand: float = 0.0,
    device: str = "cpu",
    exact: Mapping[str, Array] | None = None,
) -> Expected:
    """Compute the reference with PyTorch in float64, and the changes that rounding can cause.

    Args:
        network: the network.
        parameters: by name, in canonical layout.
        x, y: the batch.
        operand: unit roundoff of the inputs, weights and outputs of a layer with weights, if it is
            larger than that of float32.
        device: device of PyTorch.
        exact: the reference, if it was computed before.
    """
    exact = exact or compute(network, parameters, x, y, device)
    epsilon = rounding(network, len(x))
    rng = np.random.default_rng(1)
    allowed = dict.fromkeys(exact, max(epsilon, operand))
    for draw in range(DRAWS):
        changed = {
            name: _change(rng, value, epsilon) * (1.0 + operand * rng.uniform(-1, 1, value.shape))
            for name, value in parameters.items()
        }
        noise = _Noise(operand, draw, device) if operand else None
        moved = compute(network, changed, _change(rng, x, epsilon), y, device, noise)
        for name, value in exact.items():
            allowed[name] = max(allowed[name], _distance(moved[name], value))
    return Expected(exact, {name: MARGIN * value for name, value in allowed.items()})


def judge(
    network: str, batch_size: int, ours: Mapping[str, NDArray[Any]], expected: Expected
) -> Check:
    """Return the worst of the arrays that both `expected` and `ours` contain."""
    errors = {
        name: _distance(np.asarray(ours[name], np.float64), value)
        for name, value in expected.exact.items()
        if name in ours
    }
    allowed = expected.allowed
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name] / allowed[name], nan=np.inf))
    return Check(network, batch_size, worst, errors[worst], allowed[worst])


def rounding(network: Network, batch_size: int) -> float:
    """Return u·Σ√n over the layers; n is the length of the longest sum of a layer."""
    total = 0.0
    for node in network.nodes:
        layer = node.layer
        if isinstance(layer, Conv2d):
            pixels = batch_size * math.prod(node.output_shape[1:])
            total += math.sqrt(max(node.parameters[0].fan_in, pixels))
        elif isinstance(layer, Dense):
            total += math.sqrt(max(node.parameters[0].fan_in, layer.units, batch_size))
        elif isinstance(layer, BatchNorm2d):
            total += math.sqrt(batch_size * math.prod(node.output_shape[1:]))
        else:
            total += 1.0
    return 0.5 * float(np.finfo(np.float32).eps) * total


def _change(rng: np.random.Generator, array: Array, epsilon: float) -> Array:
    return array * (1.0 + epsilon * rng.standard_normal(array.shape))


def _distance(array: NDArray[Any], exact: Array) -> float:
    """Return ‖array − exact‖ / ‖exact‖; infinity if only exact is 0."""
    difference = float(np.linalg.norm((array - exact).ravel()))
    size = float(np.linalg.norm(exact.ravel()))
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)


class _Noise:
    """Random relative changes of up to `size`, like rounding.

    In the backward pass, gradients are multiplied by the same factors.
    """

    def __init__(self, size: float, seed: int, device: str) -> None:
        self._size = size
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        random = torch.rand(x.shape, generator=self._generator, device=x.device, dtype=x.dtype)
        return x * (1.0 + self._size * (2.0 * random - 1.0))

    def attach(self, modules: torch.nn.Module) -> None:
        """Change the inputs and outputs of each layer with weights."""
        for module in modules.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: self(inputs[0]))
                module.register_forward_hook(lambda _, inputs, output: self(output))


def compute(
    network: Network,
    parameters: Mapping[str, NDArray[Any]],
    x: NDArray[Any],
    y: NDArray[Any],
    device: str,
    noise: _Noise | None = None,
) -> dict[str, NDArray[Any]]:
    """Compute loss, output and gradients with PyTorch, in the dtype of parameters and inputs."""
    modules = TorchNetwork(network, parameters)
    factors = dropout_factors(network, len(x))
    fix_dropout(modules, network, {name: torch.from_numpy(f) for name, f in factors.items()})
    inputs = torch.from_numpy(x).to(device)
    modules = modules.to(device, inputs.dtype)
    if noise is not None:
        noise.attach(modules)
    z = modules(inputs)
    target = torch.from_numpy(y).to(device)
    loss = LOSSES[network.loss.targets](z, target if y.dtype.kind == "i" else target.to(z.dtype))
    gradients = torch.autograd.grad(loss, list(modules.parameters()))
    named = zip(parameter_names(network), gradients, strict=True)
    return {
        "loss": loss.detach().cpu().numpy(),
        "output": z.detach().cpu().numpy(),
        **{name: gradient.cpu().numpy() for name, gradient in named},
    }
