"""Limits of the roofline model, measured: rate of matrix products and bandwidth of copies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dptrain.backends.base import Backend
from dptrain.backends.memory import Memory
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.machine import available_memory
from dptrain.measure.machine.blas import product_rate
from dptrain.measure.profile.profile import Roofs
from dptrain.native.caches import cache_bytes
from dptrain.network.layers import Dense
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, make_plan

HOST_MATRICES, GPU_MATRIX = (256, 1024), 8192
"""Rows and columns of the matrices. On a CPU, one thread is fastest on small ones and many threads
on large ones."""

PRODUCTS_S, MIN_PRODUCTS = 0.1, 5
"""Time of the products of a size in each phase, and their smallest number, on a CPU."""

HOST_COPIES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
GPU_COPIES = (1 << 20, 1 << 24, 1 << 28, 1 << 31)
"""Sizes of source and target together in bytes, from a cache to far more."""

CACHES = 4
"""The largest copies of all ranks of a node together are as many times as large as its last
cache."""


def measure_roofs(backend: Backend, plan: Plan, memory: Memory, ranks: int = 1) -> Roofs:
    """Measure the limits in about a second, with the threads and the precision of `plan`.

    The matrix product is that of cuBLAS on a GPU. On a CPU it is the faster one of two: the fastest
    phase of a dense layer with a square weight matrix on the backend, and the product of OpenBLAS
    with as many threads. Copies have several sizes, so that a stage whose data fit into a cache is
    compared with the bandwidth of that cache.

    Args:
        backend, plan, memory: of the job.
        ranks: number of ranks of this node that measure at the same time.
    """
    sizes = GPU_COPIES if memory.on_gpu else _host_copies(ranks)
    copies = tuple((size, _copy_rate(memory, size, plan.setting.threads)) for size in sizes)
    theirs = memory.product_ms(GPU_MATRIX, plan.precision)
    if theirs is None:
        products = _host_products(backend, plan)
        size = f"the fastest of {' and '.join(map(str, HOST_MATRICES))} rows"
    else:
        products = (("cuBLAS", 2 * GPU_MATRIX**3 / min(theirs) / 1e6),)
        size = f"{GPU_MATRIX} rows"
    rates = " and ".join(f"{name} {rate:,.1f} GFLOP/s" for name, rate in products)
    how = (
        f"product of square matrices, {plan.precision}, {size}: {rates}; copy: "
        f"{sizes[-1] / 2**20:g} MiB, read and written"
    )
    return Roofs(max(rate for _, rate in products), copies[-1][1], how, copies, products)


def highest_roofs(found: Sequence[Roofs]) -> Roofs:
    """Return limits that hold for every rank: the highest of those that the ranks measured."""
    copies = tuple(
        (size, max(other[i][1] for other in (roofs.copies for roofs in found)))
        for i, (size, _) in enumerate(found[0].copies)
    )
    highest = max(found, key=lambda roofs: roofs.gflops)
    bandwidth = max(roofs.gb_per_s for roofs in found)
    return Roofs(highest.gflops, bandwidth, highest.how, copies, highest.products)


def _host_copies(ranks: int) -> tuple[int, ...]:
    """Return the sizes of copies; the largest exceeds this rank's share of the last cache."""
    beyond = min(CACHES * cache_bytes(3) // ranks, available_memory() // (8 * ranks))
    return *HOST_COPIES, *(size for size in (beyond,) if size > HOST_COPIES[-1])


def _host_products(backend: Backend, plan: Plan) -> tuple[tuple[str, float], ...]:
    """Return the rates of products in GFLOP/s: of the backend, and of OpenBLAS if it is loaded."""
    threads = plan.setting.threads
    own = max(_product_rate(backend, plan, size) for size in HOST_MATRICES)
    dtype = np.float64 if plan.itemsize == 8 else np.float32
    theirs = [product_rate(size, dtype, threads) for size in HOST_MATRICES]
    known = [rate for rate in theirs if rate is not None]
    return (backend.name, own), *((("OpenBLAS", max(known)),) if known else ())


def _product_rate(backend: Backend, plan: Plan, size: int) -> float:
    """Return the rate of the backend's fastest phase in GFLOP/s."""
    # The first layer has no input gradient, so the second one is timed.
    network = Network((size,), [Dense(size), Dense(size)], name="roof")
    own = make_plan(network, backend, size, precision=plan.precision, threads=plan.setting.threads)
    replica = backend.allocate(own, seed=0)
    _fill(replica, size)
    second = own.groups[-1].name
    phases = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)
    rates = []
    for stage, kernel in replica.stages:
        kernel(replica.context)
        if stage.group == second and stage.phase in phases:
            rates.append(stage.flops / _shortest_ns(lambda kernel=kernel: kernel(replica.context)))  # type: ignore[misc]
    return max(rates)


def _shortest_ns(start: Callable[[], None]) -> int:
    """Return the shortest time of several runs in ns: other programs interrupt some of them."""
    times: list[int] = []
    end = time.perf_counter() + PRODUCTS_S
    while len(times) < MIN_PRODUCTS or time.perf_counter() < end:
        begin = time.perf_counter_ns()
        start()
        times.append(time.perf_counter_ns() - begin)
    return min(times)


def _fill(replica: Replica, size: int) -> None:
    """Fill parameters and input with random numbers; on zeros, hardware is faster."""
    random = np.random.default_rng(0)
    with replica.parameters.write_flat() as flat:
        parameters = random.standard_normal(flat.shape, np.float32)
        replica.memory.upload(flat, parameters * np.float32(size**-0.5))
    x = random.standard_normal((size, size), np.float32)
    replica.load(Batch.of(x, random.integers(0, size, size).astype(np.int32)))


def _copy_rate(memory: Memory, nbytes: int, threads: int) -> float:
    """Return the bandwidth in GB/s, read and written, of copies of `nbytes` bytes."""
    source, target = (memory.zeros((nbytes // 2,), "uint8") for _ in range(2))
    if memory.on_gpu or threads == 1:
        return _rate(memory, nbytes, lambda: memory.copy(target, source))
    cuts = [nbytes // 2 * i // threads for i in range(threads + 1)]
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:

        def copy_in_parallel() -> None:
            # The list waits for all threads.
            list(pool.map(lambda piece: memory.copy(target[piece], source[piece]), pieces))

        # One thread is faster if starting the others takes longer than copying.
        alone = _rate(memory, nbytes, lambda: memory.copy(target, source))
        return max(alone, _rate(memory, nbytes, copy_in_parallel))


def _rate(memory: Memory, nbytes: int, start: Callable[[], None]) -> float:
    start()
    return nbytes / min(memory.times_ms(start)) / 1e6
