r"""Random networks whose layers read any earlier tensor, compared with PyTorch in float64.

    python -m tests.fuzz.networks --trials 2000                        numba
    python -m tests.fuzz.networks --trials 1000 --processes 12 \
        --backend cuda cudnn --precision fp32 tf32 bf16                on a GPU

Up to four layers read the input. Without a GPU, `cuda` and `cudnn` compute on the emulator. On a
GPU, only one network in ten has kernels that are compiled for its sizes, because compilation takes
most of the time.

A gradient that differs by more than rounding is a fault, or a maximum or an activation that
rounding has flipped. It counts as flipped only if gradients in float64 at moved numbers agree.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain.api
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.errors import UserError
from dptrain.network import (
    ACTIVATIONS,
    Add,
    AveragePool2d,
    BatchNorm2d,
    ChannelShuffle,
    ChannelSlice,
    Concatenate,
    Conv2d,
    Crop2d,
    Dense,
    Dilate2d,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    GroupNorm,
    Layer,
    LayerNorm,
    LeakyReLU,
    LocalResponseNorm,
    Loss,
    MaxPool2d,
    MeanSquaredError,
    Multiply,
    Network,
    NodeSpec,
    Pad2d,
    ReLU,
    Reshape,
    Resize2d,
    Shape,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
    StochasticDepth,
    SumPool2d,
    transposed_convolution,
)
from dptrain.network.activations import Tanh
from dptrain.network.network import INPUT
from dptrain.plan import SGD
from dptrain.plan.freezing import planned_nodes, rate_factors
from tests.unit.backends import pytorch_reference

STEPPED = ("relu6", "clip", "hardsigmoid", "hardswish")
"""Functions whose slope has a step at a number other than 0. If a rounding error crosses it, the
gradient is another one, and no bound of rounding errors holds."""

FUNCTIONS = tuple(cls() for kind, cls in ACTIVATIONS.items() if kind not in STEPPED)

MOST_INPUT_READERS = 4
BATCH_SIZE, STEP = 4, 2
WIDTHS = (4, 6)
"""Channels and units: with and without vectors of four."""
LARGEST_MAP, MOST_CHANNELS, OUTPUTS = 8, 12, 3

TOLERANCES = {"fp64": 1e-9, "fp32": 2e-5, "fp32-direct": 2e-5, "tf32": 5e-3, "bf16": 4e-2}
"""Largest difference by rounding, relative to the largest element of all gradients or outputs: five
to twenty times the largest of 25 networks."""
ROUNDOFFS = {"tf32": 2.0**-11, "bf16": 2.0**-8}
"""Of the operands of products; others are moved by `MOVED`."""
MOVED, MOVES = 1e-4, 40
"""Relative size and number of the moves that prove a flip."""
AGREEMENT = 1e-3
"""As `TOLERANCES`, of a gradient at moved inputs in float32."""
SPREAD = 3.0
"""Largest distance of a gradient in lower precision, relative to those at moved numbers."""
MOST_FLIPPED = 0.01
"""Largest share of trials with flips."""

Arrays = Mapping[str, NDArray[Any]]


class _Builder:
    """A network in the making, each of whose layers reads earlier tensors.

    Args:
        seed: of the choices.

    Attributes:
        shapes: of the tensors, by name, in order.
    """

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        sizes = (self.choose.randint(3, 7), self.choose.randint(3, 7))
        is_vector = self.choose.random() < 0.1
        self.input_shape: Shape = (self.choose.choice(WIDTHS),) + (() if is_vector else sizes)
        self.shapes: dict[str, Shape] = {INPUT: self.input_shape}
        self.nodes: list[NodeSpec] = []
        self.reads = dict.fromkeys(self.shapes, 0)

    def add(self, layer: Layer, *inputs: str) -> str:
        """Append a layer, and return its name.

        Raises:
            UserError: the layer does not accept the inputs.
        """
        shape = layer.output_shape(layer.combine_shapes(tuple(self.shapes[x] for x in inputs)))
        name = f"t{len(self.nodes)}"
        self.nodes.append(NodeSpec(layer, name, inputs))
        self.shapes[name], self.reads[name] = shape, 0
        for each in inputs:
            self.reads[each] += 1
        return name

    def candidates(self, fits: Callable[[Shape], bool] = lambda shape: True) -> list[str]:
        """Return the tensors that a layer may read.

        The input has at most four readers, unless no other tensor fits.
        """
        fitting = [name for name, shape in self.shapes.items() if fits(shape)]
        if self.reads[INPUT] < MOST_INPUT_READERS:
            return fitting
        return [name for name in fitting if name != INPUT] or fitting

    def operand(self, fits: Callable[[Shape], bool] = lambda shape: True) -> str:
        """Return a tensor: often the last one, often the input."""
        names = self.candidates(fits)
        kind = self.choose.random()
        if names[0] == INPUT and kind < 0.3:
            return INPUT
        return names[-1] if kind < 0.75 else self.choose.choice(names[-5:])

    def grow(self) -> None:
        """Append a layer, or a few that backends compute together."""
        name = self.operand() if self.nodes else INPUT
        shape = self.shapes[name]
        if self.choose.random() < 0.25:
            self.combine(name)
            return
        for layer in self._chain() if len(shape) == 3 else self._vector_chain():
            name = self._sum(name) if isinstance(layer, Add) else self.add(layer, name)
            is_large = max(self.shapes[name][1:], default=0) > LARGEST_MAP
            if is_large and not isinstance(layer, Dilate2d | Pad2d):
                return

    def combine(self, name: str) -> None:
        """Append a sum, a product or a concatenation of a tensor and others."""
        shape = self.shapes[name]
        if self.choose.random() < 0.25:
            self._multiply(name)
            return
        if len(shape) == 1 or self.choose.random() < 0.6:
            self._sum(name)
            return
        inputs = [name]
        for _ in range(self.choose.randint(1, 2)):
            self.reads[INPUT] += inputs[-1] == INPUT
            other = self.operand(lambda each: each[1:] == shape[1:] and len(each) == 3)
            self.reads[INPUT] -= inputs[-1] == INPUT
            channels = sum(self.shapes[each][0] for each in (*inputs, other))
            if channels <= MOST_CHANNELS and inputs.count(INPUT) < MOST_INPUT_READERS:
                inputs.append(other)
        if len(inputs) > 1 and self._may_read(inputs):
            self.choose.shuffle(inputs)
            self.add(Concatenate(len(inputs)), *inputs)

    def _sum(self, name: str) -> str:
        shape, inputs = self.shapes[name], [name]
        for _ in range(self.choose.choice((1, 1, 1, 2))):
            same = [each for each, other in self.shapes.items() if other == shape]
            other = INPUT if self.input_shape == shape and self.choose.random() < 0.4 else None
            inputs.append(other or self.choose.choice(same[-5:]))
        inputs = inputs if self._may_read(inputs) else [each for each in inputs if each != INPUT]
        if len(inputs) < 2:
            return name
        self.choose.shuffle(inputs)
        return self.add(Add(len(inputs)), *inputs)

    def _multiply(self, name: str) -> None:
        """Append the product of a tensor and a bounded one of its shape, or a gate."""
        shape, kind = self.shapes[name], self.choose.random()
        inputs = [name, name]
        if not self._may_read(inputs):
            return
        if len(shape) == 3 and kind < 0.4:
            inputs[1] = self.add(GlobalAveragePool2d(), name)
            if kind < 0.1:
                # Efficient channel attention.
                row = self.add(Reshape((1, 1, shape[0])), inputs[1])
                inputs[1] = self.add(Reshape((shape[0], 1, 1)), self.add(Conv2d(1, (1, 3)), row))
        elif len(shape) == 3 and kind < 0.6:
            inputs[1] = self.add(Conv2d(1, 3), name)
        elif kind < 0.8:
            inputs[1] = self.choose.choice(self.candidates(lambda each: each == shape)[-5:])
        # Products of products would grow beyond the range in which bounds of errors hold. The
        # product with the sigmoid is SiLU, and is read as such.
        inputs[1] = self.add(Tanh(), inputs[1])
        self.choose.shuffle(inputs)
        self.add(Multiply(), *inputs)

    def _may_read(self, inputs: Sequence[str]) -> bool:
        return self.reads[INPUT] + inputs.count(INPUT) <= MOST_INPUT_READERS

    def _activation(self) -> Layer:
        return self.choose.choice((
            ReLU(), ReLU(), ReLU(), LeakyReLU(0.1), *FUNCTIONS, Dropout(0.3), StochasticDepth(0.3),
        ))  # fmt: skip

    def _convolution(self, *, bias: bool | None = None) -> Conv2d:
        pick = self.choose.choice
        return Conv2d(
            pick(WIDTHS), pick((1, 3, 3, 3, (3, 2), 5)), pick((1, 1, 1, 2, (2, 1))),
            padding=pick(("same", "same", "same", "valid", "full", 1)),
            groups=pick((1, 1, 1, 2, 4, 6)), rounding="floor",
            bias=pick((True, True, False)) if bias is None else bias,
            dilation=pick((1, 1, 1, 2, (1, 2), (3, 2))),
        )  # fmt: skip

    def _transposed(self) -> tuple[Layer, ...]:
        pick = self.choose.choice
        return transposed_convolution(
            pick(WIDTHS), pick((2, 3, (3, 2))), pick((1, 2, (1, 2))),
            pick(((0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 0, 1))), groups=pick((1, 1, 2, 4, 6)),
            bias=pick((True, False)), dilation=pick((1, 1, 2, (2, 1))),
        )  # fmt: skip

    def _pooling(self) -> Layer:
        pick = self.choose.choice
        if self.choose.random() < 0.15:
            return GlobalMaxPool2d()
        kind, window = pick((MaxPool2d, MaxPool2d, AveragePool2d, SumPool2d)), pick((2, 3, (2, 3)))
        padding = pick(("valid", "same", "same", 1))
        rounding, counted = pick(("floor", "ceil")), {}
        if kind is AveragePool2d and pick((True, False)):
            rounding, counted = "floor", {"count_padding": True}
        return kind(window, pick((1, 2, (2, 1))), padding=padding, rounding=rounding, **counted)

    def _channels(self) -> Layer:
        start = self.choose.randint(0, 3)
        return self.choose.choice((
            ChannelSlice(start, start + self.choose.randint(1, 4)),
            ChannelShuffle(self.choose.choice((2, 3))),
        ))  # fmt: skip

    def _resampling(self) -> Layer:
        pick, sides = self.choose.choice, (1, (0, 1, 2, 0), (1, 1, 0, 1))
        if self.choose.random() < 0.2:
            return Dilate2d(pick((2, (1, 2))))
        if self.choose.random() < 0.3:
            start, step = pick(((0, 0), (1, 0), (0, 2))), pick(((1, 1), (2, 1), (2, 2)))
            return Crop2d(start, (start[0] + pick((1, 3)), start[1] + pick((1, 2, 3))), step)
        if pick((True, False)):
            return Pad2d(pick(sides), mode=pick(("zeros", "reflect", "replicate")))
        size, mode = pick((3, 5, (4, 6), (7, 2))), pick(("nearest", "bilinear"))
        corners = mode == "bilinear" and pick((True, False))
        return Resize2d(size=size, mode=mode, align_corners=corners)

    def _normalization(self) -> Layer:
        # Errors grow with 1 / standard deviation, so ε is large.
        return self.choose.choice((
            BatchNorm2d(epsilon=0.3), BatchNorm2d(epsilon=0.3), GroupNorm(2, epsilon=0.3),
            LayerNorm(epsilon=0.3), LocalResponseNorm(1, alpha=0.2),
        ))  # fmt: skip

    def _chain(self) -> tuple[Layer, ...]:
        """Return layers for maps; some are computed together by backends."""
        norm, pool = BatchNorm2d(epsilon=0.3), MaxPool2d(2, 2, padding="same")
        lrn = LocalResponseNorm(1, alpha=0.2)
        return self.choose.choice((
            (self._convolution(),), (self._convolution(),), (self._convolution(), ReLU()),
            (self._convolution(), ReLU(), pool), (self._convolution(), ReLU(), self._pooling()),
            (self._convolution(), ReLU(), lrn), (self._convolution(), ReLU(), lrn, pool),
            (self._convolution(bias=False), norm, ReLU()), (norm, Add()), (norm, Add(), ReLU()),
            (self._convolution(bias=False), norm, Add(), ReLU()), (norm, ReLU()),
            (self._normalization(),), (self._normalization(),), (self._activation(),),
            (self._activation(),), (self._pooling(),), (self._pooling(),),
            (self._channels(),),
            (self._resampling(),), self._transposed(),
            (GlobalAveragePool2d(),) if self.choose.random() < 0.3 else (self._activation(),),
            (Flatten(), Dense(self.choose.choice(WIDTHS))) if self.choose.random() < 0.3
            else (self._convolution(),),
        ))  # fmt: skip

    def _vector_chain(self) -> tuple[Layer, ...]:
        dense = Dense(self.choose.choice(WIDTHS))
        return self.choose.choice((
            (dense,), (dense, ReLU()), (dense, ReLU(), Dropout(0.3)), (self._activation(),),
            (LayerNorm(epsilon=0.3),),
        ))  # fmt: skip

    def finish(self, loss: Loss) -> None:
        """Append what turns the tensors that no layer reads into one output."""
        unread = [name for name, count in self.reads.items() if not count and name != INPUT]
        if len(unread) == 1 and isinstance(loss, MeanSquaredError) and self.choose.random() < 0.5:
            if len(self.shapes[unread[0]]) == 3:
                self.add(Flatten(), unread[0])
            return
        heads = []
        for name in unread:
            if len(self.shapes[name]) == 3:
                if self.choose.random() < 0.5:
                    name = self.add(GlobalAveragePool2d(), name)
                name = self.add(Flatten(), name)
            heads.append(self.add(Dense(OUTPUTS), name))
        if len(heads) > 1:
            self.add(Add(len(heads)), *heads)


def random_network(seed: int, loss: Loss | None = None) -> Network:
    """Return a network of up to about 25 layers of all kinds, and 1 to 4 readers of its input.

    Args:
        seed: of the choices.
        loss: of the network; None for one that the seed selects.
    """
    builder = _Builder(seed)
    losses = SoftmaxCrossEntropy(), SigmoidBinaryCrossEntropy(), MeanSquaredError()
    loss = builder.choose.choice(losses) if loss is None else loss
    for _ in range(builder.choose.randint(3, 12)):
        nodes, shapes, reads = list(builder.nodes), dict(builder.shapes), dict(builder.reads)
        try:
            builder.grow()
        except UserError:  # The layer does not fit the shape.
            builder.nodes, builder.shapes, builder.reads = nodes, shapes, reads
    if not builder.nodes:
        builder.add(ReLU(), INPUT)
    builder.finish(loss)
    if not any(layer_has_parameters(spec) for spec in builder.nodes):
        builder.add(Dense(OUTPUTS), builder.nodes[-1].name or "")
    return Network.from_nodes(builder.input_shape, builder.nodes, loss)


def layer_has_parameters(spec: NodeSpec) -> bool:
    """Return whether a layer is trained."""
    trained = Conv2d | Dense | BatchNorm2d | GroupNorm | LayerNorm
    return isinstance(spec.layer, trained)


@dataclass(frozen=True)
class Problem:
    """A network with parameters and a minibatch.

    Attributes:
        seed: of the choices.
        network: the network.
        parameters: by name, float32.
        x, y: samples and targets.
        statistics: running statistics for evaluation; empty until a step has updated them.
        freeze: names of the frozen parameters, as in `SGD`.
    """

    seed: int
    network: Network
    parameters: Arrays
    x: NDArray[np.float32]
    y: NDArray[Any]
    statistics: Arrays = field(default_factory=dict)
    freeze: str = ""

    @property
    def frozen_statistics(self) -> Arrays:
        """Random running statistics of the normalisations whose parameters are all frozen."""
        rng, found = np.random.default_rng(self.seed), dict[str, NDArray[Any]]()
        nodes = planned_nodes(self.network, SGD(freeze=self.freeze))
        for node in nodes:
            if node.statistics and not any(p.is_trained for p in node.parameters):
                for statistic in node.statistics:
                    found[statistic.name] = rng.uniform(0.5, 1.5, statistic.shape)
        return {name: values.astype(np.float32) for name, values in found.items()}

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the frozen parameters."""
        factors = rate_factors(self.network, SGD(freeze=self.freeze))
        return frozenset(name for name, factor in factors.items() if not factor)

    @property
    def keys(self) -> dict[str, object]:
        """What selects dropout masks."""
        return {"seed": 0, "step": STEP, "samples": np.arange(len(self.x))}


def random_freeze(seed: int, network: Network) -> str:
    """Return names of some layers and parameters, but not of all, for `SGD`; often of none."""
    choose, layers = random.Random(seed), [n for n in network.nodes if n.parameters]
    share, found = choose.choice((0.0, 0.3, 0.6, 0.9)), list[str]()
    for node in layers:
        if choose.random() < share:
            is_whole = choose.random() < 0.8
            found.append(node.name if is_whole else choose.choice(node.parameters).name)
    everything = len(rate_free(network, found)) == 0
    return ",".join(found[1:] if everything else found)


def rate_free(network: Network, frozen: Sequence[str]) -> list[str]:
    """Return the parameters that are trained if layers and parameters are frozen."""
    pairs = [(p.name, node.name) for node in network.nodes for p in node.parameters]
    return [name for name, layer in pairs if name not in frozen and layer not in frozen]


def random_problem(seed: int, network: Network | None = None, freeze: str = "") -> Problem:
    """Return a network with random numbers; outputs are within ±4 or so.

    Args:
        seed: of the numbers, and of the network if it is None.
        network: the network.
        freeze: what is not trained.
    """
    network = random_network(seed) if network is None else network
    rng = np.random.default_rng(seed)
    parameters = {}
    for parameter in network.parameters:
        values = rng.standard_normal(parameter.shape)
        if len(parameter.shape) > 1:
            values *= 1.2 / np.sqrt(parameter.fan_in)
        else:
            values = 0.3 * values + (parameter.name.endswith("weight"))
        parameters[parameter.name] = values.astype(np.float32)
    # PyTorch refuses statistics of a single element.
    single = any(isinstance(layer, BatchNorm2d) for layer in network.layers)
    n = int(rng.integers(1 + single, BATCH_SIZE + 1))
    x = rng.standard_normal((n, *network.input_shape)).astype(np.float32)
    outputs = (n, network.num_outputs)
    y = {
        "classes": rng.integers(0, network.num_outputs, n),
        "binary": rng.integers(0, 2, outputs).astype(np.float32),
        "values": rng.standard_normal(outputs).astype(np.float32),
    }[network.loss.targets]
    problem = Problem(seed, network, parameters, x, y, freeze=freeze)
    largest = float(np.abs(_evaluated(problem)).max())
    last = [name for name in parameters if name.rpartition(".")[0] in _last_layers(network)]
    scaled = {name: parameters[name] * np.float32(min(1.0, 4.0 / largest)) for name in last}
    return replace(problem, parameters={**parameters, **scaled})


def _last_layers(network: Network) -> set[str]:
    """Return the layers whose sum is the output, or the last layer."""
    tail = network.nodes[-1]
    return {*tail.inputs} if isinstance(tail.layer, Add) else {tail.name}


OUTPUT, EVALUATED, LOSS = "output of training", "output of evaluation", "loss"
"""Names of compared numbers that are no gradients."""

Move = Callable[[Any], Any]
"""Returns a tensor of PyTorch with other numbers, close to the given ones."""


def exact_numbers(problem: Problem, move: Move | None = None, inputs: float = 0.0) -> Arrays:
    """Return output, loss, gradients and the output of evaluation by PyTorch in float64.

    Args:
        problem: what is computed.
        move: of all parameters, tensors and gradients; None for the exact numbers.
        inputs: size of random differences that are added to the input.
    """
    torch = pytorch_reference.torch
    changed = (lambda tensor: tensor) if move is None else move
    x = problem.x + inputs * np.random.default_rng().standard_normal(problem.x.shape)
    weights = {
        name: torch.tensor(np.asarray(value, np.float64), requires_grad=name not in problem.frozen)
        for name, value in problem.parameters.items()
    }
    moved = {name: changed(weight) for name, weight in weights.items()}
    running = {
        name: torch.tensor(np.asarray(value, np.float64))
        for name, value in problem.frozen_statistics.items()
    }
    z = _forward(problem.network, x, moved | running, problem.keys, changed)
    y = torch.tensor(np.asarray(problem.y, np.float64))
    loss = pytorch_reference.losses_of(problem.network.loss.kind, z, y).mean()
    loss.backward()
    numbers = {name: w.grad.numpy() for name, w in weights.items() if w.requires_grad}
    if problem.statistics:
        statistics = {
            name: torch.tensor(np.asarray(value, np.float64))
            for name, value in problem.statistics.items()
        }
        evaluated = _forward(problem.network, x, moved | statistics, {}, changed)
        numbers[EVALUATED] = evaluated.detach().numpy()
    return {**numbers, OUTPUT: z.detach().numpy(), LOSS: loss.detach().numpy()}


def _forward(
    network: Network, x: NDArray[Any], weights: Arrays, keys: Mapping[str, object], change: Move
) -> Any:
    tensors = {INPUT: change(pytorch_reference.torch.tensor(np.asarray(x, np.float64)))}
    for node in network.nodes:
        inputs = [tensors[name] for name in node.inputs]
        tensors[node.name] = change(pytorch_reference._apply(node, inputs, weights, keys))
    return tensors[network.nodes[-1].name]


def rounding_move(roundoff: float, seed: int) -> Move:
    """Return a function that changes every number, and its gradient, by up to its roundoff."""
    torch = pytorch_reference.torch
    generator = torch.Generator().manual_seed(seed)

    def factor(tensor: Any) -> Any:
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        return 1.0 + roundoff * (2.0 * noise - 1.0)

    def change(tensor: Any) -> Any:
        moved = tensor * factor(tensor)
        if moved.requires_grad:
            moved.register_hook(lambda gradient: gradient * factor(gradient))
        return moved

    return change


@dataclass(frozen=True)
class Comparison:
    """The result of a trial.

    Attributes:
        error: description of a fault; None if there is none.
        is_flipped: a maximum or an activation was flipped by rounding.
    """

    error: str | None = None
    is_flipped: bool = False


def compare(problem: Problem, backend: str, precision: str) -> Comparison:
    """Compare a training step and the evaluation after it with PyTorch."""
    threads = 1 + problem.seed % 2 if backend == "numba" else 1
    kept, again, inference = (
        dptrain.api.make_replica(
            problem.network,
            backend,
            BATCH_SIZE,
            threads,
            precision=precision,
            optimizer=SGD(freeze=problem.freeze),
            **options,
        )
        for options in ({}, {"recompute": True}, {"training": False})
    )
    for replica in (kept, again, inference):
        for name, value in problem.parameters.items():
            replica.parameters[name] = value
        for name, value in problem.frozen_statistics.items():
            replica.statistics[name] = value
    found, evaluated = _step(problem, kept), replace(problem, statistics=dict(kept.statistics))
    for label, other in (("recomputed", _step(problem, again)), ("again", _step(problem, kept))):
        for name, value in found.items():
            if not np.array_equal(other[name], value, equal_nan=True):
                return Comparison(f"{label}: {name} has other bits")
    kept.update(0.5)
    for name in problem.frozen:
        if not np.array_equal(kept.parameters[name], problem.parameters[name]):
            return Comparison(f"{name} is frozen, and an update changed it")
    for name, value in problem.frozen_statistics.items():
        if not np.array_equal(kept.statistics[name], value):
            return Comparison(f"{name} belongs to a frozen layer, and a step changed it")
    for name, value in problem.parameters.items():
        kept.parameters[name] = value
    for name, value in evaluated.statistics.items():
        kept.statistics[name] = inference.statistics[name] = value
    outputs = [replica.forward(problem.x) for replica in (kept, inference)]
    exact = exact_numbers(evaluated)
    results = [{**found, EVALUATED: output} for output in outputs]
    if not evaluated.statistics:
        exact = {**exact, EVALUATED: _evaluated(problem)}
    return _judge(evaluated, exact, results, precision)


def _step(problem: Problem, replica: Replica) -> dict[str, NDArray[Any]]:
    """Return loss, output and gradients of a step."""
    loss = replica.forward_backward(problem.x, problem.y, step=STEP)
    output = replica.output()
    return {LOSS: np.array(loss), OUTPUT: output, **dict(replica.gradients)}


def _evaluated(problem: Problem, move: Move = lambda tensor: tensor) -> NDArray[Any]:
    """Return the output of evaluation of a network without running statistics."""
    tensors = {
        name: move(pytorch_reference.torch.tensor(np.asarray(value, np.float64)))
        for name, value in problem.parameters.items()
    }
    output: NDArray[Any] = _forward(problem.network, problem.x, tensors, {}, move).numpy()
    return output


def _judge(
    problem: Problem, exact: Arrays, results: Sequence[Arrays], precision: str
) -> Comparison:
    """Compare numbers with the exact ones, and prove flips."""
    scales = _scales(exact)
    tolerance = TOLERANCES[precision]
    wrong = {
        name: each
        for each in results
        for name, value in each.items()
        if not _distance(value, exact[name]) <= tolerance * scales[name]
    }
    if not wrong:
        return Comparison()
    for name, result in wrong.items():
        if not np.isfinite(np.asarray(result[name], np.float64)).all():
            return Comparison(f"{name} is not finite")
    if precision in ROUNDOFFS:
        proved = _is_within_spread(problem, exact, wrong, ROUNDOFFS[precision])
    else:
        proved = _agrees_with_moved(problem, wrong, scales)
    if proved:
        return Comparison(is_flipped=True)
    return Comparison("; ".join(
        f"{name} differs by {_distance(result[name], exact[name]):.2g}, "
        f"{_distance(result[name], exact[name]) / scales[name]:.2g} of the largest"
        for name, result in wrong.items()
    ))  # fmt: skip


def _scales(exact: Arrays) -> dict[str, float]:
    """Return the largest magnitude of all gradients, and of each other array."""
    own = {OUTPUT, EVALUATED, LOSS}
    largest = max(float(np.abs(v).max()) for name, v in exact.items() if name not in own)
    largest = max(largest, 1e-6)
    return {
        name: 1.0 + float(np.abs(value).max()) if name in own else largest
        for name, value in exact.items()
    }


def _distance(value: NDArray[Any], exact: NDArray[Any]) -> float:
    return float(np.abs(np.asarray(value, np.float64) - exact).max())


def _agrees_with_moved(
    problem: Problem, wrong: Mapping[str, Arrays], scales: Mapping[str, float]
) -> bool:
    """Return whether the numbers in float64 at inputs moved by up to 1e-4 agree with the wrong."""
    for number in range(MOVES):
        moved = exact_numbers(problem, inputs=MOVED * 10.0 ** (-3.0 * number / MOVES))
        if all(
            name in moved and _distance(result[name], moved[name]) <= AGREEMENT * scales[name]
            for name, result in wrong.items()
        ):
            return True
    return False


def _is_within_spread(
    problem: Problem, exact: Arrays, wrong: Mapping[str, Arrays], roundoff: float
) -> bool:
    """Return whether the numbers are about as far from the exact ones as moved numbers are."""
    farthest = dict.fromkeys(wrong, 0.0)
    for number in range(MOVES):
        move = rounding_move(roundoff, number)
        moved = dict(exact_numbers(problem, move))
        if EVALUATED not in moved:
            moved[EVALUATED] = _evaluated(problem, move)
        for name in farthest:
            farthest[name] = max(farthest[name], _distance(moved[name], exact[name]))
    return all(
        _distance(result[name], exact[name]) <= SPREAD * farthest[name]
        for name, result in wrong.items()
    )


SPECIALIZED = 10
"""One network in so many has kernels that are compiled for its sizes."""


def _prepare(seed: int, backend: str) -> None:
    """Share a GPU between trials, so that each kernel is compiled once, or use the emulator."""
    if backend not in ("cuda", "cudnn"):
        return
    device = _device(backend)
    if device is not None:
        device.specializes = seed % SPECIALIZED == 0


@cache
def _device(backend: str) -> Any:
    """Return the GPU that all trials use; None for the emulator."""
    from dptrain.backends.cuda import backend as cuda

    try:
        load_backend(backend).choose_device(0)
    except UserError:
        _emulate()
        return None
    if not isinstance(cuda.open_device, FunctionType):  # Tests have replaced it.
        return None
    shared = cache(cuda.open_device)
    cuda.open_device = shared
    return shared(0)


@cache
def _emulate() -> None:
    import pytest

    from tests.emulator.emulator import Emulator
    from tests.emulator.fake_cudnn import Module
    from tests.emulator.fake_cudnn_functions import Functions
    from tests.unit.backends.cuda.gemm_tile import use_one_gemm_tile

    emulator, patch = Emulator(), pytest.MonkeyPatch()
    patch.setattr("dptrain.backends.cuda.backend.open_device", lambda local_rank: emulator)
    library = "dptrain.backends.cudnn.library"
    patch.setattr(f"{library}.load_library", lambda: "libcudnn.so.9")
    patch.setattr(f"{library}.open_functions", lambda path: Functions())
    patch.setattr(f"{library}.import_frontend", lambda: Module())
    use_one_gemm_tile(patch)


def run(seed: int, backend: str, precision: str | None = None) -> Comparison:
    """Compare the network of a seed.

    Args:
        seed: of the network and the numbers.
        backend: name of the backend.
        precision: of the backend; None for one that the seed selects.
    """
    _prepare(seed, backend)
    pytorch_reference.torch.set_num_threads(1)  # Tensors have some hundred elements.
    names = [*load_backend(backend).precisions]
    chosen = names[seed // 2 % len(names)] if precision is None else precision
    try:
        network = random_network(seed)
        freeze = random_freeze(seed, network)
        return compare(random_problem(seed, network, freeze), backend, chosen)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Comparison(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


def trial(seed: int, backend: str, precision: str | None = None) -> str | None:
    """Return the description of a fault that the network of a seed shows, or None; see `run`."""
    found = run(seed, backend, precision)
    return None if found.error is None else f"seed {seed}, {backend}: {found.error}"


def main(arguments: list[str] | None = None) -> int:
    """Run trials; return 1 if one fails or more than 1% are flipped."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.networks", description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="number of networks")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first")
    parser.add_argument("--backend", nargs="+", default=["numba"])
    parser.add_argument("--precision", nargs="+", default=[None])
    parser.add_argument("--seconds", type=float, default=1e9, help="longest time")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    variants = [(b, p) for b in options.backend for p in options.precision]
    trials = [
        (options.seed + number, *variants[number % len(variants)])
        for number in range(options.trials)
    ]
    start, counts, flipped = time.monotonic(), Counter[str](), Counter[str]()
    print(f"seeds from {options.seed}", flush=True)
    failed = 0
    for (seed, backend, precision), found in _results(
        trials, options.processes, start + options.seconds
    ):
        variant = f"{backend} {precision or ''}".strip()
        counts[variant] += 1
        flipped[variant] += found.is_flipped
        if found.error is not None:
            failed += 1
            print(f"seed {seed}, {variant}: {found.error}", flush=True)
    seconds, done = time.monotonic() - start, counts.total()
    for variant, count in sorted(counts.items()):
        print(f"{variant}: {count} networks, {flipped[variant]} flipped and proved")
    print(
        f"{done} networks in {seconds:.0f} s: {failed} failed, {flipped.total()} flipped and proved"
    )
    return int(failed > 0 or flipped.total() > MOST_FLIPPED * done + 1)


Variant = tuple[int, str, str | None]
"""Seed, backend and precision."""


def _results(
    trials: Sequence[Variant], processes: int, end: float
) -> Iterator[tuple[Variant, Comparison]]:
    """Yield the results of trials, in any order, until a time of `time.monotonic`."""
    if processes == 1:
        for variant in trials:
            if time.monotonic() > end:
                return
            yield variant, run(*variant)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        left = iter(trials)
        running = {pool.submit(run, *each): each for each in islice(left, 2 * processes)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
                following = None if time.monotonic() > end else next(left, None)
                if following is not None:
                    running[pool.submit(run, *following)] = following


if __name__ == "__main__":
    sys.exit(main())
