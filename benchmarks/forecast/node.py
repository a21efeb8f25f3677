"""Simulate training on one node, as truths for forecasts within a node.

A step ends when the slowest rank has computed and all gradients are summed. Forecasts know none of
what slows ranks down here: the bandwidth of the memory saturates, separately on each socket or not;
the frequency falls with the cores that compute; ranks share a last-level cache; the operating
system takes some of the last cores; ranks are late; gradients are summed by one of three
algorithms. GPUs share a bus or have links of their own, and their power is limited.

Every case and every launch follows from a seed, so that nothing is stored. Constants are tuned with
the cases before `TUNED`; the others are held back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.scaling.forecasts.ensemble import larger_ranks
from dptrain.scaling.forecasts.observed import Figures, Observed

TUNED, CASES = 200, 600
STEPS, TRUE_LAUNCHES = 50, 20
BATCH = 64 * 27720
"""Samples of a rank in weak scaling, and of all ranks in strong scaling: any number of ranks
divides it."""
STUDIES = {
    "processor": ((1, 2, 4, 8), (2, 4, 8, 16), (1, 2, 4), (1, 3, 6), (2, 4)),
    "GPU": ((1, 2), (1, 2, 4)),
}
"""Measured numbers of ranks."""
SLOTS = {"processor": (16, 24, 32, 64), "GPU": (4, 8)}


@dataclass(frozen=True)
class NodeCase:
    """A job on a node.

    Attributes:
        kind: ``processor`` or ``GPU``.
        measured: numbers of ranks of the study.
        slots: cores of the node with one thread per rank, or its GPUs.
        sockets: number of memories; consecutive ranks share one.
        scaling: ``weak`` or ``strong``.
        fixed: share of the work that strong scaling does not divide.
        memory: share of the work of a single rank in which it moves data.
        saturation: ranks of a socket that use the whole bandwidth of its memory.
        sharpness: exponent of the transition to saturation.
        cache: relative increase of the work if all slots share the last-level cache.
        clock: relative increase of the work if all slots compute, because the frequency falls.
        taken, stolen: slots that the system uses, too, and the share of time that it uses of each.
        sums: how the time of a gradient sum grows: ``bandwidth``, ``latency`` or ``serial``.
        sums_share: gradient sum on two ranks, over the work.
        lateness, lateness_share: distribution of the delay of a step, and its mean over the work.
        speed_spread: standard deviation of the ranks' speeds, drawn in each launch.
        launch_spread: standard deviation of the work between launches.
        launches: of each number of ranks of the study.
    """

    kind: str
    measured: tuple[int, ...]
    slots: int
    sockets: int
    scaling: str
    fixed: float
    memory: float
    saturation: float
    sharpness: float
    cache: float
    clock: float
    taken: int
    stolen: float
    sums: str
    sums_share: float
    lateness: str
    lateness_share: float
    speed_spread: float
    launch_spread: float
    launches: int

    def work_ms(self, ranks: int) -> float:
        """Return the computation of a step on one rank."""
        share = 1.0 if self.scaling == "weak" else self.fixed + (1 - self.fixed) / ranks
        full = (ranks - 1) / max(self.slots - 1, 1)
        per_socket = min(ranks, self.slots / self.sockets)
        return 10 * share * (
            (1 - self.memory) * (1 + self.clock * full)
            + self.memory * self._slowdown(per_socket) / self._slowdown(1)
            + self.cache * full
        )  # fmt: skip

    def _slowdown(self, ranks: float) -> float:
        return float((1 + (ranks / self.saturation) ** self.sharpness) ** (1 / self.sharpness))

    def sums_ms(self, ranks: int) -> float:
        """Return the time of the gradient sum."""
        if ranks == 1:
            return 0.0
        growth = {"bandwidth": 2 - 2 / ranks, "latency": math.log2(ranks), "serial": ranks - 1}
        return 10 * self.sums_share * growth[self.sums]


def draw(number: int) -> NodeCase:
    """Return case `number`."""
    random = np.random.Generator(np.random.Philox(key=[23, number]))

    def one_of(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    kind = one_of("processor", "processor", "GPU")
    gpu = kind == "GPU"
    measured = one_of(*STUDIES[kind])
    slots = one_of(*(count for count in SLOTS[kind] if count > measured[-1]))
    return NodeCase(
        kind=kind,
        measured=measured,
        slots=slots,
        sockets=1 if gpu else one_of(1, 1, 2),
        scaling=one_of("weak", "weak", "strong"),
        fixed=one_of(0.0, 0.02, 0.05),
        memory=0.0 if gpu else one_of(0.05, 0.1, 0.2, 0.4),
        saturation=slots * math.exp(random.uniform(math.log(1 / 8), math.log(2))),
        sharpness=one_of(2.0, 4.0, 8.0),
        cache=0.0 if gpu else one_of(0.0, 0.0, 0.1, 0.2),
        clock=one_of(0.0, 0.03) if gpu else one_of(0.0, 0.05, 0.15),
        taken=0 if gpu else one_of(0, 0, 1, 2),
        stolen=one_of(0.02, 0.1, 0.2),
        sums=one_of("bandwidth", "latency", "serial"),
        sums_share=math.exp(random.uniform(math.log(0.002), math.log(0.1 if gpu else 0.03))),
        lateness=one_of("normal", "exponential", "pareto"),
        lateness_share=one_of(0.002, 0.01) if gpu else one_of(0.01, 0.03, 0.1),
        speed_spread=one_of(0.0, 0.01, 0.02),
        launch_spread=one_of(0.002, 0.005, 0.01, 0.03),
        launches=one_of(3, 5, 5, 10),
    )


def simulate(case: NodeCase, ranks: int, random: np.random.Generator) -> Figures:
    """Return the figures of one launch."""
    work = case.work_ms(ranks) * math.exp(case.launch_spread * random.normal())
    speeds = np.exp(case.speed_spread * random.normal(size=ranks))
    delays = case.lateness_share * _lateness(case.lateness, (STEPS, ranks), random)
    busy = work * (speeds + delays)
    shared = max(ranks - (case.slots - case.taken), 0)
    if shared:  # The system runs in bursts, which delay single steps.
        bursts = random.random((STEPS, shared)) < 0.5
        busy[:, :shared] += work * 2 * case.stolen * bursts * random.exponential(size=bursts.shape)
    sums = case.sums_ms(ranks) * float(np.exp(0.05 * random.normal()))
    waiting = float(np.mean(busy.max(axis=1, keepdims=True) - busy)) if ranks > 1 else 0.0
    mean = float(busy.mean())
    return Figures(mean + waiting + sums, mean, sums, waiting, sums, ())


def _lateness(
    kind: str, shape: tuple[int, int], random: np.random.Generator
) -> NDArray[np.float64]:
    if kind == "normal":
        return np.abs(random.normal(size=shape))
    return random.exponential(size=shape) if kind == "exponential" else random.pareto(3, shape)


def study_of(number: int) -> tuple[list[Observed], dict[int, float]]:
    """Return the measured points of a case, and the true efficiency of each larger number of ranks.

    The numbers are the next powers of two on the node, and all its slots.
    """
    case = draw(number)
    random = np.random.Generator(np.random.Philox(key=[29, number]))
    weak = case.scaling == "weak"
    points = []
    for ranks in case.measured:
        launches = tuple(simulate(case, ranks, random) for _ in range(case.launches))
        batch = BATCH * ranks if weak else BATCH
        observed = Observed(ranks, 1, batch, batch / ranks, ((2**20, 1),), launches)
        points.append(replace(observed, slots=case.slots, on_gpu=case.kind == "GPU"))

    def true_ms(ranks: int) -> float:
        return float(np.mean([simulate(case, ranks, random).step_ms for _ in range(TRUE_LAUNCHES)]))

    first = case.measured[0]
    base = true_ms(first)
    truths = {
        ranks: base / true_ms(ranks) * (1 if weak else first / ranks)
        for ranks in larger_ranks(points)
    }
    return points, truths
