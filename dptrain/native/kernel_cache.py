"""The cache of compiled kernels on disk.

Each entry is a file of its own, named by a digest of its key: the kernel's name, code and
signature, and the sources that its machine code depends on. These are the kernel's module and the
modules of the project that it imports, directly or through others. The file is written next to its
final path, renamed, and contains its key and a checksum; a file that is damaged or has another key
counts as missing, and the kernel is compiled again. The folder name is a digest of compiler,
interpreter and processor. So entries are never stale, and copies of the project share those that do
not differ. Entries that were not used for `UNUSED_DAYS` are removed when another one is stored.

Numba's own index of all signatures of a kernel is not used, because two processes that add entries
at the same time can each write the number of one file for their own signature.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, NullCache
from numba.core.runtime import rtsys

from dptrain.cache import sealed, unsealed, writable_folder

UNUSED_DAYS = 60
_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+({_PACKAGE.name}[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    rf"|import[ \t]+({_PACKAGE.name}[\w.]*))",
    re.MULTILINE,
)
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n|\n)+", re.MULTILINE)


def _stamp(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced."""
    status = os.stat(path)  # noqa: PTH116 - a third of the time of Path.stat, for 500 files
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _stamps() -> dict[str, tuple[int, ...]]:
    paths = glob.iglob(f"{glob.escape(str(_PACKAGE))}/**/*.py", recursive=True)  # noqa: PTH207
    return {path: _stamp(path) for path in paths}


_IMPORTED = _stamps()
"""Stamps of all sources, from which this process imports kernels. If one has changed since, the
machine code may belong to the file before the change, and its digest to the one after it."""


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels; None if no folder is writable."""
    return writable_folder(f"kernels-{_digest_of_compiler()}")


@functools.cache
def _digest_of_compiler() -> str:
    """Return a digest of compiler, interpreter and processor, on which compiled kernels depend."""
    binding = llvmlite.binding
    facts = (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


@functools.cache
def _read(module: str) -> tuple[bytes, frozenset[str]] | None:
    """Return the source of a module and the names that it imports from the project.

    Names of imported functions and constants are among them.

    Returns:
        None if there is no such module.

    Raises:
        OSError: the source has changed since this process began.
    """
    path = str(_PACKAGE.parent.joinpath(*module.split(".")))
    path = f"{path}.py" if f"{path}.py" in _IMPORTED else f"{path}{os.sep}__init__.py"
    if path not in _IMPORTED:
        return None
    text = Path(path).read_bytes()
    if _stamp(path) != _IMPORTED[path]:
        raise OSError(f"{path} has changed since this process began")
    names = set[str]()
    for source, members, plain in _IMPORT.findall(_FOR_TYPES.sub("", text.decode())):
        names |= {source or plain}
        names |= {f"{source}.{member}" for member in re.findall(r"\w+", members)}
    return text, frozenset(names)


@functools.cache
def source_digest(module: str) -> str | None:
    """Return a digest of a module and of everything that it imports from the project.

    Returns:
        None if a source has changed since this process began.
    """
    texts = dict[str, bytes]()
    names = {module}
    try:
        while names:
            name = names.pop()
            found = None if name in texts else _read(name)
            if found is not None:
                texts[name], imported = found
                names |= imported
    except OSError:
        return None
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


class _Locator:
    """Cache locator for Numba: the folder of a function's cache, and the stamp of its source."""

    folder: Path
    digest: str

    @classmethod
    def from_function(cls, function: Any, path: str) -> _Locator:
        return cls()

    def ensure_cache_path(self) -> None:
        """Do nothing: `cache_folder` created the folder."""

    def get_cache_path(self) -> str:
        return str(self.folder)

    def get_source_stamp(self) -> str:
        return self.digest

    def get_disambiguator(self) -> str:
        return "kernel"


class _Entries(IndexDataCacheFile):  # type: ignore[misc]
    """The entries of one kernel: a file for each key of signature, processor, code and sources."""

    def __init__(self, folder: Path, base: str, digest: str) -> None:
        super().__init__(str(folder), base, digest)
        self._base, self._digest = base, digest

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._full(key), data))

    def load(self, key: Any) -> Any:
        """Return an entry; None if it is missing, damaged, or of another key."""
        path = self.path(key)
        try:
            if unsealed(path.read_bytes()) is None:
                return None
            found, data = self._load_data(path.name)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data if found == self._full(key) else None

    def path(self, key: Any) -> Path:
        """Return the file of an entry."""
        return Path(self._data_path(self._name(key)))

    def _full(self, key: Any) -> Any:
        return self._digest, key

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(repr(self._full(key)).encode()).hexdigest()[:16]
        return f"{self._base}.{digest}.nbc"

    def _dump(self, value: Any) -> bytes:
        return sealed(super()._dump(value))


class _FunctionCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function, in the project's folder."""

    def __init__(self, function: Any, folder: Path, digest: str) -> None:
        locator = type("_Locator", (_Locator,), {"folder": folder, "digest": digest})
        self._impl_class = type("_Impl", (CompileResultCacheImpl,), {"_locator_classes": [locator]})
        # NUMBA_CACHE_LOCATOR_CLASSES is for programs that use Numba's own cache.
        others, config.CACHE_LOCATOR_CLASSES = getattr(config, "CACHE_LOCATOR_CLASSES", ""), ""
        try:
            super().__init__(function)
        finally:
            config.CACHE_LOCATOR_CLASSES = others
        self._cache_file = _Entries(folder, self._impl.filename_base, digest)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return an entry; None if there is none.

        Numba first reads the rules for types and instructions, which takes 0.7 s and which only a
        compilation uses. Compiled code uses the allocator of Numba's runtime.
        """
        rtsys.initialize(target)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target)

    def path(self, signature: Any, target: Any) -> Path:
        return self._cache_file.path(self._index_key(signature, target.codegen()))


class KernelCache(NullCache):  # type: ignore[misc]
    """The entries of a function. Failures are ignored: it is then compiled, or not stored.

    The folder is determined at the first use, so that importing kernels touches no files.

    Args:
        function: the function.
        source: its text, if it is no part of its module.
    """

    def __init__(self, function: Callable[..., Any], source: str = "") -> None:
        self._function, self._source = function, source

    @functools.cached_property
    def _files(self) -> _FunctionCache | None:
        digest, folder = source_digest(self._function.__module__), cache_folder()
        if digest is None or folder is None:
            return None
        if self._source:
            digest = hashlib.sha256(f"{digest}\0{self._source}".encode()).hexdigest()
        return _FunctionCache(self._function, folder, digest)

    def path(self, signature: Any, target: Any) -> Path | None:
        """Return the file of an entry; None if nothing is stored."""
        return None if self._files is None else self._files.path(signature, target)

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return self._files and self._files.load_overload(signature, target)
        except Exception:
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        # A full or read-only disk must not stop the run; the next process compiles again.
        with contextlib.suppress(Exception):
            if self._files is not None:
                self._files.save_overload(signature, data)
                _remove_unused(self._files.path(signature, data.target_context).parent)


@functools.cache
def _remove_unused(folder: Path) -> None:
    """Remove the entries of a folder that were not used for a long time; once in a process."""
    for path in _unused(folder, time.time() - UNUSED_DAYS * 86400):
        path.unlink(missing_ok=True)


def _unused(folder: Path, since: float) -> Iterator[Path]:
    with os.scandir(folder) as files:
        for file in files:
            if file.name.endswith(".nbc") and file.stat().st_mtime < since:
                yield Path(file.path)
