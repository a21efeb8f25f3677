"""Mixup: each sample of a minibatch is averaged with another one of the same minibatch.

With a weight λ of the sample from Beta(α, α), mixup minimises λ L(x̃, y) + (1 − λ) L(x̃, y′) for
x̃ = λ x + (1 − λ) x′. Pairs are exchangeable, because the order of an epoch is random. Therefore the
expected loss and gradient are those of L(x̃, y) with λ from Beta(α + 1, α), in which the sample
keeps its own label. Class labels use this form, which needs no loss of mixed labels. Other targets
are numbers, and are mixed as the inputs are, with λ from Beta(α, α).

Sources: H. Zhang, M. Cisse, Y. Dauphin and D. Lopez-Paz, mixup: Beyond Empirical Risk Minimization,
2018; F. Huszár, mixup: Data-Dependent Data Augmentation, 2017 (the form for labels).
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


def mix(
    x: NDArray[np.float32],
    y: NDArray[Any],
    x_partner: NDArray[np.float32],
    y_partner: NDArray[Any],
    weights: NDArray[np.float32],
) -> None:
    """Average samples with their partners, in place.

    Args:
        x: (n, C, H, W) or (n, F).
        y: int32 (n,) labels, which stay, or float32 (n, F).
        x_partner, y_partner: of the partners; `x_partner` is overwritten.
        weights: (n,), of the partners.
    """
    column = weights.reshape(-1, *[1] * (x.ndim - 1))
    x *= 1.0 - column
    x_partner *= column
    x += x_partner
    if y.dtype == np.float32:
        column = weights.reshape(-1, *[1] * (y.ndim - 1))
        y *= 1.0 - column
        y += column * y_partner
