"""Convolutions with groups on the emulator: every kernel, and tiles that fit every GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.api import make_replica
from dptrain.backends.cuda.convolution.bound_convolution import Case
from dptrain.backends.cuda.convolution.grouped import grouped_tiles
from dptrain.backends.cuda.device.hardware import DEVICES
from dptrain.network import Add, Conv2d, Flatten, Input, MeanSquaredError, Network
from dptrain.network.functional import Tensor
from dptrain.network.layers import Layer
from dptrain.plan.lowering import Group, Phase, Setting
from tests.unit.backends.cuda.test_cuda_backend import assert_close, batch, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS

PRODUCTS = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


def conv(filters: int, kernel: int | tuple[int, int] = 3, **options: object) -> Conv2d:
    return Conv2d(filters, kernel, rounding="floor", **options)  # type: ignore[arg-type]


NETWORKS: dict[str, list[Layer]] = {
    "direct sums": [
        conv(6, 2), conv(6, (3, 2), stride=(2, 1), padding=2, groups=3),
        conv(4, (2, 4), stride=(1, 3), padding="same", groups=2),
    ],
    "depthwise, odd channels": [
        conv(6, 2), conv(6, (3, 2), stride=(2, 1), padding=2, groups=6),
        conv(6, (2, 4), stride=(1, 3), padding="same", groups=6),
    ],
    "depthwise": [
        conv(24, 1), conv(24, groups=24, bias=False), conv(24, 5, stride=2, groups=24),
        conv(24, (2, 5), groups=24, padding=4, dilation=(3, 2)),
        conv(24, 3, stride=2, groups=24, dilation=2),
    ],
    "joined groups": [conv(64, 1), conv(64, groups=16), conv(64, groups=8, stride=2, bias=False)],
    "more filters": [conv(48, 1), conv(96, (3, 2), stride=(2, 1), padding=2, groups=2)],
    "wide groups": [conv(64, 1), conv(64, 5, groups=2, stride=(1, 3), padding="valid")],
    "a prime number of groups": [
        conv(104, 1), conv(104, groups=13, bias=False), conv(52, stride=2, groups=13),
    ],
    "dilated": [
        conv(32, 1), conv(32, groups=4, dilation=2),
        conv(32, (2, 4), groups=4, dilation=(1, 3), stride=2, padding="full"),
    ],
    "uneven steps": [conv(48, 1), conv(48, (2, 5), groups=2, stride=3, padding=4), conv(48, 1)],
}  # fmt: skip
QUICK = {
    ("joined groups", "fp32"),
    ("more filters", "bf16"),
    ("depthwise", "bf16"),
    ("a prime number of groups", "bf16"),
}
CASES = [
    pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.more)
    for name in NETWORKS
    for precision in ("fp32", *ROUNDOFFS)
]


def compare(network: Network, precision: str, n: int = 2) -> None:
    """Compare a step of the emulator with the reference."""
    ours = make_replica(network, "cuda", n, precision=precision)
    reference = make_replica(network, "reference", n)
    for name in ours.parameters:
        reference.parameters[name] = ours.parameters[name]
    x, y = batch(network, n)
    losses = [replica.forward_backward(x, y) for replica in (ours, reference)]
    tolerance = rounding(network, n) + 8 * ROUNDOFFS.get(precision, 0.0)
    assert_close(*losses, tolerance)
    for name, gradient in reference.gradients.items():
        assert_close(ours.gradients[name], gradient, tolerance, name)
        assert np.abs(gradient).max() > 0.0


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_groups_equal_the_reference(name: str, precision: str) -> None:
    """The first convolution has no groups: it receives the gradient of the inputs."""
    compare(Network((3, 9, 11), [*NETWORKS[name], Flatten()], MeanSquaredError()), precision)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("tf32", marks=pytest.mark.more)])
def test_tiles_consist_of_several_samples(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of five samples is not full; strides of the input gradient are uneven."""

    def choose(case: Case) -> grouped_tiles.GroupedTile:
        found = grouped_tiles.tiles_of(grouped_tiles.GroupedShape.of(case), case.phase)
        return min(found, key=lambda tile: (-min(tile.samples, 4), tile.cost))

    monkeypatch.setattr(grouped_tiles, "choose", choose)
    layers = [conv(48, 1), conv(48, groups=3), conv(48, (2, 3), groups=6, stride=2, padding=1)]
    network = Network((3, 5, 5), [*layers, Flatten()], MeanSquaredError())
    compare(network, precision, 5)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.more)])
def test_input_gradients_are_added(precision: str) -> None:
    """Each of the three convolutions adds to the gradient of the tensor that all read."""
    x = Conv2d(16, 1)(Input((3, 6, 7)))
    branches: list[Tensor] = [Conv2d(16, groups=groups)(x) for groups in (2, 16)]
    y = Flatten()(Add(3)(x, *branches))
    network = Network.from_output(y, loss=MeanSquaredError())
    groups = make_replica(network, "cuda", 2, precision=precision).plan.groups
    assert [set(group.adds) for group in groups if group.adds] == [{"dx"}, {"dx"}]
    compare(network, precision)


sizes = st.integers(1, 9)


@given(
    device=st.sampled_from(sorted(name for name, d in DEVICES.items() if d.capability >= 80)),
    precision=st.sampled_from(["fp32", "tf32", "bf16"]), groups=st.integers(2, 40),
    channels=st.integers(1, 232), filters=st.integers(1, 232), window=st.tuples(sizes, sizes),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), dilation=st.integers(1, 3),
    side=st.integers(9, 60), samples=st.integers(1, 300),
)  # fmt: skip
def test_selected_tiles_fit_the_gpu(
    device: str, precision: str, groups: int, channels: int, filters: int,
    window: tuple[int, int], stride: tuple[int, int], dilation: int, side: int, samples: int,
) -> None:  # fmt: skip
    layer = conv(groups * filters, window, stride=stride, groups=groups, dilation=dilation)
    network = Network((groups * channels, side, side), [layer, Flatten()], MeanSquaredError())
    limits = DEVICES[device]
    activations = "uint16" if precision == "bf16" else "float32"
    setting = Setting(samples, precision, "float32", activations, limits=limits)
    case = Case(Group(network.nodes[:1]), setting, Phase.FORWARD)
    if not grouped_tiles.supports(case):
        return
    for phase in PRODUCTS:
        tile = grouped_tiles.choose(Case(case.group, setting, phase))
        assert tile.shared_bytes <= limits.shared_bytes
        assert 1 <= tile.warps <= 16
        assert 1 <= tile.blocks(samples) <= tile.tiles(samples)
        # Units and parts of units cover all channels and filters.
        assert tile.grid_slabs * tile.units >= tile.shape.units
        assert tile.shape.units * tile.shape.unit_groups >= groups
