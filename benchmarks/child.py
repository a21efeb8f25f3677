"""Measure in a separate process: memory, allocations, compile time.

    python -m benchmarks.child train-dptrain model0 32

prints one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

STEPS = 10
LEARNING_RATE = 1e-8
TIMEOUT_S = 300
ROOT = Path(__file__).resolve().parent.parent


def run_child(task: str, network: str, batch_size: int, **variables: str) -> dict[str, Any]:
    """Run a task of this module in a new process, with additional environment variables."""
    command = [sys.executable, "-m", "benchmarks.child", task, network, str(batch_size)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Huge pages make PyTorch faster but larger, so memory is compared without them.
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0", "PYTHONPATH": path, **variables}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compile_times(network: str, batch_size: int) -> tuple[float, float]:
    """Return the compile time of training in seconds, with an empty and with a full cache."""
    with tempfile.TemporaryDirectory() as folder:
        times = [
            run_child("compile", network, batch_size, DPTRAIN_CACHE_DIR=folder)["seconds"]
            for _ in range(2)
        ]
    return times[0], times[1]


def _compile(network: str, batch_size: int) -> dict[str, Any]:
    import dptrain
    from dptrain.training.evaluation.model import INFERENCE_BATCH

    start = time.perf_counter()
    built = dptrain.get_network(network)
    dptrain.make_replica(built, batch_size=batch_size, optimizer=dptrain.SGD(momentum=0.9))
    dptrain.make_replica(built, batch_size=INFERENCE_BATCH, training=False)
    return {"seconds": time.perf_counter() - start}


def _train_dptrain(network: str, batch_size: int) -> dict[str, Any]:
    """Measure peak memory, and the heap allocations of a steady step.

    Of Python and NumPy the largest amount held within a step; of numba the number of allocations,
    which it counts only if ``NUMBA_NRT_STATS`` is set.
    """
    from numba.core.runtime import rtsys

    import dptrain
    from benchmarks.batch import random_batch
    from dptrain.batch import Batch

    built = dptrain.get_network(network)
    x, y = random_batch(built, batch_size)
    batch = Batch.of(x, y)
    replica = dptrain.make_replica(built, batch_size=batch_size)

    def step() -> None:
        replica.load(batch)
        replica.run()
        replica.update(LEARNING_RATE)

    for _ in range(STEPS):
        step()
    memory = _peak_memory()
    before = rtsys.get_allocation_stats().alloc
    for _ in range(STEPS):
        step()
    allocations = (rtsys.get_allocation_stats().alloc - before) / STEPS
    tracemalloc.start()
    step()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    step()
    _, peak = tracemalloc.get_traced_memory()
    return {"memory": memory, "python_bytes": peak - held, "numba_allocations": allocations}


def _train_torch(network: str, batch_size: int) -> dict[str, Any]:
    import torch

    import dptrain
    from benchmarks.batch import random_batch
    from benchmarks.programs.torch_programs import MODES, torch_training

    torch.set_num_threads(1)
    built = dptrain.get_network(network)
    x, y = random_batch(built, batch_size)
    training = torch_training(built, x, y, MODES[0])
    for _ in range(STEPS):
        training.step(LEARNING_RATE)
    return {"torch_memory": _peak_memory()}


def _peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes.

    Not getrusage on Linux: its figure survives exec, and so starts at the size of the parent.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        # macOS reports bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


TASKS = {
    "compile": _compile,
    "train-dptrain": _train_dptrain,
    "train-torch": _train_torch,
}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))))
