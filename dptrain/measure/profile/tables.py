"""The tables of profiles, which the terminal, the report and papers show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dptrain.measure.profile.explanations import saves_operations
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import (
    Profile,
    Spread,
    StageProfile,
    StatisticsTime,
    StepParts,
)
from dptrain.measure.profile.rooflines import is_low
from dptrain.measure.statistics import Estimate
from dptrain.numbers import decimals_for
from dptrain.plan.lowering import Phase
from dptrain.tables import UNKNOWN, Cell, Column, Records, Table, computed, texts
from dptrain.vocabulary import find_term, label_of

STEP_PARTS = (
    "compute", "transfer", "imbalance", "without_core", "data_wait", "checkpoint", "evaluation",
    "other",
)  # fmt: skip
"""Names of the parts of a step in the order of the table."""
OF_SEVERAL = ("transfer", "imbalance")
"""Parts of the steps of several ranks, which those of a single one need not have."""
BREAKS = ("checkpoint", "evaluation")
"""Parts that a step need not have."""
NOT_MEASURED = (
    "Without a core: run delays are measured in steps on a CPU and on Linux; here the other parts "
    "contain them."
)
SAVED = " *"
"""Mark of stages whose algorithm needs fewer operations than the direct one."""
SAVED_NOTE = (
    "* GFLOP/s count the operations of the direct algorithm, the roofline those that Winograd's "
    "algorithm needs at least."
)
LOW_MARK = " !"
"""Mark of stages that take more than three times as long as the measured limits require."""
LOW_NOTE = (
    "! marks times of more than three times the roofline, the least time by the measured limits of "
    "the machine."
)
LOST_IF = {
    "parallel": "any of the following is",
    "load_balance": "the same ranks are slower in every step",
    "serialisation": "other ranks are late in each step",
    "transfer": "communication takes long, or ranks lack cores in it",
}
"""When a factor of `Pop` is less than 1."""
MAX_LAYER_ROWS = 24
"""Rows of the table of layers at the end of training; `dptrain profile` lists all groups."""


def parts_table(
    step: Spread,
    parts: StepParts,
    *,
    several: bool,
    noun: str = "step",
    name: str = "",
    file: str = "",
) -> Table:
    """Return the mean of each part in all and in typical steps, and its distribution.

    Args:
        step: durations of the steps; the path of the record is ``step_ms``.
        parts: the parts; the path of the record is ``step_parts``.
        several: whether there are several ranks.
        noun: name of a step, such as ``forward pass``.
        name, file: as in `dptrain.tables.Table`.
    """
    everything = parts.all_steps
    optional = BREAKS if several else (*BREAKS, *OF_SEVERAL)
    shown = [part for part in STEP_PARTS if part not in optional or getattr(everything, part)]
    # (name, mean of all steps, path below the means, median of all steps)
    rows: list[tuple[str, float | None, str, Spread | None]] = []
    for part in shown:
        rows.append((label_of(part), getattr(everything, part), part, parts.median.get(part)))
        if part == "imbalance" and everything.imbalance:
            rows += [
                (f"of which {label_of(cause)}", getattr(parts, cause) * everything.imbalance, "",
                 None)
                for cause in ("load_imbalance", "serialisation")
            ]  # fmt: skip
    rows.append((noun, everything.total, "", step))
    columns = _parts_columns(rows, parts)
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    note = (
        f"Mean, share: of all {plural}, slow ones included. Typical: means over the half of the "
        f"{plural} whose duration is closest to the median. Means add up, medians do not; a part "
        f"of fewer than half of the {plural} has none."
    )
    if everything.without_core is None:
        note += f" {NOT_MEASURED}"
    table = Table(f"Parts of a {noun}", columns, note, name, file)
    return replace(table, rules=frozenset([len(rows) - 1]))


def _parts_columns(
    rows: Sequence[tuple[str, float | None, str, Spread | None]], parts: StepParts
) -> tuple[Column, ...]:
    whole = parts.all_steps.total
    decimals = decimals_for([median.median for *_, median in rows if median], digits=4)
    paths = [path for _, _, path, _ in rows]
    medians = Records(
        [median for *_, median in rows],
        [f"step_parts.median.{path}" if path else "step_ms" for path in paths],
    )

    def means(kind: str, values: Sequence[float | None]) -> Records:
        return Records(values, [f"step_parts.{kind}.{path}" if path else "" for path in paths])

    def percentiles(end: str) -> Column:
        found = [None if each is None else getattr(each, end) for each in medians.items]
        ends = Records(found, [f"{at}.{end}" for at in medians.at])
        return ends.values("", end, "ms", decimals=decimals)

    typical = [getattr(parts.typical, path) if path else None for path in paths]
    typical[-1] = parts.typical.total
    mean = means("all_steps", [ms for _, ms, _, _ in rows])
    shares = [None if ms is None else ms / whole if whole else 0.0 for _, ms, _, _ in rows]
    estimates = Records([_estimate(median) for *_, median in rows], medians.at)
    term = find_term("step_parts", "median")
    return (
        texts("part", [label for label, *_ in rows], kind="prose"),
        replace(mean.values("", "mean", "ms", decimals=decimals, missing=UNKNOWN),
                term=find_term("all_steps"), name="mean_ms"),
        computed("share", "%", shares, term=find_term("share")),
        replace(means("typical", typical).values("", "typical", "ms", decimals=decimals),
                term=find_term("typical"), name="typical_ms"),
        replace(estimates.estimates("", "median", "ms", centre="median", decimals=decimals),
                term=term, name="median_ms"),
        *(
            replace(percentiles(end), name=f"{end}_ms", is_detail=True)
            for end in ("p95", "p99")
            if getattr(rows[-1][-1], end) is not None
        ),
    )  # fmt: skip


def _estimate(median: Spread | None) -> Estimate | None:
    """Return the median; a part of fewer than half of the steps has 0, whatever it costs."""
    return median.estimate if median is not None and median.median > 0 else None


def layers_table(
    stages: Sequence[StageProfile],
    title: str,
    *,
    several: bool,
    most: int | None = None,
    balances: Mapping[str, Estimate] | None = None,
) -> Table:
    """Return a row for each group of stages: the times of its directions, its share and rate.

    Args:
        stages: stages in the order of the plan.
        title: heading.
        several: whether there are several ranks, so that one is the slowest.
        most: largest number of rows, in the order of the plan; the fastest groups are summed in the
            last one. None sorts all groups by their times, with cumulative shares.
        balances: load balance by group; None omits it.
    """
    by_group: dict[str, list[StageProfile]] = {}
    for stage in stages:
        by_group.setdefault(stage.group, []).append(stage)
    if most is None:
        order = sorted(by_group, key=lambda name: -typical_ms(by_group[name]))
        groups = {name: by_group[name] for name in order}
    else:
        groups = _with_others(by_group, most)
    found = list(groups.values())
    shares = [sum(stage.share for stage in group) for group in found]
    backward = [_direction(group, backward=True) for group in found]
    columns = [
        texts("layers", list(groups), kind="prose"),
        *_times({
            "forward": [_direction(group, backward=False) for group in found],
            **({"backward": backward} if any(backward) else {}),
        }),
        *(_slowest(found) if several else []),
    ]  # fmt: skip
    if most is None:
        columns.insert(
            -2 if several else len(columns),
            computed("±", "%", list(map(_half_quartiles, found)), decimals=0),
        )
    if balances:
        of_groups = [balances.get(name) for name in groups]
        values = [None if each is None else each.value for each in of_groups]
        columns.append(computed("balance", "%", values, term=find_term("load_balance"), missing=""))
    columns.append(computed("share", "%", shares, term=find_term("share")))
    if most is None:
        sums = [sum(shares[: i + 1]) for i in range(len(shares))]
        columns.append(computed("cumulative", "%", sums, term=find_term("cumulative_share")))
    columns += _rates(found, with_roofline=most is None)
    balance = "; balance: mean of the ranks / slowest rank" if balances else ""
    note = f"±: half of the interquartile range{balance}. {_notes_of(columns)}".strip()
    return Table(title, tuple(columns), note if most is None else "")


def _times(directions: Mapping[str, Sequence[float | None]]) -> list[Column]:
    known = [ms for times in directions.values() for ms in times if ms is not None]
    decimals = max(decimals_for(known), 3)
    return [
        computed(head, "ms", times, decimals=decimals, term=find_term(head), missing="")
        for head, times in directions.items()
    ]


def _slowest(groups: Sequence[Sequence[StageProfile]]) -> list[Column]:
    """Return the times of the slowest rank of each stage, and these ranks."""
    times = [sum(stage.slowest_ms for stage in group) for group in groups]
    ranks = [sorted({stage.slowest_rank for stage in group})[:3] for group in groups]
    return [
        computed("slowest rank", "ms", times, decimals=3, term=find_term("slowest_ms")),
        texts("number", [",".join(map(str, found)) for found in ranks]),
    ]


def _rates(groups: Sequence[Sequence[StageProfile]], *, with_roofline: bool) -> list[Column]:
    times = list(map(typical_ms, groups))
    work = [sum(stage.flops for stage in group) for group in groups]
    rates = [
        flops / ms / 1e6 if flops and ms else None for flops, ms in zip(work, times, strict=True)
    ]
    moved = [float(sum(stage.bytes_moved for stage in group)) for group in groups]
    columns = [
        computed("rate", "GFLOP/s", rates, decimals=1, term=find_term("gflops"), missing=""),
    ]
    if not with_roofline:
        columns.append(computed("data", "MB", moved, decimals=2, term=find_term("bytes_moved")))
    elif any(stage.roofline_share is not None for group in groups for stage in group):
        shares = [
            sum((stage.roofline_share or 0.0) * stage.typical_ms for stage in group) / ms
            if ms and any(stage.roofline_share is not None for stage in group)
            else None
            for group, ms in zip(groups, times, strict=True)
        ]
        column = computed(
            "roofline", "% of limit", shares, decimals=0, term=find_term("roofline_share")
        )
        columns.append(_marked(column, shares, groups))
    return columns


def _marked(
    column: Column, shares: Sequence[float | None], groups: Sequence[Sequence[StageProfile]]
) -> Column:
    """Return the column of shares with marks at those of algorithms that save operations, and at
    low ones.
    """
    cells: list[Cell] = []
    for cell, share, group in zip(column.cells, shares, groups, strict=True):
        saves = any(saves_operations(stage.note) for stage in group)
        marks = [SAVED] * saves + [LOW_MARK] * is_low(share)
        cells.append((*cell, *marks) if share is not None else cell)
    return replace(column, cells=tuple(cells))


def _notes_of(columns: Iterable[Column]) -> str:
    """Return the meaning of the marks in some columns."""
    shown = {part for column in columns for cell in column.cells for part in cell}
    notes = {SAVED: SAVED_NOTE, LOW_MARK: LOW_NOTE}
    return " ".join(note for mark, note in notes.items() if mark in shown)


def _with_others(groups: dict[str, list[StageProfile]], most: int) -> dict[str, list[StageProfile]]:
    """Return the slowest groups in their order, and the stages of all others as a last group."""
    num_others = len(groups) - most + 1
    if num_others < 2:
        return groups
    others = sorted(groups, key=lambda name: typical_ms(groups[name]))[:num_others]
    shown = {name: stages for name, stages in groups.items() if name not in others}
    return {**shown, f"{num_others} others": [s for name in others for s in groups[name]]}


def typical_ms(stages: Sequence[StageProfile]) -> float:
    """Return the sum of the times of stages in typical steps in ms."""
    return sum(stage.typical_ms for stage in stages)


def _direction(stages: Sequence[StageProfile], *, backward: bool) -> float | None:
    """Return the time in ms of the stages that are backward, or of the others; None without any."""
    start = Phase.BACKWARD.value
    found = [stage for stage in stages if stage.phase.startswith(start) == backward]
    return typical_ms(found) if found else None


def _half_quartiles(stages: Sequence[StageProfile]) -> float | None:
    """Return half the interquartile range relative to the time in typical steps."""
    half = sum(stage.time_ms.q3 - stage.time_ms.q1 for stage in stages) / 2
    mean = typical_ms(stages)
    return half / mean if mean else None


def stages_table(
    stages: Sequence[StageProfile], where: str, *, several: bool, name: str = "", file: str = ""
) -> Table:
    """Return the times, rates and memory of stages or of kinds of stages.

    Args:
        stages: the records.
        where: path of their list in the file, ``stages`` or ``kinds``.
        several: whether there are several ranks, so that one is the slowest.
        name, file: as in `dptrain.tables.Table`.
    """
    records, is_kinds = Records.of(stages, where), where == "kinds"
    columns = [
        records.texts("name", "kind" if is_kinds else "stage", kind="prose"),
        records.values("typical_ms"),
        records.spreads("time_ms"),
        records.values("share"),
        records.values("cumulative_share"),
        records.values("gflops", decimals=1),
        records.values("gb_per_s", decimals=1),
    ]
    if any(stage.roofline_share is not None for stage in stages):
        roofline = records.values("roofline_share", decimals=0)
        of_stages = [stage.roofline_share for stage in stages]
        columns.append(_marked(roofline, of_stages, [[stage] for stage in stages]))
    columns += [
        records.values("bytes_moved"),
        records.values("memory_bytes"),
    ]
    if several:
        slowest = records.values("slowest_ms"), records.counts("slowest_rank")
        columns += [replace(column, is_detail=True) for column in slowest]
    if is_kinds or any(stage.calls > 1 for stage in stages):
        columns.insert(1, records.counts("calls"))
    if not is_kinds and any(stage.note for stage in stages):
        columns.append(records.texts("note", kind="prose"))
    note = (
        "Typical: mean of the half of the steps around the median step; shares and rates are of "
        f"these. {_notes_of(columns)}"
    )
    title = "Kinds of operation, slowest first" if is_kinds else "Stages"
    return Table(title, tuple(columns), note.strip(), name, file)


def notes_table(stages: Sequence[StageProfile]) -> Table | None:
    """Return the algorithm of every stage for which the backend states one, or None."""
    noted = [stage for stage in stages if stage.note]
    if not noted:
        return None
    records = Records.of(noted, "stages")
    columns = (
        records.texts("name", "stage", kind="prose"),
        records.texts("note", kind="prose"),
        records.values("typical_ms", decimals=3),
    )
    return Table("Algorithms of the stages", columns)


def ranks_table(
    profile: Profile, *, most: int | None = None, name: str = "", file: str = ""
) -> Table:
    """Return the parts of the step of each rank.

    Args:
        profile: the profile.
        most: largest number of rows, the ranks with the largest delay first; None shows all ranks
            in their order.
        name, file: as in `dptrain.tables.Table`.
    """
    numbers = list(range(len(profile.ranks)))
    if most is not None:
        numbers = sorted(numbers, key=lambda rank: -profile.ranks[rank].delay_ms)[:most]
    ranks = Records([profile.ranks[i] for i in numbers], [f"ranks.{i}" for i in numbers])
    times = ranks.times(
        ("busy_ms", "delay_ms", "compute_ms", "data_wait_ms", "transfer_ms", "imbalance_ms",
         "without_core_ms"),
        missing=UNKNOWN,
    )  # fmt: skip
    columns = [
        ranks.counts("rank", is_key=True),
        ranks.texts("host"),
        replace(ranks.texts("device"), is_detail=True),
        ranks.values("samples"),
        *times,
        ranks.values("involuntary_switches", decimals=1, missing=UNKNOWN),
        ranks.values("page_faults", decimals=1, missing=UNKNOWN),
    ]
    if profile.pop is not None:
        columns.append(_busy_shares(profile.pop, numbers))
    left = len(profile.ranks) - len(numbers)
    note = (
        "Means of typical steps. Busy: step without communication and waiting. Delay: busy time "
        "minus that of the median rank. Switches, page faults: in all steps; a switch is "
        "involuntary if the system takes the core of a thread that computes."
    ) + (f" {left} ranks with smaller delays are not listed." if left else "")
    return Table("Ranks", tuple(columns), note, name, file)


def _busy_shares(pop: Pop, numbers: Sequence[int]) -> Column:
    shares = Records([pop.ranks[i] for i in numbers], [f"pop.ranks.{i}" for i in numbers])
    return replace(shares.estimates(), name="pop.ranks")


def busy_table(pop: Pop, *, name: str = "", file: str = "") -> Table:
    """Return the busy shares of the ranks, of a run that has no other results of ranks."""
    numbers = range(len(pop.ranks))
    columns = (texts("rank", numbers), _busy_shares(pop, numbers))
    return Table("Busy share of ranks", columns, "", name, file)


def pop_table(pop: Pop, *, name: str = "", file: str = "") -> Table:
    """Return the parallel efficiency and its factors."""
    factors = Records([getattr(pop, each) for each in LOST_IF], [f"pop.{each}" for each in LOST_IF])
    values = replace(factors.estimates("", "value", "%"), term=find_term("pop"), name="efficiency")
    columns = (
        texts("efficiency", [label_of("pop", each) for each in LOST_IF], kind="prose"),
        values,
        texts("is less than 100% if", list(LOST_IF.values()), kind="prose"),
    )
    note = "Busy: time of a step without communication and waiting."
    if not pop.serialisation.high < float("inf"):
        note = "Too few independent steps for all intervals; use more --steps."
    table = Table("Parallel efficiency (POP)", columns, note, name, file)
    return replace(table, rules=frozenset([1]))


def balance_table(pop: Pop, *, name: str = "", file: str = "") -> Table:
    """Return the balance of the ranks by layers."""
    layers = Records.of(pop.layers, "pop.layers")
    columns = (
        layers.texts("name", "layers", kind="prose"),
        layers.estimates("load_balance"),
        layers.estimates("serialisation"),
    )
    return Table("Balance of the ranks by layers", columns, "", name, file)


def sums_table(profile: Profile, *, name: str = "", file: str = "") -> Table:
    """Return the times of gradient all-reduces alone, by the size of a bucket."""
    sums = Records.of(profile.sums, "sums")
    columns = (
        sums.values("bucket_bytes"),
        sums.counts("buckets"),
        sums.spreads("time_ms", "one all-reduce", "ms (median, quartiles)"),
    )
    note = "Timed after the steps, without computation; all ranks start together."
    return Table("Gradient all-reduce alone", columns, note, name, file)


def statistics_table(found: StatisticsTime, *, name: str = "", file: str = "") -> Table:
    """Return the times of the sums of batch statistics."""
    record = Records([found], ["batch_statistics"])
    columns = (
        record.counts("number"),
        record.spreads("time_ms", "all of a step", "ms (median, quartiles)"),
        record.values("share", "share of a step"),
        record.values("largest_bytes"),
        record.spreads("alone_ms", "largest alone", "ms (median, quartiles)"),
    )
    note = "Communication and waiting in the steps, means over ranks; alone: all start together."
    if found.separate_kernels:
        note += " In steps without timing, these sums take less time."
    return Table("Sums of batch statistics", columns, note, name, file)


def memory_table(memory: Mapping[str, int], *, name: str = "", file: str = "") -> Table:
    """Return the bytes of a rank by purpose; `memory` is the record of that name in the file."""
    sizes = Records(list(memory.values()), [f"memory.{key}" for key in memory])
    purposes = texts("purpose", [key.replace("_", " ") for key in memory])
    column = replace(sizes.values("", "size", "MB"), term=find_term("memory"), name="bytes")
    return Table("Memory of a rank", (purposes, column), "", name, file)
