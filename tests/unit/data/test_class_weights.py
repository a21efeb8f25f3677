"""Class weights: the loss is that of PyTorch's weighted cross-entropy of the global minibatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptrain import Trainer, UserError
from dptrain.batch import Batch
from dptrain.comm.world import World
from dptrain.data.loading.loader import BatchSource
from dptrain.data.loading.sharding import Sampler, minibatch, steps_per_epoch
from dptrain.data.loading.weighting import WeightedBatches
from dptrain.network import Dense, Dropout, Network, SigmoidBinaryCrossEntropy
from dptrain.plan.shards import MicroShards
from tests.emulator.emulator import Emulator
from tests.lazy import LazyModule

torch = LazyModule("torch")

COUNT, BATCH, EPOCHS = 23, 8, 2
NETWORK = Network((4,), [Dense(3)], name="linear")
OPTIONS: dict[str, Any] = {
    "world": World.single(), "progress": False, "batch_size": BATCH, "epochs": EPOCHS, "seed": 3,
    "validation": 0.0, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0,
    "learning_rate": 0.1, "schedule": "constant", "warmup_steps": 0,
}  # fmt: skip


def _data() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((COUNT, 4)).astype(np.float32), rng.integers(0, 3, COUNT)


def _trained(weights: Any, network: Network = NETWORK, **more: Any) -> Trainer:
    x, y = _data()
    y = y % network.num_outputs if network.num_outputs > 1 else y % 2
    trainer = Trainer(network, (x, y, x, y), class_weights=weights, **{**OPTIONS, **more})
    trainer.fit()
    return trainer


def test_training_equals_pytorch() -> None:
    weights = [0.5, 3.0, 0.0]
    initial = Trainer(NETWORK, (*_data(), *_data()), **OPTIONS)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    for name, value in (("weight", model.weight), ("bias", model.bias)):
        value.data = torch.tensor(np.float64(initial.parameters[f"dense1.{name}"]))
    loss_of = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (torch.tensor(part) for part in _data())
    losses = []
    for step in range(EPOCHS * steps_per_epoch(COUNT, BATCH)):
        chosen = torch.tensor(minibatch(COUNT, BATCH, 3, step))
        loss = loss_of(model(x[chosen].double()), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) * len(chosen))
    trainer = _trained(weights, backend="reference", precision="fp64")
    np.testing.assert_allclose(
        trainer.parameters["dense1.weight"], model.weight.detach().numpy(), rtol=0, atol=1e-7
    )
    half = steps_per_epoch(COUNT, BATCH)
    expected = [sum(losses[:half]) / COUNT, sum(losses[half:]) / COUNT]
    np.testing.assert_allclose(trainer.history["train_loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("backend", ["numba", "cuda", "cudnn"])
def test_backends_and_passes_compute_the_same(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, minibatches of whole steps alternate between two input buffers."""
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Emulator())
    network = Network((4,), [Dropout(0.3), Dense(3)], name="drops")
    options: dict[str, Any] = {"network": network, "label_smoothing": 0.1}
    expected = _trained("1=4", **options, backend="reference", precision="fp64")
    for accumulate in (1, 2):
        found = _trained("1=4", **options, backend=backend, precision="fp32", accumulate=accumulate)
        for name, value in expected.parameters.items():
            np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=2e-6)
        assert found.evaluate()["loss"] == pytest.approx(expected.evaluate()["loss"], rel=1e-5)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    _, y = _data()
    weights = sklearn.compute_class_weight("balanced", classes=np.arange(3), y=y)
    balanced = _trained("balanced", backend="reference", precision="fp64")
    expected = _trained(weights, backend="reference", precision="fp64")
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(balanced.parameters[name], value, rtol=0, atol=1e-7)


class _Batches(BatchSource):
    """The samples of one rank, without inputs."""

    def __init__(self, sampler: Sampler, steps: range) -> None:
        self._batches = (
            Batch(step, epoch, None, None, mine[i, span], count, part=part)
            for epoch, wanted in sampler.epochs(steps)
            for some, count, mine in sampler.shards(sampler.order(epoch), wanted)
            for i, step in enumerate(some)
            for part, span in enumerate(sampler.pass_spans(count))
        )

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()


@given(
    st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.booleans(),
    st.integers(0, 30),
)  # fmt: skip
def test_weights_of_all_ranks_are_those_of_the_minibatch(
    count: int, batch: int, ranks: int, passes: int, sharded: bool, first: int
) -> None:
    """Each rank has the same bits, whatever the number of ranks and passes is."""
    weights = np.float64(np.random.default_rng(count).integers(0, 3, count))
    found: dict[tuple[int, int], np.float32] = {}
    for rank in range(ranks):
        shards = MicroShards.of_rank(ranks + 3, rank, ranks) if sharded else None
        parts = 1 if sharded else passes
        sampler = Sampler(count, batch, 5, rank, ranks, shards, parts)
        steps = range(first, first + 4)
        with WeightedBatches(_Batches(sampler, steps), sampler, weights) as batches:
            for each in batches:
                assert each.weights is not None
                for sample, weight in zip(each.samples.tolist(), each.weights, strict=True):
                    assert (each.step, sample) not in found
                    found[each.step, sample] = weight
    for step in range(first, first + 4):
        samples = minibatch(count, batch, 5, step)
        own = np.array([found.pop((step, sample)) for sample in samples.tolist()])
        total = weights[samples].sum()
        expected = weights[samples] * (len(samples) / total) if total else 0.0 * samples
        np.testing.assert_array_equal(own, np.float32(expected))
    assert not found


def test_one_sigmoid_output_has_two_classes() -> None:
    network = Network((4,), [Dense(1)], SigmoidBinaryCrossEntropy(), name="binary")
    options: dict[str, Any] = {"network": network, "backend": "reference", "precision": "fp64"}
    found, expected = (_trained(weights, **options) for weights in ({"1": 2.0}, [0.5, 1]))
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("1,2", "--class-weights has 2 numbers; expected 3, one for each class: 0, 1, 2"),
        ([1, -1, 1], "'-1' is no weight; expected finite numbers of at least 0"),
        ("0=inf", "'inf' is no weight"),
        ("cat=2", "'cat' names no class of the data; expected NAME=W with names of 0, 1, 2"),
        ("1=2,3", "'3' names no class"),
        ("1=2,1=3", "'1' names a class twice"),
        ("0,0,0", "expected a weight above 0"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _trained(weights)


def test_values_have_no_class_weights() -> None:
    x, _ = _data()
    with pytest.raises(UserError, match="has no classes: the network predicts values"):
        Trainer("mlp-4", (x, x[:, 0], x, x[:, 0]), class_weights="balanced", progress=False)
