"""Training steps of Keras on TensorFlow, which study B used, next to those of dptrain."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.machine import versions
from benchmarks.studies.measuring import CPU, Context, Values, measurement
from benchmarks.timing import HostProgram, measure, quotient
from dptrain.errors import UserError
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU, get_network

CASES = (("model0", 32), ("model0", 256), ("mlp-800-400", 1000), ("solar-linear", 128))
"""Networks and batch sizes. `solar-linear` is the solar network without dropout, whose masks differ
between programs, and without its last ReLU."""
RATE, BLOCK_S = 1e-6, 0.02
TOLERANCE = 1e-3
"""Largest relative difference of the losses of the first steps."""


def peer_network(name: str) -> Network:
    """Return a network of `CASES`."""
    if name != "solar-linear":
        return get_network(name)
    solar = get_network("solar")
    layers = [layer for layer in solar.layers if layer.kind != "dropout"][:-1]
    return Network(solar.input_shape, layers, solar.loss, name)


def keras_model(network: Network, parameters: dict[str, Any]) -> Any:
    """Return the same network in Keras, channels last, with the same parameters."""
    import keras

    shape = network.input_shape
    is_image = len(shape) == 3
    model = keras.Sequential([keras.Input((*shape[1:], shape[0]) if is_image else shape)])
    weights: list[Any] = []
    for node in network.nodes:
        layer = node.layer
        if isinstance(layer, Conv2d):
            padding = "same" if node.output_shape[1:] == node.input_shape[1:] else "valid"
            model.add(keras.layers.Conv2D(layer.filters, layer.window, padding=padding))
            weights += [parameters[f"{node.name}.weight"].transpose(2, 3, 1, 0),
                        parameters[f"{node.name}.bias"]]  # fmt: skip
        elif isinstance(layer, Dense):
            model.add(keras.layers.Dense(layer.units))
            weights += [parameters[f"{node.name}.weight"].T, parameters[f"{node.name}.bias"]]
        elif isinstance(layer, Flatten):
            # dptrain flattens in the order C, H, W.
            model.add(keras.layers.Permute((3, 1, 2)))
            model.add(keras.layers.Flatten())
        elif isinstance(layer, MaxPool2d):
            model.add(keras.layers.MaxPooling2D(layer.windows, layer.strides))
        elif isinstance(layer, ReLU):
            model.add(keras.layers.ReLU())
        else:
            raise UserError(f"{network.name}: Keras' counterpart of {layer.kind} is not defined")
    model.set_weights(weights)
    classes = network.loss.targets == "classes"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if classes else "mse"
    model.compile(keras.optimizers.SGD(RATE), loss)
    return model


def _compare(name: str, batch: int, steps: int) -> Values:
    import tensorflow

    network = peer_network(name)
    x, y = random_batch(network, batch)
    replica = dptrain.make_replica(network, batch_size=batch)
    model = keras_model(network, {k: np.array(v) for k, v in replica.parameters.items()})
    inputs = tensorflow.constant(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x)
    targets = tensorflow.constant(y)

    def ours() -> float:
        loss = replica.forward_backward(x, y)
        replica.update(RATE)
        return loss

    def theirs() -> float:
        return float(model.train_on_batch(inputs, targets))

    first = ours(), theirs()
    if abs(first[1] / first[0] - 1) > TOLERANCE * (1 if network.loss.targets == "classes" else 10):
        raise UserError(f"{name}: losses are {first[0]:.6f} and {first[1]:.6f} in Keras")
    programs = {"dptrain": HostProgram(ours), "Keras": HostProgram(theirs)}
    found = measure(programs, rounds=steps, block_s=BLOCK_S)
    gain = quotient(found["Keras"].medians, found["dptrain"].medians)
    return {
        "network": name, "batch": batch, "losses": list(first),
        "dptrain_ms": found["dptrain"].median, "keras_ms": found["Keras"].median,
        "ratio": gain.value, "ratio_low": gain.low, "ratio_high": gain.high,
    }  # fmt: skip


@measurement("keras", CPU, package="tensorflow")
def keras_peer(context: Context) -> Values:
    """Time training steps on one thread: CPU time of dptrain and of Keras, alternating."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    rows = []
    for name, batch in CASES[:1] if context.quick else CASES:
        rows.append(_compare(name, batch, 4 if context.quick else 30))
        context.say(f"{name}, batch {batch}: {rows[-1]['ratio']:.2f}")
    return {"threads": 1, "versions": versions("tensorflow-cpu", "tensorflow", "keras"),
            "rows": rows}  # fmt: skip
