"""Compiling kernels, and keeping them on disk so that the next process need not.

Nearly every kernel has one signature, so its cache holds one entry and processes that compile it
at the same time write the same file: whichever comes last wins, and all are right. Of a kernel
with two an entry may be lost so, and is compiled again when it is needed. Files are written beside
their place and renamed into it, and carry a checksum: a damaged one is compiled again. The folder's
name is a digest of all that machine code depends on, so nothing in it is ever out of date.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache

from dptrain.backends.cache import sealed, unsealed, writable_folder
from dptrain.backends.numba.entries import EntryCompiler, Record, entry_address, kind


class KernelError(RuntimeError):
    """A kernel raised an exception: what its arrays are does not fit."""


class Kernel:
    """A function over a range of items, compiled for the arguments that it is bound to.

    Attributes:
        py_func: the function in Python.
        dispatcher: Numba's.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.py_func = function
        self.dispatcher = numba.njit(
            error_model="numpy",
            fastmath={"contract"},
            no_cpython_wrapper=True,
            pipeline_class=EntryCompiler,
        )(function)
        self.dispatcher._cache = _Cache(function)

    def compile(self, *args: Any) -> int:
        """Address of the entry for arguments like `args`, compiled or from the cache.

        Args:
            args: what comes after ``start, stop, thread``; only kinds count.
        """
        signature = (*(numba.int64,) * 3, *map(kind, args))
        self.dispatcher.compile(signature)
        return entry_address(self.dispatcher.overloads[signature])

    def __call__(self, start: int, stop: int, thread: int, *args: Any) -> None:
        """Run on a range in this thread. For a steady step there is `Team.bind`."""
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_int64,) * 4)(self.compile(*args))
        record = Record(args)
        if entry(start, stop, thread, record.address):
            raise KernelError(f"kernel {self.py_func.__name__} raised an exception")


def kernel(function: Callable[..., None]) -> Kernel:
    """Make `function` a kernel.

    The first three arguments are ``start, stop, thread``. Products and sums may be contracted to
    fused multiply-adds; NaN and infinity keep their meaning.
    """
    return Kernel(function)


def native(function: Callable[..., int]) -> Any:
    """Compile `function`, from and to integers; `interpreted` makes it callable."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


def interpreted(dispatcher: Any, arguments: int) -> Callable[..., int]:
    """A `native` function for the interpreter, whose lock it does not hold while it runs.

    Nothing is looked up by the kinds of the arguments, which costs 0.1 µs a call otherwise.
    """
    signature = (numba.int64,) * arguments
    dispatcher.compile(signature)
    call: Callable[..., int] = dispatcher.overloads[signature].entry_point
    return call


def inlined(function: Callable[..., Any]) -> Any:
    """Make `function` callable from kernels; it is compiled as part of each."""
    return numba.njit(
        error_model="numpy",
        fastmath={"contract"},
        # Nobody calls it from outside: two functions less to compile.
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(function)


def expanded(function: Callable[..., Any]) -> Any:
    """As `inlined`, before any other optimisation: for what LLVM finds too long to inline."""
    return numba.njit(inline="always", error_model="numpy")(function)


def cache_folder() -> Path | None:
    """Folder of compiled kernels; None where nothing can be written."""
    return writable_folder(f"kernels-{_digest()}")


@functools.cache
def _digest() -> str:
    """Of everything that compiled kernels depend on: sources, compiler, interpreter, processor."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    binding = llvmlite.binding
    facts = (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    )
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:16]


class _Locator:
    """Answers numba's question where a function's cache lies and what it was compiled from."""

    folder: Path

    @classmethod
    def from_function(cls, function: Any, path: str) -> _Locator:
        return cls()

    def ensure_cache_path(self) -> None:
        """`cache_folder` made it."""

    def get_cache_path(self) -> str:
        return str(self.folder)

    def get_source_stamp(self) -> str:
        return self.folder.name

    def get_disambiguator(self) -> str:
        return "kernel"


class _CheckedFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Files that end in the SHA-256 of what comes before; those where it differs do not count."""

    def _dump(self, value: Any) -> bytes:
        return sealed(super()._dump(value))

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:
            return {}

    def _load_data(self, name: str) -> Any:
        if unsealed(Path(self._data_path(name)).read_bytes()) is None:
            raise OSError(f"{name} is damaged")  # numba takes this as: not in the cache
        return super()._load_data(name)


class _FunctionCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function, in a folder of ours."""

    def __init__(self, function: Any, folder: Path) -> None:
        locator = type("_Locator", (_Locator,), {"folder": folder})
        self._impl_class = type("_Impl", (CompileResultCacheImpl,), {"_locator_classes": [locator]})
        super().__init__(function)
        base = self._impl.filename_base
        self._cache_file = _CheckedFiles(str(folder), base, folder.name)


class _Cache(NullCache):  # type: ignore[misc]
    """A cache that may always fail: then the function is compiled, or not kept.

    It looks for its folder when it is first asked: importing kernels touches no files.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    @functools.cached_property
    def _files(self) -> Any:
        folder = cache_folder()
        return NullCache() if folder is None else _FunctionCache(self._function, folder)

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return self._files.load_overload(signature, target)
        except Exception:
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        # A full or read-only disk costs the next process its time, not this one its run.
        with contextlib.suppress(Exception):
            self._files.save_overload(signature, data)
