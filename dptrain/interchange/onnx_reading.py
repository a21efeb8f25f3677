"""An ONNX graph that is read from its output to its input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dptrain.errors import UserError, shown
from dptrain.files import require_regular
from dptrain.interchange.own_functions import known_functions


class ReadGraph:
    """Nodes by the tensors that they compute, and constants.

    Attributes:
        inputs: shape of each input by name; None for a size that is variable.
        outputs: names of the outputs.
        metadata: text by key.
        is_own: True if dptrain wrote the file.
        functions: functions of single elements that the metadata defines.
        channels_last: tensors (N, H, W, C) between two transpositions of maps (N, C, H, W).
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.metadata = {item.key: item.value for item in model.metadata_props}
        self.is_own = model.producer_name == "dptrain"
        self.functions = known_functions(self.metadata)
        self._constants = {c.name: c for c in graph.initializer}
        self._nodes: dict[str, onnx.NodeProto] = {}
        version = next((each.version for each in model.opset_import if not each.domain), 1)
        for node in graph.node:
            _check_inputs(node, version)
            # Further outputs, such as the mask of a dropout, are no outputs of layers.
            self._nodes.update((output, node) for output in node.output[:1])
        self.channels_last = _channels_last(graph.node)
        self._positions = {tensor: index for index, tensor in enumerate(self._nodes)}
        self._readers = Counter(name for node in graph.node for name in node.input)
        self.outputs = [value.name for value in graph.output]
        self.inputs = {
            value.name: _sizes(value) for value in graph.input if value.name not in self._constants
        }

    def node(self, tensor: str, operator: str | None = None) -> onnx.NodeProto | None:
        """Return the node that computes a tensor; None if none does, or if it is another one."""
        node = self._nodes.get(tensor)
        return node if node is not None and operator in (None, node.op_type) else None

    def position(self, tensor: str) -> int:
        """Return the position of the node of a tensor in the file."""
        return self._positions[tensor]

    def num_readers(self, tensor: str) -> int:
        """Return the number of inputs of nodes that read a tensor."""
        return self._readers[tensor]

    def constant(self, tensor: str) -> NDArray[Any] | None:
        """Return the values of a constant; None for tensors that depend on the input."""
        *between, last = self._chain(tensor, ("Identity", "Unsqueeze", "Cast"))
        node = self._nodes.get(last)
        if last in self._constants:
            values: NDArray[Any] | None = _values(self._constants[last])
        else:
            is_constant = node is not None and node.op_type == "Constant"
            values = _constant_value(node) if node is not None and is_constant else None
        for name in reversed(between):
            # The number of axes does not matter to readers.
            if values is not None and self._nodes[name].op_type == "Cast":
                to = attributes(self._nodes[name])["to"]
                values = values.astype(helper.tensor_dtype_to_np_dtype(to))
        return values

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
    """Return a name of a node for messages."""
    name = node.name or (node.output[0] if node.output else "")
    return f"node '{shown(name)}' ({shown(node.op_type)})"


TO_CHANNELS_LAST, TO_CHANNELS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
"""Orders of the axes of transpositions between (N, C, H, W) and (N, H, W, C)."""


def _channels_last(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the tensors whose channels are the last axis: other operators keep the order."""
    found: set[str] = set()
    for node in nodes:
        is_last = any(name in found for name in node.input)
        if node.op_type == "Transpose":
            order = list(attributes(node).get("perm", ()))
            is_last = order == TO_CHANNELS_LAST or (is_last and order != TO_CHANNELS_FIRST)
        found.update(node.output[:1] if is_last else ())
    return found


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


def _values(constant: TensorProto) -> NDArray[Any]:
    try:
        return np.asarray(numpy_helper.to_array(constant))
    except Exception as error:  # onnx has many classes of errors.
        raise UserError(
            f"the constant '{shown(constant.name)}' is damaged ({shown(error)}); export the model "
            "again"
        ) from None


def _constant_value(node: onnx.NodeProto) -> NDArray[Any] | None:
    values: Mapping[str, Any] = attributes(node)
    for key, value in values.items():
        if isinstance(value, TensorProto):
            return _values(value)
        if key.startswith("value_"):
            return np.asarray(value)
    return None
