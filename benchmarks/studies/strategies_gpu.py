"""Study B: mirrored against central parameters on several GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.measuring import GPU, Context, Values, measurement
from benchmarks.studies.scaling import require_mpi
from benchmarks.studies.store import PARTIAL
from dptrain.errors import UserError

TIMEOUT_S, STEPS, ROUNDS = 120, 300, 5
BATCHES = (128, 2048)
"""Global batch sizes: one for which a step is short, and one that fills the GPUs."""
CASES = {
    "mirrored": ("mirrored", "auto"),
    "mirrored, NCCL": ("mirrored", "nccl"),
    "central, NCCL": ("central", "nccl"),
}
"""Strategies and transports."""
SHARED = {"mirrored, host": ("mirrored", "host"), "central, host": ("central", "host")}
"""The same for two ranks that share a GPU, between which gradients are staged in host memory."""


def train(ranks: int, batch: int, strategy: str, transport: str, steps: int) -> float:
    """Train the solar network with `dptrain train` and return the median step in ms."""
    mpi = require_mpi()
    launcher = mpi.command(ranks) if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            *launcher, sys.executable, "-m", "dptrain", "train", "--network", "solar",
            "--backend", "cuda", "--data", "synthetic", "--batch-size", str(batch),
            "--strategy", strategy, "--transport", transport, "--steps", str(steps),
            "--baseline-steps", "0", "--evaluate-every", "0", "--checkpoint-every", "1000000",
            "--share-gpus", "--run-dir", str(run),
        ]  # fmt: skip
        variables = {**os.environ, **mpi.environment}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables
        )
        if done.returncode:
            raise UserError((done.stderr or done.stdout).strip().splitlines()[-1])
        summary = json.loads((run / "summary.json").read_text())
    return float(summary["step_ms"]["median"])


def _measure(
    context: Context, cases: Mapping[str, tuple[int, str, str]], batches: Sequence[int]
) -> Values:
    """Train ranks with a strategy and a transport, in alternating rounds; the base comes first."""
    found: dict[str, Any] = {}
    for number in range(1 if context.quick else ROUNDS):
        for batch in batches:
            for name, case in {"1 GPU": (1, "mirrored", "auto"), **cases}.items():
                row = found.setdefault(f"{name}, batch {batch}", {"medians_ms": []})
                if "why" in row:
                    continue
                try:
                    row["medians_ms"].append(train(case[0], batch, *case[1:], STEPS))
                    row["median_ms"] = float(np.median(row["medians_ms"]))
                except (UserError, subprocess.TimeoutExpired) as error:
                    row["why"] = str(error)
                context.say(f"round {number + 1}, {name}, batch {batch}: {row}")
        context.keep({"gpus": context.gpus, "steps": found, PARTIAL: True})
    return {"gpus": context.gpus, "steps": found}


@measurement("strategies-gpu", GPU)
def strategies_on_gpus(context: Context) -> Values:
    """Train mirrored and central on one GPU and on all, with the same global minibatch."""
    counts = [n for n in (2, 3, 4, 8) if n <= context.gpus]
    if not counts:
        raise UserError("it needs two GPUs; strategies-one-gpu needs one")
    cases = {f"{name}, {n} GPUs": (n, *how) for n in counts for name, how in CASES.items()}
    return _measure(context, cases, BATCHES)


@measurement("strategies-one-gpu", GPU)
def strategies_on_one_gpu(context: Context) -> Values:
    """Train mirrored and central on two ranks that share a GPU."""
    cases = {f"{name}, 2 ranks on 1 GPU": (2, *how) for name, how in SHARED.items()}
    return _measure(context, cases, BATCHES[:1])
