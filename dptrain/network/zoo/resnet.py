"""Residual networks.

Sources: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015; Xie et al.,
"Aggregated residual transformations for deep neural networks", 2017 (ResNeXt); Zagoruyko and
Komodakis, "Wide residual networks", 2016, table 8.

`imagenet_resnet` has the names and the structure of torchvision, in whose bottleneck blocks the
3×3 convolution has the stride ("v1.5"). `cifar_resnet` is the form of section 4.2 of the paper for
images of 32×32 pixels, with 6n + 2 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dptrain.network.activations import ReLU
from dptrain.network.combining import Add, GlobalAveragePool2d
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.layers import Conv2d, Dense, Flatten, MaxPool2d, Shape
from dptrain.network.network import Family, Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.recipes import CIFAR_SIZE, IMAGENET, IMAGENET_SIZE, Entry, Recipe

Block = Callable[[Tensor, int, int, float], Tensor]


def convolution(
    x: Tensor,
    filters: int,
    kernel: int,
    stride: int,
    name: str,
    weight_decay: float,
    groups: int = 1,
) -> Tensor:
    """Return a convolution without bias, padded by half of its kernel as in PyTorch."""
    layer = Conv2d(
        filters,
        kernel,
        stride,
        padding=kernel // 2,
        bias=False,
        rounding="floor",
        weight_decay=weight_decay,
        groups=groups,
    )
    return layer(x, name=name)


def basic_block(x: Tensor, width: int, stride: int, decay: float) -> Tensor:
    """Return two 3×3 convolutions and a shortcut."""
    y = ReLU()(BatchNorm2d()(convolution(x, width, 3, stride, "conv1", decay), name="bn1"))
    y = BatchNorm2d()(convolution(y, width, 3, 1, "conv2", decay), name="bn2")
    return ReLU()(Add()(y, _shortcut(x, width, stride, decay)))


def bottleneck(
    x: Tensor, width: int, stride: int, decay: float, *, widening: int = 1, groups: int = 1
) -> Tensor:
    """Return convolutions 1×1, 3×3 and 1×1 to four times the width, and a shortcut.

    The first two have `widening` times the width, as in ResNeXt, which divides the 3×3 convolution
    into groups, and in wide residual networks.
    """
    inner = widening * width
    y = ReLU()(BatchNorm2d()(convolution(x, inner, 1, 1, "conv1", decay), name="bn1"))
    y = convolution(y, inner, 3, stride, "conv2", decay, groups)
    y = ReLU()(BatchNorm2d()(y, name="bn2"))
    y = BatchNorm2d()(convolution(y, 4 * width, 1, 1, "conv3", decay), name="bn3")
    return ReLU()(Add()(y, _shortcut(x, 4 * width, stride, decay)))


def _shortcut(x: Tensor, filters: int, stride: int, decay: float) -> Tensor:
    """Return x, or its projection to another shape by a 1×1 convolution ("option B")."""
    if stride == 1 and x.shape[0] == filters:
        return x
    return BatchNorm2d()(
        convolution(x, filters, 1, stride, "downsample.0", decay), name="downsample.1"
    )


def _stages(
    x: Tensor, block: Block, counts: Sequence[int], widths: Sequence[int], decay: float
) -> Tensor:
    """Return stages of blocks; each but the first begins with stride 2."""
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True), 1):
        for number in range(count):
            with name_scope(f"layer{stage}.{number}"):
                x = block(x, width, 2 if stage > 1 and number == 0 else 1, decay)
    return x


def imagenet_resnet(
    name: str, block: Block, counts: Sequence[int], input_shape: Shape, outputs: int
) -> Network:
    """Return a network for images of about 224×224 pixels, as torchvision defines it."""
    decay = 1e-4
    x = Input(input_shape)
    y = ReLU()(BatchNorm2d()(convolution(x, 64, 7, 2, "conv1", decay), name="bn1"), name="relu")
    y = MaxPool2d(3, 2, padding=1)(y, name="maxpool")
    y = _stages(y, block, counts, (64, 128, 256, 512), decay)
    y = Flatten()(GlobalAveragePool2d()(y, name="avgpool"))
    return Network.from_output(Dense(outputs, weight_decay=decay)(y, name="fc"), name=name)


def small_resnet(
    name: str,
    counts: Sequence[int],
    widths: Sequence[int],
    last: str,
    decay: float,
    input_shape: Shape,
    outputs: int,
) -> Network:
    """Return a network for images of about 32×32 pixels, with a 3×3 stem and no pooling.

    Args:
        name: name of the network.
        counts: basic blocks of each stage.
        widths: channels of each stage.
        last: name of the last layer.
        decay: weight decay of convolutions and of the last layer.
        input_shape: (C, H, W).
        outputs: number of classes.
    """
    x = Input(input_shape)
    y = convolution(x, widths[0], 3, 1, "conv1", decay)
    y = ReLU()(BatchNorm2d()(y, name="bn1"), name="relu")
    y = _stages(y, basic_block, counts, widths, decay)
    y = Flatten()(GlobalAveragePool2d()(y, name="avgpool"))
    return Network.from_output(Dense(outputs, weight_decay=decay)(y, name=last), name=name)


def _cifar_resnet(n: int) -> Family:
    return partial(small_resnet, f"resnet{6 * n + 2}", (n, n, n), (16, 32, 64), "fc", 1e-4)


CIFAR = Recipe(
    "sgd",
    0.1,
    momentum=0.9,
    epochs=164,
    data="shapes",
    schedule="step",
    step_at="1/2,3/4",
    crop=4,
    flip=True,
    batch_size=128,
)
"""Section 4.2 of the paper: 64,000 steps, a tenth of the rate after 32,000 and after 48,000."""

_LONG = replace(CIFAR, epochs=200, schedule="cosine", step_at=None)
"""Recipe of https://github.com/kuangliu/pytorch-cifar."""

_NEXT = replace(IMAGENET, epochs=100, step_at="0.3,0.6,0.9")
"""Recipe of torchvision's references for ResNeXt."""

NETWORKS = {
    "resnet20": Entry("3×32×32, residual", _cifar_resnet(3), *CIFAR_SIZE, CIFAR),
    "resnet56": Entry("3×32×32, residual", _cifar_resnet(9), *CIFAR_SIZE, CIFAR),
    "resnet18-cifar": Entry(
        "3×32×32, residual, wide",
        partial(small_resnet, "resnet18-cifar", (2, 2, 2, 2), (64, 128, 256, 512), "fc", 5e-4),
        *CIFAR_SIZE,
        _LONG,
    ),
    **{
        name: Entry(
            "3×224×224, residual",
            partial(imagenet_resnet, name, block, counts),
            *IMAGENET_SIZE,
            chosen,
        )
        for name, block, counts, chosen in (
            ("resnet18", basic_block, (2, 2, 2, 2), IMAGENET),
            ("resnet34", basic_block, (3, 4, 6, 3), IMAGENET),
            ("resnet50", bottleneck, (3, 4, 6, 3), IMAGENET),
            ("resnext50-32x4d", partial(bottleneck, widening=2, groups=32), (3, 4, 6, 3), _NEXT),
            ("wide-resnet50-2", partial(bottleneck, widening=2), (3, 4, 6, 3), IMAGENET),
        )
    },
}
