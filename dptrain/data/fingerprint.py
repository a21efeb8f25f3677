"""A short description of a data set by which ranks and checkpoints detect other data."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset

EVENLY_SPACED = 64
MOST_BYTES = 4 << 20
"""Bytes of preprocessed samples that are read for a digest: fewer large samples are taken."""


def data_fingerprint(dataset: Dataset) -> dict[str, Any]:
    """Return JSON values that differ for different data sets.

    The content is represented by a digest of the first, the last and 64 evenly spaced samples of
    each split with their targets (fewer if they are larger than 30 KB). Image files are represented
    by their names, sizes and first bytes. At most a few megabytes are read.

    Returns:
        kind, shape and dtype of the stored samples, number of samples in each split, SHA-256 hex
        digests of the content and of the preprocessing.
    """
    digest = hashlib.sha256()
    for samples in (dataset.train, dataset.test):
        indices = sampled_indices(len(samples), 4 * math.prod(dataset.input_shape))
        for part in samples.content(indices, dataset.input_shape, dataset.target_shape):
            digest.update(part)
    preprocessing = dataset.preprocessing
    shape = preprocessing.stored_shape
    return {
        "kind": dataset.name,
        "shape": None if shape is None else list(shape),
        "dtype": preprocessing.stored_dtype,
        "train_samples": len(dataset.train),
        "test_samples": len(dataset.test),
        "content": digest.hexdigest(),
        "preprocessing": preprocessing.digest(),
    }


def sampled_indices(count: int, sample_bytes: int) -> NDArray[np.int64]:
    """Return the first, the last and evenly spaced indices, ascending and different."""
    spaced = max(min(EVENLY_SPACED, MOST_BYTES // sample_bytes), 1)
    inside = (np.arange(spaced, dtype=np.int64) * count) // spaced
    return np.unique(np.concatenate([inside, [0, count - 1]])) if count else inside[:0]
