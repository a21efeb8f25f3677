"""Compare fp32 on tensor cores (3xTF32) with fused multiply-adds, stage by stage and by step.

    python3 -m benchmarks.gpu_kernels.gpu_fp32 [--batch N ...] [network ...]

Requires a GPU and CuPy. Each network runs with fused multiply-adds only (FMA), and with 3xTF32 as
selected, by ``mma.sync`` and, for convolutions, by ``wgmma``. Errors are ‖g − g'‖ / ‖g'‖ of outputs
and gradients of these variants and of PyTorch in float32, at the smallest batch size; g' is that of
PyTorch in float64.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
import numpy as np

from benchmarks.batch import random_batch
from benchmarks.gpu_kernels.gpu_cases import Case, takes_cases, timed
from benchmarks.gpu_kernels.gpu_products import PHASES, Planned, compile_unit, launches_of, products
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution.halo import implicit_gemm_cost, wgrad_tiles
from dptrain.backends.cuda.dense import gemm_tiles
from dptrain.backends.cuda.device import hardware
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network.network import Network
from dptrain.plan import SGD
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan

NETWORKS = ("model0", "cifar", "solar", "vgg")
VARIANTS = {"FMA": (math.inf, False), "mma.sync": (1.15, False), "wgmma": (1.15, True)}
"""`hardware.TF32X3_MARGIN` and `hardware.TF32X3_WGMMA` by variant."""

STEPS = 15
"""Timed steps, after five that are not timed."""


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Select kernels as the variant does."""
    before = hardware.TF32X3_MARGIN, hardware.TF32X3_WGMMA
    selections = (
        gemm_tiles.rank_gemm_configs, implicit_gemm_cost.rank_implicit_gemm_tiles,
        wgrad_tiles.rank_wgrad_tiles,
    )  # fmt: skip
    try:
        hardware.TF32X3_MARGIN, hardware.TF32X3_WGMMA = VARIANTS[name]
        for selection in selections:
            selection.cache_clear()
        yield
    finally:
        hardware.TF32X3_MARGIN, hardware.TF32X3_WGMMA = before
        for selection in selections:
            selection.cache_clear()


def make(network: Network, n: int, backend: CudaBackend) -> Replica:
    """Return a replica in fp32."""
    plan = make_plan(network, backend, n, precision="fp32", optimizer=SGD(momentum=0.9))
    return backend.make_replica(plan, seed=0)


def compile_all(cases: Sequence[tuple[Network, int]]) -> None:
    """Compile the kernels of all cases and variants in parallel."""
    planned = Planned()
    for network, n in cases:
        for name in VARIANTS:
            with variant(name):
                make(network, n, CudaBackend(planned))
    print(f"{len(planned.units)} kernels to compile", flush=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_unit, sorted(planned.units), chunksize=1))


def step_us(replica: Any, x: Any, y: Any) -> float:
    """Return the median time of a step in µs, from load to the completed update."""
    replica.load(Batch.of(x, y, step=0))
    times = []
    for _ in range(STEPS + 5):
        replica.memory.synchronize()
        begin = time.perf_counter()
        replica.run()
        replica.update(0.0)
        replica.memory.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[5:])


def stage_us(replica: Any, backend: CudaBackend) -> dict[tuple[str, Phase], float]:
    """Return the times of the products, and of separate backward stages, by layer and phase."""
    found = {}
    for group in products(replica.plan):
        phases = backend.needs(group, replica.plan.setting).phases
        arrays = replica._group_arrays(group)
        for phase, kernel in backend.bind(group, phases, arrays, replica).items():
            if phase in (*PHASES, Phase.BACKWARD):
                found[group.head.name, phase] = timed(
                    [partial(kernel, replica.context)],
                    replica.device.stream, launches_of(replica.plan.batch_size),
                ).median  # fmt: skip
    return found


def results(replica: Replica, x: Any, y: Any) -> dict[str, Any]:
    """Return the output and the gradients of a step."""
    replica.forward_backward(x, y)
    return {"output": replica.output(), **{k: replica.gradients[k] for k in replica.gradients}}


def report(network: Network, n: int, backend: CudaBackend, errors: bool) -> None:
    """Print the times of a case, and with `errors` the errors against float64."""
    x, y = random_batch(network, n)
    steps, stages, found = {}, {}, {}
    for name in VARIANTS:
        with variant(name):
            replica = make(network, n, backend)
            found[name] = results(replica, x, y)
            steps[name] = step_us(replica, x, y)
            stages[name] = stage_us(replica, backend)
    print(f"\n{network.name}, batch {n}: µs" + "".join(f"{name:>10}" for name in VARIANTS))
    for key in dict.fromkeys(key for each in stages.values() for key in each):
        row = "".join(f"{stages[name].get(key, math.nan):>10.1f}" for name in VARIANTS)
        print(f"{key[0] + ' ' + key[1].value:<28}{row}")
    row = "".join(f"{steps[name]:>10.1f}" for name in VARIANTS)
    print(f"{'step':<28}{row}   FMA / wgmma {steps['FMA'] / steps['wgmma']:.2f}", flush=True)
    if errors:
        parameters = make(network, n, backend).parameters
        report_errors(network, found, {name: parameters[name] for name in parameters}, x, y)


def report_errors(
    network: Network, found: dict[str, dict[str, Any]], parameters: dict[str, Any], x: Any, y: Any
) -> None:
    """Print the errors of each variant and of PyTorch in float32 against float64.

    Args:
        network: the network.
        found: output and gradients by variant.
        parameters: parameters that all variants started from.
        x, y: the batch.
    """
    import torch

    from benchmarks.check import compute

    torch.backends.cudnn.allow_tf32 = False
    in_float64 = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    exact = compute(network, in_float64, x.astype(np.float64), y, "cuda")
    found = {**found, "PyTorch": compute(network, parameters, x, y, "cuda")}
    print(f"{'errors':<28}" + "".join(f"{name:>10}" for name in found))
    for what in found["FMA"]:
        size = np.linalg.norm(exact[what])
        row = "".join(
            f"{np.linalg.norm(each[what] - exact[what]) / size:>10.1e}" for each in found.values()
        )
        print(f"{what:<28}{row}", flush=True)


@click.command()
@click.option("--errors/--no-errors", default=True, help="Compare with PyTorch.")
@takes_cases(NETWORKS, batches=(32, 256, 2048), precisions=("fp32",), choices=("fp32",))
def main(cases: Sequence[Case], errors: bool) -> None:
    """Compare 3xTF32 with fused multiply-adds."""
    pairs = [(network, n) for network, n, _ in cases]
    compile_all(pairs)

    from dptrain.backends.cuda.device.gpu import GPU

    backend = CudaBackend(GPU(0))
    for network, n in pairs:
        report(network, n, backend, errors and n == min(n for _, n in pairs))


if __name__ == "__main__":
    sys.exit(main())
