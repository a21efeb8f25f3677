"""Minibatches of one rank, read into buffers that are reused, ahead of time or when needed."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import INPUTS
from dptrain.batch import Batch
from dptrain.data.base import Samples
from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.image_changes import (
    Encode,
    ImageChanges,
    encoded_passes,
    own_span,
)
from dptrain.data.loading.mixup import mix, mix_targets, pixel_weights
from dptrain.data.loading.sharding import Sampler
from dptrain.data.stored import CachedSamples
from dptrain.measure.input_times import InputTimes
from dptrain.network.layers import Shape

S = TypeVar("S", bound="BatchSource")

SAMPLES_PER_DRAW = 2048
"""Images whose random numbers and crop windows are computed at once. The calls take 25 µs for 32
images, 45 for 512 and 102 for 2,048 (Intel Xeon, AVX-512, 2 cores)."""


SAMPLES_PER_READ = 256
"""Stored images that a thread reads at once, if minibatches are smaller. The thread holds the
interpreter's lock, for which steps of a GPU wait, during the calls of each read. Minibatches of 32
images of 3 KB take 15 µs of processor time instead of 30 (AMD EPYC)."""

SWITCH_INTERVAL_S = 1e-4
"""Time after which a thread that computes ahead must pass the interpreter's lock to the thread that
makes steps, which otherwise waits 5 ms for it, many steps of a GPU. Mean time of a step of cifar in
bfloat16 with 32, 128 and 1,024 samples: 78.6, 125 and 620 µs instead of 84.5, 129 and 673 (one
H100)."""


class _ShortSwitchInterval:
    """Sets the interpreter's switch interval while any batch source of this process is open."""

    def __init__(self) -> None:
        self._lock, self._count, self._before = threading.Lock(), 0, 0.0

    def request(self) -> None:
        """Shorten the interval, unless another source has done so."""
        with self._lock:
            if not self._count:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before))
            self._count += 1

    def release(self) -> None:
        """Restore the interval if no other source is open."""
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


_short_interval = _ShortSwitchInterval()


class BatchSource(ABC):
    """An iterator over the batches of some steps that must be closed: use it in ``with``.

    Within the context, threads of this process pass the interpreter's lock on after
    `SWITCH_INTERVAL_S`.
    """

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the batch of the next step."""

    @abstractmethod
    def close(self) -> None:
        """End threads and drop batches that were not requested. May be called twice."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __enter__(self: S) -> S:
        _short_interval.request()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        finally:
            _short_interval.release()


class _Buffers(NamedTuple):
    """Memory of the batches that are read at once."""

    x: NDArray[Any]
    y: NDArray[Any]


_Made = tuple[Batch, _Buffers | None]
"""A batch, and the buffers that are free once it is no longer used: if it is the last batch in
them."""


class _Pass(NamedTuple):
    """A pass of a step: its number, size of the minibatch, and what this rank reads.

    Attributes:
        samples: of this rank, and the partner of the last one if they are mixed.
        changes: of images that the replica changes; None if it receives inputs.
    """

    step: int
    part: int
    global_count: int
    samples: NDArray[np.int64]
    changes: ImageChanges | None
    message: NDArray[np.uint8] | None


def _divided(
    epoch: int,
    group: list[_Pass],
    buffers: _Buffers,
    *,
    mixes: bool,
) -> Iterator[_Made]:
    """Yield the batches of passes that were read together."""
    stop = 0
    for number, (step, part, global_count, samples, changes, message) in enumerate(group, 1):
        whole = slice(stop, stop + len(samples))
        own, stop = own_span(whole, mixes=mixes), whole.stop
        windows, recolourings, mixings = (None, None, None) if changes is None else changes
        batch = Batch(
            step,
            epoch,
            buffers.x[own if windows is None else whole],
            buffers.y[own],
            samples[own_span(slice(0, len(samples)), mixes=mixes)],
            global_count,
            windows,
            recolourings,
            part,
            message,
            mixings=mixings,
        )
        yield batch, buffers if number == len(group) else None


class Loader(BatchSource):
    """Batches with their inputs, in the order of the steps and their passes.

    A thread reads up to `depth` batches ahead. It needs a core: if all cores compute, the thread
    interrupts a computation, and the caller reads samples from memory at a lower cost when they are
    needed (`depth` 0). **The arrays of a batch are overwritten after `depth` further batches, at
    least one, have been requested**: copy what is needed longer. No memory for inputs is allocated
    after the start.

    An error while reading is raised in place of its batch.

    Args:
        samples: the training split.
        sampler: order of the samples, and this rank's part.
        steps: global step numbers of the batches.
        input_shape: (C, H, W) or (F,), the network's input.
        target_shape: () for class labels, else (F,); `Dataset.target_shape`.
        augmentation: random changes of the images.
        depth: batches to read ahead.
        keeps_pixels: True yields images as `Samples.read_kept` reads them, with crop windows, so
            that the replica converts and changes them.
        encode: returns the messages of the replica that receives them; None if it has none.
        times: receives the times of reading and assembling.

    Example:
        >>> from dptrain.data import Loader, Sampler, open_data
        >>> from dptrain.network import Dense, Flatten, Network
        >>> data = open_data("digits", Network((1, 8, 8), [Flatten(), Dense(10)]))
        >>> sampler = Sampler(len(data.train), batch_size=32, seed=0)
        >>> with Loader(data.train, sampler, range(3), data.input_shape) as loader:
        ...     [batch.x.shape for batch in loader]
        [(32, 1, 8, 8), (32, 1, 8, 8), (32, 1, 8, 8)]
    """

    def __init__(
        self,
        samples: Samples,
        sampler: Sampler,
        steps: range,
        input_shape: Shape,
        target_shape: Shape = (),
        *,
        augmentation: Augmentation | None = None,
        depth: int = 2,
        keeps_pixels: bool = False,
        encode: Encode | None = None,
        times: InputTimes | None = None,
    ) -> None:
        assert depth >= 0
        if augmentation is not None:
            augmentation.check(input_shape)
        self._samples, self._sampler, self._steps = samples, sampler, steps
        self._augmentation, self._depth, self._encode = augmentation, depth, encode
        self._times = InputTimes() if times is None else times
        self._counts_at_start: tuple[int, int, int] | None = self._times.counts()
        self._input_shape, self._keeps_pixels = input_shape, keeps_pixels
        self._mixes = augmentation is not None and augmentation.mixes
        rows = sampler.largest_shard + self._mixes
        x_shape, dtype = input_shape, "float32"
        if keeps_pixels:
            x_shape, dtype = samples.readable_shape or input_shape, samples.pixels.dtype
        self._image_shape = samples.pixels.converted_shape(x_shape) if keeps_pixels else x_shape
        self._steps_per_draw = max(SAMPLES_PER_DRAW // max(rows, 1), 1)
        self._staged = self._make_staged(0 if keeps_pixels else rows, input_shape)
        self._mixes_targets = bool(self._mixes and target_shape)
        mixed = 0 if keeps_pixels or not self._mixes else rows
        self._products = np.zeros((mixed, *input_shape), np.float32)
        self._per_read = 1
        if keeps_pixels and depth:
            self._per_read = max(SAMPLES_PER_READ // max(rows, 1), 1)
        self._free: SimpleQueue[_Buffers] = SimpleQueue()
        # One is filled, and up to two have batches that are in use.
        for _ in range(max(-(-2 * depth // self._per_read), 1 if self._per_read == 1 else 3)):
            size = self._per_read * rows
            y = np.zeros((size, *target_shape), np.float32 if target_shape else np.int32)
            self._free.put(_Buffers(np.zeros((size, *x_shape), dtype), y))
        self._ready: SimpleQueue[_Made | BaseException] = SimpleQueue()
        self._in_use: deque[_Buffers | None] = deque()
        self._end: BaseException | None = None
        self._closed = threading.Event()
        self._batches = self._read_batches()
        self._thread: threading.Thread | None = None
        if depth:
            # A daemon: a read that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="dptrain-loader", daemon=True)
            self._thread.start()

    def __next__(self) -> Batch:
        if self._end is not None:
            raise self._end
        if len(self._in_use) == max(self._depth, 1):
            unused = self._in_use.popleft()
            if unused is not None:
                self._free.put(unused)
        item = self._ready.get() if self._depth else self._make()
        if isinstance(item, BaseException):
            self._end = item
            raise item
        batch, buffers = item
        self._in_use.append(buffers)
        return batch

    def close(self) -> None:
        self._end = self._end or StopIteration()
        self._closed.set()
        # These items wake threads that wait; the empty buffers are never filled, `_closed` is set.
        self._free.put(_Buffers(np.zeros(0, np.float32), np.zeros(0)))
        self._ready.put(StopIteration())
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        else:
            self._batches.close()

    # On the thread, if there is one.

    def _run(self) -> None:
        while not self._closed.is_set():
            item = self._make()
            self._ready.put(item)
            if isinstance(item, BaseException):
                break
        self._batches.close()

    def _make(self) -> _Made | BaseException:
        """Return the next batch, or the exception to raise in its place."""
        try:
            return next(self._batches)
        except BaseException as error:
            return error

    def _read_batches(self) -> Generator[_Made, None, None]:
        for (epoch, steps), (order, drawn) in self._epochs_with_order():
            for start in range(steps.start, steps.stop, self._steps_per_draw):
                if self._closed.is_set():
                    return
                part = range(start, min(start + self._steps_per_draw, steps.stop))
                yield from self._read_steps(epoch, order, drawn, part)

    def _epochs_with_order(
        self,
    ) -> Iterator[tuple[tuple[int, range], tuple[NDArray[np.int64], NDArray[np.int64]]]]:
        """Yield each epoch, its steps and its order, as `Sampler.order_and_draws` returns it.

        If a thread reads ahead, another computes the order of the next epoch meanwhile: the order
        of a million samples takes longer than the minibatches that have been read ahead.
        """
        epochs, order = self._sampler.epochs(self._steps), self._sampler.order_and_draws
        if not self._depth:
            yield from ((epoch, order(epoch[0])) for epoch in epochs)
            return
        with ThreadPoolExecutor(1, "dptrain-order") as executor:
            upcoming = ((epoch, executor.submit(order, epoch[0])) for epoch in epochs)
            present = next(upcoming, None)
            while present is not None:
                epoch, future = present
                found = future.result()
                present = next(upcoming, None)
                yield epoch, found

    def _read_steps(
        self, epoch: int, order: NDArray[np.int64], numbers: NDArray[np.int64], steps: range
    ) -> Iterator[_Made]:
        """Read the batches of steps of an epoch, until the loader is closed."""
        begin = perf_counter_ns()
        shards = list(self._sampler.shards(order, steps, following=self._mixes))
        drawn_shards = self._sampler.shards(numbers, steps, following=self._mixes)
        draws = self._draw(epoch, drawn_shards)
        first = epoch * len(self._samples) if self._samples.changes_by_epoch else 0
        drawn, mixings = 0, self._mixings(draws)
        changes = self._image_changes(shards, draws, mixings) if self._keeps_pixels else None
        self._times.add_assembling(begin)
        passes = self._passes(shards, changes)
        while group := list(islice(passes, self._per_read)):
            buffers = self._free.get()
            if self._closed.is_set():
                return
            samples = np.concatenate([one.samples for one in group]) + first
            x, y = buffers.x[: len(samples)], buffers.y[: len(samples)]
            span = slice(drawn, drawn + len(samples))
            drawn = span.stop
            if changes is not None:
                self._read_kept(samples, x, y)
            else:
                self._read(samples, x, y, None if draws is None else draws[:, span])
            if mixings is not None:
                self._mix(x, y, mixings[span])
            self._times.batches += sum(one.part == 0 for one in group)
            if group[-1].part + 1 == self._sampler.passes:
                self._leave_out_first_read()
            yield from _divided(epoch, group, buffers, mixes=self._mixes)

    def _leave_out_first_read(self) -> None:
        """Forget the times of the first read, which opens files, and may compile a kernel."""
        if self._counts_at_start is not None:
            self._times.reset(self._counts_at_start)
            self._counts_at_start = None

    def _passes(
        self,
        shards: list[tuple[range, int, NDArray[np.int64]]],
        changes: ImageChanges | None,
    ) -> Iterator[_Pass]:
        """Yield the passes of the steps of shards, whose changes are in the same order."""
        stop = 0
        for steps, global_count, mine in shards:
            spans = self._sampler.pass_spans(global_count, following=self._mixes)
            here = slice(stop, stop + mine.size)
            stop = here.stop
            made = None if changes is None else changes.by_step(here, len(steps))
            messages = encoded_passes(self._encode, spans, mine, made)
            for i, (step, samples) in enumerate(zip(steps, mine, strict=True)):
                for part, (span, encoded) in enumerate(zip(spans, messages, strict=True)):
                    message = None if encoded is None else encoded[i]
                    own = None if made is None else made.of_pass(i, span)
                    yield _Pass(step, part, global_count, samples[span], own, message)

    def _draw(
        self, epoch: int, shards: Iterator[tuple[range, int, NDArray[np.int64]]]
    ) -> NDArray[np.float64] | None:
        """Return the random numbers of the samples of shards; None if none are needed.

        Args:
            epoch: the epoch.
            shards: `Sampler.shards` of the numbers of `Sampler.order_and_draws`.
        """
        if self._augmentation is None:
            return None
        numbers = np.concatenate([mine.reshape(-1) for _, _, mine in shards])
        return self._augmentation.draw(self._sampler.seed, epoch, numbers)

    def _mixings(self, draws: NDArray[np.float64] | None) -> NDArray[np.float32] | None:
        """Return how samples are mixed, in the form of `Batch.mixings`; None if they are not."""
        augmentation = self._augmentation
        if augmentation is None or draws is None or not self._mixes:
            return None
        return augmentation.mixings(draws, self._input_shape, mixes_targets=self._mixes_targets)

    def _mix(self, x: NDArray[Any], y: NDArray[Any], mixings: NDArray[np.float32]) -> None:
        """Average samples with the next ones; the replica mixes images that it changes."""
        begin = perf_counter_ns()
        if not self._keeps_pixels:
            mix(x, pixel_weights(mixings, self._input_shape), self._products)
        if self._mixes_targets:
            mix_targets(y, mixings, self._input_shape)
        self._times.add_assembling(begin)

    def _image_changes(
        self,
        shards: list[tuple[range, int, NDArray[np.int64]]],
        draws: NDArray[np.float64] | None,
        mixings: NDArray[np.float32] | None,
    ) -> ImageChanges:
        """Return the changes of the images of minibatches.

        Args:
            shards: those of `Sampler.shards`; an image's number counts from 0 in each pass.
            draws, mixings: of all images.
        """
        rows = [np.tile(self._rows_of_step(count), len(steps)) for steps, count, _ in shards]
        shapes = self._input_shape, self._image_shape
        return ImageChanges.of(self._augmentation, draws, np.concatenate(rows), shapes, mixings)

    def _rows_of_step(self, global_count: int) -> NDArray[np.int64]:
        """Return the number of each image in its pass, for all images of a step on this rank."""
        spans = self._sampler.pass_spans(global_count, following=self._mixes)
        return np.concatenate([np.arange(span.stop - span.start) for span in spans])

    def _read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        """Read images that are not converted."""
        begin = perf_counter_ns()
        if len(indices):
            self._samples.read_kept(indices, x, y)
        self._times.add_reading(begin)

    def _read(
        self,
        indices: NDArray[np.int64],
        x: NDArray[np.float32],
        y: NDArray[Any],
        draws: NDArray[np.float64] | None,
    ) -> None:
        if not len(indices):
            return
        augmentation, samples, begin = self._augmentation, self._samples, perf_counter_ns()
        if augmentation is None or draws is None:
            samples.read(indices, x, y)
            self._times.add_reading(begin)
            return
        if not augmentation.moves:
            samples.read(indices, x, y)
            begin = self._times.add_reading(begin)
            augmentation.change(x, draws, None, indices)
        elif isinstance(samples, CachedSamples) and samples.pixels == INPUTS:
            rows = samples.rows(indices)
            samples.read_targets(rows, y)
            augmentation.change(x, draws, samples.x, rows)
        else:
            staged = self._staged[: len(indices)]
            samples.read(indices, staged, y)
            begin = self._times.add_reading(begin)
            augmentation.change(x, draws, staged, np.arange(len(indices)))
        self._times.add_assembling(begin)

    def _make_staged(self, rows: int, input_shape: Shape) -> NDArray[np.float32]:
        """Return memory for images as they are read: with the border that a crop may move over, or
        whole if they are sampled between pixels.
        """
        augmentation = self._augmentation
        if augmentation is None or not augmentation.moves:
            return np.zeros(0, np.float32)
        if isinstance(self._samples, CachedSamples) and self._samples.pixels == INPUTS:
            return np.zeros(0, np.float32)
        readable = self._samples.readable_shape or input_shape
        if augmentation.warps:
            return np.zeros((rows, *readable), np.float32)
        size = (
            min(length + 2 * augmentation.crop, largest)
            for length, largest in zip(input_shape[1:], readable[1:], strict=True)
        )
        return np.zeros((rows, input_shape[0], *size), np.float32)
