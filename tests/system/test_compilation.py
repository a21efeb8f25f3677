"""Processes divide the compilation of a job's kernels, and a signal ends it at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dptrain.comm.watchdog.watch import process_state
from tests.system.failures.test_kernel_cache import finish, start
from tests.system.launch import command, environment, succeed

pytestmark = pytest.mark.more

LIMIT_S = 240

HELPERS = """
import os, sys, time
from pathlib import Path
import numpy as np
from dptrain.backends.numba import activations
from dptrain.native import compilation_helper
from dptrain.native.threads import ThreadPool

a, b = np.linspace(-1, 1, 9, dtype=np.float32), np.ones(9, np.float32)
pool = ThreadPool(1)
launches = [
    pool.bind(activations.forward("relu", "where(x <= 0, 0, x)"), a, b),
    pool.bind(activations.backward("relu", "where(y > 0, dy, 0)", "y"), a, b, a),
]
requests = [launch._entry for launch in launches]
compilation_helper.SMALLEST = 1
with compilation_helper.helpers(requests, 1):
    if "wait" in sys.argv:
        print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
        time.sleep(600)
    end = time.monotonic() + 240
    while not all(each.is_stored for each in requests) and time.monotonic() < end:
        time.sleep(0.01)
for launch in launches:
    launch(9)
loaded = sum(sum(each.dispatcher.stats.cache_hits.values()) for each in requests)
print(len(requests) - loaded, loaded, float(a.sum() + b.sum()))
"""

ALONE = HELPERS.replace("with compilation_helper.helpers(requests, 1):", "if False:")


def test_helpers_compile_what_this_process_then_loads(tmp_path: Path) -> None:
    """The results have the same bits as those of kernels that this process compiled."""
    compiled, loaded, result = finish(start(tmp_path / "helper", program=HELPERS))
    assert (compiled, loaded) == (0, 2)
    assert finish(start(tmp_path / "alone", program=ALONE)) == (2, 0, result)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="finds helper processes in /proc, which only Linux has",
)
def test_helpers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    parent = start(tmp_path, "wait", program=HELPERS)
    assert parent.stdout is not None
    helpers = [int(each) for each in parent.stdout.readline().split()]
    assert helpers
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=LIMIT_S)
    end = time.monotonic() + LIMIT_S
    while any(process_state(helper) not in ("", "Z") for helper in helpers):
        assert time.monotonic() < end, "a helper outlived its parent"
        time.sleep(0.05)


# Prints the functions that a job compiled or loaded, but never called, and how many it called.
CALLED = """
import atexit, sys
done, called = set(), set()
# Registered first, so called last: the end of the thread pools is a call, too.
atexit.register(
    lambda: print("uncalled:", [str(each.dispatcher) for each in done - called],
                  "called:", len(called))
)
from dptrain.native import compilation
from dptrain.native.compilation import Request

compile_, result = Request.compile, Request.result.fget

def note_compilation(self):
    done.add(self)
    compile_(self)

def note_call(self):
    called.add(self)
    return result(self)

Request.compile, Request.result = note_compilation, property(note_call)
sys.argv = ["dptrain", "train", "--run-dir", "RUN"]
from dptrain.cli.main import main
main()
"""


def test_everything_that_a_default_job_compiles_is_called(tmp_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", CALLED],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert "uncalled: [] called: " in output
    assert int(output.rpartition("called: ")[2]) > 15


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 75, "SIGTERM while kernels were compiled"),
        (signal.SIGUSR1, 75, "SIGUSR1 while kernels were compiled"),
        (signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_ends_the_compilation_with_one_line(
    ranks: int, number: signal.Signals, code: int, line: str, tmp_path: Path
) -> None:
    """The run directory has hidden files only, so the same command works again."""
    with subprocess.Popen(
        command("train", "--run-dir", "RUN", ranks=ranks),
        env=environment(DPTRAIN_CACHE_DIR=str(tmp_path / "cache")),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        while "compiling" not in job.stderr.readline():
            assert job.poll() is None
        job.send_signal(number)
        _, errors = job.communicate(timeout=LIMIT_S)
    said = [each for each in errors.splitlines() if each.startswith("dptrain: ")]
    said = [each for each in said if "compiling" not in each]
    assert len(said) == 1, errors
    assert line in said[0]
    assert "Traceback" not in errors
    assert job.returncode == code
    assert all(path.name.startswith(".") for path in (tmp_path / "RUN").iterdir())


def test_results_do_not_depend_on_who_compiled(tmp_path: Path) -> None:
    """Ranks that divide the compilation train to the same bits as ranks that load all kernels."""
    options = ("train", "--network", "model-small", "--steps", "8")
    cache = str(tmp_path / "cache")
    for name in ("empty", "full"):
        succeed(*options, "--run-dir", tmp_path / name, ranks=2, DPTRAIN_CACHE_DIR=cache)
    succeed(*options, "--run-dir", tmp_path / "nowhere", ranks=2, DPTRAIN_CACHE_DIR="/dev/null",
            XDG_CACHE_HOME="/dev/null", HOME="/dev/null")  # fmt: skip
    files = [
        next((tmp_path / name / "checkpoints").glob("*/state.safetensors")).read_bytes()
        for name in ("empty", "full", "nowhere")
    ]
    assert files[0] == files[1] == files[2]
