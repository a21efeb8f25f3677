"""The algorithm of each stage of a plan, as `dptrain layers --explain` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.backends import load_backend
from dptrain.plan.lowering import Explanation, Phase
from dptrain.plan.plan import Plan
from dptrain.tables import Table

UNKNOWN = Explanation("unknown", reason="the backend selects the kernel on the device")
"""Explanation of a stage whose kernel the backend selects on the device."""

PHASES = {
    Phase.STATISTICS: "statistics",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.BACKWARD_STATISTICS: "backward statistics",
    Phase.BACKWARD_WEIGHT: "weight",
    Phase.BACKWARD_INPUT: "input",
}


@dataclass(frozen=True)
class StageExplanation:
    """How one stage of a plan is computed.

    Attributes:
        backend, layers, phase: the stage.
        batch_size, threads: the samples and threads for which it is planned.
        algorithm, tile, units, reason, others: see `dptrain.plan.lowering.Explanation`.
    """

    backend: str
    layers: str
    phase: str
    batch_size: int
    threads: int
    algorithm: str
    tile: str
    units: str
    reason: str
    others: tuple[tuple[str, float | None], ...]


def explain_stages(plan: Plan) -> list[StageExplanation]:
    """Return the algorithm of each stage that computes layers, layer by layer."""
    backend, setting = load_backend(plan.backend), plan.setting
    groups = {group.name: backend.explain(group, setting.of(group)) for group in plan.groups}
    order = {name: index for index, name in enumerate(groups)}
    stages = [s for s in plan.stages if s.group in groups and s.phase in PHASES]
    rows = []
    for stage in sorted(stages, key=lambda stage: (order[stage.group], stage.index)):
        found = groups[stage.group].get(stage.phase, UNKNOWN)
        rows.append(
            StageExplanation(
                plan.backend,
                stage.group,
                stage.phase.value,
                setting.batch_size,
                setting.threads,
                found.algorithm,
                found.tile,
                found.units,
                found.reason,
                found.others,
            )
        )
    return rows


def algorithms(plan: Plan) -> dict[str, str]:
    """Return the algorithm of each stage that computes layers, by the name of the stage."""
    backend, setting = load_backend(plan.backend), plan.setting
    groups = {group.name: backend.explain(group, setting.of(group)) for group in plan.groups}
    return {
        stage.name: groups[stage.group][stage.phase].algorithm
        for stage in plan.stages
        if stage.phase in groups.get(stage.group, {})
    }


def saves_operations(algorithm: str) -> bool:
    """Return whether an algorithm needs fewer operations than the direct one.

    Example:
        >>> saves_operations("Winograd F(4×4, 3×3)"), saves_operations("implicit GEMM")
        (True, False)
    """
    return "winograd" in algorithm.lower()


def explanation_table(plan: Plan, rows: Sequence[StageExplanation]) -> Table:
    """Return a table with a row for each stage."""
    setting = plan.setting
    title = (
        f"{plan.network.name} on {plan.backend}, {setting.precision}, "
        f"batch {setting.batch_size}, {setting.threads} thread{'' if setting.threads == 1 else 's'}"
    )
    columns = ("layers", "stage", "algorithm", "tile", "units", "reason", "others, estimated time")
    cells, before = [], ""
    for row in rows:
        name, before = "" if row.layers == before else row.layers, row.layers
        phase = PHASES[Phase(row.phase)]
        others = ", ".join(
            other if time is None else f"{other} {time:.2f}×" for other, time in row.others
        )
        cells.append((name, phase, row.algorithm, row.tile, row.units, row.reason, others))
    return Table.of_rows(title, columns, cells, text=columns)
