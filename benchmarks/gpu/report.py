"""Results as tables (terminal and Markdown) and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu import targets
from benchmarks.gpu.data import DataResult, data_headline, data_table
from benchmarks.gpu.inference import InferenceCase
from benchmarks.gpu.inference_report import (
    inference_headline,
    inference_json,
    inference_tables,
)
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.precision import LayerError, precision_headline, precision_table
from benchmarks.gpu.ranks import PROGRAMS, RankResult, weak_efficiency
from benchmarks.gpu.stages import LayerRow, StageResult
from benchmarks.gpu.streaming import StreamResult, stream_headline, stream_table
from benchmarks.gpu.training import Case, Comparison
from benchmarks.tables import document, make_table, with_spread
from benchmarks.targets import Target
from dptrain.files import dump_json
from dptrain.tables import Table

if TYPE_CHECKING:
    # Needs PyTorch.
    from benchmarks.check import Check


STAGE_CASE = ("network", "batch_size", "backend", "precision")
STAGE_ROW = ("group", "phase", "flops", "bytes_moved", "us")


@dataclass(frozen=True)
class Checked:
    """A check of a program of dptrain."""

    backend: str
    precision: str
    check: Check


@dataclass
class Results:
    """Results of a run, filled section by section.

    Attributes:
        about: machine, versions, date, repeats.
        failed: reasons by case of dptrain that did not run.
    """

    about: dict[str, Any]
    checks: list[Checked] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    limits: Limits | None = None
    stages: list[StageResult] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    ranks: list[RankResult] = field(default_factory=list)
    inference: list[InferenceCase] = field(default_factory=list)
    errors: list[LayerError] = field(default_factory=list)
    data: list[DataResult] = field(default_factory=list)
    streams: list[StreamResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether all checks passed."""
        return not self.wrong

    @property
    def wrong(self) -> list[Checked]:
        """Checks that failed."""
        return [checked for checked in self.checks if not checked.check.passed]

    @property
    def complete(self) -> bool:
        """Whether all of dptrain's programs ran."""
        return all("PyTorch" in case for case in self._all_failed())

    def comparisons(self) -> list[Comparison]:
        """Return the comparisons of all cases."""
        return [comparison for case in self.cases for comparison in case.comparisons()]

    def stages_by_case(self) -> dict[tuple[Any, ...], list[StageResult]]:
        """Return the stages by network, batch size, backend and precision."""
        cases: dict[tuple[Any, ...], list[StageResult]] = {}
        for stage in self.stages:
            cases.setdefault(tuple(getattr(stage, name) for name in STAGE_CASE), []).append(stage)
        return cases

    def tables(self) -> list[Table]:
        """Return the tables of all sections that have results."""
        tables = [
            training_table(self.comparisons()),
            mode_table(self.cases),
            memory_table(self.cases),
            data_table(self.data),
            stream_table(self.streams),
            *inference_tables(self.inference),
            precision_table(self.errors),
            *rank_tables(self.ranks),
            layer_table(self.layers),
            *(stage_table(stages, self.limits) for stages in self.stages_by_case().values()),
            check_table(self.checks),
            make_table("Programs that did not run", ("case", "reason"),
                  tuple(self._all_failed().items())),
        ]  # fmt: skip
        return [table for table in tables if table.rows]

    def _all_failed(self) -> dict[str, str]:
        return (
            self.failed
            | {
                f"{case.network}, batch {case.batch_size}, {name}": why
                for case in self.cases
                for name, why in case.failed.items()
            }
            | {
                f"inference of {case.network}, batch {case.batch_size}, {name}": why
                for case in self.inference
                for name, why in case.failed.items()
            }
        )


def verdict(goals: Sequence[tuple[Target, float]]) -> str:
    """Return the verdict of the target that was missed most."""
    if not goals:
        return ""
    target, figure = min(goals, key=lambda goal: goal[0].share(goal[1]))
    return target.verdict(figure)


def _goal(target: Target, unit: str = "") -> str:
    return f"{'≤' if target.at_most else '≥'} {target.value:g}{unit}"


def training_table(comparisons: Iterable[Comparison]) -> Table:
    """Compare dptrain with PyTorch's fastest mode."""
    rows = []
    for c in comparisons:
        times, case = c.ratio, c.case
        step = targets.STEP_US.get((case.network, case.batch_size))
        faster = targets.faster(case.network, case.batch_size, c.precision)
        theirs = None if c.mode is None else case.theirs[c.mode]
        rows.append((
            case.network, str(case.batch_size), c.precision, c.backend,
            with_spread(c.ours.median, c.ours.quartiles),
            "" if theirs is None else with_spread(theirs.median, theirs.quartiles), c.mode or "",
            "" if times is None else f"{times.value:.2f} ({times.low:.2f}–{times.high:.2f})",
            "" if step is None else _goal(step, " µs"),
            "" if faster is None else _goal(faster, "×"),
            verdict(c.goals),
        ))  # fmt: skip
    columns = (
        "network", "batch", "precision", "backend", "dptrain µs", "PyTorch µs", "fastest mode",
        "speedup", "step", "ratio", "",
    )  # fmt: skip
    return make_table("Training step: median (quartiles)", columns, rows)


def mode_table(cases: Iterable[Case]) -> Table:
    """List the times of all of PyTorch's modes."""
    cases = list(cases)
    modes = list(dict.fromkeys(mode for case in cases for mode in case.theirs))
    rows = [
        (case.network, str(case.batch_size),
         *(f"{case.theirs[m].median:.4g}" if m in case.theirs else "–" for m in modes))
        for case in cases
        if case.theirs
    ]  # fmt: skip
    return make_table("PyTorch's modes, µs per step", ("network", "batch", *modes), rows)


def memory_table(cases: Iterable[Case]) -> Table:
    """List the peak memory of every program."""
    cases = list(cases)
    names = list(dict.fromkeys(name for case in cases for name in case.memory_bytes))
    rows = [
        (case.network, str(case.batch_size),
         *(f"{case.memory_bytes[n] / 2**20:.0f}" if n in case.memory_bytes else "–" for n in names))
        for case in cases
    ]  # fmt: skip
    return make_table("Peak memory, MiB", ("network", "batch", *names), rows)


def stage_table(stages: Sequence[StageResult], limits: Limits | None) -> Table:
    """List the stages of one case."""
    total = sum(stage.us for stage in stages)
    rows = []
    for s in stages:
        roof = None if limits is None else s.share_of_roof(limits)
        gemm = None if limits is None else s.share_of_gemm(limits)
        aimed = s.wide and gemm is not None
        rows.append((
            s.name, f"{s.us:.2f}", f"{s.us / total:.1%}", f"{s.flops / s.us / 1e3:.0f}",
            f"{s.bytes_moved / s.us / 1e3:.0f}", "" if roof is None else f"{roof:.0%}",
            "" if gemm is None or not s.flops else f"{gemm:.0%}",
            verdict([(targets.WIDE_CONVOLUTION, gemm)]) if aimed and gemm is not None else "",
        ))  # fmt: skip
    columns = (
        "stage",
        "µs",
        "share of sum",
        "GFLOP/s",
        "GB/s",
        "share of roof",
        "share of GEMM",
        "",
    )
    s = stages[0]
    return make_table(
        f"Stages of {s.network} at batch {s.batch_size}, {s.backend} {s.precision}, "
        f"timed separately; sum {total:.1f} µs",
        columns, tuple(rows),
    )  # fmt: skip


def layer_table(rows: Iterable[LayerRow]) -> Table:
    """Compare single layers of dptrain, cuDNN and PyTorch."""
    rows = list(rows)
    programs = list(dict.fromkeys(name for row in rows for name in row.us))
    text = [
        (r.network, str(r.batch_size), r.precision, f"{r.layers} {r.direction}", r.study_name,
         *(f"{r.us[name]:.2f}" if name in r.us else "–" for name in programs),
         "" if r.ratio is None else f"{r.ratio:.2f}",
         "" if r.ratio is None else
         "the same kernels" if r.shared else targets.OWN_KERNEL.verdict(r.ratio))
        for r in rows
    ]  # fmt: skip
    times = (f"{program} µs" for program in programs)
    columns = ("network", "batch", "precision", "layer", "study A", *times, "cuda / cuDNN", "")
    return make_table("Layer by layer", columns, tuple(text))


def rank_tables(results: Sequence[RankResult]) -> list[Table]:
    """List step times on several GPUs, and weak-scaling efficiencies."""
    alone = {(r.network, r.batch_size): r for r in results if r.ranks == 1}
    times, weak = [], []
    for r in results:
        case = (r.network, str(r.batch_size), str(r.ranks))
        goals = _rank_goals(r)
        faster = r.times_faster
        times.append((
            *case, *(_launches(r.us.get(program, ())) for program in PROGRAMS),
            "" if faster is None else f"{faster:.2f}",
            ", ".join(goal for goal, _, _ in goals), verdict([goal[1:] for goal in goals]),
        ))  # fmt: skip
        one = alone.get((r.network, r.batch_size))
        if one is None or r.ranks == 1:
            continue
        found = {program: weak_efficiency(one, r, program) for program in PROGRAMS}
        mine, target = found["dptrain"], targets.WEAK.get(r.batch_size)
        within = float(np.median(r.weak)) if r.weak else None
        weak.append((
            *case, *("" if value is None else f"{value:.3f}" for value in found.values()),
            "" if within is None else f"{within:.3f}", "" if target is None else _goal(target),
            "" if mine is None or target is None else target.verdict(mine),
        ))  # fmt: skip
    return [
        make_table("Several GPUs: µs per step, median (range of launches)",
              ("network", "batch per GPU", "GPUs", *PROGRAMS, "speedup over the faster",
               "target", ""), tuple(times)),
        make_table("Weak-scaling efficiency, T(1) / T(N)",
              ("network", "batch per GPU", "GPUs", *PROGRAMS, "dptrain within a launch", "target",
               ""), tuple(weak)),
    ]  # fmt: skip


def _rank_goals(result: RankResult) -> list[tuple[str, Target, float]]:
    """Return description, target and measured value of each target of a step on several GPUs."""
    step = targets.RANK_STEP_US.get((result.network, result.batch_size, result.ranks))
    mine, faster = result.median("dptrain"), result.times_faster
    goals = []
    if step is not None and mine is not None:
        goals.append((_goal(step, " µs"), step, mine))
    if step is not None and faster is not None:
        goals.append((_goal(targets.RANK_FASTER, "×"), targets.RANK_FASTER, faster))
    return goals


def _launches(us: Sequence[float]) -> str:
    return with_spread(float(np.median(us)), (min(us), max(us))) if us else ""


def check_table(checks: Iterable[Checked]) -> Table:
    """List the largest errors."""
    rows = tuple(
        (c.check.network, str(c.check.batch_size), c.backend, c.precision, c.check.quantity,
         f"{c.check.error:.1e}", f"{c.check.allowed:.1e}", "" if c.check.passed else "wrong")
        for c in checks
    )  # fmt: skip
    columns = ("network", "batch", "backend", "precision", "quantity", "error", "allowed", "")
    return make_table("Comparison with PyTorch in float64", columns, rows)


def headline(results: Results) -> str:
    """Summarize the results in a few lines."""
    lines = []
    if results.checks:
        passed = len(results.checks) - len(results.wrong)
        lines.append(f"{passed} of {len(results.checks)} results agree with PyTorch in float64")
    if results.limits is not None:
        rates = (f"{p} {rate / 1e12:.0f} TFLOP/s" for p, rate in results.limits.gemm.items())
        copy = f"copying {results.limits.copy / 1e12:.2f} TB/s"
        lines.append("; ".join([copy, ", ".join(rates)]).removesuffix("; "))
    for backend in dict.fromkeys(c.backend for c in results.comparisons()):
        mine = [c for c in results.comparisons() if c.backend == backend]
        reached = sum(bool(c.goals) and verdict(c.goals) == "reached" for c in mine)
        ratios = [c.ratio.value for c in mine if c.ratio is not None]
        line = f"{backend}: {reached} of {len(mine)} training steps reach their target"
        if ratios:
            line += (
                f"; {min(ratios):.2f} to {max(ratios):.2f} times as fast as PyTorch's fastest mode"
            )
        lines.append(line)
    lines += data_headline(results.data) + stream_headline(results.streams)
    lines += inference_headline(results.inference)
    lines += precision_headline(results.errors)
    compared = [row.ratio for row in results.layers if row.ratio is not None and not row.shared]
    if compared:
        reached = sum(targets.OWN_KERNEL.share(value) >= 1 for value in compared)
        line = f"{reached} of {len(compared)} layers are as fast by cuda as by cuDNN"
        if same := sum(row.shared for row in results.layers):
            line += f", {same} more are computed by the same kernels"
        lines.append(line)
    if not results.complete:
        lines.append("some programs of dptrain did not run: see the last table")
    return "\n".join(lines)


def as_json(results: Results) -> dict[str, Any]:
    """Return all results in plain types for JSON."""
    return {
        "about": results.about,
        "limits": None if results.limits is None else vars(results.limits),
        "checks": [
            {"backend": c.backend, "precision": c.precision, "passed": c.check.passed}
            | vars(c.check)
            for c in results.checks
        ],
        "training": [
            {
                "network": c.case.network, "batch_size": c.case.batch_size,
                "backend": c.backend, "precision": c.precision, "dptrain_us": c.ours.median,
                "quartiles_us": c.ours.quartiles, "steps": len(c.ours.us) * c.ours.steps,
                "torch_mode": c.mode, "ratio": None if c.ratio is None else c.ratio.value,
                "ratio_quartiles": None if c.ratio is None else (c.ratio.low, c.ratio.high),
                "verdict": verdict(c.goals),
            }
            for c in results.comparisons()
        ],
        "torch": [
            {
                "network": case.network, "batch_size": case.batch_size, "mode": mode,
                "us": laps.median, "quartiles_us": laps.quartiles,
                "steps": len(laps.us) * laps.steps,
            }
            for case in results.cases for mode, laps in case.theirs.items()
        ],
        "memory_bytes": [
            {"network": c.network, "batch_size": c.batch_size} | c.memory_bytes
            for c in results.cases
        ],
        "stages": [
            {
                **dict(zip(STAGE_CASE, case, strict=True)),
                "rows": [[getattr(s, name) for name in STAGE_ROW] for s in stages],
            }
            for case, stages in results.stages_by_case().items()
        ],
        "stage_columns": STAGE_ROW,
        "layers": [vars(row) for row in results.layers],
        "ranks": [vars(row) for row in results.ranks],
        "inference": inference_json(results.inference),
        "data": [vars(result) for result in results.data],
        "streams": [vars(result) for result in results.streams],
        "errors": [vars(error) for error in results.errors],
        "failed": results._all_failed(),
    }  # fmt: skip


def as_markdown(results: Results) -> str:
    """Return the report in Markdown."""
    return document(
        "dptrain and PyTorch on GPUs", results.about, headline(results), results.tables()
    )


def write(results: Results, json_path: Path, markdown_path: Path) -> None:
    """Write both files, replacing those of an earlier call."""
    rounded = json.loads(dump_json(as_json(results)), parse_float=lambda text: _short(float(text)))
    json_path.write_text(dump_json(rounded), encoding="utf-8")
    markdown_path.write_text(as_markdown(results), encoding="utf-8")


def _short(number: float) -> float:
    """Round to six significant digits."""
    return float(f"{number:.6g}")
