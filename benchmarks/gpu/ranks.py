"""Time training on several GPUs: `dptrain train`, dptrain's steps alone, and PyTorch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import OURS
from benchmarks.session import Session
from benchmarks.timing import Series
from dptrain.scaling.launching import find_launcher

TIMEOUT_S = 100
STEPS = 400
MIN_STEPS, MIN_SAMPLES = 8, 1 << 14
"""Smallest numbers of steps and of samples of an epoch."""
ROOT = Path(__file__).resolve().parents[2]
TRAIN = "dptrain train"
PROGRAMS = (OURS, "PyTorch graph", "PyTorch DDP", TRAIN)
"""The first three repeat steps on one batch. The last is the command, with loading of data."""


Cases = Sequence[tuple[str, int]]
"""Networks, and samples per GPU."""


def measure_ranks(
    session: Session, cases: Cases, gpus: int, precision: str, *, launches: int, with_torch: bool
) -> None:
    """Launch all programs alternately, `launches` times each, and store their rows.

    Args:
        session: the run.
        cases: networks, and samples per GPU.
        gpus: number of GPUs.
        precision: of all programs.
        launches: number of launches.
        with_torch: False leaves out PyTorch.
    """
    us = {(name, n, program): list[float]() for name, n in cases for program in PROGRAMS}
    weak = {case: list[float]() for case in cases}
    missing = session.report.missing

    def train_each(case: tuple[str, int]) -> None:
        summary = train(*case, gpus, precision)
        us[case[0], case[1], TRAIN].append(1e3 * float(summary["step_ms"]["median"]))
        if summary["scaling"]["weak"] is not None:
            weak[case].append(float(summary["scaling"]["weak"]))

    def steps() -> None:
        for case, time in zip(cases, launch_steps(cases, gpus, precision), strict=True):
            us[case[0], case[1], OURS].append(time)

    def theirs() -> None:
        for case, times in zip(cases, launch_torch(cases, gpus, precision), strict=True):
            for program, time in times.items():
                us[case[0], case[1], program].append(time)

    runs: dict[str, Callable[[], None]] = {
        f"{name}, {n} samples on each of {gpus} GPUs": partial(train_each, (name, n))
        for name, n in cases
    }
    runs[f"dptrain's steps on {gpus} GPUs"] = steps
    if with_torch:
        runs[f"PyTorch on {gpus} GPUs"] = theirs
    for _ in range(launches):
        for name, start in runs.items():
            if name not in missing:
                with session.reported(name, ours=start is not theirs):
                    start()
    for (network, n, program), times in us.items():
        if times:
            within = weak[network, n] if program == TRAIN else []
            session.add(
                "ranks", Series.of(times), network=network, batch=n, gpus=gpus, program=program,
                precision=precision, **({"weak": float(np.median(within))} if within else {}),
            )  # fmt: skip


def launch_steps(cases: Cases, ranks: int, precision: str) -> list[float]:
    """Return the times of dptrain's steps in µs for each case (`benchmarks.gpu.rank_steps`)."""
    words = [f"{network}:{n}" for network, n in cases]
    return _printed_times(ranks, "benchmarks.gpu.rank_steps", precision, "auto", *words)


def launch_epochs(
    network: str, ranks: int, batch_size: int, precision: str, data: str
) -> tuple[float, ...]:
    """Return the mean times of a step in µs of epochs on images (`benchmarks.gpu.rank_data`)."""
    module = "benchmarks.gpu.rank_data"
    return tuple(_printed_times(ranks, module, precision, network, str(batch_size), data))


def _printed_times(ranks: int, module: str, *arguments: str) -> list[float]:
    """Run a module on GPUs and return the list that it prints in its last line."""
    done = subprocess.run(
        launched(ranks, [sys.executable, "-m", module, *arguments]), capture_output=True,
        text=True, timeout=TIMEOUT_S, env=environment(),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(last_line(done.stdout + done.stderr))
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def command(network: str, batch_size: int, ranks: int, precision: str, run: Path) -> list[str]:
    """Return the command that trains with `batch_size` samples per GPU.

    Epochs are long and the only checkpoint is at the end, because short epochs would dominate the
    time.
    """
    samples = max(ranks * batch_size * MIN_STEPS, MIN_SAMPLES)
    return launched(ranks, [
        sys.executable, "-m", "dptrain", "train",
        "--network", network, "--data", f"synthetic?samples={samples}",
        "--backend", "cuda", "--precision", precision, "--batch-size", str(ranks * batch_size),
        "--steps", str(STEPS), "--baseline-steps", str(STEPS // 4), "--evaluate-every", "0",
        "--learning-rate", "1e-6", "--checkpoint-every", str(STEPS), "--run-dir", str(run),
    ])  # fmt: skip


def launched(ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts a program on `ranks` ranks, as ``launch/gpus.sh`` does.

    Raises:
        UserError: no launcher was found.
    """
    return replace(find_launcher(), binds=False).command(ranks, 1, program)


def train(network: str, batch_size: int, ranks: int, precision: str) -> dict[str, Any]:
    """Run `dptrain train` and return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = command(network, batch_size, ranks, precision, run)
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment()
        )
        if done.returncode:
            raise RuntimeError(last_line(done.stdout + done.stderr))
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def environment(**variables: str) -> Mapping[str, str]:
    """Return this process's environment, with the variables that Open MPI requires for root."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**allow, "OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **variables}


def launch_torch(cases: Cases, ranks: int, precision: str) -> list[dict[str, float]]:
    """Return the times of PyTorch's steps in µs by program for each case; see `gpu.peers.ddp`."""
    port = free_port()
    arguments = [f"{network}:{batch_size}" for network, batch_size in cases]
    program = [sys.executable, "-m", "benchmarks.gpu.peers.ddp", precision, *arguments]
    processes = [
        subprocess.Popen(
            program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        output, errors = processes[0].communicate(timeout=TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if processes[0].returncode:
        raise RuntimeError(last_line(errors))
    times: list[dict[str, float]] = json.loads(output.splitlines()[-1])
    return times


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def last_line(text: str) -> str:
    """Return the last line of a process's output, usually the reason of its failure."""
    return (text.strip().splitlines() or ["no output"])[-1]


def counts(gpus: int, most: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[int, ...]:
    """Return the numbers of ranks that the GPUs suffice for."""
    return tuple(n for n in most if n <= gpus)
