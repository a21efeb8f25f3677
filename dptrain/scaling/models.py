"""Laws of scaling, fitted to points: Amdahl's, Gustafson's and Gunther's.

Each describes images a second, X(n), of n workers that compute at once: n counts in workers of the
smallest measured number, and where ranks share cores only as many as there are cores
(`Setting.n`). A step then takes T = minibatch / X. Parameters are not negative, and found by least
squares of relative errors.
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
    """What a step time is asked for.

    Attributes:
        n: workers that compute at once, over those of the smallest measured number.
        ranks, threads, nodes: of the job.
        batch_size, local_batch: of all ranks; of one.
        possible: share of the workers that the cores let compute at once.
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
    """A setting with its measured step."""

    setting: Setting
    step_ms: float


@dataclass(frozen=True)
class Model:
    """A fitted model.

    Attributes:
        name: ``amdahl``, ``gustafson``, ``usl``, ``alpha-beta``.
        parameters: by name, with units in the names.
        equation: as people write it.
        assumptions: in sentences.
        step_ms: time of a step.
    """

    name: str
    parameters: dict[str, float]
    equation: str
    assumptions: tuple[str, ...]
    step_ms: Callable[[Setting], float]


class TooFewPointsError(ValueError):
    """The points do not determine a model; says which one, and what it takes."""


def nonnegative(a: ArrayLike, y: ArrayLike) -> NDArray[np.float64]:
    """Parameters x ≥ 0 with the least Σ(a x − y)², for a few columns: every set of them is tried.

    Args:
        a: (n, k), n ≥ k, k small.
        y: (n,).
    """
    matrix, target = np.asarray(a, float), np.asarray(y, float)
    k = matrix.shape[1]
    best, least = np.zeros(k), float(target @ target)
    for size in range(1, k + 1):
        for columns in map(list, combinations(range(k), size)):
            found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            error = float(np.sum((matrix[:, columns] @ found - target) ** 2))
            # A better fit by rounding alone is none: fewer parameters win.
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(k), error
                best[columns] = found
    return best


def _solve(
    name: str, points: Sequence[Timed], columns: Callable[[float], tuple[float, ...]],
    measured: Callable[[Timed], float],
) -> NDArray[np.float64]:  # fmt: skip
    """Parameters of measured ≈ columns(n) · x, by relative errors."""
    rows = np.array([columns(point.setting.n) for point in points])
    needed, distinct = rows.shape[1], len({round(point.setting.n, 6) for point in points})
    if distinct < needed:
        raise TooFewPointsError(f"{name} (takes {needed} numbers of workers that have cores)")
    values = np.array([measured(point) for point in points])
    return nonnegative(rows / values[:, None], np.ones(len(values)))


def fit_amdahl(points: Sequence[Timed]) -> Model:
    """T(n) = T₁ (s + (1 − s) / n): a part of the work, s, does not get faster.

    Source: Amdahl, "Validity of the single processor approach to achieving large scale computing
    capabilities", AFIPS 1967.

    Raises:
        TooFewPointsError: fewer than two numbers of workers.
    """
    serial, parallel = _solve("Amdahl's law", points, lambda n: (1, 1 / n), lambda p: p.step_ms)
    total = float(serial + parallel)
    return Model(
        "amdahl",
        {"step_1_ms": total, "serial_fraction": float(serial) / total},
        "T(n) = T₁ (s + (1 − s) / n)",
        ("the serial part stays what it is at every number of ranks",),
        lambda at: float(serial + parallel / at.n),
    )


def fit_gustafson(points: Sequence[Timed]) -> Model:
    """X(n) = X₁ (s + (1 − s) n): images a second grow by the same amount with every worker.

    Source: Gustafson, "Reevaluating Amdahl's law", CACM 31 (1988).

    Raises:
        TooFewPointsError: fewer than two numbers of workers.
    """
    constant, slope = _solve("Gustafson's law", points, lambda n: (1, n), _rate)
    total = float(constant + slope)
    return Model(
        "gustafson",
        {"samples_per_s_1": 1e3 * total, "serial_fraction": float(constant) / total},
        "X(n) = X₁ (s + (1 − s) n)",
        ("each further worker adds as many images a second as those before",),
        lambda at: at.batch_size / float(constant + slope * at.n),
    )


def fit_usl(points: Sequence[Timed]) -> Model:
    """X(n) = X₁ n / (1 + σ (n − 1) + κ n (n − 1)): contention σ, and coherence κ among pairs.

    Source: Gunther, "A general theory of computational scalability based on rational functions",
    arXiv:0808.1431 (2008).

    Raises:
        TooFewPointsError: fewer than three numbers of workers.
    """
    inverse, contention, coherence = _solve(
        "the universal scalability law",
        points,
        lambda n: (1, n - 1, n * (n - 1)),
        lambda p: p.setting.n / _rate(p),
    )
    if not inverse:
        raise TooFewPointsError("the universal scalability law (describes no such points)")

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
        ("contention and coherence stay what they are at every number of ranks",),
        step_ms,
    )


def _rate(point: Timed) -> float:
    """Images a millisecond."""
    return point.setting.batch_size / point.step_ms


LAWS: dict[str, tuple[Callable[[Sequence[Timed]], Model], ...]] = {
    WEAK: (fit_gustafson, fit_usl),
    STRONG: (fit_amdahl, fit_usl),
}
"""What describes which way of scaling."""
