"""A model of the step time that is built from its parts and not fitted to step times.

T(p) = ((compute + waiting for data) c + all-reduce − overlap) / possible + imbalance + other

- compute is linear in the samples of a rank; its constant part is the update of the base point. c
  is the slowdown of the same work with as many compute threads on a node.
- An all-reduce of m bytes takes 2 α log₂ p + 2 β m (p − 1) / p with Rabenseifner's algorithm
  (reduce-scatter by recursive halving, all-gather by recursive doubling). A ring has the first term
  2 α (p − 1) instead. α and β are fitted to all-reduces that are timed alone, at the sizes in use.
  Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
  MPICH", IJHPCA 19 (2005), section 4. The cost of a message, α + β m, is from Hockney, "The
  communication challenge for MPP", Parallel Computing 20 (1994).
- A fraction ω of the all-reduce overlaps with the backward pass, at most the time of that pass.
- possible is the fraction of compute threads that have a core of their own. α and β are fitted to
  points without oversubscription if there are any, because otherwise scheduling by the operating
  system dominates the times.
- imbalance grows as the expected maximum of p normal variables, with √(2 ln p). Source: Cramér,
  "Mathematical methods of statistics", 1946, section 28.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dptrain.measure.profile.profile import Parts, Profile
from dptrain.scaling.models import Model, Setting, TooFewPointsError, nonnegative
from dptrain.scaling.points import Group

EXACT = 1e-12
"""Sum of squared relative differences that rounding explains."""


@dataclass(frozen=True)
class Calibration:
    """The measurements of one point that the model uses.

    Attributes:
        setting: the point.
        parts: parts of a step in milliseconds.
        sums: for each bucket size: bytes, buckets per step, milliseconds of one all-reduce (median
            over launches).
        update_ms, backward_ms: times of the update and of the backward pass in a mean step.
    """

    setting: Setting
    parts: Parts
    sums: tuple[tuple[int, int, float], ...]
    update_ms: float
    backward_ms: float

    @classmethod
    def of(cls, group: Group, setting: Setting) -> Calibration:
        """Return the medians over the launches of a point."""
        profiles = [measured.profile for measured in group.launches]
        sizes = {(s.bucket_bytes, s.buckets) for profile in profiles for s in profile.sums}
        sums = tuple(
            (size, number, float(np.nanmedian([_sum_ms(profile, size) for profile in profiles])))
            for size, number in sorted(sizes)
        )
        update = float(np.median([_phase_ms(profile, "update") for profile in profiles]))
        backward = float(np.median([_phase_ms(profile, "backward") for profile in profiles]))
        # The model divides what computes by the share of the cores, so it contains a lack of them.
        return cls(setting, group.parts.merged(), sums, update, backward)

    @property
    def sum_ms(self) -> float:
        """Time of all all-reduces of a step, one after another, in milliseconds."""
        return sum(number * time for _, number, time in self.sums)


def _sum_ms(profile: Profile, size: int) -> float:
    times = [s.time_ms.median for s in profile.sums if s.bucket_bytes == size]
    return times[0] if times else math.nan


def _phase_ms(profile: Profile, phase: str) -> float:
    return sum(stage.typical_ms for stage in profile.stages if stage.phase.startswith(phase))


@dataclass(frozen=True)
class _Network:
    """The cost of an all-reduce, fitted to all-reduces that were timed alone.

    Attributes:
        ring: True for the ring algorithm, False for Rabenseifner's algorithm.
        algorithm_determined: True if the times distinguish the algorithms.
        latency_determined: True if different sizes or numbers of ranks distinguish α from β.
        alpha_ms, beta_ms: latency of a message, and time per byte.
    """

    ring: bool
    algorithm_determined: bool
    latency_determined: bool
    alpha_ms: float
    beta_ms: float

    def sum_ms(self, ranks: int, size: float) -> float:
        """Return the time of an all-reduce of `size` bytes in milliseconds."""
        messages, volume = _messages(ranks, ring=self.ring)
        return self.alpha_ms * messages + self.beta_ms * volume * size


def _messages(ranks: int, *, ring: bool) -> tuple[float, float]:
    """Return the number of successive messages, and the volume over the size of the buffer."""
    messages = ranks - 1.0 if ring else math.log2(ranks)
    return 2 * messages, 2 * (ranks - 1) / ranks


def _network(points: Sequence[Calibration]) -> _Network:
    rows = [(at.setting.ranks, size, time) for at in points for size, _, time in at.sums]
    latency_determined = len({(ranks, size) for ranks, size, _ in rows}) > 1
    fits = []
    for ring in (False, True):
        costs = [(_messages(ranks, ring=ring), size, time) for ranks, size, time in rows]
        # The column of bytes is first, so that time counts as bandwidth if the data do not
        # distinguish it from latency.
        matrix = np.array(
            [(volume * size / time, messages / time) for (messages, volume), size, time in costs]
        )
        beta, alpha = nonnegative(matrix, np.ones(len(rows)))
        error = float(np.sum((matrix @ [beta, alpha] - 1) ** 2))
        fits.append((error, float(alpha), float(beta)))
    # Both algorithms explain two times exactly, apart from rounding.
    algorithm_determined = abs(fits[0][0] - fits[1][0]) > EXACT
    # MPI libraries use Rabenseifner's algorithm for long messages, so it is the default.
    ring = algorithm_determined and fits[1][0] < fits[0][0]
    return _Network(ring, algorithm_determined, latency_determined, *fits[ring][1:])


def fit_alpha_beta(points: Sequence[Calibration]) -> Model:
    """Return the α–β model of this module, from the base point and the points of several ranks.

    Args:
        points: measurements of the points, the base first.

    Raises:
        TooFewPointsError: no point of several ranks has a timed all-reduce.
    """
    base, others = points[0], [at for at in points if at.sums]
    if not others:
        raise TooFewPointsError("the α–β model (needs a point with several ranks)")
    others = [at for at in others if at.setting.possible == 1] or others
    # More ranks than measured communicate between nodes, so points of several nodes are preferred.
    multi_node = [at for at in others if at.setting.nodes > 1]
    network = _network(multi_node or others)
    overlap = float(np.median([_overlap(at) for at in others]))
    imbalance = float(
        np.median([at.parts.imbalance / _expected_maximum(at.setting.ranks) for at in others])
    )
    step_ms = partial(
        _step_ms,
        base,
        network,
        _contention(points),
        overlap,
        imbalance,
        tuple((size, number) for size, number, _ in others[-1].sums),
    )
    parameters = {
        "update_ms": base.update_ms,
        "compute_per_sample_ms": _per_sample(base),
        "contention": max(_slowdown(base, at) for at in points),
        "alpha_us": 1e3 * network.alpha_ms,
        "beta_gb_per_s": 1e-6 / network.beta_ms if network.beta_ms else math.inf,
        "overlap": overlap,
        "imbalance_ms": imbalance,
    }
    term = "2 α (p − 1)" if network.ring else "2 α log₂ p"
    equation = (
        f"T(p) = (c (a + b·samples + data) + {term} + 2 m (p − 1) / (p B) − overlap) / possible "
        "+ i √(2 ln p) + other"
    )
    assumptions = _assumptions(network, multi_node=bool(multi_node))
    return Model("alpha-beta", parameters, equation, assumptions, step_ms)


def _assumptions(network: _Network, *, multi_node: bool) -> tuple[str, ...]:
    algorithm = "a ring" if network.ring else "Rabenseifner's algorithm"
    unsure = (
        ""
        if network.algorithm_determined
        else "; the measured all-reduces do not distinguish it from a ring"
    )
    nodes = "between the measured nodes" if multi_node else "within the measured node"
    return (
        f"gradients are summed by {algorithm}{unsure}",
        *[
            "the time of an all-reduce is due to bandwidth alone, because a single size with a "
            "single number of ranks does not show the latency"
        ]
        * (not network.latency_determined),
        f"a message between nodes costs as much as one {nodes}",
        "compute is linear in the samples of a rank, and contention on a node is as measured",
        "imbalance grows with √(2 ln p), as for independent random delays",
    )


def _expected_maximum(ranks: int) -> float:
    """Return the expected maximum of normal variables in standard deviations (asymptotically)."""
    return math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


def _per_sample(base: Calibration) -> float:
    return max(base.parts.compute - base.update_ms, 0.0) / base.setting.local_batch


def _compute(base: Calibration, samples: float) -> float:
    """Return the compute time of a single rank in milliseconds."""
    return min(base.update_ms, base.parts.compute) + _per_sample(base) * samples


def _slowdown(base: Calibration, at: Calibration) -> float:
    """Return the compute time over that of a single rank, without the effect of shared cores."""
    alone = _compute(base, at.setting.local_batch) * base.setting.possible
    return at.parts.compute * at.setting.possible / alone


def _on_node(setting: Setting) -> float:
    """Return the number of threads of a node that compute at the same time."""
    return math.ceil(setting.ranks / setting.nodes) * setting.threads * setting.possible


def _contention(points: Sequence[Calibration]) -> Callable[[Setting], float]:
    """Return the slowdown c by the threads of a node: linear interpolation, constant beyond."""
    slowdowns: dict[float, list[float]] = {}
    for at in points:
        slowdowns.setdefault(_on_node(at.setting), []).append(_slowdown(points[0], at))
    threads = sorted(slowdowns)
    factors = [float(np.median(slowdowns[number])) for number in threads]
    return lambda setting: float(np.interp(_on_node(setting), threads, factors))


def _overlap(at: Calibration) -> float:
    """Return the fraction of the all-reduces that overlaps with computation."""
    return float(np.clip(1 - at.parts.transfer / at.sum_ms, 0.0, 1.0)) if at.sum_ms else 0.0


def _step_ms(
    base: Calibration,
    network: _Network,
    contention: Callable[[Setting], float],
    overlap: float,
    imbalance: float,
    buckets: Sequence[tuple[int, int]],
    at: Setting,
) -> float:
    oversubscription = base.setting.possible / at.possible
    slow = contention(at) * oversubscription
    share = at.local_batch / base.setting.local_batch
    busy = _compute(base, at.local_batch) * slow + base.parts.data_wait * share * slow
    if at.ranks == 1:
        return busy + base.parts.other
    total = sum(number * network.sum_ms(at.ranks, size) for size, number in buckets)
    overlapped = min(overlap * total * oversubscription, base.backward_ms * share * slow)
    exposed = total * oversubscription - overlapped
    return busy + exposed + imbalance * _expected_maximum(at.ranks) + base.parts.other
