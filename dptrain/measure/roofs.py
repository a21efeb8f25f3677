"""What a rank's processor can do: multiply matrices, and copy memory, each measured in place."""

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
"""Rows and columns of the product; larger ones were no faster."""

HOST_COPIES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
GPU_COPIES = (1 << 20, 1 << 24, 1 << 28, 1 << 31)
"""Bytes of source and target together, from what a cache holds to far more."""


def measure_roofs(backend: Backend, plan: Plan, memory: Memory) -> Roofs:
    """Measure in about a second, with the threads and the arithmetic of `plan`.

    The product is that of the processor's maker (cuBLAS) where there is one, else the backend's own
    best code: a fully connected layer of a square matrix, the fastest of its phases. Copies are of
    several sizes, since a stage whose numbers fit into a cache is held to what that cache gives.
    """
    sizes = GPU_COPIES if memory.on_gpu else HOST_COPIES
    matrix = GPU_MATRIX if memory.on_gpu else HOST_MATRIX
    copies = tuple((size, _copy_rate(memory, size, plan.setting.threads)) for size in sizes)
    theirs = memory.product_ms(matrix, plan.precision)
    if theirs is None:
        rate = _product_rate(backend, plan, matrix)
        own = f"{backend.name} {plan.precision}"
        whose = f"dense {matrix}×{matrix}, batch {matrix}, by {own}, best of its phases"
    else:
        rate = 2 * matrix**3 / min(theirs) / 1e6
        whose = f"{matrix}×{matrix} by {matrix}×{matrix}, {plan.precision}, by cuBLAS"
    how = f"product: {whose}; copy: of {sizes[-1] / 2**20:g} MiB, read and written"
    return Roofs(rate, copies[-1][1], how, copies)


def _product_rate(backend: Backend, plan: Plan, size: int) -> float:
    """GFLOP/s."""
    # The gradient by the input is only computed for a layer that has another below it.
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
    """Random numbers everywhere: on zeros hardware saves power, and so wins speed."""
    random = np.random.default_rng(0)
    parameters = random.standard_normal(replica.flat_parameters.shape, np.float32)
    replica.memory.upload(replica.flat_parameters, parameters * np.float32(size**-0.5))
    x = random.standard_normal((size, size), np.float32)
    replica.load(x, random.integers(0, size, size).astype(np.int32))


def _copy_rate(memory: Memory, nbytes: int, threads: int) -> float:
    """GB/s, read and written, of copying between arrays of `nbytes` together."""
    source, target = (memory.zeros((nbytes // 2,), "uint8") for _ in range(2))
    if memory.on_gpu or threads == 1:
        return _rate(memory, nbytes, lambda: memory.copy(target, source))
    cuts = [nbytes // 2 * i // threads for i in range(threads + 1)]
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:

        def together() -> None:
            # Consumed, so that it waits.
            list(pool.map(lambda piece: memory.copy(target[piece], source[piece]), pieces))

        # Where handing out the pieces takes longer than copying, one thread does better.
        alone = _rate(memory, nbytes, lambda: memory.copy(target, source))
        return max(alone, _rate(memory, nbytes, together))


def _rate(memory: Memory, nbytes: int, start: Callable[[], None]) -> float:
    start()
    return nbytes / float(np.median(memory.times_ms(start))) / 1e6
