"""Weights of the samples of each minibatch, from the weights of all training samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.batch import Batch
from dptrain.data.loading.loader import BatchSource
from dptrain.data.loading.sharding import Sampler


class WeightedBatches(BatchSource):
    """The batches of another source, with weights.

    The loss of a minibatch is the weighted mean Σ wᵢ lᵢ / Σ wᵢ over its samples on all ranks and in
    all passes. The weight of a sample in a batch is wᵢ n / Σ wᵢ, because a replica divides by the
    number n of samples. Every rank computes the sum from the order of the epoch, so that ranks
    exchange nothing. If the sum is 0, so are the weights.

    Args:
        batches: batches of any source.
        sampler: of these batches.
        weights: (samples,), one for each training sample; at least 0.

    Example:
        >>> from dptrain.data import Loader, Sampler, open_data
        >>> from dptrain.network import Dense, Flatten, Network
        >>> data = open_data("digits", Network((1, 8, 8), [Flatten(), Dense(10)]))
        >>> sampler = Sampler(len(data.train), batch_size=32, seed=0)
        >>> loader = Loader(data.train, sampler, range(3), data.input_shape)
        >>> weights = 1.0 + (data.train.known_targets() == 7)
        >>> with WeightedBatches(loader, sampler, weights) as batches:
        ...     [round(float(batch.weights.mean()), 6) for batch in batches]
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self, batches: BatchSource, sampler: Sampler, weights: NDArray[np.float64]
    ) -> None:
        self._batches, self._sampler, self._weights = batches, sampler, weights
        self._epoch = -1
        self._sums = np.zeros(0)

    def __next__(self) -> Batch:
        batch, steps = next(self._batches), self._sampler.steps_per_epoch
        if batch.epoch != self._epoch:
            self._epoch = batch.epoch
            order = self._sampler.order(batch.epoch)
            starts = np.arange(steps) * self._sampler.batch_size
            self._sums = np.add.reduceat(self._weights[order], starts)
        total = float(self._sums[batch.step % steps])
        factor = batch.global_count / total if total else 0.0
        return batch._replace(weights=np.float32(self._weights[batch.samples] * factor))

    def close(self) -> None:
        self._batches.close()
