"""Networks of inverted residual blocks: MobileNet V2 and V3, MnasNet and EfficientNet.

They differ in numbers. Structure, names of parameters and initial values are those of torchvision.

Sources: Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", 2018, table 2;
Howard et al., "Searching for MobileNetV3", 2019, tables 1 and 2; Tan et al., "MnasNet:
platform-aware neural architecture search for mobile", 2019, the variant B1; Tan and Le,
"EfficientNet: rethinking model scaling for convolutional neural networks", 2019, table 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dptrain.network.activations import HardSigmoid, HardSwish, ReLU, ReLU6, Sigmoid, SiLU
from dptrain.network.combining import GlobalAveragePool2d
from dptrain.network.functional import Input, Tensor, name_scope
from dptrain.network.initializers import Normal, Uniform
from dptrain.network.layers import Dense, Dropout, Flatten, Shape, StochasticDepth
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo.blocks import Make, conv_norm, in_sequence, squeeze_excitation
from dptrain.network.zoo.recipes import IMAGENET, IMAGENET_SIZE, Entry


@dataclass(frozen=True)
class Block:
    """An expansion, a depthwise convolution, a gate, a projection, and a shortcut.

    Attributes:
        scope: names of its scopes.
        kernel, stride: of the depthwise convolution.
        expanded: channels between the 1×1 convolutions; there is no expansion if the input has as
            many.
        filters: channels of the output. The input is added if it has the same shape.
        squeezed: channels between the layers of the gate; 0 for no gate.
        activation: the function after expansion and depthwise convolution.
        rate: of the samples that skip the block in training.
        first: number in the name of the first layer.
    """

    scope: str
    kernel: int
    stride: int
    expanded: int
    filters: int
    squeezed: int = 0
    activation: Make = ReLU
    rate: float = 0.0
    first: int = 0


@dataclass(frozen=True)
class Structure:
    """The blocks of a network, what they have in common, and the layers around them.

    Attributes:
        blocks: in their order.
        stem, last: filters of the first convolution and of the last one.
        end: name of the last convolution.
        activation: the function after these convolutions.
        norm: the normalisation.
        names: ``nested`` if layers of a convolution have a scope, ``flat`` if they have not, and
            ``flat end`` if those of projections alone have not.
        squeeze, gate: functions of squeeze-and-excitation.
        hidden: units of a dense layer before the last one; 0 for none.
        spread: the last layer begins with uniform values up to this number divided by the root of
            the number of classes; 0 for a normal distribution with deviation 0.01.
    """

    blocks: Sequence[Block]
    stem: int
    last: int
    end: str
    activation: Make
    norm: Make = BatchNorm2d
    names: str = "nested"
    squeeze: Make = ReLU
    gate: Make = Sigmoid
    hidden: int = 0
    spread: float = 0.0

    def names_from(self, scope: str, number: int) -> tuple[str, ...]:
        """Return the names of a convolution and the layers that follow it."""
        if self.names == "flat":
            return tuple(f"{scope}{number + i}" for i in range(3))
        return in_sequence(f"{scope}{number}")


def inverted_residual(x: Tensor, block: Block, of: Structure) -> Tensor:
    """Return the output of a block of a network; see `Block`."""
    number, step, y = block.first, 3 if of.names == "flat" else 1, x
    convolution = partial(conv_norm, norm=of.norm, activation=block.activation)
    if block.expanded != x.shape[0]:
        y = convolution(y, block.expanded, 1, names=of.names_from("", number))
        number += step
    y = convolution(y, block.expanded, block.kernel, block.stride, groups=block.expanded,
                    names=of.names_from("", number))  # fmt: skip
    number += step
    if block.squeezed:
        with name_scope(str(number)):
            y = squeeze_excitation(y, block.squeezed, of.squeeze, of.gate)
        number += step
    is_flat = of.names == "flat end"
    names = (str(number), str(number + 1)) if is_flat else of.names_from("", number)
    y = conv_norm(y, block.filters, 1, norm=of.norm, activation=None, names=names)
    if y.shape != x.shape:
        return y
    return x + (StochasticDepth(block.rate)(y) if block.rate else y)


def build(name: str, of: Structure, input_shape: Shape, outputs: int) -> Network:
    """Return a network of inverted residual blocks.

    Args:
        name: of the network.
        of: its structure.
        input_shape: (C, H, W).
        outputs: number of classes.
    """
    scope, _, number = of.end.rpartition(".")
    convolution = partial(conv_norm, norm=of.norm, activation=of.activation)
    y = convolution(Input(input_shape), of.stem, 3, 2, names=of.names_from(f"{scope}.", 0))
    for block in of.blocks:
        with name_scope(block.scope):
            y = inverted_residual(y, block, of)
    y = convolution(y, of.last, 1, names=of.names_from(f"{scope}.", int(number)))
    y = Flatten()(GlobalAveragePool2d()(y))
    if of.hidden:
        hidden = Dense(of.hidden, weight_init=Normal(0.01))
        y = of.activation()(hidden(y, name="classifier.0"))
    scale = of.spread * math.sqrt(y.shape[0] / outputs)
    last = Dense(outputs, weight_init=Uniform(scale) if scale else Normal(0.01))
    output = last(Dropout(0.2)(y), name="classifier.3" if of.hidden else "classifier.1")
    return Network.from_output(output, name=name)


def _rows(
    rows: Sequence[tuple[int, int, int, int, int]], channels: int, scopes: Iterator[str]
) -> Iterator[Block]:
    """Yield blocks for rows of expansion, kernel, filters, number of blocks and first stride."""
    for factor, kernel, filters, count, stride in rows:
        for number in range(count):
            first = 1 if number else stride
            yield Block(next(scopes), kernel, first, factor * channels, filters)
            channels = filters


_V2 = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 3, 32, 3, 2), (6, 3, 64, 4, 2), (6, 3, 96, 3, 1),
    (6, 3, 160, 3, 2), (6, 3, 320, 1, 1),
)  # fmt: skip
_MNASNET = (
    (3, 3, 24, 3, 2), (3, 5, 40, 3, 2), (6, 5, 80, 3, 2), (6, 3, 96, 2, 1), (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)  # fmt: skip
_EFFICIENTNET = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2), (6, 3, 320, 1, 1),
)  # fmt: skip
"""Rows of the tables of the papers, see `_rows`."""

_V3_LARGE = (
    (3, 1, 16, 16, 0, ReLU), (3, 2, 64, 24, 0, ReLU), (3, 1, 72, 24, 0, ReLU),
    (5, 2, 72, 40, 24, ReLU), *[(5, 1, 120, 40, 32, ReLU)] * 2,
    (3, 2, 240, 80, 0, HardSwish), (3, 1, 200, 80, 0, HardSwish),
    *[(3, 1, 184, 80, 0, HardSwish)] * 2, (3, 1, 480, 112, 120, HardSwish),
    (3, 1, 672, 112, 168, HardSwish), (5, 2, 672, 160, 168, HardSwish),
    *[(5, 1, 960, 160, 240, HardSwish)] * 2,
)  # fmt: skip
_V3_SMALL = (
    (3, 2, 16, 16, 8, ReLU), (3, 2, 72, 24, 0, ReLU), (3, 1, 88, 24, 0, ReLU),
    (5, 2, 96, 40, 24, HardSwish), *[(5, 1, 240, 40, 64, HardSwish)] * 2,
    (5, 1, 120, 48, 32, HardSwish), (5, 1, 144, 48, 40, HardSwish),
    (5, 2, 288, 96, 72, HardSwish), *[(5, 1, 576, 96, 144, HardSwish)] * 2,
)  # fmt: skip
"""Fields of `Block` but for the scope; the gates have a quarter of the channels, in eights."""


def _v3(rows: Sequence[tuple[int, int, int, int, int, Make]], last: int, hidden: int) -> Structure:
    blocks = [Block(f"features.{number}.block", *row) for number, row in enumerate(rows, 1)]
    return Structure(
        blocks, 16, last, f"features.{len(rows) + 1}", HardSwish,
        norm=partial(BatchNorm2d, epsilon=1e-3, momentum=0.01), gate=HardSigmoid, hidden=hidden,
    )  # fmt: skip


def _stages(
    rows: Sequence[tuple[int, int, int, int, int]], template: str, first: int = 1
) -> Iterator[str]:
    """Yield scopes that count the blocks of each stage."""
    for stage, row in enumerate(rows, first):
        yield from (template.format(stage, number) for number in range(row[3]))


def _efficientnet() -> Structure:
    rows = list(_rows(_EFFICIENTNET, 32, _stages(_EFFICIENTNET, "features.{}.{}.block")))
    inputs = [32, *(block.filters for block in rows)]
    blocks = [
        replace(block, squeezed=inputs[i] // 4, activation=SiLU, rate=0.2 * i / len(rows))
        for i, block in enumerate(rows)
    ]
    return Structure(blocks, 32, 1280, "features.8", SiLU, squeeze=SiLU, spread=1.0)


def _mnasnet() -> Structure:
    norm = partial(BatchNorm2d, momentum=3e-4)
    blocks = [
        Block("layers", 3, 1, 32, 16, first=3),
        *_rows(_MNASNET, 16, _stages(_MNASNET, "layers.{}.{}.layers", 8)),
    ]
    spread = math.sqrt(3.0)
    return Structure(blocks, 32, 1280, "layers.14", ReLU, norm, names="flat", spread=spread)


def _v2() -> Structure:
    scopes = (f"features.{number}.conv" for number in range(1, 18))
    blocks = [replace(block, activation=ReLU6) for block in _rows(_V2, 32, scopes)]
    return Structure(blocks, 32, 1280, "features.18", ReLU6, names="flat end")


RECIPE = replace(
    IMAGENET, learning_rate=0.045, epochs=300, schedule="exponential", step_at=None,
    step_factor=0.98**300, weight_decay=4e-5,
)  # fmt: skip
"""Recipe of torchvision's references for MobileNet V2: 0.98 times the rate in each epoch."""


def _entry(name: str, structure: Structure) -> dict[str, Entry]:
    family = partial(build, name, structure)
    return {name: Entry("3×224×224, inverted residual", family, *IMAGENET_SIZE, RECIPE)}


NETWORKS = {
    **_entry("mobilenet-v2", _v2()),
    # Their publications train by RMSProp on many workers; this is the recipe of MobileNet V2.
    **_entry("mobilenet-v3-small", _v3(_V3_SMALL, 576, 1024)),
    **_entry("mobilenet-v3-large", _v3(_V3_LARGE, 960, 1280)),
    **_entry("mnasnet1-0", _mnasnet()),
    **_entry("efficientnet-b0", _efficientnet()),
}
