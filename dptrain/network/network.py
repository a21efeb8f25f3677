"""Networks: layers with names, inputs and shapes, and a loss, without arithmetic on data."""

from __future__ import annotations

import copy
import heapq
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from dptrain.arguments import NamedArguments
from dptrain.bounds import MAX_LAYERS
from dptrain.errors import UserError, shown, suggest
from dptrain.network.layers import MAX_SIZE, Flops, Layer, Parameter, Shape, Statistic
from dptrain.network.losses import LOSSES, Loss, SoftmaxCrossEntropy
from dptrain.network.summary import Summary

if TYPE_CHECKING:
    from dptrain.network.functional import Tensor

INPUT = "input"
"""Name by which a layer refers to the input of the network."""

NAME = r"(?=.{1,64}\Z)[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*"
"""Pattern of the name of a layer."""

RESERVED_NAMES = (INPUT, "target", "loss", "update")
"""Names that stages and buffers of a plan have; no layer may have them."""


DEFAULT_LOSS = SoftmaxCrossEntropy()

Connections = tuple[tuple[str, tuple[str, ...]], ...]
"""Name and inputs of every layer."""


Family = Callable[[Shape, int], "Network"]
"""A function that returns a network for the shape of an input and a number of outputs."""


class NodeSpec(NamedTuple):
    """A layer as the author of a network writes it, before shapes are known.

    Attributes:
        layer: the layer.
        name: name of the node; None for kind and running number, ``conv1``.
        inputs: names of the nodes that it reads, or ``"input"``; None for the node written before
            it.
    """

    layer: Layer
    name: str | None = None
    inputs: tuple[str, ...] | None = None


L = TypeVar("L", bound=Layer)


@dataclass(frozen=True)
class Node:
    """A layer in a network, with its inputs, its shapes and its parameters.

    Attributes:
        index: position in topological order, from 0.
        name: unique name, ``conv1`` unless the author chose another.
        layer: the layer.
        inputs: names of the nodes whose outputs the layer reads, or ``"input"``.
        input_shape: shape of the input per sample; for several inputs, of their combination
            (`Layer.combine_shapes`).
        output_shape: shape of the output per sample.
        input_maps, output_maps: (C, H, W) that the elements come from; (F, 1, 1) for vectors that
            never were maps. A flattened tensor keeps the shape of its maps, so that a backend can
            store it in another order than C, H, W and still identify every element.
        parameters: trainable arrays by full name, ``conv1.weight``.
        statistics: arrays that training updates without gradients, ``bn1.running_mean``.
    """

    index: int
    name: str
    layer: Layer
    inputs: tuple[str, ...]
    input_shape: Shape
    output_shape: Shape
    input_maps: Shape
    output_maps: Shape
    parameters: tuple[Parameter, ...]
    statistics: tuple[Statistic, ...] = ()

    def layer_of(self, kind: type[L]) -> L:
        """Return the layer, which is of a kind."""
        assert isinstance(self.layer, kind), f"{self.name} is no {kind.__name__}"
        return self.layer

    @property
    def flops(self) -> Flops:
        """Operations for one sample."""
        return self.layer.flops(self.input_shape)


def check_layer_count(count: int) -> None:
    """Raise a `UserError` if a network would have more than `MAX_LAYERS` layers."""
    if count > MAX_LAYERS:
        raise UserError(f"the network has {count:,} layers; expected at most {MAX_LAYERS:,}")


FileKind = Literal["", "toml", "onnx", "weights", "run"]
"""What `Network.file` is, see `Network.read_from`."""

NO_NAME = "network"
"""Name of a network if no other was chosen."""


def _loss_object(given: object) -> str:
    """Return how a loss is written of which a user gave the name or the class."""
    cls = LOSSES.get(given) if isinstance(given, str) else given
    if isinstance(cls, type) and issubclass(cls, Loss):
        return f"{cls.__name__}()"
    return "SoftmaxCrossEntropy()"


@dataclass(frozen=True, repr=False)
class Network(metaclass=NamedArguments):
    """A directed acyclic graph of layers that ends in a loss.

    The constructor makes a chain, in which every layer reads the output of the layer before it.
    `from_output` makes a graph of layers that were called on tensors, `from_nodes` one of layers
    with named inputs.

    Args:
        input_shape: (C, H, W) or (F,), without the batch.
        layers: the layers in order.
        loss: the function that training minimises.
        name: name in reports and of run directories.
        connections: name and inputs of each layer; None for a chain with default names.
            `from_nodes` sets it.

    Attributes:
        nodes: the layers in topological order, with names, inputs and shapes.
        family: the function of the zoo that returns this network and that of another size, see
            `dptrain.network.adaptation`; None for a network of the user's own.
        file: path of the file or the run that decided about it; "" if there is none.
        file_kind: what this file is.

    Raises:
        UserError: the shape of an input does not fit the layer; the message names the layer.

    Examples:
        >>> from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
        >>> net = Network((3, 32, 32), [Conv2d(16), ReLU(), MaxPool2d(2), Flatten(), Dense(10)])
        >>> [node.name for node in net.nodes]
        ['conv1', 'relu1', 'pool1', 'flatten1', 'dense1']
        >>> net.nodes[1].inputs
        ('conv1',)
        >>> net.num_parameters
        41418
        >>> print(net.summary())
        the network: input 3×32×32, 10 outputs, loss softmax_cross_entropy
        <BLANKLINE>
         layer     kind         output  parameters     MACs
         ──────────────────────────────────────────────────
         conv1     Conv2d     16×32×32         448  442,368
         relu1     ReLU       16×32×32           0        0
         pool1     MaxPool2d  16×16×16           0        0
         flatten1  Flatten        4096           0        0
         dense1    Dense            10      40,970   40,960
         ──────────────────────────────────────────────────
         all                                41,418  483,328
        MACs: multiply-adds of convolutions and dense layers for one sample
    """

    input_shape: Shape
    layers: Sequence[Layer]
    loss: Loss = DEFAULT_LOSS
    name: str = NO_NAME
    connections: Sequence[tuple[str | None, tuple[str, ...] | None]] | None = field(
        default=None, kw_only=True
    )
    nodes: tuple[Node, ...] = field(init=False, repr=False, compare=False)
    # A changed copy of a network belongs to no family and to no file, so neither is an argument.
    family: Family | None = field(default=None, init=False, repr=False, compare=False)
    file: str = field(default="", init=False, repr=False, compare=False)
    file_kind: FileKind = field(default="", init=False, repr=False, compare=False)

    @classmethod
    def of_family(cls, family: Family, input_shape: Shape, outputs: int) -> Network:
        """Return the network of a family for the shape of an input and a number of outputs.

        Raises:
            UserError: there is no such network, for example because the input is too small.
        """
        shape = make_input_shape(input_shape)
        if outputs < 1:
            raise UserError(f"the number of outputs is {outputs}; expected at least 1")
        try:
            network = family(shape, outputs)
        except UserError as error:
            size = "×".join(map(str, shape))
            number = f"{outputs} output{'s' * (outputs > 1)}"
            raise UserError(f"no network for an input of {size} and {number}: {error}") from None
        object.__setattr__(network, "family", family)
        return network

    def read_from(self, file: str, kind: FileKind) -> Network:
        """Return the network with the path of the file or the run that decided about it.

        Args:
            file: the path.
            kind: ``toml`` or ``onnx`` for a file that describes the network, ``weights`` for one
                whose arrays decided about its size, ``run`` for the directory of a run.
        """
        network = copy.copy(self)
        object.__setattr__(network, "file", file)
        object.__setattr__(network, "file_kind", kind)
        return network

    @classmethod
    def from_nodes(
        cls,
        input_shape: Shape,
        nodes: Iterable[NodeSpec],
        loss: Loss = DEFAULT_LOSS,
        name: str = "network",
    ) -> Network:
        """Return a network of nodes with named inputs, written in any order.

        The node that no other node reads is the output of the network.

        Args:
            input_shape: (C, H, W) or (F,), without the batch.
            nodes: the layers with their names and inputs.
            loss: the function that training minimises.
            name: name of the network.

        Raises:
            UserError: two nodes have the same name, an input does not exist, nodes form a cycle,
                the output of a node is not used, or the shape of an input does not fit the layer.
                The message names the node.

        Examples:
            >>> from dptrain.network import Dense, Network, NodeSpec, ReLU
            >>> net = Network.from_nodes(
            ...     (5,), [NodeSpec(Dense(4), "first"), NodeSpec(ReLU()), NodeSpec(Dense(2))]
            ... )
            >>> [(node.name, node.inputs) for node in net.nodes]
            [('first', ('input',)), ('relu1', ('first',)), ('dense2', ('relu1',))]
        """
        specs = tuple(nodes)
        for spec in specs:
            if not isinstance(spec, NodeSpec):
                raise UserError(f"network {name}: a node is {shown(repr(spec))}; expected NodeSpec")
        connections = [(spec.name, spec.inputs) for spec in specs]
        layers = [spec.layer for spec in specs]
        return cls(input_shape, layers, loss, name, connections=connections)

    @classmethod
    def from_output(
        cls, output: Tensor, loss: Loss = DEFAULT_LOSS, name: str = "network"
    ) -> Network:
        """Return the network that computes a tensor from its `Input`.

        Layers are in the order in which they were called. Layers that the output does not need are
        no part of the network.

        Args:
            output: input of the loss.
            loss: the function that training minimises.
            name: name of the network.

        Raises:
            UserError: the tensor depends on no `Input` or on several, a layer with parameters was
                called twice, or two nodes have the same name.

        Examples:
            >>> from dptrain.network import Add, Conv2d, Dense, Flatten, Input, Network, ReLU
            >>> x = Input((3, 32, 32))
            >>> stem = ReLU()(Conv2d(16)(x))
            >>> y = Add()(Conv2d(16)(stem), stem)
            >>> net = Network.from_output(Dense(10)(Flatten()(ReLU()(y))), name="residual")
            >>> [node.name for node in net.nodes]
            ['conv1', 'relu1', 'conv2', 'add1', 'relu2', 'flatten1', 'dense1']
            >>> net.nodes[3].inputs
            ('conv2', 'relu1')
        """
        from dptrain.network.functional import collect

        input_shape, specs = collect(output)
        return cls.from_nodes(input_shape, specs, loss, name)

    def summary(self) -> Summary:
        """Return the layers with their shapes, parameters and multiply-adds, as a table."""
        return Summary(self)

    def __repr__(self) -> str:
        name = "without a name" if self.name == NO_NAME else self.name
        return (
            f"<Network {name}: {len(self.nodes)} layers, input "
            f"{'×'.join(map(str, self.input_shape))}, {self.num_outputs} outputs, "
            f"{self.num_parameters:,} parameters>"
        )

    def __str__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    @property
    def label(self) -> str:
        """The network in a message: ``network resnet20``, or ``the network`` without a name."""
        return "the network" if self.name == NO_NAME else f"network {self.name}"

    def __post_init__(self) -> None:
        _check_name(self.name)
        try:
            object.__setattr__(self, "input_shape", make_input_shape(self.input_shape))
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        if not isinstance(self.layers, Iterable):
            raise UserError(f"the layers of {self.label} are {self.layers!r}; expected a list")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not isinstance(self.loss, Loss):
            raise UserError(
                f"the loss of {self.label} is {shown(repr(self.loss))}; expected an object such as "
                f"{_loss_object(self.loss)}"
            )
        if not self.layers:
            raise UserError(f"{self.label} has no layers")
        check_layer_count(len(self.layers))
        for number, layer in enumerate(self.layers, 1):
            if not isinstance(layer, Layer):
                raise UserError(f"layer {number} of {self.label} is {layer!r}; expected a layer")
        try:
            layers, connections = _sort_topologically(self._specs())
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        object.__setattr__(self, "layers", layers)
        # A chain has one representation, so that equal networks compare as equal.
        names = default_names(layers)
        chain = tuple((name, (i,)) for name, i in zip(names, [INPUT, *names], strict=False))
        object.__setattr__(self, "connections", None if connections == chain else connections)
        object.__setattr__(self, "nodes", self._make_nodes(connections))
        self.loss.check(self.output_shape)

    def _specs(self) -> list[NodeSpec]:
        if self.connections is None:
            return [NodeSpec(layer) for layer in self.layers]
        if len(self.connections) != len(self.layers):
            raise UserError(
                f"{len(self.connections)} connections for {len(self.layers)} layers; expected one "
                "for each layer"
            )
        pairs = zip(self.layers, self.connections, strict=True)
        return [NodeSpec(layer, name, inputs) for layer, (name, inputs) in pairs]

    def _make_nodes(self, connections: Connections) -> tuple[Node, ...]:
        """Return the nodes with their shapes; `connections` are in topological order."""
        shapes = {INPUT: self.input_shape}
        maps = {INPUT: _maps_of(self.input_shape)}
        nodes: list[Node] = []
        pairs = zip(self.layers, connections, strict=True)
        for index, (layer, (name, inputs)) in enumerate(pairs):
            try:
                shape = layer.combine_shapes(tuple(shapes[i] for i in inputs))
                out = layer.output_shape(shape)
            except UserError as error:
                raise UserError(f"{self.label}, layer {index + 1} ({name}): {error}") from None
            in_maps = self._common_maps(name, shape, [maps[i] for i in inputs])
            parameters = layer.parameters(shape)
            statistics = tuple(replace(s, name=f"{name}.{s.name}") for s in layer.statistics(shape))
            # A matrix of weights mixes elements.
            mixes = any(len(parameter.shape) > 1 for parameter in parameters)
            keeps_elements = math.prod(out) == math.prod(shape) and not mixes
            out_maps = in_maps if len(out) == 1 and keeps_elements else _maps_of(out)
            parameters = tuple(replace(p, name=f"{name}.{p.name}") for p in parameters)
            nodes.append(
                Node(
                    index,
                    name,
                    layer,
                    inputs,
                    shape,
                    out,
                    in_maps,
                    out_maps,
                    parameters,
                    statistics,
                )
            )
            shapes[name], maps[name] = out, out_maps
        return tuple(nodes)

    def _common_maps(self, name: str, shape: Shape, maps: Sequence[Shape]) -> Shape:
        """Return the maps from which the elements of a node's input come."""
        if len(shape) == 3:
            return shape
        if len(set(maps)) > 1:
            listed = " and ".join(str(each) for each in dict.fromkeys(maps))
            raise UserError(
                f"{self.label}, node {name}: the inputs are vectors that come from maps of "
                f"the shapes {listed}; expected one shape"
            )
        return maps[0]

    @property
    def is_chain(self) -> bool:
        """True if every node reads the node before it and nothing else."""
        before = [INPUT, *(node.name for node in self.nodes)]
        return all(node.inputs == (before[node.index],) for node in self.nodes)

    @property
    def output_shape(self) -> Shape:
        """Shape of the input of the loss, per sample."""
        return self.nodes[-1].output_shape

    @property
    def num_outputs(self) -> int:
        """Number of outputs F."""
        return math.prod(self.output_shape)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All trainable arrays in topological order of their layers."""
        return tuple(p for node in self.nodes for p in node.parameters)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """All arrays that training updates without gradients, in topological order."""
        return tuple(s for node in self.nodes for s in node.statistics)

    @property
    def num_parameters(self) -> int:
        """Number of trainable numbers."""
        return sum(p.size for p in self.parameters)

    @property
    def flops(self) -> Flops:
        """Operations of all layers for one sample, without the loss."""
        each = [node.flops for node in self.nodes]
        return Flops(
            sum(f.forward for f in each),
            sum(f.backward_input for f in each),
            sum(f.backward_weight for f in each),
        )


def make_input_shape(shape: Sequence[int]) -> Shape:
    """Return the shape of the input of a network, (C, H, W) or (F,); refuse other ones."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise UserError(
            f"input shape {shown(shape)}; expected whole numbers such as (3, 32, 32)"
        ) from None
    if len(sizes) not in (1, 3) or not all(1 <= size <= MAX_SIZE for size in sizes):
        raise UserError(
            f"input shape {shown(sizes)}; expected (C, H, W) or (F,), numbers from 1 to "
            f"{MAX_SIZE:,}"
        )
    return sizes


def default_names(layers: Iterable[Layer]) -> list[str]:
    """Return the name that each layer has by default: kind and running number, ``conv1``."""
    counts: Counter[str] = Counter()
    names = []
    for layer in layers:
        counts[layer.kind] += 1
        names.append(f"{layer.kind}{counts[layer.kind]}")
    return names


def _maps_of(shape: Shape) -> Shape:
    return shape if len(shape) == 3 else (shape[0], 1, 1)


def _check_name(name: str) -> None:
    """Refuse names that would break messages, tables or file names."""
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= 200):
        raise UserError(
            f"the name of the network is '{shown(name)}'; expected 1 to 200 printable characters"
        )


def _connections(specs: Sequence[NodeSpec]) -> Connections:
    """Return name and inputs of every layer, defaults filled in and checked."""
    defaults = default_names(spec.layer for spec in specs)
    names = [
        default if spec.name is None else spec.name
        for spec, default in zip(specs, defaults, strict=True)
    ]
    known = {INPUT, *names}
    for name, count in Counter(names).items():
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise UserError(
                f"a layer has the name '{shown(name)}'; expected a letter, then up to 63 letters, "
                "digits, - or _, in parts that dots separate"
            )
        if name in RESERVED_NAMES:
            raise UserError(f"a layer has the reserved name '{name}'; choose another name")
        if count > 1:
            raise UserError(f"{count} layers have the name '{name}'; names must differ")
    connections = []
    for i, spec in enumerate(specs):
        before = names[i - 1] if i else INPUT
        if isinstance(spec.inputs, str):
            raise UserError(
                f"node {names[i]}: inputs is '{spec.inputs}'; expected a tuple of names"
            )
        inputs = (before,) if spec.inputs is None else tuple(spec.inputs)
        for name in inputs:
            if name not in known:
                hint = suggest(str(name), sorted(known))
                raise UserError(f"node {names[i]}: input '{shown(name)}' does not exist{hint}")
        if len(inputs) != spec.layer.num_inputs:
            found = "1 input" if len(inputs) == 1 else f"{len(inputs)} inputs"
            hint = "; name them in inputs" if spec.inputs is None else ""
            raise UserError(
                f"node {names[i]} has {found}; {spec.layer.kind} expects "
                f"{spec.layer.num_inputs}{hint}"
            )
        connections.append((names[i], inputs))
    return tuple(connections)


def _sort_topologically(specs: Sequence[NodeSpec]) -> tuple[tuple[Layer, ...], Connections]:
    """Return layers and connections in topological order, otherwise as written."""
    connections = _connections(specs)
    readers: dict[str, list[int]] = {INPUT: [], **{name: [] for name, _ in connections}}
    num_waiting = []
    for i, (_, inputs) in enumerate(connections):
        for name in inputs:
            readers[name].append(i)
        num_waiting.append(sum(name != INPUT for name in inputs))
    ready = [i for i, count in enumerate(num_waiting) if not count]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for i in readers[connections[order[-1]][0]]:
            num_waiting[i] -= 1
            if not num_waiting[i]:
                heapq.heappush(ready, i)
    if len(order) < len(specs):
        left = [connections[i] for i, count in enumerate(num_waiting) if count]
        raise UserError(f"nodes form a cycle: {' → '.join(_cycle(dict(left)))}")
    unused = [name for name, _ in connections if not readers[name]]
    if len(unused) > 1:
        raise UserError(
            f"the output of node {unused[0]} is not used; only the last node ({unused[-1]}) may "
            "have an output that no other node reads"
        )
    return tuple(specs[i].layer for i in order), tuple(connections[i] for i in order)


def _cycle(inputs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names along a cycle, from input to reader; every node reads another of these."""
    path: dict[str, None] = {}
    name = next(iter(inputs))
    while name not in path:
        path[name] = None
        name = next(i for i in inputs[name] if i in inputs)
    names = list(path)
    names = [name, *reversed(names[names.index(name) :])]
    return names if len(names) <= 8 else [*names[:4], "…", *names[-3:]]
