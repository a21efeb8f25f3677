"""A replica in the memory of a GPU, and how minibatches reach it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import LOAD_STREAM, Array, Device, Function
from dptrain.backends.cuda.device.message import (
    CUTOUT,
    HYPERPARAMETERS,
    RECOLOURING,
    SERIES_STEPS,
    WINDOW,
    Message,
    Slot,
)
from dptrain.backends.device_replica import DeviceReplica, SumsFuture
from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.backends.replica import (
    Kernel,
    Listener,
    Replica,
    one_thread_at_a_time,
    weights_of,
)
from dptrain.backends.resizing import bilinear_taps
from dptrain.batch import Batch
from dptrain.network.layers import Shape
from dptrain.plan.buckets import UpdatablePrefix, updatable_prefixes
from dptrain.plan.flat import CORRECT, LOSS
from dptrain.plan.lowering import Phase
from dptrain.plan.optimizers import LAMB, Adam
from dptrain.plan.plan import INPUT, NEXT_INPUT, NEXT_TARGET, STAGED, TARGET, Plan, Stage

UNPACK_THREADS, WINDOW_PIXELS = 1024, 3
"""Threads of a block that unpacks a minibatch, and pixels of each thread if a block unpacks a crop
window, unless that takes more threads."""

UPLOAD_BYTES = 64 << 20
"""Size of the parts in which images are copied to the dataset cache."""

FILLING_FLOPS = 16e9
"""A stage with at least so many FLOPs fills a GPU, and does not overlap with others, which would
only compete for its cache. One H200, time of a step without overlap divided by time with it: cifar
in bfloat16 1.13 at batch 32, 1.20 at 256 (largest stage 7 GFLOP), 0.82 at 2048 (60 GFLOP); in TF32
1.19, 1.09, 1.01."""

EARLY_ELEMENTS, EARLY_FLOPS = 3 << 18, 512
"""Smallest layer that is updated early, in elements, and smallest number of FLOPs per updated
element of the stages that the update overlaps with. Convolutions then take about twice as long as
the update; dense layers with few samples are limited by memory bandwidth like the update. One H200,
batch 32, time of a step divided by time with the whole update at the end, in TF32 and bfloat16:
solar (4.3 million elements) 0.96 and 0.92; with a quarter of its first dense layer 1.01 and 0.98;
cifar (0.96 million) 0.98 and 0.98; solar with an eighth (0.54 million) 1.03 and 1.01; model1
(0.32 million) 1.05 and 1.04 (the last two with loads of gradients that stay in the cache)."""

MAX_FORWARD_PROGRAMS = 16
"""Captured forward passes of a replica, one for each number of samples; further ones are not
captured."""

KEPT_BATCHES, KEPT_FLOPS, KEPT_SCORES = 64, 3e10, 4
"""Most minibatches that `CudaReplica.score` repeats as one program, most operations of a forward
pass, and most such programs. The default job evaluates 9 minibatches of model0 in 0.5 ms instead of
9 (one H200); longer passes hide what the host does for each of them."""

PRECISIONS = {"fp32": 0, "tf32": 1, "bf16": 2}
"""The macro ``PRECISION`` of ``precision.cuh``."""


class _WindowKernel(NamedTuple):
    """Macros of a kernel that unpacks crop windows, see ``unpack_batch.cu``.

    Attributes:
        general: 1 if windows have maps, or recolourings matrices.
        mixes: 1 if each window is mixed with the next one.
    """

    general: int = 0
    mixes: int = 0


class _Staged(NamedTuple):
    """Properties of the minibatch that was staged last.

    Attributes:
        n: samples.
        has_targets: True if it has targets.
        always: True if it is unpacked even after a loss that is not finite.
        windows: numbers that describe the crop window of a sample; 0 if it consists of inputs.
        recolourings: numbers that describe how its colours change.
        mixings: numbers that describe how it is mixed with the next one.
        images: offset in bytes of the images after the windows; None if they are cached.
    """

    n: int
    has_targets: bool
    always: bool
    windows: int = 0
    recolourings: int = 0
    mixings: int = 0
    images: int | None = None

    @property
    def kernel(self) -> _WindowKernel:
        """What the kernel that unpacks the crop windows must do."""
        has_maps = self.windows > WINDOW + CUTOUT
        general = has_maps or self.recolourings > RECOLOURING
        return _WindowKernel(int(general), int(self.mixings > 0))


_NOTHING = _Staged(0, False, True)


class _InputBuffer(NamedTuple):
    """Where a minibatch is loaded, and what reads it from there.

    Attributes:
        input, target: inputs and targets as stages read them.
        samples, numbers, sample_weights: see `CudaReplica` and `Replica`.
        stages: see `Replica`.
        update_kernels: by elements, see `Replica.update_kernel`.
    """

    input: Array
    target: Array
    samples: Array | None
    numbers: Array
    sample_weights: Array | None
    stages: list[tuple[Stage, Kernel]]
    update_kernels: dict[tuple[int, int], Kernel]


def early_update(plan: Plan) -> UpdatablePrefix | None:
    """Return what is updated early: all up to the last large layer that later stages can hide.

    Nothing is if norms change the gradient, because they are known at the end only, or if an update
    has several passes.
    """
    if plan.squares_shape[0] or plan.passes > 1:
        return None
    stages = [stage for stage in plan.stages if stage.phase is not Phase.UPDATE]
    found, start = None, 0
    for part in updatable_prefixes(plan):
        overlapping = sum(stage.flops for stage in stages[part.after + 1 :])
        if part.stop - start >= EARLY_ELEMENTS and overlapping >= EARLY_FLOPS * part.stop:
            found = part
        start = part.stop
    return found


def _packed_taps(source: int, target: int) -> NDArray[np.float32]:
    """Return (target, 1 + T): first pixel, as the bits of an int32, and T weights of each pixel."""
    first, weights = bilinear_taps(source, target)
    return np.concatenate([first.view(np.float32)[:, None], weights], axis=1)


class CudaReplica(DeviceReplica):
    """A replica on a GPU.

    Steps with an odd and with an even staging slot read different input buffers, so that the
    minibatch of a step is unpacked to one while the step before reads the other. `load` uses the
    first one.

    Attributes:
        device: has its memory and runs its kernels.
        samples: int64 (N,), `Context.samples` on the device; None if the network has no dropout.
        numbers: float32 (6,), the hyperparameters on the device; see ``hyperparameters.cuh``.
            Both belong to the input buffer of the staged minibatch.
        cached_images: (M, C, H', W'), the data set on the device; replicas may share it.
        pixels: conversion of `cached_images` to inputs.
    """

    resizes_images, mixes_images = True, True

    def __init__(self, backend: Backend, plan: Plan, *, seed: int, device: Device) -> None:
        self.device, self.summed_statistics = device, {}
        self._message = message = Message.of(plan.network, plan.setting)
        self._allocate_numbers(plan.batch_size)
        self._times = device.pinned_memory(8 * (4 * len(plan.stages) + 2)).view(np.int64)
        self._device_times = device.device_view(self._times)
        self._record_time = device.function("clock.cu", "record_time")
        self.cached_images: Array | None = None
        self._forward_programs: dict[tuple[int, bool, float], Callable[[], None]] = {}
        self._scores: dict[Hashable, Callable[[], tuple[float, int]] | None] = {}
        self.pixels = INPUTS
        self._taps: list[Array] = [
            self.numbers,
            self.numbers,
        ]  # Not read unless images are resized.
        super().__init__(backend, plan, seed=seed, memory=device)
        self._early = early_update(plan) if plan.training else None
        self._buffers = [self._bound_buffer()]
        if NEXT_INPUT in plan.buffers:
            self._buffers.append(self._bind_again())
        self.loads_ahead = len(self._buffers) > 1
        self._select_buffer(0)
        self._staged_slots: tuple[int | None, int | None] = (None, None)
        self._free_after: int | None = None
        self._staging = device.staging_buffer(self._views[STAGED], self._loss_sums)
        self._slots = [Slot.of(host, message, self._target.dtype) for host in self._staging.host]
        self._staged = _NOTHING
        self.max_steps_in_flight = message.slots - 1
        self._unpack_batch = self._unpack_function("unpack_batch")
        self._window_functions: dict[_WindowKernel, Function] = {}
        device.load_functions()

    def _allocate_numbers(self, n: int) -> None:
        """Allocate samples and hyperparameters of a minibatch of `n` samples."""
        zeros = self.device.zeros
        self.samples = zeros((n,), "int64") if self._message.sample_words else None
        self.numbers = zeros((HYPERPARAMETERS,), "float32")

    def _bound_buffer(self) -> _InputBuffer:
        """Return the input buffer that stages are bound to, with its updates."""
        if self.plan.training:  # Not later, while a graph is captured.
            self.update_kernel()
            for part in self._update_parts() if self._early is not None else ():
                self.update_kernel(part)
        return _InputBuffer(
            self._views[INPUT], self._views[TARGET], self.samples, self.numbers,
            self.sample_weights, self.stages, self._update_kernels,
        )  # fmt: skip

    def _bind_again(self) -> _InputBuffer:
        """Return the second input buffer, with stages of its own."""
        self._allocate_numbers(self.plan.batch_size)
        self._sample_weights = self._new_sample_weights()
        self._views[INPUT], self._views[TARGET] = self._views[NEXT_INPUT], self._views[NEXT_TARGET]
        self._update_kernels = {}
        self.stages = self._bind()
        return self._bound_buffer()

    def _select_buffer(self, index: int) -> None:
        """Load minibatches to an input buffer, and read them from there, from now on."""
        self._buffer, chosen = index, self._buffers[index]
        self._input, self._target = chosen.input, chosen.target
        self._views[INPUT], self._views[TARGET] = chosen.input, chosen.target
        self.samples, self.numbers = chosen.samples, chosen.numbers
        self._sample_weights = chosen.sample_weights
        self.stages, self._update_kernels = chosen.stages, chosen.update_kernels

    def _update_parts(self) -> tuple[slice, slice]:
        """Return the elements that are updated early, and the rest."""
        assert self._early is not None
        cut = self._early.stop
        return slice(0, cut), slice(cut, self.plan.trained.size)

    @property
    def stage_lists(self) -> list[list[tuple[Stage, Kernel]]]:
        return [buffer.stages for buffer in self._buffers]

    def select_step(self, slot: int, n: int) -> None:
        self._select_buffer(slot % len(self._buffers))
        self.context.n = n

    @property
    def memory_bytes(self) -> dict[str, int]:
        cached = 0 if self.cached_images is None else int(self.cached_images.nbytes)
        return {**super().memory_bytes, **({"dataset cache": cached} if cached else {})}

    def _unpack_function(self, name: str, **defines: int) -> Function:
        precision = PRECISIONS[self.plan.precision]
        return self.device.function("unpack_batch.cu", name, PRECISION=precision, **defines)

    def _window_function(self, kernel: _WindowKernel) -> Function:
        """Return the kernel that unpacks crop windows.

        It is loaded when a minibatch of its kind is first staged, because no module can be loaded
        while a graph is captured.
        """
        if kernel not in self._window_functions:
            defines = {"BYTES": int(self.pixels.dtype == "uint8"), "GENERAL": kernel.general}
            defines["MIXES"] = kernel.mixes
            if self.device.specializes:
                names = "CHANNELS", "HEIGHT", "WIDTH", "ROWS", "COLUMNS"
                defines.update(zip(names, self._window_sizes(), strict=True))
            if self.pixels.size is not None:
                defines.update(self._resizing_macros())
            function = self._unpack_function("unpack_crop_windows", **defines)
            self._window_functions[kernel] = function
            self.device.load_functions()
        return self._window_functions[kernel]

    def _load_window_function(self) -> None:
        """Load the kernel that unpacks crop windows of other images than before."""
        self._window_functions.clear()
        self._staged = _NOTHING
        self._scores.clear()
        if self.pixels.size is not None:
            self._upload_taps(self.pixels.size)
        self._window_function(_WindowKernel())

    def _upload_taps(self, size: tuple[int, int]) -> None:
        """Upload the weights that resize cached images."""
        assert self.cached_images is not None
        self._taps = []
        for source, target in zip(self.cached_images.shape[2:], size, strict=True):
            packed = _packed_taps(source, target)
            self._taps.append(self.device.zeros(packed.shape, packed.dtype))
            self.device.upload(self._taps[-1], packed)

    def _resizing_macros(self) -> dict[str, int]:
        """Return the macros of a kernel that resizes cached images."""
        assert self.cached_images is not None
        (rows, columns), (height, width) = self._taps, self.cached_images.shape[2:]
        return {
            "ROW_TAPS": rows.shape[1] - 1, "COLUMN_TAPS": columns.shape[1] - 1,
            "STORED_ROWS": height, "STORED_COLUMNS": width,
        }  # fmt: skip

    def _window_sizes(self) -> tuple[int, int, int, int, int]:
        """Return channels, height and width of crop windows, and height and width of images.

        If images are resized, these are the sizes of resized ones.
        """
        assert self.cached_images is not None, "crop windows were staged before images were cached"
        _, height, width, channels = self._input.shape
        rows, columns = self.pixels.size or self.cached_images.shape[2:]
        if self._caches_vectors:
            return 1, 1, channels, rows, columns
        return channels, height, width, rows, columns

    @property
    def _caches_vectors(self) -> bool:
        """True if samples are vectors, which are cached as images of one channel and one row."""
        return len(self.plan.network.input_shape) == 1

    def cache_images(self, images: Any, pixels: PixelFormat = INPUTS) -> None:
        count, *shape = images.shape
        if self._caches_vectors:
            shape = [1, 1, *shape]
        cache = self.device.zeros((count, *shape), pixels.dtype)
        part = max(UPLOAD_BYTES // max(pixels.itemsize * math.prod(shape), 1), 1)
        for start in range(0, count, part):
            span = slice(start, min(start + part, count))
            self.device.upload(cache[span], images[span].reshape(-1, *shape))
        self.cached_images, self.pixels = cache, pixels
        self._load_window_function()
        self._prepare_series()

    def _prepare_series(self) -> None:
        """Make slots for steps in series, see `Message.series_bytes`."""
        assert self.cached_images is not None
        count, *shape = self.cached_images.shape
        image_bytes = 0 if count else self.pixels.itemsize * math.prod(shape)
        nbytes = self._message.series_bytes(image_bytes)
        if not (self.loads_ahead and nbytes) or self.series_slots:
            return
        # Two series use slots in turn, so that one is staged while the other one runs.
        self.series_slots = self._add_slots(2 * SERIES_STEPS, nbytes, uploads=image_bytes > 0)

    def _add_slots(self, count: int, nbytes: int, *, uploads: bool) -> range:
        """Make staging slots, see `StagingBuffer.add_slots`."""
        slots = self._staging.add_slots(count, nbytes, uploads=uploads)
        hosts = [self._staging.host[slot] for slot in slots]
        self._slots += [Slot.of(host, self._message, self._target.dtype) for host in hosts]
        return slots

    def prepare_images(self, shape: Shape, pixels: PixelFormat) -> bool:
        return self._can_stage(shape, pixels) and super().prepare_images(shape, pixels)

    def accepts_images(self, shape: Shape, pixels: PixelFormat) -> bool:
        return self._can_stage(shape, pixels) and super().accepts_images(shape, pixels)

    def _can_stage(self, shape: Shape, pixels: PixelFormat) -> bool:
        """Return True if a message can contain a minibatch of images."""
        nbytes = self._message.window_bytes(pixels.itemsize * math.prod(shape))
        capacity = self._message.nbytes - self._message.batch
        return pixels.dtype == "uint8" and nbytes <= capacity

    @property
    def image_format(self) -> tuple[Shape, PixelFormat] | None:
        if self.cached_images is None:
            return None
        shape = tuple(self.cached_images.shape[1:])
        return shape[2:] if self._caches_vectors else shape, self.pixels

    def share_cached_images(self, other: Replica) -> None:
        assert isinstance(other, CudaReplica)
        assert other.device is self.device
        self.cached_images, self.pixels = other.cached_images, other.pixels
        self._load_window_function()
        self._prepare_series()

    def load(self, batch: Batch, *, training: bool = True, stop: bool = False) -> None:
        self.stage_batch(batch, training=training, stop=stop)
        self.unpack_staged_batch()
        self.sums_future()

    def stage_batch(
        self,
        batch: Batch,
        *,
        training: bool = True,
        learning_rate: float | None = None,
        stop: bool = False,
        slot: int | None = None,
    ) -> None:
        y = self._set_context(batch, training=training, stop=stop)
        self.context.learning_rate = learning_rate or 0.0
        host = self._slots[self._staging.open_slot(slot)]
        if slot not in self.series_slots:
            self._choose_buffer(slot)
        self._write_hyperparameters(host.hyperparameters, host.hyperparameter_bits)
        if y is not None:
            host.targets[: y.size] = y.reshape(-1)
        if self.sample_weights is not None:
            host.weights[: self.context.n] = weights_of(batch)
        n, has_targets, always = self.context.n, y is not None, learning_rate is None
        windows = batch.crop_windows
        if windows is None:
            nbytes = self._write_inputs(host, batch)
            staged = _Staged(n, has_targets, always)
        else:
            nbytes, images = self._write_windows(host, batch)
            colours, mixings = (
                0 if part is None else part.shape[1] for part in (batch.recolourings, batch.mixings)
            )
            staged = _Staged(n, has_targets, always, windows.shape[1], colours, mixings, images)
        if staged != self._staged:
            self._staged = staged
            if staged.windows:
                self._window_function(staged.kernel)
        self._staging.submit(nbytes)

    def move_staged_batch(self, source: int, slot: int) -> None:
        self._staging.move_message(source, slot)
        self._choose_buffer(slot)

    def _write_inputs(self, host: Slot, batch: Batch) -> int:
        """Write samples and their inputs to a staging slot; return the size of the message."""
        x = batch.x
        assert x is not None
        if self.samples is not None:
            host.samples[: len(x)] = batch.samples
        host.batch[: x.size] = x.reshape(-1)
        return self._message.batch + 4 * x.size

    def _write_windows(self, host: Slot, batch: Batch) -> tuple[int, int | None]:
        """Write encoded crop windows, and images, to a staging slot.

        Returns:
            The size of the message, and where images begin; None if they are cached.
        """
        message, images = batch.message, batch.x
        if message is None:
            message = self._encoded(batch)
        stop = self._message.samples + len(message)
        host.message[self._message.samples : stop] = message
        if images is None:
            return stop, None
        host.message[stop : stop + images.size] = images.reshape(-1)
        return stop + images.size, stop

    def _encoded(self, batch: Batch) -> NDArray[np.uint8]:
        """Return what `encode_windows` does for a single step."""
        windows, changes = batch.crop_windows, (batch.recolourings, batch.mixings)
        assert windows is not None
        message: NDArray[np.uint8] = self.encode_windows(
            batch.samples[None],
            windows[None],
            *(None if part is None else part[None] for part in changes),
        )[0]
        return message

    def encode_windows(
        self,
        samples: NDArray[np.int64],
        windows: NDArray[np.int64],
        recolourings: NDArray[np.float32] | None,
        mixings: NDArray[np.float32] | None = None,
    ) -> NDArray[np.uint8]:
        return self._message.encode(samples, windows, recolourings, mixings)

    def _choose_buffer(self, slot: int | None) -> None:
        """Select the input buffer of a staging slot, and state when its last reader has ended.

        The step before reads the other buffer, so that the last reader is the step before that one.
        This is not known after `load`, or if both steps use the same buffer.
        """
        index = 0 if slot is None else slot % len(self._buffers)
        earlier, previous = self._staged_slots
        alternates = previous is not None and index != previous % len(self._buffers)
        self._free_after = earlier if slot is not None and alternates else None
        self._staged_slots = previous, slot
        if index != self._buffer:
            self._select_buffer(index)

    def unpack_series_step(self, slot: int, *, ahead: bool) -> None:
        if not ahead:
            self.open_series_step(slot)
            self._staging.enqueue_series_upload()
            self.unpack_staged_batch()
            return
        with self.device.side_stream(LOAD_STREAM):
            self.unpack_series_step(slot, ahead=False)

    def open_series_step(self, slot: int) -> None:
        self._staging.slot = slot
        self._select_buffer(slot % len(self._buffers))
        # The step after a series waits for all of it.
        self._staged_slots = None, None

    def end_series_step(self) -> None:
        self.device.join_streams()

    def series_future(self) -> Callable[[float], None]:
        return self._staging.series_future()

    def staged_sums(self, slot: int) -> list[float]:
        return self._staging.sums_of(slot)

    def staged_time(self, slot: int) -> int:
        return self._staging.time_of(slot)

    @property
    def staging_slot(self) -> int:
        return self._staging.slot

    @property
    def upload_ms(self) -> float:
        return self._staging.upload_ms

    def load_stream(self) -> AbstractContextManager[None]:
        return self._staging.load_stream(self._free_after)

    def unpack_staged_batch(self) -> None:
        message, staged = self._message, self._staged
        words = self._staging.message.view("uint32")
        batch = words[message.batch // 4 :].view("int32" if staged.windows else "float32")
        size = math.prod(self._input.shape[1:])
        blocks, threads = ceil_div(staged.n * size, UNPACK_THREADS), UNPACK_THREADS
        unpack = self._unpack_batch
        if staged.windows:
            unpack = self._window_function(staged.kernel)
            blocks, threads = staged.n, self._window_threads()
        target = self._target.view("uint32").reshape(-1)
        samples = self.numbers if self.samples is None else self.samples
        weights = self.numbers if self.sample_weights is None else self.sample_weights
        unpack((max(blocks, 1), 1, 1), (threads, 1, 1), [
            *self._source(batch, staged.n),
            words[message.targets // 4 :], target,
            np.int32(staged.n * message.target_words if staged.has_targets else 0),
            words[message.weights // 4 :], weights.view("uint32"),
            np.int32(staged.n * message.weight_words),
            words[message.samples // 4 :], samples.view("uint32"),
            np.int32(staged.n * message.sample_words),
            words, self.numbers.view("uint32"), self._loss_sums, np.int32(staged.always),
        ])  # fmt: skip

    def _source(self, batch: Array, n: int) -> list[Any]:
        """Return the first arguments of the kernel that unpacks a minibatch or crop windows."""
        if not self._staged.windows:
            _, height, width, channels = self._input.shape
            return [batch, self._input, np.int32(n), np.int32(channels), np.int32(height * width)]
        sizes = [np.int32(size) for size in self._window_sizes()]
        staged, images = self._staged, self.cached_images
        recolourings = mixings = self.numbers  # Not read unless there are some.
        rows = n + staged.kernel.mixes
        if staged.recolourings:
            recolourings = batch[staged.windows * rows :].view("float32")
        if staged.mixings:
            mixings = batch[(staged.windows + staged.recolourings) * rows :].view("float32")
        if staged.images is not None:
            images = self._staging.message[staged.images :]
        return [
            images, batch, recolourings, mixings, self._input, np.int32(n), *sizes,
            *self._taps, np.float32(self.pixels.scale), np.float32(self.pixels.offset),
            np.int32(staged.windows), np.int32(staged.recolourings), np.int32(staged.mixings),
        ]  # fmt: skip

    def _window_threads(self) -> int:
        """Return the threads of a block that unpacks a crop window."""
        _, height, width, *_ = self._window_sizes()
        return min(32 * ceil_div(height * width, 32 * WINDOW_PIXELS), UNPACK_THREADS)

    def _write_hyperparameters(
        self, numbers: NDArray[np.float32], bits: NDArray[np.uint32]
    ) -> None:
        """Write what ``hyperparameters.cuh`` names; `numbers` and `bits` are the same memory."""
        context, rule = self.context, self.plan.optimizer
        decay_rate = rate = context.learning_rate
        correction = 1.0
        if isinstance(rule, Adam) and self.updates:
            mean_correction = 1.0 / (1.0 - rule.beta1**self.updates)
            correction = (1.0 - rule.beta2**self.updates) ** -0.5
            if isinstance(rule, LAMB):
                decay_rate = mean_correction
            else:
                rate *= mean_correction
        numbers[0], numbers[1], numbers[2] = rate, correction, context.stop
        bits[3] = context.step & 0xFFFFFFFF
        numbers[4] = decay_rate
        if rule.average_decay is not None:
            numbers[5] = rule.average_weight(max(self.updates, 1))

    def upload_hyperparameters(self) -> None:
        numbers = np.zeros(HYPERPARAMETERS, np.float32)
        self._write_hyperparameters(numbers, numbers.view(np.uint32))
        self.device.upload(self.numbers, numbers)

    def run(
        self, listener: Listener | None = None, *, overlap: bool = True, early: bool = False
    ) -> None:
        context, part = self.context, self._early if early else None
        overlap = overlap and not self.plan.setting.recompute
        for stage, kernel in self.stages:
            may_overlap = stage.phase is Phase.BACKWARD_WEIGHT and stage.flops < FILLING_FLOPS
            if overlap and may_overlap:
                with self.device.side_stream():
                    kernel(context)
            else:
                kernel(context)
            if listener is not None:
                listener(stage.index)
            if part is not None and part.after == stage.index:
                # Before the next weight gradients: what the update reads is still in the cache.
                with self.device.side_stream():
                    self.update_kernel(self._update_parts()[0])(context)
        self.device.join_streams()

    def run_forward(self, *, loss: bool) -> None:
        """Enqueue the forward stages and, if `loss`, the loss; evaluation launches a CUDA graph."""
        context = self.context
        if context.training:  # Dropout depends on the step, so there is a graph for each.
            super().run_forward(loss=loss)
            return
        key = context.n, loss, context.scale
        if key not in self._forward_programs:
            if len(self._forward_programs) == MAX_FORWARD_PROGRAMS:
                super().run_forward(loss=loss)
                return
            enqueue = partial(super().run_forward, loss=loss)
            self._forward_programs[key] = self.device.program(enqueue)
        self._forward_programs[key]()

    @one_thread_at_a_time
    def score(
        self,
        batches: Callable[[], Iterable[Batch]],
        collect: Callable[[Batch], None] | None = None,
        *,
        key: Hashable = None,
    ) -> tuple[float, int]:
        if key is None or collect is not None:
            return super().score(batches, collect)
        program = self._kept_score(batches, key)
        return super().score(batches) if program is None else program()

    @one_thread_at_a_time
    def prepare_score(self, batches: Callable[[], Iterable[Batch]], *, key: Hashable) -> None:
        program = self._kept_score(batches, key)
        if program is not None:
            program()
            program()  # The second run is captured.

    def _kept_score(
        self, batches: Callable[[], Iterable[Batch]], key: Hashable
    ) -> Callable[[], tuple[float, int]] | None:
        """Return the program that scores minibatches; None if they are too many for one."""
        if key not in self._scores:
            kept = list(batches())
            self._scores[key] = self._score_program(kept) if self._may_keep(kept) else None
        return self._scores[key]

    def _may_keep(self, batches: Sequence[Batch]) -> bool:
        """Return whether minibatches stay in staging slots of their own: if they are few."""
        forward = sum(stage.flops for stage in self.plan.stages if stage.phase is Phase.FORWARD)
        images = self.cached_images is not None and len(self.cached_images)
        short = len(batches) <= KEPT_BATCHES and forward <= KEPT_FLOPS
        return bool(images and short and self.series_slots and len(self._scores) < KEPT_SCORES)

    def _score_program(self, batches: Sequence[Batch]) -> Callable[[], tuple[float, int]]:
        """Return a function that scores minibatches by one program."""
        nbytes = self._message.series_bytes(0)
        slots = self._add_slots(len(batches), nbytes, uploads=False)

        def enqueue() -> None:
            for slot, batch in zip(slots, batches, strict=True):
                self.stage_batch(batch._replace(global_count=1), training=False, slot=slot)
                self.open_series_step(slot)
                self.unpack_staged_batch()
                Replica.run_forward(self, loss=True)
                self.enqueue_sums_copy()
                self.device.join_streams()

        # Steps have run all kernels of a forward pass.
        program = self.device.program(enqueue, warm=self.updates > 0)

        def run() -> tuple[float, int]:
            with self._kept_sums():
                self._staging.slot = slots[-1]
                program()
                self.series_future()(math.inf)
            sums = [self.staged_sums(slot) for slot in slots]
            return sum(each[LOSS] for each in sums), sum(round(each[CORRECT]) for each in sums)

        return run

    def update_slice(self, elements: slice, learning_rate: float, *, number: int) -> None:
        self.updates = number
        self.context.learning_rate = learning_rate
        self.upload_hyperparameters()
        self.update_kernel(elements)(self.context)

    def enqueue_update(self, *, rest: bool = False) -> None:
        if rest and self._early is not None:
            self.update_kernel(self._update_parts()[1])(self.context)
        else:
            self.update_kernel()(self.context)

    def enqueue_sums_copy(self) -> None:
        self._staging.enqueue_sums_copy()

    def sums_future(self) -> SumsFuture:
        return self._staging.sums_future()

    def record_time(self, index: int) -> None:
        self._record_time((1, 1, 1), (1, 1, 1), [self._device_times, np.int32(index)])

    def recorded_times(self) -> NDArray[np.int64]:
        times: NDArray[np.int64] = self._times.copy()
        return times
