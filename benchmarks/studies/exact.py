"""Counts and worked values that do not depend on the machine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import dptrain
from benchmarks.ladder.layer import Layer
from benchmarks.studies.measuring import EXACT, Context, Values, measurement
from benchmarks.studies.networks import cifar_variants, perceptron_names, study_a_networks
from dptrain.describe import plan_for
from dptrain.network import (
    Conv2d,
    Dense,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    SoftmaxCrossEntropy,
    get_network,
)

BATCH = 128
"""Batch size of study D, for which its bytes are."""


def multiply_adds(network: Network) -> dict[str, int]:
    """Return the multiply-adds of a forward pass of one sample, by convolution and dense layer."""
    found = {}
    for node in network.nodes:
        layer = node.layer
        if isinstance(layer, Conv2d):
            terms = node.input_shape[0] * math.prod(layer.window)
            found[node.name] = math.prod(node.output_shape) * terms
        elif isinstance(layer, Dense):
            found[node.name] = layer.units * node.input_shape[0]
    return found


def output_bytes(network: Network, kind: type, batch: int = BATCH) -> int:
    """Return the bytes of the outputs of all layers of a kind, in float32."""
    nodes = (node for node in network.nodes if isinstance(node.layer, kind))
    return sum(4 * batch * math.prod(node.output_shape) for node in nodes)


def cross_entropy(probabilities: list[float], label: int) -> float:
    """Return the loss that dptrain computes for one sample with these predictions."""
    width = len(probabilities)
    network = Network((width,), [Dense(width)], SoftmaxCrossEntropy())
    replica = dptrain.make_replica(network, "reference", 1, precision="fp64")
    replica.parameters["dense1.weight"] = np.eye(width)
    # The softmax of logarithms of probabilities are the probabilities.
    logits = np.log(np.array([probabilities]))
    return float(replica.forward_backward(logits, np.array([label])))


@measurement("counts", EXACT)
def counts(context: Context) -> Values:
    """Count parameters, multiply-adds and bytes, and compute the worked examples."""
    variants = cifar_variants()
    return {
        "models": {
            name: {"parameters": net.num_parameters, "multiply_adds": multiply_adds(net)}
            for name, net in study_a_networks().items()
        },
        "perceptrons": {name: get_network(name).num_parameters for name in perceptron_names()},
        "solar": {
            "parameters": get_network("solar").num_parameters,
            "multiply_adds": multiply_adds(get_network("solar")),
        },
        "cifar": {name: _cifar_counts(net) for name, net in variants.items()},
        "im2col": _im2col(),
        "one_block": {"threads": 50 * 50, "limit": 1024},
        "losses": {
            "0.6, 0.3, 0.1": cross_entropy([0.6, 0.3, 0.1], 2),
            "0.1, 0.3, 0.6": cross_entropy([0.1, 0.3, 0.6], 2),
            "0.04, 0.7, 0.26": cross_entropy([0.04, 0.7, 0.26], 2),
        },
        "padding": _padding(),
    }


def _cifar_counts(network: Network) -> dict[str, Any]:
    named = {node.name: node for node in network.nodes}
    work = multiply_adds(network)
    return {
        "parameters": network.num_parameters,
        "multiply_adds": work,
        "total_multiply_adds": sum(work.values()),
        "maps": [named[n].output_shape[1] for n in ("conv1", "pool1", "conv2", "pool2")],
        "bytes": {
            "Conv2D": output_bytes(network, Conv2d),
            "LRN": output_bytes(network, LocalResponseNorm),
            "MaxPool": output_bytes(network, MaxPool2d),
            "MatMul": output_bytes(network, Dense),
            "variables": 4 * network.num_parameters,
            "batch": BATCH * (4 * math.prod(network.input_shape) + 4),
        },
    }


def _im2col() -> dict[str, Any]:
    """Return sizes of the unrolled input: the worked example, and the larger network's conv2."""
    example = Layer(1, 1, 3, 3, 1, 2)
    larger = Layer(32, 32, 25, 25, 32, 3, padding=1)
    large = Layer(1, 1, 1000, 1000, 1, 3)
    return {
        "example_values": example.terms * example.pixels,
        "example_inputs": example.channels * example.height * example.width,
        "image_bytes": 4 * larger.terms * larger.pixels,
        "batch_bytes": 4 * larger.terms * larger.pixels * larger.samples,
        "limit_factor": large.terms * large.pixels / (large.height * large.width),
    }


def _padding() -> dict[str, Any]:
    """Return the multiply-adds of the input gradient with and without the gradient of padding."""
    found = {}
    for name in ("model0", "model2"):
        for node in get_network(name).nodes:
            if isinstance(node.layer, Conv2d):
                (top, bottom), (left, right) = node.layer.pads(node.input_shape)
                channels, height, width = node.input_shape
                each = node.layer.filters * math.prod(node.layer.window) * channels
                found[f"{name} {node.name}"] = {
                    "without": each * height * width,
                    "with": each * (height + top + bottom) * (width + left + right),
                }
    return found


@measurement("memory", EXACT)
def memory(context: Context) -> Values:
    """Return the memory of training and of inference from plans, without allocating anything."""
    found = {}
    for name, batch in (("solar", 512), ("cifar", 128), ("model2", 32)):
        plans = [
            plan_for(get_network(name), backend="numba", batch_size=batch, training=training)
            for training in (False, True)
        ]
        found[f"{name}, batch {batch}"] = {
            "inference": plans[0].memory, "training": plans[1].memory,
        }  # fmt: skip
    return {"plans": found}
