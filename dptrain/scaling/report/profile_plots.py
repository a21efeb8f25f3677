"""The plots of one profile: layers, roofline, ranks, timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dptrain.measure.pop import Pop
from dptrain.measure.profile import Profile, RankProfile
from dptrain.scaling.report.canvas import (
    BOTTOM,
    OTHER_PHASE,
    PARTS,
    PHASES,
    SMALL_PT,
    TOP,
    Plot,
    colour,
    legend_below,
    legend_height,
    part_name,
    plot,
)
from dptrain.scaling.report.numbers import decimals_for, fixed, short
from dptrain.scaling.report.roofline import computing_stages, roofline
from dptrain.scaling.report.timeline import StepSpans, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS, RANKS = 12, 24
"""Largest number of groups of layers, and of ranks, in a plot."""
ROW_PT = 30.0
"""Height of a group of layers in points: its name, a forward bar, a backward bar."""
RANK_PT = 11.0
MOST_SHOWN = 1.2
"""End of the axis of efficiencies; intervals that end beyond it are cut."""


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
    plots = [_layers(profile, suffix, where)]
    if profile.roofs is not None and computing_stages(profile.stages):
        plots.append(roofline(profile, profile.roofs, suffix, where))
    if len(profile.ranks) > 1:
        plots.append(_ranks(profile, suffix, where))
    if profile.pop is not None:
        plots.append(_efficiencies(profile.pop, suffix, where))
    if step is not None:
        plots.append(timeline(step, suffix, where))
    return plots


def _groups(profile: Profile) -> list[tuple[str, dict[str, float]]]:
    """Return (group, ms by phase) in the order of the plan; small groups are one at the end.

    The phases load, loss and update, which belong to no layer, count as `OTHER_PHASE`.
    """
    groups: dict[str, dict[str, float]] = {}
    for stage in profile.stages:
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


def _layers(profile: Profile, suffix: str, where: str) -> Plot:
    rows = _groups(profile)
    sums = [_forward_and_backward(phases) for _, phases in rows]
    roles = {phase: role for phase, (role, _) in PHASES.items()}
    roles[OTHER_PHASE[1]] = OTHER_PHASE[0]
    longest = max([value for pair in sums for value in pair], default=1.0) or 1.0
    decimals = decimals_for([longest], digits=3)

    def draw(axes: Axes) -> None:
        drawn = set()
        for y, (name, phases) in enumerate(rows):
            axes.text(0, y - 0.33, name, fontsize=SMALL_PT, va="center")
            ends = {"forward": 0.0, "backward": 0.0}
            for phase, role in roles.items():
                direction = "backward" if phase.startswith("backward") else "forward"
                value = phases.get(phase, 0.0)
                axes.barh(
                    y + (0.0 if direction == "forward" else 0.28), value, 0.25,
                    left=ends[direction],
                    color=colour(role), edgecolor=colour("paper"), linewidth=0.5,
                    label=None if phase in drawn else phase.replace("_", " "),
                )  # fmt: skip
                drawn.add(phase)
                ends[direction] += value
            for offset, direction in ((0.0, "forward"), (0.28, "backward")):
                end = ends[direction]
                if end or direction == "forward":
                    axes.annotate(fixed(end, decimals), (end, y + offset), xytext=(3, 0),
                                  textcoords="offset points", va="center", fontsize=7)  # fmt: skip
        axes.set_ylim(len(rows) - 0.5, -0.55)
        axes.set_xlim(0, longest * 1.16)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("time per step, ms", labelpad=2)
        legend_below(axes, 2)

    values = "; ".join(
        f"{name} {fixed(f, decimals)} forward, {fixed(b, decimals)} backward"
        for (name, _), (f, b) in zip(rows, sums, strict=True)
    )
    bottom = BOTTOM + legend_height(len(roles), 2)
    return plot(
        f"layers{suffix}", f"Layers{where}", "groups of layers: forward above backward", draw,
        height=TOP + bottom + ROW_PT * max(len(rows), 1), left=8.0, bottom=bottom,
        caption="Time of each group of layers, mean of typical steps and ranks.",
        alt=f"Milliseconds by layer: {values}.",
    )  # fmt: skip


def _efficiencies(pop: Pop, suffix: str, where: str) -> Plot:
    """Draw the parallel efficiency and its factors with their intervals."""
    bars = {
        "parallel efficiency": pop.parallel,
        "load balance": pop.load_balance,
        "serialisation": pop.serialisation,
        "transfer": pop.transfer,
    }

    def draw(axes: Axes) -> None:
        for y, (name, value) in enumerate(bars.items()):
            axes.text(0, y - 0.33, name, fontsize=SMALL_PT, va="center")
            role = "ink" if y == 0 else "blue"
            axes.barh(y + 0.1, value.value, 0.3, color=colour(role))
            # An interval without ends has no line.
            low, high = (value.low, value.high) if math.isfinite(value.high) else (value.value,) * 2
            axes.plot([low, min(high, MOST_SHOWN)], [y + 0.1] * 2, color=colour("orange"))
            axes.annotate(fixed(value.value, 3), (min(high, MOST_SHOWN), y + 0.1), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=7)  # fmt: skip
        axes.set_ylim(len(bars) - 0.5, -0.55)
        axes.set_xlim(0, MOST_SHOWN * 1.12)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("efficiency", labelpad=2)

    values = ", ".join(f"{name} {fixed(value.value, 3)}" for name, value in bars.items())
    return plot(
        f"pop{suffix}", f"Parallel efficiency{where}", "bars, and 95% intervals as lines", draw,
        height=TOP + BOTTOM + ROW_PT * len(bars), left=8.0,
        caption="Parallel efficiency is the product of load balance, serialisation and transfer.",
        alt=f"Efficiencies: {values}.",
    )  # fmt: skip


def rank_parts(rank: RankProfile) -> dict[str, float]:
    """Return the parts of typical steps of a rank, which sum to their mean."""
    parts = {
        "compute": rank.compute_ms,
        "data_wait": rank.data_wait_ms,
        "transfer": rank.exposed_ms - rank.imbalance_ms,
        "imbalance": rank.imbalance_ms,
    }
    return {**parts, "other": rank.step_ms - sum(parts.values())}


def _ranks(profile: Profile, suffix: str, where: str) -> Plot:
    ranks = _shown(profile.ranks)

    def draw(axes: Axes) -> None:
        starts = [0.0] * len(ranks)
        for name, role in PARTS.items():
            lengths = [max(rank_parts(rank)[name], 0.0) for rank in ranks]
            axes.barh(range(len(ranks)), lengths, 0.78, left=starts, color=colour(role),
                      edgecolor=colour("paper"), linewidth=0.4, label=part_name(name))  # fmt: skip
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.set_xlim(0, max(starts) * 1.02)
        axes.set_yticks(range(len(ranks)), [str(rank.rank) for rank in ranks])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("mean step time, ms", labelpad=2)
        legend_below(axes, 3)

    bottom = BOTTOM + legend_height(len(PARTS), 3)
    late = max(profile.ranks, key=lambda rank: rank.delay_ms)
    fewer = f" The plot shows {len(ranks)} of {len(profile.ranks)}, including the slowest."
    return plot(
        f"ranks{suffix}", f"Ranks{where}", "rank", draw,
        height=TOP + bottom + max(RANK_PT * len(ranks), 40.0), bottom=bottom, left=24.0,
        caption="Mean step of each rank. Waiting is waiting for the slowest rank."
        + (fewer if len(ranks) < len(profile.ranks) else ""),
        alt="Mean step of each rank by part; "
        f"rank {late.rank} is {short(late.delay_ms)} ms slower than the median rank.",
    )  # fmt: skip


def _shown(ranks: Sequence[RankProfile]) -> list[RankProfile]:
    """Return all ranks, or a regular selection that includes the slowest."""
    if len(ranks) <= RANKS:
        return list(ranks)
    late = max(ranks, key=lambda rank: rank.delay_ms)
    stride = -(-len(ranks) // (RANKS - 1))
    chosen = {rank.rank: rank for rank in [*ranks[::stride], late]}
    return [chosen[rank] for rank in sorted(chosen)]
