"""Snapshots: the state of a run in the memory of each node, which outlives its processes.

The first rank of each node keeps the state of a complete step in /dev/shm, or in the temporary
directory if /dev/shm is too small:

    dptrain-snapshots-USER-RUN-START/
      checkpoints/   the newest state, in the format of `CheckpointStore`
      best/          the state of the best epoch, if it is not in the run directory
      progress       the last completed step and its time, mapped into memory
      run            the path of the run directory

A state is written next to the one before, and renamed when it is complete, so that one of the two
is whole at any moment. Each start of a run has a folder of its own, so that a process of an earlier
start that is still alive never writes to it: the token RUN-START, which the file ``.snapshots`` of
the run directory contains, has a random part for the run and one for the start. A run that is
resumed calls `recover`, which writes the newest snapshot of all nodes to the run directory as a
checkpoint. Then it removes the folders of earlier starts. When training ends in order, it removes
its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.backends.replica import Replica
from dptrain.comm.collective import broadcast_arrays, call_on_rank_zero
from dptrain.comm.watchdog.mpi_files import SHARED_MEMORY
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.files import read_regular, write_whole
from dptrain.memory import format_bytes
from dptrain.training.persistence.checkpoints import (
    Arrays,
    Checkpoint,
    CheckpointStore,
    named_arrays,
)
from dptrain.training.persistence.rundir import CHECKPOINTS, SNAPSHOTS, RunDirectory
from dptrain.training.settings import Settings

COPIES = 3
"""States that a folder holds at most: the newest one, the next one while it is written, and the
best one."""

OVERHEAD_BYTES = 1 << 20
"""For manifests and `progress`."""

STALE_S = 86400.0
"""Age of a folder that no process uses after which another run on its node removes it."""

_PREFIX = "dptrain-snapshots-"
_PROGRESS, _RUN = "progress", "run"
_TOKEN = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}")
_WORDS_BYTES = 16


def places() -> tuple[Path, ...]:
    """Return the folders that may hold snapshots, the fastest first."""
    return tuple(dict.fromkeys((Path(SHARED_MEMORY), Path(tempfile.gettempdir()))))


class SnapshotFolder:
    """The snapshots of a run on this node.

    Attributes:
        path: the folder; `open` creates it.
        checkpoints, best: the newest state, and that of the best epoch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CheckpointStore(path / "checkpoints", 1)
        self.best = CheckpointStore(path / "best", 1)
        self._file: int | None = None
        self._words: memoryview | None = None

    @classmethod
    def of_token(cls, place: Path, token: str) -> SnapshotFolder:
        """Return the folder of the start with a token."""
        return cls(place / f"{_PREFIX}{os.getuid()}-{token}")

    @classmethod
    def find(cls, token: str) -> list[SnapshotFolder]:
        """Return the folders of the start with a token that exist on this node."""
        found = [cls.of_token(place, token) for place in places()]
        return [folder for folder in found if folder.path.is_dir()]

    @classmethod
    def of_run(cls, token: str) -> list[SnapshotFolder]:
        """Return the folders of all starts of the run with a token that exist on this node."""
        name = f"{_PREFIX}{os.getuid()}-{_run_of(token)}-*"
        return [cls(path) for place in places() for path in place.glob(name)]

    @property
    def newest_step(self) -> int:
        """Step of the newest state; -1 if there is none."""
        with suppress(UserError):
            return max(self.checkpoints.steps(), default=-1)
        return -1

    @property
    def last_step(self) -> tuple[int, int]:
        """The last completed step, and its time in nanoseconds since 1970; (-1, 0) if unknown."""
        with suppress(OSError):
            data = (self.path / _PROGRESS).read_bytes()
            if len(data) == _WORDS_BYTES:
                step, time_ns = memoryview(data).cast("q").tolist()
                return (step, time_ns) if time_ns else (-1, 0)
        return -1, 0

    def open(self, run: str) -> None:
        """Create the folder, and map the file of the progress into memory.

        Args:
            run: path of the run directory.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        (self.path / _RUN).write_text(run)
        self._file = os.open(self.path / _PROGRESS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # See `remove_stale`.
        os.posix_fallocate(self._file, 0, _WORDS_BYTES)  # A write to a full disk would end Python.
        self._words = memoryview(mmap.mmap(self._file, _WORDS_BYTES)).cast("q")

    def record(self, step: int) -> None:
        """Record that a step is complete."""
        if self._words is not None:
            self._words[0], self._words[1] = step, time.time_ns()

    def save_checkpoint(
        self, step: int, arrays: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> Path:
        """Replace the newest state; arguments and errors are those of `CheckpointStore.save`."""
        return self.checkpoints.save(step, arrays, facts)

    def close(self) -> None:
        """Keep the folder for another start of the run."""
        self._words = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def remove(self) -> None:
        """Delete the folder."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def is_stale(self) -> bool:
        """Return True if no process uses the folder, and has not for `STALE_S`."""
        with suppress(OSError):
            # Writes to mapped memory do not change the time of the file.
            used_s = max(self.path.stat().st_mtime, self.last_step[1] / 1e9)
            if time.time() - used_s < STALE_S:
                return False
            if not (self.path / _PROGRESS).exists():  # Its process was killed in `open`.
                return True
            with (self.path / _PROGRESS).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        return False


def remove_stale() -> None:
    """Remove snapshots of this user on this node that runs left long ago."""
    for place in places():
        for path in place.glob(f"{_PREFIX}{os.getuid()}-*"):
            folder = SnapshotFolder(path)
            if folder.is_stale():
                folder.remove()


def save_state(
    target: RunDirectory | SnapshotFolder,
    best: Checkpoint | None,
    step: int,
    arrays: Callable[[], Arrays],
    facts: Mapping[str, Any],
) -> None:
    """Write the state after a step, and before it that of the best epoch.

    The newest state is never older than the best one, so that a run which is resumed finds the best
    evaluation among those before.

    Args:
        target: the run directory, or snapshots.
        best: the best state, if `target` does not have it.
        step: number of completed steps.
        arrays: returns the state, unless it is the best one; as for `CheckpointStore.save`.
        facts: as for `CheckpointStore.save`.

    Raises:
        UserError: as `CheckpointStore.save`.
    """
    if best is not None:
        path = target.save_checkpoint(best.step, best.arrays, best.facts)
        target.best.link(path, best.step)
    if best is None or best.step != step:
        target.save_checkpoint(step, arrays(), facts)


@dataclass(frozen=True)
class Recovered:
    """What a run that is resumed has lost.

    Attributes:
        last_step: last step that was complete on any node; -1 if unknown.
        last_ns: when, in nanoseconds since 1970; 0 if unknown.
    """

    last_step: int = -1
    last_ns: int = 0


@dataclass(frozen=True)
class SnapshotPlan:
    """The snapshots of a run that trains.

    Attributes:
        text: one line that states where all nodes keep them.
        token: of this start.
        run: path of the run directory.
        folder: where this rank writes them; None on other ranks.
        recovered: what the start before has lost.
    """

    text: str
    token: str
    run: str
    folder: SnapshotFolder | None
    recovered: Recovered

    def open(self, step: int) -> None:
        """Create the folder of this rank.

        Args:
            step: number of completed steps.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.folder is not None:
            self.folder.open(self.run)
            self.folder.record(step)

    def remove(self) -> None:
        """Delete the snapshots of this start, because training has ended in order."""
        if self.folder is not None:
            self.folder.remove()


def plan_snapshots(
    world: World,
    chosen: Settings,
    replica: Replica,
    run: RunDirectory | None,
    recovered: Recovered,
    first_step: int,
) -> SnapshotPlan | None:
    """Decide where each node keeps snapshots; all ranks call this.

    Args:
        world: the ranks.
        chosen: the settings.
        replica: of this rank.
        run: the run directory, on rank 0.
        recovered: from `recover`.
        first_step: number of completed steps. If there are none, this is another run than one
            before in the same directory.

    Returns:
        None without the setting `snapshots`, or without a run directory.
    """
    if not chosen.snapshots:
        return None

    def find_tokens() -> tuple[str | None, str, str] | None:
        if run is None:
            return None
        before = read_token(run.path)
        token = new_token(run.path, before if first_step else None)
        return before, token, str(run.path.absolute())

    tokens = world.broadcast_json(call_on_rank_zero(world, find_tokens))
    if tokens is None:
        return None
    before, token, path = tokens
    if world.first_on_node():
        remove_stale()
        for old in () if before is None else SnapshotFolder.of_run(before):
            old.remove()
    needed = COPIES * sum(each.nbytes for each in named_arrays(replica).values()) + OVERHEAD_BYTES
    # Strategy central updates the state of the optimizer on rank 0 alone.
    writes = world.is_rank_zero if chosen.strategy == "central" else world.first_on_node()
    place, reason = choose_place(needed, chosen.snapshot_mib) if writes else (None, "")
    of_nodes = [
        (found, why)
        for does, found, why in world.all_gather_json([writes, place and str(place), reason])
        if does
    ]
    folder = None if place is None else SnapshotFolder.of_token(place, token)
    return SnapshotPlan(_describe(of_nodes, needed), token, path, folder, recovered)


def _describe(of_nodes: Sequence[tuple[str | None, str]], needed: int) -> str:
    """Return one line about the snapshots of all nodes.

    Args:
        of_nodes: the folder of each node that keeps some, or None and the reason.
        needed: size in bytes.

    Example:
        >>> _describe([("/dev/shm", ""), (None, "/dev/shm has 1 MiB free")], 3 << 20)
        'snapshots of the state in /dev/shm (at most 3.0 MiB); none on 1 of 2 nodes: /dev/shm has \
1 MiB free'
    """
    folders = dict.fromkeys(folder for folder, _ in of_nodes if folder is not None)
    reasons = [reason for folder, reason in of_nodes if folder is None]
    if not folders:
        return f"no snapshots: {reasons[0]}; a lost rank costs the steps since the last checkpoint"
    text = f"snapshots of the state in {' and '.join(folders)} (at most {format_bytes(needed)})"
    if reasons:
        text += f"; none on {len(reasons)} of {len(of_nodes)} nodes: {reasons[0]}"
    return text


def choose_place(needed: int, most_mib: int) -> tuple[Path | None, str]:
    """Return the folder for snapshots on this node, or None and the reason."""
    if needed > most_mib << 20:
        return None, f"they need {format_bytes(needed)}, but --snapshot-mib is {most_mib}"
    reasons = []
    for place in places():
        with suppress(OSError):
            status = os.statvfs(place)
            free = status.f_bavail * status.f_frsize if status.f_blocks else 1 << 62
            is_writable = os.access(place, os.W_OK | os.X_OK)
            if free >= needed and is_writable:
                return place, ""
            found = f"has {format_bytes(free)} free" if is_writable else "cannot be written"
            reasons.append(f"{place} {found}")
    return None, f"they need {format_bytes(needed)}; {' and '.join(reasons) or 'no folder exists'}"


def recover(world: World, run: RunDirectory | None, *, keeps: bool) -> Recovered:
    """Write the newest snapshot of all nodes to the run directory; all ranks call this.

    Nothing is written if the run directory has a checkpoint of this step or of a later one.

    Args:
        world: the ranks.
        run: the run directory that continues, on rank 0, which holds it.
        keeps: whether the run goes on with snapshots; otherwise they are removed.

    Returns:
        What the processes had made before they ended.

    Raises:
        UserError: the checkpoint cannot be written; on every rank.
    """
    token = world.broadcast_json(None if run is None else read_token(run.path))
    if token is None:
        return Recovered()
    folders = SnapshotFolder.find(token) if world.first_on_node() else []
    newest = max(folders, key=lambda each: each.newest_step, default=None)
    loaded = None if newest is None else _load(newest.checkpoints)
    last = max((folder.last_step for folder in folders), default=(-1, 0))
    found = world.all_gather_json([-1 if loaded is None else loaded.step, *last])
    step = max(step for step, _, _ in found)

    def find_present() -> int:
        return -1 if run is None else max(run.checkpoints.steps(), default=-1)

    if step > world.broadcast_json(call_on_rank_zero(world, find_present)):
        holder = next(rank for rank, each in enumerate(found) if each[0] == step)
        best = _load(newest.best) if newest is not None and world.rank == holder else None
        _write(world, run, holder, [best, loaded])
    if not keeps and world.first_on_node():
        for folder in SnapshotFolder.of_run(token):
            folder.remove()
    return Recovered(*max((last_step, last_ns) for _, last_step, last_ns in found))


def _load(store: CheckpointStore) -> Checkpoint | None:
    """Return the newest state that is whole; None if there is none."""
    with suppress(UserError):
        return store.load() if store.steps() else None
    return None


def _write(
    world: World, run: RunDirectory | None, holder: int, states: Iterable[Checkpoint | None]
) -> None:
    """Write the best and the newest state of rank `holder` to the run directory."""
    best, newest = (_send(world, holder, state) for state in states)

    def write() -> None:
        assert run is not None
        assert newest is not None
        if best is not None and best.step > max(run.best.steps(), default=-1):
            path = run.save_checkpoint(best.step, best.arrays, best.facts)
            run.best.link(path, best.step)
        if newest.step not in run.checkpoints.steps():
            run.save_checkpoint(newest.step, newest.arrays, newest.facts)

    call_on_rank_zero(world, write)


def _send(world: World, holder: int, state: Checkpoint | None) -> Checkpoint | None:
    """Return the state of rank `holder` on every rank."""
    described = None if state is None else [state.step, state.facts]
    described = world.all_gather_json(described)[holder]
    if described is None or holder == 0:
        return state
    arrays = broadcast_arrays(world, None if state is None else state.arrays, holder)
    return Checkpoint(described[0], arrays, described[1], Path("snapshot"))


def promote(run: RunDirectory) -> int | None:
    """Write the newest snapshot of this node to the run directory, and remove all of the run.

    For a run that no process trains any more.

    Args:
        run: the run directory.

    Returns:
        The step, if the run directory had none so new.

    Raises:
        UserError: another process trains there, or the checkpoint cannot be written; the snapshots
            stay.
    """
    token = read_token(run.path)
    if token is None or not SnapshotFolder.of_run(token):
        return None
    run.hold()
    try:
        before = max(run.checkpoints.steps(), default=-1)
        recover(World.single(), run, keeps=False)
        step = max(run.checkpoints.steps(), default=-1)
    finally:
        run.release()
    return step if step > before else None


def newest_step(path: Path) -> int:
    """Return the step from which a run directory would continue; -1 if it has no state.

    Args:
        path: a run directory; snapshots of this node count.
    """
    token = read_token(path)
    folders = [] if token is None else SnapshotFolder.find(token)
    steps = [folder.newest_step for folder in folders]
    with suppress(UserError):
        steps += CheckpointStore(path / CHECKPOINTS).steps()
    return max(steps, default=-1)


def read_token(path: Path) -> str | None:
    """Return the token of a run directory; None if it has none, or is a copy of another one."""
    with suppress(OSError):
        words = read_regular(path / SNAPSHOTS, 100).decode(errors="replace").split()
        if len(words) == 2 and _TOKEN.fullmatch(words[0]) and words[1] == str(path.stat().st_ino):
            return words[0]
    return None


def _run_of(token: str) -> str:
    """Return the part of a token that all starts of a run have in common."""
    return token.partition("-")[0]


def new_token(path: Path, before: str | None = None) -> str:
    """Write the token of another start to a run directory.

    Args:
        path: the run directory.
        before: the token of the start before; None if this is another run.
    """
    run = secrets.token_hex(8) if before is None else _run_of(before)
    token = f"{run}-{secrets.token_hex(4)}"
    write_whole(path / SNAPSHOTS, f"{token} {path.stat().st_ino}\n")
    return token
