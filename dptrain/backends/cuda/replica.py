"""A replica in the memory of a device, and how batches come there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend
from dptrain.backends.cuda.device import Array, Device
from dptrain.backends.cuda.gemm_tiles import ceil_div
from dptrain.backends.replica import Listener, Replica
from dptrain.network.layers import Dropout
from dptrain.network.network import Network
from dptrain.plan.buckets import Settled, settled
from dptrain.plan.lowering import Phase, Setting
from dptrain.plan.optimizers import Adam
from dptrain.plan.plan import INPUT, STAGED, Plan

NUMBERS = 4
"""Of a step, as ``hyperparameters.cuh`` names them."""

PLACE = 4
"""Numbers that say which part of a picture a sample is."""

ALIGNMENT = 256

TAKERS = 1024
"""Threads of a block that takes a batch; one takes a sample, where that is a place."""

SMALL_BYTES, MOST_TURNS = 1 << 20, 4
"""Of messages of which more than two may be under way: a step of few samples takes a GPU less time
than the host now and then needs for one, so several should be waiting."""

FILLING_FLOPS = 16e9
"""From here on a stage fills a GPU, and two beside each other only take each other's cache. One
H200, a step in order over one with lanes: cifar in bfloat16 1.13 at batch 32, 1.20 at 256 (7 GFLOP
the largest stage), 0.82 at 2048 (60); in TF32 1.19, 1.09, 1.01."""

EARLY_ELEMENTS, EARLY_FLOPS = 3 << 18, 512
"""Elements of a layer that is worth an update of its own, and operations for each element updated
that the stages beside have at least: convolutions then take about twice as long, where dense layers
of few samples wait for memory as it does. One H200, a step of 32 samples in TF32 and in bfloat16,
over one with all of its update at the end: solar, 4.3 million elements, 0.96 and 0.92; with a
quarter of its first dense layer, 1.01 and 0.98; cifar, 0.96 million, 0.98 and 0.98; solar with an
eighth, 0.54 million, 1.03 and 1.01; model1, 0.32 million, 1.05 and 1.04 (the last two with loads of
gradients that stay in the cache)."""

PRECISIONS = {"fp32": 0, "tf32": 1, "bf16": 2}
"""The macro ``PRECISION`` of ``precision.cuh``."""


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

    @property
    def turns(self) -> int:
        """Messages that may be under way."""
        return MOST_TURNS if self.nbytes <= SMALL_BYTES else 2


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Slot(NamedTuple):
    """A message's parts in the host's memory.

    Numbers and words lie at the same place, and so do places and batch.
    """

    numbers: NDArray[np.float32]
    words: NDArray[np.uint32]
    targets: NDArray[Any]
    samples: NDArray[np.int64]
    places: NDArray[np.int32]
    batch: NDArray[np.float32]

    @classmethod
    def of(cls, host: NDArray[np.uint8], message: Message, target: Any) -> _Slot:
        """The parts of `host`."""
        return cls(
            numbers=host[: 4 * NUMBERS].view(np.float32),
            words=host[: 4 * NUMBERS].view(np.uint32),
            targets=host[message.targets : message.samples].view(target),
            samples=host[message.samples : message.batch].view(np.int64),
            places=host[message.batch :].view(np.int32),
            batch=host[message.batch :].view(np.float32),
        )


class _Sent(NamedTuple):
    """Of the message that was posted last: samples, and what `Replica._send` was told."""

    n: int
    has_targets: bool
    always: bool
    kept: bool


def early_update(plan: Plan) -> Settled | None:
    """What is updated beside later stages: all up to the last large layer that these can hide."""
    stages = [stage for stage in plan.stages if stage.phase is not Phase.UPDATE]
    found, start = None, 0
    for part in settled(plan):
        beside = sum(stage.flops for stage in stages[part.after + 1 :])
        if part.stop - start >= EARLY_ELEMENTS and beside >= EARLY_FLOPS * part.stop:
            found = part
        start = part.stop
    return found


class CudaReplica(Replica):
    """A replica on a device.

    A batch, its targets and all that changes from step to step travel in one message, which a
    kernel takes apart.

    Attributes:
        device: where its memory lies and its kernels run.
        samples: int64 (N,), `Context.samples` on the device; None where nothing is dropped.
        numbers: float32 (4,), what ``hyperparameters.cuh`` names, on the device.
        pictures: float32 (M, C, H', W'), what `keep` was given, on the device; replicas may share
            it.
    """

    @property
    def memory_bytes(self) -> dict[str, int]:
        kept = 0 if self.pictures is None else int(self.pictures.nbytes)
        return {**super().memory_bytes, **({"pictures": kept} if kept else {})}

    keeps_pictures = True

    def __init__(self, backend: Backend, plan: Plan, *, seed: int, device: Device) -> None:
        self.device = device
        self._message = message = Message.of(plan.network, plan.setting)
        n = plan.batch_size
        self.samples = device.zeros((n,), "int64") if message.sample_words else None
        self.numbers = device.zeros((NUMBERS,), "float32")
        places = 2 * len(plan.stages) + 2
        self._times = device.host_memory(8 * places).view(np.int64)
        self._noted = device.reach(self._times)
        self._stamp = device.function("clock.cu", "record_time")
        self.pictures: Array | None = None
        super().__init__(backend, plan, seed=seed, memory=device)
        self._early = early_update(plan) if plan.training else None
        if self._early is not None:
            cut, size = self._early.stop, plan.layout.size
            self._update_early = backend.bind_update(self, slice(0, cut))
            self._update_rest = backend.bind_update(self, slice(cut, size))
        self._input = self._views[plan.resolve(INPUT)]
        self._mailbox = device.mailbox(self._views[STAGED], self._sums)
        self._slots = [_Slot.of(host, message, self._target.dtype) for host in self._mailbox.host]
        self._sent = _Sent(0, False, True, False)
        self.ahead = message.turns - 1
        precision = {"PRECISION": PRECISIONS[plan.precision]}
        self._take_batch = device.function("unpack_batch.cu", "unpack_batch", **precision)
        self._take_places = device.function("unpack_batch.cu", "unpack_crop_windows", **precision)

    def keep(self, pictures: NDArray[np.float32]) -> None:
        canvas = pictures.shape if pictures.ndim == 4 else (*pictures.shape, 1, 1)
        self.pictures = self.device.zeros(canvas, "float32")
        self.device.upload(self.pictures, pictures.reshape(canvas))

    def keep_same(self, other: Replica) -> None:
        assert isinstance(other, CudaReplica)
        assert other.device is self.device
        self.pictures = other.pictures

    def _send(self, x: NDArray[Any], y: NDArray[Any] | None, *, always: bool, kept: bool) -> None:
        slot = self._slots[self._mailbox.open()]
        self._write_numbers(slot.numbers, slot.words)
        if y is not None:
            slot.targets[: y.size] = y.reshape(-1)
        if self.samples is not None:
            slot.samples[: len(x)] = self.context.samples
        size = x.size
        (slot.places if kept else slot.batch)[:size] = x.reshape(-1)
        self._sent = _Sent(len(x), y is not None, always, kept)
        self._mailbox.post(self._message.batch + 4 * size)

    @property
    def turn(self) -> int:
        return self._mailbox.turn

    def take(self) -> None:
        message, sent = self._message, self._sent
        words = self._mailbox.message.view("uint32")
        batch = words[message.batch // 4 :].view("int32" if sent.kept else "float32")
        take = self._take_places if sent.kept else self._take_batch
        size = math.prod(self._input.shape[1:])
        target = self._target.view("uint32").reshape(-1)
        samples = self.numbers if self.samples is None else self.samples
        blocks = sent.n if sent.kept else ceil_div(sent.n * size, TAKERS)
        take((max(blocks, 1), 1, 1), (TAKERS, 1, 1), [
            *self._source(batch, sent.n, sent.kept),
            words[message.targets // 4 :], target,
            np.int32(sent.n * message.target_words if sent.has_targets else 0),
            words[message.samples // 4 :], samples.view("uint32"),
            np.int32(sent.n * message.sample_words),
            words, self.numbers.view("uint32"), self._sums, np.int32(sent.always),
        ])  # fmt: skip

    def tell(self) -> None:
        self._mailbox.reply()

    def begun(self) -> Callable[[float], list[float]]:
        return self._mailbox.sent()

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

    def _write_numbers(self, numbers: NDArray[np.float32], words: NDArray[np.uint32]) -> None:
        """Write what changes from step to step, as ``hyperparameters.cuh`` declares it.

        Both arguments are views of the same memory.
        """
        context, rule = self.context, self.plan.optimizer
        rate, correction = context.learning_rate, 1.0
        if isinstance(rule, Adam) and self.updates:
            rate /= 1.0 - rule.beta1**self.updates
            correction = (1.0 - rule.beta2**self.updates) ** -0.5
        numbers[0], numbers[1], numbers[2] = rate, correction, context.stop
        words[3] = context.step & 0xFFFFFFFF

    def announce(self) -> None:
        numbers = np.zeros(NUMBERS, np.float32)
        self._write_numbers(numbers, numbers.view(np.uint32))
        self.device.upload(self.numbers, numbers)

    def run(
        self,
        listener: Listener | None = None,
        *,
        in_order: bool = False,
        updating: bool = False,
    ) -> None:
        context, early = self.context, self._early if updating else None
        for stage, kernel in self.stages:
            beside = stage.phase is Phase.BACKWARD_WEIGHT and stage.flops < FILLING_FLOPS
            if beside and not in_order:
                with self.device.beside():
                    kernel(context)
            else:
                kernel(context)
            if listener is not None:
                listener(stage.index)
            if early is not None and early.after == stage.index:
                # In front of the next gradients of weights: what it reads is in the cache still.
                with self.device.beside():
                    self._update_early(context)
        self.device.join()

    def apply_update(self, *, rest: bool = False) -> None:
        if rest and self._early is not None:
            self._update_rest(self.context)
        else:
            super().apply_update()

    def stamp(self, place: int) -> None:
        self._stamp((1, 1, 1), (1, 1, 1), [self._noted, np.int32(place)])

    def stamps(self) -> NDArray[np.int64]:
        times: NDArray[np.int64] = self._times.copy()
        return times
