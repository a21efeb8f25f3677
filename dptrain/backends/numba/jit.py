"""Compiling kernels, and keeping them on disk so that the next process need not.

Every kernel has exactly one signature, so its cache holds one entry and processes that compile it
at the same time write the same file: whichever comes last wins, and all are right. Files are
written beside their place and renamed into it, and carry a checksum: a damaged one is compiled
again. The folder's name is a digest of all that machine code depends on, so nothing in it is ever
out of date.
"""

from __future__ import annotations

import contextlib
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


def kernel(function: Callable[..., None]) -> Any:
    """Make `function` a kernel: it runs without the interpreter's lock, over a range of items.

    The first three arguments are ``start, stop, thread``. Products and sums may be contracted to
    fused multiply-adds; NaN and infinity keep their meaning.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})(function)
    dispatcher._cache = _Cache(function)
    return dispatcher


def inlined(function: Callable[..., Any]) -> Any:
    """Make `function` callable from kernels; it is compiled as part of each."""
    return numba.njit(error_model="numpy", fastmath={"contract"})(function)


def expanded(function: Callable[..., Any]) -> Any:
    """As `inlined`, before any other optimisation: for what LLVM finds too long to inline."""
    return numba.njit(inline="always", error_model="numpy")(function)


def compile_kernel(dispatcher: Any, *args: Any) -> None:
    """Compile a kernel for arguments like `args`, or load it from the cache.

    Args:
        dispatcher: what `kernel` made.
        args: what the kernel will be called with after ``start, stop, thread``; only types count.
    """
    signature = (*(numba.int64,) * 3, *map(numba.typeof, args))
    if signature not in dispatcher.signatures:
        dispatcher.compile(signature)


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
