"""The tables of one profile: stages, kinds of stages, ranks, all-reduces, memory."""

from __future__ import annotations

import math
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
from dptrain.measure.statistics import Estimate
from dptrain.report.elements.canvas import PARTS, part_name
from dptrain.report.elements.numbers import decimals_for, fixed, percent
from dptrain.report.elements.tables import (
    Cell,
    Column,
    Number,
    Table,
    counts,
    estimates,
    spreads,
    texts,
    times,
    values,
)
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
    shown = [part for part in PARTS if getattr(parts.all_steps, part) >= 5e-5 * whole]
    medians = [parts.median[part] for part in shown] + [step]
    at = [f"step_parts.median.{part}" for part in shown] + ["step_ms"]
    decimals = decimals_for([s.median for s in medians], digits=4)

    def percentiles(head: str, field: str) -> Column:
        found = [getattr(spread, field) for spread in medians]
        return values(head, "ms", found, [f"{a}.{field}" for a in at], decimals=decimals)

    typical = parts.typical
    means: list[Cell] = [
        (
            Number(
                fixed(getattr(typical, part), decimals),
                getattr(typical, part),
                f"step_parts.typical.{part}",
            ),
        )
        for part in shown
    ]
    columns = (
        texts("part", [*(part_name(part) for part in shown), "step"], kind="prose"),
        estimates(
            "median",
            "ms",
            [_estimate(spread) for spread in medians],
            at,
            centre="median",
            decimals=decimals,
        ),
        percentiles("p95", "p95"),
        percentiles("p99", "p99"),
        Column("typical steps", "ms", (*means, (fixed(typical.total, decimals),)), "computed"),
        _shares("typical steps", typical, shown),
        _shares("all steps", parts.all_steps, shown),
    )
    note = (
        "Medians of parts do not add up to the median step; means of typical steps, the half of "
        "the steps closest to the median, do. All steps include slow ones."
    )
    return Table(name, "Parts of a step", file, columns, note)


def _estimate(found: Spread) -> Estimate:
    low = -math.inf if found.low is None else found.low
    high = math.inf if found.high is None else found.high
    return Estimate(found.median, low, high, found.n)


def _shares(head: str, parts: Parts, shown: Sequence[str]) -> Column:
    """Return a column of the shares of the parts."""
    cells = [(percent(getattr(parts, part) / parts.total),) for part in shown]
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
    at = [f"{where}.{i}" for i in range(len(stages))]

    def column(head: str, unit: str, field: str, **options: float) -> Column:
        found = [getattr(stage, field) for stage in stages]
        decimals = int(options["decimals"]) if "decimals" in options else None
        return values(
            head,
            unit,
            found,
            [f"{a}.{field}" for a in at],
            decimals=decimals,
            scale=options.get("scale", 1.0),
        )

    columns = [
        texts("stage" if where == "stages" else "kind", [s.name for s in stages], kind="prose"),
        spreads(
            "median", "ms (quartiles)", [s.time_ms for s in stages], [f"{a}.time_ms" for a in at]
        ),
        column("typical", "ms", "typical_ms"),
        column("share", "%", "share", decimals=1, scale=100),
        column("cumulative", "%", "cumulative_share", decimals=1, scale=100),
        column("rate", "GFLOP/s", "gflops", decimals=1),
        column("bandwidth", "GB/s", "gb_per_s", decimals=1),
        column("roofline", "% of limit", "roofline_share", decimals=0, scale=100),
        column("memory", "MB", "memory_bytes", scale=1e-6),
    ]
    if all(stage.roofline_share is None for stage in stages):
        columns = [column for column in columns if column.head != "roofline"]
    if several:
        numbers = [s.slowest_rank for s in stages], [f"{a}.slowest_rank" for a in at]
        columns[3:3] = (
            column("slowest rank", "ms", "slowest_ms"),
            counts("slowest rank", *numbers, "number"),
        )
    if any(stage.calls > 1 for stage in stages):
        columns.append(counts("calls", [s.calls for s in stages], [f"{a}.calls" for a in at]))
    if where == "stages" and any(stage.note for stage in stages):
        columns.append(texts("algorithm", [stage.note for stage in stages], kind="prose"))
    note = (
        "Typical: mean of the half of the steps around the median step; shares and rates are of "
        "these."
    )
    # The plot of the layers has the times; a page about a single profile shows the stages too.
    folded = name != "stages" or file == SUMMARY
    return Table(name, title, file, tuple(columns), note, folded=folded)


def _ranks(name: str, file: str, profile: Profile) -> Table:
    ranks = profile.ranks
    at = [f"ranks.{i}" for i in range(len(ranks))]
    fields = {
        "step": "step_ms",
        "busy": "busy_ms",
        "computation": "compute_ms",
        "waiting for data": "data_wait_ms",
        "communication and waiting": "exposed_ms",
        "waiting": "imbalance_ms",
        "delay": "delay_ms",
    }
    columns = [
        counts("rank", [r.rank for r in ranks], [f"{a}.rank" for a in at]),
        texts("host", [r.host for r in ranks]),
        texts("device", [r.device for r in ranks]),
        values("samples", "", [r.samples for r in ranks], [f"{a}.samples" for a in at]),
        *times(fields, ranks, at),
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
    names = list(LOST_IF)
    factors = (
        texts("efficiency", [FACTOR_NAMES[name] for name in names], kind="prose"),
        estimates(
            "value",
            "%",
            [getattr(pop, name) for name in names],
            [f"pop.{name}" for name in names],
            decimals=1,
            scale=100,
        ),
        texts("is less than 100% if", list(LOST_IF.values()), kind="prose"),
    )
    numbers = range(len(pop.ranks))
    ranks = (
        texts("rank", list(numbers)),
        estimates(
            "busy",
            "% of wall time",
            pop.ranks,
            [f"pop.ranks.{i}" for i in numbers],
            decimals=1,
            scale=100,
        ),
    )
    at = [f"pop.layers.{i}" for i in range(len(pop.layers))]
    layers = (
        texts("layers", [layer.name for layer in pop.layers], kind="prose"),
        estimates("load balance", "%", [layer.load_balance for layer in pop.layers],
                  [f"{a}.load_balance" for a in at], decimals=1, scale=100),
        estimates("serialisation", "%", [layer.serialisation for layer in pop.layers],
                  [f"{a}.serialisation" for a in at], decimals=1, scale=100),
    )  # fmt: skip
    return [
        Table(
            f"pop{suffix}",
            "Parallel efficiency (POP)",
            file,
            factors,
            "Busy: time of a step without communication and waiting.",
        ),
        Table(f"pop-ranks{suffix}", "Busy share of ranks", file, ranks),
        Table(f"pop-layers{suffix}", "Balance of the ranks by layers", file, layers),
    ]


def _sums(name: str, file: str, profile: Profile) -> Table:
    sums = profile.sums
    at = [f"sums.{i}" for i in range(len(sums))]
    columns = (
        values("bucket", "MB", [s.bucket_bytes for s in sums], [f"{a}.bucket_bytes" for a in at],
               scale=1e-6),
        counts("buckets", [s.buckets for s in sums], [f"{a}.buckets" for a in at]),
        spreads("one all-reduce", "ms (median, quartiles)", [s.time_ms for s in sums],
                [f"{a}.time_ms" for a in at]),
    )  # fmt: skip
    note = "Timed after the steps, without computation; all ranks start together."
    return Table(name, "Gradient all-reduce alone", file, columns, note)


def _statistics(name: str, file: str, found: StatisticsTime) -> Table:
    at = "batch_statistics"
    columns = (
        counts("sums of a step", [found.number], [f"{at}.number"]),
        spreads("all of a step", "ms (median, quartiles)", [found.time_ms], [f"{at}.time_ms"]),
        values("share of a step", "%", [found.share], [f"{at}.share"], decimals=1, scale=100),
        values("largest", "KB", [found.largest_bytes], [f"{at}.largest_bytes"], scale=1e-3),
        spreads("largest alone", "ms (median, quartiles)", [found.alone_ms], [f"{at}.alone_ms"]),
    )
    note = "Communication and waiting in the steps, means over ranks; alone: all start together."
    if found.separate_kernels:
        note += " In steps without timing, these sums take less time."
    return Table(name, "Sums of batch statistics", file, columns, note)


def memory_table(name: str, file: str, memory: Mapping[str, int]) -> Table:
    """Return the bytes of a rank by purpose; `memory` is the record of that name in the file."""
    names = list(memory)
    found = [memory[key] for key in names]
    cells = values("bytes", "MB", found, [f"memory.{key}" for key in names], scale=1e-6)
    assert all(isinstance(cell[0], Number) for cell in cells.cells)
    columns = (texts("purpose", [key.replace("_", " ") for key in names]), cells)
    return Table(name, "Memory of a rank", file, columns)
