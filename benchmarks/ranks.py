"""Compare ranks with threads on two cores, with `dptrain train`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE = 256
TIMEOUT_S = 120


@dataclass(frozen=True)
class RankResult:
    """A network trained by 2 ranks and by 2 threads of one rank, with one value per launch.

    Attributes:
        network: name of the network.
        weak, strong: scaling efficiencies of 2 ranks.
        ranks_ms, threads_ms: step times in ms.
    """

    network: str
    weak: tuple[float, ...]
    strong: tuple[float, ...]
    ranks_ms: tuple[float, ...]
    threads_ms: tuple[float, ...]

    @property
    def threads_over_ranks(self) -> float:
        """Step time of 2 threads divided by that of 2 ranks."""
        return float(np.median(self.threads_ms) / np.median(self.ranks_ms))


def measure_ranks(network: str, *, launches: int, steps: int) -> RankResult:
    """Launch both alternately, `launches` times each."""
    ranks, threads = [], []
    for _ in range(launches):
        ranks.append(_train(network, ranks=2, threads=1, steps=steps))
        threads.append(_train(network, ranks=1, threads=2, steps=steps))
    return RankResult(
        network,
        tuple(float(run["scaling"]["weak"]) for run in ranks),
        tuple(float(run["scaling"]["strong"]) for run in ranks),
        tuple(float(run["step_ms"]["median"]) for run in ranks),
        tuple(float(run["step_ms"]["median"]) for run in threads),
    )


def _train(network: str, *, ranks: int, threads: int, steps: int) -> dict[str, Any]:
    """Run `dptrain train` and return its summary."""
    own = Path(sys.executable).with_name("mpirun")
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError("no mpirun; install one with: pip install '.[mpi]'")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            mpirun, "-n", str(ranks), sys.executable, "-m", "dptrain", "train",
            "--network", network, "--data", "synthetic", "--batch-size", str(BATCH_SIZE),
            "--threads", str(threads), "--steps", str(steps), "--baseline-steps", str(steps),
            "--evaluate-every", "0", "--run-dir", str(run),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary
