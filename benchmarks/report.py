"""Results as tables (terminal and Markdown) and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import targets
from benchmarks.check import Check
from benchmarks.comparison import Comparison
from benchmarks.limits import Roofs
from benchmarks.outside import OUTSIDE
from benchmarks.ranks import RankResult
from benchmarks.stages import StageResult
from benchmarks.tables import document, make_table, new_files, with_spread
from dptrain.tables import Table


@dataclass
class Results:
    """Results of a run, filled section by section.

    Attributes:
        about: machine, versions, date, repeats.
        children: results of `benchmarks.child` by network, one dictionary each.
    """

    about: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    stages: list[StageResult] = field(default_factory=list)
    roofs: list[Roofs] = field(default_factory=list)
    ranks: list[RankResult] = field(default_factory=list)
    children: list[dict[str, Any]] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """Return the tables of all sections that have results."""
        cases = dict.fromkeys((s.network, s.batch_size) for s in self.stages)
        tables = [
            table([c for c in self.comparisons if c.task == task], task)
            for task in ("training", "inference")
            for table in (_comparison_table, _other_table)
        ]
        tables += [
            stage_table([s for s in self.stages if (s.network, s.batch_size) == case])
            for case in cases
        ]
        tables += [_rank_table(self.ranks), _child_table(self.children)]
        return [table for table in tables if table.rows]


def training_target(comparison: Comparison) -> targets.Target:
    """Return the target of a speedup."""
    if comparison.task == "inference":
        return targets.INFERENCE
    if comparison.network in OUTSIDE:
        return targets.OUTSIDE
    dense = comparison.network.startswith("mlp-")
    return targets.TRAINING_DENSE if dense else targets.TRAINING


def other_target(comparison: Comparison) -> targets.Target:
    """Return the target of a speedup over the fastest peer other than PyTorch."""
    if comparison.task == "training":
        return training_target(comparison)
    bound = (comparison.network, comparison.batch_size) == ("solar", 1)
    return targets.MEMORY_BOUND if bound else targets.OTHER_INFERENCE


def _other_table(comparisons: Iterable[Comparison], task: str) -> Table:
    rows = []
    for c in comparisons:
        speedup, target = c.other_ratio, other_target(c)
        if speedup is not None and c.other_times is not None:
            rows.append((
                c.network, str(c.batch_size), with_spread(c.ours.median_ms, c.ours.quartiles_ms),
                with_spread(c.other_times.median_ms, c.other_times.quartiles_ms), c.other,
                f"{speedup.value:.2f} ({speedup.low:.2f}–{speedup.high:.2f})",
                f"≥ {target.value}", target.verdict(speedup.value),
            ))  # fmt: skip
    columns = ("network", "batch", "dptrain ms", "peer ms", "peer", "times faster", "target", "")
    title = f"{task.capitalize()}, other peers, one thread: median (quartiles)"
    return make_table(title, columns, rows)


def _comparison_table(comparisons: Iterable[Comparison], task: str) -> Table:
    rows = []
    for c in comparisons:
        times, target = c.ratio, training_target(c)
        rows.append((
            c.network, str(c.batch_size), with_spread(c.ours.median_ms, c.ours.quartiles_ms),
            with_spread(c.theirs.median_ms, c.theirs.quartiles_ms), c.mode,
            f"{times.value:.2f} ({times.low:.2f}–{times.high:.2f})",
            f"{c.wall_ratio:.2f}", f"{c.at_peak:.2f}", f"≥ {target.value}",
            target.verdict(times.value),
        ))  # fmt: skip
    what = {"training": "Training step", "inference": "Inference"}[task]
    columns = (
        "network", "batch", "dptrain ms", "PyTorch ms", "its best mode", "times faster", "by wall",
        "at peak", "target", "",
    )  # fmt: skip
    return make_table(f"{what}, one thread: median (quartiles)", columns, rows)


def stage_table(stages: Sequence[StageResult]) -> Table:
    """List the stages of one network at one batch size."""
    rows = []
    for s in stages:
        memory = s.kind == "memory"
        target = targets.STAGES.get(s.kind)
        rows.append((
            s.name, s.kind, f"{s.time_us:.4g}", f"{s.share_of_step:.1%}",
            f"{s.rate / 1e9:.1f} {'GB/s' if memory else 'GFLOP/s'}", f"{s.limit / 1e9:.1f}",
            f"{s.share_of_limit:.0%}", f"≥ {target.value:.0%}" if target else "",
            target.verdict(s.share_of_limit) if target else "",
        ))  # fmt: skip
    columns = ("stage", "kind", "µs", "of step", "rate", "limit", "of limit", "target", "")
    return make_table(
        f"Stages of {stages[0].network} at batch {stages[0].batch_size}", columns, tuple(rows)
    )


def _rank_table(results: Iterable[RankResult]) -> Table:
    rows = []
    for r in results:
        for name, values, target in (
            ("weak efficiency, 2 ranks", r.weak, targets.WEAK),
            ("strong efficiency, 2 ranks", r.strong, targets.STRONG),
        ):
            median, ends = float(np.median(values)), (min(values), max(values))
            rows.append((
                r.network, name, with_spread(median, ends), f"≥ {target.value}",
                target.verdict(median),
            ))  # fmt: skip
        ratio = r.threads_over_ranks
        rows.append((
            r.network, "step of 2 threads / of 2 ranks", f"{ratio:.3f}",
            f"≤ {targets.THREADS.value}", targets.THREADS.verdict(ratio),
        ))  # fmt: skip
    columns = ("network", "two cores, batch 256", "median (range)", "target", "")
    return make_table("Ranks and threads", columns, rows)


def _child_table(children: Iterable[dict[str, Any]]) -> Table:
    rows = []
    for child in children:
        name = f"{child['network']} at batch {child['batch_size']}"
        if "memory" in child:
            ours, theirs = child["memory"], child["torch_memory"]
            rows += [
                (name, "peak memory of training", f"{ours / 2**20:.0f} MiB",
                 f"≤ {theirs / 2**20:.0f} MiB (PyTorch)", targets.MEMORY.verdict(ours / theirs)),
                (name, "Python allocations in a step", f"{child['python_bytes']} B",
                 f"≤ {targets.ALLOCATED.value:.0f} B",
                 targets.ALLOCATED.verdict(max(child["python_bytes"], 1))),
                (name, "numba allocations in a step", f"{child['numba_allocations']:g}", "0",
                 "reached" if child["numba_allocations"] == 0 else "not reached"),
            ]  # fmt: skip
        if "cold_s" in child:
            for key, what, target in (
                ("cold_s", "compile, empty cache", targets.COLD_S),
                ("warm_s", "compile, full cache", targets.WARM_S),
            ):
                seconds = child[key]
                rows.append((name, what, f"{seconds:.2f} s", f"≤ {target.value:g} s",
                             target.verdict(seconds)))  # fmt: skip
    return make_table("A process", ("network", "", "measured", "target", " "), rows)


def headline(results: Results) -> str:
    """Summarize the results in a few lines."""
    lines = []
    for task, goal in (("training", "training steps"), ("inference", "inference passes")):
        cases = [c for c in results.comparisons if c.task == task]
        if cases:
            reached = sum(training_target(c).share(c.ratio.value) >= 1 for c in cases)
            values = [c.ratio.value for c in cases]
            lines.append(
                f"{reached} of {len(cases)} {goal} reach their target; dptrain is "
                f"{min(values):.2f} to {max(values):.2f} times as fast as PyTorch's fastest mode"
            )
    reasons: dict[tuple[str, str], list[str]] = {}
    for c in results.comparisons:
        for mode, reason in c.failed.items():
            case = f"{c.task} of {c.network} at batch {c.batch_size}"
            reasons.setdefault((mode, reason), []).append(case)
    for (mode, reason), names in reasons.items():
        more = f" and {len(names) - 1} more cases" if len(names) > 1 else ""
        lines.append(f"{names[0]}{more} without {mode}: {reason}")
    for kind, target in targets.STAGES.items():
        shares = [s.share_of_limit for s in results.stages if s.kind == kind]
        if shares:
            reached = sum(target.share(share) >= 1 for share in shares)
            lines.append(
                f"{reached} of {len(shares)} {kind} stages reach {target.value:.0%} of their "
                f"limit; median {np.median(shares):.0%}, least {min(shares):.0%}"
            )
    return "\n".join(lines)


def as_json(results: Results) -> dict[str, Any]:
    """Return all results in plain types for JSON."""
    return {
        "about": results.about,
        "checks": [vars(c) | {"passed": c.passed} for c in results.checks],
        "comparisons": [
            {
                "network": c.network, "batch_size": c.batch_size, "task": c.task, "mode": c.mode,
                "probes_ms": c.probes_ms, "failed": c.failed, "steps": len(c.ours.cpu),
                "dptrain_ms": c.ours.median_ms, "dptrain_quartiles_ms": c.ours.quartiles_ms,
                "torch_ms": c.theirs.median_ms, "torch_quartiles_ms": c.theirs.quartiles_ms,
                "ratio": c.ratio.value, "ratio_quartiles": (c.ratio.low, c.ratio.high),
                "wall_ratio": c.wall_ratio, "at_peak": c.at_peak, "flops": c.flops, "peak": c.peak,
                "target": training_target(c).value, "other": c.other,
                "other_ms": c.other_times.median_ms if c.other_times else None,
                "other_ratio": c.other_ratio.value if c.other_ratio else None,
                "other_target": other_target(c).value,
            }
            for c in results.comparisons
        ],
        "stages": [vars(s) for s in results.stages],
        "roofs": [vars(r) for r in results.roofs],
        "ranks": [vars(r) | {"threads_over_ranks": r.threads_over_ranks} for r in results.ranks],
        "processes": results.children,
    }  # fmt: skip


def as_markdown(results: Results) -> str:
    """Return the report in Markdown."""
    return document(
        "dptrain and PyTorch on a CPU", results.about, headline(results), results.tables()
    )


def write(results: Results, folder: Path) -> list[Path]:
    """Write all files, named by date; further runs of a day get the suffix -2, -3, …"""
    from benchmarks.roofline import draw
    from dptrain.files import dump_json

    json_path, markdown_path = new_files(folder, "cpu", str(results.about["date"]))
    json_path.write_text(dump_json(as_json(results)), encoding="utf-8")
    markdown_path.write_text(as_markdown(results), encoding="utf-8")
    return [
        json_path,
        markdown_path,
        *draw(results.roofs, results.stages, json_path.with_suffix("")),
    ]
