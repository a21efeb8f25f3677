"""Requests for machine code, who compiles them, and the keys of the cache."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest

from dptrain.backends.numba import activations, elementwise
from dptrain.backends.numba.backend import NumbaBackend
from dptrain.backends.numba.convolution.winograd_convolution import conv2d_forward
from dptrain.backends.numba.dense.matmul import dense_forward
from dptrain.cache import claim
from dptrain.native import compilation, compilation_helper, kernel_cache
from dptrain.native.compilation import compile_requested
from dptrain.native.jit import interpreted, native
from dptrain.native.kernel_cache import source_digest
from dptrain.network import GELU, Conv2d, Dense, Flatten, LeakyReLU, Network, Sigmoid
from dptrain.network.files import get_network
from dptrain.plan.plan import make_plan


@native
def seven(x: int) -> int:
    return 7 * x


WRITTEN = Network((9, 8, 8), [LeakyReLU(0.2), Conv2d(4), Sigmoid(), GELU(), Flatten(), Dense(3)])
"""A network with kernels that a program writes."""


def requests_of(network: Network) -> list[compilation.Request]:
    """Return the requests of a training replica, of which nothing is compiled."""
    backend = NumbaBackend()
    plan = make_plan(network, backend, 32, precision="fp32")
    replica = backend.make_replica(plan, compiles=False)
    return [launch._entry for program in replica.programs.values() for launch in program._launches]


@pytest.mark.parametrize("network", [get_network("model0"), get_network("resnet20"), WRITTEN],
                         ids=["model0", "resnet20", "written"])  # fmt: skip
def test_helpers_receive_each_function_and_signature(network: Network) -> None:
    requests = requests_of(network)
    assert len({id(each) for each in requests}) > 10
    for each in requests:
        described = json.loads(json.dumps(compilation_helper._describe(each)))
        module, function, arguments, kinds = described
        found = getattr(importlib.import_module(module), function)
        found = found(*arguments) if arguments else found
        assert found.dispatcher is each.dispatcher
        assert tuple(map(compilation_helper._type_of, kinds)) == each.signature


def test_a_function_without_module_is_not_described() -> None:
    request = compilation.Request(numba.njit(lambda x: x), (numba.types.unicode_type,), id)
    assert compilation_helper._describe(request) is None


def test_longer_functions_begin_first() -> None:
    lengths = [
        compilation.Request(each.dispatcher, (), id).code_length
        for each in (conv2d_forward, dense_forward, elementwise.relu_mask)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[1] > 4 * lengths[2] > 0


def test_requests_for_the_same_code_are_one_and_end_with_the_last_reference() -> None:
    x = np.ones(3, np.float16)
    first, second = (elementwise.assign.request(x, x) for _ in range(2))
    assert first is second
    del first, second
    gc.collect()
    assert not any(
        key[0] is elementwise.assign.dispatcher and key[1][-1].dtype == numba.float16
        for key in compilation._requests
    )


def test_what_another_process_compiles_is_awaited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(seven, "_cache", kernel_cache.KernelCache(seven.py_func))
    request = compilation.request(seven, (numba.int64,), lambda compiled: compiled.entry_point)
    assert request.path is not None
    with claim(request.path):
        assert not request.compile_unless_claimed()
        waiting = threading.Thread(target=compile_requested)
        waiting.start()
        time.sleep(0.1)
        assert not request.is_done
    waiting.join(timeout=60)
    assert request.is_done
    assert request.is_stored
    assert interpreted(seven, 1)(6) == 42


def test_a_signal_is_handled_while_a_function_is_compiled() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def compile_long(requests: object, stop: threading.Event) -> None:
        has_begun.set()
        may_end.wait(60)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR2, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    killer = threading.Thread(
        target=lambda: (has_begun.wait(60), signal.pthread_kill(main, signal.SIGUSR2))
    )
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            compilation._call_in_thread(compile_long, [])
        assert compilation.is_compiling()
    finally:
        signal.signal(signal.SIGUSR2, previous)
        may_end.set()
        killer.join()
    end = time.monotonic() + 60
    while compilation.is_compiling():
        assert time.monotonic() < end


def test_functions_are_compiled_and_loaded_outside_of_the_main_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a signal's handler would raise its exception in a function that LLVM calls."""
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(seven, "_cache", kernel_cache.KernelCache(seven.py_func))
    found, run = list[tuple[bool, bool]](), compilation.Request.compile

    def record(request: compilation.Request) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if request.dispatcher is seven:
            found.append((request.is_stored, is_main))
        run(request)

    monkeypatch.setattr(compilation.Request, "compile", record)
    for _ in range(2):
        request = compilation.request(seven, (numba.int32,), lambda compiled: compiled.entry_point)
        compile_requested()
        assert request.is_done
        del request
    assert found == [(False, False), (True, False)]


def test_an_error_of_the_compiler_reaches_the_caller() -> None:
    def fail(requests: object, stop: threading.Event) -> None:
        raise ValueError("no such operation")

    with pytest.raises(ValueError, match="no such operation"):
        compilation._call_in_thread(fail, [])


# Keys of the cache.


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return a package in place of dptrain, of which the cache reads the sources."""
    folder = tmp_path / "dptrain"
    (folder / "sub").mkdir(parents=True)
    texts = {
        "kernels.py": "from dptrain.sub import tools\nfrom dptrain.sizes import (\n    WIDTH,\n)\n",
        "sub/__init__.py": "",
        "sub/tools.py": "if TYPE_CHECKING:\n    import dptrain.types\n\nimport dptrain.deep\n",
        "sizes.py": "WIDTH = 8\n",
        "deep.py": "DEEP = 1\n",
        "types.py": "T = int\n",
        "other.py": "OTHER = 1\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(kernel_cache, "_PACKAGE", folder)
    forget(monkeypatch)
    yield folder
    kernel_cache._read.cache_clear()
    source_digest.cache_clear()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cache read all sources again, as a new process does."""
    monkeypatch.setattr(kernel_cache, "_IMPORTED", kernel_cache._stamps())
    kernel_cache._read.cache_clear()
    source_digest.cache_clear()


def digest() -> str | None:
    return source_digest("dptrain.kernels")


def test_a_key_changes_with_each_source_that_a_kernel_imports(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {digest()}
    for name in ("kernels.py", "sizes.py", "sub/tools.py", "sub/__init__.py", "deep.py"):
        path = package / name
        path.write_text(path.read_text() + "# changed\n")
        forget(monkeypatch)
        assert digest() not in seen, name
        seen.add(digest())
    for name in ("types.py", "other.py"):
        (package / name).write_text("CHANGED = 1\n")
    forget(monkeypatch)
    assert digest() in seen
    assert None not in seen


def test_a_source_that_changed_after_its_import_has_no_key(package: Path) -> None:
    (package / "deep.py").write_text("DEEP = 2\n")
    assert digest() is None
    assert source_digest("dptrain.other") is not None


def test_a_copy_of_the_project_has_the_same_keys(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = digest()
    copy = package.rename(tmp_path / "copy").rename(tmp_path / "elsewhere")
    (tmp_path / "x").mkdir()
    monkeypatch.setattr(kernel_cache, "_PACKAGE", copy.rename(tmp_path / "x" / "dptrain"))
    forget(monkeypatch)
    assert digest() == before


def test_every_module_of_kernels_has_a_key() -> None:
    found = {
        value.py_func.__module__: source_digest(value.py_func.__module__)
        for value in (conv2d_forward, dense_forward, elementwise.relu_mask)
    }
    assert None not in found.values()
    assert len(set(found.values())) == len(found)


def test_kernels_of_two_expressions_have_two_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their bytecode and signature are equal, and their constants differ."""
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    x, paths = np.ones(3, np.float32), set[Path | None]()
    for text in ("x * 1.25", "x * 1.5"):
        kernel = activations.forward("scaled", text)
        assert kernel is activations.forward("scaled", text)
        paths.add(kernel.request(x, x).path)
    assert len(paths) == 2
    assert None not in paths


def test_entries_that_were_not_used_for_long_are_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("a.1.nbc", "a.2.nbc", "notes"))
    for path in (old, new, other):
        path.touch()
    age_s = (kernel_cache.UNUSED_DAYS + 1) * 86400
    for path in (old, other):
        stamp = time.time() - age_s
        os.utime(path, (stamp, stamp))
    kernel_cache._remove_unused(tmp_path)
    assert set(tmp_path.iterdir()) == {new, other}
