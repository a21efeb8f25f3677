"""The plots of one profile: layers, roofline, ranks, timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dptrain.measure.profile.profile import Profile, RankProfile, StageProfile
from dptrain.measure.profile.profile_lines import STRAGGLER_SHARE
from dptrain.numbers import decimals_for, fixed, short
from dptrain.report.elements.bars import pop_bars, pop_plot
from dptrain.report.elements.canvas import (
    BOTTOM,
    OTHER_PHASE,
    PARTS,
    PHASES,
    SMALL_PT,
    TOP,
    Plot,
    colour,
    draw_end_value,
    plot,
    set_bars_axis,
)
from dptrain.report.elements.curves import steps_plot
from dptrain.report.profiles.roofline import computing_stages, roofline
from dptrain.report.profiles.timeline import StepSpans, timeline
from dptrain.vocabulary import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS, RANKS = 12, 24
"""Largest number of groups of layers, and of ranks, in a plot."""
NAME_PT, BAR_PT = 15.0, 8.5
"""Height of the name of a group of layers, and of its bars, in points."""
RANK_PT = 11.0


def profile_plots(
    profile: Profile, suffix: str = "", where: str = "", step: StepSpans | None = None
) -> list[Plot]:
    """Return all plots of a profile.

    Args:
        profile: the profile.
        suffix: suffix of the names of the plots, such as ``-weak-r16-t1``.
        where: suffix of their titles, such as ``, 16 ranks``.
        step: a step of its trace, if there is one.
    """
    plots = []
    if len(profile.ranks) > 1:
        plots.append(_ranks(profile, suffix, where))
    if profile.pop is not None:
        bars = pop_bars(profile.pop)
        plots.append(pop_plot(f"pop-step{suffix}", f"Parallel efficiency{where}", {"": bars}))
    if step is not None:
        plots.append(timeline(step, suffix, where, _straggler(profile)))
    plots.append(layers_plot(f"layers{suffix}", f"Layers{where}", profile.stages))
    if (
        profile.roofs is not None
        and not profile.shares_withheld
        and computing_stages(profile.stages)
    ):
        plots.append(roofline(profile, profile.roofs, suffix, where))
    plots.append(_steps(profile, suffix, where))
    return plots


def _straggler(profile: Profile) -> int | None:
    """Return the rank that is latest on average, if it is a straggler."""
    latest = max(profile.ranks, key=lambda rank: rank.delay_ms)
    is_late = latest.delay_ms > STRAGGLER_SHARE * profile.parts.total
    return latest.rank if is_late else None


def _steps(profile: Profile, suffix: str, where: str) -> Plot:
    step = profile.step_ms
    interval = None if step.low is None or step.high is None else (step.low, step.high)
    band = " and its 95% interval" if interval is not None else ""
    times = profile.step_times_ms
    return steps_plot(
        f"steps{suffix}",
        f"Steps{where}",
        range(1, len(times) + 1),
        times,
        median=step.median,
        interval=interval,
        caption=f"Each point is a step. The line is the median{band}, which describes this launch.",
    )


def _groups(stages: Sequence[StageProfile]) -> list[tuple[str, dict[str, float]]]:
    """Return (group, ms by phase) in the order of the plan; small groups are one at the end.

    The phases load, loss and update, which belong to no layer, count as `OTHER_PHASE`.
    """
    groups: dict[str, dict[str, float]] = {}
    for stage in stages:
        phases = groups.setdefault(stage.group or stage.phase, {})
        phase = stage.phase if stage.phase in PHASES else OTHER_PHASE[1]
        phases[phase] = phases.get(phase, 0.0) + stage.typical_ms
    kept = sorted(groups, key=lambda name: -sum(groups[name].values()))[:GROUPS]
    rest = [phases for name, phases in groups.items() if name not in kept]
    rows = [(name, phases) for name, phases in groups.items() if name in kept]
    if rest:
        total = {p: sum(phases.get(p, 0.0) for phases in rest) for p in (*PHASES, OTHER_PHASE[1])}
        rows.append((f"{len(rest)} others", total))
    return rows


def _forward_and_backward(phases: Mapping[str, float]) -> tuple[float, float]:
    """Return the lengths of the two bars of a group."""
    backward = sum(value for phase, value in phases.items() if phase.startswith("backward"))
    return sum(phases.values()) - backward, backward


def layers_plot(name: str, title: str, stages: Sequence[StageProfile]) -> Plot:
    """Return the plot of forward and backward times by group of layers."""
    rows = _groups(stages)
    sums = [_forward_and_backward(phases) for _, phases in rows]
    longest = max([value for pair in sums for value in pair], default=1.0) or 1.0
    roles = {phase: role for phase, (role, _) in PHASES.items()}
    roles[OTHER_PHASE[1]] = OTHER_PHASE[0]
    visible = 0.004 * longest
    roles = {p: r for p, r in roles.items() if any(t.get(p, 0.0) > visible for _, t in rows)}
    decimals = decimals_for([longest], digits=3)
    heights = [NAME_PT + BAR_PT * sum(value > 0 for value in pair) for pair in sums]

    def draw(axes: Axes) -> None:
        y = 0.0
        for (group, phases), pair in zip(rows, sums, strict=True):
            axes.text(0, y + 0.62 * NAME_PT, group, fontsize=SMALL_PT, va="center")
            y += NAME_PT
            for is_backward, total in zip((False, True), pair, strict=True):
                if not total:
                    continue
                end = 0.0
                for phase, role in roles.items():
                    if phase.startswith("backward") == is_backward:
                        value = phases.get(phase, 0.0)
                        axes.barh(
                            y + 0.5 * BAR_PT,
                            value,
                            0.8 * BAR_PT,
                            left=end,
                            color=colour(role),
                            edgecolor=colour("paper"),
                            linewidth=0.5,
                        )
                        end += value
                draw_end_value(axes, total, y + 0.5 * BAR_PT, fixed(total, decimals))
                y += BAR_PT
        for phase, role in roles.items():
            axes.barh(0, 0, 0, color=colour(role), label=phase.replace("_", " "))
        axes.set_ylim(sum(heights) + 2, 0)
        axes.set_xlim(0, longest * 1.16)
        set_bars_axis(axes, "time per step, ms")

    values = "; ".join(
        f"{group} {fixed(f, decimals)} forward, {fixed(b, decimals)} backward"
        for (group, _), (f, b) in zip(rows, sums, strict=True)
    )
    has_backward = any(b for _, b in sums)
    return plot(
        name,
        title,
        "groups of layers" + (": forward above backward" if has_backward else ""),
        draw,
        height=TOP + BOTTOM + sum(heights) + 2,
        left=8.0,
        legend=2,
        caption="Time of each group of layers, mean of typical steps and ranks.",
        alt=f"Milliseconds by layer: {values}.",
    )


def rank_parts(rank: RankProfile) -> dict[str, float]:
    """Return the parts of typical steps of a rank, which sum to their mean."""
    parts = {
        "compute": rank.compute_ms,
        "data_wait": rank.data_wait_ms,
        "transfer": rank.communication_ms,
        "imbalance": rank.imbalance_ms,
        "without_core": rank.without_core_ms or 0.0,
    }
    return {**parts, "other": rank.step_ms - sum(parts.values())}


def _ranks(profile: Profile, suffix: str, where: str) -> Plot:
    ranks = _shown(profile.ranks)
    step = profile.parts.total
    names = [n for n in PARTS if any(rank_parts(r).get(n, 0) >= 5e-4 * step for r in ranks)]

    def draw(axes: Axes) -> None:
        starts = [0.0] * len(ranks)
        for name in names:
            role = PARTS[name]
            lengths = [max(rank_parts(rank)[name], 0.0) for rank in ranks]
            axes.barh(
                range(len(ranks)),
                lengths,
                0.78,
                left=starts,
                color=colour(role),
                edgecolor=colour("paper"),
                linewidth=0.4,
                label=label_of(name),
            )
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.set_xlim(0, max(starts) * 1.02)
        axes.set_yticks(range(len(ranks)), [str(rank.rank) for rank in ranks])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time of a step, ms", labelpad=2)

    late = max(profile.ranks, key=lambda rank: rank.delay_ms)
    fewer = f" The plot shows {len(ranks)} of {len(profile.ranks)}, including the slowest."
    return plot(
        f"ranks{suffix}",
        f"Ranks{where}",
        "rank",
        draw,
        height=TOP + BOTTOM + max(RANK_PT * len(ranks), 40.0),
        left=24.0,
        legend=3,
        caption="Mean of typical steps of each rank. Waiting is waiting for the slowest rank."
        + (fewer if len(ranks) < len(profile.ranks) else ""),
        alt="Mean step of each rank by part; "
        f"rank {late.rank} is {short(late.delay_ms)} ms slower than the median rank.",
    )


def _shown(ranks: Sequence[RankProfile]) -> list[RankProfile]:
    """Return all ranks, or a regular selection that includes the slowest."""
    if len(ranks) <= RANKS:
        return list(ranks)
    late = max(ranks, key=lambda rank: rank.delay_ms)
    stride = -(-len(ranks) // (RANKS - 1))
    chosen = {rank.rank: rank for rank in [*ranks[::stride], late]}
    return [chosen[rank] for rank in sorted(chosen)]
