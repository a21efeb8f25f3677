"""With micro-shards, the bits of a sample do not depend on other samples and on threads."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dptrain
from dptrain.backends.flat_arrays import uses_norms
from dptrain.backends.numba.backend import NumbaBackend
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    ReLU,
    Sigmoid,
)
from dptrain.network.losses import MeanSquaredError, SigmoidBinaryCrossEntropy
from dptrain.plan import LAMB, LARS, SGD, Adam, AdamW, MicroShards, Optimizer
from dptrain.plan.shards import add_in_order, rank_contributions

SAMPLES, SHARDS = 19, 8
NETWORKS = [
    Network(
        (3, 16, 16),
        [
            Conv2d(16, 3), ReLU(), MaxPool2d(2), LocalResponseNorm(2), Conv2d(16, 3), ReLU(),
            Conv2d(20, 4, stride=2, padding=1), ReLU(), Flatten(), Dropout(0.25), Dense(40),
            ReLU(), Dropout(0.5), Dense(10),
        ],
        name="winograd",
    ),
    Network(
        (2, 13, 11),
        [
            Conv2d(7, 1), Sigmoid(), Conv2d(5, 7, padding=3), ReLU(), MaxPool2d(3, 2),
            Conv2d(32, 3), AveragePool2d(2), Flatten(), Dense(3),
        ],
        SigmoidBinaryCrossEntropy(),
        name="direct",
    ),
    Network(
        (4, 12, 10),
        [
            Conv2d(8, dilation=2), ReLU(), MaxPool2d(2), Conv2d(8, dilation=(1, 2)), ReLU(),
            Conv2d(8, 3, stride=2, dilation=3), Conv2d(8, groups=8, dilation=(2, 1)), ReLU(),
            Conv2d(6, groups=2, dilation=2), Flatten(), Dense(3),
        ],
        name="dilated",
    ),
    Network((4200,), [Dense(30), ReLU(), Dense(600), ReLU(), Dense(2)], MeanSquaredError(),
            name="dense"),
]  # fmt: skip
NOT_PER_SAMPLE = ("scratch", "shared", "partial", "chunk_sums", "transposed")


@pytest.fixture(params=NETWORKS, ids=lambda network: network.name)
def network(request: pytest.FixtureRequest) -> Network:
    """A network."""
    return request.param


def minibatch(network: Network) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples, targets, and identities that select dropout masks."""
    random = np.random.default_rng(5)
    x = random.normal(size=(SAMPLES, *network.input_shape)).astype(np.float32)
    if network.loss.targets == "classes":
        y = random.integers(0, network.num_outputs, SAMPLES).astype(np.int32)
    else:
        y = random.integers(0, 2, (SAMPLES, network.num_outputs)).astype(np.float32)
    return x, y, 7 * np.arange(SAMPLES)


def outputs_of_stages(
    network: Network, part: slice, threads: int
) -> dict[tuple[str, str], np.ndarray]:
    """What each stage writes for each sample, by stage and buffer."""
    x, y, samples = minibatch(network)
    n = part.stop - part.start
    replica = dptrain.make_replica(
        network, "numba", n, threads, micro_shards=MicroShards.of_rank(1)
    )
    replica.load(Batch(0, 0, x[part], y[part], samples[part], n))
    replica.context.scale = 1 / SAMPLES
    written = {}
    sizes = {node.name: math.prod(node.output_shape) for node in network.nodes}
    for stage, kernel in replica.stages:
        kernel(replica.context)
        for name in stage.writes:
            if not name.endswith(NOT_PER_SAMPLE):
                values = replica._views[name][:n]
                if name.endswith(".mask"):  # The rest of a row is not written with short vectors.
                    layer = name.removesuffix(".mask").rpartition("+")[2]
                    values = values[:, : -(-sizes[layer] // 8)]
                written[stage.name, name] = values.copy()
    return written


def test_a_sample_does_not_depend_on_other_samples(network: Network) -> None:
    whole = outputs_of_stages(network, slice(0, SAMPLES), 1)
    for start, stop, threads in [(3, 4, 1), (5, 7, 4), (0, 3, 2), (2, 9, 3), (0, SAMPLES, 5)]:
        written = outputs_of_stages(network, slice(start, stop), threads)
        assert written.keys() == whole.keys()
        for key, found in written.items():
            expected = whole[key][start:stop]
            assert found.tobytes() == expected.tobytes(), (*key, start, stop, threads)


def gradients(network: Network, ranks: int, threads: int) -> np.ndarray:
    """The sum over the ranks of the gradients and of the loss."""
    x, y, samples = minibatch(network)
    contributions: list[np.ndarray] = []
    for rank in range(ranks):
        own = MicroShards.of_rank(SHARDS, rank, ranks)
        part = own.span(SAMPLES)
        replica = dptrain.make_replica(
            network, "numba", part.stop - part.start, threads, micro_shards=own
        )
        replica.forward_backward(x[part], y[part], samples=samples[part], global_count=SAMPLES)
        contributions += list(replica.gradient_slots.copy())
    slots, merges = rank_contributions(SHARDS, ranks)
    assert len(contributions) == sum(slots)
    return add_in_order(contributions, merges)[0]


def test_gradients_do_not_depend_on_ranks_and_threads(network: Network) -> None:
    expected = gradients(network, 1, 1)
    x, y, samples = minibatch(network)
    plain = dptrain.make_replica(network, "numba", SAMPLES)
    plain.forward_backward(x, y, samples=samples)
    scale = np.abs(plain.flat_gradients).max()
    np.testing.assert_allclose(expected, plain.flat_gradients, rtol=1e-4, atol=1e-5 * scale)
    for ranks, threads in ((1, 3), (2, 2), (3, 1), (5, 1), (8, 1)):
        found = gradients(network, ranks, threads)
        assert found.tobytes() == expected.tobytes(), (ranks, threads)


def updated(optimizer: Optimizer, threads: int, cuts: list[int]) -> list[bytes]:
    """Parameters and state after three updates, slice by slice."""
    network = Network((50,), [Dense(33, weight_decay=0.01), ReLU(), Dense(7)])
    replica: Replica = dptrain.make_replica(network, "numba", 4, threads, optimizer=optimizer)
    random = np.random.default_rng(3)
    size = replica.plan.layout.size
    for number in (1, 2, 3):
        replica.flat_gradients[:size] = random.normal(size=size)
        slices = [slice(*ends) for ends in zip([0, *cuts], [*cuts, size], strict=True)]
        if uses_norms(replica.plan):
            replica.apply_norms(slices, number=number)
        for elements in slices:
            replica.update_slice(elements, 0.01, number=number)
    return [array.tobytes() for array in (replica.flat_parameters, *replica.flat_state.values())]


@pytest.mark.parametrize(
    "optimizer",
    [SGD(), SGD(momentum=0.9), SGD(momentum=0.9, nesterov=True), Adam(), AdamW(),
     LARS(clip_norm=9.0), LAMB()],
    ids=["sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb"],
)  # fmt: skip
def test_updates_do_not_depend_on_threads_and_slices(optimizer: Optimizer) -> None:
    expected = updated(optimizer, 1, [])
    assert updated(optimizer, 3, []) == expected
    assert updated(optimizer, 2, [16, 80, 1024]) == expected


def test_micro_shards_that_do_not_fit_the_batch_are_refused() -> None:
    network = Network((4,), [Dense(3)])
    own = MicroShards.of_rank(4, 1, 2)
    replica = dptrain.make_replica(network, "numba", 4, micro_shards=own)
    x, y = np.zeros((3, 4), np.float32), np.zeros(3, np.int32)
    with pytest.raises(dptrain.errors.UserError, match="micro-shards 2 to 3 of 4 have 4 of"):
        replica.forward_backward(x, y, global_count=8)


def test_evaluations_of_each_sample_do_not_depend_on_the_batch(network: Network) -> None:
    x, y, _ = minibatch(network)
    one, many = (
        dptrain.make_replica(network, "numba", n, training=False,
                             micro_shards=MicroShards.of_rank(1))
        for n in (1, 8)
    )  # fmt: skip
    losses, correct = many.evaluate_samples(x, y)
    total, num_correct = many.evaluate(x, y)
    np.testing.assert_allclose(losses.sum(), total, rtol=1e-5)
    assert correct.sum() == num_correct
    for n in range(SAMPLES):
        loss, is_correct = one.evaluate_samples(x[n : n + 1], y[n : n + 1])
        assert (loss.item(), is_correct.item()) == (losses[n], correct[n])


def test_the_null_backend_accepts_micro_shards() -> None:
    assert NumbaBackend.supports_shards
    replica = dptrain.make_replica(
        NETWORKS[0], "null", 8, micro_shards=MicroShards.of_rank(4, 1, 3)
    )
    replica.run()
    assert replica.loss_sums()[0] == 1.0
