"""The printed form of a `Profile`: its tables, and lines about what they do not contain."""

from __future__ import annotations

from dataclasses import replace

from dptrain.measure.machine.counters import processor_line
from dptrain.measure.machine.energy import energy_lines
from dptrain.measure.machine.frequency import frequency_lines
from dptrain.measure.machine.load import load_line
from dptrain.measure.profile.known import judge
from dptrain.measure.profile.known_tables import known_lines
from dptrain.measure.profile.profile import Profile, Spread, StepParts
from dptrain.measure.profile.tables import (
    layers_table,
    parts_table,
    pop_table,
    ranks_table,
    stages_table,
)
from dptrain.measure.tail_index import tail_note
from dptrain.numbers import decimals_for, fixed
from dptrain.tables import Table

MAX_RANKS = 16
"""Largest number of rows in the table of ranks."""

STRAGGLER_SHARE = 0.05
"""A rank that is later than the median rank by more than this share of a step is a straggler."""


def profile_report(profile: Profile) -> list[str | Table]:
    """Return the lines and tables of a profile, in order."""
    noun = "pass" if _is_inference(profile) else "step"
    several = len(profile.ranks) > 1
    found: list[str | Table] = [
        titled_parts(
            profile.step_ms,
            profile.step_parts,
            several=several and not _is_inference(profile),
            noun="forward pass" if _is_inference(profile) else "step",
        ),
        f"{profile.samples_per_s:,.0f} samples/s",
        *filter(None, [tail_note(profile.step_times_ms, "this profile")]),
        *load_line(profile.other_cores, "these steps"),
        *frequency_lines(profile.frequencies),
        _layers_table(profile),
        stages_table(profile.kinds, "kinds", several=several),
    ]
    if several:
        found.append(ranks_table(profile, most=MAX_RANKS))
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
    return found


def _is_inference(profile: Profile) -> bool:
    return bool(profile.job.get("task") == "inference")


def titled_parts(step: Spread, parts: StepParts, *, several: bool, noun: str = "step") -> Table:
    """Return the table of the parts of a step, with the step and its distribution as title.

    Args:
        step, parts, several, noun: as for `dptrain.measure.profile.tables.parts_table`.
    """
    decimals = decimals_for([step.mean])
    texts = [f"A {noun}: {fixed(step.mean, decimals)} ms"]
    for name in ("median", "p95", "p99"):
        if (value := getattr(step, name)) is not None:
            texts.append(f"{name} {fixed(value, decimals)}")
    title = f"{', '.join(texts)}, n = {step.n:,}"
    return replace(parts_table(step, parts, several=several, noun=noun), title=title)


def _layers_table(profile: Profile) -> Table:
    passes = "passes" if _is_inference(profile) else "steps"
    balances = [] if profile.pop is None else profile.pop.layers
    return layers_table(
        profile.stages,
        f"Layers, slowest first (mean of typical {passes})",
        several=len(profile.ranks) > 1,
        balances={layer.name: layer.load_balance for layer in balances},
    )


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
