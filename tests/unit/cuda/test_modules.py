"""Sources are compiled once, by several threads, and errors reach the caller."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping

import pytest

import dptrain.api
from dptrain.backends.cuda.device.modules import Modules
from dptrain.backends.cuda.device.nvrtc import CompileError
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU
from tests.emulator.emulator import MEMORY_BYTES, Emulator


def test_sources_compile_at_the_same_time_and_once() -> None:
    together, compiled = threading.Barrier(2), []

    def compile_both(file: str, defines: Mapping[str, int]) -> bytes:
        together.wait(60)  # Passes only if two threads compile.
        compiled.append((file, dict(defines)))
        return f"{file}{dict(defines)}".encode()

    modules = Modules(compile_both, bytes.decode, threads=2)
    first = modules.request("a.cu", {"B": 2, "A": 1})
    second = modules.request("b.cu", {})
    assert modules.request("a.cu", {"A": 1, "B": 2}) == first
    assert modules.module(first) == "a.cu{'A': 1, 'B': 2}"
    assert modules.module(second) == "b.cu{}"
    modules.load_all()
    assert sorted(compiled) == [("a.cu", {"A": 1, "B": 2}), ("b.cu", {})]


def test_a_module_is_loaded_when_it_is_used_and_once() -> None:
    loaded = []

    def load(code: bytes) -> int:
        loaded.append(code)
        return len(loaded)

    modules = Modules(lambda file, defines: file.encode(), load, threads=1)
    sources = [modules.request(file, {}) for file in ("a.cu", "b.cu", "c.cu")]
    assert loaded == []
    assert modules.module(sources[1]) == modules.module(sources[1]) == 1
    modules.load_all()
    assert loaded == [b"b.cu", b"a.cu", b"c.cu"]


def test_an_error_is_raised_where_the_kernel_is_used_and_others_compile() -> None:
    def fail(file: str, defines: Mapping[str, int]) -> bytes:
        if file == "wrong.cu":
            raise CompileError("wrong.cu(3): error")
        return b""

    modules = Modules(fail, len, threads=1)
    wrong, right = (modules.request(f"{name}.cu", {}) for name in ("wrong", "right"))
    assert modules.module(right) == 0
    for _ in range(2):
        with pytest.raises(CompileError, match=r"wrong.cu\(3\)"):
            modules.module(wrong)
    with pytest.raises(CompileError):
        modules.load_all()


def test_a_source_that_another_process_compiles_is_requested_again() -> None:
    requested = []

    def compile_first_later(file: str, defines: Mapping[str, int]) -> bytes | None:
        requested.append(file)
        is_busy = file == "a.cu" and requested.count("a.cu") < 3
        return None if is_busy else file.encode()

    modules = Modules(compile_first_later, bytes.decode, threads=1)
    first, second = (modules.request(file, {}) for file in ("a.cu", "b.cu"))
    assert modules.module(first) == "a.cu"
    assert modules.module(second) == "b.cu"
    assert modules.progress == (2, 2)
    assert requested.count("a.cu") == 3
    assert requested.count("b.cu") == 1


free_bytes = Emulator.free_bytes


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait at most a minute: a thread ends a moment after its last task."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    assert holds()


def test_threads_end_when_nothing_is_left_to_compile() -> None:
    before = threading.active_count()
    for number in range(50):
        modules = Modules(lambda file, defines: file.encode(), len, threads=4)
        for name in "abcdef":
            modules.request(f"{name}.cu", {"N": number})
        modules.load_all()
    wait_until(lambda: threading.active_count() <= before)


def test_a_source_that_is_requested_after_the_threads_ended_is_compiled() -> None:
    before = threading.active_count()
    modules = Modules(lambda file, defines: file.encode(), bytes.decode, threads=2)
    for name in ("first.cu", "second.cu", "third.cu"):
        assert modules.module(modules.request(name, {})) == name
        wait_until(lambda: threading.active_count() <= before)


def test_dropped_replicas_end_their_threads_and_free_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Emulator()
    compiled: list[Modules] = []

    def open_device(index: int) -> Emulator:
        """Compile as a GPU does: each replica has a device of its own."""
        modules = Modules(lambda file, defines: file.encode(), len, threads=4)
        for name in "abcd":
            modules.request(f"{name}.cu", {})
        compiled.append(modules)
        return device

    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", open_device)
    network = Network((3, 6, 6), [Conv2d(4), ReLU(), Flatten(), Dense(3)])
    gc.collect()
    threads, free_bytes = threading.active_count(), device.free_bytes
    for _ in range(20):
        replica = dptrain.api.make_replica(network, "cuda", 4)
        assert device.free_bytes < free_bytes
        del replica
    assert len(compiled) == 20
    gc.collect()
    assert device.free_bytes == free_bytes
    wait_until(lambda: threading.active_count() <= threads)


def test_memory_of_dropped_replicas_is_freed_if_another_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Emulator()
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda index: device)
    network = Network((3, 6, 6), [Conv2d(4), ReLU(), Flatten(), Dense(3)])
    gc.collect()
    whole = device.free_bytes
    first = dptrain.api.make_replica(network, "cuda", 4)
    needed, used = sum(first.plan.memory.values()), whole - device.free_bytes
    # A device on which one replica fits, and not two.
    capacity = MEMORY_BYTES - used - needed // 2
    monkeypatch.setattr(
        Emulator, "free_bytes", property(lambda self: free_bytes.fget(self) - capacity)
    )
    gc.disable()
    try:
        del first
        dptrain.api.make_replica(network, "cuda", 4)
    finally:
        gc.enable()
