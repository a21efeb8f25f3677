"""What is tested for a classifier: that it is read, computed, trained and exported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.zoo.sources import SAMPLES, minibatch
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.interchange.onnx_import import OnnxNetwork
from dptrain.training.evaluation.model import TrainedModel
from dptrain.training.persistence.checkpoints import CheckpointFacts

STEPS, LEARNING_RATE = 50, 0.002
LARGEST_RATIO = 30.0
"""Error of dptrain that counts as rounding, relative to that of PyTorch in float32."""

Arrays = Mapping[str, NDArray[Any]]


def _replica(found: OnnxNetwork, *, training: bool) -> Any:
    replica = dptrain.make_replica(found.network, batch_size=SAMPLES, training=training)
    names = {each.name for each in found.network.parameters}
    for name, values in found.arrays.items():
        (replica.parameters if name in names else replica.statistics)[name] = values
    return replica


@dataclass(frozen=True)
class GradientError:
    """How far gradients are from those of PyTorch in float64, relative to their norm.

    Attributes:
        own: error of dptrain in float32, if PyTorch decides the kinks as dptrain does.
        theirs: error of PyTorch in float32, if float64 decides the kinks as float32 does.
        unexplained: error of dptrain if float64 decides the kinks.
        num_kinks: number of elements that float64 decides otherwise than dptrain.
    """

    own: float
    theirs: float
    unexplained: float
    num_kinks: int

    def __str__(self) -> str:
        """Return the result for the list, such as ``1.2`` or ``1.2 (400 without 2 kinks)``."""
        found = f"{self.own / self.theirs:.2g}"
        if not self.num_kinks:
            return found
        kinks = f"{self.num_kinks} kink{'s' * (self.num_kinks > 1)}"
        return f"{found} ({self.unexplained / self.theirs:.2g} without {kinks})"


def gradient_error(found: OnnxNetwork, module: Any, size: int) -> GradientError:
    """Compare gradients of a minibatch with those of PyTorch.

    Batch normalisations use the moments of the minibatch. If the error of dptrain is larger than
    `LARGEST_RATIO` times that of PyTorch in float32, it is tested whether elements near
    `kinks` explain it.

    Raises:
        ValueError: a parameter of the ONNX file is no weight of the module.
    """
    from benchmarks.zoo.kinks import Distance, Kink, Kinks, explain

    x, y = minibatch(size, found.network.num_outputs)
    replica = _replica(found, training=True)
    replica.forward_backward(x, y)
    recorded = Kinks()
    weights, single = _torch_gradients(module, x, y, "float32", recorded)
    fixed = {_key(each) for each in module.buffers() if each.ndim == 4}
    own = _by_torch_name(found, weights, fixed, dict(replica.gradients.items()))
    searched = Kinks(single=recorded.inputs)
    _, double = _torch_gradients(module, x, y, "float64", searched)

    def distance(gradients: Arrays, moves: frozenset[Kink]) -> Distance:
        kinks = Kinks(moves)
        exact = _torch_gradients(module, x, y, "float64", kinks)[1] if moves else double
        squares = dict[int, float]()
        for name in own:
            call = searched.first_uses[name]
            difference = float(np.sum((gradients[name] - exact[name]) ** 2))
            squares[call] = squares.get(call, 0.0) + difference
        return Distance(squares)

    crossed = frozenset(each for each in searched.near if each.crossed)
    theirs, of_own = distance(single, crossed), cache(partial(distance, own))
    moved = explain(of_own, searched.near, theirs, LARGEST_RATIO)
    norm = np.sqrt(sum(np.sum(double[name] ** 2) for name in own))
    error, of_theirs, unexplained = (
        float(each) / norm for each in (of_own(moved), theirs, of_own(frozenset()))
    )
    return GradientError(error, of_theirs, unexplained, len(moved))


def _key(values: Any) -> bytes:
    """Return the bytes of a tensor of PyTorch as float32."""
    return bytes(values.detach().float().contiguous().numpy().tobytes())


def _torch_gradients(
    module: Any, x: NDArray[Any], y: NDArray[Any], kind: str, kinks: Any
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float64]]]:
    """Return the parameters of a module, and the weights that it computes, and their gradients.

    `kinks` is the mode in which the module computes.
    """
    import torch
    from torch import nn

    dtype = getattr(torch, kind)
    module = module.to(dtype).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train()
            part.momentum = 0.0
    module.zero_grad()
    with kinks:
        outputs = module(torch.tensor(x, dtype=dtype))
    nn.functional.cross_entropy(outputs, torch.tensor(y).long()).backward()
    computed = {f"computed {number}": each for number, each in enumerate(kinks.computed)}
    weights = {**dict(module.named_parameters()), **computed}
    found = {name: each for name, each in weights.items() if each.grad is not None}
    kinks.first_uses = {name: kinks.first_uses.get(id(each), 0) for name, each in found.items()}
    return (
        {name: each.detach().float().numpy() for name, each in found.items()},
        {name: each.grad.double().numpy().copy() for name, each in found.items()},
    )


def _by_torch_name(
    found: OnnxNetwork, weights: Arrays, fixed: Collection[bytes], gradients: Arrays
) -> dict[str, NDArray[Any]]:
    """Return gradients by the names of PyTorch, in its shapes, without those of fixed filters.

    Weights are identified by their values, which are random; exporters rename some. Those that are
    computed are equal but for rounding.
    """
    names = {np.ascontiguousarray(each).tobytes(): name for name, each in weights.items()}
    computed = {name: each for name, each in weights.items() if name.startswith("computed")}
    own, unknown = {}, []
    for name, gradient in gradients.items():
        values = np.ascontiguousarray(found.arrays[name], np.float32)
        if values.tobytes() in fixed:
            continue
        close = (
            other
            for other, each in computed.items()
            if each.shape == values.shape and np.allclose(each, values, 1e-4, 1e-6)
        )
        theirs = names.get(values.tobytes()) or next(close, None)
        if theirs is not None:
            own[theirs] = gradient.reshape(weights[theirs].shape)
        elif values.any():  # Biases that the module lacks are 0.
            unknown.append(name)
    if unknown:
        raise ValueError(f"{len(unknown)} parameters are none of the module, {unknown[0]} first")
    return own


def losses_of_training(found: OnnxNetwork, size: int) -> tuple[float, float]:
    """Return the loss of one minibatch before and after `STEPS` steps on it."""
    x, y = minibatch(size, found.network.num_outputs)
    replica = _replica(found, training=True)
    losses = []
    for step in range(STEPS + 1):
        losses.append(replica.forward_backward(x, y, step=step))
        replica.update(LEARNING_RATE)
    return losses[0], losses[-1]


def export_error(found: OnnxNetwork, size: int, folder: Path) -> float:
    """Return the largest difference of ONNX Runtime, relative to the largest probability."""
    import onnxruntime

    x, _ = minibatch(size, found.network.num_outputs)
    replica = _replica(found, training=False)
    facts = CheckpointFacts(
        updates=0, network=found.network.name, batch_size=SAMPLES, seed=0, data="npz:x", ranks=1,
        total_steps=1, schedule="constant", spec={}, preprocessing={},
    )  # fmt: skip
    shape = found.network.input_shape
    plain = Preprocessing("image", shape, stored_shape=shape)
    path = folder / "exported.onnx"
    TrainedModel(found.network, plain, replica, facts, step=0).export(path, replace=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x})[:1]
    own = replica.predict(x)
    return float(np.abs(outputs - own).max() / np.abs(own).max())
