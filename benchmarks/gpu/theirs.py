"""PyTorch's training step on a GPU, in each of its modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.clock import Program, Start, Timer, torch_timer
from benchmarks.gpu.ours import LEARNING_RATE
from benchmarks.programs import Mode, torch_step
from benchmarks.torch_network import parameter_names
from dptrain.network import Network

WARM_UP = 3
"""Steps before one is captured, as PyTorch's documentation has it."""


@dataclass(frozen=True)
class GPUMode(Mode):
    """A way of running PyTorch on a GPU.

    Attributes:
        precision: "fp32", "tf32", or "bf16" by autocast.
        graph: the whole step is captured as one CUDA graph.
    """

    precision: str = "tf32"
    graph: bool = True

    def function(
        self, function: Callable[..., Tensor], *, frozen: bool = False
    ) -> Callable[..., Tensor]:
        if self.precision != "bf16":
            return super().function(function, frozen=frozen)

        def cast(*inputs: Tensor) -> Tensor:
            # Each weight is used once in a step: nothing is there to be kept.
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                return function(*inputs)

        return super().function(cast, frozen=frozen)


def modes_for(network: Network, precision: str, *, compiled: bool) -> tuple[GPUMode, ...]:
    """PyTorch's modes of one precision that differ for this network."""
    modes = [
        GPUMode(f"{precision} eager", precision=precision, graph=False),
        GPUMode(f"{precision} graph", precision=precision),
        GPUMode(f"{precision} graph + channels_last", channels_last=True, precision=precision),
    ]
    if len(network.input_shape) != 3:
        del modes[2]
    if compiled:
        modes.append(GPUMode(f"{precision} compile + graph", compiled=True, precision=precision))
    return tuple(modes)


def set_arithmetic(precision: str) -> None:
    """Whether float32 products may round their operands to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def capture(run: Start, warm_up: int = WARM_UP, **options: Any) -> Start:
    """A CUDA graph of what `run` starts; `options` are those of `torch.cuda.graph`.

    It runs a few times before, on a stream of its own, so that nothing is left to be set up.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(warm_up):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        run()
    replay: Start = graph.replay
    return replay


class TorchProgram:
    """A step on a batch that lies ready on the GPU.

    Attributes:
        mode: how.
        memory_bytes: the most that tensors took.
    """

    def __init__(self, network: Network, x: NDArray[Any], y: NDArray[Any], mode: GPUMode) -> None:
        self.mode = mode
        self._names = parameter_names(network)
        self._decays = [parameter.weight_decay for parameter in network.parameters]
        torch.backends.cudnn.benchmark = True
        set_arithmetic(mode.precision)
        before = int(torch.cuda.memory_allocated())
        modules = mode.network(network).cuda().train()
        self._weights = list(modules.parameters())
        inputs = mode.layout(torch.from_numpy(x)).cuda()
        step = torch_step(network, modules, mode, inputs, torch.from_numpy(y).cuda())
        self._step = partial(step, LEARNING_RATE)
        # The first step looks for the fastest of cuDNN's algorithms, in memory of its own.
        self.step()
        torch.cuda.reset_peak_memory_stats()
        self._start: Start = capture(self.step) if mode.graph else self.step
        self._start()
        self.memory_bytes = int(torch.cuda.max_memory_allocated()) - before

    def step(self) -> None:
        """One step, launch by launch."""
        self._loss, self._gradients = self._step()

    @property
    def program(self) -> Program:
        """For timing; what eager steps read of PyTorch's switches is set before each block."""

        def timer(start: Start, steps: int) -> float:
            set_arithmetic(self.mode.precision)
            return clock(start, steps)

        clock: Timer = torch_timer
        return Program(self._start, timer)

    def results(self) -> dict[str, NDArray[Any]]:
        """Loss and gradients of a step, without weight decay."""
        self._start()
        torch.cuda.synchronize()
        plain = (
            gradient.double() - decay * weight.detach().double()
            for gradient, decay, weight in zip(
                self._gradients, self._decays, self._weights, strict=True
            )
        )
        named = zip(self._names, plain, strict=True)
        gradients = {name: value.contiguous().cpu().numpy() for name, value in named}
        return {"loss": self._loss.double().cpu().numpy(), **gradients}
