"""Weights of classes and samples: the loss is the weighted mean over the global minibatch, as
that of PyTorch is; and balanced sampling.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptrain import Trainer, UserError
from dptrain.batch import Batch
from dptrain.comm.world import World
from dptrain.data import open_data
from dptrain.data.base import Subset
from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.crop_windows import CropWindowLoader
from dptrain.data.loading.loader import BatchSource, Loader
from dptrain.data.loading.sharding import Sampler, balanced_order, minibatch, steps_per_epoch
from dptrain.data.loading.weighting import WeightedBatches
from dptrain.data.sources.objects import dataset_from
from dptrain.data.stored import CachedSamples
from dptrain.data.validation import with_validation
from dptrain.data.weights import LARGEST, SMALLEST
from dptrain.network import (
    Dense,
    Dropout,
    Flatten,
    MeanSquaredError,
    Network,
    SigmoidBinaryCrossEntropy,
)
from dptrain.network.files import get_network
from dptrain.plan.shards import MicroShards
from tests.emulator.emulator import Emulator
from tests.lazy import LazyModule
from tests.unit.examples import fewer

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
        ([1, -1, 1], "'-1' is no weight; expected 0, or numbers from 1e-100 to 1e"),
        ("0=inf", "'inf' is no weight"),
        ("1e308,1e308,1e308", "'1e308' is no weight"),
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


def _fitted(x: Any, y: Any, weights: Any, network: Network = NETWORK, **more: Any) -> Trainer:
    trainer = Trainer(network, **{**OPTIONS, **more})
    trainer.fit(x, y, sample_weight=weights)
    return trainer


@fewer()
@given(st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_sample_weights_by_class_are_class_weights(weights: list[int]) -> None:
    x, y = _data()
    options: dict[str, Any] = {"backend": "reference", "precision": "fp64"}
    of_samples = _fitted(x, y, np.array(weights)[y], **options)
    of_classes = Trainer(NETWORK, (x, y), class_weights=weights, **OPTIONS | options)
    of_classes.fit()
    for name, value in of_classes.parameters.items():
        np.testing.assert_array_equal(of_samples.parameters[name], value)


def test_sample_weights_multiply_those_of_classes() -> None:
    x, y = _data()
    by_class, own = np.array([1.0, 4.0, 0.5]), np.random.default_rng(5).integers(1, 9, COUNT)
    found = _fitted(x, y, own, class_weights=by_class)
    expected = _fitted(x, y, own * by_class[y])
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)


@pytest.mark.parametrize("factor", [SMALLEST, LARGEST])
def test_a_common_factor_of_the_weights_has_no_effect(factor: float) -> None:
    x, y = _data()
    weights = np.random.default_rng(5).uniform(1.0, 9.0, COUNT)
    scaled = weights * factor / (1.0 if factor < 1.0 else 10.0)
    values = Network((4,), [Dense(1)], MeanSquaredError(), name="values")
    for network, targets in ((NETWORK, y), (values, x[:, 1] ** 2)):
        by_class = f"{factor},{factor},{factor}" if network is NETWORK else ""
        expected = _fitted(x, targets, weights, network)
        found = _fitted(x, targets, scaled, network, class_weights=by_class)
        for name, value in expected.parameters.items():
            np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=1e-6)
        one = expected.evaluate(x, targets, sample_weight=weights)
        other = expected.evaluate(x, targets, sample_weight=scaled)
        for name in {"loss", "accuracy", "mae", "rmse", "r2"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-9), name


def test_weights_follow_their_rows(tmp_path: Path) -> None:
    """Splits, files and tables keep the weight of each sample; a column of weights is no input."""
    x, y = _data()
    weights = np.arange(1.0, COUNT + 1)
    values = x[:, 0]
    table = np.column_stack([x, values, weights])
    np.savetxt(tmp_path / "t.csv", table, "%.9g", delimiter=",", header="a,b,c,d,y,w", comments="")
    np.savez(tmp_path / "f.npz", x=x, y=y, sample_weight=weights)
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "sample_weight_train": weights}
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    for data in (f"npz:{tmp_path}/f.npz", f"npy:{folder}", arrays, {"x": x, "y": y}):
        own = {**data, "sample_weight": weights} if data == {"x": x, "y": y} else data
        train = dataset_from(own, NETWORK).train
        kept = with_validation(dataset_from(own, NETWORK), 0.3, seed=1)
        assert kept.validation is not None
        for part in (train, kept.train, kept.validation, Subset(train, np.array([2, 0]))):
            found, read = part.known_weights(), np.zeros((len(part), 4), np.float32)
            assert found is not None
            part.read(np.arange(len(part)), read, np.zeros(len(part), np.int32))
            np.testing.assert_array_equal(read, x[found.astype(int) - 1])
    for options in (
        "target=y&weight=w",
        "target=y&weight=w&columns=*&horizon=1",
        "target=y&weight=w&lags=0,2",
    ):
        network = get_network("mlp-4")
        dataset = open_data(f"csv:{tmp_path}/t.csv?{options}", network)
        assert "w" not in dataset.preprocessing.columns
        found = dataset.train.known_weights()
        assert found is not None
        first = 3 if "lags" in options else 1
        np.testing.assert_array_equal(found, np.arange(first, first + len(found)))


@pytest.mark.parametrize("cell", ["nan", "", "much"])
def test_a_cell_of_a_column_of_weights_is_named(cell: str, tmp_path: Path) -> None:
    rows = [f"{i},{i * i},{cell if i == 5 else 1}" for i in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,w", *rows]))
    advice = "expected a finite number; the weight 0 leaves a row out of the loss"
    with pytest.raises(UserError, match=rf"line 7, column w is '{cell}'; {advice}$"):
        open_data(f"csv:{tmp_path}/t.csv?target=y&weight=w", get_network("mlp-4"))
    with pytest.raises(UserError, match=r"has no column 'v'; it has x, y, w$"):
        open_data(f"csv:{tmp_path}/t.csv?target=y&weight=v", get_network("mlp-4"))


def test_evaluation_with_weights_is_that_of_repeated_samples() -> None:
    x, y = _data()
    weights = np.random.default_rng(3).integers(0, 4, COUNT)
    rows = np.repeat(np.arange(COUNT), weights)
    values = Network((4,), [Dense(1)], MeanSquaredError(), name="values")
    for network, targets in ((NETWORK, y), (values, x[:, 1] ** 2)):
        trainer = _fitted(x, targets, None, network)
        found = trainer.evaluate(x, targets, sample_weight=weights)
        assert found["scored"].endswith("by their weights")
        assert found["samples"] == COUNT
        assert trainer.evaluate({"x": x, "y": targets, "sample_weight": weights}) == found
        expected = trainer.evaluate(x[rows], targets[rows])
        for name in {"loss", "accuracy", "mae", "rmse", "r2"} & expected.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], r"sample_weight has shape \(2,\); expected \(23,\)"),
        (
            -np.ones(COUNT),
            "sample_weight is -1 for sample 0; expected 0, or numbers from 1e-100 to",
        ),
        (np.full(COUNT, 1e308), r"sample_weight is 1e\+308 for sample 0"),
        (np.full(COUNT, 1e-310), "sample_weight is 1e-310 for sample 0"),
        (np.full(COUNT, np.nan), "sample_weight is nan for sample 0"),
        (np.zeros(COUNT), "expected a weight above 0"),
        ("heavy", "expected numbers"),
    ],
)
def test_wrong_sample_weights_are_refused(weights: Any, message: str) -> None:
    x, y = _data()
    with pytest.raises(UserError, match=message):
        _fitted(x, y, weights)
    with pytest.raises(UserError, match=message):
        _fitted(x, y, None).evaluate(x, y, sample_weight=weights)


@pytest.mark.parametrize("name", ["sample_weights", "sample_weight_train"])
def test_weights_that_would_not_count_are_refused(name: str, tmp_path: Path) -> None:
    arrays = {**dict(zip("xy", _data(), strict=True)), name: np.ones(COUNT)}
    np.savez(tmp_path / "data.npz", **arrays)
    for data in (arrays, f"npz:{tmp_path / 'data.npz'}"):
        with pytest.raises(UserError, match=f"{name} would not be used: sample_weight belongs to"):
            Trainer(NETWORK, data, **OPTIONS)
    split = {f"{kind}_{part}": arrays[kind] for kind in "xy" for part in ("train", "test")}
    with pytest.raises(UserError, match="sample_weight would not be used"):
        Trainer(NETWORK, {**split, "sample_weight": np.ones(COUNT)}, **OPTIONS)


def test_weights_need_their_samples() -> None:
    trainer = Trainer(NETWORK, _data(), **OPTIONS)
    with pytest.raises(UserError, match="without x; call"):
        trainer.fit(sample_weight=np.ones(COUNT))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=80), st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
)  # fmt: skip
def test_balanced_order_has_each_class_equally_often(
    labels: list[int], seed: int, epoch: int
) -> None:
    classes = np.array(labels)
    order = balanced_order(classes, seed, epoch)
    assert len(order) == len(labels)
    by_class = np.bincount(classes[order], minlength=7)[np.unique(classes)]
    assert by_class.max() - by_class.min() <= 1
    uses = np.bincount(order, minlength=len(labels))
    for label in np.unique(classes):
        own = uses[classes == label]
        assert own.max() - own.min() <= 1
    np.testing.assert_array_equal(order, balanced_order(classes, seed, epoch))


def test_balanced_order_differs_between_epochs() -> None:
    labels = np.repeat([0, 1, 2], [40, 5, 8])
    orders = [balanced_order(labels, 1, epoch) for epoch in range(3)]
    assert len({order.tobytes() for order in orders}) == 3
    # The classes with one sample more change, so that they are equal over three epochs.
    assert len(set(np.bincount(labels[np.concatenate(orders)]).tolist())) == 1


def test_repeated_images_are_changed_differently() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (16, 8, 8)).astype(np.uint8), np.repeat([0, 1], [15, 1])
    network = Network((1, 8, 8), [Flatten(), Dense(2)], name="flat")
    for keeps in (True, False):
        data = dataset_from((x, y, x, y), network)
        train, sampler = data.train, Sampler(16, 16, seed=0, labels=y)
        options = {"augmentation": Augmentation(crop=3)}
        assert isinstance(train, CachedSamples)
        if keeps:
            with CropWindowLoader(train, sampler, range(1), data.input_shape, **options) as loader:
                batch = next(loader)
                assert batch.crop_windows is not None
                changes = batch.crop_windows[batch.samples == 15, 1:]
        else:
            with Loader(train, sampler, range(1), data.input_shape, **options, depth=0) as loader:
                batch = next(loader)
                assert batch.x is not None
                changes = batch.x[batch.samples == 15]
        assert len(changes) == 8
        assert len({each.tobytes() for each in changes}) > 3


def test_balanced_sampling_resumes_to_the_same_bits(tmp_path: Path) -> None:
    x, y = _data()
    data = {"x": x, "y": np.minimum(y, 1), "sample_weight": np.arange(COUNT)}
    network = Network((4,), [Dense(2)], name="two")
    options: dict[str, Any] = {**OPTIONS, "sampling": "balanced", "epochs": 3}
    whole = Trainer(network, data, **options)
    whole.fit()
    first = Trainer(network, data, run_dir=tmp_path / "run", stop_after=4, **options)
    first.fit()
    first.close()
    resumed = Trainer.resume(tmp_path / "run", data, progress=False, world=World.single())
    resumed.fit()
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], value)
    data["sample_weight"] = np.ones(COUNT)
    resumed.close()
    with pytest.raises(UserError, match="data"):
        Trainer.resume(tmp_path / "run", data, progress=False, world=World.single())


def test_values_have_no_balanced_sampling() -> None:
    x, _ = _data()
    with pytest.raises(UserError, match="--sampling is balanced, but arrays has no classes"):
        Trainer("mlp-4", (x, x[:, 0], x, x[:, 0]), sampling="balanced", progress=False)


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_random_features_are_decided_by_the_seed(count: int, seed: int) -> None:
    with TemporaryDirectory() as folder:
        path, names = Path(folder) / "t.csv", [*"abcdef"]
        rows = np.arange(140.0).reshape(20, 7) ** 1.5
        np.savetxt(path, rows, delimiter=",", header="a,b,c,d,e,f,y", comments="")
        spec = f"csv:{path}?target=y&max_features={count}"
        data = open_data(spec, get_network("mlp-4"), seed=seed)
        columns = data.preprocessing.columns
        assert len(columns) == data.input_shape[0] == count
        assert list(columns) == sorted(set(columns))
        assert set(columns) <= set(names)
        x = np.zeros((len(data.train), count), np.float32)
        data.train.read(np.arange(len(x)), x, np.zeros((len(x), 1), np.float32))
        chosen = rows[: len(x), [names.index(name) for name in columns]]
        np.testing.assert_allclose(x, (chosen - chosen.mean(0)) / chosen.std(0), 1e-5, 1e-5)
        again = open_data(spec, get_network("mlp-4"), seed=seed).preprocessing.columns
        kept = open_data(
            spec, get_network("mlp-4"), preprocessing=data.preprocessing, seed=seed + 1
        )
        assert columns == again == kept.preprocessing.columns
        with pytest.raises(UserError, match="max_features is 7, but there are 6 input columns"):
            open_data(f"csv:{path}?target=y&max_features=7", get_network("mlp-4"))


def test_weights_of_the_training_data_weigh_its_test_split(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    table = random.standard_normal((60, 3)).round(3)
    table[:, 2] = np.abs(table[:, 2]) + 0.1
    path = tmp_path / "data.csv"
    np.savetxt(path, table, delimiter=",", header="a,y,w", comments="", fmt="%.3f")
    trainer = Trainer(
        "mlp-4", f"csv:{path}?target=y&columns=a", backend="reference", steps=3, progress=False
    )
    trainer.fit()
    plain = trainer.evaluate()
    weighted = trainer.evaluate(f"csv:{path}?target=y&columns=a&weight=w")
    assert weighted["samples"] == plain["samples"] == len(trainer.data.test)
    assert weighted["loss"] != plain["loss"]
