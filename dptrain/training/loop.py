"""The training loop: data, compute, sum, update, and now and then a look at how it goes."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import numpy as np

from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World
from dptrain.config import TrainConfig
from dptrain.data.loader import Loader
from dptrain.errors import UserError
from dptrain.scaling.baseline import Baseline, time_alone
from dptrain.training.display import Display
from dptrain.training.evaluation import score
from dptrain.training.progress import Progress
from dptrain.training.setup import Job, save_checkpoint, set_up
from dptrain.training.summary import conclude, introduce


def train(config: TrainConfig, world: World) -> dict[str, Any]:
    """Train as `config` says and leave a run directory behind.

    Args:
        config: what to train and how.
        world: the ranks; every rank calls this.

    Returns:
        The summary that rank 0 also writes to ``summary.json``. Its ``stopped`` says that a signal
        ended training early, at a step boundary and with a checkpoint.

    Raises:
        UserError: something the user can mend; the same on every rank.
    """
    job = set_up(config, world)
    progress = Progress(job.first_step)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        display = Display(world.is_main, job.first_step, job.last_step)
        introduce(job, display)
        baseline = measure_baseline(job)
        loader = stack.enter_context(_loader(job))
        stack.enter_context(display)
        while progress.step < job.last_step and not progress.stopped:
            job.recorder.begin()
            batch = next(loader)
            job.recorder.waited()
            rate = job.schedule.rate(batch.step)
            result = job.stepper.compute(batch, stop=stop.requested)
            if not math.isfinite(result.loss):
                raise_not_finite(job, batch.step, result.loss, rate)
            job.stepper.update(rate)
            step_ns = job.stepper.end(batch)
            # The step ends here; what follows is outside of its time.
            progress.add(result, rate, step_ns)
            after_step(job, progress, display)
    return conclude(job, progress, display, baseline)


def _loader(job: Job) -> Loader:
    return Loader(
        job.dataset.train,
        input_shape=job.dataset.input_shape,
        target_shape=job.dataset.target_shape,
        batch_size=job.config.batch_size,
        seed=job.config.seed,
        rank=job.world.rank,
        size=job.world.size,
        first_step=job.first_step,
        last_step=job.last_step,
        augmentation=job.augmentation,
        depth=job.config.prefetch,
    )


def measure_baseline(job: Job) -> Baseline:
    """Rank 0 computes alone, a rank's share and then the whole minibatch; the others rest."""
    none = np.zeros(0, np.int64)
    steps = job.config.baseline_steps
    if not steps:
        return Baseline(none, none)
    times = [none, none]
    if job.world.is_main:
        for i, batch_size in enumerate((job.local_batch, job.config.batch_size)):
            times[i] = time_alone(
                job.backend,
                job.plan,
                job.dataset.train,
                batch_size,
                steps=steps,
                seed=job.config.seed,
            )
    job.world.barrier()
    return Baseline(*times)


def raise_not_finite(job: Job, step: int, loss: float, rate: float) -> None:
    """Every rank saw the same loss; together they find the first layer that broke."""
    places = job.world.all_gather_json(job.replica.first_not_finite())
    found = {rank: place for rank, place in enumerate(places) if place is not None}
    if found:
        place = next(iter(found.values()))
        ranks = [str(rank) for rank, other in found.items() if other == place]
        where = f"first in {place} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
    else:
        where = "first in the loss itself"
    job.world.agree(
        UserError(
            f"the loss is {loss} at step {step + 1}, {where}; "
            f"try a learning rate below {rate:g}, or look for such values in the data"
        )
    )


def after_step(job: Job, progress: Progress, display: Display) -> None:
    """Tell, look at the test split, write a checkpoint: whatever this step is due for."""
    config, step = job.config, progress.step
    epoch_end = step % job.epoch_steps == 0
    last = step == job.last_step or progress.stopped
    display.step(progress)
    if job.run is not None and (step % config.log_every == 0 or last):
        job.run.metrics.append(progress.record(job.epoch_steps))
    due = epoch_end and (step // job.epoch_steps) % max(config.evaluate_every, 1) == 0
    if (due and config.evaluate_every) or (last and not progress.stopped):
        progress.score = score(job.replica, job.dataset.test, job.world)
        if job.run is not None:
            job.run.metrics.append(progress.score_record())
    if epoch_end or last:
        display.say(progress.epoch_line(job.epoch_steps, job.last_step))
    every = config.checkpoint_every
    if last or (step % every == 0 if every else epoch_end):
        save_checkpoint(job, step)
    if epoch_end:
        progress.begin_epoch()
