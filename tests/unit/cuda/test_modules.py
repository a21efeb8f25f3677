"""Sources are compiled once, by several threads, and errors reach the caller."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from dptrain.backends.cuda.modules import Modules
from dptrain.backends.cuda.nvrtc import CompileError


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
