"""A `Profile` as people read it: the step, its layers, kinds of operation and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dptrain.measure.profile import Profile, RankProfile, StageProfile
from dptrain.measure.tables import (
    direction_cells,
    fitted_table,
    mean_ms,
    ms_cell,
    rate_cell,
    slowest_cell,
)

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 100
"""Columns of a terminal from which on the tables show all they have."""

KIND_COLUMNS = {
    "calls": True, "ms": False, "±": True, "share": False, "sum": False, "MB": False,
    "live MB": True, "GFLOP/s": False, "GB/s": True, "of roof": False,
}  # fmt: skip
"""Columns of the table of kinds, and whether only a wide one has them."""

MOST_RANKS = 16
"""Rows of the table of ranks."""

STRAGGLES = 0.05
"""Of the step: who comes to the sums later than the median rank by more than that is named."""


def profile_report(profile: Profile, width: int) -> list[str | Table]:
    """Everything that is printed, in order.

    Args:
        profile: what was measured.
        width: columns of the terminal.
    """
    wide = width >= WIDE
    found: list[str | Table] = [_parts_table(profile), _layers_table(profile, wide)]
    found.append(_kinds_table(profile, wide))
    if len(profile.ranks) > 1:
        found += [_ranks_table(profile, wide), straggler_line(profile), *_sum_lines(profile)]
    if profile.job["possible"] < 1:
        found.append(
            f"cores: the ranks share them; at most {profile.job['possible']:.2f} of the speed of "
            "as many cores is possible here"
        )
    if profile.roofs is not None:
        roofs = profile.roofs
        found.append(
            f"roofs: {roofs.gflops:,.1f} GFLOP/s and {roofs.gb_per_s:,.1f} GB/s beyond caches "
            f"({roofs.how})"
        )
    timing, step = profile.timing_ms, profile.parts.total
    found.append(
        f"timing itself: {1e3 * timing:.1f} µs, {timing / step:.2%} of a step"
        if timing
        else "stages were timed in steps of their own, run in order, which do not count above"
    )
    peak, total = profile.memory["peak"], profile.memory["total"]
    found.append(
        f"memory: {total / 1e6:,.1f} MB for parameters, gradients and buffers of a rank; the "
        f"largest process had {peak / 1e6:,.1f} MB at most"
    )
    return found


def straggler_line(profile: Profile) -> str:
    """Who comes late to the sums, by the time before them."""
    step = profile.parts.total
    late = [rank for rank in profile.ranks if rank.behind_ms > STRAGGLES * step]
    if not late:
        most = max(profile.ranks, key=lambda rank: rank.behind_ms)
        return (
            f"stragglers: none; rank {most.rank} comes to the sums last, {most.behind_ms:.3f} ms "
            "behind the median rank"
        )
    late.sort(key=lambda rank: -rank.behind_ms)
    named = [
        f"rank {r.rank} on {r.host}, {r.behind_ms:.3f} ms ({r.behind_ms / step:.0%} of a step)"
        for r in late[:4]
    ]
    more = f"; and {len(late) - 4} more" if len(late) > 4 else ""
    return (
        f"stragglers, which come later to the sums than the median rank: {'; '.join(named)}{more}"
    )


def _parts_table(profile: Profile) -> Table:
    step, parts = profile.step_ms, profile.parts
    total = profile.parts.total
    title = (
        f"A step: {step.median:.3f} ms ({step.q1:.3f} – {step.q3:.3f}, slowest rank, "
        f"n = {step.n}), {profile.samples_per_s:,.0f} samples/s"
    )
    named = (
        ("compute", parts.compute, "stages of the plan"),
        ("data wait", parts.data_wait, "until the minibatch is there"),
        ("transfer", parts.transfer, "summing gradients while all ranks are at it"),
        ("imbalance", parts.imbalance, "waiting for the slowest rank"),
        ("other", parts.other, "between the rest"),
    )
    rows: list[tuple[str, ...]] = [
        (name, ms_cell(value), f"{value / total:.1%}", meaning) for name, value, meaning in named
    ]
    rows += [(), ("step", ms_cell(total), "100.0%", "mean of all ranks")]
    hidden = sum(rank.hidden_ms for rank in profile.ranks) / len(profile.ranks)
    if hidden:
        rows.append(("hidden", ms_cell(hidden), "", "communication behind compute, not in the sum"))
    return fitted_table(title, ("part", "mean ms", "share", ""), rows, text=("part", ""))


def _layers_table(profile: Profile, wide: bool) -> Table:
    groups: dict[str, list[StageProfile]] = {}
    for stage in profile.stages:
        groups.setdefault(stage.group, []).append(stage)
    order = sorted(groups, key=lambda name: -mean_ms(groups[name]))
    columns = ["layers", "forward ms", "backward ms", "±", "slowest rank ms", "share", "sum",
               "GFLOP/s", "of roof"]  # fmt: skip
    if not wide or len(profile.ranks) == 1:
        columns.remove("slowest rank ms")
    if profile.roofs is None:
        columns.remove("of roof")
    rows, total = [], 0.0
    for name in order:
        share = sum(stage.share for stage in groups[name])
        total += share
        cells = {
            "layers": name,
            "share": f"{share:.1%}",
            "sum": f"{total:.1%}",
            **_group_cells(groups[name]),
        }
        rows.append([cells[column] for column in columns])
    title = "Layers, by time (mean over steps and ranks)"
    return fitted_table(title, columns, rows, text=("layers",))


def _group_cells(stages: Sequence[StageProfile]) -> dict[str, str]:
    forward, backward = direction_cells(stages)
    return {
        "forward ms": forward,
        "backward ms": backward,
        "±": _half_quartiles(stages),
        "slowest rank ms": slowest_cell(stages),
        "GFLOP/s": rate_cell(sum(stage.flops for stage in stages), mean_ms(stages)),
        "of roof": _roof(stages),
    }


def _kinds_table(profile: Profile, wide: bool) -> Table:
    columns = ["kind", *(name for name, only_wide in KIND_COLUMNS.items() if wide or not only_wide)]
    if profile.roofs is None:
        columns.remove("of roof")
    rows = [[_kind_cells(kind)[column] for column in columns] for kind in profile.kinds]
    return fitted_table("Kinds of operation, by time", columns, rows, text=("kind",))


def _kind_cells(kind: StageProfile) -> dict[str, str]:
    return {
        "kind": kind.name,
        "calls": str(kind.calls),
        "ms": ms_cell(kind.time_ms.mean),
        "±": _half_quartiles([kind]),
        "share": f"{kind.share:.1%}",
        "sum": f"{kind.cumulative_share:.1%}",
        "MB": f"{kind.bytes_moved / 1e6:.2f}",
        "live MB": f"{kind.memory_bytes / 1e6:.2f}",
        "GFLOP/s": rate_cell(kind.flops, kind.time_ms.mean),
        "GB/s": rate_cell(kind.bytes_moved, kind.time_ms.mean),
        "of roof": _roof([kind]),
    }


def _ranks_table(profile: Profile, wide: bool) -> Table:
    ranks = sorted(profile.ranks, key=lambda rank: -rank.behind_ms)
    left = f", the {MOST_RANKS} that come last to the sums" if len(ranks) > MOST_RANKS else ""
    columns = ["rank", "host", "samples", "busy", "behind", "compute", "data wait", "exposed",
               "imbalance", "hidden"]  # fmt: skip
    if not wide:
        columns.remove("hidden")
    rows = [[_rank_cells(rank)[column] for column in columns] for rank in ranks[:MOST_RANKS]]
    return fitted_table(f"Ranks, mean ms of a step{left}", columns, rows, text=("host",))


def _rank_cells(rank: RankProfile) -> dict[str, str]:
    return {
        "rank": str(rank.rank),
        "host": rank.host,
        "samples": f"{rank.samples:.4g}",
        "busy": ms_cell(rank.busy_ms),
        "behind": ms_cell(rank.behind_ms),
        "compute": ms_cell(rank.compute_ms),
        "data wait": ms_cell(rank.data_wait_ms),
        "exposed": ms_cell(rank.exposed_ms),
        "imbalance": ms_cell(rank.imbalance_ms),
        "hidden": ms_cell(rank.hidden_ms),
    }


def _sum_lines(profile: Profile) -> list[str]:
    how = f"{profile.job['strategy']}, {profile.job['transport']}"
    return [
        f"gradient sum alone ({how}): {s.bucket_bytes / 2**10:,.1f} KiB in "
        f"{s.time_ms.median:.3f} ms ({s.time_ms.q1:.3f} – {s.time_ms.q3:.3f}, n = {s.time_ms.n})"
        + (f", {s.buckets} such buckets" if s.buckets > 1 else "")
        for s in profile.sums
    ]


def _half_quartiles(stages: Sequence[StageProfile]) -> str:
    """Half of the distance of the quartiles, as a part of the mean."""
    half = sum(stage.time_ms.q3 - stage.time_ms.q1 for stage in stages) / 2
    mean = mean_ms(stages)
    return f"{half / mean:.0%}" if mean else ""


def _roof(stages: Sequence[StageProfile]) -> str:
    least = sum((stage.roofline_share or 0.0) * stage.time_ms.mean for stage in stages)
    mean = mean_ms(stages)
    return f"{least / mean:.0%}" if mean else ""
