"""Limits of the roofline model, measured: rate of matrix products and bandwidth by size of data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dptrain.backends.base import Backend
from dptrain.backends.memory import Memory
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.machine import available_memory
from dptrain.measure.machine.blas import product_rate
from dptrain.measure.profile.profile import Roofs
from dptrain.measure.profile.rooflines import disagreement, highest_roofs
from dptrain.native.bandwidth import bandwidths
from dptrain.native.caches import cache_bytes
from dptrain.network.layers import Dense
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, make_plan

HOST_MATRICES, GPU_MATRIX = (256, 1024), 8192
"""Rows and columns of the matrices. On a CPU, one thread is fastest on small ones and many threads
on large ones."""

PRODUCTS_S, MIN_PRODUCTS = 0.03, 5
"""Time of the products of a size in each phase, and their smallest number, on a CPU."""

ROUNDS = 3
"""Number of measurements of the limits."""

LEAST_SIZE, LARGEST_SIZE = 1 << 13, 1 << 26
"""Bytes of a thread in its first cache, and of all threads in memory, unless caches are larger."""
GPU_COPIES = (1 << 20, 1 << 24, 1 << 28, 1 << 31)
"""Sizes of source and target together in bytes, from a cache to far more."""

CACHES = 4
"""The largest data of all ranks of a node together are as many times as large as its last cache."""


def measure_roofs(backend: Backend, plan: Plan, memory: Memory, ranks: int = 1) -> Roofs:
    """Measure the limits in about two seconds, with the threads and the precision of `plan`.

    The matrix product is that of cuBLAS on a GPU. On a CPU it is the faster one of two: the fastest
    phase of a dense layer with a square weight matrix on the backend, and the product of OpenBLAS
    with as many threads. The bandwidth is measured for data of several sizes, so that a stage whose
    data fit into a cache is compared with the bandwidth of that cache.

    A limit is the highest of `ROUNDS` measurements. If the second highest peak is lower by more
    than 5%, `Roofs.withheld` states it.

    Args:
        backend, plan, memory: of the job.
        ranks: number of ranks of this node that measure at the same time.
    """
    found = [_measure_once(backend, plan, memory, ranks) for _ in range(ROUNDS)]
    return replace(highest_roofs(found), withheld=disagreement(found))


def _measure_once(backend: Backend, plan: Plan, memory: Memory, ranks: int) -> Roofs:
    threads = plan.setting.threads
    if memory.on_gpu:
        sizes: Sequence[int] = GPU_COPIES
        copies = tuple((size, _copy_rate(memory, size)) for size in sizes)
        what = "copy"
    else:
        sizes = _host_sizes(threads, ranks)
        copies = bandwidths(sizes, threads)
        what = "the fastest of reading, copying and adding"
    theirs = memory.product_ms(GPU_MATRIX, plan.precision)
    if theirs is None:
        products = _host_products(backend, plan)
        size = f"the fastest of {' and '.join(map(str, HOST_MATRICES))} rows"
    else:
        products = (("cuBLAS", 2 * GPU_MATRIX**3 / min(theirs) / 1e6),)
        size = f"{GPU_MATRIX} rows"
    rates = " and ".join(f"{name} {rate:,.1f} GFLOP/s" for name, rate in products)
    how = (
        f"product of square matrices, {plan.precision}, {size}: {rates}; {what}: "
        f"{sizes[-1] / 2**20:g} MiB, read and written"
    )
    return Roofs(max(rate for _, rate in products), copies[-1][1], how, copies, products)


def _host_sizes(threads: int, ranks: int) -> tuple[int, ...]:
    """Return sizes of data; the largest exceeds this rank's share of the last cache."""
    beyond = min(CACHES * cache_bytes(3) // ranks, available_memory() // (8 * ranks))
    least, largest = LEAST_SIZE * threads, max(beyond, LARGEST_SIZE)
    doublings = range(max((largest // least).bit_length() - 1, 0))
    return *(least << power for power in doublings), largest


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


def _copy_rate(memory: Memory, nbytes: int) -> float:
    """Return the bandwidth in GB/s, read and written, of copies of `nbytes` bytes."""
    source, target = (memory.zeros((nbytes // 2,), "uint8") for _ in range(2))

    def copy() -> None:
        memory.copy(target, source)

    copy()
    return nbytes / min(memory.times_ms(copy)) / 1e6
