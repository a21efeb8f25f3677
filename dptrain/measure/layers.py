"""Times of the layers of a step, each stage alone, on several backends.

A stage runs many times in a row on the same inputs. Inputs that fit into a cache are read from
there, as they mostly are in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backends import load_backend
from dptrain.batch import Batch
from dptrain.machine import available_cores
from dptrain.measure.profile.explanations import algorithms
from dptrain.measure.profile.profile import Roofs
from dptrain.measure.profile.rooflines import is_low, least_work
from dptrain.measure.profile.tables import LOW_MARK, LOW_NOTE
from dptrain.measure.roofs import measure_roofs
from dptrain.network.biases import separate_biases
from dptrain.network.network import Network
from dptrain.network.random_batch import random_batch
from dptrain.plan.lowering import FORWARD_PHASES, Phase, join_names
from dptrain.plan.optimizers import SGD
from dptrain.plan.plan import Plan, make_plan
from dptrain.tables import Table

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica

FORWARD, BACKWARD, OTHER = "forward", "backward", ""
"""Directions of a row; loss and update have none."""


@dataclass(frozen=True)
class StageTime:
    """Time of one or more layers on one backend, in ms.

    Attributes:
        median: median over repetitions, summed over the stages of the layers.
        low, high: first and third quartile, summed likewise.
        least: least time in the roofline model, summed likewise; None if the limits of the machine
            are not certain.
    """

    median: float
    low: float
    high: float
    least: float | None = None

    @property
    def roofline_share(self) -> float | None:
        """Least time divided by the median; None if it is not known."""
        return None if self.least is None else self.least / self.median


@dataclass(frozen=True)
class LayerTimes:
    """One row: layers that every backend computes separately from the others.

    Attributes:
        layers: names joined with ``+``; or ``loss``, ``update``.
        direction: `FORWARD`, `BACKWARD` or `OTHER`.
        flops: number of operations for the batch.
        by_backend: times by name of the backend.
    """

    layers: str
    direction: str
    flops: int
    by_backend: dict[str, StageTime]


@dataclass(frozen=True)
class TimedLayers:
    """The times of the layers of a step, and the limits of the machine.

    Attributes:
        rows: the times.
        roofs: measured limits by name of the backend. `Roofs.withheld` states why its times are not
            compared with them, if so.
    """

    rows: tuple[LayerTimes, ...]
    roofs: Mapping[str, Roofs]

    def values(self) -> list[dict[str, Any]]:
        """Return the rows as values for JSON, with the shares of the roofline."""
        rows = [asdict(row) for row in self.rows]
        for row, values in zip(self.rows, rows, strict=True):
            for name, time in row.by_backend.items():
                share = time.roofline_share
                values["by_backend"][name] |= {"roofline_share": share, "is_low": is_low(share)}
        return rows


def time_layers(
    network: Network,
    backends: Sequence[str],
    *,
    batch_size: int,
    precision: str | None = None,
    threads: int | None = None,
    inference: bool = False,
    fused: bool = True,
) -> TimedLayers:
    """Time the stages of a training step or of inference on random data, and measure the limits.

    Args:
        network: the network.
        backends: names of backends.
        batch_size: number of samples.
        precision: precision of all backends; None for the default of each.
        threads: number of compute threads; None for all cores that the process may use.
        inference: True times a plan without gradients, and only its forward stages.
        fused: False computes each layer by stages of its own, in inference also the addition of
            biases.

    Raises:
        UserError: a backend or the precision does not exist, or cannot be used here.
    """
    if inference and not fused:
        network = separate_biases(network)
    plans: dict[str, Plan] = {}
    times: dict[str, dict[str, StageTime]] = {}
    roofs: dict[str, Roofs] = {}
    for name in backends:
        backend = load_backend(name)
        backend.choose_device(0)
        plan = make_plan(
            network,
            backend,
            batch_size,
            precision=precision,
            optimizer=SGD(),
            training=not inference,
            threads=available_cores() if threads is None else threads,
            fused=fused,
        )
        replica = backend.make_replica(plan)
        measured = _time_stages(replica)
        limits = measure_roofs(backend, plan, replica.memory)
        plans[name] = plan
        times[name], roofs[name] = _with_least(plan, measured, limits)
    return TimedLayers(tuple(_rows(plans, times)), roofs)


def _with_least(
    plan: Plan, times: Mapping[str, StageTime], roofs: Roofs
) -> tuple[dict[str, StageTime], Roofs]:
    """Return times with the least ones, unless the limits are not certain, and the limits."""
    names, least = algorithms(plan), dict[str, float]()
    for stage in plan.stages:
        if stage.name in times:
            work = least_work(plan, stage, names.get(stage.name, ""))
            least[stage.name] = roofs.least_ms(*work)
    faster = [name for name, time in least.items() if time > times[name].low]
    if faster and not roofs.withheld:
        reason = f"{faster[0]} took less time than the measured limits allow"
        roofs = replace(roofs, withheld=reason)
    if roofs.withheld:
        return dict(times), roofs
    return {name: replace(time, least=least.get(name)) for name, time in times.items()}, roofs


def _time_stages(replica: Replica) -> dict[str, StageTime]:
    """Return the times by name of the stage, in order."""
    memory, training = replica.memory, replica.plan.training
    x, y = random_batch(replica.plan.network, replica.plan.batch_size)
    times = {}
    kernels: list[tuple[str, Callable[[], None]]] = [
        (stage.name, partial(kernel, replica.context))
        for stage, kernel in replica.stages
        if training or stage.phase is Phase.FORWARD
    ]
    if training:
        kernels.append(("update", partial(replica.update_kernel(), replica.context)))
    for index, (name, kernel) in enumerate(kernels):
        # Stages overwrite buffers, so the preceding stages run again before each measurement.
        replica.load(Batch.of(x, y), training=training)
        for _, before in kernels[:index]:
            before()
        laps = memory.times_ms(kernel)
        low, median, high = (float(value) for value in np.percentile(laps, [25, 50, 75]))
        times[name] = StageTime(median, low, high)
    return times


def _rows(plans: dict[str, Plan], times: dict[str, dict[str, StageTime]]) -> list[LayerTimes]:
    names = [node.name for node in next(iter(plans.values())).network.nodes]
    rows = []
    for members in _common_groups(plans.values()):
        for direction in (FORWARD, BACKWARD):
            row = _row(plans, times, names, members, direction)
            if row is not None:
                rows.append(row)
    for name in ("loss", "update"):
        if any(name not in found for found in times.values()):
            continue
        flops = max(s.flops for plan in plans.values() for s in plan.stages if s.name == name)
        rows.append(LayerTimes(name, OTHER, flops, {b: times[b][name] for b in plans}))
    return rows


def _common_groups(plans: Iterable[Plan]) -> list[set[int]]:
    """Return the smallest sets of layers that contain every group on every backend whole."""
    found: list[set[int]] = []
    for plan in plans:
        for group in plan.groups:
            members = {node.index for node in group.nodes}
            overlapping = [each for each in found if not each.isdisjoint(members)]
            found = [each for each in found if each.isdisjoint(members)]
            found.append(members.union(*overlapping))
    return sorted(found, key=max)


def _row(
    plans: dict[str, Plan],
    times: dict[str, dict[str, StageTime]],
    names: Sequence[str],
    members: set[int],
    direction: str,
) -> LayerTimes | None:
    """Return the row of some layers in one direction, or None if nothing is computed."""
    by_backend, flops = {}, 0
    for backend, plan in plans.items():
        groups = {group.name for group in plan.groups if group.head.index in members}
        stages = [
            stage
            for stage in plan.stages
            if stage.group in groups and (stage.phase in FORWARD_PHASES) == (direction == FORWARD)
        ]
        if stages:
            by_backend[backend] = _sum(times[backend][stage.name] for stage in stages)
            flops = max(flops, sum(stage.flops for stage in stages))
    if not by_backend:
        return None
    layers = join_names(names[i] for i in sorted(members))
    return LayerTimes(layers, direction, flops, by_backend)


def _sum(times: Iterable[StageTime]) -> StageTime:
    found = list(times)
    least = [t.least for t in found if t.least is not None]
    return StageTime(
        sum(t.median for t in found), sum(t.low for t in found), sum(t.high for t in found),
        sum(least) if len(least) == len(found) else None,
    )  # fmt: skip


def layers_table(timed: TimedLayers, title: str) -> Table:
    """Return the table of times in µs (± half the interquartile range), rates and ratios.

    Times of which the limits of the machine require less than a third are marked.
    """
    rows = timed.rows
    backends = list(rows[0].by_backend) if rows else []
    first, others = backends[:1], backends[1:]
    columns = [
        "layers",
        "",
        *(f"{name}\nµs" for name in backends),
        *(f"{name}\nGFLOP/s" for name in first),
        *(f"{first[0]} / {name}" for name in others),
    ]
    cells: list[list[str]] = [[row.layers, row.direction, *_cells(row, backends)] for row in rows]
    total = {b: sum(r.by_backend[b].median for r in rows if b in r.by_backend) for b in backends}
    ratios = [f"{total[first[0]] / total[name]:.2f}" for name in others]
    sums = (f"{1e3 * time:.1f}" for time in total.values())
    cells += [[], ["sum of all", "", *sums, "", *ratios]]
    return Table.of_rows(title, columns, cells, text=("layers", ""), note=_note(timed))


def _note(timed: TimedLayers) -> str:
    """Return the meaning of the marks, or why there are none."""
    times = [time for row in timed.rows for time in row.by_backend.values()]
    found = [
        f"No time on {name} is compared with the roofline, because {roofs.withheld}."
        for name, roofs in timed.roofs.items()
        if roofs.withheld
    ]
    if any(is_low(time.roofline_share) for time in times):
        found.insert(0, LOW_NOTE)
    return " ".join(found)


def _spread(time: StageTime) -> float:
    """Return half the interquartile range relative to the median."""
    return (time.high - time.low) / 2 / time.median


def _cells(row: LayerTimes, backends: Sequence[str]) -> list[str]:
    times = [row.by_backend.get(name) for name in backends]
    cells = [
        "" if t is None
        else f"{1e3 * t.median:.2f} ±{_spread(t):.0%}{LOW_MARK * is_low(t.roofline_share)}"
        for t in times
    ]  # fmt: skip
    first = times[0]
    cells.append(f"{row.flops / first.median / 1e6:,.1f}" if first and row.flops else "")
    for other in times[1:]:
        cells.append(f"{first.median / other.median:.2f}" if first and other else "")
    return cells
