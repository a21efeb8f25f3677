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
from benchmarks.programs.torch_network import parameter_names
from benchmarks.programs.torch_programs import Mode, torch_step
from dptrain.network import Network

WARM_UP = 3
"""Steps before the capture, as PyTorch's documentation recommends."""


@dataclass(frozen=True)
class GPUMode(Mode):
    """A mode of running PyTorch on a GPU.

    Attributes:
        precision: "fp32", "tf32", or "bf16" (autocast).
        graph: whether the step is captured as one CUDA graph.
    """

    precision: str = "tf32"
    graph: bool = True

    def function(
        self, function: Callable[..., Tensor], *, frozen: bool = False
    ) -> Callable[..., Tensor]:
        if self.precision != "bf16":
            return super().function(function, frozen=frozen)

        def cast(*inputs: Tensor) -> Tensor:
            # Each weight is used once in a step, so caching casts saves nothing.
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                return function(*inputs)

        return super().function(cast, frozen=frozen)


def modes_for(network: Network, precision: str, *, compiled: bool) -> tuple[GPUMode, ...]:
    """Return PyTorch's modes of one precision that differ for this network."""
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
    """Allow or forbid TF32 in float32 products."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@dataclass(frozen=True)
class Replay:
    """Launches a graph, and refers to everything that it reads.

    A graph contains addresses only. Without the reference, PyTorch would release tensors that only
    the captured function refers to, such as weights, and return their memory to the GPU when cuDNN
    measures its algorithms for the next program. The graph would then read unmapped addresses.

    Attributes:
        graph: the captured graph.
        run: the function that was captured.
    """

    graph: torch.cuda.CUDAGraph
    run: Start

    def __call__(self) -> None:
        self.graph.replay()


def capture(run: Start, warm_up: int = WARM_UP, **options: Any) -> Start:
    """Capture the work of `run` as a CUDA graph; `options` are those of `torch.cuda.graph`.

    The work first runs several times on another stream, which completes lazy initialization.
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
    return Replay(graph, run)


class TorchProgram:
    """PyTorch's step on a batch in GPU memory.

    Attributes:
        mode: the mode.
        memory_bytes: peak memory of tensors.
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
        # The first step times cuDNN's algorithms, with additional memory.
        self.step()
        torch.cuda.reset_peak_memory_stats()
        self._start: Start = capture(self.step) if mode.graph else self.step
        self._start()
        self.memory_bytes = int(torch.cuda.max_memory_allocated()) - before

    def step(self) -> None:
        """Run one step without a graph."""
        self._loss, self._gradients = self._step()

    @property
    def program(self) -> Program:
        """The step as a timed program; PyTorch's precision switches are set before each block."""

        def timer(start: Start, steps: int) -> float:
            set_arithmetic(self.mode.precision)
            return clock(start, steps)

        clock: Timer = torch_timer
        return Program(self._start, timer)

    def results(self) -> dict[str, NDArray[Any]]:
        """Return loss and gradients of a step, without weight decay."""
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
