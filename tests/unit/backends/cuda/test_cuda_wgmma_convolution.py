"""Convolutions by TMA and wgmma on the emulator, which multiplies with scalar instructions."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution.wgmma import wgmma_convolution_tiles
from dptrain.backends.cuda.convolution.wgmma.wgmma_convolution import PARTS
from dptrain.backends.cuda.convolution.wgmma.wgmma_convolution_tiles import (
    TILES,
)
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import WgmmaTile
from dptrain.backends.cuda.device.hardware import DEVICES
from dptrain.network import (
    Add,
    BatchNorm2d,
    Conv2d,
    Dense,
    Flatten,
    MaxPool2d,
    Network,
    NodeSpec,
    ReLU,
)
from dptrain.plan.plan import Plan
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda.gpu_algorithms import WGMMA, prefer
from tests.unit.backends.cuda.test_cuda_halo_convolution import assert_steps_as_gathered

H100 = DEVICES["H100"]

# A residual block with strides, whose input receives two gradients. Sizes are odd. Without ReLU, a
# value that is rounded in another way changes the gradients little.
BLOCK = Network.from_nodes(
    (64, 7, 6),
    [
        NodeSpec(Conv2d(64, 1, padding=0, bias=False)), NodeSpec(BatchNorm2d()),
        NodeSpec(Conv2d(64, bias=False), "middle"), NodeSpec(BatchNorm2d(), "start"),
        NodeSpec(Conv2d(128, stride=2, bias=False, rounding="floor"), "left", ("start",)),
        NodeSpec(BatchNorm2d(), "left_norm"),
        NodeSpec(
            Conv2d(128, 1, stride=2, padding=0, bias=False, rounding="floor"), "right", ("start",)
        ),
        NodeSpec(BatchNorm2d(), "right_norm"),
        NodeSpec(Add(), "sum", ("left_norm", "right_norm")),
        NodeSpec(Flatten()), NodeSpec(Dense(3)),
    ],
    name="block",
)  # fmt: skip

# A fused ReLU, a separate epilogue, asymmetric padding, and different strides.
PLAIN = Network(
    (64, 6, 9),
    [
        Conv2d(64, (2, 3), padding="same"), ReLU(), Conv2d(64, 3, stride=(1, 3), padding=0),
        ReLU(), MaxPool2d((2, 1)), Flatten(), Dense(3),
    ],
    name="plain",
)  # fmt: skip


# Normalisations with and without ReLU and addition, of which a convolution sums the gradients. The
# last convolution has strides.
RESIDUAL = Network.from_nodes(
    (32, 5, 6),
    [
        NodeSpec(Conv2d(32, 1, padding=0, bias=False)), NodeSpec(BatchNorm2d()),
        NodeSpec(ReLU(), "start"),
        NodeSpec(Conv2d(64, bias=False), "first"), NodeSpec(BatchNorm2d()), NodeSpec(ReLU()),
        NodeSpec(Conv2d(32, bias=False), "second"), NodeSpec(BatchNorm2d(), "end"),
        NodeSpec(Add(), "sum", ("end", "start")), NodeSpec(ReLU()),
        NodeSpec(Conv2d(32, stride=2, bias=False, rounding="floor"), "third"),
        NodeSpec(BatchNorm2d()),
        NodeSpec(Conv2d(32, 1, padding=0, bias=False), "fourth"), NodeSpec(BatchNorm2d()),
        NodeSpec(Flatten()), NodeSpec(Dense(3)),
    ],
    name="residual",
)  # fmt: skip


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for every layer that they support."""
    prefer(monkeypatch, WGMMA)


@pytest.fixture
def in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks and threads in random order, and report races."""
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)


def algorithms(plan: Plan) -> list[str]:
    """Return the algorithm of every stage of a convolution."""
    backend = load_backend("cuda")
    return [
        explanation.algorithm
        for group in plan.groups if isinstance(group.head.layer, Conv2d)
        for explanation in backend.explain(group, plan.setting).values()
    ]  # fmt: skip


def assert_results_of_tile(
    network: Network, precision: str, number: int, monkeypatch: pytest.MonkeyPatch, *,
    splits: bool = False, batch: int = 3, samples: tuple[int, ...] = (3, 2),
    roundoffs: float = 4.0,
) -> None:  # fmt: skip
    """Compare steps of one tile with the gathering kernels.

    Args:
        network, precision: the replica.
        number: of the tile.
        monkeypatch: selects the tile.
        splits: whether sums are divided into split-K parts.
        batch: samples for which the replica has memory.
        samples: of each step.
        roundoffs: see `assert_steps_as_gathered`.
    """
    monkeypatch.setattr(wgmma_convolution_tiles, "TILES", (TILES[number],))
    # Split-K seems to be free, or is not tried.
    monkeypatch.setattr(wgmma_convolution_tiles, "SECOND_PASS", -1e9 if splits else 0)
    monkeypatch.setattr(wgmma_convolution_tiles, "MAX_FEW_PARTS", 4 if splits else 1)
    ours = make_replica(network, "cuda", batch, precision=precision)
    assert algorithms(ours.plan).count(WgmmaTile.ALGORITHM) == (11 if network is BLOCK else 3)
    divided = {
        name for name in ours.plan.buffers
        if name.endswith(tuple(PARTS.values())) and not name.startswith("dense")
    }  # fmt: skip
    summed = {group.name for group in ours.plan.groups if group.sums}
    if network is BLOCK:
        # In bf16, products with 64 channels and one tap have a single step.
        steps = {"middle", "left"} if precision == "bf16" else {"conv1", "middle", "left", "right"}
        assert summed == {"conv1", "middle", "left", "right"} - (steps if splits else set())
        assert "middle.input_partial" in divided or not splits
    assert bool(divided) == splits
    assert_steps_as_gathered(ours, samples, roundoffs=roundoffs)


@pytest.mark.usefixtures("in_random_order")
@pytest.mark.parametrize(
    ("network", "precision", "number", "splits"),
    tiered(
        [
            (BLOCK, "bf16", 3, True), (BLOCK, "tf32", 4, False), (PLAIN, "bf16", 4, False),
            (PLAIN, "tf32", 2, True),
        ],
        [(PLAIN, "tf32", 2, True)],
    ),
    ids=["block-bf16", "block-tf32", "plain-bf16", "plain-tf32"],
)  # fmt: skip
def test_every_phase_computes_what_the_gathering_kernels_do(
    network: Network,
    precision: str,
    number: int,
    splits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several tiles, asymmetric padding, and a minibatch that is smaller than the memory."""
    assert_results_of_tile(network, precision, number, monkeypatch, splits=splits, samples=(2,))


@pytest.mark.more
def test_other_kernels_compute_classes_without_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps with one row have no odd rows, which a tensor map cannot describe."""
    layers = [
        Conv2d(32, 1, padding=0, bias=False),
        Conv2d(32, stride=2, bias=False, rounding="floor"), Flatten(), Dense(3),
    ]  # fmt: skip
    monkeypatch.setattr(wgmma_convolution_tiles, "TILES", (TILES[4],))
    replica = make_replica(Network((32, 1, 5), layers, name="row"), "cuda", 3, precision="tf32")
    assert algorithms(replica.plan).count(WgmmaTile.ALGORITHM) == 2
    assert_steps_as_gathered(replica, (3, 2))


@pytest.mark.more
def test_split_sums_receive_the_bias_of_a_folded_normalisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wgmma_convolution_tiles, "TILES", (TILES[4],))
    monkeypatch.setattr(wgmma_convolution_tiles, "SECOND_PASS", -1e9)
    trained = make_replica(BLOCK, "cuda", 2, precision="tf32")
    inference = make_replica(BLOCK, "cuda", 2, precision="tf32", training=False)
    assert any(name.endswith(".forward_partial") for name in inference.plan.buffers)
    x = np.random.default_rng(5).standard_normal((2, *BLOCK.input_shape), np.float32) + 2.0
    y = np.array([0, 2])
    trained.forward_backward(x, y)
    for name, value in trained.parameters.items():
        inference.parameters[name] = value
    for name, value in trained.statistics.items():
        inference.statistics[name] = value
    expected, _ = trained.evaluate(x, y)
    assert inference.evaluate(x, y)[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.more
def test_recomputed_activations_have_the_same_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums that a convolution writes again are not read."""
    monkeypatch.setattr(wgmma_convolution_tiles, "MAX_FEW_PARTS", 1)
    blocks = [
        layers
        for i in range(3)
        for layers in (
            NodeSpec(Conv2d(32, 1, padding=0, bias=False)), NodeSpec(BatchNorm2d()),
            NodeSpec(ReLU(), f"start{i}"), NodeSpec(Conv2d(32, bias=False)),
            NodeSpec(BatchNorm2d(), f"end{i}"), NodeSpec(Add(), None, (f"end{i}", f"start{i}")),
        )
    ]  # fmt: skip
    specs = [*blocks, NodeSpec(Flatten()), NodeSpec(Dense(3))]
    network = Network.from_nodes((32, 4, 4), specs, name="blocks")
    results = []
    for recompute in (False, True):
        replica = make_replica(network, "cuda", 2, precision="tf32", recompute=recompute)
        assert sum(group.sums for group in replica.plan.groups) == 6
        assert sum(group.normalization is not None for group in replica.plan.groups) > 2
        assert recompute == any(name.endswith(".sums") for name in replica.plan.recomputed)
        x = np.random.default_rng(5).standard_normal((2, 32, 4, 4), np.float32)
        loss = replica.forward_backward(x, np.array([0, 2]))
        results.append((loss, {name: np.array(g) for name, g in replica.gradients.items()}))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        np.testing.assert_array_equal(results[1][1][name], gradient, name)


@pytest.mark.more
@pytest.mark.usefixtures("in_random_order")
@pytest.mark.parametrize(
    "number",
    tiered(range(len(TILES)), [min(n for n, tile in enumerate(TILES) if "128x64" in str(tile))]),
    ids=[str(tile) for tile in TILES],
)
def test_gradients_are_summed_where_they_are_computed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_gradients_are_summed(number, monkeypatch, samples=(2,))


def assert_gradients_are_summed(
    number: int, monkeypatch: pytest.MonkeyPatch, *, samples: tuple[int, ...] = (3, 2)
) -> None:
    """Compare with sums by kernels of their own.

    Args:
        number: of the tile.
        monkeypatch: selects the tile.
        samples: of each step. A replica has memory for three.
    """
    monkeypatch.setattr(wgmma_convolution_tiles, "TILES", (TILES[number],))
    monkeypatch.setattr(wgmma_convolution_tiles, "MAX_FEW_PARTS", 1)
    summing = make_replica(RESIDUAL, "cuda", 3, precision="tf32")
    found = {group.name: group.normalization for group in summing.plan.groups}
    normalized = {name: each.name for name, each in found.items() if each is not None}
    assert normalized == {
        "first": "batchnorm1+start", "second": "batchnorm2+relu2", "third": "end+sum+relu3",
        "fourth": "batchnorm4",
    }  # fmt: skip
    monkeypatch.setattr(CudaBackend, "sums_gradient", lambda *args: False)
    separate = make_replica(RESIDUAL, "cuda", 3, precision="tf32")
    assert not any(group.normalization for group in separate.plan.groups)
    x = np.random.default_rng(6).standard_normal((3, *RESIDUAL.input_shape), np.float32) + 1.0
    for count in samples:
        for replica in (summing, separate):
            replica.forward_backward(x[:count], np.arange(count))
        for name, gradient in separate.gradients.items():
            # Sums in another order can round a factor of tf32 differently, by 2^-11 at most.
            limit = 2e-3 * np.abs(gradient).max()
            np.testing.assert_allclose(summing.gradients[name], gradient, 0, limit, err_msg=name)
