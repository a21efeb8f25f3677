"""Validation data: a share of the training samples that is set aside, or a split of the data.

The share is a pure function of the seed, the number of samples and their labels, so that it is the
same on every rank and after a resume. Of a time series, it is the last part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.data.loading.sharding import epoch_order
from dptrain.errors import UserError

_STREAM = -1
"""Number of the random order, which no epoch of training has."""


def with_validation(dataset: Dataset, share: float | None, seed: int) -> Dataset:
    """Return the data set with the validation split that the settings request.

    Args:
        dataset: with or without a validation split of its own.
        share: of the training samples that is set aside; None uses the split of the data set, if
            it has one; 0 uses no validation data.
        seed: of the run.

    Raises:
        UserError: a share is requested, but the data set has a validation split, or too few
            training samples.
    """
    if share is None:
        return dataset
    if not share:
        return replace(dataset, validation=None)
    if dataset.validation is not None:
        raise UserError(
            f"--validation is {share:g}, but {dataset.name} has a validation split of "
            f"{len(dataset.validation):,} samples; remove --validation"
        )
    train = dataset.train
    if len(train) < 2:
        raise UserError(
            f"--validation is {share:g}, but {dataset.name} has {len(train)} training samples; "
            "expected at least 2"
        )
    if dataset.gap is None:
        chosen = validation_indices(len(train), share, seed, _labels(dataset, train))
        is_left = np.ones(len(train), np.bool_)
        is_left[chosen] = False
        left = np.flatnonzero(is_left)
        note = f"{len(chosen):,} of the training samples are for validation"
    else:
        left, chosen = _parts_of_series(dataset, share, dataset.gap)
        note = f"the last {len(chosen):,} of the training samples are for validation"
    return replace(
        dataset,
        train=train.subset(left),
        validation=train.subset(chosen),
        description=f"{dataset.description}; {note}",
    )


def _parts_of_series(
    dataset: Dataset, share: float, gap: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return samples for training, and later ones for validation, with which they share no row."""
    count = len(dataset.train)
    number = max(round(share * count), 1)
    left = count - number - gap
    if left < 1:
        raise UserError(
            f"--validation is {share:g}, but {dataset.name} has {count} training samples, and "
            f"{gap} must be left out before the validation data, with which they have measurements "
            "in common; expected a smaller share, window or horizon, or a longer table"
        )
    return np.arange(left, dtype=np.int64), np.arange(count - number, count, dtype=np.int64)


def validation_indices(
    count: int, share: float, seed: int, labels: NDArray[np.generic] | None = None
) -> NDArray[np.int64]:
    """Return the samples that are set aside for validation, ascending.

    The samples are put in a random order and, if they have labels, sorted by label. Evenly spaced
    ones are chosen, so that the share of each class differs by less than one sample.

    Args:
        count: number of training samples, at least 2.
        share: of them that is set aside, between 0 and 1; at least one sample is, and one is left.
        seed: of the run.
        labels: (count,); None for samples without labels.

    Example:
        >>> validation_indices(10, 0.2, seed=0, labels=np.arange(10) % 2).size
        2
    """
    order = epoch_order(count, seed, _STREAM)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    number = min(max(round(share * count), 1), count - 1)
    # The middle of each of `number` equal parts.
    positions = (2 * np.arange(number, dtype=np.int64) + 1) * count // (2 * number)
    return np.sort(order[positions])


def _labels(dataset: Dataset, samples: Samples) -> NDArray[np.generic] | None:
    """Return a label for each sample; None for values, and for several labels a sample."""
    targets = None if dataset.targets == "values" else samples.known_targets()
    if targets is None:
        return None
    flat = targets.reshape(len(targets), -1)
    return flat[:, 0] if flat.shape[1] == 1 else None
