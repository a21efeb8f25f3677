"""Waiting on 32-bit words: between threads, between processes, with timeouts and signals."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dptrain.native import waiting
from dptrain.native.atomics import add32, exchange32, load32, store32
from dptrain.native.entries import address_of
from dptrain.native.jit import interpreted, native
from dptrain.native.waiting import interpreted_wait_while, interpreted_wake, sleep_while
from tests.tiers import tiered

SECOND = 10**9
LONG = 600 * SECOND
"""A test that waits for this long has failed: it exceeds the time limit of a test."""


@native
def operate(address: int) -> int:
    """Apply each atomic operation to a word; return their results as decimal digits."""
    store32(address, 3)
    first = exchange32(address, 4, 9)
    second = exchange32(address, 3, 5)
    third = add32(address, -7)
    return first * 1000 + second * 100 + third * 10 - load32(address)


@native
def sleep_until_changed(address: int, value: int, timeout_ns: int) -> int:
    """Wait as systems without a futex do."""
    sleep_while(address, value, timeout_ns)
    return 1 if load32(address) != value else 0


def test_atomic_operations_on_32_bit_words() -> None:
    """They leave the neighbouring word as it is."""
    words = np.array([0, 77], np.int32)
    assert interpreted(operate, 1)(address_of(words)) == 3352
    assert words.tolist() == [-2, 77]


@pytest.mark.parametrize("shared", [0, 1])
def test_a_thread_wakes_another(shared: int) -> None:
    wait, wake = interpreted_wait_while(), interpreted_wake()
    word = np.zeros(1, np.int32)
    address, results = address_of(word), []
    thread = threading.Thread(target=lambda: results.append(wait(address, 0, 10, shared, LONG)))
    thread.start()
    time.sleep(0.05)  # so that it sleeps
    word[0] = -1
    wake(address, 1, shared)
    thread.join(timeout=60)
    assert results == [1]


@pytest.mark.skipif(not waiting.FUTEX, reason="needs a futex")
def test_wake_returns_the_number_of_sleepers() -> None:
    wait, wake = interpreted_wait_while(), interpreted_wake()
    word = np.zeros(1, np.int32)
    address = address_of(word)
    threads = [threading.Thread(target=wait, args=(address, 0, 0, 0, LONG)) for _ in range(3)]
    for thread in threads:
        thread.start()
    woken, deadline = 0, time.monotonic() + 60
    while woken < 3 and time.monotonic() < deadline:
        woken += wake(address, 1, 0)
    assert woken == 3
    assert wake(address, 1, 0) == 0
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_a_changed_word_needs_no_wake() -> None:
    word = np.array([5], np.int32)
    assert interpreted_wait_while()(address_of(word), 4, 0, 0, LONG) == 1


@pytest.mark.parametrize("timeout_ns", tiered([0, 20_000_000, SECOND + 1000], [0, 20_000_000]))
def test_timeout(timeout_ns: int) -> None:
    word = np.zeros(1, np.int32)
    start = time.monotonic_ns()
    assert interpreted_wait_while()(address_of(word), 0, 10, 0, timeout_ns) == 0
    assert time.monotonic_ns() - start >= timeout_ns


def test_waiting_without_a_futex() -> None:
    wait = interpreted(sleep_until_changed, 3)
    word = np.zeros(1, np.int32)
    assert wait(address_of(word), 0, 5_000_000) == 0
    threading.Timer(0.02, word.fill, [1]).start()
    assert wait(address_of(word), 0, LONG) == 1


OTHER = """
import mmap, sys
import numpy as np
from dptrain.native.entries import address_of
from dptrain.native.waiting import interpreted_wait_while, interpreted_wake
file = open(sys.argv[1], "r+b")
words = np.frombuffer(mmap.mmap(file.fileno(), 4096), np.int32)
wait, wake = interpreted_wait_while(), interpreted_wake()
print("ready", flush=True)
print(wait(address_of(words), 0, 10, 1, 600 * 10**9), flush=True)
words[1] = 1
wake(address_of(words) + 4, 1, 1)
"""


def test_processes_wake_each_other_over_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        words = np.frombuffer(memory, np.int32)
        address = address_of(words)
        command = [sys.executable, "-c", OTHER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            time.sleep(0.05)
            words[0] = 1
            interpreted_wake()(address, 1, 1)
            assert interpreted_wait_while()(address + 4, 0, 0, 1, LONG) == 1
            assert other.communicate(timeout=60)[0] == "1\n"
        del words


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_signal_ends_a_wait() -> None:
    """The handler runs in the interpreter after the wait has returned."""
    word, caught = np.zeros(1, np.int32), []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        wait = interpreted_wait_while()
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        while not caught:
            # Another thread may receive the signal; then only the timeout ends the wait.
            assert wait(address_of(word), 0, 0, 0, SECOND) == 0
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert caught == [signal.SIGUSR1]
