"""Several GPUs: `dptrain train` as users run it, beside PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TIMEOUT_S = 100
STEPS = 400
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("dptrain", "PyTorch graph", "PyTorch DDP")


@dataclass(frozen=True)
class RankResult:
    """A network on some GPUs, with the same samples on each.

    Attributes:
        network: its name.
        ranks, batch_size: GPUs, and samples a GPU.
        us: microseconds of a step by program, a number for each launch.
        weak: efficiencies that `dptrain train` measured against rank 0 alone, for each launch.
    """

    network: str
    ranks: int
    batch_size: int
    us: dict[str, tuple[float, ...]]
    weak: tuple[float, ...]

    def median(self, program: str) -> float | None:
        """Over the launches; None where the program did not run."""
        return float(np.median(self.us[program])) if self.us.get(program) else None


def weak_efficiency(alone: RankResult, together: RankResult, program: str) -> float | None:
    """T(1) / T(N), from launches of their own."""
    one, many = alone.median(program), together.median(program)
    return None if one is None or many is None else one / many


def measure_ranks(
    network: str, ranks: int, batch_size: int, precision: str, *, launches: int, with_torch: bool
) -> tuple[RankResult, dict[str, str]]:
    """Launch both programs in turn, `launches` times each.

    Returns:
        What was measured, and why programs are missing from it.
    """
    us: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    weak: list[float] = []
    failed: dict[str, str] = {}

    def ours() -> None:
        summary = train(network, ranks, batch_size, precision)
        us["dptrain"].append(1e3 * float(summary["step_time_ms"]))
        if summary["scaling"]["weak"] is not None:
            weak.append(float(summary["scaling"]["weak"]))

    def theirs() -> None:
        times = launch_torch(network, ranks, batch_size, precision)
        us["PyTorch graph"].append(times["graph_us"])
        us["PyTorch DDP"].append(times["ddp_us"])

    programs = {"dptrain": ours, **({"PyTorch": theirs} if with_torch else {})}
    for _ in range(launches):
        for name, launch in programs.items():
            if name in failed:
                continue
            try:
                launch()
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                failed[name] = f"{type(error).__name__}: {error}"
    times = {name: tuple(values) for name, values in us.items()}
    return RankResult(network, ranks, batch_size, times, tuple(weak)), failed


def command(network: str, ranks: int, batch_size: int, precision: str, run: Path) -> list[str]:
    """What a user types to train, `batch_size` being that of a GPU."""
    return [
        find_mpirun(), "-n", str(ranks), sys.executable, "-m", "dptrain", "train",
        "--network", network, "--data", f"synthetic?samples={ranks * batch_size * 8}",
        "--backend", "cuda", "--precision", precision, "--batch-size", str(ranks * batch_size),
        "--steps", str(STEPS), "--baseline-steps", str(STEPS // 4), "--evaluate-every", "0",
        "--learning-rate", "1e-6", "--run-dir", str(run),
    ]  # fmt: skip


def find_mpirun() -> str:
    """The one beside this Python, else the system's.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError("no mpirun; install one with: pip install '.[mpi]'")
    return mpirun


def train(network: str, ranks: int, batch_size: int, precision: str) -> dict[str, Any]:
    """Summary of a run of `dptrain train`."""
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
    """This process's, passed on whole, with what Open MPI asks of root."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**allow, "OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **variables}


def launch_torch(network: str, ranks: int, batch_size: int, precision: str) -> dict[str, float]:
    """Microseconds of PyTorch's steps, by `benchmarks.gpu.ddp`."""
    port = free_port()
    arguments = [sys.executable, "-m", "benchmarks.gpu.ddp", network, str(batch_size), precision]
    processes = [
        subprocess.Popen(
            arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
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
    answer: dict[str, float] = json.loads(output.splitlines()[-1])
    return answer


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def last_line(text: str) -> str:
    """What a process said last, which is mostly why it ended."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def counts(gpus: int, most: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[int, ...]:
    """Numbers of ranks for which there are GPUs."""
    return tuple(n for n in most if n <= gpus)
