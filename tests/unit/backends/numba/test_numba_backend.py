"""The numba backend computes what the reference backend computes, to float32's rounding."""

from __future__ import annotations

import importlib
import math
import pkgutil
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numba.core.caching import FunctionCache
from numba.core.runtime import _nrt_python, rtsys

import dptrain
import dptrain.backends.numba
from dptrain.api import make_replica
from dptrain.backends.numba.backend import NumbaBackend
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.errors import UserError
from dptrain.network import (
    AveragePool2d,
    Constant,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    Sigmoid,
    SigmoidBinaryCrossEntropy,
    SumPool2d,
)
from dptrain.philox import dropout_keep
from dptrain.plan import SGD, Adam, AdamW, Optimizer, make_plan

EPSILON = float(np.finfo(np.float32).eps)
HEAD = [Flatten(), Dense(5)]

NETWORKS = {
    network.name: network
    for network in (
        Network((3, 13, 11), [Conv2d(7), ReLU(), MaxPool2d(2), *HEAD], name="conv-relu-pool"),
        Network(
            (2, 11, 13),
            [
                Conv2d(4, (3, 5), padding="valid"), ReLU(), MaxPool2d(3, 2, "same"),
                Conv2d(17, 2, padding="same"), ReLU(), MaxPool2d((2, 1), (1, 2), "same"), *HEAD,
            ],
            name="overlapping pools, even filters",
        ),
        Network(
            (1, 9, 7),
            [
                Conv2d(3, (5, 3), stride=(2, 3), padding="same"), ReLU(),
                Conv2d(16, 3, padding="full", bias_init=Constant(0.1)), ReLU(),
                Conv2d(33, 1), ReLU(), *HEAD,
            ],
            name="strides and paddings",
        ),
        Network(
            (4, 6, 5),
            [Conv2d(5, (4, 3), stride=2, padding=2), Conv2d(2, 3, padding=3), Sigmoid(), *HEAD],
            name="bare convolutions",
        ),
        Network(
            (5, 8, 9),
            [
                ReLU(), MaxPool2d(3, 2), LocalResponseNorm(2), Conv2d(6), MaxPool2d(2, 1, "same"),
                ReLU(), AveragePool2d(2), Conv2d(3), SumPool2d((1, 2), 1), Flatten(), Sigmoid(),
                Dense(5), Sigmoid(),
            ],
            name="everything alone",
        ),
        Network(
            (3, 17, 16),
            [Conv2d(2), ReLU(), MaxPool2d(16), AveragePool2d(3, 2, "same"), *HEAD],
            name="a window too large for the mask",
        ),
        Network(
            (6, 5, 5),
            [
                LocalResponseNorm(), Conv2d(4, bias_init=Constant(0.5)),
                LocalResponseNorm(1, 2.0, 0.3, 0.6), SumPool2d(3, 2, "same"), *HEAD,
            ],
            name="response norms",
        ),
        Network(
            (3, 7, 5),
            [
                Conv2d(5), ReLU(), Dropout(0.3), MaxPool2d(2), Dropout(0.5), Flatten(),
                Dense(13), ReLU(), Dropout(0.4), Dense(9), Dropout(0.2), ReLU(), Dense(5),
            ],
            name="dropout",
        ),
        Network(
            (3, 7, 5),
            [
                Dropout(0.2), Conv2d(5), Sigmoid(), Flatten(), Dropout(0.3), Dense(8), Dropout(0.5),
                Dropout(0.1), Dense(7), Sigmoid(), Dropout(0.4), Dense(6), ReLU(), Dense(5),
                Dropout(0.2),
            ],
            name="dropout where it may and may not change what is there",
        ),
        Network((1, 1, 1), [Conv2d(1), ReLU(), MaxPool2d(1), Flatten(), Dense(2)], name="a pixel"),
        Network(
            (7,),
            [Dense(19, weight_decay=0.1), ReLU(), Dense(3, weight_decay=0.01), ReLU(), Dense(4)],
            SigmoidBinaryCrossEntropy(),
            name="binary",
        ),
        Network(
            (1, 6, 6),
            [Conv2d(3), ReLU(), *HEAD, ReLU(), Dense(2), ReLU()],
            MeanSquaredError(),
            name="values",
        ),
        Network((4, 3, 2), [Flatten(), ReLU(), Dense(3, weight_decay=0.5)], name="a ReLU first"),
    )
}  # fmt: skip


@pytest.fixture(params=NETWORKS.values(), ids=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    """Each of `NETWORKS`."""
    value: Network = request.param
    return value


def batch(network: Network, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Float32 samples and targets that fit."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, *network.input_shape), dtype=np.float32)
    outputs = network.num_outputs
    targets = {
        "classes": lambda: rng.integers(0, outputs, n),
        "binary": lambda: rng.integers(0, 2, (n, outputs)),
        "values": lambda: rng.standard_normal((n, outputs), dtype=np.float32),
    }
    return x, targets[network.loss.targets]()


def rounding(network: Network, n: int) -> float:
    """How far float32 may be from float64, as a part of the largest value.

    Rounding errors of a sum of T terms grow like sqrt(T); a gradient has passed every layer
    twice, and its own sum runs over every sample and pixel. 4 is for what is not a sum.
    """
    terms = [4 + math.sqrt(p.fan_in) for p in network.parameters] + [4.0] * len(network.nodes)
    largest = max(math.prod(node.output_maps[1:]) for node in network.nodes)
    return EPSILON * (2 * sum(terms) + math.sqrt(n * largest))


def assert_close(got: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Equal to `tolerance` of the largest value."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    if not expected.size:
        return
    scale = np.abs(expected).max()
    assert np.abs(got - expected).max() <= tolerance * scale, what


def pair(network: Network, **options: Any) -> tuple[Replica, Replica]:
    """The same network on the numba and on the reference backend."""
    threads = options.pop("threads", 1)
    return (
        make_replica(network, "numba", threads=threads, **options),
        make_replica(network, "reference", **options),
    )


def test_same_initial_parameters(network: Network) -> None:
    ours, reference = pair(network, batch_size=2, seed=3)
    assert list(ours.parameters) == list(reference.parameters)
    for name, value in reference.parameters.items():
        np.testing.assert_array_equal(ours.parameters[name], value.astype(np.float32))


@pytest.mark.parametrize("n", [1, 5])
def test_loss_and_gradients(network: Network, n: int) -> None:
    ours, reference = pair(network, batch_size=7, seed=1)
    x, y = batch(network, n)
    options = {"samples": np.arange(n) * 1000 + 3, "step": 11, "global_count": 2 * n}
    tolerance = rounding(network, n)
    assert_close(
        ours.forward_backward(x, y, **options),
        reference.forward_backward(x, y, **options),
        tolerance,
    )
    assert ours.loss_sums()[1] == reference.loss_sums()[1]
    assert_close(ours.output(), reference.output(), tolerance)
    for name, value in reference.gradients.items():
        assert_close(ours.gradients[name], value, tolerance, name)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(),
        SGD(momentum=0.9),
        SGD(momentum=0.9, nesterov=True),
        Adam(),
        Adam(beta1=0.8, beta2=0.95, epsilon=1e-3),
        AdamW(),
    ],
    ids=["sgd", "momentum", "nesterov", "adam", "adam-other", "adamw"],
)
@pytest.mark.parametrize("name", ["binary", "conv-relu-pool"])
def test_updates(name: str, optimizer: Optimizer) -> None:
    """Both get the same gradients, so that only the update differs."""
    network = NETWORKS[name]
    ours, reference = pair(network, batch_size=4, optimizer=optimizer)
    rng = np.random.default_rng(0)
    for _ in range(3):
        for parameter in network.parameters:
            value = rng.standard_normal(parameter.shape, dtype=np.float32)
            ours.gradients[parameter.name] = reference.gradients[parameter.name] = value
        ours.update(0.01)
        reference.update(0.01)
    # Each step rounds w, both state arrays and some five products.
    tolerance = 3 * 8 * EPSILON
    for key, value in reference.parameters.items():
        assert_close(ours.parameters[key], value, tolerance, key)
    for state, arrays in reference.state.items():
        for key, value in arrays.items():
            assert_close(ours.state[state][key], value, tolerance, f"{state} {key}")


def test_training_follows_the_reference(network: Network) -> None:
    """Several steps, each of another size: nothing of a step is left over in the next."""
    ours, reference = pair(network, batch_size=6, optimizer=SGD(momentum=0.5))
    for step, n in enumerate((6, 2, 5, 1)):
        x, y = batch(network, n, seed=step)
        got = ours.forward_backward(x, y, step=step)
        expected = reference.forward_backward(x, y, step=step)
        # What one step rounds, the next ones carry on; the rate keeps them from growing it.
        tolerance = (step + 1) * 2 * rounding(network, 6)
        assert_close(got, expected, tolerance)
        ours.update(0.01)
        reference.update(0.01)
    for name, value in reference.parameters.items():
        assert_close(ours.parameters[name], value, tolerance, name)


def test_threads_change_only_rounding(network: Network) -> None:
    x, y = batch(network, 5)
    one, many = (make_replica(network, "numba", batch_size=6, threads=t) for t in (1, 3))
    tolerance = rounding(network, 5)
    assert_close(many.forward_backward(x, y), one.forward_backward(x, y), tolerance)
    for name, value in one.gradients.items():
        assert_close(many.gradients[name], value, tolerance, name)
    first = many.flat_gradients.copy()
    many.forward_backward(x, y)
    np.testing.assert_array_equal(many.flat_gradients, first)


def test_no_samples(network: Network) -> None:
    replica = make_replica(network, "numba", batch_size=3, threads=2)
    replica.forward_backward(*batch(network, 3))
    assert replica.forward_backward(*batch(network, 0), global_count=3) == 0.0
    assert replica.loss_sums()[1] == 0.0
    assert not replica.flat_gradients.any()
    assert replica.forward(batch(network, 0)[0]).shape == (0, network.num_outputs)


def test_inference_needs_no_training(network: Network) -> None:
    x, y = batch(network, 5)
    ours, reference = pair(network, batch_size=4, training=False)
    trained = make_replica(network, "numba", batch_size=4)
    tolerance = rounding(network, 4)
    for replica in (ours, trained):
        assert_close(replica.forward(x), reference.forward(x), tolerance)
        loss, correct = replica.evaluate(x, y)
        expected, expected_correct = reference.evaluate(x, y)
        assert_close(loss, expected, tolerance)
        assert correct == expected_correct


@pytest.mark.parametrize("where", ["input", "parameter"])
def test_not_a_number_reaches_the_loss(network: Network, where: str) -> None:
    x, y = batch(network, 4)
    replica = make_replica(network, "numba", batch_size=4, seed=5)
    assert math.isfinite(replica.forward_backward(x, y))
    if where == "input":
        x[2] = np.nan
        assert math.isnan(replica.forward_backward(x, y))
        assert replica.first_non_finite() == "the input"
        return
    for name, value in replica.parameters.items():
        replica.parameters[name] = np.full_like(value, np.nan)
        assert math.isnan(replica.forward_backward(x, y)), name
        assert replica.first_non_finite() == f"parameter {name}"
        replica.parameters[name] = value


def test_finite_values_are_all_finite(network: Network) -> None:
    """Scratch memory holds bytes of all kinds; they are not values."""
    replica = make_replica(network, "numba", batch_size=4)
    replica.forward_backward(*batch(network, 4))
    assert replica.first_non_finite() is None


@pytest.mark.parametrize("shape", [(3, 5, 7), (11,), (4, 1, 1), (1, 6, 3)])
@pytest.mark.parametrize("alone", [True, False])
def test_dropout_masks(shape: tuple[int, ...], alone: bool) -> None:
    """The mask is the one that `dptrain.philox` draws, with large numbers everywhere."""
    size, seed, step = math.prod(shape), 2**40 + 17, 2**31 + 5
    first: list[Layer] = [Flatten(), Dense(size), ReLU()]
    layers = [Dropout(0.37), Flatten()] if alone else [*first, Dropout(0.37)]
    network = Network(shape, layers, MeanSquaredError())
    replica = make_replica(network, "numba", batch_size=3, seed=seed)
    if not alone:
        replica.parameters["dense1.weight"] = np.eye(size)
    samples = np.array([0, 7, 2**33 + 1])
    x = np.ones((3, *shape), np.float32)
    replica.forward_backward(x, x.reshape(3, -1), samples=samples, step=step)
    index = 0 if alone else 3
    keep = dropout_keep(0.37, size, seed=seed, step=step, layer=index, samples=samples)
    channels, height, width = shape if alone and len(shape) == 3 else (size, 1, 1)
    expected = keep.reshape(3, height, width, channels).transpose(0, 3, 1, 2).reshape(3, size)
    np.testing.assert_array_equal(replica.output() > 0, expected)
    kept = replica.output()[expected]
    np.testing.assert_allclose(kept, 1 / (1 - 0.37), rtol=2 * EPSILON)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", ">f4"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_input_of_any_kind(dtype: str, channels: int) -> None:
    """Whatever the dtype and strides, what is loaded are the values."""
    network = Network((channels, 5, 3), [Flatten()], MeanSquaredError())
    replica = make_replica(network, "numba", batch_size=4)
    x = np.random.default_rng(0).integers(0, 200, (8, channels, 5, 3)).astype(dtype)
    frozen = x[:4].copy()
    frozen.flags.writeable = False
    for images in (x[:4], x[::2], frozen):
        np.testing.assert_array_equal(replica.forward(images), images.reshape(len(images), -1))


@pytest.mark.parametrize("training", [True, False])
def test_inference_after_other_calls(network: Network, training: bool) -> None:
    """One native call computes what single stages compute, after other calls as well."""
    replica = make_replica(network, "numba", batch_size=4, training=training)
    x, y = batch(network, 6)
    for samples in (x[:4], x[1:4], x[4:4], x[4:], x):
        expected = Replica.forward(replica, samples)
        replica.evaluate(x, y)
        for _ in range(2):
            np.testing.assert_array_equal(replica.forward(samples), expected)
        if training:
            replica.forward_backward(x[:4], y[:4])
    with pytest.raises(UserError, match="this network expects"):
        replica.forward(np.zeros((2, 1, 2, 3), np.float32))


def test_fusions() -> None:
    layers = [Conv2d(2), ReLU(), MaxPool2d(2), Conv2d(3), ReLU(), Flatten(), Dense(4), ReLU()]
    network = Network((1, 4, 4), [*layers, Dropout(0.5), Dense(3), ReLU()])
    plan = make_plan(network, NumbaBackend(), 2, precision="fp32")
    assert [group.name for group in plan.groups] == [
        "conv1+relu1+pool1", "conv2+relu2", "flatten1", "dense1+relu3+dropout1", "dense2+relu4"
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "threads"), [("model0", 2), ("model2", 1)])
def test_a_steady_step_allocates_nothing(name: str, threads: int) -> None:
    """Neither kernels nor what calls them: nothing for a sample, an array or a stage."""
    network = dptrain.get_network(name)
    replica = make_replica(
        network, "numba", batch_size=8, threads=threads, optimizer=SGD(momentum=0.9)
    )
    x, y = batch(network, 8)
    loaded = Batch.of(x, y)

    def steps(count: int) -> None:
        for _ in range(count):
            replica.load(loaded)
            replica.run(lambda stage: None)
            replica.update(0.01)

    _nrt_python.memsys_enable_stats()
    steps(3)
    before = rtsys.get_allocation_stats()
    steps(10)
    assert rtsys.get_allocation_stats() == before
    tracemalloc.start()
    steps(3)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    steps(50)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - held < 800  # some objects of the interpreter's own, not fifty of 16 bytes
    assert peak - held < 2_000  # views and numbers: an array of any stage is larger


def test_binding_takes_no_memory_for_a_large_plan() -> None:
    """Hundreds of megabytes of parameters are planned, none of them is written."""
    network = Network((50,), [Dense(8192), ReLU(), Dense(8192), ReLU(), Dense(1)],
                      MeanSquaredError())  # fmt: skip
    backend = NumbaBackend()
    plan = make_plan(network, backend, 2, precision="fp32")
    resident = _resident_bytes()
    replica = backend.allocate(plan, seed=0)
    assert _resident_bytes() - resident < plan.memory["parameters"] / 4
    assert replica.plan is plan


def _resident_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_kernels_use_the_backend_s_cache() -> None:
    """Numba's own cache fails at import where it cannot write, and trusts damaged files."""
    modules = [
        importlib.import_module(f"dptrain.backends.numba.{module.name}")
        for module in pkgutil.iter_modules(dptrain.backends.numba.__path__)
    ]
    caches = {
        name: type(getattr(value, "dispatcher", value)._cache)
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "py_func")
    }
    assert len(caches) > 30
    assert FunctionCache not in caches.values(), caches


@pytest.mark.parametrize("rule", [SGD(momentum=0.9), Adam()], ids=["sgd", "adam"])
def test_state_without_gradient_ends_at_zero_and_never_denormal(rule: Optimizer) -> None:
    replica = make_replica(Network((5,), [Dense(3)]), "numba", 2, optimizer=rule)
    smallest = np.finfo(np.float32).tiny
    replica.flat_gradients[:] = 1.0
    replica.update(0.01)
    replica.flat_gradients[:] = 0.0
    for _ in range(1200):
        replica.update(0.01)
        for flat in replica.flat_state.values():
            assert not ((flat != 0) & (np.abs(flat) < smallest)).any()
    replica.flat_gradients[0] = np.nan
    replica.update(0.01)
    assert np.isnan(replica.flat_parameters[0])
