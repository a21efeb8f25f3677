"""Training steps and inference passes of PyTorch in each of its modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.programs.own_programs import Training, initial
from benchmarks.programs.torch_network import LOSSES, TorchNetwork, fix_dropout, parameter_names
from dptrain.network import Network


@dataclass(frozen=True)
class Mode:
    """A mode of running PyTorch."""

    name: str
    channels_last: bool = False
    compiled: bool = False

    def layout(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the layout of this mode, before the clock starts."""
        if not self.channels_last or tensor.ndim != 4:
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)

    def network(self, network: Network) -> nn.Module:
        """Return the modules in the layout of this mode, with dptrain's initial parameters."""
        modules = TorchNetwork(network, initial(network))
        for parameter in modules.parameters():
            parameter.data = self.layout(parameter.data)
        return modules

    def function(
        self, function: Callable[..., Tensor], *, frozen: bool = False
    ) -> Callable[..., Tensor]:
        """Return `function` as this mode runs it; `frozen` parameters are compile-time constants.

        It then stores them once in the order that its products like best, which made inference 3
        to 20% faster at batch 32.
        """
        if not self.compiled:
            return function
        options: dict[str, Any] = {"freezing": frozen}
        compiled: Callable[..., Tensor] = torch.compile(function, dynamic=False, options=options)
        return compiled


MODES = (
    Mode("eager"),
    Mode("channels_last", channels_last=True),
    Mode("compile", compiled=True),
    Mode("compile + channels_last", channels_last=True, compiled=True),
)


def modes_for(network: Network, *, compiled: bool) -> tuple[Mode, ...]:
    """Return the modes that differ for this network."""
    maps = len(network.input_shape) == 3
    return tuple(m for m in MODES if (maps or not m.channels_last) and (compiled or not m.compiled))


def torch_training(
    network: Network,
    x: NDArray[Any],
    y: NDArray[Any],
    mode: Mode,
    factors: Mapping[str, NDArray[Any]] | None = None,
) -> Training:
    """Return a step on a batch in the mode's layout: forward, loss, backward, update.

    Args:
        network: the network.
        x, y: the batch.
        mode: how PyTorch runs it.
        factors: of the dropout layers; None draws them in every step.
    """
    modules = mode.network(network).train()
    if factors is not None:
        fixed = {name: torch.from_numpy(factor).float() for name, factor in factors.items()}
        fix_dropout(modules, network, fixed)
    weights: list[Tensor] = list(modules.parameters())
    inputs, targets = mode.layout(torch.from_numpy(x)), torch.from_numpy(y)
    run = torch_step(network, modules, mode, inputs, targets)

    def step(learning_rate: float) -> Tensor:
        return run(learning_rate)[0]

    def parameters() -> dict[str, NDArray[Any]]:
        values = (weight.detach().numpy().copy() for weight in weights)
        return dict(zip(parameter_names(network), values, strict=True))

    return Training(step, parameters)


TorchStep = Callable[[float], tuple[Tensor, Sequence[Tensor]]]


def torch_step(
    network: Network, modules: nn.Module, mode: Mode, inputs: Tensor, targets: Tensor
) -> TorchStep:
    """Return a step on a prepared batch that returns the loss and the gradients.

    The update goes over all parameters in one call. It is the fastest of those that PyTorch has:
    `torch.optim.SGD` with ``foreach`` or ``fused`` took 0 to 50% longer a step on model0.
    """
    weights: list[Tensor] = list(modules.parameters())
    decays = [p.weight_decay for p in network.parameters]
    decayed = [i for i, decay in enumerate(decays) if decay]
    loss_function = LOSSES[network.loss.targets]
    compute = mode.function(lambda a, b: loss_function(modules(a), b))

    def step(learning_rate: float) -> tuple[Tensor, Sequence[Tensor]]:
        loss = compute(inputs, targets)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for i in decayed:
                gradients[i].add_(weights[i], alpha=decays[i])
            torch._foreach_add_(weights, gradients, alpha=-learning_rate)
        return loss.detach(), gradients

    return step


def torch_inference(network: Network, x: NDArray[Any], mode: Mode) -> Callable[[], Tensor]:
    """Return a function that computes the outputs of a batch in the mode's layout."""
    modules = mode.network(network).eval()
    inputs, compute = mode.layout(torch.from_numpy(x)), mode.function(modules, frozen=True)

    def run() -> Tensor:
        with torch.inference_mode():
            return compute(inputs)

    return run
