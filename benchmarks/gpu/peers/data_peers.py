"""Train PyTorch on images that are resident and augmented on the GPU."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.data import (
    BRIGHTNESS,
    CONTRAST,
    CROP,
    EPOCHS,
    LEARNING_RATE,
    SIZE,
)
from benchmarks.gpu.peers.theirs import GPUMode, capture, set_arithmetic
from benchmarks.programs.torch_programs import torch_step
from dptrain.network import Network


class AugmentedSteps:
    """Steps of PyTorch, each with its part of a random order of the images, in one CUDA graph.

    Attributes:
        start: starts a step.
    """

    def __init__(
        self, network: Network, images: NDArray[Any], labels: NDArray[Any], batch_size: int,
        mode: GPUMode,
    ) -> None:  # fmt: skip
        torch.backends.cudnn.benchmark = True
        set_arithmetic(mode.precision)
        self._images, self._labels = (
            torch.from_numpy(images).cuda(),
            torch.from_numpy(labels).cuda(),
        )
        device, self._size = self._images.device, network.input_shape[1]
        self._count, self._batch_size = len(images) // batch_size, batch_size
        self._order = torch.zeros(len(images), dtype=torch.int64, device=device)
        self._next = torch.arange(batch_size, device=device)
        self._first = self._next.clone()
        inputs = torch.zeros((batch_size, *network.input_shape), device=device)
        self._inputs = mode.layout(inputs)
        self._targets = torch.zeros(batch_size, dtype=torch.int64, device=device)
        modules = mode.network(network).cuda().train()
        self._train = partial(
            torch_step(network, modules, mode, self._inputs, self._targets), LEARNING_RATE
        )
        self._begin_epoch()
        self.start = capture(self.step) if mode.graph else self.step

    def _begin_epoch(self) -> None:
        self._order.copy_(torch.randperm(len(self._order), device=self._order.device))
        self._next.copy_(self._first)

    def step(self) -> None:
        """Load the next minibatch, change its images and train."""
        index = self._order[self._next]
        self._targets.copy_(self._labels[index])
        self._inputs.copy_(self.augmented(index))
        self._next += self._batch_size
        self._train()

    def augmented(self, index: Tensor) -> Tensor:
        """Return crops (N, C, H, W) of the images, mirrored and with other colours."""
        n, size, device = len(index), self._size, index.device
        pixels, middle = torch.arange(size, device=device), (SIZE - size) // 2
        reach = min(CROP, middle)
        top, left = torch.randint(middle - reach, middle + reach + 1, (2, n, 1), device=device)
        mirrored = torch.rand(n, 1, device=device) < 0.5
        rows = (top + pixels)[:, None, :, None]
        columns = (left + torch.where(mirrored, size - 1 - pixels, pixels))[:, None, None, :]
        channels = torch.arange(self._images.shape[1], device=device)[None, :, None, None]
        x = self._images[index[:, None, None, None], channels, rows, columns].float() / 127.5 - 1.0
        draws = 2.0 * torch.rand(2, n, 1, 1, 1, device=device) - 1.0
        mean = x.mean((2, 3), keepdim=True)
        return (x - mean) * (1.0 + CONTRAST * draws[0]) + mean + BRIGHTNESS * draws[1]

    def epochs_us(self) -> tuple[float, ...]:
        """Return the mean time of a step in µs for the epochs that count."""
        times = []
        for _ in range(EPOCHS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self._begin_epoch()
            for _ in range(self._count):
                self.start()
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - begin) / self._count)
        return tuple(times[1:-1])
