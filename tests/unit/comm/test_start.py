"""What prevents the start of MPI is found before, and is one line with what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dptrain.comm.launching import start
from dptrain.errors import UserError

UCX = "MPICH Version:\t4.0.2\nMPICH Device:\tch4:ucx\n"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "9"}, 4),
        ({"MPI_LOCALNRANKS": "many"}, 1),
    ],
)
def test_ranks_of_the_node_are_at_most_those_of_the_job(
    environ: dict[str, str], expected: int
) -> None:
    assert start.local_size(4, environ) == expected


@pytest.mark.parametrize(
    ("version", "library", "ranks", "least", "most"),
    [  # Sizes of /dev/shm in KiB: too small for MPI to start, and enough.
        ("", "MPICH 5.0.2", 2, 2048, 2072),
        ("", "MPICH 5.0.2", 4, 4096, 4136),
        (UCX, "MPICH 4.0.2", 2, 8192, 9216),
        (UCX, "MPICH 4.0.2", 4, 16384, 18432),
    ],
)
def test_needed_memory_is_between_measured_sizes(
    version: str, library: str, ranks: int, least: int, most: int
) -> None:
    assert least * 1024 < start.needed_memory(version, library, ranks) <= most * 1024
    assert start.needed_memory(version, "Open MPI 5.0.11", ranks) == 0


def limited(monkeypatch: pytest.MonkeyPatch, free_bytes: int, blocks: int = 1 << 20) -> None:
    status = SimpleNamespace(f_blocks=blocks, f_bavail=free_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)


def test_too_little_shared_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited(monkeypatch, 3 << 20)
    start.refuse_small_memory("", "MPICH 5.0.2", 2, tmp_path)
    start.refuse_small_memory("", "Open MPI 5.0.11", 4, tmp_path)
    with pytest.raises(UserError, match=re.escape("3.0 MiB free, but MPICH 5.0.2 needs 4.0 MiB")):
        start.refuse_small_memory("", "MPICH 5.0.2", 4, tmp_path)
    limited(monkeypatch, 0, blocks=0)  # No limit.
    start.refuse_small_memory("", "MPICH 5.0.2", 4, tmp_path)
    with pytest.raises(UserError, match="absent does not exist or cannot be written"):
        start.refuse_small_memory("", "MPICH 5.0.2", 4, tmp_path / "absent")


def test_memory_that_ranks_of_the_job_have_taken_is_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited(monkeypatch, 1 << 20)
    (tmp_path / "mpich_shm_1_0").write_bytes(bytes(4 << 20))
    start.refuse_small_memory("", "MPICH 5.0.2", 4, tmp_path)
    os.utime(tmp_path / "mpich_shm_1_0")
    monkeypatch.setattr(start, "_RECENT_S", -60.0)  # Of another job.
    with pytest.raises(UserError):
        start.refuse_small_memory("", "MPICH 5.0.2", 4, tmp_path)


def test_the_mpich_of_a_distribution_is_found_under_its_own_name(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libmpich.so.12"
    library.parent.mkdir()
    folders = [str(tmp_path / "l*")]
    assert start.find_mpich({}, folders) is None
    library.touch()
    assert start.find_mpich({}, folders) == library
    assert start.find_mpich({"LD_LIBRARY_PATH": f":{library.parent}"}, []) == library
    assert start.find_mpich({"MPI4PY_LIBMPI": str(library)}, []) == library
    message = start._explain_absence("libmpi.so.12: cannot open shared object file", library)
    assert str(library) in message
    assert "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py" in message
    assert "pip install '.[mpi]'" in start._explain_absence("libmpi.so.12: cannot open", None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NUMBA_DISABLE_JIT", "1"),
        ("NUMBA_NUM_THREADS", "x"),
        pytest.param("NUMBA_OPT", "x", marks=pytest.mark.more),
        pytest.param("NUMBA_CPU_NAME", "foo", marks=pytest.mark.more),
        pytest.param("NUMBA_CPU_FEATURES", "bogus", marks=pytest.mark.more),
        pytest.param("NUMBA_CPU_FEATURES", "+bogus", marks=pytest.mark.more),
    ],
)
def test_a_variable_that_numba_refuses_is_named_in_one_line(variable: str, value: str) -> None:
    program = "import sys; from dptrain.cli.main import main; sys.argv[1:] = ['train']; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert variable in done.stderr


@pytest.mark.more
@pytest.mark.parametrize(
    "variable",
    ["NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_THREADING_LAYER", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS"],
)
def test_variables_that_dptrain_does_not_use_have_no_effect(variable: str) -> None:
    program = (
        "from dptrain.network import get_network\n"
        "from dptrain import Trainer\n"
        "import numpy as np\n"
        "x, y = np.zeros((8, 5), np.float32), np.zeros((8, 1), np.float32)\n"
        "Trainer('mlp-5', (x, y, x, y), steps=1, batch_size=4, threads=1, progress=False).fit()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, variable: "/dev/null/x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
