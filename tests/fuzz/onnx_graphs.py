"""Random ONNX graphs in the operators of several programs, and random edits of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import le
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Random = np.random.Generator
ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Gelu", "Identity", "Dropout")


@dataclass
class Graph:
    """A graph that grows by one operator after the other.

    Attributes:
        tensor, shape: the newest tensor, and its shape without the batch.
        is_plain: False if an operator has a setting that no layer of dptrain may have.
    """

    tensor: str
    shape: tuple[int, ...]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    count: int = 0
    is_plain: bool = True

    def name(self, prefix: str = "t") -> str:
        """Return a name that no tensor has."""
        self.count += 1
        return f"{prefix}{self.count}"

    def add(self, operator: str, *inputs: str, shape: tuple[int, ...] | None = None,
            **settings: Any) -> str:  # fmt: skip
        """Add an operator that reads the newest tensor unless inputs are named."""
        output = self.name()
        node = helper.make_node(operator, inputs or [self.tensor], [output], **settings)
        self.nodes.append(node)
        self.tensor = output
        if shape is not None:
            self.shape = shape
        return output

    def constant(self, values: Any) -> str:
        """Add a constant."""
        name = self.name("c")
        self.constants[name] = np.asarray(values)
        return name


def random_graph(random: Random) -> tuple[onnx.ModelProto, bool]:
    """Return a model, and whether dptrain must accept it."""
    shape: tuple[int, ...] = tuple(int(random.integers(1, 9)) for _ in range(3))
    if random.random() < 0.15:
        shape = (int(random.integers(1, 12)),)
    first = shape
    graph = Graph("x", shape)
    oddness = 0.25 if random.random() < 0.3 else 0.0
    for _ in range(int(random.integers(0, 7))):
        _add_random(random, graph, oddness)
    if len(graph.shape) == 3:
        _add_flattening(random, graph, oddness)
    for _ in range(int(random.integers(1, 3))):
        _add_dense(random, graph, oddness)
    if random.random() < 0.4:
        _add_end(random, graph, oddness)
    return _model(random, graph, first), graph.is_plain


def _model(random: Random, graph: Graph, shape: tuple[int, ...]) -> onnx.ModelProto:
    given = [numpy_helper.from_array(value, name) for name, value in graph.constants.items()]
    if random.random() < 0.2:
        # Some programs write constants as nodes.
        nodes = [helper.make_node("Constant", [], [each.name], value=each) for each in given]
        graph.nodes, given = [*nodes, *graph.nodes], []
    made = helper.make_graph(
        graph.nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *shape])],
        [helper.make_tensor_value_info(graph.tensor, TensorProto.FLOAT, None)],
        given,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)


def _weights(random: Random, *shape: int) -> NDArray[np.float32]:
    scale = 1.0 / math.sqrt(max(math.prod(shape[1:]), 1))
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _add_random(random: Random, graph: Graph, oddness: float) -> None:
    if len(graph.shape) == 1:
        _add_activation(random, graph, oddness)
        return
    steps = (_add_conv, _add_conv, _add_pool, _add_activation, _add_activation, _add_norm,
             _add_sum, _add_product)  # fmt: skip
    steps[int(random.integers(len(steps)))](random, graph, oddness)


def _add_conv(random: Random, graph: Graph, oddness: float) -> None:
    channels, *sizes = graph.shape
    group = channels if random.random() < 0.2 else 1
    filters = group * int(random.integers(1, 4))
    window = [int(random.integers(1, 4)) for _ in range(2)]
    strides = [int(random.integers(1, 3)) for _ in range(2)]
    settings: dict[str, Any] = {"strides": strides} if max(strides) > 1 else {}
    settings |= {"group": group} if group > 1 else {}
    dilations = [int(random.integers(1, 4)) if random.random() < 0.2 else 1 for _ in range(2)]
    settings |= {"dilations": dilations} if max(dilations) > 1 else {}
    extents = [(size - 1) * step + 1 for size, step in zip(window, dilations, strict=True)]
    # ONNX Runtime has no automatic padding with dilations.
    style = int(random.integers(4 if max(dilations) == 1 else 3))
    pads = [0, 0, 0, 0]
    if style == 0:
        settings["auto_pad"] = "VALID"
    elif style == 1:
        pads = [int(random.integers(0, 3))] * 4
        settings["pads"] = pads
    elif style == 2:
        pads = [extents[0] - 1, extents[1] - 1] * 2
        settings["pads"] = pads
    else:
        settings["auto_pad"] = "SAME_UPPER"
    if random.random() < oddness:
        graph.is_plain = False
        match int(random.integers(3)):
            case 0:
                pads = [int(random.integers(0, 3)) for _ in range(4)]
                settings.pop("auto_pad", None)
                settings |= {"strides": strides, "pads": pads, "group": group}
                style = 1
            case 1 if max(dilations) == 1:
                settings["auto_pad"] = "SAME_LOWER"
                settings.pop("pads", None)
                style = 3
            case _:
                settings["kernel_shape"] = window
    if style == 3:
        out = [-(-size // step) for size, step in zip(sizes, strides, strict=True)]
    else:
        out = [(sizes[i] + pads[i] + pads[i + 2] - extents[i]) // strides[i] + 1 for i in range(2)]
    if min(out) < 1:
        return
    inputs = [graph.tensor, graph.constant(_weights(random, filters, channels // group, *window))]
    if random.random() < 0.6:
        inputs.append(graph.constant(_weights(random, filters)))
    graph.add("Conv", *inputs, shape=(filters, *out), **settings)


def _add_pool(random: Random, graph: Graph, oddness: float) -> None:
    channels, *sizes = graph.shape
    choice = int(random.integers(6))
    if choice == 0:
        operator = ("GlobalAveragePool", "GlobalMaxPool")[int(random.integers(2))]
        graph.add(operator, shape=(channels, 1, 1))
        return
    operator = ("MaxPool", "AveragePool")[choice % 2]
    window = [int(random.integers(1, 4)) for _ in range(2)]
    strides = [int(random.integers(1, 4)) for _ in range(2)]
    settings: dict[str, Any] = {"kernel_shape": window, "strides": strides}
    pads = [min(window) // 2] * 4 if random.random() < 0.4 else [0, 0, 0, 0]
    settings |= {"pads": pads} if any(pads) else {}
    # With larger strides, ONNX Runtime pads by negative numbers.
    is_same = all(map(le, strides, window)) and random.random() < 0.4
    if is_same:
        settings.pop("pads", None)
        settings["auto_pad"] = "SAME_UPPER"
    if random.random() < oddness:
        graph.is_plain = False
        name = ("ceil_mode", "count_include_pad", "storage_order", "dilations")[
            int(random.integers(4))
        ]
        if name == "count_include_pad" and operator == "MaxPool":
            name = "ceil_mode"
        if name == "storage_order" and operator == "AveragePool":
            name = "count_include_pad"
        settings[name] = [2, 2] if name == "dilations" else 1
        if name in ("dilations", "ceil_mode"):
            settings.pop("auto_pad", None)
            is_same = False
    if is_same:
        out = [-(-size // step) for size, step in zip(sizes, strides, strict=True)]
    else:
        spread = 2 if "dilations" in settings else 1
        spans = [
            size + 2 * pads[0] * ("pads" in settings) - spread * (each - 1) - 1
            for size, each in zip(sizes, window, strict=True)
        ]
        ceiling = settings.get("ceil_mode", 0)
        out = [
            (-(-span // step) if ceiling else span // step) + 1
            for span, step in zip(spans, strides, strict=True)
        ]
        if ceiling:
            # A window that begins after the map and its first padding does not count.
            out = [
                each - ((each - 1) * step >= size + pads[0])
                for each, step, size in zip(out, strides, sizes, strict=True)
            ]
        if min(spans) < 0:
            return
    if min(out) < 1:
        return
    graph.add(operator, shape=(channels, *out), **settings)


def _add_activation(random: Random, graph: Graph, oddness: float) -> None:
    if random.random() < oddness:
        graph.is_plain = False
        match int(random.integers(5)):
            case 0:
                to = (TensorProto.INT32, TensorProto.DOUBLE, TensorProto.FLOAT16)
                graph.add("Cast", to=to[int(random.integers(3))])
                graph.add("Cast", to=TensorProto.FLOAT)
            case 1:
                graph.add("LeakyRelu", alpha=1.5)
            case 2:
                graph.add("Gelu", approximate="tanh")
            case 3:
                graph.add(("Elu", "Softplus", "Abs", "Neg", "HardSwish")[int(random.integers(5))])
            case _:
                graph.add("Add", graph.tensor, graph.constant(np.float32(0.5)))
        return
    operator = ACTIVATIONS[int(random.integers(len(ACTIVATIONS)))]
    settings = {"alpha": 0.25} if operator == "LeakyRelu" and random.random() < 0.5 else {}
    graph.add(operator, **settings)


def _add_norm(random: Random, graph: Graph, oddness: float) -> None:
    channels = graph.shape[0]
    scale = graph.constant(1.0 + _weights(random, channels))
    shift = graph.constant(_weights(random, channels))
    choice = int(random.integers(5))
    if choice < 2:
        mean = graph.constant(_weights(random, channels))
        variance = graph.constant(0.5 + np.abs(_weights(random, channels)))
        settings = {"epsilon": 1e-3} if random.random() < 0.5 else {}
        graph.add("BatchNormalization", graph.tensor, scale, shift, mean, variance, **settings)
    elif choice == 2 and math.prod(graph.shape[1:]) > 1:
        graph.add("InstanceNormalization", graph.tensor, scale, shift)
    elif choice == 3:
        size = 2 * int(random.integers(0, 3)) + 1
        if random.random() < oddness:
            size, graph.is_plain = size + 1, False
        graph.add("LRN", size=size, alpha=0.1)
    elif channels % 2 == 0 and math.prod(graph.shape) > 4:
        graph.add("GroupNormalization", graph.tensor, scale, shift, num_groups=2)


def _add_sum(random: Random, graph: Graph, oddness: float) -> None:
    """Add a branch and its sum or concatenation with the tensor."""
    before, channels = graph.tensor, graph.shape[0]
    weights = graph.constant(_weights(random, channels, channels, 1, 1))
    branch = graph.add("Conv", before, weights)
    inputs = [before, branch] if random.random() < 0.5 else [branch, before]
    choice = int(random.integers(3))
    if choice == 0:
        graph.add("Add", *inputs)
    elif choice == 1:
        graph.add("Sum", *inputs, *[before] * int(random.integers(0, 2)))
    elif random.random() < oddness:
        graph.is_plain = False
        graph.add("Concat", *inputs, axis=2,
                  shape=(channels, 2 * graph.shape[1], graph.shape[2]))  # fmt: skip
    else:
        graph.add("Concat", *inputs, axis=int(random.choice((1, -3))),
                  shape=(2 * channels, *graph.shape[1:]))  # fmt: skip


def _add_product(random: Random, graph: Graph, oddness: float) -> None:
    """Add x · σ(x), x · Φ(x) in elementary operators, or a sum pooling as a scaled mean."""
    before = graph.tensor
    choice = int(random.integers(3))
    if choice == 0:
        gate = graph.add("Sigmoid", before)
        graph.add("Mul", *([before, gate] if random.random() < 0.5 else [gate, before]))
    elif choice == 1:
        graph.add("Div", before, graph.constant(np.float32(math.sqrt(2.0))))
        erf = graph.add("Erf")
        one = graph.add("Add", erf, graph.constant(np.float32(1.0)))
        product = graph.add("Mul", before, one)
        graph.add("Mul", product, graph.constant(np.float32(0.5)))
    elif min(graph.shape[1:]) > 1:
        graph.add("AveragePool", kernel_shape=[2, 2], strides=[1, 1],
                  shape=(graph.shape[0], graph.shape[1] - 1, graph.shape[2] - 1))  # fmt: skip
        factor = 4.0
        if random.random() < oddness:
            factor, graph.is_plain = 3.0, False
        graph.add("Mul", graph.tensor, graph.constant(np.float32(factor)))


def _add_flattening(random: Random, graph: Graph, oddness: float) -> None:
    width = math.prod(graph.shape)
    if random.random() < oddness:
        graph.is_plain = False
        match int(random.integers(4)):
            case 0:
                divisors = [each for each in range(1, width + 1) if width % each == 0]
                part = divisors[int(random.integers(len(divisors)))]
                graph.add("Reshape", graph.tensor, graph.constant(np.array([-1, part])),
                          shape=(part,))  # fmt: skip
            case 1:
                graph.add("Flatten", axis=-3, shape=(width,))
            case 2:
                graph.add("Transpose", perm=[0, 2, 3, 1])
                graph.add("Flatten", shape=(width,))
            case _:
                graph.add("Flatten", axis=2, shape=(width // graph.shape[0],))
        return
    match int(random.integers(4)):
        case 0:
            graph.add("Reshape", graph.tensor, graph.constant(np.array([0, -1])), shape=(width,))
        case 1:
            graph.add("Reshape", graph.tensor, graph.constant(np.array([-1, width])),
                      shape=(width,))  # fmt: skip
        case 2:
            axes = graph.constant(np.array([2, 3]))
            graph.add("ReduceMean", graph.tensor, axes, keepdims=0, shape=(graph.shape[0],))
        case _:
            graph.add("Flatten", shape=(width,))


def _add_dense(random: Random, graph: Graph, oddness: float) -> None:
    (width,), units = graph.shape, int(random.integers(1, 6))
    weights = _weights(random, units, width)
    is_turned = bool(random.random() < 0.5)
    inputs = [graph.tensor, graph.constant(weights if is_turned else weights.T.copy())]
    settings: dict[str, Any] = {"transB": 1} if is_turned else {}
    bias = _weights(random, units)
    if random.random() < oddness:
        graph.is_plain = False
        settings |= ({"alpha": 0.5}, {"beta": 2.0}, {})[int(random.integers(3))]
        bias = bias[:1] if random.random() < 0.5 else bias[None]
    if not is_turned and random.random() < 0.4:
        graph.add("MatMul", *inputs, shape=(units,))
        if random.random() < 0.6:
            graph.add("Add", *sorted([graph.tensor, graph.constant(bias)]))
        return
    if random.random() < 0.7:
        inputs.append(graph.constant(bias))
    graph.add("Gemm", *inputs, shape=(units,), **settings)


def _add_end(random: Random, graph: Graph, oddness: float) -> None:
    operator = ("Softmax", "Sigmoid", "LogSoftmax", "Identity", "Tanh")[int(random.integers(5))]
    if "oftmax" in operator:
        if graph.shape[0] < 2:
            return
        axis = int(random.choice((1, -1)))
        if random.random() < oddness:
            axis, graph.is_plain = 0, False
        graph.add(operator, axis=axis)
    else:
        graph.add(operator)


# Edits.


def edit(random: Random, model: onnx.ModelProto) -> None:
    """Make one to three random changes to a model."""
    for _ in range(int(random.integers(1, 4))):
        changes = (_edit_attribute, _edit_attribute, _edit_input, _edit_input, _edit_nodes,
                   _edit_constant, _edit_ends, _edit_outputs, _insert, _edit_shape)  # fmt: skip
        if model.graph.node:
            changes[int(random.integers(len(changes)))](random, model.graph)


def _node(random: Random, graph: onnx.GraphProto) -> onnx.NodeProto:
    return graph.node[int(random.integers(len(graph.node)))]


def _tensors(graph: onnx.GraphProto) -> list[str]:
    outputs = [name for node in graph.node for name in node.output]
    return ["x", "", "absent", *outputs, *(each.name for each in graph.initializer)]


ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "strides": ([1], [0, 0], [2, 2], [-1, 1], [1, 1, 1], "a", 1.5, [2**31, 1], [2**40, 2**40]),
    "pads": ([0, 0], [1, 1, 1, 1], [-1, 0, 0, 0], [0] * 8, [2**31] * 4, 3),
    "kernel_shape": ([2, 2], [3], [0, 0], [1, 1, 1], [2**31, 2], 1.0),
    "dilations": ([1, 1], [2, 2], [1], [0, 1], [-1, 2], [2**31, 3], [1, 1, 1], "x"),
    "group": (0, 2, -1, 2**31, 1.0, "a"),
    "axis": (0, 1, 2, -1, 7, "a", 1.0), "alpha": (0.0, 1.0, float("nan"), -0.5, 3, "a"),
    "epsilon": (0.0, -1.0, float("inf"), 1), "auto_pad": ("SAME_UPPER", "SAME_LOWER", "?", 3),
    "to": (1, 6, 7, 9, 10, 11, 0), "keepdims": (0, 1), "transA": (1,), "transB": (0, 1),
    "ceil_mode": (0, 1), "count_include_pad": (0, 1), "num_groups": (0, 1, 3, 2**31),
    "size": (0, 1, 2, 2**33), "approximate": ("tanh", "none", b"\xff"), "ratio": (0.5, 2.0),
    "momentum": (0.0, 2.0), "training_mode": (1,), "axes": ([2, 3], [1], 2), "value": (1.0,),
}  # fmt: skip


def _edit_attribute(random: Random, graph: onnx.GraphProto) -> None:
    node = _node(random, graph)
    names = [each.name for each in node.attribute] or list(ATTRIBUTES)
    if random.random() < 0.3:
        names = list(ATTRIBUTES)
    name = names[int(random.integers(len(names)))]
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    values = ATTRIBUTES.get(name, (1,))
    if random.random() < 0.85:
        value = values[int(random.integers(len(values)))]
        node.attribute.append(helper.make_attribute(name, value))


def _edit_input(random: Random, graph: onnx.GraphProto) -> None:
    node, names = _node(random, graph), _tensors(graph)
    name = names[int(random.integers(len(names)))]
    if node.input and random.random() < 0.8:
        node.input[int(random.integers(len(node.input)))] = name
    elif random.random() < 0.5:
        node.input.append(name)
    elif node.input:
        del node.input[int(random.integers(len(node.input))) :]


def _edit_nodes(random: Random, graph: onnx.GraphProto) -> None:
    at = int(random.integers(len(graph.node)))
    match int(random.integers(4)):
        case 0:
            del graph.node[at]
        case 1:
            graph.node.append(graph.node[at])
        case 2:
            kinds = ("Relu", "Identity", "Add", "Mul", "Reshape", "Transpose", "Conv", "Split",
                     "Cast", "Squeeze", "Softmax", "", "If")  # fmt: skip
            graph.node[at].op_type = kinds[int(random.integers(len(kinds)))]
        case _:
            graph.node[at].domain = "com.example"


def _edit_constant(random: Random, graph: onnx.GraphProto) -> None:
    if not graph.initializer:
        return
    at = int(random.integers(len(graph.initializer)))
    name, choice = graph.initializer[at].name, int(random.integers(6))
    try:
        old = numpy_helper.to_array(graph.initializer[at])
    except ValueError:
        choice = 0  # An edit before this one has damaged it.
    match choice:
        case 0:
            del graph.initializer[at]
            return
        case 1:
            values = old.reshape(-1)
        case 2:
            values = old.astype(np.float64)
        case 3:
            values = old[None]
        case 4:
            values = old.astype(np.int64)
        case _:
            graph.initializer[at].dims.append(2)
            return
    graph.initializer[at].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), name))


def _edit_ends(random: Random, graph: onnx.GraphProto) -> None:
    names = _tensors(graph)
    name = names[int(random.integers(len(names)))]
    if random.random() < 0.6:
        graph.output[0].name = name
    elif random.random() < 0.5:
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    else:
        graph.input[0].name = name


def _edit_outputs(random: Random, graph: onnx.GraphProto) -> None:
    """Read the second output of a node, such as the mask of a dropout."""
    node = _node(random, graph)
    node.output.append("second")
    if random.random() < 0.5:
        graph.output[0].name = "second"
    else:
        _node(random, graph).input.append("second")


def _insert(random: Random, graph: onnx.GraphProto) -> None:
    """Insert an operator before a node."""
    node = _node(random, graph)
    if not node.input:
        return
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("Identity", {}), ("Cast", {"to": TensorProto.INT64}), ("Cast", {"to": TensorProto.BOOL}),
        ("Neg", {}), ("Transpose", {}), ("Cast", {"to": TensorProto.FLOAT16}), ("Softmax", {}),
        ("Dropout", {}), ("Relu", {}),
    )  # fmt: skip
    operator, settings = kinds[int(random.integers(len(kinds)))]
    at = int(random.integers(len(node.input)))
    inner = helper.make_node(operator, [node.input[at]], ["inserted"], **settings)
    node.input[at] = "inserted"
    graph.node.insert(int(random.integers(len(graph.node) + 1)), inner)


def _edit_shape(random: Random, graph: onnx.GraphProto) -> None:
    dims = graph.input[0].type.tensor_type.shape.dim
    match int(random.integers(5)):
        case 0:
            dims[int(random.integers(len(dims)))].dim_value = int(
                random.choice((0, -1, 1, 7, 2**40))
            )
        case 1:
            dims.add().dim_value = 2
        case 2:
            del dims[-1]
        case 3:
            dims[-1].dim_param = "W"
        case _:
            graph.input[0].type.tensor_type.elem_type = int(random.choice((0, 2, 7, 10, 11)))
