"""RegNet X and Y as torchvision defines them.

Source: Radosavovic et al., "Designing network design spaces", 2020, tables 8 and 9; Y has
squeeze-and-excitation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dptrain.network.activations import ReLU
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.layers import Shape
from dptrain.network.network import Network
from dptrain.network.zoo.blocks import classify, conv_norm, in_sequence, squeeze_excitation
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry


def _block(x: Tensor, width: int, stride: int, group_width: int, *, excites: bool) -> Tensor:
    """Return 1×1, grouped 3×3 and 1×1 convolutions of one width, and a shortcut."""
    projects = stride > 1 or x.shape[0] != width
    shortcut = x
    if projects:
        names = in_sequence("proj")
        shortcut = conv_norm(x, width, 1, stride, names=names, activation=None)
    with name_scope("f"):
        y = conv_norm(x, width, 1, names=in_sequence("a"))
        y = conv_norm(y, width, 3, stride, names=in_sequence("b"), groups=width // group_width)
        if excites:
            with name_scope("se"):
                y = squeeze_excitation(y, x.shape[0] // 4)
        y = conv_norm(y, width, 1, names=in_sequence("c"), activation=None)
    return ReLU()(shortcut + y)


def regnet(
    name: str,
    stages: Sequence[tuple[int, int]],
    group_width: int,
    excites: bool,
    input_shape: Shape,
    outputs: int,
) -> Network:
    """Return a RegNet.

    Args:
        name: of the network.
        stages: number of blocks and channels of each stage.
        group_width: channels of a group.
        excites: True for squeeze-and-excitation with a quarter of the channels of the block's
            input.
        input_shape: (C, H, W).
        outputs: number of classes.
    """
    y = conv_norm(Input(input_shape), 32, 3, 2, names=in_sequence("stem"))
    for stage, (count, width) in enumerate(stages, 1):
        for number in range(count):
            with name_scope(f"trunk_output.block{stage}.block{stage}-{number}"):
                y = _block(y, width, 1 if number else 2, group_width, excites=excites)
    return classify(y, outputs, name)


_RECIPE = replace(IMAGENET, epochs=100, schedule="cosine", step_at=None, weight_decay=5e-5)
"""Recipe of torchvision's references: published for minibatches of 1024 with the rate 0.8 after
five epochs of warm-up, and with half of it for `regnet_y_400mf`."""

_X = ((1, 32), (2, 64), (7, 160), (12, 400))
_Y = ((1, 48), (3, 104), (6, 208), (6, 440))

NETWORKS = {
    name: Entry(
        description,
        partial(regnet, name, *numbers),
        *IMAGENET_SIZE,
        replace(_RECIPE, learning_rate=learning_rate),
    )
    for name, description, numbers, learning_rate in (
        ("regnet-x-400mf", "3×224×224, grouped", (_X, 16, False), 0.2),
        ("regnet-y-400mf", "3×224×224, grouped, gates", (_Y, 8, True), 0.1),
    )
}
