"""What fits, by plan."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import dptrain
from dptrain.backends import BACKENDS, load_backend
from dptrain.describe import plan_for
from dptrain.errors import UserError
from dptrain.experiments.measuring import make_fitting, random_batch
from dptrain.experiments.room import Room, batch_bytes, largest_batch, room_of
from dptrain.plan.plan import Plan


def plans(batch_size: int, *, network: str, backend: str, training: bool) -> Plan:
    described = dptrain.get_network(network)
    return plan_for(described, backend=backend, batch_size=batch_size, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("network", ["model-small", "mlp-50-25"])
def test_the_largest_batch_fits_and_the_next_does_not(
    network: str, backend: str, training: bool
) -> None:
    make = partial(plans, network=network, backend=backend, training=training)
    room = Room(3_000_000, None if load_backend(backend).free_bytes() is None else 10**9)
    found = largest_batch(make, room)
    assert found.batch_size > 1
    assert found.need_bytes == room.need(make(found.batch_size)) <= room.nbytes
    assert found.next_bytes == room.need(make(found.batch_size + 1)) > room.nbytes
    # Bisection found the border that there is: nothing larger fits.
    beyond = range(found.batch_size + 1, found.batch_size + 40)
    assert not any(room.holds(make(n)) for n in beyond)


def test_not_even_one_sample() -> None:
    make = partial(plans, network="solar", backend="numba", training=True)
    found = largest_batch(make, Room(10**6))
    assert found.batch_size == 0
    assert found.need_bytes > 10**6


def test_elements_that_kernels_cannot_count_bound_a_batch() -> None:
    make = partial(plans, network="solar", backend="cuda", training=True)
    found = largest_batch(make, Room(10**13, 10**13))
    assert "elements" in found.why
    most = load_backend("cuda").max_elements
    assert most is not None
    # conv2+… keeps 46·46·64 arg-max numbers a sample at the most.
    sizes = [np.prod(b.shape) for name, b in make(found.batch_size).buffers.items()
             if name != "input.staged"]  # fmt: skip
    assert max(sizes) <= most
    with pytest.raises(UserError, match="try a smaller batch"):
        make(found.batch_size + 1)


def test_answers_that_kernels_cannot_count_at_once_come_in_pieces() -> None:
    make = partial(plans, network="solar", backend="cuda", training=False)
    room = Room(10**13, 10**13)
    assert make_fitting(make, 10**6, room).batch_size == largest_batch(make, room).batch_size
    assert make_fitting(make, 100, room).batch_size == 100
    assert make_fitting(make, 100, Room(1, 10**9)).batch_size == 1


@pytest.mark.parametrize("network", ["model-small", "mlp-50"])
def test_batch_bytes_are_those_of_a_batch(network: str) -> None:
    make = partial(plans, network=network, backend="numba", training=True)
    x, y = random_batch(dptrain.get_network(network), 300)
    samples = np.arange(300, dtype=np.int64)
    assert batch_bytes(make(300)) == x.nbytes + y.nbytes + samples.nbytes


def test_room_is_the_host_s_or_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.experiments.room.free_memory", lambda: 1000)
    assert room_of(load_backend("numba")) == Room(950)
    assert room_of(load_backend("numba"), 200) == Room(200)
    assert room_of(load_backend("numba"), 2000) == Room(950)
    assert room_of(load_backend("cuda"), 200) == Room(200, 950)


def test_batches_for_a_device_lie_on_the_host() -> None:
    make = partial(plans, network="mlp-50-25", backend="cuda", training=True)
    found = largest_batch(make, Room(10**9, 300_000))
    assert 3 * batch_bytes(make(found.batch_size)) <= 300_000
    assert 3 * batch_bytes(make(found.batch_size + 1)) > 300_000
    assert "host" in found.why
