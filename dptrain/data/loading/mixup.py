"""Mixup and CutMix: each sample of a minibatch is mixed with the next one, the last with the first.

With a weight λ of the sample from Beta(α, α), mixup minimises λ L(x̃, y) + (1 − λ) L(x̃, y′) for
x̃ = λ x + (1 − λ) x′. Pairs are exchangeable, because the order of an epoch is random. Therefore the
expected loss and gradient are those of L(x̃, y) with λ from Beta(α + 1, α), in which the sample
keeps its own label. Class labels use this form, which needs no loss of mixed labels. Other targets
are numbers, and are mixed as the inputs are, with λ from Beta(α, α).

CutMix replaces a box of x by that of x′. The share of the box has the distribution Beta(α, α), and
λ is the share of the rest. Labels have a form like that of mixup: a random pixel is drawn, and the
sample that keeps its label is the one that this pixel shows. So with probability λ a box of x is
replaced, and otherwise all but a box, with the label of x in both cases.

Sources: H. Zhang, M. Cisse, Y. Dauphin and D. Lopez-Paz, mixup: Beyond Empirical Risk Minimization,
2018; F. Huszár, mixup: Data-Dependent Data Augmentation, 2017 (the form for labels); S. Yun et al.,
CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features, 2019.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dptrain.network.layers import Shape

POINTS = 1 << 13
"""Points at which a distribution function is tabulated."""

BOX = 5
"""Numbers that describe how a box of a sample is mixed; one number describes a whole sample."""


def partner_weights(
    uniform: NDArray[np.float64], alpha: float, *, mixes_targets: bool
) -> NDArray[np.float32]:
    """Return the weight 1 − λ of each sample's partner.

    Args:
        uniform: (n,), random numbers in [0, 1).
        alpha: α, greater than 0.
        mixes_targets: True for λ from Beta(α, α), False for Beta(α + 1, α).

    Returns:
        float32 (n,), numbers from 0 to 1.
    """
    swaps = np.zeros(len(uniform), np.bool_)
    if mixes_targets:
        # Beta(α, α) is the mean of Beta(α + 1, α) and Beta(α, α + 1).
        swaps = uniform >= 0.5
        uniform = np.where(swaps, 2.0 * uniform - 1.0, 2.0 * uniform)
    powers, probabilities = _distribution(alpha)
    weights = np.interp(uniform, probabilities, powers) ** (1.0 / min(alpha, 1.0))
    return np.where(swaps, 1.0 - weights, weights).astype(np.float32)


@lru_cache(maxsize=4)
def _distribution(alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return v = w^min(α, 1) and P(V ≤ v) for a weight w with the distribution Beta(α, α + 1).

    The density of w is in proportion to w^(α − 1) (1 − w)^α. For α < 1 it is infinite at 0, but
    that of v, in proportion to (1 − w)^α, is not.
    """
    v = np.linspace(0.0, 1.0, POINTS)
    w = v ** (1.0 / min(alpha, 1.0))
    density = w ** max(alpha - 1.0, 0.0) * (1.0 - w) ** alpha
    sums = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return v, sums / sums[-1]


def mixup_weights(
    uniform: NDArray[np.float64], alpha: float, *, mixes_targets: bool
) -> NDArray[np.float32]:
    """Return how samples are mixed by mixup, in the form of `Batch.mixings`.

    Args:
        uniform, alpha, mixes_targets: as for `partner_weights`.

    Returns:
        float32 (n, 1), the weight of each pixel of the partner.
    """
    return partner_weights(uniform, alpha, mixes_targets=mixes_targets)[:, None]


def cutmix_boxes(
    uniform: NDArray[np.float64], alpha: float, size: tuple[int, ...], *, mixes_targets: bool
) -> NDArray[np.float32]:
    """Return how samples are mixed by CutMix, in the form of `Batch.mixings`.

    Args:
        uniform: (4, n), random numbers in [0, 1): share of the box, row and column of its centre,
            and a random pixel. The part of a box outside of the image is left out.
        alpha: α, greater than 0.
        size: height and width of the image.
        mixes_targets: False if the sample shows the random pixel.

    Returns:
        float32 (n, 5): the weight of the partner's pixels in a box, 1 or 0; around the box it is 0
        or 1. First row and column of the box, and the row and the column after its last ones.
    """
    share = partner_weights(uniform[0], alpha, mixes_targets=True).astype(np.float64)
    boxes = np.ones((len(share), BOX), np.float32)
    for axis, (centre, length) in enumerate(zip(uniform[1:3], size, strict=True)):
        pixels, half = (centre * length).astype(np.int64), 0.5 * np.sqrt(share) * length
        for column, shift in ((1 + axis, -half), (3 + axis, half)):
            boxes[:, column] = np.trunc(np.clip(pixels + shift, 0, length))
    if not mixes_targets:
        areas = _areas(boxes).astype(np.float64)
        boxes[:, 0] = uniform[3] >= areas / math.prod(size)
    return boxes


def _areas(boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the numbers of pixels in boxes."""
    _, top, left, bottom, right = boxes.T
    return np.asarray((bottom - top) * (right - left))


def pixel_weights(mixings: NDArray[np.float32], input_shape: Shape) -> NDArray[np.float32]:
    """Return the weight of each pixel of the partners.

    Args:
        mixings: (n, 1) or (n, 5), see `mixup_weights` and `cutmix_boxes`.
        input_shape: (C, H, W) or (F,).

    Returns:
        float32 (n, 1, …), which broadcasts to the inputs.
    """
    weights = mixings[:, 0].reshape(-1, *[1] * len(input_shape))
    if mixings.shape[1] < BOX:
        return weights
    rows, columns = (np.arange(length) for length in input_shape[1:])
    _, top, left, bottom, right = mixings.T[:, :, None]
    high, wide = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    inside = high[:, None, :, None] & wide[:, None, None, :]
    return np.asarray(inside == (weights == 1.0), np.float32)


def target_weights(mixings: NDArray[np.float32], input_shape: Shape) -> NDArray[np.float32]:
    """Return the weight of the partner's target, float32 (n,): the mean of `pixel_weights`."""
    if mixings.shape[1] < BOX:
        return mixings[:, 0]
    areas, pixels = _areas(mixings), np.float32(math.prod(input_shape[1:]))
    return np.asarray(np.where(mixings[:, 0] == 1.0, areas, pixels - areas) / pixels)


def mix(
    rows: NDArray[np.float32], weights: NDArray[np.float32], products: NDArray[np.float32]
) -> None:
    """Average each row but the last with the next one, in place.

    Every operation is rounded, so that kernels of devices compute the same bits.

    Args:
        rows: (n + 1, …), inputs or targets. The last row stays.
        weights: (n + 1, …) or less, of the next rows; the last one is not used.
        products: scratch memory for n rows or more.
    """
    own, weights, products = rows[:-1], weights[: len(rows) - 1], products[: len(rows) - 1]
    np.multiply(rows[1:], weights, out=products)
    own *= 1.0 - weights
    own += products


def mix_targets(y: NDArray[np.float32], mixings: NDArray[np.float32], input_shape: Shape) -> None:
    """Average each target but the last with the next one, in place.

    Args:
        y: float32 (n + 1, …).
        mixings: (n + 1, 1) or (n + 1, 5), see `mixup_weights` and `cutmix_boxes`.
        input_shape: (C, H, W) or (F,).
    """
    weights = target_weights(mixings, input_shape)
    mix(y, weights.reshape(-1, *[1] * (y.ndim - 1)), np.empty_like(y))
