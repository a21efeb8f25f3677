"""Random masks of dropout and stochastic depth, as exporters write them in training mode.

A mask is 1 with probability p and 0 otherwise: Bernoulli, or uniform numbers below p. Its product
with a tensor is divided by p.
"""

from __future__ import annotations

import math

import onnx

from dptrain.errors import UserError
from dptrain.interchange.onnx_matching import Match, always
from dptrain.interchange.onnx_reading import ReadGraph, attributes, number
from dptrain.network.layers import Dropout, Layer, StochasticDepth


def read_random_mask(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match the product of a tensor with a random mask."""
    for x, mask in (tuple(node.input), tuple(reversed(node.input))):
        found = _scaled_mask(graph, mask)
        if found is not None:
            kept, scale, source = found
            if not math.isclose(kept * scale, 1.0, rel_tol=1e-5):
                raise UserError(
                    f"its random mask is {scale:g} with probability {kept:g}; expected "
                    f"{1 / kept:g}, 1 / probability"
                )
            layer = _layer(graph, source, x, number(1.0 - kept))
            return Match((x,), always(layer))
    return None


def _layer(graph: ReadGraph, mask: str, x: str, rate: float) -> Layer:
    shape = graph.shape(mask)
    if shape is not None and math.prod(shape[1:]) == 1:
        return StochasticDepth(rate)
    if shape is not None and shape == graph.shape(x):
        return Dropout(rate)
    raise UserError(
        f"its random mask has shape {shape}; expected a number for each sample or each element"
    )


def _scaled_mask(graph: ReadGraph, tensor: str) -> tuple[float, float, str] | None:
    """Return the probability of a mask that is not 0, its number there, and its tensor."""
    scale = 1.0
    while (node := graph.node(tensor)) is not None:
        if node.op_type in ("Cast", "Identity"):
            tensor = node.input[0]
            continue
        factor = graph.constant(node.input[1]) if node.op_type in ("Div", "Mul") else None
        if factor is None or factor.size != 1 or not factor.item():
            break
        scale *= float(factor.item()) if node.op_type == "Mul" else 1.0 / float(factor.item())
        tensor = node.input[0]
    kept = _probability(graph, node)
    return None if kept is None else (kept, scale, tensor)


def _probability(graph: ReadGraph, node: onnx.NodeProto | None) -> float | None:
    """Return the probability with which a mask is 1; None if a tensor is no mask."""
    if node is None or node.op_type not in ("Bernoulli", "Less"):
        return None
    if node.op_type == "Bernoulli":
        values = graph.constant(node.input[0])
        kept = None if values is None or not values.size else values.reshape(-1)
        return float(kept[0]) if kept is not None and (kept == kept[0]).all() else None
    uniform, bound = graph.node(node.input[0]), graph.constant(node.input[1])
    if uniform is None or uniform.op_type not in ("RandomUniform", "RandomUniformLike"):
        return None
    settings = attributes(uniform)
    is_unit = (settings.get("low", 0.0), settings.get("high", 1.0)) == (0.0, 1.0)
    is_probability = bound is not None and bound.size == 1 and 0.0 < bound.item() <= 1.0
    return float(bound.item()) if is_unit and is_probability and bound is not None else None
