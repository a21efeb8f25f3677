"""A replica in the memory of a device, and how batches come there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend, Replica
from dptrain.backends.cuda.device import Device
from dptrain.backends.cuda.launching import launch
from dptrain.network.layers import Dropout
from dptrain.plan.optimizers import Adam
from dptrain.plan.plan import INPUT, STAGED, Plan


class CudaReplica(Replica):
    """A replica on a device.

    Attributes:
        device: where its memory lies and its kernels run.
        samples: int64 (N,), `Context.samples` on the device; None where nothing is dropped.
        numbers: float32 (4,), what ``step.cuh`` names, on the device.
    """

    def __init__(self, backend: Backend, plan: Plan, *, seed: int, device: Device) -> None:
        self.device = device
        drops = any(isinstance(node.layer, Dropout) for node in plan.network.nodes)
        n = plan.batch_size
        self.samples = device.zeros((n,), "int64") if plan.training and drops else None
        self.numbers = device.zeros((4,), "float32")
        super().__init__(backend, plan, seed=seed, memory=device)
        self._input = self._views[plan.resolve(INPUT)]
        _, height, width, channels = self._input.shape
        # Images as they come, unless they look the same both ways.
        staged = self._views.get(STAGED)
        self._staged = None if staged is None else staged.reshape(n, channels, height, width)
        self._turn = device.function("layout.cu", "channels_last")

    def load(self, x: NDArray[Any], y: NDArray[Any] | None, **context: Any) -> None:
        super().load(x, y, **context)
        if self.samples is not None:
            samples = np.asarray(self.context.samples, np.int64)
            self.device.upload(self.samples[: len(samples)], samples)
        self.announce()

    def announce(self) -> None:
        context, rule = self.context, self.plan.optimizer
        numbers = np.zeros(4, np.float32)
        numbers[:2] = context.learning_rate, 1.0
        if isinstance(rule, Adam) and self.updates:
            numbers[0] /= 1.0 - rule.beta1**self.updates
            numbers[1] = (1.0 - rule.beta2**self.updates) ** -0.5
        numbers[2] = context.stop
        numbers.view(np.uint32)[3] = context.step & 0xFFFFFFFF
        self.device.upload(self.numbers, numbers)

    def _load_input(self, x: NDArray[Any]) -> None:
        n, (_, height, width, channels) = len(x), self._input.shape
        if self._staged is None:
            self.device.upload(self._input[:n], x.reshape(n, height, width, channels))
            return
        self.device.upload(self._staged[:n], x)
        launch(
            self._turn, n * math.prod(self._input.shape[1:]),
            self._staged, self._input, np.int32(n), np.int32(channels), np.int32(height * width),
        )  # fmt: skip
