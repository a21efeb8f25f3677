"""The first lines and the last ones: what is about to happen, and what came of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from dptrain import __version__
from dptrain.measure.analysis import MS, Measured, spread, stage_profiles
from dptrain.measure.efficiency import Baseline, Efficiency, efficiency, efficiency_table
from dptrain.measure.gathering import gather_measured
from dptrain.measure.recorder import HIDDEN
from dptrain.measure.tables import closing_table, notes_table
from dptrain.training.display import Display
from dptrain.training.engines import FIRST_TIMED
from dptrain.training.progress import Progress
from dptrain.training.setup import Job, possible_efficiency


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def introduce(job: Job, display: Display) -> None:
    """Say what will be trained on what, how, and where it goes."""
    config, world = job.config, job.world
    memory = sum(job.memory_bytes.values()) / 2**20
    on_gpu = job.replica.memory.on_gpu
    workers = "1 GPU" if on_gpu else _count(job.plan.setting.threads, "thread")
    display.say(
        f"dptrain {__version__}: {job.network.name} ({job.network.num_parameters:,} parameters, "
        f"{memory:.1f} MiB a rank) with {config.backend} {job.plan.precision}"
    )
    display.say(f"data: {job.dataset.description}")
    display.say(
        f"{_count(world.size, 'rank')} x {workers}, {config.strategy}; global "
        f"minibatch {config.batch_size}, up to {job.local_batch} a rank; {config.optimizer}, "
        f"learning rate {job.schedule.rate(job.first_step):g} ({config.schedule})"
    )
    if job.run is not None:
        resumed = f", resumed after step {job.first_step}" if job.first_step else ""
        again = ", begun again: it had no checkpoint yet" if config.resume else ""
        display.say(f"run: {job.run.path}{resumed or again}")
    for note in job.notes:
        display.say(f"note: {note}; going on from the one before")


def conclude(job: Job, progress: Progress, display: Display, baseline: Baseline) -> dict[str, Any]:
    """Combine what all ranks measured, print the tables, write ``summary.json``."""
    world, threads = job.world, job.plan.setting.threads
    possible = possible_efficiency(world, threads)
    measured = None
    if job.recorder.steps:
        ahead = job.engine.max_steps_in_flight
        # Behind those that are captured, if there are any.
        skip = (
            FIRST_TIMED
            if job.replica.memory.asynchronous and job.recorder.steps > 2 * FIRST_TIMED
            else 0
        )
        measured = gather_measured(world, job.recorder, ahead=ahead, skip=skip)
    summary = None
    if world.is_rank_zero:
        step_times = np.zeros(0) if measured is None else measured.slowest / MS
        scaling = efficiency(baseline, step_times, world.size, possible=possible)
        summary = _summary(job, progress, measured, scaling)
        if measured is not None:
            _show(job, measured, scaling, display)
    if job.run is not None and summary is not None:
        job.run.write_summary(summary)
        if progress.score is not None:
            display.say(f"test: {_test_line(progress)}")
        if progress.stopped:
            display.say(
                f"stopped on request after step {progress.step}; "
                f"go on with: dptrain train --resume {job.run.path}"
            )
        display.say(f"summary: {job.run.path / 'summary.json'}")
    return dict(world.broadcast_json(summary))


def _show(job: Job, measured: Measured, scaling: Efficiency, display: Display) -> None:
    """Print where a step went, how stages are computed, and how the job scales."""
    size = job.world.size
    if measured.by_stage:
        steps = "steps"
        if job.replica.memory.asynchronous:
            steps = f"{measured.timed.shape[1]} steps that were timed in order"
        stages = stage_profiles(job.plan, measured, None, job.replica.notes)
        hidden = float(measured.column(HIDDEN).mean())
        display.say(closing_table(measured.parts, stages, hidden, ranks=size, steps=steps))
        if notes := notes_table(stages):
            display.say(notes)
    else:
        display.say(
            f"no step was timed layer by layer: the {FIRST_TIMED + 1}th of a process is the first; "
            "dptrain profile times as many as it is told"
        )
    if scaling.weak is not None:
        display.say(efficiency_table(scaling, size=size, steps=measured.steps.shape[1]))


def _test_line(progress: Progress) -> str:
    score = progress.score
    assert score is not None
    accuracy = "" if score.accuracy is None else f"accuracy {score.accuracy:.2%}, "
    return f"{accuracy}loss {score.loss:.4g} on {_count(score.samples, 'sample')}"


def _summary(
    job: Job, progress: Progress, measured: Measured | None, scaling: Efficiency
) -> dict[str, Any]:
    config, score = job.config, progress.score
    return {
        "network": job.network.name,
        "parameters": job.network.num_parameters,
        "data": config.data,
        "backend": config.backend,
        "precision": job.plan.precision,
        "strategy": config.strategy,
        "ranks": job.world.size,
        "threads": job.plan.setting.threads,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "steps": progress.step,
        "stopped": progress.stopped,
        "train_loss": None if measured is None else progress.last_train_loss,
        "test_loss": None if score is None else score.loss,
        "test_accuracy": None if score is None else score.accuracy,
        "samples_per_s": progress.samples_per_s,
        "first_step_s": progress.first_step_s,
        "scaling": {
            "weak": None if scaling.weak is None else scaling.weak.value,
            "strong": None if scaling.strong is None else scaling.strong.value,
            "possible": scaling.possible,
            "weak_interval": scaling.weak and [scaling.weak.low, scaling.weak.high],
            "strong_interval": scaling.strong and [scaling.strong.low, scaling.strong.high],
            "steps_alone": scaling.alone,
            "steps_together": 0 if measured is None else measured.steps.shape[1],
        },
        "memory": job.memory_bytes,
        **_times(job, measured),
    }


def _times(job: Job, measured: Measured | None) -> dict[str, Any]:
    """What a profile has, of the steps of training; nulls of what no step tells."""
    none: dict[str, Any] = {"step_ms": None, "parts": None, "hidden_ms": None, "stages": []}
    if measured is None:
        return none
    step_ms = asdict(spread(measured.slowest))
    if not measured.by_stage:
        return {**none, "step_ms": step_ms}
    stages = stage_profiles(job.plan, measured, None, job.replica.notes)
    return {
        "step_ms": step_ms,
        "parts": asdict(measured.parts),
        "hidden_ms": float(measured.column(HIDDEN).mean()),
        "stages": [asdict(stage) for stage in stages],
    }
