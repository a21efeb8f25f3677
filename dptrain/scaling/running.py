"""Making the launches of a study, one after another, so that it can be stopped and gone on with."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

import numpy as np

from dptrain.comm.signals import StopRequest
from dptrain.errors import UserError
from dptrain.files import dump_json, write_whole, writing
from dptrain.machine import available_cores
from dptrain.measure.profile import Profile
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
from dptrain.scaling.load import Clock, cores_of_others, is_loud
from dptrain.scaling.points import refuse_small_data
from dptrain.training.settings import settings

POLL_S = 0.1
SKIPPED = 5
"""Steps before the clock counts."""
TRACED_RANKS = 64
"""Most of a launch that leaves a trace, which has a few hundred kilobytes a rank."""


class LaunchError(Exception):
    """A launch failed; `code` is what `dptrain scale` ends with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal asked for an end."""


@dataclass
class Times:
    """What launches take, learnt from those that are made; seconds.

    Attributes:
        start_s: from a launch's begin to its first step, about.
        sample_s: step time by threads and samples of a rank, alone on the machine.
        walls: of finished launches by the point's name.
    """

    steps: int
    start_s: float = 0.0
    sample_s: dict[tuple[int, int], float] = field(default_factory=dict)
    walls: dict[str, list[float]] = field(default_factory=dict)

    def of(self, task: Task) -> float:
        """Expected seconds of a launch."""
        point = task.point
        if point.name in self.walls:
            return float(np.mean(self.walls[point.name]))
        crowd = max(point.ranks * point.threads / available_cores(), 1.0)
        step = self.sample_s.get((point.threads, _local(task)), 0.0)
        return self.start_s * crowd + (self.steps + SKIPPED) * step * crowd

    def total(self, tasks: Sequence[Task]) -> float:
        """Of launches that are to come."""
        return sum(map(self.of, tasks))


def _local(task: Task) -> int:
    return -(-task.point.batch_size // task.point.ranks)


def _walls(folder: Path, tasks: Sequence[Task]) -> dict[str, list[float]]:
    """Seconds of the launches that are made, by the point's name."""
    found: dict[str, list[float]] = {}
    for task in tasks:
        wall_s = launch_facts(folder / task.folder).get("wall_s")
        if wall_s is not None:
            found.setdefault(task.point.name, []).append(float(wall_s))
    return found


def run_tasks(
    folder: Path, design: Design, tasks: Sequence[Task], launcher: Launcher, display: StudyDisplay
) -> bool:
    """Make launches that have no profile yet.

    Kernels are compiled first, by a short job for each size of a rank's batch, which also tells how
    long the rest will take.

    Args:
        folder: of the study.
        design: what its launches share.
        tasks: to make, in this order.
        launcher: what starts ranks.
        display: where progress is told.

    Returns:
        Whether all are made; if not, a signal asked for an end.

    Raises:
        LaunchError: one failed; what is finished stays.
        UserError: the folder cannot be written, another process makes the same launch, or the data
            is too small for a minibatch.
    """
    left = unfinished(folder, tasks)
    if not left:
        return True
    times = Times(design.steps, walls=_walls(folder, tasks))
    with StopRequest() as stop, display:
        if _is_loud_now(stop):
            display.say("warning: other programs are busy on this machine; figures will scatter")
        if crowd := _crowd(left, launcher):
            display.say(f"warning: {crowd}")
        try:
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


def _is_loud_now(stop: StopRequest) -> bool:
    before = Clock.now()
    time.sleep(0.3)
    return is_loud(cores_of_others(before)) and not stop.requested


def _crowd(tasks: Sequence[Task], launcher: Launcher) -> str:
    """What to say where ranks will share cores; "" where they will not, or run elsewhere."""
    most = max((task.point for task in tasks), key=lambda point: point.ranks * point.threads)
    cores, workers = available_cores(), most.ranks * most.threads
    if launcher.is_srun or workers <= cores:
        return ""
    some = f"{cores} core{'s' * (cores > 1)}"
    return (
        f"{workers} workers share {some} at {most.name}: at most {cores / workers:.0%} efficiency "
        "is possible there"
    )


def _prepare(
    folder: Path, design: Design, tasks: Sequence[Task], launcher: Launcher,
    display: StudyDisplay, stop: StopRequest, times: Times,
) -> None:  # fmt: skip
    """One rank, a few steps, for every batch that a rank will have: compiles, and is timed."""
    # Parts of one study run beside each other, perhaps on other machines: each has its own place.
    own = folder / f"{PREPARE}{socket.gethostname()}-{os.getpid()}"
    shapes = sorted({(task.point.threads, _local(task)) for task in tasks})
    with _removed_unless_failed(own):
        for number, (threads, samples) in enumerate(shapes, 1):
            display.say_now(f"compiling kernels, batch {samples} ({number} of {len(shapes)})")
            place = own / f"t{threads}-b{samples}"
            options = ["--steps", "3", "--skip", "1", "--no-roofs"]
            program = _program(design, samples, threads, options, place)
            begin = time.monotonic()
            _run(launcher.command(1, threads, program), place, "preparing", stop, display)
            wall_s = time.monotonic() - begin
            step_s = Profile.read(place / PROFILE).step_ms.median / 1e3
            times.sample_s[threads, samples] = step_s
            # The first one compiles; the last says what a start takes when that is done.
            times.start_s = max(wall_s - 4 * step_s, 0.0)


@contextmanager
def _removed_unless_failed(place: Path) -> Iterator[None]:
    """A folder that goes when the block ends, unless a launch failed: its log says why."""
    shutil.rmtree(place, ignore_errors=True)
    try:
        yield
    except Stopped:
        shutil.rmtree(place, ignore_errors=True)
        raise
    shutil.rmtree(place, ignore_errors=True)


def _launch(
    folder: Path, design: Design, task: Task, launcher: Launcher, display: StudyDisplay,
    stop: StopRequest,
) -> float:  # fmt: skip
    """Make one launch; its seconds."""
    place, point = folder / task.folder, task.point
    command = command_of(design, task, launcher, place)
    before, begin = Clock.now(), time.monotonic()
    began = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    _run(command, place, f"launch {place.name} of {point.ranks} ranks", stop, display)
    wall_s = time.monotonic() - begin
    others = cores_of_others(before) if launcher.starts_here else None
    facts = {"command": command, "began": began, "wall_s": wall_s, "other_cores": others}
    write_whole(place / LAUNCHED, dump_json(facts, indent=1) + "\n", "--output")
    refuse_small_data(task.folder, Profile.read(place / PROFILE))
    return wall_s


def command_of(design: Design, task: Task, launcher: Launcher, place: Path) -> list[str]:
    """Arguments of the launcher."""
    point = task.point
    options = ["--steps", str(design.steps), "--skip", str(SKIPPED)]
    if task.round == 1 and point.ranks <= TRACED_RANKS:
        options.append("--trace")  # For the report's timeline; one of each point is enough.
    program = _program(design, point.batch_size, point.threads, options, place)
    return launcher.command(point.ranks, point.threads, program)


def _program(
    design: Design, batch_size: int, threads: int, options: Sequence[str], place: Path
) -> list[str]:
    own = {**design.settings, "batch_size": batch_size, "threads": threads}
    flags = []
    for setting in settings():
        value = own.get(setting.name, setting.default)
        if value == setting.default:
            continue
        if setting.type is bool:
            flags.append(setting.flag if value else setting.flag.replace("--", "--no-"))
        else:
            flags += [setting.flag, str(value)]
    output = ["--output", str(place)]
    return [sys.executable, "-m", "dptrain", "profile", *flags, *options, *output]


def _run(
    command: Sequence[str], place: Path, what: str, stop: StopRequest, display: StudyDisplay
) -> None:
    """Run a command to its end, its output in the log of `place`.

    Raises:
        LaunchError: it failed.
        Stopped: a signal came first.
    """
    with _claimed(place, what) as log, Child(command, log) as child:
        while (code := child.wait(POLL_S)) is None:
            display.tick()
            if stop.requested:
                raise Stopped
    if code == 0 and (place / PROFILE).is_file():
        return
    reason = cause(place / LOG)
    ending = f"exit code {code}" if code else "no profile came of it"
    raise LaunchError(
        f"{what} failed ({ending}): {reason}; log: {place / LOG}", 2 if code == 2 else 1
    )


@contextmanager
def _claimed(place: Path, what: str) -> Iterator[IO[bytes]]:
    """The log of a launch, held by one process at a time; what a broken one left is removed.

    Raises:
        UserError: another process holds it.
    """
    with writing(place, "--output"):
        place.mkdir(parents=True, exist_ok=True)
        log = (place / LOG).open("ab")
    with log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{what} is being made by another `dptrain scale` in {place.parent}; wait for it, "
                "or choose another --output"
            ) from None
        except OSError:
            pass  # A file system without locks.
        log.truncate(0)
        for other in place.iterdir():
            if other.name != LOG and other.is_file():
                other.unlink()
        yield log
