"""A thread pool that runs kernels in parallel, outside the interpreter.

Each thread except the caller's has a state word:

    ASLEEP ── the thread ──▶ IDLE ── a caller ──▶ POSTED ── the thread ──▶ IDLE
    IDLE ── the thread, after `spin_limit` polls ──▶ ASLEEP ── the thread, dismissed ──▶ GONE

An idle thread polls its state word; after `spin_limit` polls it sleeps in the interpreter until its
queue has a token. Every transition out of IDLE is an atomic exchange, so a caller cannot post to a
thread that has just fallen asleep; the caller then does that thread's work itself. Therefore a
launch never waits for a sleeping thread, and it has ended when it returns: no signal can leave a
kernel running on memory that is freed.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.memory import aligned_zeros
from dptrain.backends.numba.atomics import call, exchange, load, pause, store, yield_core
from dptrain.backends.numba.entries import Record, address_of
from dptrain.backends.numba.jit import Kernel, KernelError, inlined, interpreted, native

Launch = Callable[..., None]
"""A kernel bound to arrays. Its arguments are the number of items and the varying arguments."""

_Tokens = SimpleQueue[bool]

ASLEEP, IDLE, POSTED, GONE = range(4)
BUSY, RECORD, COUNT, FAILED = range(0, 32, 8)
"""Offsets in bytes of the current launch's words from the start of a pool's memory."""
DISMISSED = 8
"""Offset in bytes, from a thread's state word, of the word that requests its end."""
LINE = 128
"""Distance in bytes of the slots of two threads: two cache lines, which processors fetch in
pairs."""
ENTRY, MEMORY, THREADS, ARGUMENTS = range(0, 32, 8)
"""Offsets in bytes of the words in a launch's record: kernel entry, pool memory, threads,
arguments."""
DONE, ERROR, SLEEPERS = range(3)
"""Return values of `_run`."""
SPIN_LIMIT = 500_000
"""Polls after which an idle thread sleeps if each thread has its own core: 5 to 25 milliseconds."""
OVERSUBSCRIBED_SPIN_LIMIT = 2000
"""Polls after which an idle thread sleeps if threads share cores: 20 to 100 microseconds."""

_LOCAL_RANKS = (
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)
"""Environment variables in which launchers state the number of ranks on this node."""


@inlined
def _wait(turns):  # type: ignore[no-untyped-def]
    """Pause briefly; every 64th turn, yield the core to other threads."""
    if turns % 64 == 63:
        yield_core()
    else:
        pause()


@inlined
def _post(slot, patience):  # type: ignore[no-untyped-def]
    """Post to a thread if it becomes idle within `patience` turns; return whether it did."""
    turns = 0
    while True:
        state = exchange(slot, IDLE, POSTED)
        if state == IDLE:
            return True
        if state == GONE or turns >= patience:
            return False
        _wait(turns)
        turns += 1


@inlined
def _work(memory, thread, threads):  # type: ignore[no-untyped-def]
    """Run one thread's part of the current launch."""
    record, count = load(memory + RECORD), load(memory + COUNT)
    start, stop = count * thread // threads, count * (thread + 1) // threads
    if call(load(record + ENTRY), start, stop, thread, record + ARGUMENTS):
        store(memory + FAILED, 1)


@native
def _run(record: int, count: int, patience: int) -> int:
    """Run a kernel on ranges that cover [0, count), one range for each thread; ranges may be empty.

    Args:
        record: address of the launch's record.
        count: number of items.
        patience: turns to wait for threads that were woken. With 0, return `SLEEPERS` and run
            nothing if a thread is asleep.
    """
    memory, threads = load(record + MEMORY), load(record + THREADS)
    if threads == 1:
        failed = call(load(record + ENTRY), 0, count, 0, record + ARGUMENTS)
        return ERROR if failed else DONE
    if patience == 0:
        for i in range(1, threads):
            if load(memory + i * LINE) == ASLEEP:
                return SLEEPERS
    turns = 0
    while exchange(memory + BUSY, 0, 1):
        _wait(turns)
        turns += 1
    store(memory + RECORD, record)
    store(memory + COUNT, count)
    for i in range(1, threads):
        if not _post(memory + i * LINE, patience):
            _work(memory, i, threads)
    _work(memory, 0, threads)
    for i in range(1, threads):
        turns = 0
        while load(memory + i * LINE) == POSTED:
            _wait(turns)
            turns += 1
    failed = load(memory + FAILED)
    store(memory + FAILED, 0)
    store(memory + BUSY, 0)
    return ERROR if failed else DONE


@native
def _serve(memory: int, threads: int, thread: int, spin_limit: int) -> int:
    """Run the launches that are posted to a thread. Return after `spin_limit` polls without one."""
    slot, turns = memory + thread * LINE, 0
    exchange(slot, ASLEEP, IDLE)
    while True:
        idle_too_long = turns >= spin_limit or load(slot + DISMISSED)
        if idle_too_long and exchange(slot, IDLE, ASLEEP) == IDLE:
            return DONE
        if load(slot) == POSTED:
            _work(memory, thread, threads)
            store(slot, IDLE)
            turns = 0
        else:
            _wait(turns)
            turns += 1


class ThreadPool:
    """A pool of threads that live as long as the object.

    The same thread always computes item i of a kernel, so results are bitwise equal for the same
    number of threads. After `close`, and in a forked process, the caller does all of the work.

    Args:
        threads: number of threads that compute, including the caller's.
        spin_limit: polls after which an idle thread sleeps; default: `default_spin_limit`.
    """

    def __init__(self, threads: int, spin_limit: int | None = None) -> None:
        self.threads = threads
        self._memory = aligned_zeros(threads * LINE // 8, "int64").reshape(threads, -1)
        self._tokens: list[_Tokens] = [SimpleQueue() for _ in range(threads - 1)]
        self._threads = [
            threading.Thread(
                target=_live,
                args=(self._memory, i, tokens, spin_limit or default_spin_limit(threads)),
                name=f"dptrain-{i}",
                daemon=True,
            )
            for i, tokens in enumerate(self._tokens, 1)
        ]
        for thread in self._threads:
            thread.start()
        # The threads have no reference to the pool, so that the pool can be garbage-collected.
        self.close: Callable[[], object] = weakref.finalize(
            self, _dismiss, self._memory, self._tokens, self._threads
        )
        if self._threads and hasattr(os, "register_at_fork"):
            memory = weakref.ref(self._memory)
            os.register_at_fork(after_in_child=lambda: _forget(memory()))

    def bind(self, kernel: Kernel, *args: Any, varying: tuple[Any, ...] = ()) -> Launch:
        """Compile `kernel` for `args` and return a function that runs it on them.

        The function returns after all threads have finished. It raises `KernelError` if the kernel
        raised an exception.

        Args:
            kernel: a kernel made by `dptrain.backends.numba.jit.kernel`.
            args: arrays and numbers that are the same in every launch.
            varying: examples of the arguments that follow the number of items in every launch.
        """
        head = kernel.compile(*args, *varying), address_of(self._memory), self.threads
        record = Record((*head, *args, *varying))
        run, first = interpreted(_run, 3), len(head) + len(args)
        # `zip` in the launch took 3 µs in a step, because its code is not cached between stages.
        slots = [(*slot, i) for i, slot in enumerate(record.slots[first:])]

        def launch(count: int, *rest: Any) -> None:
            for words, index, i in slots:
                words[index] = rest[i]
            # The record outlives the launch that reads it.
            status = run(record.address, count, 0)
            if status == SLEEPERS:
                self._wake()
                status = run(record.address, count, OVERSUBSCRIBED_SPIN_LIMIT)
            if status == ERROR:
                raise KernelError(f"kernel {kernel.py_func.__name__} raised an exception")

        return launch

    def _wake(self) -> None:
        for slot, tokens in zip(self._memory[1:], self._tokens, strict=True):
            if slot[0] == ASLEEP:
                tokens.put(True)


def default_spin_limit(threads: int) -> int:
    """Return the polls after which idle threads of a pool sleep.

    Waking a thread needs the interpreter's lock, one thread after another, so threads that have
    their own cores should not sleep within a training step. If threads share cores, those that
    spin take time slices from those that compute.
    """
    return SPIN_LIMIT if threads <= _cores_of_this_rank() else OVERSUBSCRIBED_SPIN_LIMIT


def _cores_of_this_rank() -> int:
    """Return the number of cores of this process divided by the number of ranks that share them.

    If the launcher binds ranks to cores, each rank has its own cores; otherwise all ranks of a node
    share all cores.
    """
    machine = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    local_ranks = (re.match(r"\d+", os.environ.get(name, "")) for name in _LOCAL_RANKS)
    ranks = next((int(number[0]) for number in local_ranks if number), 1)
    return cores if cores * ranks <= machine else cores // ranks


def _live(memory: NDArray[np.int64], thread: int, tokens: _Tokens, spin_limit: int) -> None:
    """Run launches, sleep until a token arrives, and end if the token is False."""
    serve, address = interpreted(_serve, 4), address_of(memory)
    awake = True
    while awake:
        serve(address, len(memory), thread, spin_limit)
        awake = tokens.get()
    memory[thread, 0] = GONE


def _dismiss(
    memory: NDArray[np.int64], tokens: list[_Tokens], threads: list[threading.Thread]
) -> None:
    memory[1:, DISMISSED // 8] = 1
    for queue in tokens:
        queue.put(False)
    for thread in threads:
        # Any thread may drop the last reference to a pool, including one of the pool's own.
        if thread is not threading.current_thread():
            thread.join()


def _forget(memory: NDArray[np.int64] | None) -> None:
    """Mark all threads as gone: a forked process has only the thread that forked."""
    if memory is not None:
        memory[1:, 0] = GONE
        memory[0] = 0
