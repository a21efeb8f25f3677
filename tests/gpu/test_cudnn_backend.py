"""The cudnn backend on a GPU: engines are timed, cached and captured; poolings are cuDNN's.

`test_operations` compares each layer with PyTorch in float64; here engines are selected as in a
run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cudnn.engines import Engines
from dptrain.backends.cudnn.primitives import AVERAGE_POOLING, MAX_POOLING
from dptrain.backends.cudnn.replica import CudnnReplica, primitive_calls
from dptrain.backends.memory import as_numbers
from dptrain.backends.replica import Context
from dptrain.batch import Batch
from dptrain.network import Network
from dptrain.plan import SGD
from tests.unit.backends.cuda.test_cuda_backend import (
    NETWORKS,
    PLAIN,
    assert_close,
    batch,
    rounding,
    step,
)
from tests.unit.backends.cuda.test_cudnn_backend import POOLED

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
        make_replica(network, backend, 24, optimizer=SGD(momentum=0.9))
        for backend in ("cudnn", "reference")
    )
    for number, n in enumerate((24, 7, 1, 24)):
        tolerance = (number + 1) * 2 * rounding(network, n)
        assert_close(step(ours, n, number), step(reference, n, number), tolerance)
        for name, value in reference.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


def test_poolings_and_activations_are_supported_in_both_types() -> None:
    replica = make_replica(POOLED, "cudnn", 24)
    assert isinstance(replica, CudnnReplica)
    assert replica.engines.library.primitives.dtypes == ("float32", "uint16")


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
@pytest.mark.parametrize("mode", [MAX_POOLING, AVERAGE_POOLING])
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_poolings_match_float64(dtype: str, mode: int, window: tuple[int, int, int]) -> None:
    """Against PyTorch in float64, on distinct numbers that both types represent exactly."""
    replica = make_replica(POOLED, "cudnn", 24)
    assert isinstance(replica, CudnnReplica)
    device, calls = replica.device, primitive_calls(replica, "Pooling")
    size, stride, pad = window
    rng = np.random.default_rng(0)
    # 8-bit integers: distinct within a channel, up to 16 × 16 pixels.
    maps = np.stack([rng.permutation(256).reshape(16, 16) for _ in range(24)]) - 128.0
    x = torch.from_numpy(maps).reshape(3, 8, 16, 16).requires_grad_()
    pool = functional.max_pool2d(x, size, stride, pad) if mode == MAX_POOLING else (
        functional.avg_pool2d(x, size, stride, pad, count_include_pad=False)
    )  # fmt: skip
    dy = torch.from_numpy(rng.integers(-8, 8, pool.shape).astype(np.float64))
    pool.backward(dy)

    def on_device(tensor: torch.Tensor) -> Any:
        values = np.ascontiguousarray(tensor.detach().numpy().transpose(0, 2, 3, 1), np.float32)
        stored = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else values
        array = device.zeros(stored.shape, dtype)
        device.upload(array, stored)
        return array

    arrays = on_device(x), on_device(pool * 0), on_device(dy), on_device(x * 0)
    primitives, context = replica.engines.library.primitives, Context(seed=0, n=3)
    described = (primitives.pooling(mode, (size, size), (pad, pad), (stride, stride)),)
    calls.forward(described, arrays[0], arrays[1])(context)
    calls.backward(described, arrays[1], arrays[2], arrays[0], arrays[3])(context)
    assert x.grad is not None
    for array, exact in ((arrays[1], pool.detach()), (arrays[3], x.grad)):
        found = as_numbers(device.download(array)).astype(np.float64).transpose(0, 3, 1, 2)
        # Nine gradients of at most 8, each rounded once.
        rounding = 9 * 2.0**-8 if dtype == "uint16" else 9 * 2.0**-23
        np.testing.assert_allclose(found, exact.numpy(), rounding, 8 * rounding)


@every_precision
@pytest.mark.parametrize("network", [PLAIN, POOLED], ids=["plain", "pooled"])
def test_a_captured_step_computes_the_same_gradients(network: Network, precision: str) -> None:
    """The same bits if a step is enqueued directly, captured, and launched as a graph."""
    replica = make_replica(network, "cudnn", 24, precision=precision)
    x, y = batch(network, 24)
    replica.forward_backward(x, y)
    expected = {name: np.array(value) for name, value in replica.gradients.items()}
    run = replica.memory.program(replica.run)
    for _ in range(3):
        replica.load(Batch.of(x, y))
        run()
        for name, value in expected.items():
            np.testing.assert_array_equal(replica.gradients[name], value)
