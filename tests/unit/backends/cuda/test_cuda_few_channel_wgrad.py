"""The weight gradient of pooled first layers on the emulator: odd sizes, strips, and padding."""

from __future__ import annotations

import itertools

import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda.convolution.few_channels import few_channel_wgrad_tiles
from dptrain.backends.cuda.convolution.few_channels.few_channel_wgrad_tiles import (
    select_few_channel_wgrad_tile,
)
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.device.hardware import DEVICES, ELEMENT_BYTES
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU, get_network
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda import test_cuda_backend as whole
from tests.unit.backends.cuda.test_cuda_backend import assert_close, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS

LAYERS = {
    "wide": ((3, 10, 14), Conv2d(16, padding=1)),
    "odd": ((1, 13, 20), Conv2d(32, (5, 3), padding="valid")),
    "two channels": ((2, 9, 12), Conv2d(16, 4, padding="same")),
}
"""Input shapes and layers."""


@pytest.fixture
def in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks and threads in random order, and report races."""
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)


@pytest.mark.usefixtures("in_random_order")
@pytest.mark.parametrize(
    ("precision", "name"),
    tiered(itertools.product(ELEMENT_BYTES, LAYERS), [("bf16", next(iter(LAYERS)))]),
)
def test_the_gradient_is_that_of_the_other_kernels(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several strips of a sample, and fewer samples than a batch."""
    monkeypatch.setattr(few_channel_wgrad_tiles, "MIN_PIXELS", 0)
    monkeypatch.setattr(few_channel_wgrad_tiles, "STRIP_WINDOWS", 20)
    shape, layer = LAYERS[name]
    network = Network(
        shape,
        [layer, ReLU(), MaxPool2d(2), Dropout(0.25), Flatten(), Dense(3)],
        name="pooled",
    )
    ours = make_replica(network, "cuda", 5, precision=precision)
    explained = ours.backend.explain(ours.plan.groups[0], ours.plan.setting).values()
    assert "few-channel weight gradient" in {each.algorithm for each in explained}
    monkeypatch.setattr(few_channel_wgrad_tiles, "MIN_PIXELS", 10**9)
    general = make_replica(network, "cuda", 5, precision=precision)
    # The other kernels multiply by the factor of dropout before they round.
    tolerance = rounding(network, 5) + 2 * ROUNDOFFS[precision]
    for samples in (5, 2):
        assert_close(whole.step(ours, samples, 0), whole.step(general, samples, 0), tolerance)
        for parameter, value in general.gradients.items():
            assert_close(ours.gradients[parameter], value, tolerance, parameter)


@pytest.mark.parametrize("precision", ELEMENT_BYTES)
@pytest.mark.parametrize("device", ["A100", "L40S", "H100"])
def test_tiles_of_the_benchmarks_fit(
    precision: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_channel_wgrad_tiles, "MIN_PIXELS", 0)
    view = InputView.forward(get_network("model0").nodes[0])
    tile = select_few_channel_wgrad_tile(view, precision, 2048, DEVICES[device])
    assert tile is not None
    assert tile.shared_bytes * tile.blocks_per_sm <= DEVICES[device].shared_bytes
