"""Compile kernels and cache them on disk.

Each entry is a file of its own, named by a digest of the kernel's name, code and signature. It is
written next to its final path, renamed, and contains its key and a checksum; a file that is damaged
or has another key counts as missing, and the kernel is compiled again. If several processes compile
a kernel at the same time, each writes the same file and the last one wins. Numba's own index of all
signatures of a kernel is not used, because two processes that add entries at the same time can each
write the number of one file for their own signature. The folder name is a digest of everything that
the machine code depends on, so entries are never stale.
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
    """A kernel raised an exception, because its arrays do not match."""


class Kernel:
    """A function over a range of items, compiled for the types of the arguments that it is bound
    to.

    Attributes:
        py_func: the Python function.
        dispatcher: Numba's dispatcher.
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
        """Return the address of the entry for arguments like `args`; compile it or load it from the
        cache.

        Args:
            args: arguments after ``start, stop, thread``; only their types matter.
        """
        signature = (*(numba.int64,) * 3, *map(kind, args))
        self.dispatcher.compile(signature)
        return entry_address(self.dispatcher.overloads[signature])

    def __call__(self, start: int, stop: int, thread: int, *args: Any) -> None:
        """Run on a range in this thread. `ThreadPool.bind` is faster for repeated launches."""
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_int64,) * 4)(self.compile(*args))
        record = Record(args)
        if entry(start, stop, thread, record.address):
            raise KernelError(f"kernel {self.py_func.__name__} raised an exception")


def kernel(function: Callable[..., None]) -> Kernel:
    """Make `function` a kernel.

    Its first three arguments are ``start, stop, thread``. The compiler may contract products and
    sums to fused multiply-adds; NaN and infinity keep their meaning.
    """
    return Kernel(function)


def native(function: Callable[..., int]) -> Any:
    """Compile a function of integers that returns an integer; `interpreted` makes it callable."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


def interpreted(dispatcher: Any, arguments: int) -> Callable[..., int]:
    """Return a `native` function that Python can call and that releases the interpreter's lock.

    The call does no dispatch by argument types, which saves 0.1 µs.
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
        # It is never called from Python, so two wrappers need not be compiled.
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )(function)


def expanded(function: Callable[..., Any]) -> Any:
    """Inline `function` before LLVM's optimisations, for functions that LLVM considers too long."""
    return numba.njit(inline="always", error_model="numpy")(function)


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels; None if no folder is writable, or if the sources have
    changed while this process imported them.
    """
    digest = _digest()
    return None if digest is None else writable_folder(f"kernels-{digest}")


def _digest_sources() -> bytes:
    """Return a digest of the sources of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


_IMPORTED = _digest_sources()
"""Digest of the sources from which this process imports kernels. A later digest may belong to newer
files, whose folder would then receive machine code of the old ones."""


@functools.cache
def _digest() -> str | None:
    """Return a digest of sources, compiler, interpreter and processor, on which compiled kernels
    depend; None if the sources have changed since they were imported.
    """
    if _digest_sources() != _IMPORTED:
        return None
    digest = hashlib.sha256(_IMPORTED)
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
    """Cache locator for Numba: the folder of a function's cache, and the stamp of its source."""

    folder: Path

    @classmethod
    def from_function(cls, function: Any, path: str) -> _Locator:
        return cls()

    def ensure_cache_path(self) -> None:
        """Do nothing: `cache_folder` created the folder."""

    def get_cache_path(self) -> str:
        return str(self.folder)

    def get_source_stamp(self) -> str:
        return self.folder.name

    def get_disambiguator(self) -> str:
        return "kernel"


class _Entries(IndexDataCacheFile):  # type: ignore[misc]
    """The entries of one kernel: a file for each key of signature, processor and code."""

    def __init__(self, folder: Path, base: str) -> None:
        super().__init__(str(folder), base, folder.name)
        self._base = base

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (key, data))

    def load(self, key: Any) -> Any:
        """Return an entry; None if it is missing, damaged, or of another key."""
        name = self._name(key)
        try:
            if unsealed(Path(self._data_path(name)).read_bytes()) is None:
                return None
            found, data = self._load_data(name)
        except OSError:
            return None
        return data if found == key else None

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return f"{self._base}.{digest}.nbc"

    def _dump(self, value: Any) -> bytes:
        return sealed(super()._dump(value))


class _FunctionCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function, in the project's folder."""

    def __init__(self, function: Any, folder: Path) -> None:
        locator = type("_Locator", (_Locator,), {"folder": folder})
        self._impl_class = type("_Impl", (CompileResultCacheImpl,), {"_locator_classes": [locator]})
        super().__init__(function)
        self._cache_file = _Entries(folder, self._impl.filename_base)


class _Cache(NullCache):  # type: ignore[misc]
    """A cache whose failures are ignored: the function is then compiled, or not stored.

    The folder is determined at the first use, so that importing kernels touches no files.
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
        # A full or read-only disk must not stop the run; the next process compiles again.
        with contextlib.suppress(Exception):
            self._files.save_overload(signature, data)
