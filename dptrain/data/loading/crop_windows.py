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
from dptrain.data.loading.augmentation import Augmentation, centred_windows
from dptrain.data.loading.loader import BatchSource, Encode, Messages, by_step, encoded_passes
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
        samples, targets, windows, recolourings: (steps, n, …), as in `Batch`.
        messages: (steps, bytes) for each pass; None if there are none.
    """

    steps: range
    global_count: int
    samples: NDArray[np.int64]
    targets: NDArray[Any]
    windows: NDArray[np.int64]
    recolourings: NDArray[np.float32] | None
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
        spans = self._sampler.pass_spans(piece.global_count)
        for i, step in enumerate(piece.steps):
            for part, span in enumerate(spans):
                colours = None if piece.recolourings is None else piece.recolourings[i, span]
                messages = piece.messages[part]
                yield Batch(
                    step,
                    epoch,
                    None,
                    piece.targets[i, span],
                    piece.samples[i, span],
                    piece.global_count,
                    piece.windows[i, span],
                    colours,
                    part,
                    None if messages is None else messages[i],
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
        shards = list(self._sampler.shards(self._order[1], steps))
        samples = np.concatenate([mine.reshape(-1) for _, _, mine in shards])
        rows = self._samples.rows(samples)
        dtype = np.float32 if self._target_shape else np.int32
        targets = np.empty((len(rows), *self._target_shape), dtype)
        self._samples.read_targets(rows, targets)
        kept, augmentation = self._samples, self._augmentation
        shape = kept.pixels.converted_shape(kept.readable_shape)
        recolourings = None
        if augmentation is None:
            windows = centred_windows(self._input_shape, shape, rows)
        else:
            numbers = [mine.reshape(-1) for *_, mine in self._sampler.shards(self._order[2], steps)]
            draws = augmentation.draw(self._sampler.seed, epoch, np.concatenate(numbers))
            windows = augmentation.crop_windows(self._input_shape, draws, shape, rows)
            if augmentation.recolours:
                recolourings = augmentation.recolourings(draws, self._input_shape[0])
        pieces, stop = list[_Piece](), 0
        for part, global_count, mine in shards:
            span = slice(stop, stop + mine.size)
            stop = span.stop
            arrays = (
                mine,
                targets[span].reshape(*mine.shape, *self._target_shape),
                by_step(windows[span], mine),
                None if recolourings is None else by_step(recolourings[span], mine),
            )
            spans = self._sampler.pass_spans(global_count)
            messages = encoded_passes(self._encode, spans, mine, *arrays[2:])
            pieces.append(_Piece(part, global_count, *arrays, messages))
        self._times.add_assembling(begin)
        self._times.batches += len(steps)
        return pieces
