"""The cudnn backend on a GPU: engines are timed, cached and captured.

`test_operations` compares each layer; here engines are selected as in a run.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cudnn.engines import Engines
from dptrain.network import Network
from dptrain.plan import SGD
from tests.unit.backends.test_cuda_backend import (
    NETWORKS,
    PLAIN,
    assert_close,
    batch,
    rounding,
    step,
)

every_precision = pytest.mark.parametrize("precision", load_backend("cudnn").precisions)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cudnn-engines"


@every_precision
def test_engines_are_timed_once_and_reproduce_the_same_bits(
    precision: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_replica(PLAIN, "cudnn", 24, precision=precision)
    # Forward and weight gradient of both convolutions, input gradient of the second.
    assert len(list(cache.iterdir())) == len(first.notes) == 5
    for note in first.notes.values():
        assert re.fullmatch(r"engine \d+, \d+\.\d MB, (FP32|TF32|BF16)", note)
    monkeypatch.setattr(Engines, "_time_plans", None)
    second = make_replica(PLAIN, "cudnn", 24, precision=precision)
    assert second.notes == first.notes
    for number, n in enumerate((24, 7, 24)):
        assert step(first, n, number) == step(second, n, number)
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(second.parameters[name], value)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_steps_match_the_reference(network: Network) -> None:
    ours, reference = (
        make_replica(network, backend, 24, optimizer=SGD(0.9)) for backend in ("cudnn", "reference")
    )
    for number, n in enumerate((24, 7, 1, 24)):
        tolerance = (number + 1) * 2 * rounding(network, n)
        assert_close(step(ours, n, number), step(reference, n, number), tolerance)
        for name, value in reference.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


@every_precision
def test_a_captured_step_computes_the_same_gradients(precision: str) -> None:
    """The same bits if a step is enqueued directly, captured, and launched as a graph."""
    replica = make_replica(PLAIN, "cudnn", 24, precision=precision)
    x, y = batch(PLAIN, 24)
    replica.forward_backward(x, y)
    expected = {name: np.array(value) for name, value in replica.gradients.items()}
    run = replica.memory.program(replica.run)
    for _ in range(3):
        replica.load(x, y)
        run()
        for name, value in expected.items():
            np.testing.assert_array_equal(replica.gradients[name], value)
