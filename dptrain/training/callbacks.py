"""Functions that run during training: user functions, progress, metrics and checkpoints.

Callbacks run on every rank, in the order in which they were passed to the trainer. A callback that
communicates must do so on every rank. A callback may end training with `Trainer.stop`, on any rank,
and set the learning rate with `Trainer.set_learning_rate`, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from dptrain.comm.collective import call_on_rank_zero
from dptrain.errors import UserError
from dptrain.measure.step_record import CHECKPOINT
from dptrain.measure.tensorboard import FOLDER, TensorBoard
from dptrain.runs.settings import NO_LOGGER
from dptrain.training.history import Record
from dptrain.training.output.board import (
    TIMES,
    hyperparameters,
    layer_memory,
    layer_times,
    write_activations,
)
from dptrain.training.output.display import Display
from dptrain.training.output.loggers import LOGGERS, RunLogger, numbers
from dptrain.training.persistence.checkpoints import replica_arrays
from dptrain.training.persistence.snapshots import save_state

if TYPE_CHECKING:
    from dptrain.training.engines import StepResult
    from dptrain.training.output.summary import Conclusion
    from dptrain.training.trainer import Trainer


class Callback:
    """Base class: every method does nothing; a subclass overrides those that it needs."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Run before the first step of `Trainer.fit`."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Run after a step. `result` has the step number, the loss and more."""

    def on_shares(self, trainer: Trainer) -> None:
        """Run when ranks have received unequal shares of the minibatches: `trainer.job.shares`."""

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        """Run after an epoch, and after the last step; `record` is the newest of the history."""

    def on_fit_end(self, trainer: Trainer, conclusion: Conclusion) -> None:
        """Run after the last step of `Trainer.fit`, unless an error ended it."""

    def close(self) -> None:
        """Release resources; runs at the end of `Trainer.fit`, also if an error ended it."""

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        """Return True if the parameters are read after step number `step`, counted from 1.

        A GPU has several steps in progress at a time. The trainer then waits for all of them. By
        default they are read at the end of an epoch if the class has `on_epoch`.
        """
        has_on_epoch = type(self).on_epoch is not Callback.on_epoch
        return has_on_epoch and step % trainer.job.spec.epoch_steps == 0


class AfterStep(Callback):
    """Call a function after every `every` steps.

    Args:
        function: called with the trainer and a `StepResult`. It may read `trainer.parameters`.
            `trainer.step` is the number of completed steps; `result.step` counts from 0.
        every: number of steps between two calls, at least 1.

    Raises:
        UserError: `every` is not a whole number of at least 1.

    Examples:
        >>> losses = []
        >>> callback = AfterStep(lambda trainer, result: losses.append(result.loss), every=10)
    """

    def __init__(self, function: Callable[[Trainer, StepResult], Any], every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise UserError(f"every is {every!r}; expected a whole number of at least 1")
        self._function, self._every = function, every

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.step % self._every == 0:
            self._function(trainer, result)

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return step % self._every == 0


class AfterEpoch(Callback):
    """Call a function after every epoch, and after the last step if training ends within one.

    Args:
        function: called with the trainer and the newest record of its history, in which values that
            were not measured are None.

    Examples:
        >>> callback = AfterEpoch(lambda trainer, record: print(record["train_loss"]))
    """

    def __init__(self, function: Callable[[Trainer, Record], Any]) -> None:
        self._function = function

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        self._function(trainer, record)


class Progress(Callback):
    """Show the progress: three lines, a bar on a terminal, a line per epoch, and the results.

    Of more than ten epochs, some have a line; ``metrics.jsonl`` and the report have all.

    Args:
        verbose: print all settings and all epochs, and tables of where a step spends its time and
            how the job scales; the report of the run has them too.
        name: show a bar with this name and nothing else.
    """

    def __init__(self, *, verbose: bool = False, name: str = "") -> None:
        self._verbose, self._name = verbose, name
        self._display: Display | None = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        from dptrain.training.output.summary import introduce

        job = trainer.job
        self._display = Display(
            job.world.is_rank_zero,
            trainer.step,
            job.spec.steps,
            self._name or "training",
            epoch_steps=None if self._name else job.spec.epoch_steps,
            brief=bool(self._name),
        )
        introduce(job, self._display, trainer.step, verbose=self._verbose)
        self._display.__enter__()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        assert self._display is not None
        self._display.step(trainer.progress)

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return False

    def on_shares(self, trainer: Trainer) -> None:
        assert self._display is not None
        self._display.print(f"step {trainer.step}  shares of a minibatch: {trainer.job.shares}")

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        assert self._display is not None
        spec = trainer.job.spec
        number, line = math.ceil(trainer.step / spec.epoch_steps), trainer.progress.epoch_line(spec)
        self._display.epoch(number, line, always=self._verbose or trainer.is_last_step)

    def on_fit_end(self, trainer: Trainer, conclusion: Conclusion) -> None:
        assert self._display is not None
        self._display.__exit__(None, None, None)
        for part in (*(conclusion.details if self._verbose else ()), *conclusion.lines):
            self._display.print(part)

    def close(self) -> None:
        if self._display is not None:
            self._display.__exit__(None, None, None)


class MetricsLog(Callback):
    """Write ``metrics.jsonl`` and, if the setting `tensorboard` is on, files for TensorBoard."""

    def __init__(self) -> None:
        self._board: TensorBoard | None = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        job = trainer.job
        if not job.spec.tensorboard:
            return

        def open_board() -> TensorBoard:
            assert job.run is not None
            board = TensorBoard(job.run.path / FOLDER, done=trainer.step)
            board.hyperparameters(hyperparameters(job.spec))
            board.graph(job.network)
            return board

        self._board = call_on_rank_zero(job.world, open_board)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        job = trainer.job
        if job.run is None:
            return
        if trainer.step % job.spec.log_every and not trainer.is_last_step:
            return
        record = trainer.progress.record(job.spec)
        job.run.metrics.append(record)
        if self._board is not None:
            self._board.record({**record, **stage_times(trainer)})

    def on_shares(self, trainer: Trainer) -> None:
        job = trainer.job
        if job.run is not None:
            epoch, shares = trainer.step / job.spec.epoch_steps, job.shares.fractions
            job.run.metrics.append({"step": trainer.step, "epoch": epoch, "shares": shares})

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        job = trainer.job
        if job.run is not None:
            job.run.metrics.append(record)
        if self._board is None:
            return
        self._board.record(record)
        if trainer.step % job.spec.epoch_steps == 0:
            for name, values in job.replica.parameters.items():
                # The prefix keeps the histograms in a group of their own, after the loss.
                self._board.histogram(trainer.step, f"parameters/{name}", values)
            write_activations(self._board, job, trainer.step)

    def on_fit_end(self, trainer: Trainer, conclusion: Conclusion) -> None:
        job, record = trainer.job, trainer.progress.test_record(trainer.job.spec)
        if job.run is None or record is None:
            return
        job.run.metrics.append(record)
        if self._board is not None:
            self._board.record(record)
            self._board.layers(
                trainer.step, layer_times(job.plan, stage_times(trainer)), layer_memory(job.plan)
            )
            self._board.end_session()

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        # Histograms, on every rank alike.
        spec = trainer.job.spec
        return spec.tensorboard and step % spec.epoch_steps == 0

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


class ExperimentLog(Callback):
    """Record settings, metrics of epochs and results as the setting `logger` states."""

    def __init__(self) -> None:
        self._logger: RunLogger | None = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        job = trainer.job
        if job.spec.logger == NO_LOGGER:
            return

        def open_logger() -> RunLogger:
            assert job.run is not None
            return LOGGERS[job.spec.logger](job.run.path, hyperparameters(job.spec))

        self._logger = call_on_rank_zero(job.world, open_logger)

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        if self._logger is not None:
            self._logger.metrics(trainer.step, numbers(record))

    def on_fit_end(self, trainer: Trainer, conclusion: Conclusion) -> None:
        if self._logger is not None:
            recorded = {*hyperparameters(trainer.job.spec), *trainer.history.names}
            results = {k: v for k, v in conclusion.summary.items() if k not in recorded}
            self._logger.metrics(trainer.step, numbers(results))
            self._end(complete=True)

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return False

    def close(self) -> None:
        self._end(complete=False)

    def _end(self, *, complete: bool) -> None:
        if self._logger is not None:
            self._logger.end(complete=complete)
            self._logger = None


class Checkpoints(Callback):
    """Write a checkpoint every `JobSpec.checkpoint_every` steps and after the last step.

    The best one by the validation data is kept in addition, in the folder ``best`` of the run. Two
    checkpoints are `JobSpec.checkpoint_seconds` apart at least, except for the last one. A better
    epoch between them is in memory (`Trainer.best`) and is written with the next one, before it.
    """

    def __init__(self) -> None:
        self._written_at = 0.0

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._written_at = monotonic()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        # At the end of an epoch the checkpoint follows the evaluation.
        if self.needs_parameters(trainer, trainer.step) and not trainer.ends_epoch:
            self._save(trainer)

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        is_last = trainer.is_last_step
        if is_last or trainer.progress.is_best or self.needs_parameters(trainer, trainer.step):
            self._save(trainer)

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return trainer.job.keeps_run and step % trainer.job.spec.checkpoint_every == 0

    def _save(self, trainer: Trainer) -> None:
        """Write the best state that is not in the run directory, and the present one."""
        job, best = trainer.job, trainer.job.best
        is_early = monotonic() - self._written_at < job.spec.checkpoint_seconds
        if job.run is None or (is_early and not trainer.is_last_step):
            return
        with job.recorder.between(CHECKPOINT):
            found = best.checkpoint if best.step > best.stored_step else None
            facts = job.checkpoint_facts().to_mapping()
            if found is not None or best.step != trainer.step:
                arrays = partial(replica_arrays, job.replica)
                save_state(job.run, found, trainer.step, arrays, facts)
            best.stored_step = max(best.stored_step, best.step)
        self._written_at = monotonic()


def stage_times(trainer: Trainer) -> dict[str, float | None]:
    """Return ms per step on this rank by tag since the last record; None if nothing was timed."""
    recorder = trainer.job.recorder
    names, rows = recorder.names, recorder.timed_rows(trainer.job.spec.log_every)
    if not len(rows):
        return dict.fromkeys(f"{TIMES}{name}" for name in names)
    columns = zip(rows.mean(axis=0).tolist(), rows.min(axis=0).tolist(), strict=True)
    # A column with a negative value is unknown.
    means = [mean / 1e6 if least >= 0 else None for mean, least in columns]
    return {f"{TIMES}{name}": mean for name, mean in zip(names, means, strict=True)}
