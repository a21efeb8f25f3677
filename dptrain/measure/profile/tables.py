"""Tables for terminals, and the table at the end of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dptrain.measure.profile.profile import Spread, StageProfile, StepParts
from dptrain.plan.lowering import Phase
from dptrain.tables import Table

PART_NAMES = {
    "compute": "computation",
    "transfer": "communication",
    "imbalance": "waiting",
    "without_core": "without a core",
    "data_wait": "waiting for data",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "other",
}
"""Names of the fields of `Parts` in tables."""


UNKNOWN = "unknown"
"""Cell of what was not measured; it is not 0."""
NOT_MEASURED = (
    "Without a core: run delays are measured in steps on a CPU and on Linux; here the other parts "
    "contain them."
)


def parts_table(step: Spread, parts: StepParts, *, ranks: int, what: str = "A step") -> Table:
    """Return a table of the parts of a step.

    Args:
        step: duration of the steps in ms.
        parts: where their time goes.
        ranks: number of ranks; a single one neither communicates nor waits.
        what: name of a step in the title, such as ``A forward pass``.
    """
    noun = what.rsplit(maxsplit=1)[-1]
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    columns = ("part", "mean ms", "share", "typical ms", "median ms", "95% interval")
    typical, everything = parts.typical, parts.all_steps
    rows: list[Sequence[str]] = []
    for key, name in PART_NAMES.items():
        mean, mean_of_all = getattr(typical, key), getattr(everything, key)
        if key in ("transfer", "imbalance") and ranks == 1:
            continue
        if key in ("checkpoint", "evaluation") and not mean_of_all:
            continue
        if mean_of_all is None:
            rows.append((name, UNKNOWN, "", "", "", ""))
            continue
        median = parts.median.get(key)
        # A part of fewer than half of the steps has a median of 0, whatever it costs.
        is_shown = median is not None and median.median > 0
        cells = (ms_cell(median.median), interval_cell(median)) if median and is_shown else ("", "")
        share = share_cell(mean_of_all, everything.total)
        rows.append((name, ms_cell(mean_of_all), share, ms_cell(mean), *cells))
        if key == "imbalance" and mean_of_all:
            rows += _waiting_rows(parts)
    medians = ms_cell(step.median), interval_cell(step)
    rows += [(), (noun, ms_cell(everything.total), "100.0%", ms_cell(typical.total), *medians)]
    tail = "" if step.p95 is None else f", p95 {ms_cell(step.p95)}"
    tail += "" if step.p99 is None else f", p99 {ms_cell(step.p99)}"
    title = (
        f"{what}: {ms_cell(step.mean)} ms, median {noun} {ms_cell(step.median)}{tail}, "
        f"n = {step.n:,}"
    )
    return Table(
        title,
        columns,
        ("part",),
        rows=rows,
        caption=f"{what} is the wall time divided by the {plural}. Mean, share: of all {plural}, "
        f"slow ones included. Typical: means over the half of the {plural} whose duration is "
        "closest to the median. Medians, with their intervals, do not add up; a part of fewer than "
        f"half of the {plural} has none."
        + ("" if everything.without_core is not None else f" {NOT_MEASURED}"),
    )


def _waiting_rows(parts: StepParts) -> Iterator[Sequence[str]]:
    everything = parts.all_steps
    for name in ("load_imbalance", "serialisation"):
        ms = getattr(parts, name) * everything.imbalance
        label = f"  {name.replace('_', ' ')}"
        yield label, ms_cell(ms), share_cell(ms, everything.total), "", "", ""


MAX_LAYER_ROWS = 24
"""Rows of the table of layers at the end of training; `dptrain profile` lists all groups."""


def layers_table(stages: Sequence[StageProfile], *, ranks: int, steps: str) -> Table:
    """Return the table of the layers at the end of training, a row for each group of stages.

    If there are more than `MAX_LAYER_ROWS` groups, the fastest are summed in one row.

    Args:
        stages: stages in the order of the plan.
        ranks: number of ranks.
        steps: description of the steps in the means.
    """
    groups: dict[str, list[StageProfile]] = {}
    for stage in stages:
        groups.setdefault(stage.group, []).append(stage)
    groups = _with_others(groups)
    columns = ["layers", "forward ms", "backward ms", "slowest rank ms", "share", "GFLOP/s", "MB"]
    if ranks == 1:
        columns.remove("slowest rank ms")
    rows: list[Sequence[str]] = []
    for name, found in groups.items():
        forward, backward = direction_cells(found)
        cells = {
            "layers": name,
            "forward ms": forward,
            "backward ms": backward,
            "slowest rank ms": slowest_cell(found),
            "share": f"{sum(stage.share for stage in found):.1%}",
            "GFLOP/s": rate_cell(sum(stage.flops for stage in found), typical_ms(found)),
            "MB": f"{sum(stage.bytes_moved for stage in found) / 1e6:.2f}",
        }
        rows.append([cells[column] for column in columns])
    return Table(f"Computation by layer (mean of {steps})", columns, ("layers",), rows=rows)


def _with_others(groups: dict[str, list[StageProfile]]) -> dict[str, list[StageProfile]]:
    """Return the slowest groups in their order, and the stages of all others as a last group."""
    num_others = len(groups) - MAX_LAYER_ROWS + 1
    if num_others < 2:
        return groups
    others = sorted(groups, key=lambda name: typical_ms(groups[name]))[:num_others]
    shown = {name: stages for name, stages in groups.items() if name not in others}
    return {**shown, f"{num_others} others": [s for name in others for s in groups[name]]}


def notes_table(stages: Sequence[StageProfile]) -> Table | None:
    """Return the algorithm of every stage for which the backend states one, or None."""
    noted = [stage for stage in stages if stage.note]
    if not noted:
        return None
    rows = [(stage.name, stage.note, ms_cell(stage.typical_ms)) for stage in noted]
    columns = ("stage", "algorithm", "ms")
    return Table("Algorithms of the stages", columns, columns[:2], rows=rows)


def ms_cell(value: float) -> str:
    """Return milliseconds without the unit."""
    return f"{value:.3f}"


def count_cell(value: float | None, text: Callable[[float], str]) -> str:
    """Return a value that may not have been measured."""
    return UNKNOWN if value is None else text(value)


def interval_cell(found: Spread) -> str:
    """Return the 95% interval of a median in ms; empty if there is none."""
    if found.low is None or found.high is None:
        return ""
    return f"{ms_cell(found.low)} – {ms_cell(found.high)}"


def share_cell(part: float, whole: float) -> str:
    """Return a part of a whole in percent."""
    return f"{part / whole:.1%}" if whole else ""


def typical_ms(stages: Sequence[StageProfile]) -> float:
    """Return the sum of the times of stages in typical steps in ms."""
    return sum(stage.typical_ms for stage in stages)


def direction_cells(stages: Sequence[StageProfile]) -> tuple[str, str]:
    """Return the times in ms of the stages that are not backward, and of those that are."""
    backward = [stage for stage in stages if stage.phase.startswith(Phase.BACKWARD.value)]
    forward = [stage for stage in stages if stage not in backward]
    return (
        ms_cell(typical_ms(forward)) if forward else "",
        ms_cell(typical_ms(backward)) if backward else "",
    )


def slowest_cell(stages: Sequence[StageProfile]) -> str:
    """Return the time in ms of the slowest rank of each stage, and these ranks."""
    ranks = sorted({stage.slowest_rank for stage in stages})
    return f"{ms_cell(sum(s.slowest_ms for s in stages))} (rank {','.join(map(str, ranks[:3]))})"


def rate_cell(work: float, ms: float) -> str:
    """Return a rate in 10⁹ per second."""
    return f"{work / ms / 1e6:,.1f}" if work and ms else ""
