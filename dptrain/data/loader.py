"""Minibatches of one rank, read into buffers that are used again, ahead of time or when needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.data.augmentation import Augmentation, centred
from dptrain.data.base import Samples
from dptrain.data.sharding import epoch_order, minibatch_span, shard, steps_per_epoch
from dptrain.data.stored import MemorySamples
from dptrain.errors import UserError
from dptrain.network.layers import Shape

DRAWN_TOGETHER = 16
"""Steps whose random numbers are drawn at once: of 16 pictures each, 16 times 70 µs become 90."""

PLACED_TOGETHER = 1 << 16
"""Samples of the minibatches whose places are made at once: some 5 MB."""


class Batch(NamedTuple):
    """This rank's shard of one global minibatch; it may be empty.

    Attributes:
        step: global step number, from 0.
        epoch: from 0.
        x: float32 (n, C, H, W) or (n, F); None where the loader reads no pictures.
        places: int64 (n, 4), which part of which picture of the training split it would have been,
            as `Augmentation.places` has it; None where it does.
        y: int32 (n,) or float32 (n, F).
        samples: int64 (n,), indices into the training split.
        global_count: samples of the whole minibatch, all ranks together.
    """

    step: int
    epoch: int
    x: NDArray[np.float32] | None
    y: NDArray[Any]
    samples: NDArray[np.int64]
    global_count: int
    places: NDArray[np.int64] | None = None


class _Slot(NamedTuple):
    """Memory of one batch."""

    x: NDArray[np.float32]
    y: NDArray[Any]


class _Placed(NamedTuple):
    """Shards of some steps in a row whose minibatches are equally large.

    Attributes:
        steps: their numbers.
        shared: samples of a minibatch, all ranks together.
        samples, targets, places: (steps, n, …), as `Batch` has them.
    """

    steps: range
    shared: int
    samples: NDArray[np.int64]
    targets: NDArray[Any]
    places: NDArray[np.int64]


def can_be_kept(samples: Samples, augmentation: Augmentation | None) -> bool:
    """Whether a batch is no more than parts of pictures that lie in memory."""
    recolours = augmentation is not None and augmentation.recolours
    return isinstance(samples, MemorySamples) and not recolours


class Loader:
    """Batches of steps `first_step` … `last_step` − 1, in order.

    A thread reads up to `depth` batches ahead. It needs a core: where all of them compute, it
    interrupts a computation at a moment that nobody chose, and what lies in memory is read
    cheaper when it is needed, by the caller (`depth` 0). **The arrays of a batch are written
    again once `depth` further batches, at least one, have been asked for**: copy what must live
    longer. Nothing of the size of a batch's pictures is allocated after the start.

    An error while reading is raised where its batch would have come. Use the loader as a context
    manager, or call `close`.

    Args:
        samples: the training split.
        input_shape: (C, H, W) or (F,), as the network takes it.
        target_shape: () for class numbers, else (F,); `Dataset.target_shape`.
        batch_size: of the global minibatch.
        seed: of the run.
        rank, size: this rank and the number of ranks.
        first_step: global step number of the first batch, from 0.
        last_step: one past the last.
        augmentation: random changes to the pictures.
        depth: batches to read ahead.
        reads: whether batches hold pictures, or only say where they are in `samples`, which must
            be in memory then, with no more than places to change.

    Example:
        >>> from dptrain.data import open_data
        >>> from dptrain.data.loader import Loader
        >>> from dptrain.network import Dense, Flatten, Network
        >>> data = open_data("digits", Network((1, 8, 8), [Flatten(), Dense(10)]))
        >>> with Loader(data.train, input_shape=(1, 8, 8), batch_size=32, seed=0, rank=0, size=1,
        ...             first_step=0, last_step=3) as loader:
        ...     [batch.x.shape for batch in loader]
        [(32, 1, 8, 8), (32, 1, 8, 8), (32, 1, 8, 8)]
    """

    def __init__(
        self,
        samples: Samples,
        *,
        input_shape: Shape,
        target_shape: Shape = (),
        batch_size: int,
        seed: int,
        rank: int,
        size: int,
        first_step: int,
        last_step: int,
        augmentation: Augmentation | None = None,
        depth: int = 2,
        reads: bool = True,
    ) -> None:
        assert min(batch_size, depth + 1, len(samples)) >= 1
        assert 0 <= rank < size
        if augmentation is not None and len(input_shape) != 3:
            raise UserError(f"augmentation changes pictures, but the network takes {input_shape}")
        self._samples, self._augmentation = samples, augmentation
        self._batch_size, self._seed = batch_size, seed
        self._rank, self._size = rank, size
        self._steps = range(first_step, last_step)
        self._depth = depth
        self._input_shape = input_shape
        self._kept = None if reads else samples
        assert reads or can_be_kept(samples, augmentation)
        rows = -(-min(batch_size, len(samples)) // size)
        self._target_shape = target_shape
        self._target_dtype = dtype = np.float32 if target_shape else np.int32
        self._staged = self._make_staged(rows, input_shape)
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(max(2 * depth, 1)):
            x = np.zeros((rows if reads else 0, *input_shape), np.float32)
            self._free.put(_Slot(x, np.zeros((rows, *target_shape), dtype)))
        self._ready: SimpleQueue[tuple[Batch, _Slot | None] | BaseException] = SimpleQueue()
        self._lent: deque[_Slot] = deque()
        self._end: BaseException | None = None
        self._closed = threading.Event()
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._batches = self._read_batches()
        self._thread: threading.Thread | None = None
        if depth:
            # A daemon: a read that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="dptrain-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._end is not None:
            raise self._end
        if len(self._lent) == max(self._depth, 1):
            self._free.put(self._lent.popleft())
        item = self._ready.get() if self._depth else self._make()
        if isinstance(item, BaseException):
            self._end = item
            raise item
        batch, slot = item
        if slot is not None:
            self._lent.append(slot)
        return batch

    def close(self) -> None:
        """End the thread; batches not yet asked for are dropped. May be called twice."""
        self._end = self._end or StopIteration()
        self._closed.set()
        # Wakes whoever waits; a slot without memory is never filled, `_closed` being set.
        self._free.put(_Slot(np.zeros(0, np.float32), np.zeros(0)))
        self._ready.put(StopIteration())
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        else:
            self._batches.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # On the thread, if there is one.

    def _run(self) -> None:
        while not self._closed.is_set():
            item = self._make()
            self._ready.put(item)
            if isinstance(item, BaseException):
                break
        self._batches.close()

    def _make(self) -> tuple[Batch, _Slot | None] | BaseException:
        """The next batch, or what is raised in its place."""
        try:
            return next(self._batches)
        except BaseException as error:
            return error

    def _read_batches(self) -> Generator[tuple[Batch, _Slot | None], None, None]:
        if isinstance(self._kept, MemorySamples):
            yield from self._place_batches(self._kept)
            return
        for epoch, steps in self._epochs():
            order = epoch_order(len(self._samples), self._seed, epoch)
            for start in range(steps.start, steps.stop, DRAWN_TOGETHER):
                if self._closed.is_set():
                    return
                together = range(start, min(start + DRAWN_TOGETHER, steps.stop))
                yield from self._fill(epoch, order, together)

    def _epochs(self) -> Iterator[tuple[int, range]]:
        """Epochs and the steps of each that are asked for."""
        each = steps_per_epoch(len(self._samples), self._batch_size)
        first, last = self._steps.start, self._steps.stop
        while first < last:
            epoch = first // each
            stop = min((epoch + 1) * each, last)
            yield epoch, range(first, stop)
            first = stop

    def _place_batches(self, kept: MemorySamples) -> Iterator[tuple[Batch, None]]:
        """Batches that are places only.

        They come in no time, and whoever waits for one keeps a device waiting; so those of many
        steps are made at once, and the next ones beside their use.
        """
        with ThreadPoolExecutor(1, "dptrain-places") as beside:
            begun = (
                (epoch, beside.submit(self._place, kept, epoch, steps))
                for epoch, steps in self._pieces()
            )
            coming = deque(islice(begun, 1))
            while coming:
                epoch, placed = coming.popleft()
                coming.extend(islice(begun, 1))
                for steps, shared, *arrays in placed.result():
                    for step, ids, y, places in zip(steps, *arrays, strict=True):
                        yield Batch(step, epoch, None, y, ids, shared, places), None

    def _pieces(self) -> Iterator[tuple[int, range]]:
        """Epochs, and steps of each that are made together.

        Pieces of an epoch are about equally large: one piece must last for as long as the next one
        takes to make.
        """
        most = max(PLACED_TOGETHER // self._batch_size, 1)
        for epoch, steps in self._epochs():
            pieces = -(-len(steps) // most)
            together = -(-len(steps) // pieces)
            for start in steps[::together]:
                yield epoch, range(start, min(start + together, steps.stop))

    def _place(self, kept: MemorySamples, epoch: int, steps: range) -> list[_Placed]:
        """This rank's shards of such steps; called by one thread, one piece after the other.

        It takes the interpreter, which the caller needs as well, so few large calls are made.
        """
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self._samples), self._seed, epoch)
        order = self._order[1]
        each, whole = steps_per_epoch(len(order), self._batch_size), len(order) // self._batch_size
        smaller = max(steps.start, epoch * each + whole)
        parts = (range(steps.start, min(steps.stop, smaller)), range(smaller, steps.stop))
        shards = [self._shards(order, part) for part in parts if part]
        samples = np.concatenate([mine.reshape(-1) for _, _, mine in shards])
        rows = kept.rows(samples)
        change, seen, canvas = self._augmentation, self._input_shape, kept.canvas
        targets = np.empty((len(rows), *self._target_shape), self._target_dtype)
        kept.read_targets(rows, targets)
        if change is None:
            places = centred(seen, canvas, rows)
        else:
            draws = change.draw(self._seed, epoch, samples)
            places = change.places(seen, draws, canvas, rows)
        placed, end = [], 0
        for part, shared, mine in shards:
            cut, shape = slice(end, end + mine.size), mine.shape
            end = cut.stop
            placed.append(_Placed(
                part, shared, mine, targets[cut].reshape(*shape, *self._target_shape),
                places[cut].reshape(*shape, *places.shape[1:]),
            ))  # fmt: skip
        return placed

    def _shards(
        self, order: NDArray[np.int64], steps: range
    ) -> tuple[range, int, NDArray[np.int64]]:
        """Steps with equally large minibatches, how large these are, and (steps, n) samples."""
        span = minibatch_span(len(order), self._batch_size, steps.start)
        shared = span.stop - span.start
        everyone = order[span.start :][: len(steps) * shared].reshape(len(steps), shared)
        mine = shard(shared, self._rank, self._size)
        return steps, shared, np.ascontiguousarray(everyone[:, mine])

    def _fill(
        self, epoch: int, order: NDArray[np.int64], steps: range
    ) -> Iterator[tuple[Batch, _Slot]]:
        """Make the batches of steps of an epoch, until the loader is closed."""
        everyone = [order[minibatch_span(len(order), self._batch_size, step)] for step in steps]
        mine = [ids[shard(len(ids), self._rank, self._size)] for ids in everyone]
        draws, place = None, 0
        if self._augmentation is not None:
            draws = self._augmentation.draw(self._seed, epoch, np.concatenate(mine))
        for step, ids, shared in zip(steps, mine, everyone, strict=True):
            slot = self._free.get()
            if self._closed.is_set():
                return
            x, y = slot.x[: len(ids)], slot.y[: len(ids)]
            span = slice(place, place + len(ids))
            place = span.stop
            self._read(ids, x, y, None if draws is None else draws[:, span])
            yield Batch(step, epoch, x, y, ids, len(shared)), slot

    def _read(
        self,
        mine: NDArray[np.int64],
        x: NDArray[np.float32],
        y: NDArray[Any],
        draws: NDArray[np.float64] | None,
    ) -> None:
        if not len(mine):
            return
        change = self._augmentation
        if change is None or draws is None:
            self._samples.read(mine, x, y)
        elif not change.moves:
            self._samples.read(mine, x, y)
            change.change(x, draws, None, mine)
        elif isinstance(self._samples, MemorySamples):
            rows = self._samples.rows(mine)
            self._samples.read_targets(rows, y)
            change.change(x, draws, self._samples.x, rows)
        else:
            staged = self._staged[: len(mine)]
            self._samples.read(mine, staged, y)
            change.change(x, draws, staged, np.arange(len(mine)))

    def _make_staged(self, rows: int, input_shape: Shape) -> NDArray[np.float32]:
        """Memory for pictures as they are read, with what they may move over around them."""
        change = self._augmentation
        if change is None or not change.moves or isinstance(self._samples, MemorySamples):
            return np.zeros(0, np.float32)
        canvas = self._samples.canvas or input_shape
        size = (
            min(seen + 2 * change.crop, most)
            for seen, most in zip(input_shape[1:], canvas[1:], strict=True)
        )
        return np.zeros((rows, input_shape[0], *size), np.float32)
