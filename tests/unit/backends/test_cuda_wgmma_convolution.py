"""Convolutions by TMA and wgmma on the emulator, which multiplies with scalar instructions."""

from __future__ import annotations

import pytest

from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cuda import wgmma_convolution_tiles
from dptrain.backends.cuda.hardware import DEVICES
from dptrain.backends.cuda.wgmma_convolution_tiles import (
    TILES,
)
from dptrain.backends.cuda.wgmma_gemm_tiles import WgmmaTile
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
from tests.unit.backends.test_cuda_halo_convolution import assert_steps_as_gathered

H100 = DEVICES["H100"]

# A residual block with strides, whose input receives two gradients. Maps and strides are odd.
BLOCK = Network.from_nodes(
    (64, 7, 6),
    [
        NodeSpec(Conv2d(64, bias=False)), NodeSpec(BatchNorm2d()), NodeSpec(ReLU(), "start"),
        NodeSpec(Conv2d(128, stride=2, bias=False, rounding="floor"), "left", ("start",)),
        NodeSpec(BatchNorm2d(), "left_norm"),
        NodeSpec(
            Conv2d(128, 1, stride=2, padding=0, bias=False, rounding="floor"), "right", ("start",)
        ),
        NodeSpec(BatchNorm2d(), "right_norm"),
        NodeSpec(Add(), "sum", ("left_norm", "right_norm")), NodeSpec(ReLU()),
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


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for every layer that they support."""
    monkeypatch.setattr(wgmma_convolution_tiles, "MARGIN", 0.0)


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
    network: Network, precision: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare steps of one tile with the gathering kernels; the second one has fewer samples."""
    monkeypatch.setattr(wgmma_convolution_tiles, "TILES", (TILES[number],))
    ours = make_replica(network, "cuda", 3, precision=precision)
    used = algorithms(ours.plan).count(WgmmaTile.ALGORITHM)
    assert (
        used
        == {"block-bf16": 9, "block-tf32": 9, "plain-bf16": 3, "plain-tf32": 3}[
            f"{network.name}-{precision}"
        ]
    )
    summed = [group.name for group in ours.plan.groups if group.sums]
    assert len(summed) == (3 if network is BLOCK else 0)
    assert_steps_as_gathered(ours, (3, 2))


@pytest.mark.usefixtures("in_random_order")
@pytest.mark.parametrize(
    ("network", "precision", "number"),
    [(BLOCK, "bf16", 3), (BLOCK, "tf32", 4), (PLAIN, "bf16", 4), (PLAIN, "tf32", 2)],
    ids=["block-bf16", "block-tf32", "plain-bf16", "plain-tf32"],
)
def test_every_phase_computes_what_the_gathering_kernels_do(
    network: Network, precision: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles, and asymmetric padding."""
    assert_results_of_tile(network, precision, number, monkeypatch)
