"""Computes the records of a profile from the measured times of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.statistics.statistics import largest_statistics
from dptrain.measure.profile.pop import Pop, pop_efficiencies
from dptrain.measure.profile.profile import (
    Parts,
    RankProfile,
    Spread,
    StageProfile,
    StatisticsTime,
    StepParts,
)
from dptrain.measure.profile.rooflines import least_work
from dptrain.measure.statistics import FEWEST_STEPS, median_of_steps
from dptrain.measure.step_record import (
    CHECKPOINT,
    DATA_DELAY,
    DATA_WAIT,
    DELAYS,
    EVALUATION,
    EXPOSED,
    HIDDEN,
    RUN_DELAY,
    STATISTICS,
    STEP,
    SUM_DELAY,
    UPDATE_DELAY,
)
from dptrain.plan.lowering import STATISTICS_PHASES, Phase
from dptrain.plan.plan import Plan, Stage

MS = 1e-6
"""A nanosecond in milliseconds."""


def spread(values: NDArray[np.float64]) -> Spread:
    """Return the distribution of a sample; the interval counts values in order as steps."""
    q1, median, q3 = (float(value) for value in np.percentile(values, [25, 50, 75]))
    n, interval = len(values), median_of_steps(values)
    low, high = (None, None) if n < FEWEST_STEPS else (max(interval.low, 0.0), interval.high)
    p95 = float(np.percentile(values, 95)) if n >= 20 else None
    p99 = float(np.percentile(values, 99)) if n >= 100 else None
    return Spread(median, q1, q3, float(values.mean()), n, low, high, p95, p99)


@dataclass(frozen=True)
class Measured:
    """Times in ms by rank, step and name.

    A step is the wall time from one completion of the updated parameters to the next, on the clock
    of each rank. All ranks complete a step at about the same time, so the mean over ranks is the
    duration of the step: its sum over steps is the wall time, whatever the ranks' jitter. (The
    largest duration of any rank would add up to more than the wall time.)

    On a CPU every step is timed by stage, and both tables are the same. On a GPU a step that is
    timed by stage runs without overlap, so the times of steps are taken from other steps.

    Attributes:
        names: names of the columns, as `StepRecorder.names`.
        ordinary: float64 (ranks, steps, names), steps for the time per step.
        timed: float64 (ranks, steps, names), steps for the times of stages; it may be empty.
        samples: mean number of samples per step of each rank.
        counts: float64 (ranks, 2), involuntary context switches and page faults of each rank per
            step; None if they were not measured.
    """

    names: tuple[str, ...]
    ordinary: NDArray[np.float64]
    timed: NDArray[np.float64]
    samples: tuple[float, ...]
    counts: NDArray[np.float64] | None = None

    @property
    def by_stage(self) -> bool:
        """True if steps were timed by stage."""
        return len(self.timed[0]) > 0

    @property
    def _is_host(self) -> bool:
        """True if every step was timed by stage."""
        return self.ordinary is self.timed

    def column(self, name: str, *, ordinary: bool = False) -> NDArray[np.float64]:
        """Return the times (ranks, steps) of one name."""
        table = self.ordinary if ordinary else self.timed
        column: NDArray[np.float64] = table[:, :, self.names.index(name)]
        return column

    @cached_property
    def steps(self) -> NDArray[np.float64]:
        """Times (ranks, steps) of ordinary steps."""
        return self.column(STEP, ordinary=True)

    @property
    def step_times(self) -> NDArray[np.float64]:
        """Times (steps,) of ordinary steps."""
        times: NDArray[np.float64] = self.steps.mean(axis=0)
        return times

    @cached_property
    def compute(self) -> NDArray[np.float64]:
        """Times (ranks, steps) of all stages together."""
        stages: NDArray[np.float64] = self.timed[:, :, : self.names.index(DATA_WAIT)].sum(axis=2)
        return stages

    @cached_property
    def exposed(self) -> NDArray[np.float64]:
        """Times (ranks, steps) of communication for which compute waited."""
        return self.column(EXPOSED)

    @cached_property
    def busy(self) -> NDArray[np.float64]:
        """Times (ranks, steps) without exposed communication, evaluation and checkpoints."""
        between = self.column(EVALUATION) + self.column(CHECKPOINT)
        return self.column(STEP) - self.exposed - between

    @cached_property
    def imbalance(self) -> NDArray[np.float64]:
        """Times (ranks, steps) of waiting for the slowest rank of each step.

        All ranks leave a sum at about the same time, so the rank with the longest busy time in a
        step reaches the sum last. The difference of the busy times is the waiting time of another
        rank. Clocks of different ranks are not compared.
        """
        return self._waiting(self.busy)

    @cached_property
    def checkpoint_wait(self) -> NDArray[np.float64]:
        """Times (ranks, ordinary steps) of waiting because another rank wrote a checkpoint."""
        if not self._is_host:
            # The device waits, and its waiting is not timed in these steps.
            checkpoint = self.column(CHECKPOINT, ordinary=True)
            waited: NDArray[np.float64] = checkpoint.max(axis=0) - checkpoint
            return np.minimum(waited, self.steps)
        waiting = self._waiting(self.busy + self.column(CHECKPOINT))
        return np.maximum(waiting - self.imbalance, 0.0)

    @cached_property
    def knows_delays(self) -> bool:
        """True if run delays were measured in all steps of all ranks."""
        known = (name in self.names and bool((self.column(name) >= 0).all()) for name in DELAYS)
        return self._is_host and all(known)

    @cached_property
    def _sum_times(self) -> dict[str, NDArray[np.float64]]:
        """Divide the exposed time after all ranks arrived, (ranks, steps), by its cause.

        A rank without a core in a sum lets the others wait, and this is not what the sum takes.
        Delays while a rank waits for a later one cost nothing. As far as it is not known when a
        delay ended, it counts after the arrival of all ranks, so `transfer` never contains it. The
        ranks of a sum lack their cores at the same time, so the longest delay counts; before the
        update and after it they wait for each other again.
        """
        present = self.exposed - self.imbalance
        if self._is_host:
            present = present - self.checkpoint_wait
        nothing = np.zeros_like(present)
        if not self.knows_delays:
            return {"transfer": present, "own": nothing, "others": nothing}
        by_phase = [np.minimum(self.column(name), present) for name in (SUM_DELAY, UPDATE_DELAY)]
        own = np.minimum(sum(by_phase), present)
        longest = sum(times.max(axis=0) for times in by_phase)
        others = np.minimum(np.maximum(longest - own, 0.0), present - own)
        return {"transfer": present - own - others, "own": own, "others": others}

    @cached_property
    def without_core(self) -> NDArray[np.float64]:
        """Times (ranks, steps) in a run queue that delayed the step; 0 if they are unknown."""
        own = self._sum_times["own"]
        if not self.knows_delays:
            return own
        delays: NDArray[np.float64] = own + self.column(DATA_DELAY) + self._stage_delay
        return delays

    @property
    def _stage_delay(self) -> NDArray[np.float64]:
        """Delays (ranks, steps) in stages and between them, at most the time of these."""
        between = self.column(STEP) - self.exposed - self.column(DATA_WAIT)
        between = between - self.column(EVALUATION) - self.column(CHECKPOINT)
        return np.minimum(self.column(RUN_DELAY), np.maximum(between, 0.0))

    def _waiting(self, arrival: NDArray[np.float64]) -> NDArray[np.float64]:
        waited: NDArray[np.float64] = arrival.max(axis=0) - arrival
        return np.minimum(waited, self.exposed)

    @property
    def parts(self) -> Parts:
        """Parts of typical steps, see `StepParts`."""
        return self._parts(typical_steps(self.step_times), typical_steps(self.timed_steps))

    @property
    def step_parts(self) -> StepParts:
        """Where the time of a step goes."""
        all_steps = self._parts(slice(None), slice(None))
        busy = self.busy
        by_step = float(busy.max(axis=0).mean() - busy.mean())
        constant = float(busy.mean(axis=1).max() - busy.mean())
        share = constant / by_step if by_step > 0 else 0.0
        medians = {name: spread(times.mean(axis=0)) for name, times in self.times().items()}
        return StepParts(medians, self.parts, all_steps, share, 1 - share if by_step > 0 else 0.0)

    @property
    def timed_steps(self) -> NDArray[np.float64]:
        """Times (steps,) of the steps that were timed by stage."""
        times: NDArray[np.float64] = self.column(STEP).mean(axis=0)
        return times

    def times(self) -> dict[str, NDArray[np.float64]]:
        """Return the times (ranks, steps) of each part by the name of the field of `Parts`."""
        sums, compute = self._sum_times, self.compute
        data_wait = self.column(DATA_WAIT, ordinary=True)
        if self.knows_delays:
            compute = compute - np.minimum(self._stage_delay, compute)
            data_wait = data_wait - self.column(DATA_DELAY)
        found = {
            "compute": compute,
            "data_wait": data_wait,
            "transfer": sums["transfer"],
            "imbalance": self.imbalance + sums["others"],
            "checkpoint": self.column(CHECKPOINT, ordinary=True) + self.checkpoint_wait,
            "evaluation": self.column(EVALUATION, ordinary=True),
        }
        if self.knows_delays:
            found["without_core"] = self.without_core
        if self._is_host:
            found["other"] = self.steps - sum(found.values())
        return found

    def _parts(self, ordinary: Selection, timed: Selection) -> Parts:
        """Return means over ranks and the selected steps; they add up to the mean step."""

        def mean(times: NDArray[np.float64], chosen: Selection = timed) -> float:
            return float(times[:, chosen].mean())

        step, times = mean(self.steps, ordinary), self.times()
        # On a GPU the times of stages and sums come from separate steps without overlap, in which
        # concurrent stages take longer in total, and the host waits for data while the GPU is
        # working. Each part is limited to the rest of the step.
        rest = step
        limited = {}
        for name in (
            "checkpoint",
            "evaluation",
            "without_core",
            "transfer",
            "imbalance",
            "compute",
            "data_wait",
        ):
            if name not in times:
                continue
            chosen = timed if name in ("transfer", "imbalance", "compute") else ordinary
            limited[name] = min(mean(times[name], chosen), rest)
            rest -= limited[name]
        return Parts(**limited, other=max(rest, 0.0))


Selection = slice | NDArray[np.intp]
"""Selects steps."""


def typical_steps(durations: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices of the half of the steps that is closest to the median by rank."""
    quarter = len(durations) // 4
    order = np.argsort(durations, kind="stable")
    return np.sort(order[quarter : len(order) - quarter])


def rank_profiles(
    measured: Measured, hosts: Sequence[str], devices: Sequence[str]
) -> tuple[RankProfile, ...]:
    """Return a record for every rank, from means over typical steps."""
    chosen, timed = typical_steps(measured.step_times), typical_steps(measured.timed_steps)

    def mean(times: NDArray[np.float64], rank: int, steps: NDArray[np.intp] = timed) -> float:
        return float(times[rank, steps].mean())

    delay = measured.busy - np.median(measured.busy, axis=0)
    counts = measured.counts
    times = measured.times()
    found = []
    for rank, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        step, exposed = mean(measured.steps, rank, chosen), mean(measured.exposed, rank)
        found.append(
            RankProfile(
                rank=rank,
                host=host,
                device=device,
                samples=measured.samples[rank],
                step_ms=step,
                busy_ms=step - exposed,
                compute_ms=mean(times["compute"], rank),
                data_wait_ms=mean(times["data_wait"], rank, chosen),
                exposed_ms=exposed,
                hidden_ms=mean(measured.column(HIDDEN), rank),
                imbalance_ms=mean(times["imbalance"], rank),
                delay_ms=mean(delay, rank),
                transfer_ms=mean(times["transfer"], rank),
                without_core_ms=(
                    mean(measured.without_core, rank) if measured.knows_delays else None
                ),
                involuntary_switches=None if counts is None else float(counts[rank, 0]),
                page_faults=None if counts is None else float(counts[rank, 1]),
            )
        )
    return tuple(found)


def profile_efficiencies(plan: Plan, measured: Measured) -> Pop | None:
    """Return the efficiencies of the POP hierarchy; None for one rank.

    On a GPU they describe the steps that were timed by stage, without overlap.
    """
    if len(measured.timed) == 1 or not measured.by_stage:
        return None
    groups: dict[str, list[int]] = {}
    for stage in plan.stages:
        groups.setdefault(stage.group, []).append(stage.index)
    layers = {name: measured.timed[:, :, indices].sum(axis=2) for name, indices in groups.items()}
    # All ranks leave the sum at about the same time, so their steps are equally long in the mean.
    return pop_efficiencies(measured.busy, measured.column(STEP).mean(axis=0), layers)


def stage_profiles(
    plan: Plan, measured: Measured, notes: Mapping[str, str]
) -> tuple[StageProfile, ...]:
    """Return a record for every stage, in the order of the plan."""
    kinds = stage_kinds(plan)
    work = _Work(plan, measured)
    found = []
    for stage in plan.stages:
        note = notes.get(stage.name, "")
        record = work.record([stage], stage.name, stage.group, kinds[stage.index], note)
        flops, moved = work.least(stage, note)
        found.append(replace(record, least_flops=flops, least_bytes=moved))
    with_shares = _cumulative(found)
    return tuple(with_shares[id(record)] for record in found)


def statistics_time(
    plan: Plan, measured: Measured, alone: Spread, *, separate_kernels: bool
) -> StatisticsTime:
    """Return the times of the sums of batch statistics.

    Args:
        plan: of the steps.
        measured: times of all ranks.
        alone: time of the largest sum alone.
        separate_kernels: see `StatisticsTime`.
    """
    times = measured.column(STATISTICS).mean(axis=0)
    return StatisticsTime(
        number=sum(stage.phase in STATISTICS_PHASES for stage in plan.stages),
        time_ms=spread(times),
        share=float(times.mean() / measured.timed_steps.mean()),
        largest_bytes=8 * largest_statistics(plan),
        alone_ms=alone,
        separate_kernels=separate_kernels,
    )


def kind_profiles(
    plan: Plan, measured: Measured, notes: Mapping[str, str]
) -> tuple[StageProfile, ...]:
    """Return a record for all stages of each kind and phase, the slowest first."""
    kinds = stage_kinds(plan)
    by_kind: dict[tuple[str, Phase], list[Stage]] = {}
    for stage in plan.stages:
        by_kind.setdefault((kinds[stage.index], stage.phase), []).append(stage)
    work = _Work(plan, measured)
    found = []
    for (kind, phase), stages in by_kind.items():
        name = kind if kind == phase.value else f"{kind}.{phase.value}"
        algorithms = dict.fromkeys(notes[s.name] for s in stages if notes.get(s.name))
        found.append(work.record(stages, name, kind, kind, ", ".join(algorithms)))
    return tuple(_cumulative(found).values())


def stage_kinds(plan: Plan) -> list[str]:
    """Return the kinds of the layers of each stage, such as ``conv+relu+pool``."""
    kinds = {g.name: "+".join(node.layer.kind for node in g.nodes) for g in plan.groups}
    return [kinds.get(stage.group, stage.group) for stage in plan.stages]


def accessed(plan: Plan, stage: Stage, moved: float, filled: float) -> float:
    """Return the bytes that a stage reads and writes if a share `filled` of the batch is used.

    Args:
        plan, stage: a stage of the plan.
        moved: its bytes for a full batch.
        filled: the share.
    """
    if stage.phase is Phase.UPDATE:
        return moved
    sizes = {parameter.name: parameter.size for parameter in plan.network.parameters}
    fixed = plan.itemsize * sum(sizes[name] for name in stage.parameters)
    return fixed + filled * (moved - fixed)


def live_bytes(plan: Plan, stage: Stage) -> int:
    """Return the size of the buffers that are needed while a stage runs."""
    buffers = plan.buffers.values()
    return sum(b.nbytes for b in buffers if b.first <= stage.index <= b.last)


class _Work:
    """Combines the stages of a plan with their times."""

    def __init__(self, plan: Plan, measured: Measured) -> None:
        self.plan, self.measured = plan, measured
        self.filled = float(np.mean(measured.samples)) / plan.batch_size
        # On a GPU the stages without overlap take longer than a step; then shares refer to their
        # sum.
        self.typical = typical_steps(measured.column(STEP).mean(axis=0))
        sequential = (measured.compute + measured.exposed)[:, self.typical].mean()
        self.step_ms = float(max(measured.parts.total, sequential))

    def part(self, stage: Stage) -> float:
        """Return the share of the operations for a full batch that a stage makes."""
        return 1.0 if stage.phase is Phase.UPDATE else self.filled

    def least(self, stage: Stage, note: str) -> tuple[float, float]:
        """Return the operations and bytes of `least_work` for the used share of the batch."""
        flops, moved = least_work(self.plan, stage, note)
        return flops * self.part(stage), accessed(self.plan, stage, moved, self.filled)

    def record(
        self, stages: Sequence[Stage], name: str, group: str, kind: str, note: str
    ) -> StageProfile:
        """Return the record of some stages together, without its cumulative share."""
        plan, filled = self.plan, self.filled
        times = self.measured.timed[:, :, [stage.index for stage in stages]].sum(axis=2)
        by_rank = times[:, self.typical].mean(axis=1)
        slowest, mean = int(by_rank.argmax()), float(by_rank.mean())
        flops = [s.flops * self.part(s) for s in stages]
        moved = [accessed(plan, stage, stage.bytes_moved, filled) for stage in stages]
        return StageProfile(
            name=name,
            group=group,
            kind=kind,
            phase=stages[0].phase.value,
            calls=len(stages),
            time_ms=spread(times.mean(axis=0)),
            typical_ms=mean,
            slowest_ms=float(by_rank[slowest]),
            slowest_rank=slowest,
            share=mean / self.step_ms,
            cumulative_share=0.0,
            flops=sum(flops),
            bytes_moved=sum(moved),
            memory_bytes=max(live_bytes(plan, stage) for stage in stages),
            gflops=sum(flops) / mean / 1e6 if mean else 0.0,
            gb_per_s=sum(moved) / mean / 1e6 if mean else 0.0,
            roofline_share=None,
            note=note,
        )


def _cumulative(records: Iterable[StageProfile]) -> dict[int, StageProfile]:
    """Return copies with cumulative shares, slowest first, by the id of the original record."""
    total, found = 0.0, {}
    for record in sorted(records, key=lambda record: -record.typical_ms):
        total += record.share
        found[id(record)] = replace(record, cumulative_share=total)
    return found
