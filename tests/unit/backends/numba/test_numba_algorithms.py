"""The selection of the algorithms of a convolution, and their rounding errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends.numba.convolution import folded_rgb_convolution
from dptrain.backends.numba.convolution.algorithms import select_kernels
from dptrain.backends.numba.convolution.fused_pooling import NoPool
from dptrain.backends.numba.convolution.planning import Shape, Work
from dptrain.backends.numba.vector import AVX512
from dptrain.network import Conv2d, Dense, Flatten, Network
from dptrain.plan.lowering import Phase
from tests.unit.backends.numba import test_numba_convolution as vectors


def chosen(shape):
    """Names of the modules that compute forward, by the weights, by the input."""
    found = select_kernels(shape)
    modules = (found[phase].kernel.py_func.__module__.rpartition(".")[2] for phase in found)
    return [name.replace("_convolution", "") for name in modules]


IMAGES = Shape((32, 32, 3), (32, 32, 16), (3, 3), (1, 1), (1, 1), 2, halved=True)
WIDE = Shape((16, 16, 16), (16, 16, 32), (5, 5), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (WIDE, ["winograd"] * 3),
        (replace(WIDE, window=(4, 4), pads=(1, 1)), ["direct"] * 3),
        (replace(WIDE, window=(7, 7), pads=(3, 3)), ["direct"] * 3),
        (Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1)), ["winograd"] * 3),
        (Shape((48, 48, 32), (46, 46, 64), (3, 3), (1, 1), (0, 0), 2), ["winograd"] * 3),
        (Shape((10, 10, 32), (10, 10, 32), (3, 3), (1, 1), (1, 1)), ["winograd"] * 3),
        (Shape((24, 24, 3), (24, 24, 64), (5, 5), (1, 1), (2, 2), 3), ["direct"] * 3),
        (Shape((32, 32, 3), (32, 32, 16), (3, 3), (1, 1), (1, 1), 2), ["direct"] * 3),
        (IMAGES, ["winograd_rgb", "winograd_rgb", "direct"]),
        (replace(IMAGES, out=(32, 32, 24)), ["winograd_rgb", "winograd_rgb", "direct"]),
        (replace(IMAGES, maps=(2, 32, 3), out=(2, 32, 16)), ["direct"] * 3),
        (Shape((16, 16, 16), (8, 8, 32), (3, 3), (2, 2), (1, 1)), ["direct"] * 3),
        (
            Shape((14, 14, 512), (7, 7, 512), (3, 3), (2, 2), (1, 1)),
            ["gathered", "direct", "gathered"],
        ),
        (Shape((10, 10, 32), (8, 8, 32), (3, 3), (1, 1), (1, 1), dilations=(2, 2)), ["direct"] * 3),
        (replace(IMAGES, dilations=(2, 2), pads=(2, 2)), ["direct"] * 3),
        (Shape((16, 4, 16), (16, 4, 32), (5, 5), (1, 1), (2, 2)), ["winograd"] * 3),
        (Shape((16, 4, 16), (16, 4, 32), (7, 7), (1, 1), (3, 3)), ["direct"] * 3),
        (Shape((16, 16, 16), (22, 22, 32), (3, 3), (1, 1), (4, 4)), ["direct"] * 3),
    ],
    ids=str,
)
def test_each_shape_is_computed_by_what_was_measured_to_be_fastest(shape, expected):
    assert chosen(shape) == expected


def test_eight_filters_of_colour_images_are_folded(monkeypatch):
    monkeypatch.setattr(folded_rgb_convolution, "compiled_registers", lambda: AVX512)
    eight = replace(IMAGES, out=(32, 32, 8))
    assert chosen(eight) == ["folded_rgb", "folded_rgb", "direct"]


def test_scratch_is_as_long_as_the_geometry_states():
    found = select_kernels(Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1)))
    assert found[Phase.FORWARD].scratch == found[Phase.FORWARD].geometry.scratch_size


def test_few_tiles_are_computed_directly_unless_the_shape_alone_must_decide():
    shape = Shape((8, 8, 64), (8, 8, 64), (3, 3), (1, 1), (1, 1))
    for work, expected in (
        (Work(1, by_shape=False), "direct_convolution"),
        (Work(1), "winograd_convolution"),
        (Work(8, by_shape=False), "winograd_convolution"),
    ):
        found = select_kernels(shape, work).values()
        assert {each.kernel.py_func.__module__.rpartition(".")[2] for each in found} == {expected}


UNIT = 2.0**-24
"""Unit roundoff of float32."""


@pytest.mark.parametrize("after_relu", [True, False])
@pytest.mark.parametrize("winograd", [True, False])
@pytest.mark.parametrize(("channels", "size"), [(16, 16), (64, 16), (512, 8)])
def test_rms_errors_are_bounded(channels, size, winograd, after_relu):
    """RMS errors stay within √T u of the RMS result, and within 2.5 times that with Winograd.

    T is the number of channels (y, dx) or of output pixels (dw) of a sum. See numerics.md.
    """
    n, shape = 2, (size, size, channels)
    case = vectors.Case((n, shape, channels, (3, 3), (1, 1), ((1, 1), (1, 1))), positive=after_relu)
    found = select_kernels(Shape(shape, shape, (3, 3), (1, 1), (1, 1)), winograd=winograd)
    modules = {each.kernel.py_func.__module__.rpartition(".")[2] for each in found.values()}
    others = {"direct_convolution"} | ({"gathered_convolution"} if channels == 512 else set())
    assert modules == ({"winograd_convolution"} if winograd else others)
    y, dx, partial = np.empty_like(case.dy), np.empty_like(case.x), case.partial()[:1]
    for phase, algorithm in found.items():
        items = algorithm.units * (1 if phase is Phase.BACKWARD_WEIGHT else n)
        scratch, weights = np.zeros((1, algorithm.scratch), np.float32), case.w.reshape(-1)
        if algorithm.prepare is not None:
            weights = np.zeros(algorithm.shared, np.float32)
            algorithm.prepare(0, algorithm.prepare_items, 0, case.w, algorithm.geometry, weights)
        arrays = {
            Phase.FORWARD: (case.x, weights, case.b, y),
            Phase.BACKWARD_INPUT: (case.dy, weights, dx),
            Phase.BACKWARD_WEIGHT: (case.x, case.dy, partial, np.array([0, n])),
        }
        algorithm.kernel(
            0, items, 0, *arrays[phase], algorithm.geometry, NoPool(size, size, 0), scratch
        )
    dw = partial[0, : case.w.size].reshape(case.w.shape)
    results = {
        "y": (y, vectors.nhwc(case.ty), channels),
        "dx": (dx, vectors.nhwc(case.tx.grad), channels),
        "dw": (dw, case.tw.grad.numpy().transpose(2, 3, 1, 0), n * size * size),
    }
    for name, (actual, expected, terms) in results.items():
        error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
        assert error < (2.5 if winograd else 1) * np.sqrt(terms) * UNIT, (name, error / UNIT)


def test_a_replica_without_winograd():
    """The precision ``fp32-direct`` changes the algorithms of a network."""
    network = Network((16, 16, 16), [Conv2d(16, 3, padding=1), Flatten(), Dense(10)])
    outputs = []
    for precision in ("fp32", "fp32-direct"):
        replica = make_replica(network, "numba", batch_size=2, precision=precision)
        x = np.random.default_rng(1).standard_normal((2, 16, 16, 16), np.float32)
        outputs.append(np.array(replica.predict(x)))
    assert not np.array_equal(*outputs)
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("batch_size", "ranges"), [(1, 1), (32, 2)])
def test_a_launch_of_a_few_microseconds_has_one_range(batch_size, ranges):
    shape = Shape((16, 16, 16), (16, 16, 32), (3, 3), (1, 1), (1, 1))
    forward = select_kernels(shape, Work(batch_size, threads=2))[Phase.FORWARD]
    assert min(2, -(-batch_size * forward.units // forward.grain)) == ranges
