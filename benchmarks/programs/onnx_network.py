"""The same network as an ONNX model, which ONNX Runtime and OpenVINO read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dptrain.interchange.onnx_graph import IR_VERSION, OPSET, OnnxGraph
from dptrain.interchange.onnx_layers import add_layer
from dptrain.network import Dropout, Network
from dptrain.network.network import INPUT as NETWORK_INPUT

INPUT, OUTPUT = "x", "z"


def write_onnx(
    network: Network, parameters: Mapping[str, NDArray[Any]], batch_size: int, path: Path
) -> None:
    """Write the inference of `network` for batches of a fixed size."""
    path.write_bytes(onnx_model(network, parameters, batch_size).SerializeToString())


def onnx_model(
    network: Network, parameters: Mapping[str, NDArray[Any]], batch_size: int
) -> onnx.ModelProto:
    """Return the checked model of the layers alone, with `parameters` as constants."""
    graph, tensors = OnnxGraph(), {NETWORK_INPUT: INPUT}
    for parameter in network.parameters:
        graph.parameter(parameter.name, np.asarray(parameters[parameter.name], np.float32))
    for node in network.nodes:
        inputs = [tensors[name] for name in node.inputs]
        # Not every runtime removes a dropout before it runs.
        skipped = isinstance(node.layer, Dropout)
        tensors[node.name] = inputs[0] if skipped else add_layer(graph, node, inputs)
    graph.add("Identity", tensors[network.nodes[-1].name], output=OUTPUT)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            network.name,
            [_value(INPUT, (batch_size, *network.input_shape))],
            [_value(OUTPUT, (batch_size, *network.output_shape))],
            list(graph.constants.values()),
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model)
    return model


def _value(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
