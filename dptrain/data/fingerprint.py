"""A short description of a data set by which ranks and checkpoints detect other data."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, name_of
from dptrain.data.stored import CachedSamples

EVENLY_SPACED = 64
MOST_BYTES = 4 << 20
"""Bytes of preprocessed samples that are read for a digest: fewer large samples are taken."""
MOST_CACHED_BYTES = 64 << 20
"""The same for a split that is in memory; 64 MiB take about 0.1 s."""


def data_fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Return JSON values that differ for different data sets.

    The content is represented by a digest of samples with their targets. Of a split in memory, the
    digest covers all samples up to 64 MiB, else evenly spaced ones, and all targets. Of any other
    split, it covers the first, the last and 64 evenly spaced samples (fewer if they are larger than
    30 KB). Image files are represented by their names, sizes and first bytes.

    Returns:
        kind, shape and dtype of the stored samples, number of samples in each split, SHA-256 hex
        digests of the content and of the preprocessing; the name of the function that changes
        training images, if there is one.
    """
    digest = hashlib.sha256()
    for samples in dataset.splits:
        sample_bytes = 4 * math.prod(dataset.input_shape)
        if isinstance(samples, CachedSamples):
            most = MOST_CACHED_BYTES // sample_bytes
            indices = sampled_indices(len(samples), sample_bytes, most, MOST_CACHED_BYTES)
            digest.update(np.ascontiguousarray(samples.y).data)
        else:
            indices = sampled_indices(len(samples), sample_bytes)
        weights = samples.known_weights()
        if weights is not None:
            digest.update(weights.tobytes())
        for part in samples.content(indices, dataset.input_shape, dataset.target_shape):
            digest.update(part)
    preprocessing = dataset.preprocessing
    shape, validation = preprocessing.stored_shape, dataset.validation
    counted = {} if validation is None else {"validation_samples": len(validation)}
    return {
        "kind": dataset.name,
        "shape": None if shape is None else list(shape),
        "dtype": preprocessing.stored_dtype,
        "train_samples": len(dataset.train),
        "test_samples": len(dataset.test),
        **counted,
        "content": digest.hexdigest(),
        "preprocessing": preprocessing.digest(),
        **({} if dataset.augment is None else {"augment": name_of(dataset.augment)}),
    }


def sampled_indices(
    count: int, sample_bytes: int, spaced: int = EVENLY_SPACED, most_bytes: int = MOST_BYTES
) -> NDArray[np.int64]:
    """Return the first, the last and evenly spaced indices, ascending and different.

    Args:
        count: number of samples.
        sample_bytes: size of a sample.
        spaced: largest number of evenly spaced samples.
        most_bytes: largest size of these samples together.
    """
    spaced = max(min(spaced, most_bytes // sample_bytes, count), 1)
    inside = (np.arange(spaced, dtype=np.int64) * count) // spaced
    return np.unique(np.concatenate([inside, [0, count - 1]])) if count else inside[:0]
