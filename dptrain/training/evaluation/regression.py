"""What the results and the targets of a regression mean."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.errors import UserError

LARGE, SMALL = 10.0, 0.1
"""Mean or standard deviation above, and standard deviation below which a warning is printed."""

MOST_SAMPLES, MOST_BYTES = 256, 1 << 24
"""Largest number and size of the samples that are read to find the scale."""


def r2_remark(r2: float | None) -> str:
    """Return what a coefficient of determination below 0 means, to follow the results.

    Example:
        >>> r2_remark(-4.5), r2_remark(0.9), r2_remark(None)
        (': worse than predicting the mean of the targets', '', '')
    """
    return ": worse than predicting the mean of the targets" if r2 is not None and r2 < 0 else ""


def target_warning(dataset: Dataset) -> str:
    """Return a line if the targets are values far from the scale 1; else an empty text."""
    if dataset.targets != "values":
        return ""
    targets = _some_targets(dataset.train, dataset.input_shape, dataset.num_outputs)
    if targets is None or not np.isfinite(targets).all():
        return ""
    mean, deviation = float(targets.mean()), float(targets.std(axis=0).mean())
    if not deviation or (max(abs(mean), deviation) <= LARGE and deviation >= SMALL):
        return ""
    return (
        f"the targets have a mean of {mean:.3g} and a standard deviation of {deviation:.3g}; the "
        "learning rates of the recipes are for about 0 and 1, so standardise the targets: subtract "
        "the mean and divide by the standard deviation"
    )


def _some_targets(
    samples: Samples, input_shape: tuple[int, ...], num_outputs: int
) -> NDArray[np.float64] | None:
    """Return targets (n, F) of samples at equal distances; None if they cannot be read."""
    known = samples.known_targets()
    if known is not None:
        return np.asarray(known, np.float64).reshape(len(known), -1)
    shape = samples.readable_shape or input_shape
    fitting = max(MOST_BYTES // (4 * math.prod(shape)), 1)
    count = min(MOST_SAMPLES, fitting, len(samples))
    indices = np.linspace(0, len(samples) - 1, count).astype(np.int64)
    x = np.zeros((count, *shape), np.float32)
    y = np.zeros((count, num_outputs), np.float32)
    try:
        samples.read(indices, x, y)
    except UserError:  # The first step reports a damaged file, on all ranks.
        return None
    return y.astype(np.float64)
