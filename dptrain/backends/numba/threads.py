"""A team of threads that run kernels side by side. Kernels release the interpreter's lock."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from dptrain.backends.numba.jit import compile_kernel

Launch = Callable[..., None]
"""A kernel bound to arrays: called with the number of items, and what changes from call to call."""

_Replies = SimpleQueue[tuple[int, BaseException | None]]


class Team:
    """Threads that live as long as the team.

    Item i of a kernel is always computed by the same thread, so the same number of threads gives
    the same bits.

    Args:
        threads: how many compute, the caller's own included.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._round = 0
        self._replies: _Replies = SimpleQueue()
        self._tasks: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(threads - 1)]
        for i, tasks in enumerate(self._tasks):
            threading.Thread(
                target=_serve,
                args=(tasks, self._replies),
                name=f"dptrain-{i + 1}",
                daemon=True,
            ).start()
        # The threads know the queues but not the team, so the team can be collected.
        self.close: Callable[[], object] = weakref.finalize(self, _dismiss, self._tasks)

    def run(self, kernel: Any, count: int, *args: Any) -> None:
        """Run ``kernel(start, stop, thread, *args)`` on ranges that cover [0, count).

        Every thread is called, some perhaps with an empty range. An exception in any of them is
        raised here when all are done.
        """
        if not self._tasks:
            kernel(0, count, 0, *args)
            return
        threads = self.threads
        self._round += 1
        for i, tasks in enumerate(self._tasks, 1):
            start, stop = count * i // threads, count * (i + 1) // threads
            tasks.put((self._round, kernel, (start, stop, i, *args)))
        error: BaseException | None = None
        try:
            kernel(0, count // threads, 0, *args)
        except BaseException as raised:
            error = raised
        missing = len(self._tasks)
        while missing:
            # Replies of an earlier round are there when a signal ended its waiting.
            round_, reply = self._replies.get()
            if round_ == self._round:
                missing -= 1
                error = error or reply
        if error is not None:
            raise error

    def bind(self, kernel: Any, *args: Any, varying: tuple[Any, ...] = ()) -> Launch:
        """Compile `kernel` for `args` and return a call that runs it on them.

        Args:
            kernel: made by `dptrain.backends.numba.jit.kernel`.
            args: arrays and numbers that stay.
            varying: examples of what the call will be given after the number of items.
        """
        compile_kernel(kernel, *args, *varying)
        run = self.run

        def launch(count: int, *rest: Any) -> None:
            run(kernel, count, *args, *rest)

        return launch


def _serve(tasks: SimpleQueue[Any], replies: _Replies) -> None:
    while (task := tasks.get()) is not None:
        round_, kernel, args = task
        error: BaseException | None = None
        try:
            kernel(*args)
        except BaseException as raised:
            error = raised
        # Hold no array, and so no replica, while waiting for the next task.
        del task, kernel, args
        replies.put((round_, error))
        del error


def _dismiss(tasks: list[SimpleQueue[Any]]) -> None:
    for queue in tasks:
        queue.put(None)
