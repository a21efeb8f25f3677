"""fp32 on tensor cores (3xTF32): errors, operands that are not finite, and the choice of kernels.

The emulator multiplies with the alignment and truncation of tensor cores (`runtime.cpp`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.backends.cuda.convolution.halo import halo_convolution
from dptrain.backends.cuda.convolution.halo.implicit_gemm_candidates import implicit_gemm_candidates
from dptrain.backends.cuda.convolution.halo.implicit_gemm_cost import (
    rank_implicit_gemm_tiles,
)
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.convolution.halo.wgrad_tiles import rank_wgrad_tiles
from dptrain.backends.cuda.dense import skinny_gemm
from dptrain.backends.cuda.dense.gemm_tiles import GemmTile, rank_gemm_configs
from dptrain.backends.cuda.device import hardware
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS, DEVICES
from dptrain.backends.replica import Replica
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, MeanSquaredError, Network, ReLU
from tests.tiers import tiered
from tests.unit.backends.cuda.gpu_algorithms import HALO, HALO_GRADIENT, WGMMA, best, exclude

MAPS = Network(
    (32, 5, 6), [Conv2d(32), ReLU(), MaxPool2d(2), Conv2d(32, 2, padding="same"), Flatten()],
    MeanSquaredError(), name="maps",
)  # fmt: skip

ALWAYS = 1e-9
"""`hardware.TF32X3_MARGIN` with which all supported products use 3xTF32."""

Results = dict[str, NDArray[Any]]


def replica_of(network: Network, n: int, margin: float, monkeypatch: pytest.MonkeyPatch) -> Replica:
    """Return a replica whose products use 3xTF32 (`ALWAYS`) or not (infinity)."""
    forget_selections()
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "TF32X3_MARGIN", margin)
        return make_replica(network, "cuda", n, precision="fp32")


every_algorithm = pytest.mark.parametrize("algorithm", ["gather", "mma.sync", "wgmma"])


def use(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute convolutions from gathered operands, or halo tiles by one of the instructions."""
    if algorithm == "gather":
        exclude(monkeypatch, HALO, HALO_GRADIENT, WGMMA)
    monkeypatch.setattr(hardware, "TF32X3_WGMMA", algorithm == "wgmma")


@pytest.fixture(autouse=True)
def selected_anew() -> Iterator[None]:
    """Forget the tiles that were selected with the values that tests change."""
    forget_selections()
    yield
    forget_selections()


def forget_selections() -> None:
    for rank in (rank_gemm_configs, rank_implicit_gemm_tiles, rank_wgrad_tiles):
        rank.cache_clear()


def results(replica: Replica, x: NDArray[Any], y: NDArray[Any]) -> Results:
    """Return the output and the gradients of a step."""
    replica.forward_backward(x, y)
    return {"output": replica.output(), **{k: replica.gradients[k] for k in replica.gradients}}


def batch(network: Network, n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, *network.input_shape), dtype=np.float32)
    return x, rng.standard_normal((n, network.num_outputs), dtype=np.float32)


@functools.cache
def exact() -> Results:
    """Return the results of `MAPS` in float64."""
    return results(make_replica(MAPS, "reference", 2, precision="fp64"), *batch(MAPS, 2))


def rms_errors(got: Results, expected: Results) -> dict[str, float]:
    return {
        name: float(np.sqrt(((got[name] - value) ** 2).mean() / (value**2).mean()))
        for name, value in expected.items()
    }


def chain(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return a @ b, each element as a chain of fused multiply-adds in float32."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        exact_product = a[:, k, None].astype(np.float64) * b[k].astype(np.float64)
        total = (total + exact_product).astype(np.float32)
    return total


@pytest.mark.more
@pytest.mark.parametrize(("kernels", "n"), [("general", 67), ("skinny", 35)])
def test_errors_are_below_those_of_a_chain_of_multiply_adds(
    kernels: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny_gemm, "MIN_WEIGHTS", 0 if kernels == "skinny" else math.inf)
    inputs, outputs = 300, 20
    network = Network((inputs,), [Dense(outputs)], MeanSquaredError())
    replica = replica_of(network, n, ALWAYS, monkeypatch)
    x, y = batch(network, n)
    got = results(replica, x, y)
    # Stored as (outputs, inputs).
    weights = replica.parameters["dense1.weight"].T
    assert weights.shape == (inputs, outputs)
    dz = 2 * (got["output"] - y) / np.float32(y.size)
    for ours, a, b in (
        (got["output"], x, weights), (got["dense1.weight"].T, x.T.copy(), dz)
    ):  # fmt: skip
        exact = a.astype(np.float64) @ b.astype(np.float64)
        error, plain = (
            float(np.sqrt(((found - exact) ** 2).mean())) for found in (ours, chain(a, b))
        )
        assert error < plain


@pytest.mark.more
@every_algorithm
def test_errors_of_convolutions_are_like_those_of_fused_multiply_adds(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.5: here, the kernels with fused multiply-adds split each sum into four."""
    use(algorithm, monkeypatch)
    ours, plain = (
        rms_errors(results(replica_of(MAPS, 2, margin, monkeypatch), *batch(MAPS, 2)), exact())
        for margin in (ALWAYS, math.inf)
    )
    assert max(ours.values()) < 1.5 * max(plain.values())
    assert max(ours.values()) < 3e-7


@pytest.mark.more
@every_algorithm
@pytest.mark.parametrize("value", [math.inf, math.nan, 3.4e38])
def test_operands_that_are_not_finite_have_the_results_of_float32(
    value: float, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.4e38 is finite but would overflow when it is rounded to TF32."""
    use(algorithm, monkeypatch)
    network = Network(MAPS.input_shape, [Conv2d(32), Flatten()], MeanSquaredError())
    x, y = batch(network, 2)
    x[1, 3, 2, 4] = value
    got = []
    for margin in (ALWAYS, math.inf):
        replica = replica_of(network, 2, margin, monkeypatch)
        weights = replica.parameters["conv1.weight"]
        # Without low part, so that a product with the high part alone is exact.
        replica.parameters["conv1.weight"] = np.where(weights > 0, 0.25, -0.5).astype(np.float32)
        got.append(results(replica, x, y))
    ours, plain = got
    for name, expected in plain.items():
        np.testing.assert_array_equal(np.isnan(ours[name]), np.isnan(expected), name)
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(ours[name][infinite], expected[infinite])
        finite = np.isfinite(expected)
        scale = float(np.abs(expected[finite]).max(initial=0.0))
        np.testing.assert_allclose(
            ours[name][finite], expected[finite], rtol=1e-4, atol=1e-4 + 1e-6 * scale
        )
    assert not np.isfinite(plain["output"]).all() or value == 3.4e38


@pytest.mark.more
@pytest.mark.parametrize("value", [math.inf, math.nan, 3.4e38])
def test_skinny_products_that_are_not_finite_are_those_of_float32(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network((200,), [Dense(33)], MeanSquaredError())
    x, y = batch(network, 3)
    x[1, 7] = value
    got = []
    for fewest in (0, math.inf):
        monkeypatch.setattr(skinny_gemm, "MIN_WEIGHTS", fewest)
        replica = replica_of(network, 3, ALWAYS if not fewest else math.inf, monkeypatch)
        weights = replica.parameters["dense1.weight"]
        replica.parameters["dense1.weight"] = np.where(weights > 0, 0.25, -0.5).astype(np.float32)
        got.append(results(replica, x, y))
    ours, plain = got
    for name, expected in plain.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)
    assert not np.isfinite(plain["output"]).all() or value == 3.4e38


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    tiered(
        itertools.product(
            ["mma.sync", "wgmma"],
            [(1, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 2), (3, 1, 1, 1), (1, 2, 1, 4)],
        ),
        [("mma.sync", (2, 2, 1, 1)), ("wgmma", (1, 1, 2, 2))],
    ),
    ids=str,
)
def test_every_tile_configuration_computes_the_same(
    wanted: tuple[int, ...], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(algorithm, monkeypatch)

    @functools.cache
    def rank(*args: Any, **known: Any) -> tuple[tuple[float, ImplicitGemmTile]]:
        view, precision, _, limits = args
        tile = min(
            implicit_gemm_candidates(view, precision, limits, **known),
            key=lambda tile: [
                abs(a - b) for a, b in zip(
                    (tile.pixel_tiles, tile.warp_groups, tile.k_warp_groups, tile.channel_chunks),
                    wanted, strict=True,
                )
            ],
        )  # fmt: skip
        return ((1.0, tile),)

    monkeypatch.setattr(halo_convolution, "rank_implicit_gemm_tiles", rank)
    replica = replica_of(MAPS, 2, ALWAYS, monkeypatch)
    assert any(name.endswith("packed_back") for name in replica.plan.buffers)
    errors = rms_errors(results(replica, *batch(MAPS, 2)), exact())
    assert max(errors.values()) < 1e-6


def tiles_of(limits: Any, margin: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[GemmTile]:
    monkeypatch.setattr(hardware, "TF32X3_MARGIN", margin)
    forget_selections()
    for rows, columns, terms in ((4096, 64, 576), (256, 256, 2304), (2048, 512, 32)):
        tile = best(rank_gemm_configs("fp32", rows, columns, terms, limits)).tile
        assert isinstance(tile, GemmTile)
        yield tile


def test_only_gpus_with_fast_tf32_and_long_sums_use_tensor_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, limits in DEVICES.items():
        found = [tile.tf32x3 for tile in tiles_of(limits, ALWAYS, monkeypatch)]
        fast = name in {"A100", "H100", "H200"}
        assert found == [fast, fast, False], name
    assert not any(tile.tf32x3 for tile in tiles_of(DEFAULT_LIMITS, math.inf, monkeypatch))


def test_halo_tiles_of_float32_are_not_persistent() -> None:
    """They would need more registers, and TMA without conversion."""
    view = halo_convolution.InputView.forward(MAPS.nodes[0])
    tile = best(rank_implicit_gemm_tiles(view, "fp32", 4096, DEFAULT_LIMITS))
    assert tile is not None
    assert tile.tf32x3
    assert tile.defines["TF32X3"] == 1
    assert not tile.persistent
    assert tile.num_tensor_maps == 0
