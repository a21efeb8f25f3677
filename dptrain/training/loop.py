"""The training loop: data, compute, sum, update, and now and then a look at how it goes."""

from __future__ import annotations

import gc
import math
import signal
from contextlib import ExitStack
from typing import Any

from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.signals import SIGNALS, StopRequest
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.tensorboard import FOLDER, TensorBoard
from dptrain.training.baseline import NO_BASELINE, measure_baseline, open_loader
from dptrain.training.display import Display
from dptrain.training.engines import StepResult
from dptrain.training.evaluation import score
from dptrain.training.progress import Progress
from dptrain.training.settings import Settings
from dptrain.training.setup import Job, save_checkpoint, set_up
from dptrain.training.summary import conclude, introduce


def train(config: Settings, world: World) -> dict[str, Any]:
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
    # A batch system's warning that comes before training is granted after the first step, so that a
    # job that is started again and again gets on. Ctrl-C ends it at once: nothing is lost yet.
    with StopRequest(signal.SIGUSR1) as stop:
        return train_until(stop, config, world)


def train_until(
    stop: StopRequest, config: Settings, world: World, *, brief: str | None = None
) -> dict[str, Any]:
    """`train`, with a wish to stop that may be older; it listens to all `SIGNALS` from now on.

    Args:
        stop: granted after the first step at the earliest.
        config, world: as for `train`.
        brief: show how far this is, under this name, and nothing else.
    """
    with ExitStack() as stack:
        job = set_up(config, world)
        if job.run is not None:
            stack.callback(job.run.release)
        stop.listen(*SIGNALS)
        display = Display(
            world.is_rank_zero,
            job.first_step,
            job.last_step,
            brief or "training",
            brief=bool(brief),
        )
        return make_steps(job, display, stop)


def make_steps(job: Job, display: Display, stop: StopRequest) -> dict[str, Any]:
    """Make the steps that are left, or those until `stop`, and conclude."""
    world = job.world
    progress = Progress(job.first_step, job.network.loss.targets != "values")
    with ExitStack() as stack:
        # What is there by now stays. A full collection looks at all of it, some 40,000 objects in
        # 20 ms, for which a step would wait, and with it those of all ranks.
        gc.freeze()
        stack.callback(gc.unfreeze)
        stack.enter_context(job.engine)
        introduce(job, display)
        if job.first_step >= job.last_step:
            return nothing_left(job, progress, display)
        baseline = measure_baseline(job)
        loader = stack.enter_context(
            open_loader(
                job,
                batch_size=job.config.batch_size,
                rank=world.rank,
                size=world.size,
                first=job.first_step,
                last=job.last_step,
            )
        )
        board = open_board(job)
        if board is not None:
            stack.callback(board.close)
        stack.enter_context(display)
        for number in range(job.first_step, job.last_step):
            job.engine.step(loader, job.schedule.rate(number), stop=stop.requested)
            # The step's time ends here. Of steps that are still under way a later turn tells.
            for result in job.engine.results(wait=looks_behind(job, number + 1)):
                if not math.isfinite(result.loss):
                    raise_not_finite(job, result)
                progress.add(result)
                after_step(job, progress, display, board)
            if progress.stopped:
                break
    return conclude(job, progress, display, baseline)


def nothing_left(job: Job, progress: Progress, display: Display) -> dict[str, Any]:
    """Leave the results of a run that has all its steps as they are.

    One that was killed behind its last checkpoint has none of them yet; it gets what can still be
    known.
    """
    advice = "train longer with a larger --epochs or --steps"
    if job.config.schedule == "cosine":
        # The learning rate is 0 by now, and a longer cosine schedule would make it jump.
        advice = (
            "its cosine schedule has ended, so train longer with --schedule constant, "
            "a --learning-rate and a larger --epochs or --steps"
        )
    display.say(
        f"nothing left to do: the run has made {job.first_step} of {job.last_step} steps; {advice}"
    )
    written = None if job.run is None else job.run.summary_of(job.first_step)
    written = job.world.broadcast_json(written)
    if written is not None:
        return dict(written)
    progress.score = score(job.replica, job.dataset.test, job.world)
    return conclude(job, progress, display, NO_BASELINE)


def raise_not_finite(job: Job, result: StepResult) -> None:
    """Every rank saw the same loss; together they find the first layer that broke."""
    places = job.world.all_gather_json(job.replica.first_non_finite())
    found = {rank: place for rank, place in enumerate(places) if place is not None}
    if found:
        place = next(iter(found.values()))
        ranks = [str(rank) for rank, other in found.items() if other == place]
        where = f"first in {place} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
    else:
        where = "first in the loss itself"
    job.world.agree(
        UserError(
            f"the loss is {result.loss} at step {result.step + 1}, {where}; try a learning rate "
            f"below {result.learning_rate:g}, or look for such values in the data"
        )
    )


def looks_behind(job: Job, step: int) -> bool:
    """Whether `after_step` needs parameters as they are behind `step` steps."""
    every = job.config.checkpoint_every
    at_end = step % job.epoch_steps == 0 or step == job.last_step
    return at_end or bool(every and step % every == 0)


def open_board(job: Job) -> TensorBoard | None:
    """Rank 0's file for TensorBoard, if one is asked for, with the network's graph in it."""
    run = job.run
    if not job.config.tensorboard:
        return None

    def open() -> TensorBoard | None:
        assert run is not None
        board = TensorBoard(run.path / FOLDER, done=job.first_step)
        board.graph(job.network)
        return board

    return call_on_rank_zero(job.world, open)


def after_step(job: Job, progress: Progress, display: Display, board: TensorBoard | None) -> None:
    """Tell, look at the test split, write a checkpoint: whatever this step is due for."""
    config, step = job.config, progress.step
    epoch_end = step % job.epoch_steps == 0
    last = step == job.last_step or progress.stopped
    display.step(progress)
    if job.run is not None and (step % config.log_every == 0 or last):
        job.run.metrics.append(progress.record(job.epoch_steps))
        if board is not None:
            board.record({**progress.record(job.epoch_steps), **stage_times(job)})
    due = epoch_end and (step // job.epoch_steps) % max(config.evaluate_every, 1) == 0
    if (due and config.evaluate_every) or (last and not progress.stopped):
        progress.score = score(job.replica, job.dataset.test, job.world)
        progress.scored_at = step
        if job.run is not None:
            job.run.metrics.append(progress.score_record())
        if board is not None:
            board.record(progress.score_record())
    if epoch_end and board is not None:
        for name, values in job.replica.parameters.items():
            board.histogram(step, name, values)
    if epoch_end or last:
        display.say(progress.epoch_line(job.epoch_steps, job.last_step))
    every = config.checkpoint_every
    if last or (step % every == 0 if every else epoch_end):
        save_checkpoint(job, step)
    if epoch_end:
        progress.begin_epoch()


def stage_times(job: Job) -> dict[str, float | None]:
    """Milliseconds on this rank by tag since the last line of metrics; None: nothing was timed."""
    names, rows = job.recorder.names, job.recorder.timed_rows(job.config.log_every)
    means = (rows.mean(axis=0) / 1e6).tolist() if len(rows) else [None] * len(names)
    return {f"time_ms/{name}": mean for name, mean in zip(names, means, strict=True)}
