"""GoogLeNet and Inception v3 as torchvision defines them, without their auxiliary classifiers.

Sources: Szegedy et al., "Going deeper with convolutions", 2015, table 1, with batch normalisations
and a 3×3 convolution instead of each 5×5 one, as in torchvision; Szegedy et al., "Rethinking the
Inception architecture for computer vision", 2016, table 1.

The auxiliary classifiers are left out: they read maps in the middle of a network in training, and
inference does not use them. Published weights expect pixels from −1 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from dptrain.network.combining import Concatenate
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initializers import Normal
from dptrain.network.layers import AveragePool2d, Layer, MaxPool2d, Shape
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.blocks import classify, conv_norm
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry

Step = Layer | tuple[Any, ...] | list[Any]
"""A pooling; name, filters, kernel, stride and padding of a convolution; or a list of branches,
each a list of steps, whose channels follow one another."""


def _apply(x: Tensor, steps: Sequence[Step], deviation: float) -> list[Tensor]:
    """Return what steps compute, one after another: tensors whose channels follow one another."""
    found = [x]
    for step in steps:
        x = _concatenate(found)
        if isinstance(step, list):
            found = [y for branch in step for y in _apply(x, branch, deviation)]
        elif isinstance(step, tuple):
            found = [_convolution(x, Normal(deviation), *step)]
        else:
            found = [step(x)]
    return found


def _concatenate(found: list[Tensor]) -> Tensor:
    return Concatenate()(found) if len(found) > 1 else found[0]


def _convolution(
    x: Tensor,
    init: Normal,
    name: str,
    filters: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: Any = "same",
) -> Tensor:
    names = tuple(f"{name}.{layer}" for layer in ("conv", "bn", "relu"))
    norm = partial(BatchNorm2d, epsilon=1e-3)
    return conv_norm(x, filters, kernel, stride, names=names, norm=norm, padding=padding, init=init)


def _pool3() -> Layer:
    return MaxPool2d(3, 2, rounding="ceil")


def _module(*filters: int) -> list[Step]:
    """Return a module of GoogLeNet with the numbers of a row of its table."""
    one, reduced3, three, reduced5, five, pooled = filters
    return [[
        [("branch1", one, 1)],
        [("branch2.0", reduced3, 1), ("branch2.1", three, 3)],
        [("branch3.0", reduced5, 1), ("branch3.1", five, 3)],
        [MaxPool2d(3, 1, padding=1), ("branch4.1", pooled, 1)],
    ]]  # fmt: skip


def _googlenet() -> dict[str, list[Step]]:
    """Return the steps by the scope of their names."""
    return {
        "": [
            ("conv1", 64, 7, 2, 3), _pool3(), ("conv2", 64, 1), ("conv3", 192, 3), _pool3(),
        ],
        "inception3a": _module(64, 96, 128, 16, 32, 32),
        "inception3b": [*_module(128, 128, 192, 32, 96, 64), _pool3()],
        "inception4a": _module(192, 96, 208, 16, 48, 64),
        "inception4b": _module(160, 112, 224, 24, 64, 64),
        "inception4c": _module(128, 128, 256, 24, 64, 64),
        "inception4d": _module(112, 144, 288, 32, 64, 64),
        "inception4e": [*_module(256, 160, 320, 32, 128, 128), MaxPool2d(2, 2, rounding="ceil")],
        "inception5a": _module(256, 160, 320, 32, 128, 128),
        "inception5b": _module(384, 192, 384, 48, 128, 128),
    }  # fmt: skip


def _mean(filters: int) -> list[Step]:
    """Return the branch of a module of Inception v3 with a pooling."""
    pool = AveragePool2d(3, 1, padding=1, count_padding=True)
    return [pool, ("branch_pool", filters, 1)]


def _module_a(pooled: int) -> list[Step]:
    """Return a module of figure 5: 3×3 convolutions in place of larger ones."""
    return [[
        [("branch1x1", 64, 1)],
        [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        _mean(pooled),
    ]]  # fmt: skip


def _module_c(inner: int) -> list[Step]:
    """Return a module of figure 6: 1×7 and 7×1 convolutions in turn."""
    row, column = (1, 7), (7, 1)
    return [[
        [("branch1x1", 192, 1)],
        [("branch7x7_1", inner, 1), ("branch7x7_2", inner, row), ("branch7x7_3", 192, column)],
        [
            ("branch7x7dbl_1", inner, 1), ("branch7x7dbl_2", inner, column),
            ("branch7x7dbl_3", inner, row), ("branch7x7dbl_4", inner, column),
            ("branch7x7dbl_5", 192, row),
        ],
        _mean(192),
    ]]  # fmt: skip


def _module_e() -> list[Step]:
    """Return a module of figure 7: 1×3 and 3×1 convolutions of the same input."""

    def split(first: str, second: str) -> list[Step]:
        return [[(first, 384, (1, 3))], [(second, 384, (3, 1))]]

    return [[
        [("branch1x1", 320, 1)],
        [("branch3x3_1", 384, 1), split("branch3x3_2a", "branch3x3_2b")],
        [
            ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3),
            split("branch3x3dbl_3a", "branch3x3dbl_3b"),
        ],
        _mean(192),
    ]]  # fmt: skip


def _inception_v3() -> dict[str, list[Step]]:
    """Return the steps by the scope of their names."""
    halved = (3, 2, "valid")
    return {
        "": [
            ("Conv2d_1a_3x3", 32, *halved), ("Conv2d_2a_3x3", 32, 3, 1, "valid"),
            ("Conv2d_2b_3x3", 64, 3), MaxPool2d(3, 2), ("Conv2d_3b_1x1", 80, 1),
            ("Conv2d_4a_3x3", 192, 3, 1, "valid"), MaxPool2d(3, 2),
        ],
        "Mixed_5b": _module_a(32),
        "Mixed_5c": _module_a(64),
        "Mixed_5d": _module_a(64),
        "Mixed_6a": [[
            [("branch3x3", 384, *halved)],
            [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3),
             ("branch3x3dbl_3", 96, *halved)],
            [MaxPool2d(3, 2)],
        ]],
        "Mixed_6b": _module_c(128),
        "Mixed_6c": _module_c(160),
        "Mixed_6d": _module_c(160),
        "Mixed_6e": _module_c(192),
        "Mixed_7a": [[
            [("branch3x3_1", 192, 1), ("branch3x3_2", 320, *halved)],
            [("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, (1, 7)),
             ("branch7x7x3_3", 192, (7, 1)), ("branch7x7x3_4", 192, *halved)],
            [MaxPool2d(3, 2)],
        ]],
        "Mixed_7b": _module_e(),
        "Mixed_7c": _module_e(),
    }  # fmt: skip


def inception(
    name: str,
    parts: dict[str, list[Step]],
    deviation: float,
    dropout: float,
    input_shape: Shape,
    outputs: int,
) -> Network:
    """Return a network of Inception modules.

    Args:
        name: of the network.
        parts: steps by the scope of their names.
        deviation: standard deviation of the initial weights.
        dropout: rate before the last layer.
        input_shape: (C, H, W).
        outputs: number of classes.
    """
    y = Input(input_shape)
    for scope, steps in parts.items():
        with name_scope(scope) if scope else nullcontext():
            y = _concatenate(_apply(y, steps, deviation))
    return classify(y, outputs, name, dropout=dropout, init=Normal(deviation))


NETWORKS = {
    # The authors train by asynchronous workers, and torchvision has their weights; this is the
    # recipe of ResNets.
    "googlenet": Entry(
        "3×224×224, Inception",
        partial(inception, "googlenet", _googlenet(), 0.01, 0.2),
        *IMAGENET_SIZE,
        replace(IMAGENET, weight_decay=1e-4),
        normalises=False,
    ),
    "inception-v3": Entry(
        "3×299×299, Inception",
        partial(inception, "inception-v3", _inception_v3(), 0.1, 0.5),
        (3, 299, 299),
        1000,
        replace(IMAGENET, weight_decay=1e-4),
        normalises=False,
    ),
}
