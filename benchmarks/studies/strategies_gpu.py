"""Study B: mirrored against central parameters on several GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.studies.measuring import GPU, PARTIAL, Context, Values, measurement
from benchmarks.studies.scaling import require_mpi
from dptrain.errors import UserError

TIMEOUT_S, STEPS = 120, 300
BATCHES = (128, 2048)
"""Global batch sizes: one for which a step is short, and one that fills the GPUs."""
CASES = {
    "mirrored": ("mirrored", "auto"),
    "mirrored, NCCL": ("mirrored", "nccl"),
    "central, NCCL": ("central", "nccl"),
}
"""Strategies and transports."""


def train(ranks: int, batch: int, strategy: str, transport: str, steps: int) -> dict[str, Any]:
    """Train the solar network with `dptrain train` and return the times of its summary."""
    mpi = require_mpi()
    launcher = mpi.command(ranks) if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            *launcher, sys.executable, "-m", "dptrain", "train", "--network", "solar",
            "--backend", "cuda", "--data", "synthetic", "--batch-size", str(batch),
            "--strategy", strategy, "--transport", transport, "--steps", str(steps),
            "--baseline-steps", "0", "--evaluate-every", "0", "--checkpoint-every", "1000000",
            "--run-dir", str(run),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise UserError((done.stderr or done.stdout).strip().splitlines()[-1])
        summary = json.loads((run / "summary.json").read_text())
    step = summary["step_ms"]
    return {"median_ms": step["median"], "q1_ms": step["q1"], "q3_ms": step["q3"], "n": step["n"]}


@measurement("strategies-gpu", GPU, "B8 Q21 Q22 Q23")
def strategies_on_gpu(context: Context) -> Values:
    """Train on one GPU and on all, mirrored and central, with the same global minibatch."""
    counts = [n for n in (2, 4, 8) if n <= context.gpus]
    found: dict[str, Any] = {}
    for batch in BATCHES:
        found[f"1 GPU, batch {batch}"] = train(1, batch, "mirrored", "auto", STEPS)
        for ranks in counts:
            for name, (strategy, transport) in CASES.items():
                key = f"{name}, {ranks} GPUs, batch {batch}"
                try:
                    found[key] = train(ranks, batch, strategy, transport, STEPS)
                except (UserError, subprocess.TimeoutExpired) as error:
                    found[key] = {"why": str(error)}
                context.say(f"{key}: {found[key]}")
                context.keep({"gpus": context.gpus, "steps": found, PARTIAL: True})
    return {"gpus": context.gpus, "steps": found}
