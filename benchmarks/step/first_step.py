"""Time the first step of training with an empty and with a warm cache of compiled kernels.

    python3 -m benchmarks.step.first_step [--backend cuda] [--precision P] [--repeats N]
        [network ...]

Each run is a process of its own, `dptrain train --steps 2` on synthetic data. A line for each
network shows the age of the process at the end of its first step (`first_step_s` of its summary)
with an empty cache, and the median with the cache of that run; and the part of it for which a
Python program that imports NumPy (and CuPy, on a GPU) is responsible. The system's own caches, such
as that of files, are warm, and Python may store its bytecode, as it does unless
``PYTHONDONTWRITEBYTECODE`` is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks.flags import flags

DEFAULTS = "model0", "cifar", "solar"


def first_step_s(network: str, options: Sequence[str], cache: Path, folder: Path) -> float:
    """Return the age of a training process at the end of its first step, in seconds."""
    run = folder / f"run-{time.monotonic_ns()}"
    command = [
        sys.executable, "-m", "dptrain", "train", "--network", network, "--steps", "2",
        "--data", "synthetic?samples=256", "--run-dir", str(run), *options,
    ]  # fmt: skip
    environment = {**os.environ, "DPTRAIN_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if found.returncode:
        sys.exit(found.stderr)
    return float(json.loads((run / "summary.json").read_text())["first_step_s"])


def import_s(modules: Sequence[str]) -> float:
    """Return the seconds of a process that only imports modules."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], check=True)
    return time.perf_counter() - start


@click.command()
@flags(backend="cuda", precision="bf16", repeats=3, tune=(False, "Measure kernels, too."))
@click.argument("networks", nargs=-1, metavar="[NETWORK]...")
def main(backend: str, precision: str, repeats: int, tune: bool, networks: tuple[str, ...]) -> None:
    """Time the first step of training with an empty and with a warm cache."""
    options = ["--backend", backend, "--precision", precision]
    options += ["--tune"] if tune else []
    modules = ["numpy", "cupy"] if backend in ("cuda", "cudnn") else ["numpy"]
    imports = min(import_s(modules) for _ in range(repeats))
    print(f"importing {' and '.join(modules)}: {imports:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        for network in networks or DEFAULTS:
            cache = Path(folder, f"cache-{network}")
            empty = first_step_s(network, options, cache, Path(folder))
            warm = [first_step_s(network, options, cache, Path(folder)) for _ in range(repeats)]
            print(
                f"{network}: first step after {empty:.2f} s with an empty cache, "
                f"{median(warm):.2f} s ({min(warm):.2f} to {max(warm):.2f}) with a warm one",
                flush=True,
            )


if __name__ == "__main__":
    main()
