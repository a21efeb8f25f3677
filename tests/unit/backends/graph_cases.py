"""Networks with branches: residual blocks, concatenations, and tensors that several layers read,
the input among them.

Like the chains of `cases`, each starts with a convolution whose output is its weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.network import (
    ACTIVATIONS,
    GELU,
    Add,
    AveragePool2d,
    BatchNorm2d,
    ChannelShuffle,
    ChannelSlice,
    Concatenate,
    Conv2d,
    Crop2d,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    GroupNorm,
    MaxPool2d,
    MeanSquaredError,
    Multiply,
    Network,
    NodeSpec,
    Pad2d,
    ReLU,
    Resize2d,
    Sigmoid,
    SoftmaxCrossEntropy,
    Tanh,
)
from dptrain.network.activations import Affine
from dptrain.network.network import INPUT
from tests.unit.backends.cases import Case

START = "start"
"""Name of the first layer, which the branches read."""


def graph_case(
    name: str, shape: tuple[int, int, int, int], nodes: Sequence[NodeSpec], *, classes: bool = False
) -> Case:
    """`nodes` with an input `START` of shape (N, C, H, W)."""
    n, channels, height, width = shape
    loss = SoftmaxCrossEntropy() if classes else MeanSquaredError()
    start = NodeSpec(Conv2d(channels, 1), START)
    last = () if isinstance(nodes[-1].layer, Dense) else (NodeSpec(Flatten()),)
    sizes = (n * height * width, height, width)
    network = Network.from_nodes(sizes, [start, *nodes, *last], loss, name)
    return Case(f"graph: {name}", network, n)


def _residual_blocks() -> list[Case]:
    bare = Conv2d(4, 3, bias=False)
    halving = Conv2d(6, 3, stride=2, padding=1, bias=False, rounding="floor")
    projection = Conv2d(6, 1, stride=2, padding=0, bias=False, rounding="floor")
    # A large ε, because errors grow with 1 / standard deviation, and bounds with them.
    norm = BatchNorm2d(epsilon=0.5)
    identity = [
        NodeSpec(bare, "a"), NodeSpec(norm, "na"), NodeSpec(ReLU(), "ra"),
        NodeSpec(bare, "b"), NodeSpec(BatchNorm2d(epsilon=5.0), "nb"),
    ]  # fmt: skip
    return [
        graph_case(
            "addition of two convolutions",
            (2, 3, 5, 7),
            [
                NodeSpec(Conv2d(4, 3), "a", (START,)),
                NodeSpec(Conv2d(4, 1), "b", (START,)),
                NodeSpec(Add(), None, ("a", "b")),
            ],
        ),
        graph_case(
            "residual block, identity",
            (2, 4, 5, 3),
            [*identity, NodeSpec(Add(), "sum", ("nb", START)), NodeSpec(ReLU())],
        ),
        graph_case(
            "residual block, shortcut first",
            (1, 4, 3, 5),
            [*identity, NodeSpec(Add(), "sum", (START, "nb")), NodeSpec(ReLU())],
        ),
        graph_case(
            "residual block, no ReLU, dense",
            (3, 4, 3, 5),
            [
                NodeSpec(bare, "a"),
                NodeSpec(norm, "nb"), NodeSpec(Add(), "sum", ("nb", START)),
                NodeSpec(GlobalAveragePool2d()), NodeSpec(Flatten()), NodeSpec(Dense(3)),
            ],
            classes=True,
        ),
        graph_case(
            "residual block, projection",
            (2, 3, 6, 8),
            [
                NodeSpec(halving, "a", (START,)), NodeSpec(norm, "na"),
                NodeSpec(projection, "p", (START,)), NodeSpec(norm, "np"),
                NodeSpec(Add(), "sum", ("na", "np")), NodeSpec(ReLU()),
            ],
        ),
        graph_case(
            "two residual blocks with group normalisation",
            (2, 4, 3, 5),
            [
                NodeSpec(Conv2d(4, 3), "a", (START,)), NodeSpec(GroupNorm(2, epsilon=2.0)),
                NodeSpec(ReLU(), "ra"), NodeSpec(Add(), "one", (START, "ra")),
                NodeSpec(Conv2d(4, 3), "b"), NodeSpec(Tanh(), "tb"),
                NodeSpec(Add(), "two", ("tb", "one")),
            ],
        ),
        graph_case(
            "pre-activation block",
            (2, 4, 5, 3),
            [
                NodeSpec(norm, "n", (START,)), NodeSpec(ReLU()), NodeSpec(bare, "a"),
                NodeSpec(Add(), "sum", (START, "a")),
            ],
        ),
    ]  # fmt: skip


def _branches() -> list[Case]:
    return [
        graph_case(
            "concatenation of three",
            (2, 3, 5, 4),
            [
                NodeSpec(Conv2d(4, 3), "a", (START,)), NodeSpec(ReLU(), "ra"),
                NodeSpec(Conv2d(2, 1), "b", (START,)),
                NodeSpec(Concatenate(3), "all", ("ra", START, "b")),
            ],
        ),
        graph_case(
            "concatenation and convolution",
            (1, 5, 3, 7),
            [
                NodeSpec(Sigmoid(), "a", (START,)),
                NodeSpec(Concatenate(), "both", (START, "a")), NodeSpec(Conv2d(3, 3)),
            ],
        ),
        graph_case(
            "concatenation of a tensor with itself",
            (2, 3, 3, 2),
            [NodeSpec(Concatenate(), "both", (START, START)), NodeSpec(Conv2d(2, 1))],
        ),
        graph_case(
            "a tensor added to itself",
            (2, 3, 3, 2),
            [NodeSpec(Add(), "both", (START, START)), NodeSpec(Conv2d(2, 1))],
        ),
        graph_case(
            "a tensor read three times",
            (2, 3, 4, 5),
            [
                NodeSpec(Conv2d(3, 3), "a", (START,)), NodeSpec(GELU(), "b", (START,)),
                NodeSpec(MaxPool2d(3, 1, padding="same"), "c", (START,)),
                NodeSpec(Add(3), "sum", ("a", "b", "c")),
            ],
        ),
        graph_case(
            "a tensor read by additions only",
            (2, 3, 3, 5),
            [
                NodeSpec(Tanh(), "a", (START,)), NodeSpec(Add(), "one", (START, "a")),
                NodeSpec(Add(3), "two", (START, "one", "a")), NodeSpec(ReLU()),
            ],
        ),
        graph_case(
            "a long and a short branch to dense",
            (3, 4, 6, 4),
            [
                NodeSpec(Conv2d(5, 3), "a", (START,)), NodeSpec(ReLU()),
                NodeSpec(MaxPool2d(2), "pa"),
                NodeSpec(GlobalAveragePool2d(), "ga", ("pa",)), NodeSpec(Flatten(), "va"),
                NodeSpec(Dense(3), "dense_a"),
                NodeSpec(GlobalAveragePool2d(), "gb", (START,)), NodeSpec(Flatten(), "vb"),
                NodeSpec(Dense(3), "dense_b"),
                NodeSpec(Add(), "sum", ("dense_a", "dense_b")), NodeSpec(Dense(2)),
            ],
            classes=True,
        ),
        graph_case(
            "dropout in a branch",
            (2, 3, 3, 5),
            [
                NodeSpec(Dropout(0.4), "a", (START,)),
                NodeSpec(Add(), "sum", ("a", START)), NodeSpec(Sigmoid()),
            ],
        ),
    ]  # fmt: skip


def _padded() -> Case:
    """A sum of a tensor and its average with padding, as in PoolFormer, and crops of it."""
    return graph_case(
        "padding, difference, crop and resizing",
        (2, 3, 4, 5),
        [
            NodeSpec(Pad2d(1, "reflect"), None, (START,)),
            NodeSpec(AveragePool2d(3, 1), "mean"), NodeSpec(Affine(-1.0, 0.25), "negative"),
            NodeSpec(Add(), "difference", (START, "negative")),
            NodeSpec(Crop2d((0, 0), (4, 4), (2, 2)), "half"),
            NodeSpec(Resize2d(size=(4, 5), mode="bilinear"), "whole"),
            NodeSpec(Multiply(), None, ("difference", "whole")),
        ],
    )  # fmt: skip


def _splits() -> list[Case]:
    parts = [
        NodeSpec(ChannelSlice(0, 2), "a", (START,)),
        NodeSpec(ChannelSlice(2, 6), "b", (START,)),
    ]
    return [
        graph_case(
            "as in shufflenet",
            (2, 6, 3, 4),
            [
                *parts, NodeSpec(Conv2d(4, 3), "c", ("b",)), NodeSpec(ReLU(), "rc"),
                NodeSpec(Concatenate(), "all", ("a", "rc")), NodeSpec(ChannelShuffle(2)),
            ],
        ),
        graph_case(
            "parts that overlap, multiplied",
            (1, 6, 2, 3),
            [
                NodeSpec(ChannelSlice(0, 4), "a", (START,)), NodeSpec(Sigmoid(), "gate"),
                NodeSpec(ChannelSlice(2, 6), "b", (START,)),
                NodeSpec(Multiply(), None, ("gate", "b")),
            ],
        ),
    ]  # fmt: skip


def _products() -> list[Case]:
    squeeze = [
        NodeSpec(GlobalAveragePool2d(), "mean", (START,)), NodeSpec(Conv2d(2, 1)), NodeSpec(ReLU()),
    ]  # fmt: skip
    gate = [*squeeze, NodeSpec(Conv2d(5, 1)), NodeSpec(Sigmoid(), "gate")]
    pixels = [NodeSpec(Conv2d(1, 3), None, (START,)), NodeSpec(Tanh(), "gate")]
    wide = [NodeSpec(Conv2d(8, 1), None, ("mean",)), NodeSpec(Sigmoid(), "gate")]
    return [
        graph_case(
            "squeeze and excitation",
            (2, 5, 3, 4),
            [*gate, NodeSpec(Multiply(), None, (START, "gate"))],
        ),
        graph_case(
            "squeeze and excitation of 8 channels, gate first",
            (3, 8, 2, 5),
            [squeeze[0], *wide, NodeSpec(Multiply(), None, ("gate", START)), NodeSpec(ReLU())],
        ),
        graph_case(
            "a gate of pixels",
            (2, 3, 5, 4),
            [*pixels, NodeSpec(Multiply(), None, (START, "gate"))],
        ),
        graph_case(
            "a gate of pixels for 8 channels, gate first",
            (1, 8, 3, 3),
            [*pixels, NodeSpec(Multiply(), None, ("gate", START))],
        ),
        graph_case(
            "a product of branches",
            (2, 3, 4, 3),
            [
                NodeSpec(Conv2d(4, 3), "a", (START,)), NodeSpec(Conv2d(4, 1), "b", (START,)),
                NodeSpec(Multiply(), None, ("a", "b")),
            ],
        ),
        graph_case(
            "the square of a tensor",
            (2, 4, 1, 3),
            [NodeSpec(Multiply(), "square", (START, START)), NodeSpec(Conv2d(2, 1))],
        ),
        graph_case(
            "a product of vectors that come from maps",
            (3, 4, 2, 2),
            [
                NodeSpec(Flatten(), "one", (START,)), NodeSpec(Sigmoid(), "two"),
                NodeSpec(Multiply(), None, ("one", "two")), NodeSpec(Dense(3)),
            ],
        ),
        graph_case(
            "one channel and one pixel",
            (2, 1, 1, 1),
            [NodeSpec(Sigmoid(), "a", (START,)), NodeSpec(Multiply(), None, (START, "a"))],
        ),
    ]  # fmt: skip


def _readers_of_the_input() -> list[Case]:
    """Networks in which several layers read the input, which has no gradient.

    Channel p of the input is set at pixel p alone. `START` has as many channels, so that sums and
    normalisations of both are possible.
    """
    bare, norm = Conv2d(6, 3, bias=False), BatchNorm2d(epsilon=0.5)
    return [
        graph_case(
            "the input next to a convolution of it",
            (1, 6, 2, 3),
            [
                NodeSpec(ReLU(), "r", (START,)),
                NodeSpec(Concatenate(), "both", ("r", INPUT)), NodeSpec(Conv2d(3, 3)),
            ],
        ),
        graph_case(
            "the input added to a normalised convolution",
            (1, 6, 3, 2),
            [
                NodeSpec(bare, "a", (START,)), NodeSpec(norm, "na"),
                NodeSpec(Add(), "sum", ("na", INPUT)), NodeSpec(ReLU()), NodeSpec(Conv2d(2, 1)),
            ],
        ),
        graph_case(
            "a convolution added to the normalised input",
            (1, 6, 3, 2),
            [
                NodeSpec(norm, "n", (INPUT,)), NodeSpec(Add(), "sum", ("n", START)),
                NodeSpec(ReLU()), NodeSpec(Conv2d(2, 1)),
            ],
        ),
        graph_case(
            "the input multiplied by a gate",
            (1, 6, 2, 3),
            [
                NodeSpec(GlobalAveragePool2d(), "mean", (START,)), NodeSpec(Sigmoid(), "gate"),
                NodeSpec(Multiply(), None, (INPUT, "gate")), NodeSpec(Conv2d(3, 3)),
            ],
        ),
        graph_case(
            "four readers of the input",
            (1, 6, 2, 3),
            [
                NodeSpec(Tanh(), "t", (INPUT,)),
                NodeSpec(MaxPool2d(3, 1, padding="same"), "p", (INPUT,)),
                NodeSpec(Concatenate(4), "all", (START, INPUT, "t", "p")), NodeSpec(Conv2d(4, 3)),
            ],
        ),
    ]  # fmt: skip


def _functions() -> Case:
    """All functions of single elements, each of the same tensor."""
    nodes = [NodeSpec(cls(), kind, (START,)) for kind, cls in ACTIVATIONS.items()]
    # Concatenations of two, because lines of generated code have a limit.
    joined, last = list[NodeSpec](), next(iter(ACTIVATIONS))
    for number, kind in enumerate([*ACTIVATIONS][1:], 1):
        joined.append(NodeSpec(Concatenate(), f"joined{number}", (last, kind)))
        last = f"joined{number}"
    return graph_case("all functions", (1, 3, 2, 5), [*nodes, *joined])


GRAPH_CASES = (
    *_residual_blocks(),
    *_branches(),
    *_products(),
    *_splits(),
    _padded(),
    *_readers_of_the_input(),
    _functions(),
)
