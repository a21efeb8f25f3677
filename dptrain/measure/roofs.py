"""Limits of the roofline model, measured: rate of matrix products and bandwidth of copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dptrain.backends.base import Backend
from dptrain.backends.memory import Memory
from dptrain.backends.replica import Replica
from dptrain.measure.profile import Roofs
from dptrain.network.layers import Dense
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, make_plan

HOST_MATRIX, GPU_MATRIX = 1024, 8192
"""Rows and columns of the matrices; larger ones were not faster."""

HOST_COPIES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
GPU_COPIES = (1 << 20, 1 << 24, 1 << 28, 1 << 31)
"""Sizes of source and target together in bytes, from a cache to far more."""


def measure_roofs(backend: Backend, plan: Plan, memory: Memory) -> Roofs:
    """Measure the limits in about a second, with the threads and the precision of `plan`.

    The matrix product is that of cuBLAS on a GPU, else the fastest phase of a dense layer with a
    square weight matrix on the backend. Copies have several sizes, so that a stage whose data fit
    into a cache is compared with the bandwidth of that cache.
    """
    sizes = GPU_COPIES if memory.on_gpu else HOST_COPIES
    matrix = GPU_MATRIX if memory.on_gpu else HOST_MATRIX
    copies = tuple((size, _copy_rate(memory, size, plan.setting.threads)) for size in sizes)
    theirs = memory.product_ms(matrix, plan.precision)
    if theirs is None:
        rate = _product_rate(backend, plan, matrix)
        own = f"{backend.name} {plan.precision}"
        product = f"dense {matrix}×{matrix}, batch {matrix}, {own}, fastest phase"
    else:
        rate = 2 * matrix**3 / min(theirs) / 1e6
        product = f"{matrix}×{matrix} by {matrix}×{matrix}, {plan.precision}, cuBLAS"
    how = f"product: {product}; copy: {sizes[-1] / 2**20:g} MiB, read and written"
    return Roofs(rate, copies[-1][1], how, copies)


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
            times = replica.memory.times_ms(lambda kernel=kernel: kernel(replica.context))  # type: ignore[misc]
            rates.append(stage.flops / min(times) / 1e6)
    return max(rates)


def _fill(replica: Replica, size: int) -> None:
    """Fill parameters and input with random numbers; on zeros, hardware is faster."""
    random = np.random.default_rng(0)
    parameters = random.standard_normal(replica.flat_parameters.shape, np.float32)
    replica.memory.upload(replica.flat_parameters, parameters * np.float32(size**-0.5))
    x = random.standard_normal((size, size), np.float32)
    replica.load(x, random.integers(0, size, size).astype(np.int32))


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
    return nbytes / float(np.median(memory.times_ms(start))) / 1e6
