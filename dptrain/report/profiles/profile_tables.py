"""The tables of one profile: stages, kinds of stages, ranks, all-reduces, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dptrain.measure.profile.loss_tables import FACTOR_NAMES
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import (
    Parts,
    Profile,
    Spread,
    StageProfile,
    StatisticsTime,
    StepParts,
)
from dptrain.measure.profile.profile_tables import LOST_IF
from dptrain.measure.profile.tables import NOT_MEASURED
from dptrain.measure.statistics import Estimate
from dptrain.report.elements.canvas import PARTS, part_name
from dptrain.report.elements.numbers import decimals_for, fixed, percent
from dptrain.report.elements.tables import Column, Records, Table, texts
from dptrain.runs.names import SUMMARY


def profile_tables(profile: Profile, file: str, suffix: str = "") -> list[Table]:
    """Return all tables of a profile.

    Args:
        profile: the profile.
        file: path of its file, relative to the page.
        suffix: suffix of the names of the tables.
    """
    several = len(profile.ranks) > 1
    tables = [
        parts_table(f"step-parts{suffix}", file, profile.step_ms, profile.step_parts),
        stages_table(f"stages{suffix}", "Stages", file, profile.stages, "stages", several=several),
        stages_table(
            f"kinds{suffix}", "Stages by kind", file, profile.kinds, "kinds", several=several
        ),
        _ranks(f"ranks{suffix}", file, profile),
    ]
    if profile.pop is not None:
        tables += efficiency_tables(suffix, file, profile.pop)
    if profile.sums:
        tables.append(_sums(f"sums{suffix}", file, profile))
    if profile.batch_statistics is not None:
        tables.append(_statistics(f"batch-statistics{suffix}", file, profile.batch_statistics))
    tables.append(memory_table(f"memory{suffix}", file, profile.memory))
    return tables


def parts_table(name: str, file: str, step: Spread, parts: StepParts) -> Table:
    """Return the distribution of each part of a step, and its mean in typical and in all steps.

    Args:
        name, file: as in `Table`.
        step: durations of the steps; the path of the record is ``step_ms``.
        parts: the parts; the path of the record is ``step_parts``.
    """
    whole = parts.all_steps.total
    shown = [part for part in PARTS if parts.all_steps.known.get(part, 0.0) >= 5e-5 * whole]
    medians = Records(
        [*(parts.median[part] for part in shown), step],
        [*(f"step_parts.median.{part}" for part in shown), "step_ms"],
    )
    decimals = decimals_for([s.median for s in medians.items], digits=4)
    typical = Records([parts.typical], ["step_parts.typical"])
    everything = Records([parts.all_steps], ["step_parts.all_steps"])
    means, typical_means = (
        [of.values("", "ms", part, decimals=decimals).cells[0] for part in shown]
        for of in (everything, typical)
    )
    total = fixed(parts.typical.total, decimals)
    columns = (
        texts("part", [*(part_name(part) for part in shown), "step"], kind="prose"),
        Column("mean", "ms", (*means, (fixed(parts.all_steps.total, decimals),)), "computed"),
        _shares("share", parts.all_steps, shown),
        Column("typical steps", "ms", (*typical_means, (total,)), "computed"),
        Records(medians.found("estimate"), medians.at).estimates(
            "median", "ms", "", centre="median", decimals=decimals, shown=_unless_zero
        ),
        medians.values("p95", "ms", "p95", decimals=decimals),
        medians.values("p99", "ms", "p99", decimals=decimals),
    )
    note = (
        "Mean, share: of all steps, slow ones included. Typical steps: the half of the steps "
        "closest to the median. Means add up, medians do not; a part of fewer than half of the "
        "steps has none."
    )
    if parts.all_steps.without_core is None:
        note += f" {NOT_MEASURED}"
    return Table(name, "Parts of a step", file, columns, note)


def _unless_zero(median: Estimate) -> Estimate | None:
    return median if median.value > 0 else None


def _shares(head: str, parts: Parts, shown: Sequence[str]) -> Column:
    """Return a column of the shares of the parts."""
    cells = [(percent(parts.known[part] / parts.total),) for part in shown]
    return Column(head, "share", (*cells, ("100.0%",)), "computed")


def stages_table(
    name: str, title: str, file: str, stages: Sequence[StageProfile], where: str, *, several: bool
) -> Table:
    """Return the times, rates and memory of stages or of kinds of stages.

    Args:
        name, title, file: as in `Table`.
        stages: the records.
        where: path of their list in the file, ``stages`` or ``kinds``.
        several: whether there are several ranks, so that one is the slowest.
    """
    records = Records.of(stages, where)
    columns = [
        records.texts("stage" if where == "stages" else "kind", "name", kind="prose"),
        records.spreads("median", "ms (quartiles)", "time_ms"),
        records.values("typical", "ms", "typical_ms"),
        records.values("share", "%", "share"),
        records.values("cumulative", "%", "cumulative_share"),
        records.values("rate", "GFLOP/s", "gflops", decimals=1),
        records.values("bandwidth", "GB/s", "gb_per_s", decimals=1),
        records.values("roofline", "% of limit", "roofline_share", decimals=0),
        records.values("memory", "MB", "memory_bytes"),
    ]
    if all(stage.roofline_share is None for stage in stages):
        columns = [column for column in columns if column.head != "roofline"]
    if several:
        columns[3:3] = (
            records.values("slowest rank", "ms", "slowest_ms"),
            records.counts("slowest rank", "slowest_rank", "number"),
        )
    if any(stage.calls > 1 for stage in stages):
        columns.append(records.counts("calls", "calls"))
    if where == "stages" and any(stage.note for stage in stages):
        columns.append(records.texts("algorithm", "note", kind="prose"))
    note = (
        "Typical: mean of the half of the steps around the median step; shares and rates are of "
        "these."
    )
    # The plot of the layers has the times; a page about a single profile shows the stages too.
    folded = name != "stages" or file == SUMMARY
    return Table(name, title, file, tuple(columns), note, folded=folded)


def _ranks(name: str, file: str, profile: Profile) -> Table:
    ranks = Records.of(profile.ranks, "ranks")
    times = {
        "step": "step_ms",
        "busy": "busy_ms",
        "computation": "compute_ms",
        "waiting for data": "data_wait_ms",
        "communication and waiting": "exposed_ms",
        "waiting": "imbalance_ms",
        "delay": "delay_ms",
    }
    columns = [
        ranks.counts("rank", "rank"),
        ranks.texts("host", "host"),
        ranks.texts("device", "device"),
        ranks.values("samples", "", "samples"),
        *ranks.times(times),
    ]
    note = (
        "Means of typical steps. Busy: step without communication and waiting. Delay: busy time "
        "minus that of the median rank."
    )
    return Table(name, "Ranks", file, tuple(columns), note)


def efficiency_tables(suffix: str, file: str, pop: Pop) -> list[Table]:
    """Return the factors of the parallel efficiency, the busy shares of ranks, and the balance of
    layers.
    """
    factors = Records([getattr(pop, name) for name in LOST_IF], [f"pop.{name}" for name in LOST_IF])
    factor_columns = (
        texts("efficiency", [FACTOR_NAMES[name] for name in LOST_IF], kind="prose"),
        factors.estimates("value", "%", ""),
        texts("is less than 100% if", list(LOST_IF.values()), kind="prose"),
    )
    ranks = Records.of(pop.ranks, "pop.ranks")
    rank_columns = (
        texts("rank", range(len(pop.ranks))),
        ranks.estimates("busy", "% of wall time", ""),
    )
    layers = Records.of(pop.layers, "pop.layers")
    layer_columns = (
        layers.texts("layers", "name", kind="prose"),
        layers.estimates("load balance", "%", "load_balance"),
        layers.estimates("serialisation", "%", "serialisation"),
    )
    return [
        Table(
            f"pop-step{suffix}",
            "Parallel efficiency (POP)",
            file,
            factor_columns,
            "Busy: time of a step without communication and waiting.",
        ),
        Table(f"pop-ranks{suffix}", "Busy share of ranks", file, rank_columns),
        Table(f"pop-layers{suffix}", "Balance of the ranks by layers", file, layer_columns),
    ]


def _sums(name: str, file: str, profile: Profile) -> Table:
    sums = Records.of(profile.sums, "sums")
    columns = (
        sums.values("bucket", "MB", "bucket_bytes"),
        sums.counts("buckets", "buckets"),
        sums.spreads("one all-reduce", "ms (median, quartiles)", "time_ms"),
    )
    note = "Timed after the steps, without computation; all ranks start together."
    return Table(name, "Gradient all-reduce alone", file, columns, note)


def _statistics(name: str, file: str, found: StatisticsTime) -> Table:
    record = Records([found], ["batch_statistics"])
    columns = (
        record.counts("sums of a step", "number"),
        record.spreads("all of a step", "ms (median, quartiles)", "time_ms"),
        record.values("share of a step", "%", "share"),
        record.values("largest", "KB", "largest_bytes"),
        record.spreads("largest alone", "ms (median, quartiles)", "alone_ms"),
    )
    note = "Communication and waiting in the steps, means over ranks; alone: all start together."
    if found.separate_kernels:
        note += " In steps without timing, these sums take less time."
    return Table(name, "Sums of batch statistics", file, columns, note)


def memory_table(name: str, file: str, memory: Mapping[str, int]) -> Table:
    """Return the bytes of a rank by purpose; `memory` is the record of that name in the file."""
    sizes = Records(list(memory.values()), [f"memory.{key}" for key in memory])
    purposes = texts("purpose", [key.replace("_", " ") for key in memory])
    columns = (purposes, sizes.values("bytes", "MB", ""))
    return Table(name, "Memory of a rank", file, columns)
