"""The first lines and the last ones: what is about to happen, and what came of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from dptrain import __version__
from dptrain.measure.attribution import Attribution, attribute, rank_times
from dptrain.measure.recorder import STEP
from dptrain.measure.tables import notes_table, stage_table
from dptrain.scaling.efficiency import Baseline, Efficiency, efficiency
from dptrain.scaling.tables import efficiency_table
from dptrain.training.display import Display
from dptrain.training.progress import Progress
from dptrain.training.setup import Job, possible_efficiency


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def introduce(job: Job, display: Display) -> None:
    """Say what will be trained on what, how, and where it goes."""
    config, world = job.config, job.world
    memory = sum(job.plan.memory.values()) / 2**20
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
        display.say(f"run: {job.run.path}{resumed}")
    for note in job.notes:
        display.say(f"note: {note}; going on from the one before")


def conclude(job: Job, progress: Progress, display: Display, baseline: Baseline) -> dict[str, Any]:
    """Combine what all ranks measured, print the tables, write ``summary.json``."""
    world = job.world
    full = job.recorder.rows(job.config.batch_size)
    column = job.recorder.names.index(STEP)
    step_times = full[:, column] if len(full) else job.recorder.rows()[:, column]
    gathered = world.all_gather_json(rank_times(job.recorder))
    attribution = attribute(job.plan, gathered, job.replica.notes)
    possible = possible_efficiency(world, job.plan.setting.threads)
    scaling = efficiency(baseline, step_times, world.size, possible=possible)
    summary = _summary(job, progress, attribution, scaling, step_times)
    if job.recorder.steps:
        waits = job.replica.memory.asynchronous
        timed = len(job.recorder.timed_rows()) if waits else None
        display.say(stage_table(attribution, ranks=world.size, timed=timed))
        if notes := notes_table(attribution):
            display.say(notes)
        if scaling.weak is not None:
            steps = len(step_times)
            display.say(efficiency_table(scaling, size=world.size, steps=steps))
    if job.run is not None:
        job.run.write_summary(summary)
        if progress.score is not None:
            display.say(f"test: {_test_line(progress)}")
        if progress.stopped:
            display.say(
                f"stopped on request after step {progress.step}; "
                f"go on with: dptrain train --resume {job.run.path}"
            )
        display.say(f"summary: {job.run.path / 'summary.json'}")
    return summary


def _test_line(progress: Progress) -> str:
    score = progress.score
    assert score is not None
    accuracy = "" if score.accuracy is None else f"accuracy {score.accuracy:.2%}, "
    return f"{accuracy}loss {score.loss:.4g} on {_count(score.samples, 'sample')}"


def _summary(
    job: Job,
    progress: Progress,
    attribution: Attribution,
    scaling: Efficiency,
    step_times: np.ndarray,
) -> dict[str, Any]:
    config, score = job.config, progress.score
    quartiles = np.percentile(step_times, [25, 75]) / 1e6 if len(step_times) else [0.0, 0.0]
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
        "train_loss": None if not job.recorder.steps else progress.last_train_loss,
        "test_loss": None if score is None else score.loss,
        "test_accuracy": None if score is None else score.accuracy,
        "images_per_s": progress.images_per_s,
        "step_time_ms": float(np.median(step_times)) / 1e6 if len(step_times) else None,
        "step_time_quartiles_ms": [float(value) for value in quartiles],
        "first_step_s": progress.first_step_s,
        "scaling": {
            "weak": None if scaling.weak is None else scaling.weak.value,
            "strong": None if scaling.strong is None else scaling.strong.value,
            "possible": scaling.possible,
            "weak_interval": scaling.weak and [scaling.weak.low, scaling.weak.high],
            "strong_interval": scaling.strong and [scaling.strong.low, scaling.strong.high],
            "steps_alone": 0 if scaling.weak is None else scaling.weak.n,
            "steps_together": len(step_times),
        },
        "stages": [asdict(stage) for stage in attribution.stages],
        "step": {
            name: asdict(getattr(attribution, name))
            for name in ("step", "data_wait", "exposed", "hidden", "other")
        },
        "memory_bytes": job.plan.memory,
    }
