"""What fits, by plan."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import dptrain
from dptrain.backends import BACKENDS, load_backend
from dptrain.describe import plan_for
from dptrain.errors import UserError
from dptrain.experiments.measuring import make_fitting
from dptrain.experiments.memory_budget import (
    MemoryBudget,
    batch_bytes,
    largest_batch,
    memory_budget,
)
from dptrain.network.random_batch import random_batch
from dptrain.plan.plan import Plan


def plans(batch_size: int, *, network: str, backend: str, training: bool) -> Plan:
    described = dptrain.get_network(network)
    return plan_for(described, backend=backend, batch_size=batch_size, training=training)


@pytest.mark.parametrize(
    ("network", "training"), [("model-small", True), ("mlp-50-25", False)], ids=str
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_batch_fits_and_the_next_does_not(
    network: str, backend: str, training: bool
) -> None:
    make = partial(plans, network=network, backend=backend, training=training)
    budget = MemoryBudget(3_000_000, None if load_backend(backend).free_bytes() is None else 10**9)
    found = largest_batch(make, budget)
    assert found.batch_size > 1
    assert found.needed_bytes == budget.needed_bytes(make(found.batch_size)) <= budget.nbytes
    assert found.next_bytes == budget.needed_bytes(make(found.batch_size + 1)) > budget.nbytes
    # Bisection found the border that there is: nothing larger fits.
    beyond = (2, 3, 5, 8, 13, 21, 34)
    assert not any(budget.fits(make(found.batch_size + more)) for more in beyond)


def test_not_even_one_sample() -> None:
    make = partial(plans, network="solar", backend="numba", training=True)
    found = largest_batch(make, MemoryBudget(10**6))
    assert found.batch_size == 0
    assert found.needed_bytes > 10**6


def test_the_index_range_of_kernels_limits_the_batch() -> None:
    make = partial(plans, network="solar", backend="cuda", training=True)
    found = largest_batch(make, MemoryBudget(10**13, 10**13))
    assert "elements" in found.why
    most = load_backend("cuda").max_elements
    assert most is not None
    # conv2+… keeps 46·46·64 arg-max numbers a sample at the most.
    sizes = [np.prod(b.shape) for name, b in make(found.batch_size).buffers.items()
             if name != "input.staged"]  # fmt: skip
    assert max(sizes) <= most
    with pytest.raises(UserError, match="use a smaller batch size"):
        make(found.batch_size + 1)


def test_answers_that_kernels_cannot_count_at_once_come_in_pieces() -> None:
    make = partial(plans, network="solar", backend="cuda", training=False)
    budget = MemoryBudget(10**13, 10**13)
    assert make_fitting(make, 10**6, budget).batch_size == largest_batch(make, budget).batch_size
    assert make_fitting(make, 100, budget).batch_size == 100
    assert make_fitting(make, 100, MemoryBudget(1, 10**9)).batch_size == 1


@pytest.mark.parametrize("network", ["model-small", "mlp-50"])
def test_batch_bytes_are_those_of_a_batch(network: str) -> None:
    make = partial(plans, network=network, backend="numba", training=True)
    x, y = random_batch(dptrain.get_network(network), 300)
    samples = np.arange(300, dtype=np.int64)
    assert batch_bytes(make(300)) == x.nbytes + y.nbytes + samples.nbytes


def test_room_is_the_host_s_or_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.experiments.memory_budget.free_memory", lambda: 1000)
    assert memory_budget(load_backend("numba")) == MemoryBudget(950)
    assert memory_budget(load_backend("numba"), 200) == MemoryBudget(200)
    assert memory_budget(load_backend("numba"), 2000) == MemoryBudget(950)
    assert memory_budget(load_backend("cuda"), 200) == MemoryBudget(200, 950)


def test_batches_for_a_device_lie_on_the_host() -> None:
    make = partial(plans, network="mlp-50-25", backend="cuda", training=True)
    found = largest_batch(make, MemoryBudget(10**9, 300_000))
    assert 3 * batch_bytes(make(found.batch_size)) <= 300_000
    assert 3 * batch_bytes(make(found.batch_size + 1)) > 300_000
    assert "host" in found.why
