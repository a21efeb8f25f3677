"""What each rank of a node does at present, in a file that the ranks of the node map into memory.

A rank that hangs cannot say so. The others find out here: of ranks that make the same collective
calls, those that do not wait are late. A wait that can never end, because a rank has left the
program and all others wait, ends after `STUCK_S`. If the job has several nodes, their watchdogs
find this out together (`dptrain.comm.watchdog.idle_nodes`).

The file is in the folder of the job (`dptrain.comm.job`). It has a record of `WORDS` 64-bit words
for each rank of the job; those of ranks on other nodes stay zero. A rank writes only its own. The
last record is the watchdog's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.comm.deadline import Deadline, RankTimeoutError
from dptrain.comm.watchdog.watch import (
    ACTIVITY,
    LEFT,
    MAX_NAMED,
    MIN_POLLS,
    WAITING,
    WORKING,
    process_state,
)

if TYPE_CHECKING:
    from dptrain.comm.world import World

WORDS = ACTIVITY.size // 8
"""Words of a record: a cache line."""

_PID, _STATE, _PHASE, _STEP, _WAITS, _POLLS, _BATCHES = range(7)

TRAINING, CALLBACK, EVALUATING = range(1, 4)
_PHASES = {
    TRAINING: "in step {}",
    CALLBACK: "in a callback after step {}",
    EVALUATING: "in an evaluation after step {}",
}

SHOWN_S = 0.02
"""A shorter wait is not visible to other ranks."""

STUCK_S = 2.0
"""Time after which a wait ends if a rank has left and all others wait."""

_CHECK_S = 0.25


@dataclass(frozen=True)
class Record:
    """What one rank did when its record was read.

    Attributes:
        rank, pid: of the process.
        state: whether it works, waits for other ranks, or has left the program.
        phase: what it does in training, such as "in a callback after step 3"; "" outside.
        num_waits: number of its waits so far.
        num_polls: how often it has found that a wait has not ended.
    """

    rank: int
    pid: int
    state: int
    phase: str
    num_waits: int
    num_polls: int

    @property
    def is_working(self) -> bool:
        """True if the rank neither waits for other ranks nor has left the program."""
        return self.state == WORKING

    @property
    def has_left(self) -> bool:
        """True if the program of this rank has ended, by `sys.exit` too."""
        return self.state == LEFT


class Activity:
    """The records of the ranks of a node.

    Without a file, only this rank has a record.

    Args:
        rank, size: of COMM_WORLD.
        folder: the folder of the job; None uses no file.

    Example:
        >>> activity = Activity(0, 1)
        >>> activity.enter(CALLBACK, 3)
        >>> activity.records()[0].phase
        'in a callback after step 3'
    """

    def __init__(self, rank: int, size: int, folder: Path | None = None) -> None:
        self._first, self._size = rank * WORDS, size
        self._words = memoryview(bytearray((size + 1) * WORDS * 8)).cast("q")
        if folder is not None:
            with contextlib.suppress(OSError):
                self._words = _map(folder / "activity", len(self._words) * 8)
        own = self._words[self._first : self._first + WORDS]
        own[_STATE] = own[_PHASE] = own[_STEP] = own[_WAITS] = own[_POLLS] = own[_BATCHES] = 0
        own[_PID] = os.getpid()
        self._own = own

    def detach(self) -> None:
        """Stop using the file, in a child that was forked: its parent's record is not its own."""
        self._words = memoryview(bytearray(len(self._words) * 8)).cast("q")
        self._own = self._words[self._first : self._first + WORDS]

    def enter(self, phase: int, step: int) -> None:
        """Record what this rank does from now on.

        Args:
            phase: `TRAINING`, `CALLBACK` or `EVALUATING`; 0 outside of training.
            step: number of the step.
        """
        own = self._own
        own[_STEP], own[_PHASE] = step, phase

    def count_batch(self) -> None:
        """Record that this rank has evaluated another minibatch."""
        self._own[_BATCHES] += 1

    @property
    def num_batches(self) -> int:
        """Number of minibatches that this rank has evaluated."""
        count: int = self._own[_BATCHES]
        return count

    def begin_wait(self) -> None:
        """Record that this rank waits for other ranks."""
        self._own[_WAITS] += 1
        self._own[_STATE] = WAITING

    def poll(self) -> None:
        """Record that this rank still waits, or still leaves."""
        self._own[_POLLS] += 1

    def end_wait(self) -> None:
        """Record that this rank works again.

        After a wait that failed this is not called: the rank ends, and is not the one that is late.
        """
        self._own[_STATE] = WORKING

    def leave(self) -> None:
        """Record that the program of this rank has ended."""
        self._own[_STATE] = LEFT

    def records(self) -> list[Record]:
        """Return the records of the ranks of this node that have one."""
        found = []
        for rank in range(self._size):
            words = self._words[rank * WORDS : (rank + 1) * WORDS].tolist()
            if words[_PID]:
                phase = _PHASES.get(words[_PHASE], "").format(words[_STEP])
                found.append(
                    Record(rank, words[_PID], words[_STATE], phase, words[_WAITS], words[_POLLS])
                )
        return found

    def others(self) -> list[Record]:
        """Return the records of the other ranks."""
        return [record for record in self.records() if record.rank * WORDS != self._first]

    def all_have_left(self) -> bool:
        """Return True if every other rank of this node has left the program or has ended."""
        return all(
            other.has_left or process_state(other.pid) in ("", "Z") for other in self.others()
        )

    def stuck(self) -> list[Record]:
        """Return the records of all ranks if some have left and all others wait for them; else [].

        If the job has several nodes, the ranks of the others are not known, and the list is empty;
        see `left_while_all_wait`.
        """
        records = self.records()
        if len(records) < self._size or not any(record.has_left for record in records):
            return []
        return [] if any(record.is_working for record in records) else records

    def left_while_all_wait(self) -> int | None:
        """Return the rank that has left while those of all nodes wait; None if there is none."""
        number = self._words[self._size * WORDS + _STATE]
        return number - 1 if number else None


def _map(path: Path, size_bytes: int) -> memoryview:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size_bytes)  # A write to a full disk would be a bus error.
        return memoryview(mmap.mmap(file, size_bytes)).cast("q")
    finally:
        os.close(file)


class Wait:
    """A wait of this rank for others, which ends after the timeout of the job.

    A wait consists of polls: the caller polls, calls `check` if the wait has not ended, and `end`
    when it has.

    Args:
        world: the ranks.
        what: what this rank waits for, such as "a sum over the ranks".
        timeout_s: time limit. [default: `World.timeout`]
    """

    def __init__(self, world: World, what: str, timeout_s: float | None = None) -> None:
        self._world, self._what = world, what
        self._deadline = Deadline(world.timeout if timeout_s is None else timeout_s)
        self._is_shown = False
        self._next_check_s = _CHECK_S
        self._stuck: list[Record] = []
        self._stuck_since_s = 0.0
        self._was_stopped = False

    @property
    def waited_s(self) -> float:
        """Time since the wait began, without time in which this process was stopped."""
        return self._deadline.waited_s

    def check(self) -> None:
        """Record that the wait has not ended.

        Raises:
            RankTimeoutError: it took too long, or it can never end.
        """
        has_passed = self._deadline.has_passed()
        waited_s, activity = self._deadline.waited_s, self._world.activity
        if self._is_shown:
            activity.poll()
        elif waited_s > SHOWN_S:
            self._is_shown = True
            activity.begin_wait()
        if has_passed:
            raise self._world.timeout_error(self._what, waited_s)
        if waited_s > self._next_check_s:
            self._next_check_s = waited_s + _CHECK_S
            left = activity.left_while_all_wait()
            if left is not None:
                raise self._world.left_error(self._what, [left])
            self._check_stuck(activity.stuck())
            if waited_s > self._world.timeout:
                self._check_stopped(waited_s)

    def _check_stopped(self, waited_s: float) -> None:
        """End a wait that may be longer than the job's timeout if a rank is still stopped.

        Such a wait is for ranks that work. A rank that was stopped at one check alone may be one of
        a suspended job that goes on.
        """
        error = self._world.stopped_error(self._what, waited_s)
        if error is not None and self._was_stopped:
            raise error
        self._was_stopped = error is not None

    def _check_stuck(self, stuck: list[Record]) -> None:
        """End the wait if all ranks were stuck for `STUCK_S`, and polled meanwhile."""
        if [_state(each) for each in stuck] != [_state(each) for each in self._stuck]:
            self._stuck, self._stuck_since_s = stuck, self.waited_s
        elif stuck and self.waited_s - self._stuck_since_s > STUCK_S:
            pairs = zip(self._stuck, stuck, strict=True)
            if all(new.num_polls - old.num_polls >= MIN_POLLS for old, new in pairs):
                raise self._world.left_error(self._what, [r.rank for r in stuck if r.has_left])

    def end(self) -> None:
        """Record that the wait has ended."""
        if self._is_shown:
            self._world.activity.end_wait()


def _state(record: Record) -> tuple[int, int, int]:
    return record.rank, record.state, record.num_waits


def late_error(late: list[Record], host: str, rank: int, waited: str) -> RankTimeoutError:
    """Return the error that names ranks which have not arrived.

    Args:
        late: ranks of this node that work, at least one.
        host: name of this node.
        rank: the rank that waited.
        waited: how long and for what it waited.
    """
    first, *rest = sorted(late, key=lambda record: record.rank)
    phase = f" ({first.phase})" if first.phase else ""
    also = ""
    if rest:
        names = ", ".join(str(record.rank) for record in rest[:MAX_NAMED])
        also = f", nor has rank {names}{', …' * (len(rest) > MAX_NAMED)}"
    return RankTimeoutError(
        f"its process {first.pid} on {host} has not arrived{phase}{also}; rank {rank} {waited}",
        first.rank,
        is_cause=True,
    )
