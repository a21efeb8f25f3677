"""Networks of the zoo for the data: its channels or columns, and its classes or target columns.

A network of the zoo is a function of the shape of its input and of its number of outputs
(`Network.family`), and the data supplies both. Images keep the height and width of the published
network: they are resized or cropped. A network of the user's own is never changed; `edit_outputs`
and `edit_input` return the change that the user must make.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dptrain.errors import UserError
from dptrain.network.layers import Conv2d, Dense, Layer, Shape
from dptrain.network.network import INPUT, Network, NodeSpec
from dptrain.network.normalization import BatchNorm2d
from dptrain.texts import command_line


def adapt(network: Network, sample: Shape, outputs: int) -> Network:
    """Return a network of the zoo for some data; a network of the user's own is not changed.

    With the weights of a file, only its outputs follow the data.

    Args:
        network: the network.
        sample: shape of a sample of the data, (C, H, W) or (F,).
        outputs: number of classes, or of predicted values.

    Raises:
        UserError: the family has no network for these samples.

    Example:
        >>> from dptrain.network import get_network
        >>> adapt(get_network("model0"), (1, 28, 28), 5).input_shape
        (1, 32, 32)
        >>> adapt(get_network("mlp-16"), (8, 2, 2), 3).input_shape
        (32,)
    """
    own = network.input_shape
    keeps_input = network.file_kind == "weights"
    return resize(network, own if keeps_input else _input_shape(own, sample), outputs)


def resize(network: Network, input_shape: Shape, outputs: int) -> Network:
    """Return a network of the zoo with another input and other outputs; leave others as they are.

    Raises:
        UserError: the family has no network for such an input.
    """
    is_right = (network.input_shape, network.num_outputs) == (input_shape, outputs)
    if network.family is None or is_right:
        return network
    found = Network.of_family(network.family, input_shape, outputs)
    return found.read_from(network.file, network.file_kind)


NORMALIZATION = "normalization"
"""Name of the layer that `with_normalization` adds."""


def with_normalization(network: Network) -> Network:
    """Return a network of the zoo whose first layer normalises the input by known numbers.

    It is a `BatchNorm2d` that is not trained, with the numbers of the weights that are loaded.
    """
    family = network.family
    assert family is not None, "a network of the user's own is not changed"

    def normalised(input_shape: Shape, outputs: int) -> Network:
        inner = family(input_shape, outputs)
        first = NodeSpec(BatchNorm2d(trained=False), NORMALIZATION, (INPUT,))
        others = [
            NodeSpec(n.layer, n.name, tuple(NORMALIZATION if i == INPUT else i for i in n.inputs))
            for n in inner.nodes
        ]
        return Network.from_nodes(input_shape, [first, *others], inner.loss, inner.name)

    found = Network.of_family(normalised, network.input_shape, network.num_outputs)
    return found.read_from(network.file, network.file_kind)


def _input_shape(own: Shape, sample: Shape) -> Shape:
    """Return the input of a network of the zoo for samples of some shape."""
    if len(own) == 1:
        return (math.prod(sample),)
    return (sample[0], *own[1:]) if len(sample) == 3 else own


def describe_adaptation(network: Network) -> str:
    """Return in words what a network of the zoo took from its data; "" if it is the published one.

    Example:
        >>> from dptrain.network import get_network
        >>> describe_adaptation(adapt(get_network("model0"), (3, 28, 28), 5))
        'adapted to the data: layer dense2 with 5 outputs (published: 10)'
    """
    from dptrain.network.zoo import build_network

    if network.family is None:
        return ""
    published = build_network(network.name)
    parts = []
    channels, before = network.input_shape[0], published.input_shape[0]
    if network.input_shape != published.input_shape:
        what = "input channel" if len(network.input_shape) == 3 else "input"
        plural = "s" if channels > 1 else ""
        size = f"input {_times(network.input_shape)} (published: {_times(published.input_shape)})"
        same_size = network.input_shape[1:] == published.input_shape[1:]
        parts.append(f"{channels} {what}{plural} (published: {before})" if same_size else size)
    if network.num_outputs != published.num_outputs:
        count = network.num_outputs
        plural = "s" if count > 1 else ""
        parts.append(
            f"layer {output_layer(network)} with {count} output{plural} "
            f"(published: {published.num_outputs})"
        )
    if network.nodes[0].name == NORMALIZATION:
        parts.append(f"a first layer {NORMALIZATION} for pixels")
    return f"adapted to the data: {', '.join(parts)}" if parts else ""


def adaptation_lines(network: Network) -> list[str]:
    """Return the line with which commands state what a network took from its data, if anything.

    Example:
        >>> from dptrain.network import get_network
        >>> adaptation_lines(adapt(get_network("mlp-16"), (8,), 1))
        ['network: mlp-16 adapted to the data: 8 inputs (published: 50)']
    """
    text = describe_adaptation(network)
    return [f"network: {network.name} {text}"] if text else []


# Networks of the user's own.


def output_layer(network: Network) -> str | None:
    """Return the name of the layer whose units or filters are the outputs; None if there is none.

    It is the last dense layer or convolution before the loss with nothing but layers of one input
    after it.
    """
    nodes = {node.name: node for node in network.nodes}
    node = network.nodes[-1]
    while not isinstance(node.layer, Dense | Conv2d):
        if len(node.inputs) != 1 or node.inputs[0] == INPUT:
            return None
        node = nodes[node.inputs[0]]
    return node.name


def with_outputs(network: Network, outputs: int) -> Network | None:
    """Return the network with another size of its output layer; None if that is not enough.

    Example:
        >>> from dptrain.network import Dense, Network, ReLU
        >>> with_outputs(Network((4,), [Dense(8), ReLU(), Dense(10)]), 3).num_outputs
        3
    """
    name = output_layer(network)

    def changed(layer: Layer, found: str) -> Layer:
        if found != name:
            return layer
        key = "units" if isinstance(layer, Dense) else "filters"
        return replace(layer, **{key: outputs})  # type: ignore[type-var]

    try:
        specs = [NodeSpec(changed(n.layer, n.name), n.name, n.inputs) for n in network.nodes]
        other = Network.from_nodes(network.input_shape, specs, network.loss, network.name)
    except UserError:
        return None
    return other if other.num_outputs == outputs else None


def edit_outputs(network: Network, outputs: int) -> str:
    """Return the change with which a network of the user's own has another number of outputs.

    Example:
        >>> from dptrain.network import Dense, Network, ReLU
        >>> edit_outputs(Network((4,), [Dense(8), ReLU(), Dense(10)]), 3)
        'set units=3 in layer "dense2"'
    """
    name = output_layer(network)
    if network.file_kind == "run":
        return (
            f"it is the network of the run in {network.file}, so restore the data of the "
            "run, or start a new one"
        )
    if name is None or with_outputs(network, outputs) is None:
        return f"end it in a dense layer with {outputs} units{_in_file(network)}"
    layer = next(node.layer for node in network.nodes if node.name == name)
    key = "units" if isinstance(layer, Dense) else "filters"
    if network.file_kind == "onnx":
        command = command_line("describe", network.file, "--toml")
        return (
            f"export it again with {outputs} outputs of its last layer, or write it with "
            f'"{command}" to a TOML file and set {key} = {outputs} in layer "{name}"'
        )
    equals = " = " if network.file_kind == "toml" else "="
    return f'set {key}{equals}{outputs} in layer "{name}"{_in_file(network)}'


def edit_input(network: Network, sample: Shape) -> str:
    """Return the change with which a network reads samples of some shape, (C, H, W) or (F,).

    Example:
        >>> from dptrain.network import Dense, Network
        >>> edit_input(Network((4,), [Dense(10)]), (3,))
        'use a network with input shape (3,)'
    """
    if network.family is not None and network.file_kind != "weights":
        kind = "rows of numbers, such as mlp-64-32" if len(sample) == 1 else "images"
        return f"use a network for {kind}, or one of your own with input shape {sample}"
    same_kind = len(sample) == len(network.input_shape) == 3
    shape = _input_shape(network.input_shape, sample) if same_kind else sample
    if network.file_kind == "weights":
        return (
            f"that is the shape of the weights in {network.file}, so train without --weights, or "
            f"with weights for the input shape {shape}"
        )
    if network.file_kind == "toml":
        return f"set input = {list(shape)}{_in_file(network)}"
    return f"use a network with input shape {shape}"


def _in_file(network: Network) -> str:
    return f" of {network.file}" if network.file_kind == "toml" else ""


def _times(shape: Shape) -> str:
    return "×".join(map(str, shape))
