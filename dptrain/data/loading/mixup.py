"""Mixup and CutMix: each sample of a minibatch is mixed with another one of the same minibatch.

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

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS = 1 << 13
"""Points at which a distribution function is tabulated."""

SHIFT = 1
"""Distance of a sample's partner in the order of the minibatch, which begins again at its end."""


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


def cutmix_weights(
    uniform: NDArray[np.float64], alpha: float, size: tuple[int, ...], *, mixes_targets: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weights, 0 or 1, of the pixels of each sample's partner, and their mean.

    Args:
        uniform: (4, n), random numbers in [0, 1): share of the box, row and column of its centre,
            and a random pixel. The part of a box outside of the image is left out.
        alpha: α, greater than 0.
        size: height and width of the image.
        mixes_targets: False if the sample shows the random pixel.

    Returns:
        float32 (n, 1, H, W) and float32 (n,).
    """
    share = partner_weights(uniform[0], alpha, mixes_targets=True).astype(np.float64)
    inside = []
    for centre, length in zip(uniform[1:3], size, strict=True):
        pixels, half = (centre * length).astype(np.int64), 0.5 * np.sqrt(share) * length
        first, last = (
            np.clip(pixels + shift, 0, length).astype(np.int64) for shift in (-half, half)
        )
        at = np.arange(length)
        inside.append((at >= first[:, None]) & (at < last[:, None]))
    boxes = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    if not mixes_targets:
        boxes ^= (uniform[3] < boxes.mean(axis=(1, 2, 3)))[:, None, None, None]
    weights = boxes.astype(np.float32)
    return weights, weights.mean(axis=(1, 2, 3))


def mix(
    x: NDArray[np.float32],
    y: NDArray[Any],
    x_partner: NDArray[np.float32],
    y_partner: NDArray[Any],
    weights: NDArray[np.float32],
    target_weights: NDArray[np.float32],
) -> None:
    """Average samples with their partners, in place.

    Args:
        x: (n, C, H, W) or (n, F).
        y: int32 (n,) labels, which stay, or float32 (n, F).
        x_partner, y_partner: of the partners; `x_partner` is overwritten.
        weights: (n, 1, …), of the partners, of each pixel or of all.
        target_weights: (n,), of the partners.
    """
    x *= 1.0 - weights
    x_partner *= weights
    x += x_partner
    if y.dtype == np.float32:
        column = target_weights.reshape(-1, *[1] * (y.ndim - 1))
        y *= 1.0 - column
        y += column * y_partner
