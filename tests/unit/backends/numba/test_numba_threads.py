"""Thread pools compute each item once, even if threads sleep, fork, end or are interrupted."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from dptrain.aligned import aligned_zeros
from dptrain.api import make_replica
from dptrain.machine import own_cores
from dptrain.native.atomics import add32, load32, pause
from dptrain.native.jit import Items, KernelError, kernel
from dptrain.native.threads import ALONE, ASLEEP, MISSED, OWNER_SLEEPS, ThreadPool
from dptrain.network import Network, ReLU
from tests.tiers import tiered

SIZE = 1000


@kernel
def mark(items: Items, times: Any, owner: Any, amount: int) -> None:
    """Add to items, and write the computing thread and the first item of its range.

    The second row of `times` counts the items that each thread computed.
    """
    for i in range(items.start, items.stop):
        times[0, i] += amount
        owner[0, i], owner[1, i] = items.thread, items.start
    times[1, items.thread] += items.stop - items.start


@kernel
def fail(items: Items, bad: int) -> None:
    if items.start <= bad < items.stop:
        raise ArithmeticError


@kernel
def linger(items: Items, seen: Any, computed: int) -> None:
    """Write the computing thread. Thread 1 computes item 8 until all others have been computed."""
    for i in range(items.start, items.stop):
        if i == 8 and items.thread == 1:
            while load32(computed) < len(seen) - 1:
                pause()
        seen[i] = items.thread
        add32(computed, 1)


class Marks:
    """A launch of `mark`, and what it should have done."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool, self.items = pool, 0
        self.times, self.owner = np.zeros((2, SIZE), np.int64), np.full((2, SIZE), -1)
        self.expected = np.zeros(SIZE, np.int64)
        self._launch = pool.bind(mark, self.times, self.owner, varying=(1,))

    def launch(self, count: int, amount: int = 1) -> None:
        self._launch(count, amount)
        self.items += count
        self.expected[:count] += amount

    def check(self) -> None:
        np.testing.assert_array_equal(self.times[0], self.expected)
        assert self.times[1, : self.pool.threads].sum() == self.items


@pytest.fixture(params=[(1, 0), (2, 1), (3, 2), (4, 3), (4, 1), (3, 0)], ids=str)
def pool(request: pytest.FixtureRequest) -> ThreadPool:
    """A pool with all of its threads, or with fewer."""
    return ThreadPool(*request.param)


def sleep(pool: ThreadPool) -> None:
    """Wait until all threads sleep."""
    deadline = time.monotonic() + 30
    while (pool._memory[1:, OWNER_SLEEPS // 4] != ASLEEP).any():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 300])
def test_chunks_cover_the_items(pool: ThreadPool, count: int) -> None:
    """Every item once, in ranges that do not depend on which thread was late."""
    marks = Marks(pool)
    firsts = set()
    for _ in range(3):
        marks.owner[:] = -1
        marks.launch(count)
        assert (marks.owner[0, :count] < pool.threads).all()
        assert (marks.owner[:, count:] == -1).all()
        firsts.add(tuple(marks.owner[1, :count].tolist()))
        sleep(pool)  # so that the next launch has to wake them
    assert len(firsts) == 1
    marks.check()


@pytest.mark.parametrize(
    ("count", "chunks"), [(0, 0), (9, 1), (10, 1), (11, 2), (30, 3), (99, 8), (4000, 32)]
)
def test_chunks_are_not_smaller_than_the_grain(count: int, chunks: int) -> None:
    owner, times = np.full((2, 4000), -1), np.zeros((2, 4000), np.int64)
    ThreadPool(4, 3).bind(mark, times, owner, varying=(1,), grain=10)(count, 1)
    assert len(set(owner[1, :count].tolist())) == chunks


def test_the_log_has_every_chunk_until_it_is_full() -> None:
    pool = ThreadPool(2, workers=1)
    marks = Marks(pool)
    with pool.log_chunks(20) as log:
        for _ in range(2):
            marks.launch(SIZE)
    marks.launch(SIZE)
    marks.check()
    assert log[0, 0] == 32
    chunks = log[1:]
    owners, threads = chunks[:16, 1] >> 16, chunks[:16, 1] & 0xFFFF
    assert np.bincount(owners).tolist() == [8, 8]
    assert set(threads.tolist()) <= {0, 1}
    assert (chunks[:, 2] <= chunks[:, 3]).all()
    assert len(set(chunks[:, 0].tolist())) == 1
    pool.close()


def test_other_threads_compute_what_a_slow_thread_leaves() -> None:
    """A thread that is busy with one chunk keeps no other chunk of its range."""
    pool = ThreadPool(2, 1)
    seen, computed = np.full(16, -1), aligned_zeros(2, "int32")
    launch = pool.bind(linger, seen, computed.ctypes.data)
    slow, deadline = 0, time.monotonic() + 60
    while slow < 5:
        assert time.monotonic() < deadline
        seen[:], computed[:] = -1, 0
        launch(16)
        if seen[8] == 1:
            assert (seen == 1).sum() == 1
            slow += 1


def test_thousands_of_launches(pool: ThreadPool) -> None:
    """Of uneven sizes, in a row and with pauses in which threads fall asleep, or almost."""
    rng = np.random.default_rng(pool.threads)
    marks = Marks(pool)
    for i, count in enumerate(rng.integers(0, SIZE, 4000)):
        marks.launch(int(count), i)
        if i % 100 == 0:
            time.sleep(rng.uniform(0, 3e-4))
    marks.check()


def test_threads_sleep_when_there_is_nothing_to_do(pool: ThreadPool) -> None:
    marks = Marks(pool)
    marks.launch(SIZE)
    sleep(pool)
    wall, used = time.monotonic(), time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.5 * (time.monotonic() - wall)
    marks.launch(SIZE)
    marks.check()


OVERSUBSCRIBED = """
import os, resource
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
pool = ThreadPool(8, workers=7)
marks = Marks(pool)

def switches():
    # Without those that the scheduler forces, which depend on other programs.
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

marks.launch(SIZE)
before = switches()
for _ in range(2000):
    marks.launch(SIZE)
marks.check()
print(switches() - before)
"""


@pytest.mark.more
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity masks")
def test_threads_that_share_a_core_seldom_switch() -> None:
    """Other threads compute the ranges of those that have no core, and seldom wake them."""
    out, _ = start(OVERSUBSCRIBED).communicate(timeout=120)
    assert int(out) < 2000  # 7 threads that wake in each of 2000 launches switch 14,000 times


@pytest.mark.more
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity masks")
def test_a_pool_starts_no_more_threads_than_cores() -> None:
    process = start(
        """
import threading
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
before = threading.active_count()
pool = ThreadPool(8)
marks = Marks(pool)
marks.launch(SIZE)
marks.check()
print(threading.active_count() - before)
"""
    )
    assert process.communicate(timeout=60)[0] == "0\n"


def test_a_kernel_that_raises(pool: ThreadPool) -> None:
    """In any chunk; later launches are not affected."""
    launch, marks = pool.bind(fail, varying=(0,)), Marks(pool)
    for bad in range(6):
        for _ in range(2):
            with pytest.raises(KernelError, match="kernel fail raised"):
                launch(6, bad)
        launch(6, 6)
        marks.launch(SIZE)
    marks.check()


@pytest.mark.parametrize("size", [(1, 0), (2, 1), (3, 2), (4, 3), (4, 1), (3, 0)], ids=str)
def test_closed_in_the_middle(size: tuple[int, int]) -> None:
    """Threads end although launches never pause; the caller computes all items alone.

    Each time, the end of the pool finds the threads at another point of their work.
    """
    deadline = time.monotonic() + 60
    for _ in range(10):
        pool = ThreadPool(*size)
        marks = Marks(pool)
        closer = threading.Timer(0.01, pool.close)
        closer.start()
        while closer.is_alive():
            assert time.monotonic() < deadline
            for _ in range(50):
                marks.launch(SIZE - 1)
        assert pool._memory[0, ALONE // 4]
        assert not any(thread.is_alive() for thread in pool._threads)
        for count in (3, SIZE):
            marks.launch(count)
        marks.check()


def test_two_callers(pool: ThreadPool) -> None:
    """Launches of one pool from two threads take turns."""
    both = Marks(pool), Marks(pool)

    def run(marks: Marks) -> None:
        for i in range(1500):
            marks.launch(i % SIZE)

    callers = [threading.Thread(target=run, args=(marks,)) for marks in both]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for marks in both:
        marks.check()


def test_varying_arrays_are_read_where_they_are() -> None:
    """Of another length, read-only, or made anew."""
    owner = np.zeros((2, SIZE), np.int64)
    launch = ThreadPool(2, 1).bind(mark, varying=(np.zeros((2, 2), np.int64), owner, 1))
    for length in (SIZE, 7, 30):
        times = np.zeros((2, length), np.int64)
        launch(length, times, owner, 3)
        assert (times[0] == 3).all()
        assert times[1, :2].sum() == length


def test_threads_end_with_the_replica() -> None:
    before = set(threading.enumerate())
    replica = make_replica(
        Network((3,), [ReLU()]), "numba", batch_size=2, threads=4, training=False
    )
    assert set(threading.enumerate()) == before
    replica.predict(np.zeros((2, 3), np.float32))
    started = set(threading.enumerate()) - before
    assert len(started) == min(3, len(own_cores()) - 1)
    del replica
    gc.collect()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()


PROGRAM = """
import os, sys, warnings
sys.path[:0] = {path!r}
from test_numba_threads import SIZE, Marks, ThreadPool
pools = [ThreadPool(2, 1), ThreadPool(3, 2)]
all_ = [Marks(pool) for pool in pools]

def work(rounds):
    for i in range(rounds):
        for marks in all_:
            marks.launch(i % SIZE)

work(100)
"""
PATH = [str(path) for path in sys.path]


def start(body: str) -> subprocess.Popen[str]:
    """Another process that made two pools, and goes on with `body`."""
    program = PROGRAM.format(path=[*PATH, str(__file__).rpartition("/")[0]]) + body
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_interrupts() -> None:
    """Ctrl-C ends a launch at its end, and nothing hangs or is lost, however often it comes."""
    process = start(
        """
import signal
# Where tests run in the background of a shell, children ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ in range(5):
    try:
        print("ready", flush=True)
        while True:
            work(100)
    except KeyboardInterrupt:
        for marks in all_:
            # What was interrupted may have run, without having been counted.
            marks.items = marks.times[1, : marks.pool.threads].sum()
            marks.expected[:] = marks.times[0]
            marks.check()
work(100)
for marks in all_:
    marks.check()
print("done", flush=True)
"""
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("done\n", 0)


@pytest.mark.parametrize("asleep", tiered([False, True], [True]))
def test_a_process_ends_whatever_its_threads_do(asleep: bool) -> None:
    body = "import time; time.sleep(0.1)" if asleep else "print('end', flush=True)"
    process = start(body)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.more
def test_a_killed_process_ends() -> None:
    process = start("print('ready', flush=True)\nwhile True: work(100)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.more
def test_a_forked_process_does_the_work_of_all() -> None:
    """Only the thread that forks lives on in the child."""
    process = start(
        """
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
work(200)
for marks in all_:
    marks.check()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    )
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_launches_that_end_before_a_thread_wakes_up_are_not_missed() -> None:
    pool = ThreadPool(2, workers=1)
    pool.start()
    marks = Marks(pool)
    for _ in range(30):
        sleep(pool)
        marks.launch(2)
    marks.check()
    # Another process can delay the launch itself, but seldom does.
    assert pool._memory[1, MISSED // 4] < 10


def test_the_end_of_a_pool_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool(2, workers=1)
    pool.start()

    def compile_nothing(*arguments: object) -> None:
        raise AssertionError("the garbage collector may end a pool while Numba compiles")

    monkeypatch.setattr("dptrain.native.compilation.compile_requested", compile_nothing)
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)


@pytest.mark.timeout(60)
def test_a_pool_may_end_in_a_thread_that_another_pool_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A garbage collection ends a pool in whichever thread it runs."""
    other = ThreadPool(2, workers=1)
    other.start()
    ended, cycle = other._threads, [other]
    cycle.append(cycle)  # type: ignore[arg-type]
    del other, cycle
    set_ident = threading.Thread._set_ident  # type: ignore[attr-defined]

    def collect_first(thread: threading.Thread) -> None:
        gc.collect()
        set_ident(thread)

    monkeypatch.setattr(threading.Thread, "_set_ident", collect_first)
    ThreadPool(2, workers=1).start()
    assert not any(thread.is_alive() for thread in ended)
