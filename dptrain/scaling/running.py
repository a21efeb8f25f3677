"""Run the launches of a study one after another; the study can be stopped and continued."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import numpy as np

from dptrain.backends import load_backend
from dptrain.comm.signals import StopRequest
from dptrain.errors import UserError
from dptrain.files import dump_json, write_whole, writing
from dptrain.machine import available_cores
from dptrain.measure.machine.load import Clock, cores_of_others, is_busy
from dptrain.measure.profile.profile import Profile
from dptrain.scaling.accuracy import SUMMARY, TRAINING
from dptrain.scaling.design import (
    LAUNCHED,
    LOG,
    PREPARE,
    PROFILE,
    Design,
    Task,
    launch_facts,
    unfinished,
)
from dptrain.scaling.display import StudyDisplay
from dptrain.scaling.launching import Child, Launcher, cause
from dptrain.scaling.points import refuse_small_data
from dptrain.training.settings import settings

POLL_S = 0.1
SKIPPED = 5
"""Steps before the measured ones."""
NEVER = 1 << 30
"""More steps than a training makes, so that the only checkpoint is the one after the last step."""
ONLY_TRAINING = ("epochs", "until_accuracy")
"""Settings of a study that profiles do not have."""
TRACED_RANKS = 64
"""Largest number of ranks that write a trace, which takes some hundred kilobytes per rank."""

ROOF_ROUNDS = 2
"""Rounds whose launches measure the limits of the roofline; the study uses the highest of a point.
They take some seconds. Launches with known losses always do, because known losses may take a third
of the time of a launch."""


class LaunchError(Exception):
    """A launch failed; `code` is the exit code of `dptrain scale`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal requested a stop."""


@dataclass
class Times:
    """Durations of launches in seconds, from those that are complete.

    Attributes:
        steps: measured steps of a launch.
        start_s: estimated time from the start of a launch to its first step.
        sample_s: step time by threads and samples of a rank, alone on the machine.
        walls: durations of complete launches by the name of the point.
    """

    steps: int
    start_s: float = 0.0
    sample_s: dict[tuple[int, int], float] = field(default_factory=dict)
    walls: dict[str, list[float]] = field(default_factory=dict)

    def of(self, task: Task) -> float:
        """Return the expected duration of a launch in seconds."""
        point = task.point
        if point.name in self.walls:
            return float(np.mean(self.walls[point.name]))
        oversubscription = max(point.ranks * point.threads / available_cores(), 1.0)
        step = self.sample_s.get((point.threads, _local(task)), 0.0)
        return (self.start_s + (self.steps + SKIPPED) * step) * oversubscription

    def total(self, tasks: Sequence[Task]) -> float:
        """Return the expected duration of several launches in seconds."""
        return sum(map(self.of, tasks))


def _local(task: Task) -> int:
    return -(-task.point.batch_size // task.point.ranks)


def _walls(folder: Path, tasks: Sequence[Task]) -> dict[str, list[float]]:
    """Return the durations of complete launches in seconds, by the name of the point."""
    found: dict[str, list[float]] = {}
    for task in tasks:
        wall_s = launch_facts(folder / task.folder).get("wall_s")
        if wall_s is not None:
            found.setdefault(task.point.name, []).append(float(wall_s))
    return found


def run_tasks(
    folder: Path,
    design: Design,
    tasks: Sequence[Task],
    launcher: Launcher,
    display: StudyDisplay,
    *,
    prepared: bool = False,
) -> bool:
    """Run the launches that have no profile yet.

    Short jobs, one for each batch size of a rank, compile the kernels first. Their durations serve
    to estimate the remaining time.

    Args:
        folder: folder of the study.
        design: what the launches of the study share.
        tasks: the launches, in this order.
        launcher: the program that starts ranks.
        display: shows the progress.
        prepared: True if this process has compiled the kernels already.

    Returns:
        True if all are complete; False if a signal requested a stop.

    Raises:
        LaunchError: a launch failed; complete launches are kept.
        UserError: the folder cannot be written, another process runs the same launch, or the data
            is too small for a minibatch.
    """
    left = unfinished(folder, tasks)
    if not left:
        return True
    times = Times(design.steps, walls=_walls(folder, tasks))
    with StopRequest() as stop, display:
        if _is_busy_now(stop):
            display.print("warning: other programs use this machine; the figures will scatter")
        if oversubscription := _oversubscription(left, launcher):
            display.print(f"warning: {oversubscription}")
        try:
            if not prepared:
                _prepare(folder, design, left, launcher, display, stop, times)
            display.begin(done=len(tasks) - len(left), total=len(tasks), left_s=times.total(left))
            while left:
                display.now(left[0], times.total(left))
                wall_s = _launch(folder, design, left[0], launcher, display, stop)
                times.walls.setdefault(left[0].point.name, []).append(wall_s)
                left.pop(0)
                display.advance(times.total(left))
        except Stopped:
            return False
    return True


def _is_busy_now(stop: StopRequest) -> bool:
    before = Clock.now()
    time.sleep(0.3)
    return is_busy(cores_of_others(before)) and not stop.requested


def _oversubscription(tasks: Sequence[Task], launcher: Launcher) -> str:
    """Return a warning if ranks will share cores of this machine, else ""."""
    most = max((task.point for task in tasks), key=lambda point: point.ranks * point.threads)
    cores, threads = available_cores(), most.ranks * most.threads
    if launcher.is_srun or threads <= cores:
        return ""
    some = f"{cores} core{'s' * (cores > 1)}"
    return (
        f"{threads} compute threads share {some} at {most.name}: the efficiency there is at most "
        f"{cores / threads:.0%}"
    )


def _prepare(
    folder: Path,
    design: Design,
    tasks: Sequence[Task],
    launcher: Launcher,
    display: StudyDisplay,
    stop: StopRequest,
    times: Times,
) -> None:
    """Run a few steps on one rank for every batch size, to compile kernels and to time them."""
    # Parts of a study run at the same time, possibly on other machines: each has its own folder.
    own = folder / f"{PREPARE}{socket.gethostname()}-{os.getpid()}"
    shapes = sorted({(task.point.threads, _local(task)) for task in tasks})
    with _removed_unless_failed(own):
        for number, (threads, samples) in enumerate(shapes, 1):
            display.print_now(f"compiling kernels, batch {samples} ({number} of {len(shapes)})")
            work = own / f"t{threads}-b{samples}"
            options = ["--steps", "3", "--skip", "1", "--no-roofs"]
            program = _program(design, samples, threads, options, work)
            begin = time.monotonic()
            _run(launcher.command(1, threads, program), work, "preparing", stop, display)
            wall_s = time.monotonic() - begin
            step_s = Profile.read(work / PROFILE).step_ms.median / 1e3
            times.sample_s[threads, samples] = step_s
            # The first job compiles; the last one shows the time of a start with compiled kernels.
            times.start_s = max(wall_s - 4 * step_s, 0.0)


@contextmanager
def _removed_unless_failed(folder: Path) -> Iterator[None]:
    """Remove a folder when the block ends, unless a launch failed: its log states the cause."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    except Stopped:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _launch(
    folder: Path,
    design: Design,
    task: Task,
    launcher: Launcher,
    display: StudyDisplay,
    stop: StopRequest,
) -> float:
    """Run one launch and return its duration in seconds."""
    work, point = folder / task.folder, task.point
    command = command_of(design, task, launcher, work)
    before, begin = Clock.now(), time.monotonic()
    began = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    if design.trains(task):
        _train(design, task, launcher, work / TRAINING, stop, display)
    _run(command, work, f"launch {work.name} of {point.ranks} ranks", stop, display)
    wall_s = time.monotonic() - begin
    others = cores_of_others(before) if launcher.starts_here else None
    facts = {"command": command, "began": began, "wall_s": wall_s, "other_cores": others}
    write_whole(work / LAUNCHED, dump_json(facts, indent=1) + "\n", "--output")
    refuse_small_data(task.folder, Profile.read(work / PROFILE))
    return wall_s


def _train(
    design: Design,
    task: Task,
    launcher: Launcher,
    work: Path,
    stop: StopRequest,
    display: StudyDisplay,
) -> None:
    """Train until the accuracy of the study is reached, or to the end, unless that was done."""
    result = work / SUMMARY
    if result.is_file():
        return
    shutil.rmtree(result.parent, ignore_errors=True)
    point = task.point
    # The training of a round starts from the same seed at every point.
    seed = int(design.settings.get("seed", 0)) + task.round - 1
    flags = _flags(design, {"batch_size": point.batch_size, "threads": point.threads, "seed": seed})
    own = ["--baseline-steps", "0", "--keep-checkpoints", "1", "--checkpoint-every", str(NEVER)]
    program = [sys.executable, "-m", "dptrain", "train", *flags, *own]
    program += ["--run-dir", str(result.parent)]
    command = launcher.command(point.ranks, point.threads, program)
    name = f"training {work.parent.name} of {point.ranks} ranks"
    _run(command, work, name, stop, display, result=result)


def common_prefetch(design: Design) -> int:
    """Return how many minibatches all launches read ahead, so that T(1) is comparable with T(p).

    By default a job reads ahead if a core is idle, which is so on one rank, but not if all cores
    compute. The largest point decides for all, unless the data are image files. Slurm fills nodes,
    so nothing is read ahead there.
    """
    reads_files = str(design.settings.get("data", "")).startswith("folder:")
    if reads_files or not load_backend(str(design.settings["backend"])).threaded:
        return 2
    most = max(point.ranks * point.threads for point in design.points())
    slurm = "srun" in design.launcher or "SLURM_JOB_ID" in os.environ
    return 2 if most < available_cores() and not slurm else 0


def command_of(design: Design, task: Task, launcher: Launcher, output: Path) -> list[str]:
    """Return the command of a launch, whose profile goes to `output`."""
    point = task.point
    options = ["--steps", str(design.steps), "--skip", str(SKIPPED)]
    if design.known_losses and point.ranks > 1:
        options.append("--known-losses")
    elif task.round > ROOF_ROUNDS:
        options.append("--no-roofs")
    if task.round == 1 and point.ranks <= TRACED_RANKS:
        options.append("--trace")  # The timeline of the report needs one trace per point.
    program = _program(design, point.batch_size, point.threads, options, output)
    return launcher.command(point.ranks, point.threads, program)


def _program(
    design: Design, batch_size: int, threads: int, options: Sequence[str], output: Path
) -> list[str]:
    flags = _flags(design, {"batch_size": batch_size, "threads": threads}, without=ONLY_TRAINING)
    command = [sys.executable, "-m", "dptrain", "profile"]
    return [*command, *flags, *options, "--output", str(output)]


def _flags(design: Design, own: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """Return the flags of the settings of a study, in which `own` replace those of the design."""
    values = {**design.settings, **own}
    flags = []
    for setting in settings():
        value = values.get(setting.name, setting.default)
        if value == setting.default or setting.name in without:
            continue
        if setting.type is bool:
            flags.append(setting.flag if value else setting.flag.replace("--", "--no-"))
        else:
            flags += [setting.flag, str(value)]
    return flags


def _run(
    command: Sequence[str],
    folder: Path,
    name: str,
    stop: StopRequest,
    display: StudyDisplay,
    *,
    result: Path | None = None,
) -> None:
    """Run a command to its end, with its output in the log of `folder`.

    Args:
        command: the command.
        folder: of its files.
        name: of the launch, for messages.
        stop: the request to stop it.
        display: shows the progress.
        result: the file that it writes last; None for the profile.

    Raises:
        LaunchError: it failed.
        Stopped: a signal requested a stop before its end.
    """
    with _claimed(folder, name) as log, Child(command, log) as child:
        while (code := child.wait(POLL_S)) is None:
            display.tick()
            if stop.requested:
                raise Stopped
    expected = result or folder / PROFILE
    if code == 0 and expected.is_file():
        return
    reason = cause(folder / LOG)
    ending = f"exit code {code}" if code else f"it wrote no {expected.name}"
    raise LaunchError(
        f"{name} failed ({ending}): {reason}; log: {folder / LOG}", 2 if code == 2 else 1
    )


@contextmanager
def _claimed(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open the log of a launch for this process alone, and remove files of an earlier attempt.

    Raises:
        UserError: another process runs this launch.
    """
    with writing(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / LOG).open("ab")
    with log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another `dptrain scale` in {folder.parent} runs {name}; wait for it, or choose "
                "another --output"
            ) from None
        except OSError:
            pass  # The file system has no locks.
        log.truncate(0)
        for other in folder.iterdir():
            if other.name != LOG and other.is_file():
                other.unlink()
        yield log
