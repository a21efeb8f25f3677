"""A trained network as an ONNX file: preprocessing, layers, softmax or target scaling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from dptrain import __version__
from dptrain.errors import UserError
from dptrain.files import write_whole
from dptrain.interchange.contents import ModelContents
from dptrain.interchange.onnx_graph import FLOAT, IR_VERSION, OPSET, OnnxGraph
from dptrain.interchange.onnx_layers import add_layer
from dptrain.interchange.onnx_preprocessing import add_preprocessing
from dptrain.interchange.raw_inputs import RawInputs
from dptrain.network.network import INPUT

RAW, BATCH = "input", "N"
OUTPUTS = {"classes": "probabilities", "binary": "probabilities", "values": "values"}
"""Name of the output by the kind of the loss's targets."""

INPUT_TENSOR, OUTPUT_TENSOR = "dptrain.network_input", "dptrain.network_output"
"""Keys of the metadata that name the tensors between which the layers of the network are."""

LIMIT_BYTES = 2**31 - 2**20
"""Largest ONNX file without external data: protobuf limits messages to 2 GiB."""


def write_onnx(contents: ModelContents, path: Path) -> tuple[Path, ...]:
    """Write an ONNX file that computes from raw samples what `TrainedModel.predict` returns.

    Args:
        contents: the trained network.
        path: file to write.

    Returns:
        The file.

    Raises:
        UserError: ONNX cannot represent the network, or the file cannot be written.
    """
    size = sum(values.nbytes for values in contents.arrays.values())
    if size > LIMIT_BYTES:
        raise UserError(
            f"the parameters of {contents.network.label} take {size / 2**30:.1f} GiB; an "
            "ONNX file has at most 2 GiB; export to .safetensors"
        )
    data = make_model(contents).SerializeToString()
    onnx.checker.check_model(data)
    write_whole(path, data, "--output")
    return (path,)


def make_model(contents: ModelContents) -> onnx.ModelProto:
    """Return the ONNX model.

    Raises:
        UserError: ONNX cannot represent a layer of the network.
    """
    network, graph = contents.network, OnnxGraph()
    raw = RawInputs.of(contents.preprocessing)
    for name, values in contents.arrays.items():
        graph.parameter(name, values)
    with graph.scope("preprocessing"):
        first = add_preprocessing(graph, raw, RAW)
    tensors = {INPUT: first}
    for node in network.nodes:
        tensors[node.name] = add_layer(graph, node, [tensors[name] for name in node.inputs])
    last = tensors[network.nodes[-1].name]
    output = OUTPUTS[network.loss.targets]
    with graph.scope("predictions"):
        _add_predictions(graph, contents, last, output)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            network.name,
            [_value(RAW, _element_type(raw.dtype), raw.shape)],
            [_value(output, FLOAT, network.output_shape)],
            list(graph.constants.values()),
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="dptrain",
        producer_version=__version__,
        doc_string=str(contents.preprocessing),
    )
    metadata = {**contents.metadata(), INPUT_TENSOR: first, OUTPUT_TENSOR: last}
    helper.set_model_props(model, metadata)
    return model


def _add_predictions(graph: OnnxGraph, contents: ModelContents, z: str, output: str) -> None:
    """Add what follows the last layer: softmax, sigmoid, or the unit of the data."""
    targets, preprocessing = contents.network.loss.targets, contents.preprocessing
    if targets == "classes":
        z = graph.add("Softmax", z, axis=1)
    elif targets == "binary":
        z = _add_sigmoid(graph, z)
    if preprocessing.has_target_unit:
        z = graph.add("Mul", z, graph.constant("scale", preprocessing.target_scale))
        z = graph.add("Add", z, graph.constant("offset", preprocessing.target_offset))
    graph.add("Identity", z, output=output)


def _add_sigmoid(graph: OnnxGraph, z: str) -> str:
    """Add 1 / (1 + exp(−z)).

    ONNX Runtime computes the operator Sigmoid with an absolute error of 1e-7: it is 0 below −17.
    """
    power = graph.add("Exp", graph.add("Neg", z))
    return graph.add("Reciprocal", graph.add("Add", power, graph.constant("one", 1.0)))


def _element_type(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _value(name: str, element_type: int, shape: tuple[int | None, ...]) -> onnx.ValueInfoProto:
    """Describe an input or output; batch size, height and width may be variable."""
    names = (BATCH, "H", "W")
    sizes = [size if size is not None else names[axis] for axis, size in enumerate(shape)]
    return helper.make_tensor_value_info(name, element_type, [BATCH, *sizes])
