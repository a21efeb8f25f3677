"""The results of a sweep: of its run directories, and as a row of its CSV file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.errors import UserError, shown
from dptrain.experiments.case_runs import finished_run
from dptrain.experiments.ledger import OUTPUT, read_settings
from dptrain.experiments.sweep_cases import Case, point_name
from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.measure.student import student
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import Phase
from dptrain.training.persistence.rundir import RunDirectory

NAME = "sweep"
"""Name of the files."""

FORMER = "variants"
"""Name of the files of a study of variants, which earlier versions wrote."""

Stages = Sequence[Mapping[str, Any]]
"""The stages of a step as in ``summary.json``."""


@dataclass(frozen=True)
class KindTime:
    """Time of all stages of one kind of operation.

    Attributes:
        kind: layers that are computed together, ``conv+relu+pool``, or ``loss`` or ``update``.
        forward_ms, backward_ms: sums over stages of the median over steps of the mean over ranks.
        share, cumulative_share: share of the forward pass; the slowest kind is first.
        forward_bytes: bytes that a forward pass reads and writes.
    """

    kind: str
    forward_ms: float
    backward_ms: float
    share: float
    cumulative_share: float
    forward_bytes: int


@dataclass(frozen=True)
class PointResult:
    """Results of a point over its seeds. What no run has measured is None.

    Attributes:
        point: values by axis; an axis that is not changed is missing.
        runs: number of runs that made all their steps.
        failed: number of runs that ended with an error, such as a loss that is not finite.
        score: mean over the seeds of the accuracy, or of the loss for networks that predict values,
            with its 95% interval by Student's distribution; None without results.
        scored: ``validation accuracy``, ``test accuracy``, ``validation loss`` or ``test loss``.
        why: the reason why the network is not possible or a run failed; empty otherwise.
        step_ms, step_q1_ms, step_q3_ms: median over the seeds of the median step and its quartiles.
        training_s: mean over the seeds of steps × median step, in s.
        memory_bytes: memory of a rank according to the plan.
        parameters: number of parameters.
        conv_forward_ms, conv_forward_share: time of the stages with a convolution in a forward
            pass, as in `KindTime`, and their share of the forward pass.
        conv_step_ms, conv_step_share: the same for a whole step, with backward and update.
        kinds: times by kind of operation, the slowest first; not in the CSV file.
    """

    point: Mapping[str, str]
    runs: int
    failed: int
    score: Estimate | None
    scored: str
    why: str = ""
    step_ms: float | None = None
    step_q1_ms: float | None = None
    step_q3_ms: float | None = None
    training_s: float | None = None
    memory_bytes: int | None = None
    parameters: int | None = None
    conv_forward_ms: float | None = None
    conv_forward_share: float | None = None
    conv_step_ms: float | None = None
    conv_step_share: float | None = None
    kinds: tuple[KindTime, ...] = ()

    @property
    def name(self) -> str:
        """The values in words."""
        return point_name(self.point)


MEASURED = tuple(field.name for field in fields(PointResult) if field.default is None)
"""Attributes of `PointResult` that are a number, or None if no run has measured it."""


def failure(folder: Path, case: Case) -> Path:
    """Return the file with the error of a case that failed."""
    return folder / "runs" / f"{case.slug}.failed"


def score(values: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the name and the value by which points are compared.

    Validation data comes before test data, on which settings should not be selected.
    """
    for name in ("validation_accuracy", "test_accuracy", "validation_loss", "test_loss"):
        if values.get(name) is not None:
            return name.replace("_", " "), float(values[name])
    return "test loss", None


def point_result(folder: Path, cases: Sequence[Case]) -> PointResult:
    """Return the results of the cases of one point that were trained."""
    paths = [finished_run(folder, case.slug) for case in cases]
    summaries = [RunDirectory(path).read_summary() for path in paths if path is not None]
    failures = [path for path in (failure(folder, case) for case in cases) if path.exists()]
    found = [score(summary) for summary in summaries]
    scores = [value for _, value in found if value is not None]
    why = cases[0].why or (failures[0].read_text("utf-8").strip() if failures else "")
    common = (cases[0].point, len(summaries), len(failures))
    scored = found[0][0] if found else ""
    result = (mean_over_seeds(scores) if scores else None, scored, why)
    if not summaries:
        return PointResult(*common, *result)
    timed = [s for s in summaries if s["step_ms"] is not None]
    step = {
        name: float(np.median([s["step_ms"][name] for s in timed])) if timed else None
        for name in ("median", "q1", "q3")
    }
    times = [s["steps"] * s["step_ms"]["median"] / 1e3 for s in timed]
    return PointResult(
        *common,
        *result,
        step_ms=step["median"],
        step_q1_ms=step["q1"],
        step_q3_ms=step["q3"],
        training_s=float(np.mean(times)) if times else None,
        memory_bytes=sum(summaries[0]["memory"].values()),
        parameters=summaries[0]["parameters"],
        **_stage_times(_stages_over_runs([s["stages"] for s in summaries])),
    )


def _stages_over_runs(runs: Sequence[Stages]) -> Stages:
    """Return the stages of the runs of one network with the median over runs of their times.

    On a GPU, few steps contain none that was timed by stage: such a run has no stages.
    """
    runs = [stages for stages in runs if stages]
    times: dict[str, list[float]] = {}
    for stage in (stage for stages in runs for stage in stages):
        times.setdefault(stage["name"], []).append(stage["time_ms"]["median"])
    return [
        {**stage, "time_ms": {"median": float(np.median(times[stage["name"]]))}}
        for stage in (runs[0] if runs else ())
    ]


def _stage_times(stages: Stages) -> dict[str, Any]:
    """Return the attributes of `PointResult` that times of stages result in."""
    forward = [stage for stage in stages if stage["phase"] == Phase.FORWARD.value]
    if not _time(forward):
        return {}
    return {
        "conv_forward_ms": _time(forward, Conv2d.kind),
        "conv_forward_share": _time(forward, Conv2d.kind) / _time(forward),
        "conv_step_ms": _time(stages, Conv2d.kind),
        "conv_step_share": _time(stages, Conv2d.kind) / _time(stages),
        "kinds": kind_times(stages),
    }


def _time(stages: Stages, kind: str | None = None) -> float:
    """Return the time in ms of all stages, or of the stages that contain a kind of layer."""
    chosen = [s for s in stages if kind is None or kind in s["kind"].split("+")]
    return float(sum(stage["time_ms"]["median"] for stage in chosen))


def kind_times(stages: Stages) -> tuple[KindTime, ...]:
    """Return the times of the stages by kind, the slowest in a forward pass first."""
    forward: dict[str, list[Mapping[str, Any]]] = {}
    for stage in stages:
        if stage["phase"] == Phase.FORWARD.value:
            forward.setdefault(stage["kind"], []).append(stage)
    whole, cumulative, found = sum(map(_time, forward.values())), 0.0, []
    for kind, own in sorted(forward.items(), key=lambda item: -_time(item[1])):
        cumulative += _time(own)
        moved = int(sum(stage["bytes_moved"] for stage in own))
        back = _time([s for s in stages if s["kind"] == kind]) - _time(own)
        found.append(
            KindTime(kind, _time(own), back, _time(own) / whole, cumulative / whole, moved)
        )
    return tuple(found)


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean with its 95% interval by Student's distribution.

    The interval of fewer than `FEWEST` values is infinite.

    Example:
        >>> found = mean_over_seeds([0.9, 0.92, 0.94])
        >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
        (0.92, 0.87, 0.97)
    """
    n, mean = len(values), float(np.mean(values))
    if n < FEWEST:
        return Estimate(mean, -math.inf, math.inf, n)
    half = student(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def record(result: PointResult, axes: Sequence[str]) -> dict[str, Any]:
    """Return the result as plain values: a row of the CSV file."""
    estimate = result.score
    has_interval = estimate is not None and math.isfinite(estimate.low)
    return {
        **{name: result.point.get(name, "") for name in axes},
        "runs": result.runs,
        "failed": result.failed,
        "scored": result.scored,
        "score": None if estimate is None else estimate.value,
        "low": estimate.low if estimate is not None and has_interval else None,
        "high": estimate.high if estimate is not None and has_interval else None,
        **{name: getattr(result, name) for name in MEASURED},
        "why": result.why,
    }


def read_results(folder: Path) -> tuple[dict[str, Any], list[PointResult]]:
    """Return the settings and the results of a sweep that has ended.

    Raises:
        UserError: the sweep has not ended, an earlier version wrote it as a study of variants, or a
            file cannot be read.
    """
    if not (folder / f"{NAME}.json").exists():
        raise UserError(
            f"{folder} contains a study of variants of an earlier version of dptrain, whose "
            f"results are in {FORMER}.csv; for a page repeat its `dptrain study variants` command "
            f"with another {OUTPUT}"
        )
    if not (folder / f"{NAME}.csv").exists():
        raise UserError(
            f"{folder} contains a sweep without results, because not all runs have ended; repeat "
            "its `dptrain study` command without --part"
        )
    facts = read_settings(folder, NAME, "repeat its `dptrain study` command with")
    try:
        rows = list(csv.DictReader(io.StringIO((folder / f"{NAME}.csv").read_text("utf-8"))))
        if not rows or any(None in (*row, *row.values()) for row in rows):
            raise ValueError("a row is not complete")
        return facts, [_point(row, list(facts["axes"])) for row in rows]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"cannot read {folder / f'{NAME}.csv'} ({shown(error)}); repeat the `dptrain study` "
            "command, which writes it again"
        ) from None


def _point(row: Mapping[str, str], axes: Sequence[str]) -> PointResult:
    """Return the result of a row of the CSV file; earlier versions wrote fewer columns."""
    runs = int(row["runs"])
    low, high = (float(row[name]) if row[name] else sign * math.inf
                 for name, sign in (("low", -1), ("high", 1)))  # fmt: skip
    numbers: dict[str, Any] = {
        name: (int if name in ("memory_bytes", "parameters") else float)(row[name])
        for name in MEASURED
        if row.get(name)
    }
    return PointResult(
        point={name: row[name] for name in axes if row[name]},
        runs=runs,
        failed=int(row["failed"]),
        score=Estimate(float(row["score"]), low, high, runs) if row["score"] else None,
        scored=row["scored"],
        why=row.get("why") or "",
        **numbers,
    )
