"""Check a machine with GPUs in one or two minutes.

    python tests/gpu/check.py

Run the tests of this folder, train model0 on digits with the `cuda` backend (alone, then as two
ranks that share a GPU), compare some steps of other networks with the `numba` backend, and time
steps. Print a line for each check, and the last lines of output of those that failed. Requires
pytest and PyTorch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "DPTRAIN_ALLOW_SINGLE": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
NETWORKS = ("model0", "model2", "cifar", "solar", "mlp-200-100")
FLOAT32 = 1e-4
"""Allowed relative difference of the loss after three training steps in float32."""


def run(name: str, command: list[str], seconds: int = 300) -> None:
    """Run a command, and print its result and its last line, or the last forty after a failure."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        print(f"{name}: FAILED, not finished within {seconds} s\n{output[-2000:]}", flush=True)
        return
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    verdict = "ok" if done.returncode == 0 else f"FAILED with exit status {done.returncode}"
    print(f"{name}: {verdict} in {time.perf_counter() - begin:.0f} s; {lines[-1]}", flush=True)
    if done.returncode:
        print("\n".join(lines[-40:]), flush=True)


def train(name: str, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> None:
    """Train model0 with the command line, and print the main entries of its summary."""
    path = folder / name.replace(" ", "-")
    arguments = ("train", "--backend", "cuda", "--run-dir", str(path), *options)
    run(name, [*launcher, sys.executable, "-m", "dptrain", *arguments])
    summary = path / "summary.json"
    if summary.exists():
        facts = json.loads(summary.read_text())
        wanted = ("ranks", "steps", "test_accuracy", "step_ms", "samples_per_s")
        print("   ", {key: facts[key] for key in wanted if key in facts}, flush=True)


def compare(name: str) -> None:
    """Compare the losses of three steps with the numba backend, and time steps."""
    import numpy as np

    import dptrain.api
    from dptrain.batch import Batch
    from dptrain.network import get_network
    from dptrain.plan import SGD

    described = get_network(name)

    def batch(n: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((n, *described.input_shape), dtype=np.float32)
        if described.loss.targets == "classes":
            return x, rng.integers(0, described.num_outputs, n)
        return x, rng.random((n, described.num_outputs), dtype=np.float32)

    x, y = batch(32)
    losses = {}
    for backend in ("cuda", "numba"):
        replica = dptrain.api.make_replica(described, backend, 32, optimizer=SGD(momentum=0.9))
        losses[backend] = []
        for step in range(3):
            losses[backend].append(replica.forward_backward(x, y, step=step))
            replica.update(0.001)
    worst = max(abs(a / b - 1) for a, b in zip(losses["cuda"], losses["numba"], strict=True))
    times = []
    for n in (32, 256, 2048):
        replica = dptrain.api.make_replica(described, "cuda", n, optimizer=SGD(momentum=0.9))
        x, y = batch(n)
        steps = []
        for step in range(25):
            replica.load(Batch.of(x, y, step=step))
            replica.memory.synchronize()
            begin = time.perf_counter()
            replica.run()
            replica.update(0.001)
            replica.memory.synchronize()
            steps.append(time.perf_counter() - begin)
        times.append(f"{n}: {1e6 * statistics.median(steps[5:]):.0f} us")
    verdict = "ok" if worst < FLOAT32 else "FAILED"
    print(
        f"{name}: {verdict}, loss differs by {worst:.1e}; step at batch size {', '.join(times)}",
        flush=True,
    )


def main() -> None:
    """Run all checks."""
    # No configuration file: the project's file requires plugins that a GPU machine may lack.
    options = ("-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-q")
    run("tests", [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "tests/gpu"])
    with tempfile.TemporaryDirectory() as folder:
        train("training", Path(folder), "--epochs", "3")
        mpirun = shutil.which("mpirun")
        if mpirun:
            shared = ("--share-gpus", "--epochs", "1", "--baseline-steps", "0")
            launcher = (mpirun, "-n", "2")
            train("two ranks", Path(folder), *shared, launcher=launcher)
    sys.path.insert(0, str(ROOT))
    for name in NETWORKS:
        try:
            compare(name)
        except Exception:
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)


if __name__ == "__main__":
    main()
