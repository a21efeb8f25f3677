"""Study A: direct convolution and convolution by matrix products, on a GPU and on a CPU core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.ladder.gpu import measure_rungs
from benchmarks.ladder.layer import Layer
from benchmarks.node.workers.processes import SINGLE_THREAD
from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from dptrain.errors import UserError

LADDER = {
    "larger:conv2": Layer(32, 32, 25, 25, 32, 3, padding=1),
    "cifar:conv2": Layer(32, 64, 12, 12, 64, 5, padding=2),
}
NAMES = {"larger:conv2": "study-a-larger:conv2", "cifar:conv2": "cifar:conv2"}
"""Layers by the names of dptrain's networks."""


@measurement("ladder-gpu", GPU)
def ladder_on_gpu(context: Context) -> Values:
    """Time every version of the matrix product and of the convolution."""
    from dptrain.backends.cuda.backend import open_device

    device = open_device(0)
    found: dict[str, Any] = {}
    for name, layer in LADDER.items():
        rungs = measure_rungs(device, layer, ("fp32",))
        found[name] = {"forward": [asdict(row) for row in rungs]}
        context.say(name)
    return {"layers": found, "block_of_2500_threads": _launch_2500()}


def _launch_2500() -> str:
    """Launch a block of 50 × 50 threads; return what CUDA replies."""
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    try:
        kernel((1,), (50, 50), ())
    except cupy.cuda.driver.CUDADriverError as error:
        return f"refused: {error}"
    return "accepted"


@measurement("ladder", CPU)
def ladder_on_cpu(context: Context) -> Values:
    """Time a direct convolution and two products with the im2col matrix on one core."""
    rounds = ["--rounds", "2"] if context.quick else []
    command = [sys.executable, "-m", "benchmarks.ladder.cpu", "--json", *rounds, *NAMES.values()]
    # BLAS reads its number of threads when it is loaded.
    variables = {**os.environ, **dict.fromkeys(SINGLE_THREAD, "1")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise UserError((done.stderr or done.stdout).strip().splitlines()[-1])
    rows = json.loads(done.stdout)
    return {"layers": {name: {"forward": rows[known]} for name, known in NAMES.items()}}
