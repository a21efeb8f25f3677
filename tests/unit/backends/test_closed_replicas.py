"""A replica that is closed, or that nothing refers to, ends its threads and frees its memory."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.replica import Replica
from dptrain.errors import UserError
from dptrain.network import Dense, Network, ReLU
from dptrain.plan import SGD, make_plan
from tests.emulator.emulator import Emulator

NETWORK = Network((6,), [Dense(5), ReLU(), Dense(3)], name="small")
X, Y = np.ones((4, 6), np.float32), np.array([0, 1, 2, 0], np.int32)


def memory_of(array: np.ndarray) -> weakref.ref[Any]:
    """Return a reference to the object whose memory an array is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return weakref.ref(array)


def used_replica(backend: str) -> Replica:
    """Return a replica that has made a step, and has started its threads."""
    replica = make_replica(NETWORK, backend, 4, threads=3)
    replica.forward_backward(X, Y)
    replica.update(0.1)
    return replica


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "collected"])
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_memory_of_the_host_is_freed_and_threads_end(backend: str, closes: bool) -> None:
    before = set(threading.enumerate())
    replica = used_replica(backend)
    started = set(threading.enumerate()) - before
    arrays = replica._arrays.parameters, replica.flat_gradients, replica._arena
    memory = [memory_of(array) for array in arrays]
    del arrays
    if closes:
        replica.close()
    else:
        del replica
        gc.collect()
    assert [found() for found in memory] == [None] * 3
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "collected"])
def test_memory_of_a_device_is_freed(closes: bool) -> None:
    gc.collect()
    device = Emulator()
    backend, free = CudaBackend(device), device.free_bytes
    replica = backend.make_replica(make_plan(NETWORK, backend, 4, optimizer=SGD()))
    assert device.free_bytes < free
    if closes:
        replica.close()
    else:
        del replica
        gc.collect()
    assert device.free_bytes == free


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_a_closed_replica_says_so(backend: str) -> None:
    replica = used_replica(backend)
    replica.close()
    replica.close()
    assert repr(replica) == "<Replica, closed>"
    for use in (
        lambda: replica.predict(X), lambda: replica.forward_backward(X, Y),
        lambda: replica.update(0.1), lambda: replica.parameters, lambda: replica.memory_bytes,
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"this replica was closed.*make another one"):
            use()
