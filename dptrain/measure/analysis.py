"""Computes the records of a profile from the measured times of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.pop import Pop, pop_efficiencies
from dptrain.measure.profile import Parts, RankProfile, Roofs, Spread, StageProfile
from dptrain.measure.recorder import DATA_WAIT, EXPOSED, HIDDEN, STEP
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, Stage

MS = 1e-6
"""A nanosecond in milliseconds."""


def spread(values: NDArray[np.float64]) -> Spread:
    """Return median, quartiles, mean and number of values of a sample."""
    q1, median, q3 = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return Spread(median, q1, q3, float(values.mean()), len(values))


@dataclass(frozen=True)
class Measured:
    """Times in ms by rank, step and name.

    On a CPU every step is timed by stage, and both tables are the same. On a GPU a step that is
    timed by stage runs without overlap, so the times of steps are taken from other steps.

    Attributes:
        names: names of the columns, as `StepRecorder.names`.
        ordinary: float64 (ranks, steps, names), steps for the time per step.
        timed: float64 (ranks, steps, names), steps for the times of stages; it may be empty.
        samples: mean number of samples per step of each rank.
    """

    names: tuple[str, ...]
    ordinary: NDArray[np.float64]
    timed: NDArray[np.float64]
    samples: tuple[float, ...]

    @property
    def by_stage(self) -> bool:
        """True if steps were timed by stage."""
        return len(self.timed[0]) > 0

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
    def slowest(self) -> NDArray[np.float64]:
        """Times (steps,) of the slowest rank of each step."""
        slowest: NDArray[np.float64] = self.steps.max(axis=0)
        return slowest

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
        """Times (ranks, steps) of the step without exposed communication."""
        return self.column(STEP) - self.exposed

    @cached_property
    def imbalance(self) -> NDArray[np.float64]:
        """Times (ranks, steps) of waiting for the slowest rank of each step.

        All ranks leave a sum at about the same time, so the rank with the longest busy time in a
        step reaches the sum last. The difference of the busy times is the waiting time of another
        rank. Clocks of different ranks are not compared.
        """
        waited: NDArray[np.float64] = self.busy.max(axis=0) - self.busy
        return np.minimum(waited, self.exposed)

    @property
    def parts(self) -> Parts:
        """Parts of the mean step of all ranks; they add up to that step."""
        step, compute = self.steps.mean(), self.compute.mean()
        # On a GPU the times of stages and sums come from separate steps without overlap, in which
        # concurrent stages take longer in total, and the host waits for data while the GPU is
        # working. Each part is limited to the rest of the step.
        exposed = min(self.exposed.mean(), step)
        imbalance = min(self.imbalance.mean(), exposed)
        compute = min(compute, step - exposed)
        rest = step - compute - exposed
        data_wait = min(self.column(DATA_WAIT, ordinary=True).mean(), rest)
        other = rest - data_wait
        found = (compute, data_wait, exposed - imbalance, imbalance, other)
        return Parts(*(float(value) for value in found))


def rank_profiles(
    measured: Measured, hosts: Sequence[str], devices: Sequence[str]
) -> tuple[RankProfile, ...]:
    """Return a record for every rank, from means over steps."""
    delay = measured.busy - np.median(measured.busy, axis=0)
    data_wait = measured.column(DATA_WAIT, ordinary=True)
    hidden = measured.column(HIDDEN)
    found = []
    for rank, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        tables = (measured.compute, data_wait, measured.exposed, hidden, measured.imbalance, delay)
        step = float(measured.steps[rank].mean())
        exposed = float(measured.exposed[rank].mean())
        means = (float(table[rank].mean()) for table in tables)
        samples = measured.samples[rank]
        found.append(RankProfile(rank, host, device, samples, step, step - exposed, *means))
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
    plan: Plan, measured: Measured, roofs: Roofs | None, notes: Mapping[str, str]
) -> tuple[StageProfile, ...]:
    """Return a record for every stage, in the order of the plan."""
    kinds = stage_kinds(plan)
    work = _Work(plan, measured, roofs)
    found = [
        work.record([stage], stage.name, stage.group, kinds[stage.index], notes.get(stage.name, ""))
        for stage in plan.stages
    ]
    with_shares = _cumulative(found)
    return tuple(with_shares[id(record)] for record in found)


def kind_profiles(plan: Plan, measured: Measured, roofs: Roofs | None) -> tuple[StageProfile, ...]:
    """Return a record for all stages of each kind and phase, the slowest first."""
    kinds = stage_kinds(plan)
    by_kind: dict[tuple[str, Phase], list[Stage]] = {}
    for stage in plan.stages:
        by_kind.setdefault((kinds[stage.index], stage.phase), []).append(stage)
    work = _Work(plan, measured, roofs)
    found = []
    for (kind, phase), stages in by_kind.items():
        name = kind if kind == phase.value else f"{kind}.{phase.value}"
        found.append(work.record(stages, name, kind, kind, ""))
    return tuple(_cumulative(found).values())


def stage_kinds(plan: Plan) -> list[str]:
    """Return the kinds of the layers of each stage, such as ``conv+relu+pool``."""
    kinds = {g.name: "+".join(node.layer.kind for node in g.nodes) for g in plan.groups}
    return [kinds.get(stage.group, stage.group) for stage in plan.stages]


def bytes_accessed(plan: Plan, stage: Stage, filled: float) -> float:
    """Return the bytes that a stage reads and writes if a share `filled` of the batch is used."""
    if stage.phase is Phase.UPDATE:
        return float(stage.bytes_moved)
    sizes = {parameter.name: parameter.size for parameter in plan.network.parameters}
    fixed = plan.itemsize * sum(sizes[name] for name in stage.parameters)
    return fixed + filled * (stage.bytes_moved - fixed)


def live_bytes(plan: Plan, stage: Stage) -> int:
    """Return the size of the buffers that are needed while a stage runs."""
    buffers = plan.buffers.values()
    return sum(b.nbytes for b in buffers if b.first <= stage.index <= b.last)


class _Work:
    """Combines the stages of a plan with their times."""

    def __init__(self, plan: Plan, measured: Measured, roofs: Roofs | None) -> None:
        self.plan, self.measured, self.roofs = plan, measured, roofs
        self.filled = float(np.mean(measured.samples)) / plan.batch_size
        # On a GPU the stages without overlap take longer than a step; then shares refer to their
        # sum.
        sequential = measured.compute.mean() + measured.exposed.mean()
        self.step_ms = float(max(measured.steps.mean(), sequential))

    def record(
        self, stages: Sequence[Stage], name: str, group: str, kind: str, note: str
    ) -> StageProfile:
        """Return the record of some stages together, without its cumulative share."""
        plan, filled = self.plan, self.filled
        times = self.measured.timed[:, :, [stage.index for stage in stages]].sum(axis=2)
        by_rank = times.mean(axis=1)
        slowest, mean = int(by_rank.argmax()), float(by_rank.mean())
        flops = [s.flops * (1.0 if s.phase is Phase.UPDATE else filled) for s in stages]
        moved = [bytes_accessed(plan, stage, filled) for stage in stages]
        least = None
        if self.roofs is not None:
            least = sum(map(self.roofs.least_ms, flops, moved))
        return StageProfile(
            name=name,
            group=group,
            kind=kind,
            phase=stages[0].phase.value,
            calls=len(stages),
            time_ms=spread(times.mean(axis=0)),
            slowest_ms=float(by_rank[slowest]),
            slowest_rank=slowest,
            share=mean / self.step_ms,
            cumulative_share=0.0,
            flops=sum(flops),
            bytes_moved=sum(moved),
            memory_bytes=max(live_bytes(plan, stage) for stage in stages),
            gflops=sum(flops) / mean / 1e6 if mean else 0.0,
            gb_per_s=sum(moved) / mean / 1e6 if mean else 0.0,
            roofline_share=None if least is None or not mean else least / mean,
            note=note,
        )


def _cumulative(records: Iterable[StageProfile]) -> dict[int, StageProfile]:
    """Return copies with cumulative shares, slowest first, by the id of the original record."""
    total, found = 0.0, {}
    for record in sorted(records, key=lambda record: -record.time_ms.mean):
        total += record.share
        found[id(record)] = replace(record, cumulative_share=total)
    return found
