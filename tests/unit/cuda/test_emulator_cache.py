"""The emulator compiles a kernel once for all processes, and again if its sources change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dptrain.backends.cuda.device.sources import KERNELS, include_folders, source_path
from tests.emulator import libraries

DAY_S = 24 * 3600


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return a list of files that grows when one is compiled; the compiler is not run."""
    compiled: list[str] = []

    def run(command: list[str], folder: Path) -> None:
        if "-c" in command:
            threading.Event().wait(0.005)  # Long enough for other threads to start.
            compiled.append(command[command.index("-c") - 1])
        (folder / command[-1]).touch()

    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(libraries, "run", run)
    monkeypatch.setattr(libraries, "cache_folder", lambda: folder)
    for function in ("_header", "_runtime"):
        monkeypatch.setattr(libraries, function, lambda: tmp_path / "not used")
    return compiled


def copied(folder: Path) -> tuple[Path, list[str]]:
    """Return a copy of the kernels, and the names of their sources."""
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder, sorted(path.name for path in folder.rglob("*.cu"))


def library(folder: Path, file: str, **macros: int) -> Path:
    return libraries.compiled_library(folder, file, "kernel", tuple(macros.items()))


def preprocessed_headers(folder: Path, file: str) -> set[str]:
    """Return the headers that the preprocessor includes without macros."""
    paths = [f"-I{path}" for path in include_folders(folder)]
    command = [libraries.COMPILER[0], "-MM", *paths, "-x", "c++", str(source_path(file, folder))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(re.findall(r"\w+\.cuh", done.stdout))


def named_headers(folder: Path, file: str) -> set[str]:
    """Return the headers that a file or its headers name, also those under a condition."""
    own = set(re.findall(r'"(\w+\.cuh)"', source_path(file, folder).read_text()))
    return own.union(*(named_headers(folder, header) for header in own))


@pytest.mark.more
def test_a_changed_header_recompiles_exactly_the_kernels_that_include_it(
    compilations: list[str], tmp_path: Path
) -> None:
    folder, files = copied(tmp_path / "kernels")
    named = {file: named_headers(folder, file) for file in files}
    for file in files:
        assert preprocessed_headers(folder, file) <= named[file]
        assert libraries.translated_sources(folder, file).keys() == {file, *named[file]}
    before = {file: library(folder, file) for file in files}
    for name in ("mma.cuh", "pooling.cuh", "precision.cuh"):
        path = source_path(name, folder)
        text = path.read_text()
        path.write_text(f"{text}\n// Changed.\n")
        compilations.clear()
        changed = {file for file in files if library(folder, file) != before[file]}
        assert changed == set(compilations) == {f for f in files if name in named[f]}
        assert 0 < len(changed) < len(files)
        path.write_text(text)


def test_copies_of_the_sources_share_libraries(compilations: list[str], tmp_path: Path) -> None:
    folder, files = copied(tmp_path / "kernels")
    assert library(folder, files[0], N=1) == library(KERNELS, files[0], N=1)
    assert library(folder, files[0], N=2) != library(KERNELS, files[0], N=1)
    assert len(compilations) == 2


def test_concurrent_users_compile_a_kernel_once(compilations: list[str]) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(library(KERNELS, "clock.cu")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert compilations == ["clock.cu"]


def test_unused_libraries_are_removed_in_the_end(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, unused = library(KERNELS, "clock.cu"), library(KERNELS, "cast.cu")
    (unused.parent / "work").mkdir()
    long_ago = time.time() - libraries.LIFETIME_S - DAY_S
    for path in (used, unused, unused.parent / "work"):
        os.utime(path, (long_ago, long_ago))
    assert library(KERNELS, "clock.cu") == used
    monkeypatch.setattr(libraries, "_remove_unused", libraries._remove_unused.__wrapped__)
    new = library(KERNELS, "dropout.cu")
    assert set(used.parent.iterdir()) == {used, new}
