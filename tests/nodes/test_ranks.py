"""Tests of `tests/ranks` with ranks on two nodes, and what happens if a rank there fails."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dptrain.network.files import write_network
from tests.launchers.jobs import SCRIPT
from tests.nodes.machines import Nodes
from tests.system import test_batch_norm
from tests.system.failures import abort_script
from tests.system.failures.test_abort import LIMIT_S
from tests.system.launch import SEVERAL
from tests.system.test_shards import CASES, NETWORK, expect_equal_bits, lines, train

RANK_TESTS = tuple(
    f"tests/ranks/test_{name}.py" for name in ("gradient_sum", "equals_one_rank", "statistics_sum")
)
pytestmark = pytest.mark.timeout(400)  # Kernels may have to be compiled.
SELECTED = (
    "leaves or (number and (shared or central)) or ((steps or normalisation) and shared and 7) or "
    "(tree and shared)"
)


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)], ids=["2+2", "1+2"])
def test_ranks_of_two_nodes_equal_one_rank(nodes: Nodes, mpi: str, ranks: Sequence[int]) -> None:
    test = (sys.executable, "-m", "pytest", "--with-mpi", *RANK_TESTS, "-k", SELECTED)
    quiet = ("-p", "no:terminal")
    program = ("-n", "1", *test, ":", "-n", str(sum(ranks) - 1), *test, *quiet)
    command, variables = nodes.mpirun(ranks, *program, mpi=mpi)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank has trained a network with batch normalisation and micro-shards here."""
    folder = tmp_path_factory.mktemp("normalized")
    write_network(test_batch_norm.NETWORK, folder / "net.toml")
    one = ("numba", *test_batch_norm.CASES["numba"], "--threads", 1)
    test_batch_norm.train(folder, 0, [one])
    return folder


def test_batch_statistics_of_two_nodes_have_the_bits_of_one_rank(
    nodes: Nodes, normalized: Path, mpi: str
) -> None:
    runs, ranks = f"numba-shared-{mpi} numba-mpi-{mpi}", (1, 2)
    made = test_batch_norm.lines(test_batch_norm.named_runs(runs, 3, 1))
    commands = [shlex.join(map(str, words)) for words in made]
    command, variables = nodes.mpirun(
        ranks, sys.executable, SEVERAL, *commands, mpi=mpi, folder=normalized
    )
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    test_batch_norm.expect_equal_bits(normalized, runs, 3, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank has trained with micro-shards here."""
    folder = tmp_path_factory.mktemp("shards")
    write_network(NETWORK, folder / "net.toml")
    train(folder, 0, [(name, *CASES[name], "--threads", 1) for name in ("sgd", "adam")])
    return folder


def test_ranks_of_two_nodes_compute_the_bits_of_one_rank(
    nodes: Nodes, folder: Path, mpi: str
) -> None:
    ranks = (1, 2)
    size = sum(ranks)
    made = [
        (f"{name}-{mpi}-{size}x1", *CASES[name], "--threads", 1, "--transport", "shared")
        for name in ("sgd", "adam")
    ]
    commands = [shlex.join(map(str, words)) for words in lines(made)]
    command, variables = nodes.mpirun(
        ranks, sys.executable, SEVERAL, *commands, mpi=mpi, folder=folder
    )
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    expect_equal_bits(folder, f"sgd-{mpi} adam-{mpi}", size, 1)


@pytest.mark.parametrize("kind", ["gradients", "statistics"])
def test_a_rank_that_is_killed_during_a_sum_ends_all_nodes(
    nodes: Nodes, mpi: str, kind: str, tmp_path: Path
) -> None:
    network = "model-small"
    if kind == "statistics":
        network = str(tmp_path / "net.toml")
        write_network(test_batch_norm.NETWORK, Path(network))
    options = ("--network", network, "--data", "synthetic", "--log-every", "1",
               "--steps", "1000000",
               "--baseline-steps", "0", "--schedule", "constant", "--threads", "1",
               "--transport", "shared", "--run-dir", str(tmp_path / "run"))  # fmt: skip
    program = (sys.executable, "-m", "dptrain", "train", *options)
    command, variables = nodes.mpirun((1, 2), *program, mpi=mpi)
    job = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        end = time.monotonic() + 300
        while not metrics.exists() or metrics.read_bytes().count(b'"loss"') < 5:
            assert job.poll() is None, "training has ended"
            assert time.monotonic() < end, "there are no steps"
            time.sleep(0.05)
        victim = nodes.processes(1, "dptrain")[0]
        os.kill(victim, signal.SIGKILL)
        output, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
        job.communicate()
    named = [line for line in output.splitlines() if "dptrain: rank" in line]
    assert len(named) == 1, output
    assert f"its process {victim} on n2 was killed" in named[0]
    assert job.returncode != 0


@pytest.mark.parametrize(
    ("how", "rank", "cause"),
    [
        ("SIGKILL", 0, "was killed or exited in the middle of the run"),
        ("os_exit", 2, "was killed or exited in the middle of the run"),
        ("bug", 3, "ZeroDivisionError: seven by nothing"),
    ],
)
def test_a_rank_that_fails_ends_all_nodes(
    nodes: Nodes, mpi: str, how: str, rank: int, cause: str
) -> None:
    script = str(Path(abort_script.__file__))
    command, variables = nodes.mpirun((2, 2), sys.executable, script, how, str(rank), mpi=mpi)
    job = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LIMIT_S, errors="replace",
    )  # fmt: skip
    assert "done" not in job.stdout
    named = [line for line in job.stdout.splitlines() if "dptrain: rank" in line]
    assert len(named) == 1, job.stdout
    if (
        "at the same time on several nodes" in named[0]
    ):  # MPI ended the others before the watchdogs.
        assert how != "bug"
        assert str(rank) in named[0]
    else:
        assert f"dptrain: rank {rank} of 4: " in named[0]
        assert cause in named[0]


@pytest.mark.parametrize(
    ("how", "what"), [("hang", "has not arrived"), ("SIGSTOP", "is stopped (SIGSTOP?)")]
)
def test_a_rank_that_hangs_alone_on_its_node_is_named(
    nodes: Nodes, mpi: str, how: str, what: str
) -> None:
    script = str(Path(abort_script.__file__))
    command, variables = nodes.mpirun((2, 1), sys.executable, script, how, "2", mpi=mpi)
    job = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LIMIT_S, errors="replace",
    )  # fmt: skip
    assert "done" not in job.stdout
    named = [line for line in job.stdout.splitlines() if "dptrain: rank" in line]
    assert len(named) == 1, job.stdout
    assert "dptrain: rank 2 of 3: its process " in named[0]
    assert f" on n2 {what}" in named[0]
    assert job.returncode == 1


@pytest.mark.parametrize(("ranks", "rank"), [((1, 2), 1), ((2, 1), 2), ((1, 1), 0)], ids=str)
def test_a_rank_that_leaves_ends_the_waits_on_all_nodes(
    nodes: Nodes, mpi: str, ranks: Sequence[int], rank: int, tmp_path: Path
) -> None:
    """The job's timeout is longer than the time limit of the test."""
    program = (sys.executable, str(SCRIPT), "exit", str(tmp_path / "run"), "1000", str(rank))
    command, variables = nodes.mpirun(ranks, *program, mpi=mpi)
    job = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300, errors="replace",
    )  # fmt: skip
    named = [line for line in job.stdout.splitlines() if "dptrain: rank" in line]
    assert len(named) == 1, job.stdout
    assert f"rank {rank} of {sum(ranks)}: its program ended, by sys.exit or at" in named[0]
    assert job.returncode == 1
