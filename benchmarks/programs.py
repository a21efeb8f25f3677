"""A training step and an inference pass, by dptrain and by PyTorch in each of its modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import dptrain
from benchmarks.timing import Program
from benchmarks.torch_network import LOSSES, torch_network
from dptrain.network import Network
from dptrain.network.initial import initial_parameters

LEARNING_RATE = 1e-8
"""Small, so that hundreds of steps on one batch leave the numbers as they are."""


@dataclass(frozen=True)
class Mode:
    """A way of running PyTorch."""

    name: str
    channels_last: bool = False
    compiled: bool = False

    def layout(self, tensor: Tensor) -> Tensor:
        """`tensor` as this mode wants it; done before the clock starts."""
        if not self.channels_last or tensor.ndim != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)

    def network(self, network: Network) -> nn.Sequential:
        """`network` in this mode's layout, with dptrain's initial parameters."""
        modules = torch_network(network, initial(network))
        for parameter in modules.parameters():
            parameter.data = self.layout(parameter.data)
        return modules

    def function(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` as this mode runs it."""
        if not self.compiled:
            return function
        compiled: Callable[..., Tensor] = torch.compile(function, dynamic=False)
        return compiled


MODES = (
    Mode("eager"),
    Mode("channels_last", channels_last=True),
    Mode("compile", compiled=True),
    Mode("compile + channels_last", channels_last=True, compiled=True),
)


def modes_for(network: Network, *, compiled: bool) -> tuple[Mode, ...]:
    """Modes that differ for this network."""
    maps = len(network.input_shape) == 3
    return tuple(m for m in MODES if (maps or not m.channels_last) and (compiled or not m.compiled))


def dptrain_step(network: Network, x: NDArray[Any], y: NDArray[Any]) -> Program:
    """Copy the batch in, forward, loss, backward, update."""
    replica = dptrain.compile(network, batch_size=len(x))
    samples = np.arange(len(x), dtype=np.int64)

    def step() -> float:
        replica.load(x, y, samples=samples)
        replica.run()
        replica.update(LEARNING_RATE)
        return float(replica.sums[0])

    return step


def torch_step(network: Network, x: NDArray[Any], y: NDArray[Any], mode: Mode) -> Program:
    """Forward, loss, backward, update in place; the batch lies ready in the mode's layout.

    The update goes over all parameters in one call. It is the fastest of those that PyTorch has:
    `torch.optim.SGD` with ``foreach`` or ``fused`` took 0 to 50% longer a step on model0.
    """
    modules = mode.network(network).train()
    weights: list[Tensor] = list(modules.parameters())
    decays = [p.weight_decay for p in network.parameters]
    decayed = [i for i, decay in enumerate(decays) if decay]
    loss_function = LOSSES[network.loss.targets]
    inputs, targets = mode.layout(torch.from_numpy(x)), torch.from_numpy(y)
    compute = mode.function(lambda a, b: loss_function(modules(a), b))

    def step() -> Tensor:
        loss = compute(inputs, targets)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for i in decayed:
                gradients[i].add_(weights[i], alpha=decays[i])
            torch._foreach_add_(weights, gradients, alpha=-LEARNING_RATE)
        return loss

    return step


def dptrain_inference(network: Network, x: NDArray[Any]) -> Program:
    """Outputs of a batch."""
    replica = dptrain.compile(network, batch_size=len(x), training=False)
    return lambda: replica.forward(x)


def torch_inference(network: Network, x: NDArray[Any], mode: Mode) -> Program:
    """Outputs of a batch that lies ready in the mode's layout."""
    modules = mode.network(network).eval()
    inputs, compute = mode.layout(torch.from_numpy(x)), mode.function(modules)

    def run() -> Tensor:
        with torch.inference_mode():
            return compute(inputs)

    return run


def initial(network: Network) -> Mapping[str, NDArray[np.float32]]:
    """Parameters that dptrain starts with at seed 0."""
    parameters = initial_parameters(network, 0)
    return {name: np.asarray(value, np.float32) for name, value in parameters.items()}
