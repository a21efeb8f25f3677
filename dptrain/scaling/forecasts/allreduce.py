"""Costs of all-reduce algorithms, with latency and bandwidth from a sweep of message sizes.

With α the latency of a message and β the time per byte, m bytes on n nodes take

- recursive doubling: log₂ n (α + β m);
- Rabenseifner's algorithm (recursive halving, then doubling): 2 α log₂ n + 2 β m (n − 1) / n;
- ring: 2 α (n − 1) + 2 β m (n − 1) / n.

Sources: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994); Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

DOUBLING, RABENSEIFNER, RING = "recursive doubling", "Rabenseifner's algorithm", "ring"
ALGORITHMS = (DOUBLING, RABENSEIFNER, RING)
TOLERATED = 0.05
"""Relative error of timed all-reduces that an algorithm may have in addition to the best one's."""
NEAR = 2.0
"""Sizes within this factor of a bucket determine its cost: protocols change with the size."""


def messages(algorithm: str, nodes: float) -> tuple[float, float]:
    """Return the number of successive messages, and their volume over the size of the buffer."""
    steps = math.log2(nodes)
    if algorithm == DOUBLING:
        return steps, steps
    volume = 2 * (nodes - 1) / nodes
    return (2 * steps if algorithm == RABENSEIFNER else 2 * (nodes - 1)), volume


@dataclass(frozen=True)
class Network:
    """Latency and bandwidth of a network as one algorithm explains its all-reduces.

    Attributes:
        algorithm: the algorithm.
        alpha_ms, beta_ms: latency of a message, and time per byte.
        error: root mean square of the relative errors.
    """

    algorithm: str
    alpha_ms: float
    beta_ms: float
    error: float

    def sum_ms(self, nodes: float, size: float) -> float:
        """Return the time of an all-reduce of `size` bytes if no messages share a link."""
        latency, volume = messages(self.algorithm, nodes)
        return self.alpha_ms * latency + self.beta_ms * volume * size


def selected(library: str, ranks: int, size: float) -> tuple[str, ...] | None:
    """Return the algorithms by which an MPI library may sum `size` bytes on so many ranks.

    Sources: Thakur et al., section 4.5, for MPICH, which decides by the size alone; Open MPI 4.1,
    coll_tuned_decision_fixed.c, for 4 to 127 ranks.

    Args:
        library: name of the library, with any version.
        ranks: number of ranks.
        size: bytes.

    Returns:
        None if nothing is known about this library or number of ranks.
    """
    if "MPICH" in library:
        return (DOUBLING,) if size <= 2**11 else (DOUBLING, RABENSEIFNER)
    if "Open MPI" in library and 4 <= ranks < 128:
        most = 2**13 if ranks < 16 else 2**12 if ranks < 64 else 2**18
        return (DOUBLING,) if size < most else (RABENSEIFNER,)
    return None


def fit_networks(
    sweep: Iterable[tuple[int, int, float]], size: float | None = None
) -> tuple[Network, ...]:
    """Return the network as each algorithm explains it, the best first.

    Only the two largest numbers of nodes count, because libraries use other algorithms on few.

    Args:
        sweep: nodes (two or more), bytes, milliseconds of all-reduces alone; at least one.
        size: bytes; if given, only sizes near it count, if there are any.
    """
    rows = list(sweep)
    largest = sorted({nodes for nodes, _, _ in rows})[-2:]
    rows = [row for row in rows if row[0] in largest]
    near = [row for row in rows if size and size / NEAR <= row[1] <= size * NEAR]
    fits = [_fit(algorithm, rows) for algorithm in ALGORITHMS]
    if near:
        errors = {algorithm: _fit(algorithm, near).error for algorithm in ALGORITHMS}
        fits = [replace(fit, error=errors[fit.algorithm]) for fit in fits]
    return tuple(sorted(fits, key=lambda fit: fit.error))


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


def _fit(algorithm: str, rows: Sequence[tuple[int, int, float]]) -> Network:
    """Return the least squares fit of relative errors."""
    costs = [(*messages(algorithm, nodes), size, time) for nodes, size, time in rows]
    matrix = np.array([(volume * size / t, latency / t) for latency, volume, size, t in costs])
    beta, alpha = nonnegative(matrix, np.ones(len(rows)))
    error = float(np.sqrt(np.mean((matrix @ [beta, alpha] - 1) ** 2)))
    return Network(algorithm, float(alpha), float(beta), error)
