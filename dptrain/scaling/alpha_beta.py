"""A model of a step from its parts: nothing in it is fitted to the step times that it predicts.

T(p) = ((compute + data wait) c + exposed sum) / possible + imbalance + other

- compute is linear in a rank's samples: the update is its constant part, calibrated at the base
  point. c is how much slower the same work was with as many workers on a node;
- the gradient sum of m bytes takes, by a tree, 2 α log₂ p + 2 β m (p − 1) / p, and by a ring
  2 α (p − 1) in place of the first term. α and β come from sums measured alone, at the sizes in
  use. Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
  in MPICH", IJHPCA 19 (2005), section 4; the cost of a message, α + β m, is Hockney's, "The
  communication challenge for MPP", Parallel Computing 20 (1994);
- a share ω of it runs behind the backward pass, at most as long as that lasts;
- possible is the share of ranks that have a core: what shares cores takes turns. Sums are measured
  where all have one, if they were anywhere: elsewhere they tell of the operating system's turns;
- imbalance grows as the largest of p normal numbers does, with √(2 ln p). Source: Cramér,
  "Mathematical methods of statistics", 1946, section 28.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dptrain.measure.profile import Parts, Profile
from dptrain.scaling.models import Model, Setting, TooFewPointsError, nonnegative
from dptrain.scaling.points import Group


@dataclass(frozen=True)
class Calibration:
    """What the model takes from one point.

    Attributes:
        sums: (bytes, number a step, milliseconds of one), medians over launches.
        update_ms, backward_ms: of a mean step.
    """

    setting: Setting
    parts: Parts
    sums: tuple[tuple[int, int, float], ...]
    update_ms: float
    backward_ms: float

    @classmethod
    def of(cls, group: Group, setting: Setting) -> Calibration:
        """Medians over the launches of a point."""
        profiles = [measured.profile for measured in group.launches]
        sizes = {(s.bucket_bytes, s.buckets) for profile in profiles for s in profile.sums}
        sums = tuple(
            (size, number, float(np.nanmedian([_sum_ms(profile, size) for profile in profiles])))
            for size, number in sorted(sizes)
        )
        update = float(np.median([_phase_ms(profile, "update") for profile in profiles]))
        backward = float(np.median([_phase_ms(profile, "backward") for profile in profiles]))
        return cls(setting, group.parts, sums, update, backward)

    @property
    def sum_ms(self) -> float:
        """All sums of a step, one after another."""
        return sum(number * time for _, number, time in self.sums)


def _sum_ms(profile: Profile, size: int) -> float:
    times = [s.time_ms.median for s in profile.sums if s.bucket_bytes == size]
    return times[0] if times else math.nan


def _phase_ms(profile: Profile, phase: str) -> float:
    return sum(stage.time_ms.mean for stage in profile.stages if stage.phase.startswith(phase))


@dataclass(frozen=True)
class _Network:
    """Cost of a message, found from sums alone.

    Attributes:
        tree: whether messages go along a tree; else around a ring.
        known: whether two numbers of ranks told tree and ring apart.
        apart: whether sums of different sizes or ranks told α and β apart.
        alpha_ms, beta_ms: of a message, and of a byte.
    """

    tree: bool
    known: bool
    apart: bool
    alpha_ms: float
    beta_ms: float

    def sum_ms(self, ranks: int, size: float) -> float:
        """One sum of `size` bytes."""
        hops, share = _messages(ranks, tree=self.tree)
        return self.alpha_ms * hops + self.beta_ms * share * size


def _messages(ranks: int, *, tree: bool) -> tuple[float, float]:
    """Messages one after another, and how many times all bytes are sent."""
    hops = math.log2(ranks) if tree else ranks - 1.0
    return 2 * hops, 2 * (ranks - 1) / ranks


def _network(points: Sequence[Calibration]) -> _Network:
    rows = [(at.setting.ranks, size, time) for at in points for size, _, time in at.sums]
    known = len({ranks for ranks, _, _ in rows}) > 1
    apart = len({(ranks, size) for ranks, size, _ in rows}) > 1
    found = []
    for tree in (True, False):
        costs = [(_messages(ranks, tree=tree), size, time) for ranks, size, time in rows]
        # Bytes first: what cannot be told from latency counts as bandwidth.
        matrix = np.array(
            [(share * size / time, hops / time) for (hops, share), size, time in costs]
        )
        beta, alpha = nonnegative(matrix, np.ones(len(rows)))
        error = float(np.sum((matrix @ [beta, alpha] - 1) ** 2))
        found.append((error, _Network(tree, known, apart, float(alpha), float(beta))))
    # A tree where nothing tells them apart: MPI libraries take one for long messages.
    tree_error, ring_error = (error for error, _ in found)
    return found[1][1] if known and ring_error < tree_error else found[0][1]


def fit_alpha_beta(points: Sequence[Calibration]) -> Model:
    """The model of this module's head, from the base point and the points of several ranks.

    Args:
        points: the base first.

    Raises:
        TooFewPointsError: no point of several ranks has a measured sum.
    """
    base, others = points[0], [at for at in points if at.sums]
    if not others:
        raise TooFewPointsError("the α–β model (takes a point of several ranks)")
    others = [at for at in others if at.setting.possible == 1] or others
    # A network between nodes is what further ranks meet; memory, where there was no other.
    between = [at for at in others if at.setting.nodes > 1]
    network = _network(between or others)
    overlap = float(np.median([_hidden_share(at) for at in others]))
    spread = float(np.median([at.parts.imbalance / _extreme(at.setting.ranks) for at in others]))
    step_ms = partial(
        _step_ms, base, network, _contention(points), overlap, spread,
        tuple((size, number) for size, number, _ in others[-1].sums),
    )  # fmt: skip
    parameters = {
        "update_ms": base.update_ms,
        "compute_per_sample_ms": _per_sample(base),
        "contention": max(_slower(base, at) for at in points),
        "alpha_us": 1e3 * network.alpha_ms,
        "beta_gb_per_s": 1e-6 / network.beta_ms if network.beta_ms else math.inf,
        "overlap": overlap,
        "imbalance_ms": spread,
    }
    term = "2 α log₂ p" if network.tree else "2 α (p − 1)"
    equation = (
        f"T(p) = (c (a + b·samples + data) + {term} + 2 m (p − 1) / (p B) − hidden) / possible "
        "+ i √(2 ln p) + other"
    )
    return Model("alpha-beta", parameters, equation, _assumptions(network, bool(between)), step_ms)


def _assumptions(network: _Network, between: bool) -> tuple[str, ...]:
    shape = "along a tree" if network.tree else "around a ring"
    told = "" if network.known else "; one number of ranks does not tell that from a ring"
    place = "between the measured ones" if between else "within the measured one"
    bytes_alone = "all of a sum's time is taken for its bytes: one size among one number of ranks"
    return (
        f"sums go {shape}{told}",
        *[f"{bytes_alone} does not show latency"] * (not network.apart),
        f"a message between nodes costs what it cost {place}",
        "compute is linear in the samples of a rank, and slowed by neighbours as it was on the "
        "measured nodes",
        "imbalance grows with √(2 ln p): nothing but chance makes ranks late",
    )


def _extreme(ranks: int) -> float:
    return math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


def _per_sample(base: Calibration) -> float:
    return max(base.parts.compute - base.update_ms, 0.0) / base.setting.local_batch


def _compute(base: Calibration, samples: float) -> float:
    """Milliseconds of one undisturbed rank."""
    return min(base.update_ms, base.parts.compute) + _per_sample(base) * samples


def _slower(base: Calibration, at: Calibration) -> float:
    """How many times as long as alone compute takes, sharing of cores aside."""
    alone = _compute(base, at.setting.local_batch) * base.setting.possible
    return at.parts.compute * at.setting.possible / alone


def _on_node(setting: Setting) -> float:
    """Workers of a node that compute at once."""
    return math.ceil(setting.ranks / setting.nodes) * setting.threads * setting.possible


def _contention(points: Sequence[Calibration]) -> Callable[[Setting], float]:
    """Slowdown c by the workers of a node; a line between measured numbers, flat beyond them."""
    by_workers: dict[float, list[float]] = {}
    for at in points:
        by_workers.setdefault(_on_node(at.setting), []).append(_slower(points[0], at))
    workers = sorted(by_workers)
    factors = [float(np.median(by_workers[number])) for number in workers]
    return lambda setting: float(np.interp(_on_node(setting), workers, factors))


def _hidden_share(at: Calibration) -> float:
    return float(np.clip(1 - at.parts.transfer / at.sum_ms, 0.0, 1.0)) if at.sum_ms else 0.0


def _step_ms(
    base: Calibration,
    network: _Network,
    contention: Callable[[Setting], float],
    overlap: float,
    spread: float,
    buckets: Sequence[tuple[int, int]],
    at: Setting,
) -> float:
    crowd = base.setting.possible / at.possible
    slow = contention(at) * crowd
    share = at.local_batch / base.setting.local_batch
    busy = _compute(base, at.local_batch) * slow + base.parts.data_wait * share * slow
    if at.ranks == 1:
        return busy + base.parts.other
    total = sum(number * network.sum_ms(at.ranks, size) for size, number in buckets)
    hidden = min(overlap * total * crowd, base.backward_ms * share * slow)
    return busy + total * crowd - hidden + spread * _extreme(at.ranks) + base.parts.other
