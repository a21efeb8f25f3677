"""Measure parts at the same time on a machine with several GPUs and many cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies.compiling import compile_all, requests
from benchmarks.studies.measuring import CPU, GPU, MANY_CORES, MEASUREMENTS, Context
from benchmarks.studies.running import CORES

SCALED_CORES = 16
"""Cores on which scaling is measured; GPUs are driven from the others."""
FEW_CORES = 4
"""Cores for what needs only one or a few."""
ON_ALL_GPUS = ("strategies-gpu", "strategies-one-gpu")
"""Measurements that need all GPUs, made last."""


def can_be_divided(context: Context, parts: Sequence[str]) -> bool:
    """Return whether GPUs and cores are to be measured, on a machine with enough of both."""
    enough = context.gpus > 0 and len(context.cores) >= SCALED_CORES + MANY_CORES
    return enough and {GPU, CORES} <= set(parts)


def divide(names: Sequence[str], parts: int) -> list[list[str]]:
    """Return the names in `parts` lists, in turns."""
    return [list(names[i::parts]) for i in range(parts)]


def run_parallel(context: Context, output: Path, again: bool) -> int:
    """Measure scaling on 16 cores, what needs few cores, and what needs a GPU, at the same time.

    Returns:
        The largest exit status of the processes.
    """
    scaled, few = context.cores[:SCALED_CORES], context.cores[-FEW_CORES:]
    others = context.cores[SCALED_CORES:-FEW_CORES]
    options = ["--output", str(output), "--no-page", *(["--again"] if again else [])]
    single = [m.name for m in MEASUREMENTS.values() if m.needs == CPU and not m.many_cores]
    cores = [
        _start(["--only", CORES, *options], scaled, None),
        _start([*single, "--only", CPU, *options], few, None),
    ]
    try:
        os.sched_setaffinity(0, others)
        compile_all(requests(), processes=len(others))
        names = [m.name for m in MEASUREMENTS.values()
                 if m.needs == GPU and m.name not in ON_ALL_GPUS]  # fmt: skip
        shares = divide(names, min(context.gpus, 2))
        width = len(others) // len(shares)
        running = [
            _start([*share, "--only", GPU, "--compiled", *options],
                   others[number * width : (number + 1) * width], str(number))
            for number, share in enumerate(shares)
        ]  # fmt: skip
        codes = [process.wait() for process in running]
        last = _start([*ON_ALL_GPUS, "--only", GPU, "--compiled", *options], others, None)
        return max(*codes, last.wait(), *(process.wait() for process in cores))
    finally:
        for process in cores:
            process.kill()


def _start(
    arguments: Sequence[str], cores: Sequence[int], gpu: str | None
) -> subprocess.Popen[bytes]:
    """Start this program in a process on some cores and, unless it is None, on one GPU."""
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    own = os.sched_getaffinity(0)
    # A process inherits the cores of the one that starts it.
    os.sched_setaffinity(0, cores)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.studies", *arguments], env={**os.environ, **visible}
        )
    finally:
        os.sched_setaffinity(0, own)
