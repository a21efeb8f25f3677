"""Graphs with normalisations and further activations against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dptrain
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network import (
    GELU,
    Add,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Flatten,
    GlobalAveragePool2d,
    LeakyReLU,
    MaxPool2d,
    Network,
    NodeSpec,
    ReLU,
    SiLU,
    Tanh,
)
from dptrain.plan import MicroShards, make_plan
from tests.lazy import LazyModule

torch = LazyModule("torch")
functional = LazyModule("torch.nn.functional")

SAMPLES = 7


def conv(filters: int, kernel: int, stride: int = 1, **settings: Any) -> Conv2d:
    """A convolution without bias, as before a normalisation."""
    return Conv2d(
        filters, kernel, stride=stride, padding=kernel // 2, bias=False, rounding="floor",
        **settings,
    )  # fmt: skip


RESIDUAL = Network.from_nodes(
    (3, 13, 11),
    [
        NodeSpec(conv(16, 3), "stem", ("input",)),
        NodeSpec(BatchNorm2d(), "norm0", ("stem",)),
        NodeSpec(ReLU(), "act0", ("norm0",)),
        NodeSpec(conv(16, 3), "conv1", ("act0",)),
        NodeSpec(BatchNorm2d(momentum=0.3), "norm1", ("conv1",)),
        NodeSpec(ReLU(), "act1", ("norm1",)),
        NodeSpec(conv(16, 3), "conv2", ("act1",)),
        NodeSpec(BatchNorm2d(epsilon=0.1), "norm2", ("conv2",)),
        NodeSpec(Add(), "sum1", ("act0", "norm2")),
        NodeSpec(ReLU(), "act2", ("sum1",)),
        NodeSpec(conv(20, 3, 2), "conv3", ("act2",)),
        NodeSpec(BatchNorm2d(), "norm3", ("conv3",)),
        NodeSpec(conv(20, 1, 2), "short", ("act2",)),
        NodeSpec(BatchNorm2d(), "norm4", ("short",)),
        NodeSpec(Add(), "sum2", ("norm3", "norm4")),
        NodeSpec(GlobalAveragePool2d(), "mean", ("sum2",)),
        NodeSpec(Flatten(), "flat", ("mean",)),
        NodeSpec(Dense(5), "dense", ("flat",)),
    ],
    name="residual",
)
BRANCHES = Network.from_nodes(
    (2, 9, 7),
    [
        NodeSpec(conv(5, 3), "stem", ("input",)),
        NodeSpec(LeakyReLU(0.2), "leaky", ("stem",)),
        NodeSpec(Conv2d(4, 1), "a", ("leaky",)),
        NodeSpec(Tanh(), "tanh", ("a",)),
        NodeSpec(Conv2d(6, 3), "b", ("leaky",)),
        NodeSpec(GELU(), "gelu", ("b",)),
        NodeSpec(Concatenate(num_inputs=3), "all", ("tanh", "leaky", "gelu")),
        NodeSpec(BatchNorm2d(), "norm", ("all",)),
        NodeSpec(SiLU(), "silu", ("norm",)),
        NodeSpec(Add(num_inputs=3), "sum", ("silu", "all", "norm")),
        NodeSpec(MaxPool2d(3, 2, padding=1), "pool", ("sum",)),
        NodeSpec(Flatten(), "flat", ("pool",)),
        NodeSpec(Dense(5), "dense", ("flat",)),
    ],
    name="branches",
)
NETWORKS = [RESIDUAL, BRANCHES]


@pytest.fixture(params=NETWORKS, ids=lambda network: network.name)
def network(request: pytest.FixtureRequest) -> Network:
    """A network."""
    return request.param


def minibatch(network: Network, n: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, whose channels have means far from 0, and labels."""
    rng = np.random.default_rng(3)
    x = (
        rng.normal(size=(n, *network.input_shape))
        + np.arange(1, 1 + network.input_shape[0])[:, None, None]
    )
    return x.astype(np.float32), rng.integers(0, network.num_outputs, n).astype(np.int32)


def apply(layer: Any, inputs: list[torch.Tensor], p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Apply a layer by PyTorch, to inputs in float64; `p` has its parameters and statistics."""
    x = inputs[0]
    match layer:
        case Conv2d():
            shape = tuple(x.shape[1:])
            (top, bottom), (left, right) = layer.pads(shape)
            padded = functional.pad(x, (left, right, top, bottom))
            y = functional.conv2d(padded, p["weight"], p.get("bias"), layer.strides)
            _, height, width = layer.output_shape(shape)
            return y[:, :, :height, :width]
        case BatchNorm2d():
            return functional.batch_norm(
                x, p["running_mean"], p["running_var"], p["weight"], p["bias"],
                "training" in p, layer.momentum, layer.epsilon,
            )  # fmt: skip
        case Add():
            return sum(inputs[1:], x)
        case Concatenate():
            return torch.cat(inputs, 1)
        case GlobalAveragePool2d():
            return x.mean((2, 3), keepdim=True)
        case MaxPool2d():
            return functional.max_pool2d(x, layer.windows, layer.strides, layer.padding)
        case Dense():
            return functional.linear(x, p["weight"], p["bias"])
        case Flatten():
            return x.flatten(1)
        case LeakyReLU():
            return functional.leaky_relu(x, layer.slope)
    functions = {ReLU: torch.relu, Tanh: torch.tanh, GELU: functional.gelu, SiLU: functional.silu}
    return functions[type(layer)](x)


def expected(
    network: Network, replica: Replica, x: np.ndarray, y: np.ndarray, training: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return parameters with gradients, statistics and the outputs of PyTorch."""
    parameters = {
        p.name: torch.from_numpy(np.array(replica.parameters[p.name], np.float64))
        for p in network.parameters
    }
    for value in parameters.values():
        value.requires_grad_()
    statistics = {
        s.name: torch.from_numpy(np.array(replica.statistics[s.name], np.float64))
        for node in network.nodes
        for s in node.statistics
    }
    tensors = {"input": torch.from_numpy(x).double()}
    for node in network.nodes:
        arrays = {**parameters, **statistics}
        own = {k.rpartition(".")[2]: v for k, v in arrays.items() if k.startswith(f"{node.name}.")}
        own |= {"training": torch.ones(1)} if training else {}
        tensors[node.name] = apply(node.layer, [tensors[name] for name in node.inputs], own)
    output = tensors[network.nodes[-1].name]
    functional.cross_entropy(output, torch.from_numpy(y).long()).backward()
    return parameters, statistics, output.detach()


def make(network: Network, n: int = SAMPLES, **settings: Any) -> Replica:
    """Return a replica whose normalisations have weights and biases other than 1 and 0."""
    backend = load_backend("numba")
    replica = backend.make_replica(make_plan(network, backend, n, **settings))
    rng = np.random.default_rng(4)
    for node in network.nodes:
        if isinstance(node.layer, BatchNorm2d):
            for p in node.parameters:
                replica.parameters[p.name] = rng.normal(size=p.shape).astype(np.float32)
    return replica


def assert_close(actual: np.ndarray, wanted: torch.Tensor, what: str) -> None:
    numbers = wanted.detach().numpy()
    bound = 3e-5 * (np.abs(numbers).max() + 1e-3)
    assert np.abs(actual - numbers).max() <= bound, what


@pytest.mark.parametrize("precision", ["fp32", "fp32-direct"])
def test_a_step_equals_pytorch(network: Network, precision: str) -> None:
    replica, (x, y) = make(network, precision=precision), minibatch(network)
    parameters, statistics, _ = expected(network, replica, x, y)
    replica.forward_backward(x, y)
    for name, value in parameters.items():
        assert value.grad is not None
        assert_close(replica.gradients[name], value.grad, name)
    for name, value in statistics.items():
        assert_close(replica.statistics[name], value, name)


def test_a_part_of_a_batch_equals_pytorch(network: Network) -> None:
    replica, (x, y) = make(network, n=SAMPLES + 3), minibatch(network)
    parameters, _, _ = expected(network, replica, x, y)
    replica.forward_backward(x, y)
    for name, value in parameters.items():
        assert value.grad is not None
        assert_close(replica.gradients[name], value.grad, name)


def test_outputs_use_running_statistics_outside_training(network: Network) -> None:
    replica, (x, y) = make(network), minibatch(network)
    replica.forward_backward(x, y)
    inference = dptrain.make_replica(network, "numba", 4, training=False)
    for name in (p.name for p in network.parameters):
        inference.parameters[name] = replica.parameters[name]
    for name in replica.statistics:
        inference.statistics[name] = replica.statistics[name]
    _, _, wanted = expected(network, replica, x, y, training=False)
    assert_close(replica.forward(x), wanted, "training plan")
    assert_close(inference.forward(x), wanted, "inference plan")
    for name in replica.statistics:
        changed = replica.statistics[name] + 0.5
        replica.statistics[name] = inference.statistics[name] = changed
    _, _, wanted = expected(network, replica, x, y, training=False)
    assert_close(inference.forward(x), wanted, "after a change of the statistics")


def test_layers_that_are_not_fused_give_the_same_result(network: Network) -> None:
    x, y = minibatch(network)
    fused, single = make(network), make(network, fused=False)
    losses = [replica.forward_backward(x, y) for replica in (fused, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name in fused.gradients:
        assert_close(
            fused.gradients[name], torch.from_numpy(np.array(single.gradients[name])), name
        )


@pytest.mark.parametrize("shards", [0, 3])
def test_bits_do_not_depend_on_threads(network: Network, shards: int) -> None:
    x, y = minibatch(network)
    settings = {"micro_shards": MicroShards.of_rank(shards)} if shards else {}
    results = []
    for threads in (1, 3):
        replica = make(network, threads=threads, **settings)
        loss = replica.forward_backward(x, y)
        statistics = {name: replica.statistics[name].tobytes() for name in replica.statistics}
        gradients = replica.gradients["norm.bias" if network is BRANCHES else "norm4.bias"]
        results.append((loss, statistics, gradients.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("timed", [False, True])
def test_a_sum_over_ranks_splits_the_program(network: Network, timed: bool) -> None:
    """Two ranks with the same samples have the statistics of one, and count twice as many."""
    x, y = minibatch(network)
    alone, replica = make(network), make(network)
    alone.forward_backward(x, y)
    counts = []

    def add(parts: np.ndarray, totals: np.ndarray) -> None:
        totals[:] = 2 * parts.sum(axis=0)
        counts.append(totals[0])

    replica.sum_statistics = add
    if timed:
        replica.load(Batch.of(x, y))
        ends = replica.run_timed()()
        assert len(ends) == len(replica.stages)
        assert ends == sorted(ends)
    else:
        replica.forward_backward(x, y)
    stages = [s for s, _ in replica.stages if "statistics" in s.phase.value]
    assert len(counts) == len(stages)
    for name in alone.gradients:
        assert_close(
            replica.gradients[name], torch.from_numpy(np.array(alone.gradients[name])), name
        )
    mean = next(name for name in alone.statistics if name.endswith("running_mean"))
    assert_close(replica.statistics[mean], torch.from_numpy(np.array(alone.statistics[mean])), mean)
