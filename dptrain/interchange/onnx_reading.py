"""An ONNX graph that is read from its output to its input."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from dptrain.errors import UserError, shown
from dptrain.files import require_regular
from dptrain.interchange.onnx_constants import FREE_BATCH, Constants, replacement
from dptrain.interchange.own_functions import known_functions

TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
"""Orders of axes that move the channels of maps to the last axis, and back."""

PART = "dptrain_part"
"""Attribute of a copy of a node for one of its outputs: the number of the output, and of all."""


class ReadGraph:
    """Nodes by the tensors that they compute, and constants.

    Attributes:
        inputs: shape of each input by name; None for a size that is variable.
        outputs: names of the outputs.
        metadata: text by key.
        is_own: True if dptrain wrote the file.
        functions: functions of single elements that the metadata defines.
        version: of the operators (opset).
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.metadata = {item.key: item.value for item in model.metadata_props}
        self.is_own = model.producer_name == "dptrain"
        self.functions = known_functions(self.metadata)
        self._constants = Constants(model)
        nodes = self._constants.nodes
        self._channels_last = _channels_last(nodes)
        self._nodes: dict[str, onnx.NodeProto] = {}
        self.version = next((each.version for each in model.opset_import if not each.domain), 1)
        for node in nodes:
            _check_inputs(node, self.version)
            if node.op_type == "Split":
                self._nodes.update(_parts(node))
                continue
            # Further outputs, such as the mask of a dropout, are no outputs of layers.
            self._nodes.update((output, node) for output in node.output[:1])
        self._nodes = dict(self._without_differences())
        self._rows = self._find_rows()
        self._positions = {tensor: index for index, tensor in enumerate(self._nodes)}
        self._readers = Counter(name for node in self._nodes.values() for name in node.input)
        self.outputs = [value.name for value in graph.output]
        self.inputs = {
            value.name: _sizes(value)
            for value in graph.input
            if value.name not in self._constants.given
        }

    def _without_differences(self) -> Iterator[tuple[str, onnx.NodeProto]]:
        """Yield the nodes by tensor; a difference of two tensors is a sum with a negative one."""
        for tensor, node in self._nodes.items():
            if node.op_type != "Sub" or any(map(self.is_constant, node.input)):
                yield tensor, node
                continue
            negative = f"{tensor}:negative"
            yield negative, helper.make_node("Neg", [node.input[1]], [negative], node.name)
            yield tensor, replacement(node, "Add", [node.input[0], negative])

    def node(self, tensor: str, operator: str | None = None) -> onnx.NodeProto | None:
        """Return the node that computes a tensor; None if none does, or if it is another one."""
        node = self._nodes.get(tensor)
        return node if node is not None and operator in (None, node.op_type) else None

    def insert(self, node: onnx.NodeProto) -> str:
        """Add a node that the file lacks and return its tensor; readers use it for parts."""
        tensor = str(node.output[0])
        self._nodes[tensor] = node
        return tensor

    def position(self, tensor: str) -> int:
        """Return the position of the node of a tensor in the file."""
        return self._positions[tensor]

    def num_readers(self, tensor: str) -> int:
        """Return the number of inputs of nodes that read a tensor."""
        return self._readers[tensor]

    def is_channels_last(self, tensor: str) -> bool:
        """Return whether maps have their channels on the last axis."""
        return tensor in self._channels_last

    def is_row(self, tensor: str) -> bool:
        """Return whether a tensor has three axes (N, C, W), as a reshape makes it."""
        return tensor in self._rows

    def _find_rows(self) -> frozenset[str]:
        found = set[str]()
        for tensor, node in self._nodes.items():
            if node.op_type == "Reshape":
                target = self.constant(node.input[1])
                is_row = target is not None and target.size == 3
            else:
                is_row = not found.isdisjoint(node.input) and node.op_type != "Shape"
            found.update([tensor] if is_row else ())
        return frozenset(found)

    def channel_axis(self, tensor: str) -> int:
        """Return the axis of the channels of maps: 1 or 3."""
        return 3 if self.is_channels_last(tensor) else 1

    def axis(self, tensor: str, axis: int) -> int:
        """Return which axis of maps (N, C, H, W) an axis of a tensor of maps is."""
        order = TO_LAST if self.is_channels_last(tensor) else range(4)
        return order[axis % 4]

    @property
    def batches(self) -> set[int]:
        """What the number of samples may be in constants: `FREE_BATCH`, and that of an input."""
        return {FREE_BATCH, *(sizes[0] for sizes in self.inputs.values() if sizes and sizes[0])}

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """Return the values of a constant; None for tensors that depend on the input.

        What is computed from constants and shapes is constant; the number of samples is
        `FREE_BATCH` if it is free.
        """
        return self._constants.value(self.before_identities(tensor))

    def is_constant(self, tensor: str) -> bool:
        """Return whether `constant` has the values of a tensor."""
        return self.before_identities(tensor) in self._constants

    def is_computed(self, tensor: str) -> bool:
        """Return whether the file has no such constant, but computes it from others."""
        return self.before_identities(tensor) not in self._constants.given

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, with `FREE_BATCH` samples; None if it is not known."""
        return self._constants.shape(tensor)

    def is_parameter(self, tensor: str) -> bool:
        """Return whether a constant is a parameter of a module: exporters keep their names.

        Names of other constants have no dots between words, such as ``onnx::Mul_7`` or ``val_3``.
        """
        source = self.source(tensor)
        return source in self._constants.given and re.fullmatch(r"\w+(\.\w+)+", source) is not None

    def source(self, tensor: str) -> str:
        """Return the name of the constant that a tensor is, with other axes possibly."""
        return self._chain(tensor, ("Identity", "Unsqueeze"))[-1]

    def before_identities(self, tensor: str) -> str:
        """Return the tensor of which another one is the copy."""
        return self._chain(tensor, ("Identity",))[-1]

    def _chain(self, tensor: str, operators: tuple[str, ...]) -> list[str]:
        """Return a tensor, and those from which such operators compute it, the first one last.

        Raises:
            UserError: they form a cycle.
        """
        chain: dict[str, None] = {tensor: None}
        while (node := self._nodes.get(tensor)) is not None and node.op_type in operators:
            tensor = node.input[0] if node.input else ""
            if tensor in chain:
                raise UserError(f"the graph has a cycle through '{shown(tensor)}'")
            chain[tensor] = None
        return list(chain)


def read_graph(path: Path) -> ReadGraph:
    """Read an ONNX file.

    Raises:
        UserError: the file does not exist, cannot be read, or is no ONNX model.
    """
    try:
        require_regular(path)
        model = onnx.load(path)
        _check_texts(model)
        return ReadGraph(model)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # protobuf and onnx have many classes of errors.
        raise UserError(
            f"{path} cannot be read as an ONNX file: {shown(str(error)) or type(error).__name__}"
        ) from None


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name; text is decoded."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def number(value: float) -> float:
    """Return a number that was rounded to float32 as people write it: 1e-05."""
    return float(f"{float(value):.7g}")


def describe(node: onnx.NodeProto) -> str:
    """Return a name of a node for messages, with the module of PyTorch if the file states it."""
    name = node.name or (node.output[0] if node.output else "")
    scopes = {each.key: each.value for each in node.metadata_props}.get("namespace", "").split("/")
    # Each is "name: class", and the last one is the operation.
    module = scopes[-2].partition(":")[0] if len(scopes) > 1 else ""
    where = f" of module '{shown(module)}'" if module else ""
    return f"node '{shown(name)}' ({shown(node.op_type)}){where}"


def _channels_last(nodes: Iterable[onnx.NodeProto]) -> frozenset[str]:
    """Return the tensors of maps with the channels on the last axis, in the order of a file."""
    found = set[str]()
    for node in nodes:
        if node.op_type == "Transpose":
            is_last = list(attributes(node).get("perm", ())) == TO_LAST
        else:
            is_last = not found.isdisjoint(node.input) and _has_maps(node)
        found.update(node.output if is_last else ())
    return frozenset(found)


def _has_maps(node: onnx.NodeProto) -> bool:
    """Return whether the output of an operator of maps is maps."""
    if node.op_type in ("ReduceMax", "ReduceMean"):
        return bool(attributes(node).get("keepdims", 1))
    return node.op_type not in ("Reshape", "Flatten", "Squeeze", "Shape")


def _parts(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Yield a copy of a node for each of its outputs, by the output."""
    for number, output in enumerate(node.output):
        part = onnx.NodeProto()
        part.CopyFrom(node)
        del part.output[:]
        part.output.append(output)
        part.attribute.append(helper.make_attribute(PART, [number, len(node.output)]))
        yield output, part


def _check_texts(message: Any) -> None:
    """Raise `UserError` if a name is no UTF-8; protobuf returns such names as bytes."""
    for field, value in message.ListFields():
        is_repeated = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        each = value if is_repeated else (value,)
        if field.type == field.TYPE_MESSAGE:
            for part in each:
                _check_texts(part)
        elif field.type == field.TYPE_STRING:
            for text in each:
                if isinstance(text, bytes):
                    raise UserError(
                        f"the name {shown(repr(text))} is no UTF-8; export the model again"
                    )


def _check_inputs(node: onnx.NodeProto, version: int) -> None:
    """Raise `UserError` if a node has fewer inputs than its operator in a version of ONNX."""
    known = {"max_inclusive_version": version}
    if node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, **known):
        least = onnx.defs.get_schema(node.op_type, **known).min_input
        if len(node.input) < least:
            raise UserError(
                f"{describe(node)} has {len(node.input)} inputs; expected at least {least}, so "
                "export the model again"
            )


def _sizes(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in dims)
