"""Compiled kernels survive processes, and nothing that befalls their files breaks a run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

REPOSITORY = Path(__file__).parents[3]

# Prints how many kernels were compiled, how many loaded, and a number that they computed.
PROGRAM = """
import numpy as np
from dptrain.backends.numba import activations, elementwise
from dptrain.native.threads import ThreadPool

a, b, c = np.linspace(-1, 1, 9, dtype=np.float32), np.ones(9, np.float32), np.ones(9, np.float32)
pool = ThreadPool(1)
launches = [
    pool.bind(activations.forward("relu", "where(x <= 0, 0, x)"), a, b),
    pool.bind(elementwise.relu_mask, a, b, 0.5),
    pool.bind(activations.backward("relu", "where(y > 0, dy, 0)", "y"), a, b, c),
    pool.bind(activations.forward("sigmoid", "sigmoid(x)"), c, a),
    pool.bind(activations.backward("sigmoid", "dy * y * (1 - y)", "y"), a, b, c),
]
for launch in launches:
    launch(9)
all_ = [launch._entry.dispatcher for launch in launches]
assert all(len(kernel.signatures) == 1 for kernel in all_)
loaded = sum(sum(kernel.stats.cache_hits.values()) for kernel in all_)
print(len(all_) - loaded, loaded, float(c.sum()))
"""
KERNELS = 5

# The same for one kernel with two signatures.
SIGNATURES = """
import sys
import numpy as np
from dptrain.backends.numba import activations
from dptrain.native.threads import ThreadPool

relu = activations.forward("relu", "where(x <= 0, 0, x)")
total = 0.0
for dtype in map(np.dtype, sys.argv[1:]):
    a, b = np.linspace(-1, 1, 9, dtype=dtype), np.ones(9, dtype)
    ThreadPool(1).bind(relu, a, b)(9)
    total += float(b.sum())
loaded = sum(relu.dispatcher.stats.cache_hits.values())
print(len(sys.argv) - 1 - loaded, loaded, total)
"""


def start(
    cache: Path, *arguments: str, program: str = PROGRAM, **environment: str
) -> subprocess.Popen[str]:
    """Run a program with its kernels in `cache`."""
    settings = {"DPTRAIN_CACHE_DIR": str(cache), "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, int, float]:
    """Numbers of kernels compiled and loaded, and the result."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert not err
    compiled, loaded, result = out.split()
    return int(compiled), int(loaded), float(result)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A cache that holds the program's kernels, and what it computes."""
    cache = tmp_path_factory.mktemp("kernels")
    compiled, loaded, result = finish(start(cache))
    assert (compiled, loaded) == (KERNELS, 0)
    return cache, result


def copy(cache: Path, target: Path) -> Path:
    """A cache of its own for a test that damages it."""
    for path in cache.rglob("*.nbc"):
        place = target / path.relative_to(cache)
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(path.read_bytes())
    return target


def test_the_second_process_compiles_nothing(filled: tuple[Path, float]) -> None:
    cache, result = filled
    assert finish(start(cache)) == (0, KERNELS, result)


def test_damaged_files(filled: tuple[Path, float], tmp_path: Path) -> None:
    """Kernels are compiled again, and their files are whole again after that."""
    cache, result = copy(filled[0], tmp_path), filled[1]
    damages: list[Callable[[bytes], bytes]] = [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\x93" * len(data),
        lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    ]
    for damage, path in zip(damages, sorted(cache.rglob("*.nbc")), strict=False):
        path.write_bytes(damage(path.read_bytes()))
    assert finish(start(cache)) == (len(damages), KERNELS - len(damages), result)
    assert finish(start(cache)) == (0, KERNELS, result)


def test_signatures_of_a_kernel_have_files_of_their_own(tmp_path: Path) -> None:
    """A file that holds the code of another signature is never run."""

    def counts(*dtypes: str) -> tuple[int, int, float]:
        return finish(start(tmp_path, *dtypes, program=SIGNATURES))

    processes = [start(tmp_path, dtype, program=SIGNATURES) for dtype in ("f4", "f8")]
    single, double = (finish(process)[2] for process in processes)
    assert counts("f4", "f8") == (0, 2, single + double)
    one, other = tmp_path.rglob("*relu_forward*.nbc")
    swapped = other.read_bytes(), one.read_bytes()
    for path, data in zip((one, other), swapped, strict=True):
        path.write_bytes(data)
    assert counts("f4", "f8") == (2, 0, single + double)
    assert counts("f8", "f4") == (0, 2, double + single)


def test_nothing_is_stored_if_sources_change_after_their_import(
    filled: tuple[Path, float], tmp_path: Path
) -> None:
    """The key of the new sources must not receive machine code of the old ones."""
    package = shutil.copytree(REPOSITORY / "dptrain", tmp_path / "dptrain")
    imports, rest = PROGRAM.split("\n\n", 1)
    change = f"open({str(package)!r} + '/backends/numba/elementwise.py', 'a').write('# new')"
    # The current folder precedes PYTHONPATH.
    program = f"import os\nos.chdir({str(tmp_path)!r})\n{imports}\n{change}\n{rest}"
    cache, result = tmp_path / "cache", filled[1]
    process = start(cache, program=program)
    assert finish(process) == (KERNELS, 0, result)
    assert not list(cache.rglob("elementwise.*.nbc"))


def test_processes_that_start_together_compile_each_kernel_once(
    filled: tuple[Path, float], tmp_path: Path
) -> None:
    processes = [start(tmp_path) for _ in range(2)]
    found = [finish(process) for process in processes]
    assert sum(compiled for compiled, _, _ in found) == KERNELS
    assert sum(loaded for _, loaded, _ in found) == KERNELS
    assert {result for _, _, result in found} == {filled[1]}


def test_many_at_once_and_one_killed(filled: tuple[Path, float], tmp_path: Path) -> None:
    """Ranks that start together on an empty cache all finish, whatever happens to one of them."""
    processes = [start(tmp_path) for _ in range(4)]
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("*.nbc")) and time.monotonic() < deadline:
        time.sleep(0.01)
    processes[0].send_signal(signal.SIGKILL)
    processes[0].communicate(timeout=60)
    for process in processes[1:]:
        assert finish(process)[2] == filled[1]
    assert finish(start(tmp_path)) == (0, KERNELS, filled[1])


def test_nowhere_to_write(filled: tuple[Path, float], tmp_path: Path) -> None:
    """Without any place for a cache, a run compiles for itself and says nothing."""
    nothing = tmp_path / "a file"
    nothing.touch()
    process = start(nothing, XDG_CACHE_HOME=str(nothing), HOME=str(nothing))
    assert finish(process) == (KERNELS, 0, filled[1])
    assert nothing.read_bytes() == b""


def test_the_next_place_is_tried(filled: tuple[Path, float], tmp_path: Path) -> None:
    nothing, home = tmp_path / "a file", tmp_path / "home"
    nothing.touch()
    process = start(nothing, XDG_CACHE_HOME="", HOME=str(home))
    assert finish(process) == (KERNELS, 0, filled[1])
    assert list((home / ".cache" / "dptrain").rglob("*.nbc"))
