"""Minibatches as windows of images that a device has cached: no pixels leave the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.batch import Batch
from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.image_changes import (
    Encode,
    ImageChanges,
    Messages,
    encoded_passes,
    own_span,
)
from dptrain.data.loading.loader import BatchSource
from dptrain.data.loading.mixup import mix_targets
from dptrain.data.loading.sharding import Sampler
from dptrain.data.stored import CachedSamples
from dptrain.measure.input_times import InputTimes
from dptrain.network.layers import Shape

SAMPLES_PER_PIECE = 1 << 13
"""Samples of the minibatches whose windows are computed at once. This takes 0.4 ms (Intel Xeon,
AVX-512), for part of which the thread holds the interpreter's lock."""

SPANS_AHEAD = 4
"""Spans of steps whose windows are computed ahead. The first span of an epoch takes longer, because
the order of the epoch is computed, too: 1 ms for 50,000 samples, longer than four steps of a GPU.
"""


class _Piece(NamedTuple):
    """Shards of consecutive steps whose minibatches have equal sizes.

    Attributes:
        steps: their numbers.
        global_count: samples of a minibatch, all ranks together.
        samples, targets: (steps, n, …), as in `Batch`; with the partners of the last samples of
            the passes.
        changes: (steps, n, …), of the images.
        messages: (steps, bytes) for each pass; None if there are none.
    """

    steps: range
    global_count: int
    samples: NDArray[np.int64]
    targets: NDArray[Any]
    changes: ImageChanges
    messages: Messages


class CropWindowLoader(BatchSource):
    """Batches with targets and crop windows, in the order of the steps and their passes.

    A device that waits for a batch is idle. Therefore the windows of many steps are computed in one
    piece, which is cheaper, and a thread computes the next ones while the present one is used.

    Args:
        samples: the training split.
        sampler: order of the samples, and this rank's part.
        steps: global step numbers of the batches.
        input_shape: (C, H, W) or (F,), the network's input.
        target_shape: () for class labels, else (F,); `Dataset.target_shape`.
        augmentation: random changes of the images.
        encode: returns the messages of the replica that receives the batches; None if it has none.
        times: receives the time of computing windows.
    """

    def __init__(
        self,
        samples: CachedSamples,
        sampler: Sampler,
        steps: range,
        input_shape: Shape,
        target_shape: Shape = (),
        *,
        augmentation: Augmentation | None = None,
        encode: Encode | None = None,
        times: InputTimes | None = None,
    ) -> None:
        if augmentation is not None:
            augmentation.check(input_shape)
        self._samples, self._sampler, self._steps = samples, sampler, steps
        self._input_shape, self._target_shape = input_shape, target_shape
        self._augmentation, self._encode = augmentation, encode
        self._mixes = augmentation is not None and augmentation.mixes
        self._times = InputTimes() if times is None else times
        self._order: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._batches = self._make_batches()

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()

    def _make_batches(self) -> Generator[Batch, None, None]:
        with ThreadPoolExecutor(1, "dptrain-windows") as executor:
            futures = (
                (epoch, executor.submit(self._make_pieces, epoch, steps))
                for epoch, steps in self._spans()
            )
            pending = deque(islice(futures, SPANS_AHEAD))
            while pending:
                epoch, pieces = pending.popleft()
                pending.extend(islice(futures, 1))
                for piece in pieces.result():
                    yield from self._passes(epoch, piece)

    def _passes(self, epoch: int, piece: _Piece) -> Iterator[Batch]:
        """Yield a batch for each pass of each step."""
        spans = self._sampler.pass_spans(piece.global_count, following=self._mixes)
        for i, step in enumerate(piece.steps):
            for part, span in enumerate(spans):
                own, messages = own_span(span, mixes=self._mixes), piece.messages[part]
                windows, recolourings, mixings = piece.changes.of_pass(i, span)
                yield Batch(
                    step,
                    epoch,
                    None,
                    piece.targets[i, own],
                    piece.samples[i, own],
                    piece.global_count,
                    windows,
                    recolourings,
                    part,
                    None if messages is None else messages[i],
                    mixings=mixings,
                )

    def _spans(self) -> Iterator[tuple[int, range]]:
        """Yield epochs, and steps of each whose windows are computed at once.

        The spans of an epoch have nearly equal lengths: the use of one must take as long as the
        computation of the next.
        """
        longest = max(SAMPLES_PER_PIECE // self._sampler.batch_size, 1)
        for epoch, steps in self._sampler.epochs(self._steps):
            count = -(-len(steps) // longest)
            length = -(-len(steps) // count)
            for start in steps[::length]:
                yield epoch, range(start, min(start + length, steps.stop))

    def _make_pieces(self, epoch: int, steps: range) -> list[_Piece]:
        """Return this rank's shards of steps of an epoch.

        One thread calls this for one span after another.
        """
        begin = perf_counter_ns()
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, *self._sampler.order_and_draws(epoch)
        shards = list(self._sampler.shards(self._order[1], steps, following=self._mixes))
        samples = np.concatenate([mine.reshape(-1) for _, _, mine in shards])
        rows = self._samples.rows(samples)
        dtype = np.float32 if self._target_shape else np.int32
        targets = np.empty((len(rows), *self._target_shape), dtype)
        self._samples.read_targets(rows, targets)
        changes = self._changes(epoch, steps, rows, targets)
        pieces, stop = list[_Piece](), 0
        for part, global_count, mine in shards:
            span = slice(stop, stop + mine.size)
            stop = span.stop
            own, made = targets[span], changes.by_step(span, len(part))
            spans = self._sampler.pass_spans(global_count, following=self._mixes)
            messages = encoded_passes(self._encode, spans, mine, made)
            own = own.reshape(*mine.shape, *self._target_shape)
            pieces.append(_Piece(part, global_count, mine, own, made, messages))
        self._times.add_assembling(begin)
        self._times.batches += len(steps)
        return pieces

    def _changes(
        self, epoch: int, steps: range, rows: NDArray[np.int64], targets: NDArray[Any]
    ) -> ImageChanges:
        """Return the changes of the images `rows`, and mix targets that are numbers in place."""
        kept, augmentation, draws, mixings = self._samples, self._augmentation, None, None
        shapes = self._input_shape, kept.pixels.converted_shape(kept.readable_shape)
        if augmentation is not None:
            assert self._order is not None
            shards = self._sampler.shards(self._order[2], steps, following=self._mixes)
            numbers = np.concatenate([mine.reshape(-1) for *_, mine in shards])
            draws = augmentation.draw(self._sampler.seed, epoch, numbers)
        if augmentation is not None and draws is not None and self._mixes:
            mixes_targets = bool(self._target_shape)
            mixings = augmentation.mixings(draws, shapes[0], mixes_targets=mixes_targets)
            if mixes_targets:
                mix_targets(targets, mixings, shapes[0])
        return ImageChanges.of(augmentation, draws, rows, shapes, mixings)
