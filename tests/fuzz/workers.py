"""Trials in several processes, with a time limit for each."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

from tests.fuzz.outcome import Outcome, Verdict, WrongResultError, all_warnings

Trial = Callable[[np.random.Generator, Path], Outcome]

MEMORY_BYTES = 6 * 2**30
"""Memory of a worker. Input of some kilobytes must not need more."""


@dataclass(frozen=True)
class Finished:
    """A trial that has ended.

    Attributes:
        seed: of the trial.
        outcome: its result.
        folder: its files; None unless it failed.
    """

    seed: int
    outcome: Outcome
    folder: Path | None = None


def run_trial(trial: Trial, seed: int, folder: Path) -> Outcome:
    """Run a trial in this process; an exception is a failure.

    Args:
        trial: the function.
        seed: of its random numbers.
        folder: for its files, empty.
    """
    try:
        with all_warnings():
            return trial(np.random.default_rng(seed), folder)
    except WrongResultError as error:
        return Outcome(Verdict.FAILED, str(error))
    except BaseException as error:
        return Outcome(Verdict.FAILED, "".join(traceback.format_exception(error)))


class Worker:
    """A process that runs one trial after the other."""

    def __init__(self, trial: Trial, scratch: Path, limit_s: float) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.traceback = Path(tempfile.mkstemp(dir=scratch, suffix=".traceback")[1])
        context = multiprocessing.get_context("fork")
        arguments = (trial, theirs, scratch, limit_s, self.traceback)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # The child runs no code of other threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.seed: int | None = None
        self.started = 0.0

    def send(self, seed: int) -> None:
        """Start a trial."""
        self.seed, self.started = seed, time.monotonic()
        self.connection.send(seed)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_trials(
    trial: Trial, seeds: Iterator[int], workers: int, limit_s: float
) -> Iterator[Finished]:
    """Yield the trials of all seeds as they end.

    Args:
        trial: the function, which runs in other processes.
        seeds: of the trials.
        workers: number of processes.
        limit_s: a trial that takes longer failed.
    """
    scratch = Path(tempfile.mkdtemp(prefix="dptrain-fuzz-"))
    running: list[Worker] = []
    try:
        for _ in range(workers):
            running.append(_start(trial, scratch, limit_s, seeds))
        while any(worker.seed is not None for worker in running):
            ready = wait([worker.connection for worker in running], timeout=1.0)
            for index, worker in enumerate(running):
                is_late = time.monotonic() - worker.started > limit_s + 5.0
                if (worker.connection not in ready and not is_late) or worker.seed is None:
                    continue
                finished = _receive(worker, scratch)
                if finished is None:
                    yield _lost(worker, scratch)
                    worker.end()
                    running[index] = _start(trial, scratch, limit_s, seeds)
                    continue
                yield finished
                _send_next(worker, seeds)
    finally:
        for worker in running:
            worker.end()
        shutil.rmtree(scratch, ignore_errors=True)


def _start(trial: Trial, scratch: Path, limit_s: float, seeds: Iterator[int]) -> Worker:
    worker = Worker(trial, scratch, limit_s)
    _send_next(worker, seeds)
    return worker


def _send_next(worker: Worker, seeds: Iterator[int]) -> None:
    worker.seed = None
    seed = next(seeds, None)
    if seed is not None:
        worker.send(seed)


def _receive(worker: Worker, scratch: Path) -> Finished | None:
    """Return the trial that a worker has finished; None if the worker ended or hangs."""
    try:
        if not worker.connection.poll():
            return None
        seed, outcome = worker.connection.recv()
    except (EOFError, OSError):
        return None
    folder = _folder(scratch, seed) if outcome.verdict is Verdict.FAILED else None
    return Finished(seed, outcome, folder)


def _lost(worker: Worker, scratch: Path) -> Finished:
    """Return the failure of a worker that ended, or that is later than its own time limit."""
    assert worker.seed is not None
    worker.process.join(0.5)
    text = worker.traceback.read_text(errors="replace")
    reason = f"the process ended with {worker.process.exitcode}, or was ended after its time limit"
    return Finished(
        worker.seed, Outcome(Verdict.FAILED, f"{reason}\n{text}"), _folder(scratch, worker.seed)
    )


def _folder(scratch: Path, seed: int) -> Path:
    return scratch / str(seed)


def _serve(trial: Trial, connection: Connection, scratch: Path, limit_s: float, log: Path) -> None:
    """Run trials until the parent ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(scratch)
    with log.open("w") as file, suppress(EOFError, KeyboardInterrupt):
        # Libraries in C write their messages to the descriptor.
        os.dup2(file.fileno(), 2)
        while True:
            seed = connection.recv()
            folder = _folder(scratch, seed)
            folder.mkdir()
            faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
            outcome = run_trial(trial, seed, folder)
            faulthandler.cancel_dump_traceback_later()
            if outcome.verdict is not Verdict.FAILED:
                shutil.rmtree(folder, ignore_errors=True)
            connection.send((seed, outcome))
