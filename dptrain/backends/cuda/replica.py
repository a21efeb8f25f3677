"""A replica in the memory of a device, and how batches come there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend, Listener, Replica
from dptrain.backends.cuda.device import Array, Device
from dptrain.backends.cuda.launching import launch
from dptrain.network.layers import Dropout
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase, Setting
from dptrain.plan.optimizers import Adam
from dptrain.plan.plan import INPUT, STAGED, Plan

NUMBERS = 4
"""Of a step, as ``step.cuh`` names them."""

PLACE = 4
"""Numbers that say which part of a picture a sample is."""

ALIGNMENT = 256

FILLING_FLOPS = 16e9
"""From here on a stage fills a GPU, and two beside each other only take each other's cache. One
H200, a step in order over one with lanes: cifar in bfloat16 1.13 at batch 32, 1.20 at 256 (7 GFLOP
the largest stage), 0.82 at 2048 (60); in TF32 1.19, 1.09, 1.01."""

PRECISIONS = {"fp32": 0, "tf32": 1, "bf16": 2}
"""The macro ``PRECISION`` of ``number.cuh``."""


@dataclass(frozen=True)
class Message:
    """What a step is told, in bytes: where each part begins. The batch comes last.

    Attributes:
        target_words, sample_words: 4-byte words a sample of targets, and of sample numbers.
    """

    target_words: int
    sample_words: int
    targets: int
    samples: int
    batch: int
    nbytes: int

    @classmethod
    def of(cls, network: Network, setting: Setting) -> Message:
        """The message for steps of `network`."""
        n = setting.batch_size
        target_words = 1 if network.loss.targets == "classes" else network.num_outputs
        drops = any(isinstance(node.layer, Dropout) for node in network.nodes)
        sample_words = 2 if drops and setting.training else 0
        targets = ALIGNMENT
        samples = targets + _aligned(4 * n * target_words)
        batch = samples + _aligned(4 * n * sample_words)
        nbytes = batch + _aligned(4 * n * max(math.prod(network.input_shape), PLACE))
        return cls(target_words, sample_words, targets, samples, batch, nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class CudaReplica(Replica):
    """A replica on a device.

    A batch, its targets and all that changes from step to step travel in one message, which a
    kernel takes apart.

    Attributes:
        device: where its memory lies and its kernels run.
        samples: int64 (N,), `Context.samples` on the device; None where nothing is dropped.
        numbers: float32 (4,), what ``step.cuh`` names, on the device.
        pictures: float32 (M, C, H', W'), what `keep` was given, on the device; replicas may share
            it.
    """

    keeps_pictures = True

    def __init__(self, backend: Backend, plan: Plan, *, seed: int, device: Device) -> None:
        self.device = device
        self._message = message = Message.of(plan.network, plan.setting)
        n = plan.batch_size
        self.samples = device.zeros((n,), "int64") if message.sample_words else None
        self.numbers = device.zeros((NUMBERS,), "float32")
        self._times = device.zeros((2 * len(plan.stages) + 1,), "int64")
        self._stamp = device.function("clock.cu", "stamp")
        self.pictures: Array | None = None
        super().__init__(backend, plan, seed=seed, memory=device)
        self._input = self._views[plan.resolve(INPUT)]
        self._mailbox = device.mailbox(self._views[STAGED])
        precision = {"PRECISION": PRECISIONS[plan.precision]}
        self._take_batch = device.function("layout.cu", "take_batch", **precision)
        self._take_places = device.function("layout.cu", "take_places", **precision)

    def keep(self, pictures: NDArray[np.float32]) -> None:
        canvas = pictures.shape if pictures.ndim == 4 else (*pictures.shape, 1, 1)
        self.pictures = self.device.zeros(canvas, "float32")
        self.device.upload(self.pictures, pictures.reshape(canvas))

    def _take(self, x: NDArray[Any], y: NDArray[Any] | None, *, always: bool, kept: bool) -> None:
        message, n = self._message, len(x)
        size = math.prod(self._input.shape[1:])
        host = self._mailbox.open()
        host[: 4 * NUMBERS].view(np.float32)[:] = self._step_numbers()
        if y is not None:
            targets = host[message.targets :].view(self._target.dtype)
            targets[: y.size] = y.reshape(-1)
        if self.samples is not None:
            host[message.samples : message.samples + 8 * n].view(np.int64)[:] = self.context.samples
        dtype = np.int32 if kept else np.float32
        end = message.batch + 4 * x.size
        host[message.batch : end].view(dtype).reshape(x.shape)[...] = x
        words = self._mailbox.post(end).view("uint32")
        batch = words[message.batch // 4 :].view(np.dtype(dtype).name)
        take, source = self._take_places if kept else self._take_batch, self._source(batch, n, kept)
        target = self._target.view("uint32").reshape(-1)
        samples = self.numbers if self.samples is None else self.samples
        launch(
            take, max(n * size, NUMBERS), *source,
            words[message.targets // 4 :], target,
            np.int32(0 if y is None else n * message.target_words),
            words[message.samples // 4 :], samples.view("uint32"),
            np.int32(n * message.sample_words),
            words, self.numbers.view("uint32"), self._sums, np.int32(always),
        )  # fmt: skip
        self._mailbox.taken()

    def _source(self, batch: Array, n: int, kept: bool) -> list[Any]:
        """First arguments of the kernel that takes a batch, or places."""
        _, height, width, channels = (np.int32(size) for size in self._input.shape)
        if not kept:
            return [batch, self._input, np.int32(n), channels, height * width]
        assert self.pictures is not None, "load was told places before keep was told pictures"
        rows, columns = (np.int32(size) for size in self.pictures.shape[2:])
        return [
            self.pictures, batch, self._input, np.int32(n), channels, height, width, rows, columns
        ]  # fmt: skip

    def _step_numbers(self) -> NDArray[np.float32]:
        """What changes from step to step, as ``step.cuh`` has it."""
        context, rule = self.context, self.plan.optimizer
        numbers = np.zeros(NUMBERS, np.float32)
        numbers[:2] = context.learning_rate, 1.0
        if isinstance(rule, Adam) and self.updates:
            numbers[0] = context.learning_rate / (1.0 - rule.beta1**self.updates)
            numbers[1] = (1.0 - rule.beta2**self.updates) ** -0.5
        numbers[2] = context.stop
        numbers.view(np.uint32)[3] = context.step & 0xFFFFFFFF
        return numbers

    def announce(self) -> None:
        self.device.upload(self.numbers, self._step_numbers())

    def run(self, listener: Listener | None = None, *, in_order: bool = False) -> None:
        context = self.context
        for stage, kernel in self.stages:
            beside = stage.phase is Phase.BACKWARD_WEIGHT and stage.flops < FILLING_FLOPS
            if beside and not in_order:
                with self.device.beside():
                    kernel(context)
            else:
                kernel(context)
            if listener is not None:
                listener(stage.index)
        self.device.join()

    def stamp(self, place: int) -> None:
        self._stamp((1, 1, 1), (1, 1, 1), [self._times, np.int32(place)])

    def stamps(self) -> NDArray[np.int64]:
        times: NDArray[np.int64] = self.device.download(self._times)
        return times
