"""A network whose convolutions and dense layers run on the AMX unit, emulated if there is none."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends.numba import algorithms, amx_matmul
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.plan.shards import MicroShards

pytestmark = pytest.mark.timeout(300)  # the first test compiles all kernels

SAMPLES, SHARDS = 12, 4


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "available", lambda: True)
    monkeypatch.setattr(amx_matmul, "available", lambda: True)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 12, 12, 16), np.float32)
    return x, rng.integers(0, 10, SAMPLES)


def network() -> Network:
    layers = [Conv2d(32, 5, padding=2), ReLU(), MaxPool2d(2), Conv2d(24, 7, padding=3), ReLU()]
    return Network((12, 12, 16), [*layers, Flatten(), Dense(64), ReLU(), Dense(10)])


def step(batch, threads, micro_shards, part=slice(None)):
    """Return the outputs and the gradients of a part of the batch."""
    x, y = (array[part] for array in batch)
    options = {"batch_size": len(x), "threads": threads, "micro_shards": micro_shards}
    replica = make_replica(network(), "numba", **options)
    outputs = np.array(replica.predict(x))
    replica.forward_backward(x, y, global_count=SAMPLES)
    return outputs, replica.gradient_slots.copy()


def rank_gradient(batch, threads, start, stop):
    """Return the gradient of micro-shards `start` to `stop`, which are one subtree."""
    own = MicroShards(SHARDS, start, stop)
    outputs, slots = step(batch, threads, own, own.span(SAMPLES))
    assert len(slots) == 1
    return outputs, slots[0]


def test_micro_shards_have_equal_bits_for_any_threads_and_ranks(batch):
    outputs, whole = rank_gradient(batch, 1, 0, SHARDS)
    for threads in (2, 5):
        again, gradient = rank_gradient(batch, threads, 0, SHARDS)
        np.testing.assert_array_equal(again, outputs)
        np.testing.assert_array_equal(gradient, whole)
    for ends in ((0, 2, 4), (0, 1, 2, 4)):
        parts = [rank_gradient(batch, 2, *ends[i : i + 2]) for i in range(len(ends) - 1)]
        np.testing.assert_array_equal(np.concatenate([y for y, _ in parts]), outputs)
        total = parts[0][1]
        for _, gradient in parts[1:]:
            total = total + gradient
        np.testing.assert_array_equal(total, whole)


def test_results_are_those_of_vectors_within_rounding(batch, monkeypatch):
    outputs, gradients = step(batch, 3, None)
    monkeypatch.setattr(algorithms, "available", lambda: False)
    monkeypatch.setattr(amx_matmul, "available", lambda: False)
    expected = step(batch, 3, None)
    assert not np.array_equal(outputs, expected[0])
    np.testing.assert_allclose(outputs, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients, expected[1], rtol=1e-3, atol=1e-5)
