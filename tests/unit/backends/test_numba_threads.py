"""Teams of threads: every item once, whatever sleeps, fails, forks, ends or is interrupted."""

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

from dptrain.api import make_replica
from dptrain.backends.numba.jit import KernelError, kernel
from dptrain.backends.numba.threads import (
    _LOCAL_RANKS,
    ASLEEP,
    GONE,
    OVERSUBSCRIBED_SPIN_LIMIT,
    SPIN_LIMIT,
    ThreadPool,
    default_spin_limit,
)
from dptrain.network import Network, ReLU

SIZE = 1000


@kernel
def mark(start: int, stop: int, thread: int, times: Any, owner: Any, amount: int) -> None:
    """Add to items, and say who did; `times` has a last element for each thread's calls."""
    for i in range(start, stop):
        times[0, i] += amount
        owner[i] = thread
    times[1, thread] += 1


@kernel
def fail(start: int, stop: int, thread: int, bad: int) -> None:
    if thread == bad:
        raise ArithmeticError


class Marks:
    """A launch of `mark`, and what it should have done."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool, self.calls = pool, 0
        self.times, self.owner = np.zeros((2, SIZE), np.int64), np.full(SIZE, -1)
        self.expected = np.zeros(SIZE, np.int64)
        self._launch = pool.bind(mark, self.times, self.owner, varying=(1,))

    def launch(self, count: int, amount: int = 1) -> None:
        self._launch(count, amount)
        self.calls += 1
        self.expected[:count] += amount

    def check(self) -> None:
        np.testing.assert_array_equal(self.times[0], self.expected)
        assert (self.times[1, : self.pool.threads] == self.calls).all()


@pytest.fixture(params=[1, 2, 3, 4])
def pool(request: pytest.FixtureRequest) -> ThreadPool:
    return ThreadPool(request.param)


def sleep(pool: ThreadPool) -> None:
    """Until all threads are asleep."""
    deadline = time.monotonic() + 30
    while (pool._memory[1:, 0] != ASLEEP).any():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 300])
def test_ranges_cover_the_items_in_order(pool: ThreadPool, count: int) -> None:
    """Each thread is called, some with an empty range, and item i is always the same one's."""
    marks = Marks(pool)
    for _ in range(3):
        marks.owner[:] = -1
        marks.launch(count)
        bounds = [count * t // pool.threads for t in range(pool.threads + 1)]
        owner = np.repeat(np.arange(pool.threads), np.diff(bounds))
        np.testing.assert_array_equal(marks.owner[:count], owner)
        assert (marks.owner[count:] == -1).all()
        sleep(pool)  # so that the next launch has to wake them
    marks.check()


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


@pytest.mark.parametrize(
    ("machine", "mask", "variables", "threads", "long"),
    [
        (16, 16, {}, 16, True),
        (16, 16, {}, 17, False),
        (16, 4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, True),  # ranks bound to 4 cores each
        (16, 16, {"MPI_LOCALNRANKS": "4"}, 4, True),
        (16, 16, {"MPI_LOCALNRANKS": "4"}, 5, False),
        (2, 2, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 1, True),
        (2, 2, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 2, False),
    ],
)
def test_idle_threads_spin_for_long_only_on_their_own_cores(
    monkeypatch: pytest.MonkeyPatch,
    machine: int,
    mask: int,
    variables: dict[str, str],
    threads: int,
    long: bool,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(mask)), raising=False)
    for name in _LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_spin_limit(threads) == (SPIN_LIMIT if long else OVERSUBSCRIBED_SPIN_LIMIT)


def test_a_kernel_that_raises(pool: ThreadPool) -> None:
    """Whoever's part it was; the launches after it know nothing of it."""
    launch, marks = pool.bind(fail, varying=(0,)), Marks(pool)
    for bad in range(pool.threads):
        for _ in range(2):
            with pytest.raises(KernelError, match="kernel fail raised"):
                launch(6, bad)
        launch(6, pool.threads)
        marks.launch(SIZE)
    marks.check()


def test_closed_in_the_middle(pool: ThreadPool) -> None:
    """Threads go though launches never pause; the caller goes on alone, with the same result."""
    marks = Marks(pool)
    closer = threading.Timer(0.01, pool.close)
    closer.start()
    deadline = time.monotonic() + 10
    while closer.is_alive():
        assert time.monotonic() < deadline
        for _ in range(50):
            marks.launch(SIZE - 1)
    assert (pool._memory[1:, 0] == GONE).all()
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
    owner = np.zeros(SIZE, np.int64)
    launch = ThreadPool(2).bind(mark, varying=(np.zeros((2, 2), np.int64), owner, 1))
    for length in (SIZE, 7, 30):
        times = np.zeros((2, length), np.int64)
        launch(length, times, owner, 3)
        assert (times[0] == 3).all()
        assert times[1].tolist() == [1, 1] + [0] * (length - 2)


def test_threads_end_with_the_replica() -> None:
    before = set(threading.enumerate())
    replica = make_replica(
        Network((3,), [ReLU()]), "numba", batch_size=2, threads=4, training=False
    )
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    del replica
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


PROGRAM = """
import os, sys, warnings
sys.path[:0] = {path!r}
from test_numba_threads import SIZE, Marks, ThreadPool
pools = [ThreadPool(2), ThreadPool(3)]
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
            marks.calls = marks.times[1, 0]
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


@pytest.mark.parametrize("asleep", [False, True])
def test_a_process_ends_whatever_its_threads_do(asleep: bool) -> None:
    body = "import time; time.sleep(0.1)" if asleep else "print('end', flush=True)"
    process = start(body)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_killed_process_ends() -> None:
    process = start("print('ready', flush=True)\nwhile True: work(100)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


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
