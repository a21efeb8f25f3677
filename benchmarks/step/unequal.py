"""Compare the rate of unequal workers that train together with the sum of their separate rates.

    python -m benchmarks.step.unequal numba:4 numba:1 --network cifar --batch-size 512
    python -m benchmarks.step.unequal cuda numba:15 --network cifar --batch-size 1024 --steps 6000
    python -m benchmarks.step.unequal numba:1 numba:1:3 --network model0     # the second is slowed
    down

A worker is BACKEND, BACKEND:THREADS or BACKEND:THREADS:SLOWDOWN, and becomes one rank. A slowed
worker sleeps after each step until its computation has taken SLOWDOWN times as long.

Before anything is timed, the parameters after a few steps of all workers together are compared with
those of the first worker alone. The rates are those of the second half of the steps, so that the
shares have followed the speeds. A worker alone makes as many steps as take about `ALONE_S`. Then
all workers do the same at the same time, each for itself: cores that share caches, memory or a
limit of power slow each other down, which no division of the work avoids. Rounds of all runs
alternate.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.flags import flags
from dptrain.training.persistence.persistence import load_checkpoint

TIMEOUT_S = 1200
CHECKED_STEPS = 3
ALONE_S = 2.0
"""Shortest time in seconds of the steps from which the rate of a worker alone is computed."""
TOLERANCE = 5e-4
"""Largest difference of a parameter after `CHECKED_STEPS` steps, relative to the largest parameter.
Other orders of additions in float32 change it by some 1e-7 in each step, but a ReLU near 0 or a
pool with two nearly equal inputs may decide otherwise: 1.4e-4 was seen with 512 samples. With
``--shards`` the difference is 0."""
COMMON = (
    "--data", "synthetic?samples=4096", "--validation", "0", "--log-every", "1", "--schedule",
    "constant", "--evaluate-every", "0", "--baseline-steps", "0", "--checkpoint-every", "1000000",
    "--precision", "fp32",
)  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """One rank.

    Attributes:
        backend: its backend.
        threads: its compute threads.
        slowdown: factor of the time of its computation.
    """

    backend: str
    threads: int = 1
    slowdown: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Return the worker that an argument of the command line describes."""
        backend, threads, slowdown = [*text.split(":"), "1", "1"][:3]
        return cls(backend, int(threads), float(slowdown))

    def command(self, *arguments: str) -> list[str]:
        """Return the command of this rank."""
        program = ["-m", "dptrain"]
        if self.slowdown != 1.0:
            program = ["-m", "benchmarks.step.slowed", str(self.slowdown)]
        own = ["--backend", self.backend, "--threads", str(self.threads)]
        return [sys.executable, *program, "train", *arguments, *own]


@dataclass(frozen=True)
class Setup:
    """The network and the lengths of the runs."""

    network: str
    batch_size: int
    steps: int
    alone_steps: int
    shards: int

    def arguments(self, steps: int) -> list[str]:
        """Return the arguments that all runs have."""
        return [
            *COMMON, "--network", self.network, "--batch-size", str(self.batch_size),
            "--steps", str(steps), "--shards", str(self.shards),
        ]  # fmt: skip


def run(workers: Sequence[Worker], arguments: Sequence[str], path: Path) -> Path:
    """Train with one rank per worker; return the run directory, which is `path`."""
    shutil.rmtree(path, ignore_errors=True)
    full = (*arguments, "--run-dir", str(path))
    command = workers[0].command(*full)
    if len(workers) > 1:
        own = Path(sys.executable).with_name("mpirun")
        mpirun = str(own) if own.exists() else shutil.which("mpirun")
        if mpirun is None:
            raise FileNotFoundError("no mpirun; install one with: pip install '.[mpi]'")
        command = [mpirun]
        for worker in workers:
            command += [*([":"] if len(command) > 1 else []), "-n", "1", *worker.command(*full)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return path


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def rate_of(path: Path, batch_size: int) -> float:
    """Return the samples per second in the second half of the steps of a run."""
    steps = [record["step_ms"] for record in records_of(path) if "step_ms" in record]
    return batch_size / float(np.mean(steps[len(steps) // 2 :])) * 1e3


def train_alone(setup: Setup, worker: Worker, steps: int, path: Path) -> float:
    """Return the samples per second of one worker."""
    return rate_of(run([worker], setup.arguments(steps), path), setup.batch_size)


def rate_alone(worker: Worker, setup: Setup, path: Path) -> tuple[float, int]:
    """Return the samples per second of one worker, and in how many steps they were measured."""
    rate = train_alone(setup, worker, setup.alone_steps, path)
    steps = int(2 * ALONE_S * rate / setup.batch_size)
    if steps <= setup.alone_steps:
        return rate, setup.alone_steps
    return train_alone(setup, worker, steps, path), steps


def rates_at_once(
    workers: Sequence[Worker], setup: Setup, steps: Sequence[int], folder: Path
) -> list[float]:
    """Return the rates of workers that train at the same time, each for itself."""
    paths = [folder / str(number) for number in range(len(workers))]
    with ThreadPoolExecutor(len(workers)) as executor:
        return list(executor.map(partial(train_alone, setup), workers, steps, paths))


def shares_of(path: Path) -> list[float]:
    """Return the last shares of the ranks."""
    found: list[list[float]] = [r["shares"] for r in records_of(path) if "shares" in r]
    return found[-1]


def check(workers: Sequence[Worker], setup: Setup, folder: Path) -> float:
    """Return the largest relative difference of parameters from those of the first worker alone."""
    arguments = [*setup.arguments(CHECKED_STEPS), "--learning-rate", "0.001"]
    alone = load_checkpoint(run(workers[:1], arguments, folder / "run")).arrays
    shares = ",".join(str(1 + i) for i in range(len(workers)))
    path = run(workers, [*arguments, "--balance", shares], folder / "run")
    together = load_checkpoint(path).arrays
    differences = [
        float(np.abs(together[name] - alone[name]).max() / np.abs(alone[name]).max())
        for name in alone
        if name.startswith("parameters/")
    ]
    if not max(differences) < TOLERANCE:
        raise RuntimeError(
            f"the parameters of all workers together differ by {max(differences):.1e} from those "
            f"of the first worker alone; expected less than {TOLERANCE:g}"
        )
    return max(differences)


def measure(workers: Sequence[Worker], setup: Setup, rounds: int, folder: Path) -> None:
    """Print the rates of every round, and their medians."""
    rates, sums_at_once, together = [list[float]() for _ in workers], list[float](), list[float]()
    for number in range(rounds):
        alone = [rate_alone(worker, setup, folder / "run") for worker in workers]
        for found, (rate, _) in zip(rates, alone, strict=True):
            found.append(rate)
        at_once = rates_at_once(workers, setup, [steps for _, steps in alone], folder)
        sums_at_once.append(sum(at_once))
        balanced = [*setup.arguments(setup.steps), "--balance", "measured"]
        path = run(workers, balanced, folder / "run")
        together.append(rate_of(path, setup.batch_size))
        print(
            f"round {number + 1}: alone {listed([rate for rate, _ in alone])}; at the same time "
            f"{listed(at_once)}; together {together[-1]:,.0f} samples/s, shares "
            f"{', '.join(f'{share:.1%}' for share in shares_of(path))}",
            flush=True,
        )
    medians, joint = [float(np.median(found)) for found in rates], float(np.median(together))
    print(f"ratio of the rates: {max(medians) / min(medians):.1f}")
    print(f"together / sum of the rates:                  {joint / sum(medians):.3f}")
    print(f"together / sum of the rates at the same time: {joint / np.median(sums_at_once):.3f}")
    print(f"together / fastest alone:                     {joint / max(medians):.3f}")


def listed(rates: Sequence[float]) -> str:
    """Return rates as text."""
    return ", ".join(f"{rate:,.0f}" for rate in rates)


@click.command()
@flags(
    network="model0", batch_size=512, steps=(240, "Steps of all workers together."),
    alone_steps=(60, "Fewest steps of a worker alone."), shards=0, rounds=3,
)  # fmt: skip
@click.argument("workers", nargs=-1, required=True)
def main(workers: tuple[str, ...], rounds: int, **lengths: Any) -> None:
    """Compare the rate of unequal WORKERS together with the sum of their separate rates.

    A worker is BACKEND, BACKEND:THREADS or BACKEND:THREADS:SLOWDOWN.
    """
    chosen, setup = [Worker.parse(text) for text in workers], Setup(**lengths)
    with tempfile.TemporaryDirectory() as folder:
        difference = check(chosen, setup, Path(folder))
        print(f"results are equal: parameters differ by at most {difference:.1e}", flush=True)
        measure(chosen, setup, rounds, Path(folder))


if __name__ == "__main__":
    main()
