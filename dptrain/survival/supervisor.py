"""Start ranks, and start them again after a fault, until training ends.

`Supervisor` starts the launcher of the site (mpirun, srun) and waits for it. dptrain itself ends
all ranks and prints the cause if one fails (`dptrain.comm.abort`). Whatever is left of the launch
is then killed, and the ranks are started again with ``--resume``, which continues from the newest
snapshot or checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from dptrain.comm.signals import SIGNALS
from dptrain.comm.watchdog import mpi_files
from dptrain.errors import UserError
from dptrain.files import writing
from dptrain.runs.incidents import (
    Incident,
    RunProgress,
    forget_progress,
    read_incidents,
    read_progress,
    summary_line,
    write_incidents,
)
from dptrain.runs.locks import lock
from dptrain.runs.names import CONFIG, SUMMARY, SUPERVISOR
from dptrain.runs.resizing import take_request
from dptrain.scaling.launching import Child, Launcher
from dptrain.survival import MOST_REPAIRS
from dptrain.survival.local_ranks import LocalRanks
from dptrain.survival.nodes import Host, on_hosts, usable
from dptrain.survival.rehearsal import Rehearsal
from dptrain.training.digests.differences import CORRUPTION
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.persistence.snapshots import SnapshotFolder, promote, read_token

STOPPED, MISTAKE, DIVERGED, INTERRUPTED = 75, 2, 3, 130
"""Exit codes of training after which the ranks are not started again."""

MOST_REPEATS = 3
"""Faults in a row without a further complete step after which the job ends."""

MOST_STARTS = 7
"""Launches in a row that start no rank, or are refused, after which the job ends. The pauses
between them last for 31 s, in which ranks of other nodes end and release the run directory."""

LONGEST_PAUSE_S = 60.0
"""Longest pause before another start."""

POLL_S = 0.1
_REQUESTED = "another number of ranks was requested"
_OUTPUT_S = 1.0
_LONGEST_CHECK_S = 1.0
"""Longest time between two looks at the ranks unless this process is stopped."""

HANG_TIMEOUTS, LEAST_HANG_S = 2, 20.0
"""Timeouts of a rank after which a job without progress hangs, and the shortest such time."""

_CAUSE = re.compile(r"dptrain: (?!warning: |compiling |decoding )(?:rank (\d+) of \d+: )?(.*)")
"""A line of dptrain that is no notice, with the rank that it names."""

_HOST = re.compile(r"process \d+ on (\S+?):? ")

_CORRUPT_RANK, _CORRUPT_HOST = re.compile(r"\brank (\d+)"), re.compile(r" on (\S+) \(")
"""What a line about silent corruption names."""


@dataclass(frozen=True)
class Job:
    """What is started.

    Attributes:
        launcher: starts the ranks.
        program: the command of a rank.
        run_dir: the run directory.
        ranks: number of ranks at first.
        least_ranks: smallest number of ranks that continue.
        most_restarts: number of restarts after which a further fault ends the job.
        threads: compute threads of a rank; 0 if ranks decide.
        timeout: longest wait of a rank for others, in seconds.
        hosts: that start the ranks; empty if the launcher decides.
        repairs: True also starts the ranks again after silent corruption.
    """

    launcher: Launcher
    program: tuple[str, ...]
    run_dir: Path
    ranks: int
    least_ranks: int
    most_restarts: int
    threads: int
    timeout: float
    hosts: tuple[Host, ...] = ()
    repairs: bool = False


@dataclass(frozen=True)
class Fault:
    """How a launch ended that has not completed training.

    Attributes:
        code: exit code of the launcher.
        cause: what was printed.
        rank, host: of the process that failed; None if unknown.
        step: last complete step; None if unknown.
        has_started: whether any rank ran dptrain.
        at: when, in seconds since 1970.
    """

    code: int
    cause: str
    rank: int | None
    host: str | None
    step: int | None
    has_started: bool
    at: float


class Supervisor:
    """Runs a job to its end.

    Args:
        job: the job.
        rehearsal: makes planned faults.
    """

    def __init__(self, job: Job, rehearsal: Rehearsal | None = None) -> None:
        self.job, self._rehearsal = job, rehearsal or Rehearsal((), job.run_dir)
        self.ranks, self.launcher = job.ranks, on_hosts(job.launcher, job.hosts)
        self._incidents = _read(job.run_dir)
        self._num_before = len(self._incidents)
        self._open: Fault | None = None
        self._signal: signal.Signals | None = None
        self._num_signals = 0
        self._requested: int | None = None
        self._began = time.time()

    @property
    def incidents(self) -> list[Incident]:
        """The faults that this job has outlived."""
        return self._incidents[self._num_before :]

    def run(self) -> int:
        """Start the ranks until training has ended; return the exit code.

        Raises:
            UserError: another process starts ranks for the run directory.
        """
        with self._held(), self._rehearsal.environment():
            with self._signals():
                code = self._run()
            self._finish()
        return code

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Prevent another process from starting ranks for the run directory."""
        run_dir = self.job.run_dir
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = lock(run_dir / SUPERVISOR)
        try:
            take_request(run_dir)  # Of a process that was killed while it waited.
            yield
        finally:
            if not (run_dir / CONFIG).exists():
                # No rank has started a run here.
                (run_dir / SUPERVISOR).unlink(missing_ok=True)
                with suppress(OSError):
                    run_dir.rmdir()
            os.close(descriptor)

    def _run(self) -> int:
        repeats = starts = 0
        last: Fault | None = None
        while True:
            code, fault = self._launch()
            if code == STOPPED and self._requested is not None and self._signal is None:
                self._resize()
                continue
            if fault is None:
                return code
            has_trained = fault.has_started and fault.code != MISTAKE
            starts = 0 if has_trained else starts + 1
            is_further = last is not None and (fault.step or 0) > (last.step or 0)
            repeats = 1 if last is None or is_further or not has_trained else repeats + 1
            last = fault
            reason = self._reason_to_end(fault, repeats, starts)
            if reason is not None:
                _print(f"{_text(fault)}; {reason}")
                return 1
            before, wanted = self.ranks, self._wanted_ranks()
            self.launcher, fitting = usable(self.job.launcher, self.job.ranks, self.job.hosts)
            # A launcher that starts no rank twice may have lost a slot.
            self.ranks = min(fitting, wanted - (starts > 1 and not fault.has_started))
            if self.ranks < self.job.least_ranks:
                _print(f"{_text(fault)}; {self.ranks} ranks are left, and --min-ranks is more")
                return 1
            self._begin_incident(fault, before)
            self._pause(max(repeats, starts) - 1)
            if self._signal is not None:
                return self._stopped()

    def _stopped(self) -> int:
        """Return the exit code after a signal."""
        early = self._signal == signal.SIGINT and not (self.job.run_dir / CONFIG).exists()
        return INTERRUPTED if early else STOPPED

    def _resize(self) -> None:
        """Continue with the number of ranks that a user requested."""
        step = self._last_step(read_progress(self.job.run_dir))
        fault = Fault(STOPPED, _REQUESTED, None, None, step, True, time.time())
        before, self.ranks = self.ranks, self._wanted_ranks()
        self._begin_incident(fault, before)

    def _wanted_ranks(self) -> int:
        """Return the number of ranks of the next start, which a user may have requested."""
        if self._requested is None:
            return self.ranks
        self.job = replace(self.job, ranks=self._requested)
        self._requested = None
        return self.job.ranks

    def _reason_to_end(self, fault: Fault, repeats: int, starts: int) -> str | None:
        """Return why the ranks are not started again; None if they are."""
        restarts = sum(each.cause != _REQUESTED for each in self.incidents)
        if starts >= MOST_STARTS:
            return f"no rank could train {starts} times in a row"
        if CORRUPTION in fault.cause:
            number = 1 + sum(CORRUPTION in each.cause for each in self.incidents)
            if not self.job.repairs:
                return "the same command with --repair continues"
            if number > MOST_REPAIRS:
                return f"this is silent corruption number {number}; leave its hardware out"
        if repeats >= MOST_REPEATS:
            return (
                f"this is fault {repeats} in a row without a further step, and another start "
                "would have the same end; correct the cause, and continue with the same command"
            )
        if restarts >= self.job.most_restarts:
            return f"--max-restarts is {self.job.most_restarts}; the same command continues"
        return None

    # One launch.

    def _launch(self) -> tuple[int, Fault | None]:
        """Start the ranks and wait for their end.

        Returns:
            The exit code, and the fault unless training has ended.
        """
        job = self.job
        forget_progress(job.run_dir)
        command = self.launcher.command(self.ranks, job.threads, job.program)
        with ExitStack() as stack:
            output, given = os.pipe()
            lines = _Lines(output)
            with os.fdopen(given, "wb") as errors:
                child = stack.enter_context(Child(command, None, errors, os.environ))
            ranks = stack.enter_context(LocalRanks(child.pid))
            hang = Hang(max(HANG_TIMEOUTS * job.timeout, LEAST_HANG_S))
            passed = 0
            while (code := child.wait(POLL_S)) is None:
                ranks.refresh()
                if self._rehearsal.left:
                    self._rehearsal.act(ranks, self._last_step(read_progress(job.run_dir)))
                progress = read_progress(job.run_dir)
                self._end_incident(progress)
                requested = None if progress is None else take_request(job.run_dir)
                if requested is not None:
                    self._requested = requested
                    child.send(signal.SIGUSR1)
                if self._num_signals > passed:
                    passed = self._num_signals
                    # Every launcher passes this one on to the ranks, which then stop in order.
                    child.send(signal.SIGUSR1 if passed == 1 else signal.SIGTERM)
                hang.check(progress, all_stopped=ranks.all_stopped())
                if hang.cause:
                    lines.end(hang.cause)
                    code = 1
                    break
        lines.wait(_OUTPUT_S)
        progress = read_progress(job.run_dir)
        self._end_incident(progress)
        return self._judge(code, lines, progress)

    def _judge(
        self, code: int, lines: _Lines, progress: RunProgress | None
    ) -> tuple[int, Fault | None]:
        """Return the exit code, and the fault unless training has ended."""
        was_full = self._rehearsal.free_disk()
        is_first = not self.incidents and not was_full
        if code == 0 and (self.job.run_dir / SUMMARY).exists():
            self._end_incident(progress, is_over=True)
            if self._requested is not None:
                _print("training ended before its number of ranks could change")
            return 0, None
        if code in (STOPPED, DIVERGED, INTERRUPTED) or (code == MISTAKE and is_first):
            return code, None
        if self._signal is not None:
            _print(f"{self._signal.name} ended the ranks before they could stop in order")
            return self._stopped(), None
        rank, cause = lines.cause()
        if CORRUPTION in cause:
            named, host = _only(_CORRUPT_RANK.findall(cause)), _only(_CORRUPT_HOST.findall(cause))
            rank = rank if named is None else int(named)
        else:
            host = _only(_HOST.findall(f"{cause} ")[:1])
        return code, Fault(
            code, cause or f"the launcher ended with exit code {code}", rank, host,
            self._last_step(progress), bool(cause) or progress is not None, time.time(),
        )  # fmt: skip

    def _last_step(self, progress: RunProgress | None) -> int | None:
        """Return the last complete step, from the memory of this node if it is there."""
        token = read_token(self.job.run_dir)
        steps = [] if token is None else [each.last_step[0] for each in SnapshotFolder.find(token)]
        steps += [] if progress is None else [progress.step]
        return max(steps) if steps and max(steps) >= 0 else None

    # Incidents.

    def _begin_incident(self, fault: Fault, before: int) -> None:
        """Record a fault.

        Args:
            fault: the fault.
            before: number of ranks that were started.
        """
        self._open = fault
        time_text = datetime.fromtimestamp(fault.at, timezone.utc).isoformat(timespec="seconds")
        self._incidents.append(
            Incident(time_text, fault.cause, fault.rank, fault.host, fault.step, before, self.ranks)
        )
        self._write()
        _print(
            f"{_text(fault)}; starting {self.ranks} rank{'s' * (self.ranks > 1)} (restart "
            f"{len(self.incidents)} of at most {self.job.most_restarts})"
        )

    def _end_incident(self, progress: RunProgress | None, *, is_over: bool = False) -> None:
        """Complete the last incident when the ranks have made a step."""
        if self._open is None or (progress is None and not is_over):
            return
        seconds = time.time() - self._open.at
        steps = 0
        if progress is not None:
            seconds, steps = progress.resumed_s or seconds, progress.steps_lost
            _print(
                f"continued after step {progress.first_step}: {steps} "
                f"step{'s' * (steps != 1)} and {seconds:.1f} s lost"
            )
        self._incidents[-1] = replace(
            self._incidents[-1], steps_lost=steps, seconds_lost=round(seconds, 3)
        )
        self._open = None
        self._write()

    def _write(self) -> None:
        """Write the incidents; a run that has no settings yet is only a folder."""
        if (self.job.run_dir / CONFIG).exists() and self._incidents:
            with suppress(UserError):
                write_incidents(self.job.run_dir, self._incidents)

    def _finish(self) -> None:
        """Leave nothing in memory, and print what the job outlived."""
        run_dir = self.job.run_dir
        self._write()
        try:
            if (run_dir / CONFIG).exists():
                step = promote(RunDirectory.open(run_dir, keep=1 << 30))
                if step is not None:
                    _print(f"the snapshot of step {step} is now a checkpoint in {run_dir}")
        except UserError as error:
            _print(f"warning: the snapshots of {run_dir} stay in memory: {error}")
        forget_progress(run_dir)
        mpi_files.remove_unused(self._began)
        line = summary_line(self.incidents)
        if line:
            _print(line)

    # Signals and pauses.

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals that request a stop reach the ranks, and start no others."""

        def receive(number: int, frame: FrameType | None) -> None:
            self._signal = self._signal or signal.Signals(number)
            self._num_signals += 1

        previous = {
            number: signal.signal(number, receive)
            for number in SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pause(self, exponent: int) -> None:
        """Wait 0, 1, 2, 4, … s before another start."""
        end = time.monotonic() + min((1 << exponent) // 2, LONGEST_PAUSE_S)
        while time.monotonic() < end and self._signal is None:
            time.sleep(POLL_S)


class _Lines:
    """Lines of standard error, which are printed and searched for the cause.

    Args:
        output: file descriptor to read.
    """

    def __init__(self, output: int) -> None:
        self._lines: list[tuple[str | None, str]] = []
        self._cause = ""
        self._thread = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._thread.start()

    def _read(self, output: int) -> None:
        with os.fdopen(output, "rb") as file:
            for line in file:
                if self._cause:
                    continue
                with suppress(OSError):
                    os.write(2, line)
                found = _CAUSE.search(line.decode(errors="replace").rstrip("\n"))
                if found is not None:
                    self._lines.append((found[1], found[2]))

    def end(self, cause: str) -> None:
        """Print another cause; what is printed while the ranks are killed for it is left out."""
        self._cause = cause
        _print(cause)

    def wait(self, seconds: float) -> None:
        """Wait for the end of the output; a process that the launcher forgot may keep it open."""
        self._thread.join(seconds)

    def cause(self) -> tuple[int | None, str]:
        """Return the rank and the cause of the first line that names a rank, or of the first one.

        Without any, they are None and "".
        """
        if self._cause:
            return None, self._cause
        found = [(None if rank is None else int(rank), text) for rank, text in self._lines]
        return next((each for each in found if each[0] is not None), (found or [(None, "")])[0])


class Hang:
    """Notices a job that makes no progress: no step, and no minibatch of an evaluation.

    Ranks that wait for another one end themselves after their timeout. This is for what they do not
    notice: all ranks are stopped, or one rank alone hangs while it computes. Before the first step,
    compilation and the preparation of data may take any time.

    Only the time in which this process runs counts, so that `scontrol suspend` is no fault.

    Args:
        limit_s: time without progress.

    Attributes:
        cause: what was noticed; "" before.
    """

    def __init__(self, limit_s: float) -> None:
        self.cause = ""
        self._limit_s = limit_s
        self._progress: RunProgress | None = None
        self._checked_at, self._elapsed_s, self._stopped_s = time.monotonic(), 0.0, 0.0

    def check(self, progress: RunProgress | None, *, all_stopped: bool) -> None:
        """Set `cause` if the job hangs.

        Args:
            progress: the present one; None before the first step.
            all_stopped: whether a signal has stopped all ranks.
        """
        now = time.monotonic()
        passed_s, self._checked_at = min(now - self._checked_at, _LONGEST_CHECK_S), now
        is_same = progress is not None and progress == self._progress
        self._elapsed_s = self._elapsed_s + passed_s if is_same else 0.0
        self._stopped_s = self._stopped_s + passed_s if all_stopped else 0.0
        self._progress = progress
        if self._stopped_s > self._limit_s:
            self.cause = f"all ranks are stopped (SIGSTOP?), for {self._limit_s:.0f} s"
        elif self._elapsed_s > self._limit_s:
            self.cause = (
                f"no step was completed for {self._limit_s:.0f} s; if one takes longer, use a "
                "larger --timeout"
            )


def _only(found: list[str]) -> str | None:
    """Return what all texts are; None if they differ, or if there are none."""
    return found[0] if len({*found}) == 1 else None


def _read(run_dir: Path) -> list[Incident]:
    with suppress(UserError):
        return read_incidents(run_dir)
    return []


def _text(fault: Fault) -> str:
    """Return the fault in a few words, after the line with its cause."""
    if fault.cause == _REQUESTED:
        return _REQUESTED
    what = f"rank {fault.rank} ended" if fault.rank is not None else "the ranks ended"
    if not fault.has_started:
        what = f"no rank has started to train ({fault.cause})"
    return what if fault.step is None else f"{what} after step {fault.step}"


def _print(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"dptrain: {text}\n".encode())
