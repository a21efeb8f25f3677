"""Time training on several GPUs: `dptrain train`, dptrain's steps alone, and PyTorch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.progress import Progress
from dptrain.errors import UserError
from dptrain.scaling.launching import find_launcher

TIMEOUT_S = 100
STEPS = 400
MIN_STEPS, MIN_SAMPLES = 8, 1 << 14
"""Smallest numbers of steps and of samples of an epoch."""
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("dptrain", "PyTorch graph", "PyTorch DDP", "dptrain train")
"""The first three repeat steps on one batch. The last is the command, with loading of data."""


@dataclass(frozen=True)
class RankResult:
    """Times of a network on several GPUs, with the same number of samples on each.

    Attributes:
        network: its name.
        ranks, batch_size: number of GPUs, and samples per GPU.
        us: times of a step in µs by program, one for each launch.
        weak: weak-scaling efficiencies that `dptrain train` reported, one for each launch.
    """

    network: str
    ranks: int
    batch_size: int
    us: dict[str, list[float]]
    weak: list[float]

    def median(self, program: str) -> float | None:
        """Return the median over launches; None if the program did not run."""
        return float(np.median(self.us[program])) if self.us.get(program) else None

    @property
    def times_faster(self) -> float | None:
        """Speedup over the faster of PyTorch's programs; None if one of both is missing."""
        mine = self.median("dptrain")
        theirs = [time for p in PROGRAMS[1:3] if (time := self.median(p)) is not None]
        return None if mine is None or not theirs else min(theirs) / mine


def weak_efficiency(one_rank: RankResult, many_ranks: RankResult, program: str) -> float | None:
    """Return T(1) / T(N), from separate launches."""
    one, many = one_rank.median(program), many_ranks.median(program)
    return None if one is None or many is None else one / many


Cases = Sequence[tuple[str, int]]
"""Networks, and samples per GPU."""


def measure_ranks(
    cases: Cases, ranks: int, precision: str, *, launches: int, with_torch: bool, progress: Progress
) -> tuple[list[RankResult], dict[str, str]]:
    """Launch all programs alternately, `launches` times each.

    Returns:
        The results, and the reasons for missing programs by case.
    """
    results = [RankResult(name, ranks, n, {p: [] for p in PROGRAMS}, []) for name, n in cases]
    failed: dict[str, str] = {}

    def launch(case: str, start: Callable[[], None]) -> None:
        if case in failed:
            return
        progress.step(case)
        try:
            start()
        except (RuntimeError, OSError, UserError, subprocess.TimeoutExpired) as error:
            failed[case] = f"{type(error).__name__}: {error}"

    for _ in range(launches):
        for result in results:
            case = f"{result.network}, {result.batch_size} samples on each of {ranks} GPUs"
            launch(case, partial(_ours, result, precision))
        launch(f"dptrain's steps on {ranks} GPUs", partial(_steps, results, precision))
        if with_torch:
            launch(f"PyTorch on {ranks} GPUs", partial(_theirs, results, precision))
    return results, failed


def _ours(result: RankResult, precision: str) -> None:
    summary = train(result.network, result.ranks, result.batch_size, precision)
    result.us["dptrain train"].append(1e3 * float(summary["step_ms"]["median"]))
    if summary["scaling"]["weak"] is not None:
        result.weak.append(float(summary["scaling"]["weak"]))


def _theirs(results: list[RankResult], precision: str) -> None:
    cases = [(result.network, result.batch_size) for result in results]
    measured = launch_torch(cases, results[0].ranks, precision)
    for result, times in zip(results, measured, strict=True):
        for program in PROGRAMS[1:3]:
            result.us[program].append(times[program])


def _steps(results: list[RankResult], precision: str) -> None:
    ranks = results[0].ranks
    for result, time in zip(results, launch_steps(results, ranks, precision), strict=True):
        result.us["dptrain"].append(time)


def launch_steps(results: Sequence[RankResult], ranks: int, precision: str) -> list[float]:
    """Return the times of dptrain's steps in µs for each case (`benchmarks.gpu.rank_steps`)."""
    cases = [f"{result.network}:{result.batch_size}" for result in results]
    return _printed_times(ranks, "benchmarks.gpu.rank_steps", precision, "auto", *cases)


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


def command(network: str, ranks: int, batch_size: int, precision: str, run: Path) -> list[str]:
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


def train(network: str, ranks: int, batch_size: int, precision: str) -> dict[str, Any]:
    """Run `dptrain train` and return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = command(network, ranks, batch_size, precision, run)
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
