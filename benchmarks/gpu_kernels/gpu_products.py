"""Compare matrix products of the `cuda` backend with cuDNN and cuBLAS, stage by stage.

    python3 -m benchmarks.gpu_kernels.gpu_products [--tiles] [--batch N ...] [--precision P ...]
        [network ...]

Requires a GPU, CuPy and PyTorch. Each stage of a layer with weights is launched many times in one
CUDA graph, and so is PyTorch's product of the same shapes (channels last, without the ReLU and
pooling that our stages include). With --tiles, every tile of the general kernels is tried on every
stage, without halo-tile, few-channel and skinny kernels, and the fastest three are listed.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import click
import numpy as np

from benchmarks.gpu_kernels.gpu_cases import Case, Times, takes_cases, timed
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution import algorithms, gather_convolution
from dptrain.backends.cuda.dense import algorithms as dense_algorithms
from dptrain.backends.cuda.dense import dense
from dptrain.backends.cuda.dense.gemm_tiles import (
    GemmConfig,
    GemmTile,
    SplitK,
    gemm_tiles,
    split_terms,
)
from dptrain.backends.cuda.device.device import Array, Device, Function
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS
from dptrain.backends.cuda.device.nvrtc import MAJORS, compile_cached, find_compiler
from dptrain.backends.replica import Kernel, Replica
from dptrain.network.layers import Conv2d, Dense
from dptrain.network.network import Node
from dptrain.plan import SGD
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import Group, Phase
from dptrain.plan.plan import Plan, make_plan

NETWORKS = ("model0", "model2", "model-large", "cifar", "solar")
PHASES = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
MAX_LAUNCHES, MIN_LAUNCHES, GRAPH_SAMPLES = 20, 4, 2560
"""Launches in a graph: within these bounds so many that they compute about `GRAPH_SAMPLES`."""
REPEATS = 7
"""Number of timed graph launches of PyTorch."""
ARCHITECTURE = 90


Unit = tuple[str, tuple[tuple[str, int | str], ...]]
"""A source and the macros that it is compiled with."""


class Planned(Device):
    """A device that records which kernels are compiled and computes nothing."""

    asynchronous = False

    def __init__(self) -> None:
        self.units: set[Unit] = set()

    @property
    def free_bytes(self) -> int:
        return 1 << 40

    def zeros(self, shape: Any, dtype: Any) -> Array:
        # Never accessed, so the system allocates no memory.
        return np.empty(shape, dtype)

    def upload(self, target: Array, source: Any) -> None:
        pass

    def download(self, source: Array, out: Any = None) -> Any:
        return np.empty(source.shape, source.dtype)

    def function(self, file: str, name: str, **defines: int | str) -> Function:
        self.units.add((file, tuple(sorted(defines.items()))))
        return lambda *_, **__: None

    def synchronize(self) -> None:
        pass


def compile_unit(unit: Unit) -> None:
    """Compile a source into the cache."""
    compile_cached(find_compiler(MAJORS), unit[0], ARCHITECTURE, dict(unit[1]))


def launches_of(batch_size: int) -> int:
    """Return the number of launches in a graph."""
    return min(max(GRAPH_SAMPLES // batch_size, MIN_LAUNCHES), MAX_LAUNCHES)


def candidates(plan: Plan, everything: bool) -> Sequence[GemmTile | None]:
    """Return the tiles to try; None stands for the selected one."""
    if not everything:
        return [None]
    few = plan.batch_size <= 256
    variants = [(2, 1, 16), (2, 2, 16), (2, 4, 16), (1, 4, 32)] if few else [
        (1, 1, 16), (2, 1, 16), (1, 1, 32),
    ]  # fmt: skip
    found: list[GemmTile | None] = [None]
    for tile in gemm_tiles(plan.precision, 0, DEFAULT_LIMITS):
        size = tile.rows * tile.columns
        if size > 64 * 64 if few else size < 64 * 32:
            continue
        found += [replace(tile, prefetch_steps=a, k_groups=g, k_words=w) for a, g, w in variants]
    return found


def products(plan: Plan) -> Iterator[Group]:
    """Yield the groups with weights."""
    yield from (g for g in plan.groups if isinstance(g.head.layer, Conv2d | Dense))


def with_tile(
    tile: GemmTile, precision: str, rows: int, columns: int, terms: int, limits: DeviceLimits, *,
    split: bool = False,
) -> list[tuple[float, GemmConfig]]:  # fmt: skip
    """Return what `rank_gemm_configs` returns if this is the only tile."""
    threads = tile.num_tiles(rows, columns) * tile.block[0]
    parts = split_terms(terms, threads, limits) if split else SplitK(1, max(terms, 1))
    return [(1.0, GemmConfig(tile, parts))]


def bound(replica: Any, group: Group, tile: GemmTile | None) -> Mapping[Phase, Kernel]:
    """Return the kernels of a group, optionally with a given tile."""
    backend, setting = replica.backend, replica.plan.setting
    if tile is None:
        arrays = replica._group_arrays(group)
        phases = backend.needs(group, setting).phases
        chosen: Mapping[Phase, Kernel] = backend.bind(group, phases, arrays, replica)
        return chosen
    with ExitStack() as stack:
        general = [row for row in dense_algorithms.DENSE if row.name == GemmTile.ALGORITHM]
        for target, name, value in (
            (algorithms, "CONVOLUTION", (algorithms.GATHER,)),
            (dense_algorithms, "DENSE", general),
            (gather_convolution, "rank_gemm_configs", partial(with_tile, tile)),
            (dense, "rank_gemm_configs", partial(with_tile, tile)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        arrays = dict(replica._group_arrays(group))
        for name in ("partial", "forward_partial"):
            arrays.pop(name, None)
            spec = backend.needs(group, setting).buffers.get(name)
            if spec is not None:
                arrays[name] = replica.device.zeros(spec.shape, spec.dtype)
        phases = backend.needs(group, setting).phases
        tried: Mapping[Phase, Kernel] = backend.bind(group, phases, arrays, replica)
        return tried


def compiled(plan: Plan, backend: CudaBackend) -> Replica:
    """Return a replica that has run a step on random data."""
    replica = backend.make_replica(plan, seed=0)
    if not isinstance(backend.device, Planned):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((plan.batch_size, *plan.network.input_shape), dtype=np.float32)
        outputs = plan.network.num_outputs
        classes = plan.network.loss.targets == "classes"
        shape = plan.batch_size, outputs
        y: Any = rng.integers(0, outputs, plan.batch_size) if classes else rng.random(shape)
        replica.forward_backward(x, y)
    return replica


def torch_timed(start: Callable[[], object], launches: int) -> float:
    """Return the median time in µs of one of many launches in a graph of PyTorch."""
    return statistics.median(torch_laps(start, launches))


def torch_laps(start: Callable[[], object], launches: int) -> list[float]:
    """Return times in µs of one of many launches in a graph of PyTorch, one for each replay."""
    torch: Any = importlib.import_module("torch")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            start()
    graph.replay()
    times: list[float] = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1000.0 * first.elapsed_time(last) / launches)
    return times


def torch_times(node: Node, n: int, precision: str) -> dict[Phase, float]:
    """Return the times of PyTorch's products of a layer in µs."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def timed(start: Callable[[], object]) -> float:
        return torch_timed(start, launches_of(n))

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    layer = node.layer
    if isinstance(layer, Dense):
        inputs = int(np.prod(node.input_shape))
        x, w, dy = random(n, inputs), random(layer.units, inputs), random(n, layer.units)
        b = random(layer.units)
        return {
            Phase.FORWARD: timed(lambda: torch.addmm(b, x, w.t())),
            Phase.BACKWARD_WEIGHT: timed(lambda: (dy.t() @ x, dy.sum(0))),
            Phase.BACKWARD_INPUT: timed(lambda: dy @ w),
        }
    assert isinstance(layer, Conv2d)
    last = torch.channels_last
    pads = [before for before, _ in layer.pads(node.input_shape)]
    x = random(n, *node.input_shape).to(memory_format=last)
    w = random(layer.filters, node.input_shape[0], *layer.window).to(memory_format=last)
    dy = random(n, *node.output_shape).to(memory_format=last)
    b = random(layer.filters) if layer.bias else None
    biases = [layer.filters] if layer.bias else None
    backward = torch.ops.aten.convolution_backward
    rest = list(layer.strides), pads, [1, 1], False, [0, 0], 1
    return {
        Phase.FORWARD: timed(lambda: torch.conv2d(x, w, b, layer.strides, pads)),
        Phase.BACKWARD_WEIGHT: timed(
            lambda: backward(dy, x, w, biases, *rest, [False, True, layer.bias])
        ),
        Phase.BACKWARD_INPUT: timed(
            lambda: backward(dy, x, w, biases, *rest, [True, False, False])
        ),
    }


def error(replica: Replica, exact: Replica) -> float:
    """Return the largest ‖g − g'‖ / ‖g'‖ over the gradients of all parameters."""
    return max(
        float(np.linalg.norm(replica.gradients[name] - value) / np.linalg.norm(value))
        for name, value in exact.gradients.items()
    )


def table(plan: Plan, backend: CudaBackend, everything: bool, theirs: bool) -> None:
    """Print the times of all stages of a plan."""
    replica: Any = compiled(plan, backend)
    stream, launches = replica.device.stream, launches_of(plan.batch_size)
    stages = {(stage.group, stage.phase): stage for stage in plan.stages}
    exact = make_plan(plan.network, backend, plan.batch_size, precision="fp32", optimizer=SGD())
    print(
        f"\n{plan.network.name}, batch {plan.batch_size}, {plan.precision}; gradients are "
        f"within {error(replica, compiled(exact, backend)):.1e} of those in fp32"
    )
    print(f"{'stage':<34}{'µs':>8}{'quartiles':>16}{'TFLOP/s':>8}{'GB/s':>6}{'PyTorch':>9}  tiles")
    total = best_total = their_total = 0.0
    for group in products(plan):
        explained = backend.explain(group, plan.setting)
        times: dict[Phase, list[tuple[float, str, Times]]] = {}
        for tile in candidates(plan, everything):
            for phase, kernel in bound(replica, group, tile).items():
                if phase in PHASES and (group.name, phase) in stages:
                    took = timed([partial(kernel, replica.context)], stream, launches)
                    times.setdefault(phase, []).append((took.median, str(tile), took))
        replica.device.synchronize()
        others = torch_times(group.head, plan.batch_size, plan.precision) if theirs else {}
        for phase, tried in times.items():
            stage, took = stages[group.name, phase], tried[0][2]
            best = sorted(tried[1:])
            other = others.get(phase, float("nan"))
            total, their_total = total + took.median, their_total + other
            best_total += best[0][0] if best else 0.0
            print(
                f"{group.head.name + ' ' + phase.value:<34}{took.median:>8.1f}{took.low:>8.1f}"
                f"{took.high:>8.1f}{stage.flops / took.median / 1e6:>8.1f}"
                f"{stage.bytes_moved / took.median / 1e3:>6.0f}{other:>9.1f}  "
                f"{explained[phase].algorithm} {explained[phase].tile}  "
                + "  ".join(f"{name} {t:.1f}" for t, name, _ in best[:3])
            )
    print(f"{'all':<34}{total:>8.1f}{'':>30}{their_total:>9.1f}  {best_total:.1f}", flush=True)


@click.command()
@click.option("--tiles", "everything", is_flag=True, help="Try every tile of the general kernels.")
@click.option("--theirs/--no-theirs", default=True, help="Also time PyTorch.")
@takes_cases(NETWORKS, batches=(32, 2048), precisions=("tf32", "bf16"))
def main(cases: Sequence[Case], everything: bool, theirs: bool) -> None:
    """Compare matrix products of the cuda backend with PyTorch, stage by stage."""
    planned = Planned()
    backend = CudaBackend(planned)
    plans = [
        make_plan(network, backend, n, precision=precision, optimizer=SGD())
        for network, n, precision in cases
    ]
    for plan in plans:
        exact = make_plan(plan.network, backend, plan.batch_size, precision="fp32", optimizer=SGD())
        compiled(exact, backend)
        replica = compiled(plan, backend)
        for group in products(plan):
            for tile in candidates(plan, everything):
                bound(replica, group, tile)
    print(f"{len(planned.units)} kernels to compile", flush=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_unit, sorted(planned.units), chunksize=4))

    from dptrain.backends.cuda.device.gpu import GPU

    backend = CudaBackend(GPU(0))
    for plan in plans:
        table(plan, backend, everything, theirs)


if __name__ == "__main__":
    sys.exit(main())
