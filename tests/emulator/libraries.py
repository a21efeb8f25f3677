"""Shared libraries of emulated kernels, compiled by g++, and the cache of compiled files.

A library is compiled if its source, a file that the source includes, a macro, the emulator's header
or the compiler has changed. Copies of the source tree share the cache.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dptrain import cache
from dptrain.backends.cuda.device.sources import source_path

HERE = Path(__file__).parent

COMPILER = ("g++", "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
"""Products and sums are rounded separately, which reveals results that depend on fused
multiply-adds. A fortified ``longjmp`` cannot switch between fibers."""

INSTRUMENTED = (
    "-fsanitize=thread,alignment,bounds", "--param=tsan-instrument-func-entry-exit=0",
    "-fno-weak", "-nostdinc++",
)  # fmt: skip
"""Options that insert a call before each memory access and check alignment and bounds. Without weak
symbols, ``__shared__`` variables of templates belong to the library, like all shared memory. NVRTC
has no C++ standard library either."""

RUNTIME = "dptrain-emulator-runtime.so"
"""Name by which kernels refer to the runtime, which is loaded before them. It contains no version:
a runtime with another implementation of the same header runs the same libraries."""

LIFETIME_S = 14 * 24 * 3600
"""Time after which files that were not used are removed."""

POLL_S = 0.02

Macros = tuple[tuple[str, int | str], ...]


class CompilationError(Exception):
    """A kernel that the compiler rejects."""


def load_library(folder: Path, file: str, name: str, macros: Macros) -> ctypes.CDLL:
    """Return the shared library of one kernel, compiled if necessary."""
    _load_runtime()
    return ctypes.CDLL(str(compiled_library(folder, file, name, macros)))


def compiled_library(folder: Path, file: str, name: str, macros: Macros) -> Path:
    """Return the path of the shared library of one kernel, compiled if necessary."""
    sources = translated_sources(folder, file)
    sources[file] += f"\nEMULATED_KERNEL({name})\n"
    flags = [f"-D{macro}={value}" for macro, value in macros]

    def build(work: Path) -> None:
        for path, text in sources.items():
            (work / path).write_text(text, encoding="utf-8")
        run([*COMPILER, *INSTRUMENTED, *flags, "-include", str(_header()), "-x", "c++", file,
             "-c", "-o", "kernel.o"], work)  # fmt: skip
        # The linker's own command takes a third of the time of g++ and leaves out the runtime of
        # the sanitizer.
        run([_tool("-print-prog-name=ld"), "-shared", "kernel.o", str(_runtime()),
             _tool("-print-libgcc-file-name"), "-o", "result"], work)  # fmt: skip

    return cached("{}.so", build, sources, flags, INSTRUMENTED, *_language())


def translated_sources(folder: Path, file: str) -> dict[str, str]:
    """Return the text of a file and of the files that it includes, for g++."""
    found: dict[str, str] = {}
    names = [file]
    while names:
        name = names.pop()
        if name not in found:
            found[name] = _translated(source_path(name, folder))
            names += re.findall(r'^\s*#\s*include\s+"(.+)"', found[name], re.MULTILINE)
    return dict(sorted(found.items()))


def _translated(path: Path) -> str:
    """Return the source with CUDA syntax replaced that g++ cannot parse; line numbers are kept."""
    text = path.read_text(encoding="utf-8")
    dynamic = r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\[\];"
    text = re.sub(dynamic, r"\1* \2 = static_cast<\1*>(emulator::dynamic_shared());", text)
    return f'#line 1 "{path.name}"\n{text}'


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(_runtime()))


@functools.cache
def _runtime() -> Path:
    """Return the shared library of the emulator's runtime."""

    def build(work: Path) -> None:
        run([*COMPILER, "-O2", "-shared", f"-Wl,-soname,{RUNTIME}", str(HERE / "runtime.cpp"),
             "-o", "result"], work)  # fmt: skip

    return cached("runtime-{}.so", build, (HERE / "runtime.cpp").read_text(), *_language())


@functools.cache
def _header() -> Path:
    """Return the path of the precompiled header of the CUDA language, without its suffix."""

    def build(work: Path) -> None:
        shutil.copy(HERE / "emulator.h", work)
        run([*COMPILER, *INSTRUMENTED, "-x", "c++-header", "emulator.h", "-o", "result"], work)

    return cached("emulator-{}.h.gch", build, INSTRUMENTED, *_language()).with_suffix("")


def cached(name: str, build: Callable[[Path], None], *parts: object) -> Path:
    """Return the path of the file that `build` writes as ``result``, from the cache if possible.

    Args:
        name: name of the file in the cache, with a placeholder for a hash.
        build: writes the file in an empty folder.
        parts: what the file depends on.
    """
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    target = cache_folder() / name.format(digest)
    while not target.exists():
        with cache.claim(target) as is_ours:
            if is_ours and not target.exists():
                _remove_unused()
                with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
                    build(Path(work))
                    Path(work, "result").replace(target)
        if not is_ours:
            time.sleep(POLL_S)
    os.utime(target)  # The time of the last use.
    return target


@functools.cache
def _language() -> tuple[object, ...]:
    """Return what all compiled files of the emulator depend on."""
    return COMPILER, _tool("--version"), (HERE / "emulator.h").read_text()


@functools.cache
def _tool(option: str) -> str:
    """Return what the compiler prints for this option."""
    done = subprocess.run([COMPILER[0], option], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@functools.cache
def cache_folder() -> Path:
    """Return the folder of compiled libraries, whose names contain a hash of their inputs."""
    if folder := cache.writable_folder("emulator"):
        return folder
    return Path(tempfile.mkdtemp(prefix="dptrain-emulator-"))


@functools.cache
def _remove_unused() -> None:
    """Remove files from the cache that were not used for a long time, once in each process."""
    remove_older(cache_folder(), time.time() - LIFETIME_S)


def remove_older(folder: Path, time_s: float) -> None:
    """Remove everything in a folder that was not modified since a time."""
    for path in folder.iterdir():
        try:
            if path.stat().st_mtime >= time_s:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:  # Another process has removed it.
            continue


def run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilationError(f"{' '.join(command)}\n{done.stderr}")
