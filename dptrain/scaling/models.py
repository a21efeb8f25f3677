"""Scaling laws of Amdahl, Gustafson and Gunther, fitted to points.

Each law describes the throughput X(n) in samples per second. n is the number of threads that
compute at the same time, over that of the base point (`Setting.n`). If ranks share cores, n counts
the cores. A step takes T = minibatch / X. The parameters are nonnegative and minimise the sum of
squared relative errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.scaling.study import STRONG, WEAK


@dataclass(frozen=True)
class Setting:
    """The conditions for which a model predicts the step time.

    Attributes:
        n: threads that compute at the same time, over those of the base point.
        ranks, threads, nodes: number of ranks, of compute threads per rank, and of nodes.
        batch_size, local_batch: samples per step, of all ranks and of one rank.
        possible: fraction of the compute threads that have a core of their own.
    """

    n: float
    ranks: int
    threads: int
    nodes: int
    batch_size: int
    local_batch: float
    possible: float


@dataclass(frozen=True)
class Timed:
    """A setting with its measured step time."""

    setting: Setting
    step_ms: float


@dataclass(frozen=True)
class Model:
    """A fitted model.

    Attributes:
        name: ``amdahl``, ``gustafson``, ``usl``, ``alpha-beta``.
        parameters: by name, with units in the names.
        equation: the equation in mathematical notation.
        assumptions: assumptions of the model in sentences.
        step_ms: function that predicts the step time in milliseconds.
    """

    name: str
    parameters: dict[str, float]
    equation: str
    assumptions: tuple[str, ...]
    step_ms: Callable[[Setting], float]


class TooFewPointsError(ValueError):
    """The points do not determine a model; the message names it and what it needs."""


def nonnegative(a: ArrayLike, y: ArrayLike) -> NDArray[np.float64]:
    """Solve min Σ(a x − y)² for x ≥ 0 by trying every set of columns.

    Args:
        a: matrix of shape (n, k), n ≥ k, with small k.
        y: vector of shape (n,).

    Returns:
        The vector x of shape (k,).
    """
    matrix, target = np.asarray(a, float), np.asarray(y, float)
    k = matrix.shape[1]
    best, least = np.zeros(k), float(target @ target)
    for size in range(1, k + 1):
        for columns in map(list, combinations(range(k), size)):
            found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            error = float(np.sum((matrix[:, columns] @ found - target) ** 2))
            # More parameters must improve the fit by more than rounding errors.
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(k), error
                best[columns] = found
    return best


def _solve(
    name: str,
    points: Sequence[Timed],
    columns: Callable[[float], tuple[float, ...]],
    measured: Callable[[Timed], float],
) -> NDArray[np.float64]:
    """Return the parameters x of measured ≈ columns(n) · x by relative least squares."""
    rows = np.array([columns(point.setting.n) for point in points])
    needed, distinct = rows.shape[1], len({round(point.setting.n, 6) for point in points})
    if distinct < needed:
        raise TooFewPointsError(
            f"{name} (needs {needed} different numbers of ranks with own cores)"
        )
    values = np.array([measured(point) for point in points])
    return nonnegative(rows / values[:, None], np.ones(len(values)))


def fit_amdahl(points: Sequence[Timed]) -> Model:
    """Fit T(n) = T₁ (s + (1 − s) / n) with the serial fraction s.

    Source: Amdahl, "Validity of the single processor approach to achieving large scale computing
    capabilities", AFIPS 1967.

    Raises:
        TooFewPointsError: fewer than two different n.
    """
    serial, parallel = _solve("Amdahl's law", points, lambda n: (1, 1 / n), lambda p: p.step_ms)
    total = float(serial + parallel)
    return Model(
        "amdahl",
        {"step_1_ms": total, "serial_fraction": float(serial) / total},
        "T(n) = T₁ (s + (1 − s) / n)",
        ("the serial part takes the same time with every number of ranks",),
        lambda at: float(serial + parallel / at.n),
    )


def fit_gustafson(points: Sequence[Timed]) -> Model:
    """Fit X(n) = X₁ (s + (1 − s) n), a throughput that is linear in n.

    Source: Gustafson, "Reevaluating Amdahl's law", CACM 31 (1988).

    Raises:
        TooFewPointsError: fewer than two different n.
    """
    constant, slope = _solve("Gustafson's law", points, lambda n: (1, n), _rate)
    total = float(constant + slope)
    return Model(
        "gustafson",
        {"samples_per_s_1": 1e3 * total, "serial_fraction": float(constant) / total},
        "X(n) = X₁ (s + (1 − s) n)",
        ("each additional rank adds the same throughput",),
        lambda at: at.batch_size / float(constant + slope * at.n),
    )


def fit_usl(points: Sequence[Timed]) -> Model:
    """Fit X(n) = X₁ n / (1 + σ (n − 1) + κ n (n − 1)) with contention σ and coherence κ.

    Source: Gunther, "A general theory of computational scalability based on rational functions",
    arXiv:0808.1431 (2008).

    Raises:
        TooFewPointsError: fewer than three different n, or no fit with X₁ < ∞.
    """
    inverse, contention, coherence = _solve(
        "the universal scalability law",
        points,
        lambda n: (1, n - 1, n * (n - 1)),
        lambda p: p.setting.n / _rate(p),
    )
    if not inverse:
        raise TooFewPointsError("the universal scalability law (does not fit the points)")

    def step_ms(at: Setting) -> float:
        n = at.n
        return at.batch_size * float(inverse + contention * (n - 1) + coherence * n * (n - 1)) / n

    return Model(
        "usl",
        {
            "samples_per_s_1": 1e3 / float(inverse),
            "contention": float(contention / inverse),
            "coherence": float(coherence / inverse),
        },
        "X(n) = X₁ n / (1 + σ (n − 1) + κ n (n − 1))",
        ("contention and coherence are the same with every number of ranks",),
        step_ms,
    )


def _rate(point: Timed) -> float:
    """Return the throughput in samples per millisecond."""
    return point.setting.batch_size / point.step_ms


LAWS: dict[str, tuple[Callable[[Sequence[Timed]], Model], ...]] = {
    WEAK: (fit_gustafson, fit_usl),
    STRONG: (fit_amdahl, fit_usl),
}
"""Laws that are fitted to each kind of scaling."""
