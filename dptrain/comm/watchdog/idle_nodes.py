"""Detection of a rank that has left its program while the ranks of all nodes wait.

The ranks of a node find this out themselves (`dptrain.comm.node.activity`). They do not know those
of other nodes, so the watchdog of a node sends a line to that of the first: ``idle COUNT RANK`` if
its COUNT ranks have waited or left for `IDLE_S`, where RANK is the first one that has left, or -1;
and ``idle 0 -1`` when one of them works again. The first node adds the counts. When all ranks are
idle and stay so for `CONFIRM_S`, and one has left, it sends ``left RANK``; the ranks that wait then
end with an error. `watch.py` imports this file without the rest of the package.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

IDLE_S = 2.0
"""Time in which a node makes no progress before it counts as idle."""

CONFIRM_S = 1.0
"""Time in which all nodes are idle before a wait ends, since messages may be in transit."""

Status = tuple[int, int]
"""Number of idle ranks of a node, or 0; the first that has left, or -1."""

_BUSY: Status = (0, -1)


class IdleNode:
    """Whether the ranks of this node wait or have left.

    Args:
        path: the file of `dptrain.comm.node.activity`.
        record: its records.
        states: the numbers of the states in which a rank works, waits, and has left.
        min_polls: polls of each waiting rank in `IDLE_S`: one that did not run is not idle.
    """

    def __init__(
        self, path: Path, record: struct.Struct, states: tuple[int, int, int], min_polls: int
    ) -> None:
        self._path, self._record, self._min_polls = path, record, min_polls
        self._working, self._waiting, self._left = states
        self._seen: list[tuple[int, int, int]] = []
        self._polls: dict[int, int] = {}
        self._since = 0.0

    def status(self, now: float) -> Status:
        """Return the status at a time in seconds; to be called some times a second."""
        records: list[tuple[int, ...]] = []
        with suppress(OSError, struct.error):
            records = list(self._record.iter_unpack(self._path.read_bytes()))
        ranks = [(rank, *fields) for rank, fields in enumerate(records) if fields[0]]
        seen = [(rank, state, waits) for rank, _, state, _, _, waits, *_ in ranks]
        polls = {rank: polls for rank, _, _, _, _, _, polls, *_ in ranks}
        if not ranks or any(state == self._working for _, state, _ in seen) or seen != self._seen:
            self._seen, self._polls, self._since = seen, polls, now
            return _BUSY
        waiting = [rank for rank, state, _ in seen if state == self._waiting]
        if waiting and now - self._since < IDLE_S:
            return _BUSY
        if any(polls[rank] - self._polls[rank] < self._min_polls for rank in waiting):
            return _BUSY
        return len(seen), next((rank for rank, state, _ in seen if state == self._left), -1)


class IdleNodes:
    """The part of a watchdog that exchanges the status of nodes.

    Args:
        node: the ranks of this node.
        size: number of ranks of the job.
        send: sends a line to the other nodes.
        end: called on every node with the rank that has left, when all others wait.
    """

    def __init__(
        self, node: IdleNode, size: int, send: Callable[[str], None], end: Callable[[int], None]
    ) -> None:
        self._node, self._size, self._send, self._end = node, size, send, end
        self._own, self._idle_since = _BUSY, 0.0
        self._has_ended = False

    def check(self, others: Iterable[str] | None, now: float | None = None) -> None:
        """Exchange the status of this node; to be called some times a second.

        Args:
            others: last lines of the other nodes, on the first node; None elsewhere.
            now: the time in seconds. [default: of the monotonic clock]
        """
        now = time.monotonic() if now is None else now
        own = self._node.status(now)
        if others is None:
            if own != self._own:
                self._own = own
                self._send(f"idle {own[0]} {own[1]}")
            return
        self._own = own
        nodes = [own, *map(_parse, others)]
        left = [rank for _, rank in nodes if rank >= 0]
        if not left or sum(count for count, _ in nodes) < self._size:
            self._idle_since = now
        elif now - self._idle_since >= CONFIRM_S and not self._has_ended:
            self._has_ended = True
            self._send(f"left {min(left)}")
            self._end(min(left))

    def receive(self, line: str) -> None:
        """Handle the line ``left RANK`` of the first node."""
        if not self._has_ended:
            self._has_ended = True
            self._end(int(line.split()[1]))


def _parse(line: str) -> Status:
    """Return the status in a line of another node; it is busy if the line is none.

    Example:
        >>> _parse("idle 2 -1"), _parse("")
        ((2, -1), (0, -1))
    """
    words = line.split()
    try:
        return int(words[1]), int(words[2])
    except (IndexError, ValueError):
        return _BUSY
