"""Tables of a `Profile`: the step, its layers, kinds of operation and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dptrain.measure.machine.counters import processor_line
from dptrain.measure.machine.energy import energy_lines
from dptrain.measure.machine.frequency import frequency_lines
from dptrain.measure.machine.load import load_line
from dptrain.measure.profile.explanations import saves_operations
from dptrain.measure.profile.known import judge
from dptrain.measure.profile.known_tables import known_lines
from dptrain.measure.profile.loss_tables import FACTOR_NAMES
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import Profile, RankProfile, StageProfile
from dptrain.measure.profile.tables import (
    count_cell,
    direction_cells,
    ms_cell,
    parts_table,
    rate_cell,
    slowest_cell,
    typical_ms,
)
from dptrain.measure.statistics import Estimate
from dptrain.measure.tail_index import tail_note
from dptrain.tables import Table

LEGEND = {
    "±": "half of the interquartile range / mean",
    "balance": "mean of the ranks / slowest rank",
    "cum.": "share of this row and of those above it",
    "MB": "data that is read or written",
    "buffers MB": "memory that is in use meanwhile",
    "roofline": "least possible time / time",
}
"""Meaning of the columns whose headings do not state it."""

SAVED = " *"
"""Mark of stages whose algorithm needs fewer operations than the direct one."""

MAX_RANKS = 16
"""Largest number of rows in the table of ranks."""

LOST_IF = {
    "parallel": "any of the following is",
    "load_balance": "the same ranks are slower in every step",
    "serialisation": "other ranks are late in each step",
    "transfer": "communication takes long, or ranks lack cores in it",
}
"""When a factor of `Pop` is less than 1."""

STRAGGLER_SHARE = 0.05
"""A rank that is later than the median rank by more than this share of a step is a straggler."""


def profile_report(profile: Profile) -> list[str | Table]:
    """Return the lines and tables of a profile, in order."""
    noun = "pass" if _is_inference(profile) else "step"
    found: list[str | Table] = [
        parts_table(
            profile.step_ms,
            profile.step_parts,
            ranks=1 if _is_inference(profile) else len(profile.ranks),
            what="A forward pass" if _is_inference(profile) else "A step",
        ),
        f"{profile.samples_per_s:,.0f} samples/s",
        *filter(None, [tail_note(profile.step_times_ms, "this profile")]),
        *load_line(profile.other_cores, "these steps"),
        *frequency_lines(profile.frequencies),
        _layers_table(profile),
    ]
    found.append(_kinds_table(profile))
    if len(profile.ranks) > 1:
        found.append(_ranks_table(profile))
        if not _is_inference(profile):
            found += [straggler_line(profile), *_sum_lines(profile), *_statistics_line(profile)]
    if profile.pop is not None:
        found.append(pop_table(profile.pop))
    if profile.job["possible"] < 1:
        found.append(
            "oversubscribed: there are fewer cores than compute threads, which limits the weak "
            f"efficiency to {profile.job['possible']:.2f}"
        )
    found += _roofline_lines(profile)
    if profile.known:
        found += known_lines(judge(profile.known))
    timing, step = profile.timing_ms, profile.parts.total
    found.append(
        f"overhead of timing: {1e3 * timing:.1f} µs, {timing / step:.2%} of a {noun}"
        if timing
        else "stages were timed in separate passes, which the time of a pass excludes"
        if _is_inference(profile)
        else "stages were timed in separate steps without overlap, which the step time excludes"
    )
    if profile.energy is not None:
        found += energy_lines(profile.energy)
    if profile.processor is not None:
        found.append(processor_line(profile.processor))
    peak, total = profile.memory["peak"], profile.memory["total"]
    found.append(
        f"memory: {total / 1e6:,.1f} MB per rank for parameters, gradients and buffers; largest "
        f"peak of a process {peak / 1e6:,.1f} MB"
    )
    return found


def _roofline_lines(profile: Profile) -> list[str]:
    """Return the measured limits, and why there are no shares of them, if so."""
    roofs = profile.roofs
    if roofs is None:
        return []
    found = [
        f"roofline: peak {roofs.gflops:,.1f} GFLOP/s, memory bandwidth {roofs.gb_per_s:,.1f} GB/s "
        f"({roofs.how})"
    ]
    if profile.shares_withheld:
        found.append(f"roofline: no shares, because {profile.shares_withheld}")
    elif any(saves_operations(stage.note) for stage in profile.stages):
        found.append(
            "* GFLOP/s count the operations of the direct algorithm, the roofline those that "
            "Winograd's algorithm needs at least"
        )
    return found


def _is_inference(profile: Profile) -> bool:
    return bool(profile.job.get("task") == "inference")


def pop_table(pop: Pop) -> Table:
    """Return the parallel efficiency and its factors."""
    rows: list[tuple[str, ...]] = [
        (FACTOR_NAMES[name], *_estimate_cells(getattr(pop, name)), lost)
        for name, lost in LOST_IF.items()
    ]
    rows.insert(1, ())
    columns = ("efficiency", "value", "95% interval", "is less than 1 if")
    table = Table("Parallel efficiency (POP)", columns, (columns[0], columns[3]), rows=rows)
    if not math.isfinite(pop.serialisation.high):
        table.caption = "too few independent steps for all intervals; use more --steps"
    return table


def _estimate_cells(estimate: Estimate) -> tuple[str, str]:
    interval = f"{estimate.low:.3f} – {estimate.high:.3f}" if math.isfinite(estimate.high) else ""
    return f"{estimate.value:.3f}", interval


def straggler_line(profile: Profile) -> str:
    """Return a line that names the stragglers: ranks that reach the gradient sum late."""
    step = profile.parts.total
    late = [rank for rank in profile.ranks if rank.delay_ms > STRAGGLER_SHARE * step]
    if not late:
        most = max(profile.ranks, key=lambda rank: rank.delay_ms)
        return (
            f"stragglers: none; rank {most.rank} is last to reach the gradient sum, "
            f"{most.delay_ms:.3f} ms after the median rank"
        )
    late.sort(key=lambda rank: -rank.delay_ms)
    named = [
        f"rank {r.rank} on {r.host}, {r.delay_ms:.3f} ms ({r.delay_ms / step:.0%} of a step)"
        for r in late[:4]
    ]
    more = f"; and {len(late) - 4} more" if len(late) > 4 else ""
    return f"stragglers, later than the median rank at the gradient sum: {'; '.join(named)}{more}"


def _layers_table(profile: Profile) -> Table:
    groups: dict[str, list[StageProfile]] = {}
    for stage in profile.stages:
        groups.setdefault(stage.group, []).append(stage)
    order = sorted(groups, key=lambda name: -typical_ms(groups[name]))
    columns = ["layers", "forward ms", "backward ms", "±", "slowest rank ms", "balance",
               "share", "cum.", "GFLOP/s", "roofline"]  # fmt: skip
    if len(profile.ranks) == 1:
        columns.remove("slowest rank ms")
    balances = {} if profile.pop is None else {b.name: b for b in profile.pop.layers}
    if not balances:
        columns.remove("balance")
    if not _has_shares(profile):
        columns.remove("roofline")
    if _is_inference(profile):
        columns.remove("backward ms")
    rows, total = [], 0.0
    for name in order:
        share = sum(stage.share for stage in groups[name])
        total += share
        cells = {
            "layers": name,
            "balance": f"{balances[name].load_balance.value:.3f}" if name in balances else "",
            "share": f"{share:.1%}",
            "cum.": f"{total:.1%}",
            **_group_cells(groups[name]),
        }
        rows.append([cells[column] for column in columns])
    passes = "passes" if _is_inference(profile) else "steps"
    title = f"Layers, slowest first (mean of typical {passes})"
    return Table(title, columns, ("layers",), rows=rows, caption=_legend(columns))


def _has_shares(profile: Profile) -> bool:
    return any(stage.roofline_share is not None for stage in profile.stages)


def _legend(columns: Sequence[str]) -> str:
    """Return what the columns mean whose headings are short."""
    return "; ".join(f"{name}: {LEGEND[name]}" for name in columns if name in LEGEND)


def _group_cells(stages: Sequence[StageProfile]) -> dict[str, str]:
    forward, backward = direction_cells(stages)
    return {
        "forward ms": forward,
        "backward ms": backward,
        "±": _half_quartiles(stages),
        "slowest rank ms": slowest_cell(stages),
        "GFLOP/s": rate_cell(sum(stage.flops for stage in stages), typical_ms(stages)),
        "roofline": _roofline(stages),
    }


def _kinds_table(profile: Profile) -> Table:
    columns = ["kind", "calls", "ms", "±", "share", "cum.", "MB", "buffers MB", "GFLOP/s", "GB/s",
               "roofline"]  # fmt: skip
    if not _has_shares(profile):
        columns.remove("roofline")
    rows = [[_kind_cells(kind)[column] for column in columns] for kind in profile.kinds]
    return Table(
        "Kinds of operation, slowest first", columns, ("kind",), rows=rows, caption=_legend(columns)
    )


def _kind_cells(kind: StageProfile) -> dict[str, str]:
    return {
        "kind": kind.name,
        "calls": str(kind.calls),
        "ms": ms_cell(kind.typical_ms),
        "±": _half_quartiles([kind]),
        "share": f"{kind.share:.1%}",
        "cum.": f"{kind.cumulative_share:.1%}",
        "MB": f"{kind.bytes_moved / 1e6:.2f}",
        "buffers MB": f"{kind.memory_bytes / 1e6:.2f}",
        "GFLOP/s": rate_cell(kind.flops, kind.typical_ms),
        "GB/s": rate_cell(kind.bytes_moved, kind.typical_ms),
        "roofline": _roofline([kind]),
    }


def _ranks_table(profile: Profile) -> Table:
    ranks = sorted(profile.ranks, key=lambda rank: -rank.delay_ms)
    left = f", the {MAX_RANKS} with the largest delay" if len(ranks) > MAX_RANKS else ""
    columns = ["rank", "host", "samples", "busy", "delay", "computation", "waiting for data",
               "communication", "waiting", "without a core", "switches", "page faults",
               "busy share"]  # fmt: skip
    if profile.pop is None:
        columns.remove("busy share")
    shares = () if profile.pop is None else profile.pop.ranks
    rows = []
    for rank in ranks[:MAX_RANKS]:
        share = f"{shares[rank.rank].value:.0%}" if shares else ""
        cells = {**_rank_cells(rank), "busy share": share}
        rows.append([cells[column] for column in columns])
    return Table(
        f"Ranks, mean ms of typical steps{left}",
        columns,
        ("host",),
        rows=rows,
        caption="switches, page faults: per step, in all steps; a switch is involuntary if the "
        "system takes the core of a thread that computes",
    )


def _rank_cells(rank: RankProfile) -> dict[str, str]:
    return {
        "rank": str(rank.rank),
        "host": rank.host,
        "samples": f"{rank.samples:.4g}",
        "busy": ms_cell(rank.busy_ms),
        "delay": ms_cell(rank.delay_ms),
        "computation": ms_cell(rank.compute_ms),
        "waiting for data": ms_cell(rank.data_wait_ms),
        "communication": ms_cell(rank.communication_ms),
        "waiting": ms_cell(rank.imbalance_ms),
        "without a core": count_cell(rank.without_core_ms, ms_cell),
        "switches": count_cell(rank.involuntary_switches, "{:.1f}".format),
        "page faults": count_cell(rank.page_faults, "{:.1f}".format),
    }


def _sum_lines(profile: Profile) -> list[str]:
    how = f"{profile.job['strategy']}, {profile.job['transport']}"
    return [
        f"gradient sum alone ({how}): {s.bucket_bytes / 2**10:,.1f} KiB in "
        f"{s.time_ms.median:.3f} ms ({s.time_ms.q1:.3f} – {s.time_ms.q3:.3f}, n = {s.time_ms.n})"
        + (f", {s.buckets} buckets of this size" if s.buckets > 1 else "")
        for s in profile.sums
    ]


def _statistics_line(profile: Profile) -> list[str]:
    """Return a line about the sums of batch statistics, if there are any."""
    found = profile.batch_statistics
    if found is None:
        return []
    alone = found.alone_ms
    return [
        f"sums of batch statistics ({profile.job['transport']}): {found.number} in a step, "
        f"{found.time_ms.mean:.3f} ms of communication and waiting ({found.share:.1%} of a step); "
        f"the largest alone: {found.largest_bytes / 2**10:,.1f} KiB in {alone.median:.3f} ms "
        f"({alone.q1:.3f} – {alone.q3:.3f}, n = {alone.n})"
        + ("; in steps without timing, these sums take less time" if found.separate_kernels else "")
    ]


def _half_quartiles(stages: Sequence[StageProfile]) -> str:
    """Return half the interquartile range relative to the time in typical steps."""
    half = sum(stage.time_ms.q3 - stage.time_ms.q1 for stage in stages) / 2
    mean = typical_ms(stages)
    return f"{half / mean:.0%}" if mean else ""


def _roofline(stages: Sequence[StageProfile]) -> str:
    least = sum((stage.roofline_share or 0.0) * stage.typical_ms for stage in stages)
    mean = typical_ms(stages)
    mark = SAVED if any(saves_operations(stage.note) for stage in stages) else ""
    return f"{least / mean:.0%}{mark}" if mean else ""
