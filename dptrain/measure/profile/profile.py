"""Records of a profile: the time of a step by part, layer, kind of operation and rank.

They are written to ``profile.json`` and read from it. docs/reference/files.md defines the names,
which are the same in tables, files, traces and reports. Times are in ms, sizes in bytes,
rates in 10⁹ per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dptrain.measure.machine.counters import Processor
from dptrain.measure.machine.energy import Energy
from dptrain.measure.profile.known import KnownLoss
from dptrain.measure.profile.pop import Pop
from dptrain.measure.statistics import Estimate
from dptrain.records import Form, StoredRecord


@dataclass(frozen=True)
class Spread:
    """Distribution of a sample.

    Attributes:
        median, q1, q3, mean, n: median, quartiles, mean and number of values.
        low, high: 95% interval of the median of a series of steps, see
            `dptrain.measure.statistics.median_of_steps`; None if there are too few.
        p95, p99: percentiles; None if there are fewer than 20 or 100 values.
    """

    median: float
    q1: float
    q3: float
    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    p95: float | None = None
    p99: float | None = None

    @property
    def estimate(self) -> Estimate:
        """The median with its interval, which is infinite if there is none."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return Estimate(self.median, low, high, self.n)


@dataclass(frozen=True)
class Parts:
    """Parts of a step in ms, means over ranks and some steps; they add up to the mean of these.

    Attributes:
        compute: stages of the plan, with load and update.
        data_wait: waiting for the minibatch.
        transfer: communication: exposed, with all ranks present, and with a core.
        imbalance: waiting: exposed communication in which a rank waits for another one, which is
            slower or without a core.
        other: the rest of the step.
        checkpoint: writing a checkpoint, and waiting for a rank that writes one.
        evaluation: evaluation on the test data.
        without_core: time in a run queue, which no other part contains. None if it was not
            measured; the other parts then contain it.
    """

    compute: float
    data_wait: float
    transfer: float
    imbalance: float
    other: float
    checkpoint: float = 0.0
    evaluation: float = 0.0
    without_core: float | None = None

    @property
    def known(self) -> dict[str, float]:
        """The parts that were measured, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def total(self) -> float:
        """The mean of the steps."""
        return sum(self.known.values())

    def times(self, factor: float) -> Parts:
        """Return the parts times a number."""
        return Parts(**{name: factor * value for name, value in self.known.items()})

    def merged(self) -> Parts:
        """Return the parts with the time without a core in `compute`, as if it were unknown."""
        return replace(self, compute=self.compute + (self.without_core or 0.0), without_core=None)

    def without_breaks(self) -> Parts:
        """Return the parts without checkpoints and evaluations, which add up to less."""
        return replace(self, checkpoint=0.0, evaluation=0.0)


@dataclass(frozen=True)
class StepParts:
    """Where the time of a step goes.

    Parts of medians do not add up to the median. Therefore there are also the means of typical
    steps, the half of the steps whose duration is closest to the median by rank, and of all steps.

    Attributes:
        median: the distribution of each part over the steps, mean over ranks; by the names of
            `Parts`. Empty if no step was timed by stage.
        typical: parts of typical steps.
        all_steps: parts of all steps, including slow ones.
        load_imbalance, serialisation: shares of `imbalance` in all steps, which add up to 1: the
            same rank is late in each step, or a different one.
    """

    median: dict[str, Spread]
    typical: Parts
    all_steps: Parts
    load_imbalance: float
    serialisation: float


@dataclass(frozen=True)
class StageProfile:
    """A stage, or all stages of one kind.

    Attributes:
        name: ``conv1+relu1+pool1.forward``; of a kind, ``conv+relu+maxpool.forward``.
        group: layers, ``conv1+relu1+pool1``.
        kind: their kinds, ``conv+relu+maxpool``.
        phase: ``forward``, ``backward``, ``backward_weight``, ``backward_input``, ``load``,
            ``loss``, ``update``.
        calls: how often in a step.
        time_ms: mean over ranks; distribution over steps.
        typical_ms: mean over ranks and typical steps, see `StepParts`.
        slowest_ms, slowest_rank: time in typical steps and number of the slowest rank.
        share, cumulative_share: share of typical steps; cumulative from the slowest stage on.
        flops, bytes_moved: per step and rank.
        memory_bytes: size of all buffers that are needed while the stage runs.
        gflops, gb_per_s: rates in typical steps, in 10⁹ per second.
        roofline_share: least time of `least_flops` and `least_bytes` in the roofline model divided
            by `typical_ms`; None if the limits were not measured or are withheld.
        note: algorithm of the stage, if the backend states one.
        least_flops, least_bytes: the part of `flops` and `bytes_moved` that no implementation of
            the algorithm can omit, see `dptrain.measure.profile.rooflines`; None in profiles of
            older versions, and of kinds.
    """

    name: str
    group: str
    kind: str
    phase: str
    calls: int
    time_ms: Spread
    typical_ms: float
    slowest_ms: float
    slowest_rank: int
    share: float
    cumulative_share: float
    flops: float
    bytes_moved: float
    memory_bytes: int
    gflops: float
    gb_per_s: float
    roofline_share: float | None
    note: str
    least_flops: float | None = None
    least_bytes: float | None = None


@dataclass(frozen=True)
class RankProfile:
    """Mean times of typical steps of one rank in ms.

    Attributes:
        busy_ms: time of the step without exposed communication.
        exposed_ms: communication and waiting for it.
        hidden_ms: time in which a gradient sum was in progress while the rank computed. It is not
            what overlap saved: MPI may have made no progress in that time.
        imbalance_ms: part of `exposed_ms` spent waiting for a slower rank, or one without a core.
        delay_ms: busy time minus that of the median rank; large for a straggler.
        transfer_ms: part of `exposed_ms` that is neither waiting nor without a core; None in
            profiles of older versions.
        without_core_ms: time in a run queue; None if it was not measured. `compute_ms` and
            `data_wait_ms` do not contain it then.
        involuntary_switches, page_faults: number per step, in all measured steps; None as above.
    """

    rank: int
    host: str
    device: str
    samples: float
    step_ms: float
    busy_ms: float
    compute_ms: float
    data_wait_ms: float
    exposed_ms: float
    hidden_ms: float
    imbalance_ms: float
    delay_ms: float
    transfer_ms: float | None = None
    without_core_ms: float | None = None
    involuntary_switches: float | None = None
    page_faults: float | None = None

    @property
    def communication_ms(self) -> float:
        """Communication without waiting; in profiles of older versions with a lack of cores."""
        known = self.transfer_ms
        return max(self.exposed_ms - self.imbalance_ms, 0.0) if known is None else known


@dataclass(frozen=True)
class Roofs:
    """Limits of the roofline model, measured by all ranks at the same time.

    Attributes:
        gflops: rate of a product of large matrices on a rank, the highest of all ranks.
        gb_per_s: bandwidth of data far larger than any cache, of the rank with the highest one.
        how: description of the measurement.
        copies: pairs (bytes, gb_per_s), from small to large.
        products: pairs (name of the program, gflops) of the rank with the highest rate.
        withheld: why the limits are not certain, else "".
    """

    gflops: float
    gb_per_s: float
    how: str
    copies: tuple[tuple[int, float], ...] = ()
    products: tuple[tuple[str, float], ...] = ()
    withheld: str = ""

    def bandwidth(self, nbytes: float) -> float:
        """Return an upper limit in GB/s of the bandwidth of data of `nbytes` bytes.

        It is the highest one of data at least as large as the largest measured size up to `nbytes`:
        that comes from the same cache or from a faster one.
        """
        smaller = [size for size, _ in self.copies if size <= nbytes]
        least = max(smaller, default=0)
        return max((rate for size, rate in self.copies if size >= least), default=self.gb_per_s)

    def moving_ms(self, nbytes: float) -> float:
        """Return the least time in ms to read or write `nbytes` bytes once.

        A part of data that exceed a cache can still be in it. So the bytes between two measured
        sizes count with the bandwidth of the smaller one.

        Example:
            >>> Roofs(1.0, 10.0, "", copies=((1000, 100.0), (2000, 10.0))).moving_ms(3000) * 1e6
            120.0
        """
        sizes = [0, *(size for size, _ in self.copies if size < nbytes), nbytes]
        pieces = ((stop - start) / self.bandwidth(start) for start, stop in pairwise(sizes))
        return sum(pieces) / 1e6

    def least_ms(self, flops: float, nbytes: float) -> float:
        """Return the least time of the work in ms.

        max(FLOPs / peak, bytes / bandwidth). Source: Williams, Waterman and Patterson, "Roofline:
        an insightful visual performance model for multicore architectures", 2009.
        """
        return max(flops / self.gflops / 1e6, self.moving_ms(nbytes))


@dataclass(frozen=True)
class SumTime:
    """Time of a gradient sum alone, between barriers, for the buckets of one size.

    In a sweep, `buckets` is 0: no bucket of the job has this size.
    """

    bucket_bytes: int
    buckets: int
    time_ms: Spread


@dataclass(frozen=True)
class StatisticsTime:
    """Time of the sums of batch statistics over the ranks.

    Attributes:
        number: sums of a step.
        time_ms: time of all sums of a step with waiting, mean over ranks. It is a part of
            communication and waiting.
        share: mean of these times divided by that of the steps.
        largest_bytes: size of the largest sum, of one rank.
        alone_ms: time of the largest sum alone, between barriers.
        separate_kernels: True if timed steps make the sums by separate kernels. In other steps, the
            kernels that compute statistics add them over the ranks, which takes less time.
    """

    number: int
    time_ms: Spread
    share: float
    largest_bytes: int
    alone_ms: Spread
    separate_kernels: bool = False


@dataclass(frozen=True)
class Profile(StoredRecord):
    """One measured job.

    Attributes:
        job: network, data, backend, precision, strategy, transport, ranks, nodes, threads,
            batch_size (of all ranks), local_batch (of the largest share), optimizer, parameters,
            seed, bucket_kib, prefetch, cores (that a rank may use), possible (efficiency that the
            cores allow).
        steps: number of timed steps.
        step_ms: wall time from one completion of the updated parameters to the next; a step of the
            job is its mean, the wall time divided by the steps.
        step_times_ms: these times in order.
        samples_per_s: minibatch divided by the mean step.
        timing_ms: overhead of the clock readings of a step.
        parts: parts of typical steps, see `StepParts`.
        step_parts: the distribution of each part, and parts of typical and of all steps.
        stages: stages in the order of the plan.
        kinds: stages by kind and phase, slowest first.
        ranks: ranks in order.
        sums: times of gradient sums alone; empty for one rank.
        roofs: limits of the roofline model; None if not measured.
        shares_withheld: why no stage has a `roofline_share` although `roofs` were measured, else
            "".
        known: losses that were injected after the steps; empty if none were.
        memory: bytes by purpose, with ``peak`` of the process.
        environment: the same values as in ``env.json``.
        pop: efficiencies of the POP hierarchy; None for one rank.
        energy: of the measured steps; None in profiles of older versions.
        processor: instructions and frequency of the measured steps; None if the ranks compute on
            GPUs, and in profiles of older versions.
        sweep: times of all-reduces of other sizes by MPI, alone; empty for one rank and on GPUs.
        batch_statistics: times of their sums over the ranks; None if there are none.
        other_cores: mean number of cores that other programs used on the node of rank 0 during the
            measured steps or the whole measurement, whichever is larger; None if it is unknown.
        frequencies: of each rank in order, about ten times during the measured steps: ``mhz`` of
            the core or GPU on which it computes, ``throttled`` with the reasons that slowed a GPU
            down, and ``missing`` with the reason if there are none. Of ranks that share a GPU, one
            has readings. Empty for inference.
    """

    FORM = Form(
        noun="profile",
        otherwise="expected a file that `dptrain profile --output` writes",
        anew="make the profile again",
        version=2,
    )

    job: dict[str, Any]
    steps: int
    step_ms: Spread
    step_times_ms: tuple[float, ...]
    samples_per_s: float
    timing_ms: float
    parts: Parts
    step_parts: StepParts
    stages: tuple[StageProfile, ...]
    kinds: tuple[StageProfile, ...]
    ranks: tuple[RankProfile, ...]
    sums: tuple[SumTime, ...]
    roofs: Roofs | None
    memory: dict[str, int]
    environment: dict[str, Any]
    pop: Pop | None = None
    energy: Energy | None = None
    processor: Processor | None = None
    sweep: tuple[SumTime, ...] = ()
    batch_statistics: StatisticsTime | None = None
    other_cores: float | None = None
    frequencies: tuple[dict[str, Any], ...] = ()
    shares_withheld: str = ""
    known: tuple[KnownLoss, ...] = ()

    @property
    def samples(self) -> float:
        """Samples of a step on all ranks."""
        return sum(rank.samples for rank in self.ranks)

    def check(self) -> None:
        if not (self.stages and self.kinds and self.ranks):
            raise ValueError("no stage or no rank")
        if not math.isfinite(sum(self.step_times_ms)) or self.step_ms.mean <= 0:
            raise ValueError("the time of a step is not finite or not positive")
        for name in ("ranks", "threads", "batch_size"):
            if not isinstance(self.job.get(name), int):
                raise ValueError(f"job.{name} is not a whole number")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file that `write` has written.

        Older versions divided the samples by the median step; the rate is computed anew.

        Raises:
            UserError: it does not exist, or has another format or version.
        """
        found = super().read(path)
        rate = 1e3 * found.samples / found.step_ms.mean
        is_same = math.isclose(found.samples_per_s, rate, rel_tol=1e-9)
        return found if is_same else replace(found, samples_per_s=rate)
