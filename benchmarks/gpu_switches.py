"""Compare kernels that a constant switches on with the kernels that run without them.

    python3 -m benchmarks.gpu_switches [--batch N ...] [--precision P ...] [network ...]

Requires a GPU and CuPy. Each network runs with the switches of `SWITCHES` off and on: large dense
layers by TMA and wgmma, and the weight gradient of pooled first layers. Printed are the times of
the products and of a step, and up to `MAX_EXACT` samples the errors ‖g − g'‖ / ‖g'‖ of the output
and of the gradients against float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import click
import numpy as np

import dptrain.api
from benchmarks.batch import random_batch
from benchmarks.gpu_cases import Case, print_reports, takes_cases
from benchmarks.gpu_fp32 import results, stage_us, step_us
from dptrain.backends.cuda import few_channel_wgrad_tiles, wgmma_gemm_tiles
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.network.network import Network
from dptrain.plan import SGD
from dptrain.plan.plan import make_plan

SWITCHES: Sequence[tuple[ModuleType, str, float, float]] = (
    (wgmma_gemm_tiles, "MIN_PRODUCTS", math.inf, 0),
    (wgmma_gemm_tiles, "MIN_EXTENT", math.inf, 1),
    (few_channel_wgrad_tiles, "MIN_PIXELS", math.inf, 0),
)
"""Modules, their constants, and the values that switch kernels off and on."""

VARIANTS = ("off", "on")

MAX_EXACT = 100
"""Most samples for which results are compared with float64, which NumPy computes on the host."""


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Switch all kernels off or on."""
    with ExitStack() as stack:
        for module, constant, *values in SWITCHES:
            stack.enter_context(mock.patch.object(module, constant, values[VARIANTS.index(name)]))
        yield


def errors(found: dict[str, dict[str, Any]], exact: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each result with its error by variant."""
    for what, value in exact.items():
        size = np.linalg.norm(value)
        row = "".join(f"{np.linalg.norm(found[v][what] - value) / size:>10.1e}" for v in VARIANTS)
        yield f"{'error of ' + what:<28}{row}"


def report(network: Network, n: int, precision: str, backend: CudaBackend) -> Iterator[str]:
    """Yield the lines of a case."""
    x, y = random_batch(network, n)
    found, steps, stages = {}, {}, {}
    for name in VARIANTS:
        with variant(name):
            plan = make_plan(network, backend, n, precision=precision, optimizer=SGD(0.9))
            replica = backend.make_replica(plan, seed=0)
            found[name] = results(replica, x, y)
            if backend.device.on_gpu:
                steps[name], stages[name] = step_us(replica, x, y), stage_us(replica, backend)
    title = f"{network.name}, batch {n}, {precision}: µs"
    yield f"\n{title:<28}" + "".join(f"{name:>10}" for name in VARIANTS)
    for key in dict.fromkeys(key for each in stages.values() for key in each):
        row = "".join(f"{stages[name].get(key, math.nan):>10.1f}" for name in VARIANTS)
        yield f"{key[0] + ' ' + key[1].value:<28}{row}"
    if steps:
        yield f"{'step':<28}" + "".join(f"{steps[name]:>10.1f}" for name in VARIANTS)
    if n <= MAX_EXACT:
        exact = dptrain.api.make_replica(network, "reference", n, precision="fp64")
        yield from errors(found, results(exact, x, y))


@click.command()
@takes_cases(("perceptron", "model0"), batches=(77, 512, 2048), precisions=("tf32", "bf16"))
def main(cases: Sequence[Case]) -> None:
    """Compare kernels that a constant switches on."""
    print_reports(report, cases)


if __name__ == "__main__":
    sys.exit(main())
