"""The last lines of a run: the result on the test data, where the time went, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dptrain.measure.statistics import share
from dptrain.texts import command_line
from dptrain.training.evaluation.regression import r2_remark
from dptrain.training.job import Job
from dptrain.training.output.progress import Progress

RESULTS = {
    "test_top5_accuracy": "top-5 accuracy",
    "test_label_accuracy": "label accuracy",
    "test_auc": "AUC",
    "test_rmse": "RMSE",
    "test_r2": "R²",
    "test_mae": "MAE",
}
"""Labels of further results on the test data, in the order in which they are printed."""

STEP_PARTS = {
    "compute": "computation",
    "transfer": "communication",
    "imbalance": "waiting",
    "without_core": "without a core",
    "data_wait": "waiting for data",
    "other": "between stages",
}
"""Labels of the parts of a step, by the fields of `Parts`; the three largest are printed."""

BETWEEN_STEPS = {"checkpoint": "checkpoints", "evaluation": "evaluation"}
"""Labels of what happens between steps, by the fields of `Parts`."""

SMALL, SMALL_BETWEEN = 0.005, 0.02
"""Shares of a step, and of all time, that are too small to be printed."""


def closing_lines(job: Job, progress: Progress, summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the last lines of a run.

    Args:
        job: the job.
        progress: its state.
        summary: as in ``summary.json``.
    """
    lines = [_early_end(progress), _until_accuracy(job, progress), test_line(job, progress)]
    lines.append(time_line(summary))
    if job.run is not None:
        if progress.stopped:
            lines.append(
                f"stopped on request after step {progress.step}; "
                f"continue with: {command_line('train', '--resume', job.run.path)}"
            )
        lines.append(f"report: {command_line('report', job.run.path)}")
    return tuple(filter(None, lines))


def test_line(job: Job, progress: Progress) -> str:
    """Return the results on the test data, and of which epoch the parameters are; "" if none."""
    score, results = progress.test_score, progress.test_results
    best = _best(job, progress)
    if score is None:
        return best and f"best parameters: {best}"
    labels = {**RESULTS, **{f"test_{name}": name for name in score.metrics}}
    known = [(label, results.get(name)) for name, label in labels.items()]
    more = [
        f"{label} {value:.1%}" if label.endswith("accuracy") else f"{label} {value:.4g}"
        for label, value in known
        if value is not None
    ]
    samples = count(score.samples, "sample")
    if score.accuracy is None:
        found = ", ".join(more) or f"loss {score.loss:.4g}"
        found += f"{r2_remark(results.get('test_r2'))} ({samples})"
    else:
        interval = share(score.accuracy, score.samples)
        of = " of all labels of a sample together" if "test_label_accuracy" in results else ""
        found = ", ".join([
            f"accuracy{of} {score.accuracy:.1%} ({100 * interval.low:.1f}–{interval.high:.1%}, "
            f"95% interval, {samples})",
            *more,
        ])  # fmt: skip
    return f"test {found}{best and f'; parameters of {best}, the best one'}"


def _best(job: Job, progress: Progress) -> str:
    """Return the epoch of the best parameters by the validation data; "" if none was selected."""
    step = progress.selection.best_step
    return f"epoch {step / job.spec.epoch_steps:g}" if step >= 0 else ""


def time_line(summary: Mapping[str, Any]) -> str:
    r"""Return where the time went, in one line; "" if no step was measured.

    Example:
        >>> parts = {"compute": 2.0, "transfer": 0.1, "checkpoint": 0.4}
        >>> step_parts = {"typical": {**parts, "checkpoint": 0.0}, "all_steps": parts}
        >>> step_ms = {"mean": 2.53, "median": 2.11}
        >>> print(time_line({"step_ms": step_ms, "step_parts": step_parts}).replace("; ", "\n"))
        a step 2.53 ms (median 2.11), typical: 95% computation, 5% communication
        all time: 16% checkpoints
    """
    step, parts = summary["step_ms"], summary["step_parts"]
    if step is None:
        return ""
    mean, median = step["mean"], step["median"]
    line = f"a step {mean:.3g} ms" if mean < 1000 else f"a step {mean / 1000:.3g} s"
    line += f" (median {median if mean < 1000 else median / 1000:.3g})"
    if parts is None:
        return line
    line += f", typical: {_shares(parts['typical'], STEP_PARTS, SMALL, most=3)}"
    between = _shares(parts["all_steps"], BETWEEN_STEPS, SMALL_BETWEEN, most=2)
    return f"{line}; all time: {between}" if between else line


def _shares(
    parts: Mapping[str, float | None], labels: Mapping[str, str], least: float, most: int
) -> str:
    """Return the largest shares of some parts, in the order of the labels."""
    known = {name: value for name, value in parts.items() if value is not None}
    total = sum(known.values()) or 1.0
    found = {label: known.get(name, 0.0) / total for name, label in labels.items()}
    largest = sorted(found.values(), reverse=True)[:most][-1]
    return ", ".join(
        f"{value:.0%} {label}" for label, value in found.items() if value >= max(least, largest)
    )


def _early_end(progress: Progress) -> str:
    found = progress.selection
    if not found.is_out_of_patience:
        return ""
    return (
        f"training ended after step {progress.step}: {count(found.since_best, 'evaluation')} "
        "without an improvement"
    )


def _until_accuracy(job: Job, progress: Progress) -> str:
    """Return whether and when the requested accuracy was reached; "" if none was requested."""
    wanted, reached = job.spec.until_accuracy, progress.selection.reached
    if not wanted:
        return ""
    if reached is None:
        return f"an accuracy of {wanted:.2%} was not reached in {count(progress.step, 'step')}"
    took = "" if job.first_step else f" and {reached.time_s:.3g} s of steps"
    return (
        f"reached an accuracy of {wanted:.2%} after {reached.epochs:g} "
        f"epoch{'s' * (reached.epochs != 1)}{took}"
    )


def count(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
