"""Snapshots during training, and the progress that the program which started the ranks reads."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from time import monotonic, time_ns
from typing import TYPE_CHECKING

from dptrain.errors import UserError
from dptrain.measure.step_record import CHECKPOINT
from dptrain.runs.incidents import ProgressFile, RunProgress
from dptrain.training.callbacks import Callback
from dptrain.training.history import Record
from dptrain.training.persistence.snapshots import Recovered, SnapshotFolder, save_state

if TYPE_CHECKING:
    from dptrain.training.engines import StepResult
    from dptrain.training.output.summary import Conclusion
    from dptrain.training.trainer import Trainer

FIRST_SNAPSHOT = 20
"""Steps before the first snapshot if the interval is not set."""

SNAPSHOT_SHARE = 0.005
"""Part of the time that snapshots take then."""

MOST_GROWTH = 8
"""Largest factor between two intervals: the first steps and the first snapshot are slow."""

REPORT_S = 1.0
"""Least time between two reports of the progress."""


class Snapshots(Callback):
    """Keep the state in the memory of each node, if the setting `snapshots` is on.

    The interval is the setting `snapshot_every`, or follows from the time that snapshots take.
    """

    def __init__(self) -> None:
        self._folder: SnapshotFolder | None = None
        self._report: _Report | None = None
        self._due = self._every = 0
        self._best_step, self._saved_at = -1, 0.0

    def on_fit_begin(self, trainer: Trainer) -> None:
        job, step = trainer.job, trainer.step
        plan = job.snapshots
        if plan is None:
            return
        try:
            plan.open(step)
            self._folder = plan.folder
        except OSError as error:
            _warn(error)
        if job.run is not None:
            self._report = _Report(ProgressFile(job.run.path), step, plan.recovered)
        self._best_step, self._saved_at = job.best.stored_step, monotonic()
        self._every = job.settings.snapshot_every or FIRST_SNAPSHOT
        self._due = step + self._every

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._due:
            if self._folder is not None:
                self._folder.record(trainer.step)
            if self._report is not None:
                self._report.write(trainer.step)
            # At the end of an epoch the snapshot follows the evaluation and its record.
            if trainer.step == self._due and not trainer.ends_epoch:
                self._save(trainer)

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        if trainer.step == self._due:
            self._save(trainer)

    def on_fit_end(self, trainer: Trainer, conclusion: Conclusion) -> None:
        plan = trainer.job.snapshots
        self.close()
        if plan is not None:
            plan.remove()

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return step == self._due

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
        if self._report is not None:
            self._report.file.close()
        self._folder, self._report, self._due = None, None, 0

    def _save(self, trainer: Trainer) -> None:
        """Replace the snapshot of this node, and decide when the next one is due."""
        job, began = trainer.job, monotonic()
        with job.recorder.between(CHECKPOINT):
            if self._folder is not None:
                best = job.best.checkpoint if job.best.step > self._best_step else None
                facts = job.checkpoint_facts().to_mapping()
                try:
                    save_state(self._folder, best, trainer.step, job.replica, facts)
                    self._best_step = max(self._best_step, job.best.step)
                except UserError as error:
                    _warn(error)
                    self._folder.remove()
                    self._folder = None
            if not job.settings.snapshot_every:
                self._every = self._next_interval(trainer, monotonic() - began)
        self._due, self._saved_at = trainer.step + self._every, monotonic()

    def _next_interval(self, trainer: Trainer, cost_s: float) -> int:
        """Return the steps until the next snapshot; all ranks call this.

        Args:
            trainer: after a snapshot.
            cost_s: time of the snapshot on this rank.
        """
        times = [cost_s, monotonic() - self._saved_at]
        gathered: list[list[float]] = trainer.job.world.all_gather_json(times)
        costs, elapsed = zip(*gathered, strict=True)
        step_s: float = max(max(elapsed) - max(costs), 1e-6) / self._every
        wanted: int = math.ceil(max(costs) / (SNAPSHOT_SHARE * step_s))
        return min(max(wanted, 1), MOST_GROWTH * self._every)


class _Report:
    """The progress that rank 0 reports.

    Args:
        file: where to.
        first_step: number of complete steps.
        recovered: what the start before has lost.
    """

    def __init__(self, file: ProgressFile, first_step: int, recovered: Recovered) -> None:
        self.file, self._first_step, self._recovered = file, first_step, recovered
        self._resumed_s = 0.0
        self._written_at = -math.inf

    def write(self, step: int) -> None:
        """Report that a step is complete, unless the last report is new."""
        now, lost = monotonic(), self._recovered
        if now - self._written_at < REPORT_S:
            return
        if self._written_at < 0 and lost.last_ns:
            self._resumed_s = max(time_ns() - lost.last_ns, 0) / 1e9
        self._written_at = now
        steps_lost = max(lost.last_step - self._first_step, 0)
        self.file.write(RunProgress(step, self._first_step, steps_lost, self._resumed_s))


def _warn(error: Exception) -> None:
    """Print that this node makes no snapshots any more; the run goes on without them."""
    with suppress(OSError, ValueError):
        host = os.uname().nodename
        sys.stderr.write(f"dptrain: warning: no more snapshots on {host}: {error}\n")
