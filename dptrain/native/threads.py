"""A thread pool that runs kernels in parallel, outside the interpreter.

A launch divides the items of a kernel into one contiguous range for each thread, and each range
into chunks. Every thread has a slot with the number of unclaimed chunks of its range.
It claims and computes the chunks of its own range one after another, and then those that are left
in the ranges of other threads. So a thread that sleeps, shares its core with another process or has
a slower core than others delays a launch by one chunk at most.

A claim is an atomic subtraction, so each chunk is computed once. A launch ends when all chunks have
been computed: no signal can leave a kernel running on memory that is freed.

An idle thread polls its slot and yields for a short time, and then sleeps until the caller wakes it
(`waiting`). The number of the computing thread selects the scratch memory; results must not depend
on it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.aligned import aligned_zeros
from dptrain.machine import own_cores
from dptrain.native.atomics import (
    add32,
    call,
    exchange32,
    fence,
    load,
    load32,
    pause,
    release32,
    store,
    store32,
)
from dptrain.native.clock import monotonic_ns
from dptrain.native.compilation import Request, collector_paused
from dptrain.native.entries import Record, address_of
from dptrain.native.jit import Kernel, KernelError, inlined, native, request_interpreted
from dptrain.native.waiting import wait_while, wake

LINE = 128
"""Distance in bytes of the slots of two threads: two cache lines, which processors fetch in
pairs."""
NEXT, BELL, OWNER_SLEEPS, MISSED = range(0, 16, 4)
"""Offsets in bytes of a slot's 32-bit words: unclaimed chunks, if positive; a word that changes
when the thread is woken; whether it sleeps or is about to (`ASLEEP`), or has been woken since
(`RUNG`); the number of launches in a row that it missed."""
RUNG_AT = 40
"""Offset in bytes of the 64-bit word in a slot with the time at which the thread was woken last."""
ASLEEP, RUNG = 1, 2
"""Values of `OWNER_SLEEPS`."""
CLOSED = -(1 << 30)
"""Value of `NEXT` that ends a thread. Claims that fail lower `NEXT` by less."""
BUSY, FAILED, ALONE, LAUNCHES, CALLER_SLEEPS = range(16, 36, 4)
"""Offsets in bytes of the 32-bit words in slot 0 that belong to the pool: a launch runs, a kernel
failed, the pool has no threads, number of launches, whether the caller sleeps."""
PENDING = 48
"""Offset in bytes of the 32-bit word in slot 0 with the number of chunks to be computed."""
RECORD, COUNT, RANGES, CHUNKS = range(64, 96, 8)
"""Offsets in bytes of the 64-bit words in slot 0 that describe the launch: its record, items,
ranges and chunks of each range."""
LOG = 96
"""Offset in bytes of the 64-bit word in slot 0 with the address of the log of chunks; 0 without."""
LOGGED, CAPACITY, CHUNK_TIMES = 0, 8, 32
"""Offsets in bytes in the log: the number of chunks, how many it can hold, the first chunk. A chunk
has four words: address of the launch's record, owner of the range and computing thread (as
``owner << 16 | thread``), begin and end."""
ENTRY, MEMORY, THREADS, GRAIN, ITEMS, ARGUMENTS = range(0, 48, 8)
"""Offsets in bytes of the words in a launch's record: kernel entry, pool memory, threads, smallest
chunk, number of items, arguments."""
MOST_CHUNKS = 8
"""Largest number of chunks of a range. A kernel prepares tables for each chunk, and of all threads
the one with the slowest core computes its last chunk alone."""
SPINS = 4000
"""Polls before an idle thread sleeps: 70 to 200 microseconds. Stages of a step follow each other
within less."""
PATIENCE = 32
"""Polls after which a thread claims the first chunk of another thread's range: 1 to 2 microseconds.
A thread that polls begins within less."""
LATE_NS = 500_000
"""Time that a thread may take to wake up. Measured: 30 to 100 µs if its core is idle. If it takes
longer, launches of which another thread computes its first chunk count as missed."""
TOLERATED = 3
"""Missed launches in a row after which a thread no longer polls and is woken rarely, because it has
no core."""
RAREST = 6
"""Logarithm of the largest number of launches between two attempts to wake such a thread."""
ALWAYS_NS = 600 * 10**9
"""Longest sleep of an idle thread, which nothing but a launch or the end of the pool wakes."""
LONGEST_SLEEP_NS = 100 * 10**6
"""Longest sleep of a caller, which the end of the last chunk wakes."""


@inlined
def _claim(slot):
    """Claim a chunk; return how many were left before, at most 0 if there was none."""
    left = load32(slot + NEXT)
    return add32(slot + NEXT, -1) if left > 0 else 0


@inlined
def _log_chunk(log, record, who, begin):
    """Add a chunk that was just computed to the log, unless the log is full."""
    number = add32(log + LOGGED, 1)
    if number < load(log + CAPACITY):
        at = log + CHUNK_TIMES + 32 * number
        store(at, record)
        store(at + 8, who)
        store(at + 16, begin)
        store(at + 24, monotonic_ns())


@inlined
def _compute(memory, owner, left, thread):
    """Compute a chunk of the range of thread `owner`, of which `left` chunks were left."""
    record, count = load(memory + RECORD), load(memory + COUNT)
    ranges, chunks = load(memory + RANGES), load(memory + CHUNKS)
    chunk, all_chunks = owner * chunks + chunks - left, ranges * chunks
    start, stop = count * chunk // all_chunks, count * (chunk + 1) // all_chunks
    log = load(memory + LOG)
    begin = monotonic_ns() if log else 0
    if call(load(record + ENTRY), start, stop, thread, record + ARGUMENTS):
        store32(memory + FAILED, 1)
    if log:
        _log_chunk(log, record, owner << 16 | thread, begin)


@inlined
def _end(memory, computed):
    """Count chunks as computed; the last one wakes the caller."""
    if add32(memory + PENDING, -computed) == computed and load32(memory + CALLER_SLEEPS):
        wake(memory + PENDING, 1, 0)


@inlined
def _compute_own(memory, thread):
    """Compute the chunks of this thread's range that are unclaimed."""
    slot, computed = memory + thread * LINE, 0
    left = _claim(slot)
    while left > 0:
        _compute(memory, thread, left, thread)
        computed += 1
        left = _claim(slot)
    if computed:
        if load32(slot + MISSED):
            store32(slot + MISSED, 0)
        _end(memory, computed)


@inlined
def _count_miss(slot):
    """Count a launch as missed by a thread, unless the thread may still be waking up."""
    waited = monotonic_ns() - load(slot + RUNG_AT)
    if load32(slot + OWNER_SLEEPS) != RUNG or waited > LATE_NS or waited == 0:
        add32(slot + MISSED, 1)


@inlined
def _ring(slot, launches):
    """Wake a thread if it sleeps, but rarely if it has no core."""
    excess = min(load32(slot + MISSED) - TOLERATED, RAREST)
    is_due = excess <= 0 or launches & ((1 << excess) - 1) == 0
    if is_due and exchange32(slot + OWNER_SLEEPS, ASLEEP, RUNG) == ASLEEP:
        store(slot + RUNG_AT, monotonic_ns())
        add32(slot + BELL, 1)
        wake(slot + BELL, 1, 0)


@inlined
def _compute_others(memory, thread, threads):
    """Compute chunks that are left in the ranges of other threads."""
    turns = 0
    for i in range(1, threads):
        owner = (thread + i) % threads
        slot = memory + owner * LINE
        left = load32(slot + NEXT)
        while left > 0:
            # A thread that polls is about to claim its first chunk.
            is_late = load32(slot + OWNER_SLEEPS) or left < load(memory + CHUNKS)
            if not is_late and turns < PATIENCE:
                pause()
                turns += 1
            else:
                claimed = _claim(slot)
                if claimed > 0:
                    if claimed == load(memory + CHUNKS):
                        _count_miss(slot)
                    _compute(memory, owner, claimed, thread)
                    _end(memory, 1)
            left = load32(slot + NEXT)


@inlined
def _open(memory, record, count, ranges, chunks):
    """Describe a launch, offer its chunks, and wake the threads that sleep."""
    store(memory + RECORD, record)
    store(memory + COUNT, count)
    store(memory + RANGES, ranges)
    store(memory + CHUNKS, chunks)
    # Only this thread writes these two words between launches.
    launches = load32(memory + LAUNCHES)
    release32(memory + LAUNCHES, launches + 1)
    release32(memory + PENDING, ranges * chunks)
    for thread in range(ranges):
        release32(memory + thread * LINE + NEXT, chunks)
    fence()  # A thread that is about to sleep sees its chunks, or this thread that it sleeps.
    for thread in range(1, ranges):
        slot = memory + thread * LINE
        if load32(slot + OWNER_SLEEPS) == ASLEEP:
            _ring(slot, launches)


@inlined
def _finish(memory):
    """Wait until all chunks have been computed."""
    pending = load32(memory + PENDING)
    while pending > 0:
        if not wait_while(memory + PENDING, pending, SPINS, 0, 0):
            store32(memory + CALLER_SLEEPS, 1)
            wait_while(memory + PENDING, pending, 0, 0, LONGEST_SLEEP_NS)
            store32(memory + CALLER_SLEEPS, 0)
        pending = load32(memory + PENDING)


@inlined
def _lock(memory):
    """Wait until no launch of another thread runs. Few programs launch from two threads, so the
    end of a launch wakes no thread.
    """
    while exchange32(memory + BUSY, 0, 1):
        wait_while(memory + BUSY, 1, SPINS, 0, 100_000)


@inlined
def _run(record):
    """Run a kernel on chunks that cover its items; return whether it failed.

    Args:
        record: address of the launch's record.
    """
    memory, threads, grain = load(record + MEMORY), load(record + THREADS), load(record + GRAIN)
    count = load(record + ITEMS)
    ranges = max(1, min(threads, (count + grain - 1) // grain))
    if ranges == 1:
        return 1 if call(load(record + ENTRY), 0, count, 0, record + ARGUMENTS) else 0
    _lock(memory)
    if load32(memory + FAILED):
        store32(memory + FAILED, 0)
    if load32(memory + ALONE):
        if call(load(record + ENTRY), 0, count, 0, record + ARGUMENTS):
            store32(memory + FAILED, 1)
    else:
        _open(memory, record, count, ranges, max(1, min(MOST_CHUNKS, count // (ranges * grain))))
        _compute_own(memory, 0)
        _compute_others(memory, 0, ranges)
        _finish(memory)
    failed = load32(memory + FAILED)
    release32(memory + BUSY, 0)
    return 1 if failed else 0


@native
def run_all(records: int, number: int, times: int) -> int:
    """Run launches one after another.

    Args:
        records: address of the addresses of their records.
        number: number of launches.
        times: address of int64 (1 + number,), which receives the begin of the first launch and the
            end of each, in nanoseconds of the clock of `monotonic_ns`; 0 if they are not needed.

    Returns:
        0, or the number of the launch that failed, counted from 1.
    """
    if times:
        store(times, monotonic_ns())
    for i in range(number):
        if _run(load(records + 8 * i)):
            return i + 1
        if times:
            store(times + 8 * (i + 1), monotonic_ns())
    return 0


@native
def _serve(memory: int, thread: int, threads: int) -> int:
    """Compute chunks until the pool is closed."""
    slot, woken = memory + thread * LINE, False
    left = load32(slot + NEXT)
    while left > CLOSED // 2:
        if left > 0:
            _compute_own(memory, thread)
            _compute_others(memory, thread, threads)
        has_core = woken or load32(slot + MISSED) < TOLERATED
        woken = False
        left = load32(slot + NEXT)
        if left > 0 or left <= CLOSED // 2:
            continue
        if not wait_while(slot + NEXT, left, SPINS if has_core else 0, 0, 0):
            bell = load32(slot + BELL)
            store32(slot + OWNER_SLEEPS, ASLEEP)
            if load32(slot + NEXT) == left:
                woken = wait_while(slot + BELL, bell, 0, 0, ALWAYS_NS) == 1
            store32(slot + OWNER_SLEEPS, 0)
        left = load32(slot + NEXT)
    return 0


@native
def _close(memory: int, threads: int) -> int:
    """Wait for the end of a running launch, then let all threads of the pool end."""
    _lock(memory)
    store32(memory + ALONE, 1)
    for thread in range(1, threads):
        slot = memory + thread * LINE
        store32(slot + NEXT, CLOSED)
        add32(slot + BELL, 1)
        wake(slot + BELL, 1, 0)
    store32(memory + BUSY, 0)
    return 0


class Launch:
    """A kernel bound to arrays, and to the threads that run it.

    `set` and then `run` do the same as a call. `run` returns after all items have been computed.

    The kernel is compiled at the latest before the first launch.

    Args:
        pool: the threads. The launch keeps them and the record alive.
        entry: request for the kernel's entry.
        record: what the native code reads: header, items, arguments.
        varying: number of the arguments, the last ones, that `set` replaces.
        name: of the kernel.

    Attributes:
        record: see above.
        failure: message of the error if the kernel fails.
    """

    def __init__(
        self, pool: ThreadPool, entry: Request, record: Record, varying: int, name: str
    ) -> None:
        self._pool, self._entry, self.record = pool, entry, record
        # A list of one launch, so that a second native function need not be compiled.
        self._list = np.array([record.address], np.int64)
        self._list_address = address_of(self._list)
        self._native = request_interpreted(run_all, 3)
        self.failure = f"kernel {name} raised an exception"
        self._counts = record.slots[ITEMS // 8]
        # `zip` in a launch took 3 µs in a step, because its code is not cached between stages.
        slots = record.slots[len(record.slots) - varying :]
        self._slots = [(*slot, i) for i, slot in enumerate(slots)]

    @cached_property
    def _run_all(self) -> Callable[[int, int, int], int]:
        """The native function `run_all`, after this launch was made ready."""
        self.make_ready()
        function: Callable[[int, int, int], int] = self._native.result
        return function

    def make_ready(self) -> None:
        """Compile the kernel, and start the threads, if necessary. `run` calls this."""
        words, index = self.record.slots[ENTRY // 8]
        words[index] = self._entry.result
        self._pool.start()

    def set_items(self, count: int) -> None:
        """Set the number of items."""
        words, index = self._counts
        words[index] = count

    def replace(self, index: int, value: Any) -> None:
        """Replace an argument of the kernel by another value of the same type."""
        words, start = self.record.slots[ARGUMENTS // 8 + index]
        words[start] = value

    def point(self, array: NDArray[Any]) -> None:
        """Replace the memory of the last argument by that of `array`, but not the shape.

        The caller keeps `array` alive until the launch has run. This takes a third of the time of
        `set`.
        """
        _, start, _ = self._slots[-1]
        self.record.point(start, array)

    def set(self, count: int, *rest: Any) -> None:
        """Set the number of items and the varying arguments."""
        self.set_items(count)
        for words, index, i in self._slots:
            words[index] = rest[i]

    def run(self) -> None:
        """Compute all items.

        Raises:
            KernelError: the kernel raised an exception.
        """
        if self._run_all(self._list_address, 1, 0):
            raise KernelError(self.failure)

    def __call__(self, count: int, *rest: Any) -> None:
        self.set(count, *rest)
        self.run()


class ThreadPool:
    """A pool of threads that live as long as the object.

    Every thread computes an item with the same operations, so results do not depend on which
    threads were late. After `close`, and in a forked process, the caller computes all items.

    Args:
        threads: largest number of threads that compute, including the caller's.
        workers: number of threads that the pool starts. The default is one less than the number of
            cores that this process may use, at most ``threads - 1``: more would only take time
            slices from each other.
    """

    def __init__(self, threads: int, workers: int | None = None) -> None:
        self.threads = threads
        if workers is None:
            workers = len(own_cores()) - 1
        workers = max(0, min(workers, threads - 1))
        self._memory = aligned_zeros((1 + workers) * LINE // 4, "int32").reshape(1 + workers, -1)
        self._memory[0, ALONE // 4] = workers == 0
        self._workers = workers
        self._serve = request_interpreted(_serve, 3) if workers else None
        close = request_interpreted(_close, 2) if workers else None
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        # The threads have no reference to the pool, so that the pool can be garbage-collected.
        self.close: Callable[[], object] = weakref.finalize(
            self, _dismiss, close, self._memory, self._threads, self._starting
        )
        if workers and hasattr(os, "register_at_fork"):
            memory = weakref.ref(self._memory)
            os.register_at_fork(after_in_child=lambda: _forget(memory()))

    def start(self) -> None:
        """Start the threads, unless they run already or the pool is closed."""
        if self._serve is None or self._threads:
            return
        serve = self._serve.result
        # A garbage collection could end another pool while `threading` holds its locks.
        with self._starting, collector_paused():
            if self._threads or self._memory[0, ALONE // 4]:
                return
            self._threads += [
                threading.Thread(
                    target=_live, args=(serve, self._memory, i), name=f"dptrain-{i}", daemon=True
                )
                for i in range(1, 1 + self._workers)
            ]
            for thread in self._threads:
                thread.start()

    def native_ids(self) -> list[int]:
        """Return the numbers of its running threads, without the caller's, for the system."""
        return [thread.native_id for thread in self._threads if thread.native_id is not None]

    @contextmanager
    def log_chunks(self, capacity: int) -> Iterator[NDArray[np.int64]]:
        """Log which thread computes each chunk, and when, until the block ends.

        A launch that one thread computes alone has no chunks. Reading the clock takes 50 ns per
        chunk.

        Args:
            capacity: number of chunks that the log can hold; later ones are not logged.

        Yields:
            int64 (1 + capacity, 4). The first row contains the number of chunks at its index 0.
            Each other row is a chunk: address of the launch's record, ``owner << 16 | thread``,
            begin and end in nanoseconds of `time.perf_counter_ns`.
        """
        log = np.zeros((1 + capacity, 4), np.int64)
        log.reshape(-1)[CAPACITY // 8] = capacity
        memory = self._memory.reshape(-1).view(np.int64)
        memory[LOG // 8] = address_of(log)
        try:
            yield log
        finally:
            memory[LOG // 8] = 0

    def bind(
        self, kernel: Kernel, *args: Any, varying: tuple[Any, ...] = (), grain: int = 1
    ) -> Launch:
        """Return the launch that runs `kernel` on `args`.

        Args:
            kernel: a kernel made by `dptrain.native.jit.kernel`.
            args: arrays and numbers that are the same in every launch.
            varying: examples of the arguments that follow the number of items in every launch.
            grain: number of items for which one more thread is worth its start; a launch has no
                more than ⌈items / grain⌉ ranges, and no smaller chunks.
        """
        entry = kernel.request(*args, *varying)
        head = 0, address_of(self._memory), len(self._memory), grain
        record = Record((*head, 0, *args, *varying))
        return Launch(self, entry, record, len(varying), kernel.py_func.__name__)


def _live(serve: Callable[[int, int, int], int], memory: NDArray[np.int32], thread: int) -> None:
    serve(address_of(memory), thread, len(memory))


def _dismiss(
    close: Request | None,
    memory: NDArray[np.int32],
    threads: list[threading.Thread],
    starting: threading.Lock,
) -> None:
    with starting:
        if close is None or not threads:
            memory[0, ALONE // 4] = 1
            return
    close.result(address_of(memory), len(memory))
    for thread in threads:
        # Any thread may drop the last reference to a pool, including one of the pool's own.
        if thread is not threading.current_thread():
            thread.join()


def _forget(memory: NDArray[np.int32] | None) -> None:
    """Reset the pool in a forked process, which has only the thread that forked."""
    if memory is not None:
        memory[:] = 0
        memory[0, ALONE // 4] = 1


def threads_of(replica: object) -> ThreadPool | None:
    """Return the thread pool of a replica; None if its backend has none."""
    found: ThreadPool | None = getattr(replica, "thread_pool", None)
    return found
