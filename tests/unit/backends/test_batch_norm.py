"""Batch normalisation in training, in evaluation and over ranks, in every backend that has it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain.api
from dptrain.backends import load_backend
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.replica import Replica, SumStatistics
from dptrain.network import (
    Add,
    BatchNorm2d,
    Conv2d,
    Dense,
    Flatten,
    GlobalAveragePool2d,
    GroupNorm,
    Layer,
    LayerNorm,
    MeanSquaredError,
    Network,
    NodeSpec,
    ReLU,
)
from dptrain.plan import MicroShards
from dptrain.plan.shards import add_in_order, rank_contributions
from tests.lazy import LazyModule
from tests.tiers import tiered
from tests.unit.backends import cases, pytorch_reference
from tests.unit.backends.cases import Case, spread
from tests.unit.backends.cuda.gemm_tile import gather_first_layers, use_one_gemm_tile
from tests.unit.backends.graph_cases import GRAPH_CASES

torch = LazyModule("torch")

HOST_BACKENDS = sorted(
    {
        backend
        for backend, _ in cases.variants("batchnorm")
        if not isinstance(load_backend(backend), CudaBackend)
    }
)


def _with_tiers(*features: str) -> list[Any]:
    """Return the variants with `features`; emulated GPUs belong to the parts."""
    variants = cases.variants(*features)
    return tiered(variants, [variant for variant in variants if variant[0] in HOST_BACKENDS])


every_variant = pytest.mark.parametrize(("backend", "precision"), _with_tiers("batchnorm"))


@pytest.fixture(autouse=True)
def one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_gemm_tile(monkeypatch)
    gather_first_layers(monkeypatch)


def _exact_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Numbers in [−2, 2) of 6 bits, which no precision rounds."""
    return rng.integers(-64, 64, shape) / 32.0


def _normalize(layer: Layer, shape: tuple[int, ...]) -> Network:
    return Network(shape, [layer, Flatten()], MeanSquaredError())


@every_variant
def test_running_statistics_equal_pytorch_over_several_steps(backend: str, precision: str) -> None:
    """Minibatches of several sizes, one sample among them, and an evaluation between."""
    rng = np.random.default_rng(2)
    layer = BatchNorm2d(momentum=0.3, epsilon=1e-3)
    replica = dptrain.api.make_replica(
        _normalize(layer, (3, 5, 4)), backend, 5, precision=precision
    )
    theirs = torch.nn.BatchNorm2d(3, eps=layer.epsilon, momentum=layer.momentum).double()
    for n in (5, 3, 1, 4):
        x = _exact_bits(rng, (n, 3, 5, 4))
        replica.forward(x)
        replica.forward_backward(x, np.zeros((n, 60)))
        theirs(torch.tensor(x))
        tolerance = 8.0 * float(np.finfo(replica.plan.dtype).eps)
        for name in ("running_mean", "running_var"):
            actual = replica.statistics[f"batchnorm1.{name}"]
            np.testing.assert_allclose(actual, getattr(theirs, name), tolerance, tolerance)


BATCH_NORM_CASES = [
    case
    for case in (*cases.CASES, *GRAPH_CASES)
    if "batchnorm" in case.features and "dropout" not in case.name
]


def _evaluations() -> Iterator[Any]:
    """Every case with each backend in its first precision, with one of the plans, and others once.

    The planner is the same for all backends and precisions, so one computes both plans.
    """
    first = dict(reversed(cases.variants()))
    for number, case in enumerate(BATCH_NORM_CASES):
        for backend, precision in cases.variants():
            is_first = first[backend] == precision
            if not is_first and case.name != "stack: conv batchnorm relu pool":
                continue
            plans = (True, False) if backend == "reference" else (number % 2 == 0,)
            for training in plans:
                plan = "training" if training else "inference"
                name = f"{case.name}-{backend}-{precision}-{plan}"
                marks = [] if backend in HOST_BACKENDS else pytest.mark.more
                yield pytest.param(case, backend, precision, training, id=name, marks=marks)


@pytest.mark.parametrize(("case", "backend", "precision", "training"), list(_evaluations()))
def test_evaluation_uses_running_statistics(
    case: Case, backend: str, precision: str, training: bool
) -> None:
    replica = dptrain.api.make_replica(
        case.network, backend, case.batch_size, precision=precision, training=training
    )
    for name, value in case.parameters().items():
        replica.parameters[name] = value
    rng = np.random.default_rng(8)
    for statistic in case.network.statistics:
        value = spread(rng, statistic.shape)
        replica.statistics[statistic.name] = (
            0.5 + np.abs(value) if "var" in statistic.name else value
        )
    x, y = case.data()
    actual = replica.forward(x)
    parameters, statistics = dict(replica.parameters), dict(replica.statistics)
    exact = pytorch_reference.evaluate(case.network, parameters, statistics, x)
    bound = pytorch_reference.bounds(
        case.network, parameters, x, y, replica.plan.dtype, precision, statistics
    )
    error = np.abs(np.asarray(actual, np.float64) - exact)
    assert (error <= bound.output).all()
    for name, value in statistics.items():
        np.testing.assert_array_equal(replica.statistics[name], value)


FAR_FROM_ZERO = [
    ("batchnorm", BatchNorm2d(momentum=1.0)),
    ("groupnorm", GroupNorm(groups=2)),
    ("layernorm", LayerNorm()),
]


@pytest.mark.parametrize(
    ("layer", "backend", "precision"),
    [
        pytest.param(
            layer,
            backend,
            precision,
            id=f"{kind}-{backend}-{precision}",
            marks=[] if backend in HOST_BACKENDS else pytest.mark.more,
        )
        for kind, layer in FAR_FROM_ZERO
        for backend, precision in cases.variants(kind)
        # A bfloat16 near 10,000 has steps of 64.
        if load_backend(backend).precision(precision).activations != "uint16"
    ],
)
def test_variances_far_from_zero_are_accurate(layer: Layer, backend: str, precision: str) -> None:
    """Mean 1e4 and standard deviation 1e-1: squares in float32 would lose the variance.

    The rounding of a mean to float32, 2^-11, is 5e-3 standard deviations; a sum over few elements
    has several of them.
    """
    rng = np.random.default_rng(4)
    shape = (6, 8, 7, 5)
    x = np.float64(np.float32(1e4 + 0.1 * rng.standard_normal(shape)))
    network = _normalize(layer, shape[1:])
    replica = dptrain.api.make_replica(network, backend, 6, precision=precision)
    replica.forward_backward(x, np.zeros((6, 280)))
    exact = pytorch_reference.compute(network, dict(replica.parameters), x, np.zeros((6, 280)))
    np.testing.assert_allclose(replica.output(), exact.output, rtol=0.01, atol=0.03)
    if isinstance(layer, BatchNorm2d):
        expected = x.var(axis=(0, 2, 3), ddof=1)
        np.testing.assert_allclose(
            replica.statistics["batchnorm1.running_var"], expected, rtol=1e-3
        )


@every_variant
def test_one_element_per_channel_has_no_variance(backend: str, precision: str) -> None:
    """Y is the bias, the gradient of x is 0, and the running variance receives a 0."""
    case = cases.behind_maps("one element", (1, 3, 1, 1), [BatchNorm2d(momentum=0.25)])
    replica = dptrain.api.make_replica(case.network, backend, 1, precision=precision)
    replica.parameters["conv1.weight"] = np.array([0.5, -1.0, 2.0]).reshape(3, 1, 1, 1)
    replica.parameters["batchnorm1.bias"] = np.array([1.0, -0.5, 0.0])
    x, _ = case.data()
    replica.forward_backward(x, np.zeros((1, 3)))
    np.testing.assert_array_equal(replica.output(), [[1.0, -0.5, 0.0]])
    np.testing.assert_allclose(replica.gradients["conv1.weight"], 0.0, atol=1e-6)
    np.testing.assert_array_equal(replica.gradients["batchnorm1.weight"], np.zeros(3))
    np.testing.assert_allclose(replica.statistics["batchnorm1.running_var"], 0.75)
    np.testing.assert_allclose(replica.statistics["batchnorm1.running_mean"], [0.125, -0.25, 0.5])


NORM = BatchNorm2d(epsilon=0.5, momentum=0.2)
RESIDUAL = Network.from_nodes(
    (3, 6, 5),
    [
        NodeSpec(Conv2d(4, 3, bias=False), "a"), NodeSpec(NORM, "na"), NodeSpec(ReLU(), "ra"),
        NodeSpec(Conv2d(4, 3, bias=False), "b"), NodeSpec(NORM, "nb"),
        NodeSpec(Add(), "sum", ("nb", "ra")), NodeSpec(ReLU()),
        NodeSpec(GlobalAveragePool2d()), NodeSpec(Flatten()), NodeSpec(Dense(3)),
    ],
)  # fmt: skip
"""A residual block with two normalisations."""

residual_variants = pytest.mark.parametrize(
    ("backend", "precision"),
    _with_tiers("batchnorm", "graph", "no bias", "globalavgpool"),
)


def _residual_batch(n: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(6)
    return _exact_bits(rng, (n, 3, 6, 5)), rng.integers(0, 3, n)


@residual_variants
def test_an_empty_minibatch_changes_nothing(backend: str, precision: str) -> None:
    x, y = _residual_batch(4)
    replica = dptrain.api.make_replica(RESIDUAL, backend, 4, precision=precision)
    replica.forward_backward(x, y)
    before = dict(replica.statistics)
    assert replica.forward_backward(x[:0], y[:0], global_count=1) == 0.0
    for name, gradient in replica.gradients.items():
        assert (gradient == 0.0).all(), name
    for name, value in before.items():
        np.testing.assert_array_equal(replica.statistics[name], value)


@residual_variants
def test_a_smaller_batch_ignores_the_rest_of_the_memory(backend: str, precision: str) -> None:
    x, y = _residual_batch(5)
    large = dptrain.api.make_replica(RESIDUAL, backend, 5, precision=precision)
    small = dptrain.api.make_replica(RESIDUAL, backend, 2, precision=precision)
    large.forward_backward(x, y)
    large.forward_backward(x[:2], y[:2])
    small.forward_backward(x[:2], y[:2])
    bounds = pytorch_reference.bounds(
        RESIDUAL, dict(small.parameters), x[:2], y[:2], small.plan.dtype, precision
    )
    for name, gradient in small.gradients.items():
        error = np.abs(large.gradients[name] - gradient)
        assert (error <= 2.0 * bounds.gradients[name]).all(), name


@residual_variants
def test_forward_can_run_again_to_find_what_is_not_finite(backend: str, precision: str) -> None:
    """It uses the statistics of the step and does not move the running ones."""
    x, y = _residual_batch(4)
    replica = dptrain.api.make_replica(RESIDUAL, backend, 4, precision=precision)
    replica.forward_backward(x, y)
    output, statistics = replica.output(), dict(replica.statistics)
    assert replica.first_non_finite() is None
    np.testing.assert_array_equal(replica.output(), output)
    for name, value in statistics.items():
        np.testing.assert_array_equal(replica.statistics[name], value)
    replica.parameters["nb.bias"] = np.array([0.0, np.nan, 0.0, 0.0])
    assert replica.first_non_finite() == "parameter nb.bias"


# Ranks, as threads that wait for each other in each sum.


class _Ranks:
    """The sum of statistics over ranks, in the order of micro-shards or of ranks."""

    def __init__(self, num_ranks: int, shards: int) -> None:
        self.num_ranks, self.shards = num_ranks, shards
        self._parts: list[NDArray[np.float64]] = [np.zeros((0, 0))] * num_ranks
        self._barrier = Barrier(num_ranks)

    def sum_of(self, rank: int) -> SumStatistics:
        """Return the sum that a replica calls as `rank`."""

        def add(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
            self._parts[rank] = parts.copy()
            self._barrier.wait(30)
            totals[:] = self._total()
            self._barrier.wait(30)

        return add

    def _total(self) -> NDArray[Any]:
        own = [MicroShards.of_rank(self.shards, r, self.num_ranks) for r in range(self.num_ranks)]
        slots = []
        for parts, micro_shards in zip(self._parts, own, strict=True):
            if self.shards:
                slots += add_in_order(list(parts.copy()), micro_shards.merges)
            else:
                slots.append(parts[0].copy())
        (total,) = add_in_order(slots, rank_contributions(self.shards, self.num_ranks)[1])
        return total


def _train(
    backend: str, spans: list[slice], shards: int, steps: int = 3
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Train by SGD on ranks that compute `spans` of a minibatch; return rank 0's arrays."""
    x, y = _residual_batch(spans[-1].stop)
    ranks = _Ranks(len(spans), shards)

    def make(rank: int) -> Replica:
        micro_shards = MicroShards.of_rank(shards, rank, len(spans)) if shards else None
        replica = dptrain.api.make_replica(
            RESIDUAL, backend, len(x), seed=3, micro_shards=micro_shards
        )
        replica.sum_statistics = ranks.sum_of(rank)
        return replica

    replicas = [make(rank) for rank in range(len(spans))]
    merges = rank_contributions(shards, len(spans))[1]

    def backward(rank: int) -> None:
        span = spans[rank]
        replicas[rank].forward_backward(x[span], y[span], global_count=len(x))

    with ThreadPoolExecutor(len(spans)) as pool:
        for _ in range(steps):
            list(pool.map(backward, range(len(spans))))
            slots = [slot.copy() for replica in replicas for slot in replica.gradient_slots]
            (total,) = add_in_order(slots, merges)
            for replica in replicas:
                replica.flat_gradients[:] = total
                replica.update(0.1)
    for replica in replicas[1:]:
        for name, value in replica.statistics.items():
            np.testing.assert_array_equal(value, replicas[0].statistics[name])
    return dict(replicas[0].parameters), dict(replicas[0].statistics)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("cuts", [(0, 4, 7), (0, 2, 2, 7), (0, 1, 7)], ids=str)
def test_ranks_equal_one_rank(backend: str, cuts: tuple[int, ...]) -> None:
    """Shares of several sizes, an empty one among them; differences are of roundings."""
    spans = [slice(start, stop) for start, stop in pairwise(cuts)]
    one, several = (_train(backend, s, 0) for s in ([slice(0, 7)], spans))
    for alone, together in zip(one, several, strict=True):
        for name, value in alone.items():
            np.testing.assert_allclose(together[name], value, 1e-4, 1e-5, err_msg=name)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_micro_shards_give_the_same_bits_for_any_number_of_ranks(backend: str) -> None:
    shards, count = 5, 7

    def arrays(num_ranks: int) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        own = [MicroShards.of_rank(shards, rank, num_ranks) for rank in range(num_ranks)]
        return _train(backend, [each.span(count) for each in own], shards)

    one = arrays(1)
    for num_ranks in (2, 3, 5):
        for alone, together in zip(one, arrays(num_ranks), strict=True):
            for name, value in alone.items():
                np.testing.assert_array_equal(together[name], value, err_msg=name)
