"""Snapshots during training, and the progress that the program which started the ranks reads."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, time_ns
from typing import TYPE_CHECKING

from dptrain.comm.node.activity import Activity
from dptrain.errors import UserError
from dptrain.measure.step_record import CHECKPOINT
from dptrain.runs.incidents import ProgressFile, RunProgress
from dptrain.training.callbacks import Callback
from dptrain.training.history import Record
from dptrain.training.persistence.checkpoints import Arrays, replica_arrays
from dptrain.training.persistence.snapshots import Recovered, SnapshotFolder, save_state
from dptrain.training.persistence.state_copy import StateCopy

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

WRITE_SHARE = 0.1
"""Part of the time of a write next to training that counts: it needs a core, and memory traffic."""

LONGEST_CLOSE_S = 10.0
"""Longest wait for a write when training ends; after an error a device may never send the state."""

REPORT_S = 1.0
"""Time between two reports of the progress."""


class Snapshots(Callback):
    """Keep the state in the memory of each node, if the setting `snapshots` is on.

    The interval is the setting `snapshot_every`, or follows from the time that snapshots take. A
    device copies the state within its memory. It then reaches the host and the file next to the
    following steps; only the first snapshot is waited for, so that its time is known.
    """

    def __init__(self) -> None:
        self._folder: SnapshotFolder | None = None
        self._report: _Report | None = None
        self._due = self._every = 0
        self._best_step, self._saved_at = -1, 0.0
        self._copy, self._writer, self._has_failed = StateCopy(), _Writer(), False

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
            file = ProgressFile(job.run.path)
            self._report = _Report(file, step, plan.recovered, job.world.activity)
        self._best_step, self._saved_at = job.best.stored_step, monotonic()
        self._every = job.settings.snapshot_every or FIRST_SNAPSHOT
        self._due = step + self._every

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._due:
            if self._folder is not None:
                self._folder.record(trainer.step)
            if self._report is not None:
                self._report.add(trainer.step)
            # At the end of an epoch the snapshot follows the evaluation and its record.
            if trainer.step == self._due and not trainer.ends_epoch:
                self._save(trainer)

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        if trainer.step == self._due:
            self._save(trainer)

    def on_fit_end(self, trainer: Trainer, conclusion: Conclusion) -> None:
        plan = trainer.job.snapshots
        self._end_write()
        self.close()
        if plan is not None:
            plan.remove()

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return step == self._due

    def close(self) -> None:
        if self._folder is not None:
            self._end_write(LONGEST_CLOSE_S)
            self._folder.close()
        if self._report is not None:
            self._report.close()
        self._folder, self._report, self._due = None, None, 0

    def _save(self, trainer: Trainer) -> None:
        """Replace the snapshot of this node, and decide when the next one is due."""
        job, began = trainer.job, monotonic()
        with job.recorder.between(CHECKPOINT):
            if self._folder is not None:
                self._write(trainer, self._folder)
            if not job.settings.snapshot_every:
                next_to_steps_s = self._writer.seconds if self._writer.is_busy else 0.0
                cost_s = monotonic() - began + WRITE_SHARE * next_to_steps_s
                self._every = self._next_interval(trainer, cost_s)
        self._due, self._saved_at = trainer.step + self._every, monotonic()

    def _write(self, trainer: Trainer, folder: SnapshotFolder) -> None:
        """Write the snapshot of this node; the write before it has ended."""
        job, replica = trainer.job, trainer.job.replica
        self._end_write()
        best = job.best.checkpoint if job.best.step > self._best_step else None
        facts = job.checkpoint_facts().to_mapping()
        arrays: Callable[[], Arrays] = partial(replica_arrays, replica)
        copies = replica.memory.asynchronous and (
            self._copy.fits(replica) or self._copy.allocate(replica)
        )
        if copies:
            self._copy.assign(replica)
            arrays = self._copy.begin_arrays()
        write = partial(save_state, folder, best, trainer.step, arrays, facts)
        self._writer.start(write, max(self._best_step, job.best.step))
        if not (copies and self._writer.seconds):
            self._end_write()

    def _end_write(self, timeout_s: float | None = None) -> None:
        """Wait for the write that was started last; warn if it failed and the one before did not.

        The next write may succeed, and until then the last whole state stays.

        Args:
            timeout_s: longest wait in seconds.
        """
        if not self._writer.is_busy:
            return
        error = self._writer.wait(timeout_s)
        if error is None:
            self._best_step = self._writer.best_step
        elif not self._has_failed:
            _warn(error)
        self._has_failed = error is not None

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


class _Writer:
    """Writes one snapshot at a time, in a thread.

    Attributes:
        seconds: time of the last write; 0 before it has ended.
        best_step: step of the best state that is written then.
    """

    def __init__(self) -> None:
        self.seconds, self.best_step = 0.0, -1
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, write: Callable[[], None], best_step: int) -> None:
        """Start a write."""

        def run() -> None:
            began = monotonic()
            try:
                write()
            except Exception as error:  # `wait` returns or raises it in the other thread.
                self._error = error
            self.seconds = monotonic() - began

        self.best_step = best_step
        self._thread = threading.Thread(target=run, name="snapshot", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True if `wait` has not been called since the last write was started."""
        return self._thread is not None

    def wait(self, timeout_s: float | None = None) -> UserError | None:
        """Wait for the write that was started last, and return the error of the disk.

        Args:
            timeout_s: longest wait in seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        error, self._error, self._thread = self._error, None, None
        if error is not None and not isinstance(error, UserError):
            raise error
        return error


class _Report:
    """The progress that rank 0 reports: the first step at once, and then what a thread sees.

    Args:
        file: where to.
        first_step: number of complete steps.
        recovered: what the start before has lost.
        activity: of this rank.
    """

    def __init__(
        self, file: ProgressFile, first_step: int, recovered: Recovered, activity: Activity
    ) -> None:
        self._file, self._activity, self._last_ns = file, activity, recovered.last_ns
        steps_lost = max(recovered.last_step - first_step, 0)
        self._progress = RunProgress(first_step, first_step, steps_lost)
        self._step, self._is_over = first_step, threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, step: int) -> None:
        """Report that a step is complete, soon."""
        self._step = step
        if self._thread is None:
            lost_ns = max(time_ns() - self._last_ns, 0) if self._last_ns else 0
            self._progress = replace(self._progress, resumed_s=lost_ns / 1e9)
            self._write()
            self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
            self._thread.start()

    def _repeat(self) -> None:
        while not self._is_over.wait(REPORT_S):
            self._write()

    def _write(self) -> None:
        before = self._progress
        self._progress = replace(before, step=self._step, batches=self._activity.num_batches)
        if self._progress != before or self._thread is None:
            self._file.write(self._progress)

    def close(self) -> None:
        """Report the last step, and close the file."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._write()
        self._file.close()


def _warn(error: Exception) -> None:
    """Print that this node cannot write snapshots; the run goes on."""
    with suppress(OSError, ValueError):
        host = os.uname().nodename
        sys.stderr.write(f"dptrain: warning: no new snapshot on {host}: {error}\n")
