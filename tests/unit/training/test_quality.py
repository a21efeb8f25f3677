"""The quality of predictions, its files, tables and plots."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import (
    mean_absolute_error,
    mean_squared_error,
    precision_recall_fscore_support,
    r2_score,
    roc_auc_score,
)

import dptrain
from dptrain import Trainer
from dptrain.cli.main import run
from dptrain.cli.printing import print_evaluation
from dptrain.comm.world import World
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network
from dptrain.network.outputs import softmax
from dptrain.report.files import write_report
from dptrain.report.runs.quality_plots import confusion_plot, predicted_plot
from dptrain.training.evaluation.class_files import LABELS, labels_text, read_confusion, read_labels
from dptrain.training.evaluation.quality import (
    MOST_MISTAKES,
    ClassQuality,
    LabelQuality,
    ValueQuality,
    make_collector,
    mean_area,
)
from dptrain.training.evaluation.quality_tables import class_tables
from tests.tiers import tiered

CONFUSION = np.array([[5, 1, 0], [2, 2, 0], [1, 0, 0]], np.int64)


def test_precision_recall_and_f1_follow_from_the_confusion_matrix() -> None:
    found = ClassQuality(("a", "b", "c"), CONFUSION)
    np.testing.assert_allclose(found.precision, [5 / 8, 2 / 3, np.nan])
    np.testing.assert_allclose(found.recall, [5 / 6, 2 / 4, 0])
    np.testing.assert_allclose(found.f1, [10 / 14, 4 / 7, 0])
    assert found.results() == {"mean_f1": pytest.approx((10 / 14 + 4 / 7) / 3)}
    values = found.to_dict()
    assert values["classes"][2] == {
        "name": "c", "samples": 1, "precision": None, "recall": 0.0, "f1": 0.0,
    }  # fmt: skip
    assert values["confusion"] == CONFUSION.tolist()


def test_errors_of_values_are_those_of_their_definitions() -> None:
    expected, predicted = np.array([[1.0], [2.0], [4.0]]), np.array([[1.0], [3.0], [2.0]])
    found = ValueQuality(("value",), expected, predicted).results()
    assert found["mae"] == pytest.approx(1)
    assert found["rmse"] == pytest.approx(np.sqrt(5 / 3))
    assert found["r2"] == pytest.approx(1 - 5 / np.square(expected - expected.mean()).sum())
    assert "r2" not in ValueQuality(("value",), np.ones((3, 1)), predicted).results()


def test_deviations_are_those_from_the_mean_of_each_output() -> None:
    expected = np.array([[1.0, 100.0], [2.0, 104.0], [4.0, 99.0]])
    errors = np.array([[0.5, -1.0], [0.0, 2.0], [-1.0, 0.0]])
    found = ValueQuality(("small", "large"), expected, expected + errors).results()
    assert found["r2"] == pytest.approx(1 - 6.25 / (3 * expected.var(axis=0).sum()))


def classes_of(outputs: NDArray[Any], labels: list[int]) -> ClassQuality:
    """Return the quality of outputs for twelve classes."""
    count = len(labels)
    network = Network((4,), [Dense(12)], name="wide")
    names = tuple(f"c{i}" for i in range(12))
    preprocessing = Preprocessing(
        kind="vector", input_shape=(4,), stored_shape=(4,), stored_dtype="float32", classes=names
    )
    collector = make_collector(count, network, preprocessing)
    collector.add(np.arange(count), outputs, np.array(labels, np.int32))
    found = collector.result(World.single())
    assert isinstance(found, ClassQuality)
    return found


def test_a_class_among_the_five_most_probable_ones_counts() -> None:
    found = classes_of(np.tile(np.arange(12.0), (4, 1)), [11, 7, 6, 0])
    assert found.top5 == 0.5
    assert found.confusion[[11, 7, 6, 0], 11].tolist() == [1, 1, 1, 1]
    assert found.confusion.sum() == 4


def test_other_classes_with_equal_outputs_are_counted_one_by_one() -> None:
    """Four classes precede class 4 of the first sample, and five class 5 of the second one."""
    outputs = np.array([[3.0] * 4 + [2.0] + [1.0] * 7, [3.0] * 5 + [2.0] + [1.0] * 6])
    assert [classes_of(outputs[i : i + 1], [4 + i]).top5 for i in (0, 1)] == [1.0, 0.0]


@given(st.integers(0, 2**32), st.integers(2, 5))
def test_areas_equal_those_of_scikit_learn(seed: int, count: int) -> None:
    """Scores are rounded, so that many are equal."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(count), rng.integers(0, count, 20)])
    scores = softmax(rng.standard_normal((len(labels), count)).round())
    if count == 2:
        expected = roc_auc_score(labels, scores[:, 1])
        assert mean_area(scores[:, 1:], labels) == pytest.approx(expected, abs=1e-12)
    else:
        expected = roc_auc_score(labels, scores, multi_class="ovr")
    assert mean_area(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_outputs_with_nan_are_no_class() -> None:
    outputs = np.zeros((4, 12))
    outputs[[0, 1, 2, 3], [3, 3, 5, 5]] = 1.0
    outputs[1, 7] = outputs[2] = np.nan
    found = classes_of(outputs, [3, 3, 0, 5])
    assert found.top5 == 0.5
    assert found.auc is None
    assert found.confusion.sum() == 2
    assert found.num_unpredicted == 2
    assert found.samples[[0, 3, 5]].tolist() == [1, 2, 1]
    np.testing.assert_allclose(found.recall[[0, 3, 5]], [0, 0.5, 1])
    assert found.to_dict()["unpredicted"] == 2
    assert any("2 samples contain NaN" in str(table) for table in class_tables(found))


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(2, 6), st.integers(0, 2))
def test_classes_are_scored_as_by_scikit_learn(
    seed: int, count: int, present: int, num_nan: int
) -> None:
    """Few of twelve classes occur, and outputs are often equal."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, present, count)
    outputs = rng.integers(-2, 2, (count, 12)).astype(float)
    outputs[:, 8:] = -3.0
    outputs[rng.integers(0, count, num_nan), rng.integers(0, 12, num_nan)] = np.nan
    found = classes_of(outputs, labels.tolist())
    is_nan = np.isnan(outputs).any(axis=1)
    # Another class than all stands for no prediction.
    predicted = np.where(is_nan, 12, np.nan_to_num(outputs).argmax(axis=1))
    every = np.arange(12)
    *shares, samples = precision_recall_fscore_support(
        labels, predicted, labels=every, zero_division=np.nan
    )
    np.testing.assert_array_equal(found.samples, samples)
    for own, expected in zip((found.precision, found.recall, found.f1), shares, strict=True):
        np.testing.assert_allclose(own, expected)
    in_top = [
        not bad and sorted(every, key=lambda k: (-row[k], k)).index(label) < 5
        for bad, row, label in zip(is_nan, outputs, labels, strict=True)
    ]
    assert found.top5 == pytest.approx(np.mean(in_top))


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2))
def test_values_are_scored_as_by_scikit_learn(
    seed: int, count: int, outputs: int, constant: int
) -> None:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-6, 7, outputs)
    expected = (rng.normal(size=(count, outputs)) + 5 * rng.normal(size=outputs)) * scale
    expected[:, :constant] = 0.1
    predicted = expected + rng.normal(size=expected.shape) * scale * rng.choice([0.1, 2.0])
    found = ValueQuality(tuple("abcd"[:outputs]), expected, predicted).results()
    assert found["mae"] == pytest.approx(mean_absolute_error(expected, predicted))
    assert found["rmse"] == pytest.approx(np.sqrt(mean_squared_error(expected, predicted)))
    if count < 2 or constant >= outputs:
        assert "r2" not in found
        return
    wanted = r2_score(
        expected[:, constant:], predicted[:, constant:], multioutput="variance_weighted"
    )
    assert found["r2"] == pytest.approx(wanted, abs=1e-9)


def test_numbers_that_are_not_finite_are_printed_as_strict_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = np.array([[1.0], [2.0]])
    found = ValueQuality(("value",), expected, np.array([[np.nan], [np.inf]]))
    print_evaluation({"loss": np.inf, **found.to_dict()}, found, as_json=True)
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert values == {"loss": "Infinity", "mae": "NaN", "rmse": "NaN", "r2": "NaN"}


def train_binary(**settings: Any) -> Trainer:
    rng = np.random.default_rng(0)
    y = (np.arange(80) % 2).astype(np.float32)
    x = rng.normal(size=(80, 4)).astype(np.float32) + y[:, None]
    network = Network((4,), [Dense(1)], loss=dptrain.SigmoidBinaryCrossEntropy(), name="yes-no")
    trainer = Trainer(network, (x, y), epochs=4, learning_rate=0.1, progress=False, **settings)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("shards", [0, 2])
def test_the_diagonal_is_the_accuracy(shards: int) -> None:
    found = train_binary(backend="reference", shards=shards).evaluate()
    confusion = np.array(found["confusion"])
    assert confusion.shape == (2, 2)
    assert found["accuracy"] == confusion.diagonal().sum() / confusion.sum()
    assert [each["name"] for each in found["classes"]] == ["0", "1"]


@pytest.mark.parametrize("shards", [0, 2])
def test_values_are_in_the_unit_of_the_data(shards: int) -> None:
    trainer = Trainer("mlp-8", "irradiance?samples=200", backend="reference", epochs=2,
                      progress=False, shards=shards)  # fmt: skip
    trainer.fit()
    found = trainer.evaluate()
    # The network predicts in the unit of the data, so its loss is the mean square error.
    assert found["rmse"] ** 2 == pytest.approx(found["loss"], rel=1e-6)
    assert trainer.summary is not None
    for name in ("mae", "rmse", "r2"):
        assert trainer.summary[f"test_{name}"] == found[name]


def command(*arguments: object) -> int:
    return run([str(argument) for argument in arguments], is_rank_zero=True)


def test_evaluate_writes_metrics_and_the_confusion_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(1).integers(0, 256, (60, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(60) % 3)
    network = Network((1, 4, 4), [Flatten(), Dense(3)], name="linear")
    folder = tmp_path / "run"
    with Trainer(network, f"npz:{tmp_path / 'data.npz'}", epochs=1, run_dir=folder,
                 backend="reference", progress=False) as trainer:  # fmt: skip
        trainer.fit()
    assert command("evaluate", folder, "--output", (tmp_path / "out")) == 0
    text = capsys.readouterr().out
    for word in ("precision", "recall", "F1", "Confusion matrix", "accuracy"):
        assert word in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"metrics.json", "confusion.csv", "confusion.svg"}
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    rows = list(csv.reader((tmp_path / "out" / "confusion.csv").read_text().splitlines()))
    assert rows[0] == ["class", "0", "1", "2"]
    assert [[int(n) for n in row[1:]] for row in rows[1:]] == metrics["confusion"]
    assert metrics["accuracy"] == trainer.evaluate()["accuracy"]
    assert command("evaluate", folder, "--output", (tmp_path / "out")) == 2
    assert "is not empty" in capsys.readouterr().err
    prediction = tmp_path / "p.csv"
    assert command("predict", folder, "-i", (tmp_path / "data.npz"), "-o", (prediction)) == 0
    lines = list(csv.DictReader(prediction.read_text().splitlines()))
    assert [line["target"] for line in lines] == [str(i % 3) for i in range(60)]


def test_two_classes_of_one_output_are_named(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(10):
            grey = 20 * number if name == "cat" else 255 - 5 * number
            Image.new("L", (4, 4), grey).save(tmp_path / "pets" / name / f"{number}.png")
    loss = dptrain.SigmoidBinaryCrossEntropy()
    network = Network((1, 4, 4), [Flatten(), Dense(1)], loss, name="pets")
    folder = tmp_path / "run"
    with Trainer(network, f"folder:{tmp_path / 'pets'}", epochs=3, run_dir=folder,
                 backend="reference", progress=False) as trainer:  # fmt: skip
        trainer.fit()
    assert command("predict", folder, "-i", tmp_path / "pets", "-o", tmp_path / "p.csv") == 0
    lines = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert list(lines[0]) == ["sample", "class", "probability_dog", "target"]
    model = dptrain.load(folder, backend="reference")
    for line in lines:
        probability = float(line["probability_dog"])
        assert line["class"] == ("dog" if probability > 0.5 else "cat")
        pixels = np.asarray(Image.open(tmp_path / "pets" / line["sample"]))
        assert model.predict(pixels[None])[0, 0] == pytest.approx(probability, rel=1e-4)
        assert line["target"] == line["sample"].partition("/")[0]


def test_evaluate_writes_predicted_and_expected_values(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2))
    lines = ["a,b,y", *(f"{a:.5f},{b:.5f},{a - b:.5f}" for a, b in rows)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    folder, network = tmp_path / "run", Network((2,), [Dense(1)], loss=dptrain.MeanSquaredError())
    with Trainer(network, f"csv:{table}?target=y&horizon=2", epochs=1, run_dir=folder,
                 backend="reference", progress=False) as trainer:  # fmt: skip
        trainer.fit()
    assert command("evaluate", folder, "-o", (tmp_path / "out")) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"metrics.json", "predicted.csv", "predicted.svg"}
    values = list(csv.DictReader((tmp_path / "out" / "predicted.csv").read_text().splitlines()))
    errors = [abs(float(v["expected_y"]) - float(v["predicted_y"])) for v in values]
    assert np.mean(errors) == pytest.approx(trainer.evaluate()["mae"])
    prediction = tmp_path / "p.csv"
    assert command("predict", folder, "-i", (table), "-o", (prediction)) == 0
    written = [line["target"] for line in csv.DictReader(prediction.read_text().splitlines())]
    assert written == [f"{a - b:.5f}" for a, b in rows[2:]] + ["", ""]


@pytest.mark.parametrize("count", tiered([2, 12, 30, 100], [2, 12]))
def test_plots_state_their_numbers(count: int) -> None:
    rng = np.random.default_rng(count)
    names = tuple(f"class number {i}" for i in range(count))
    found = confusion_plot(ClassQuality(names, rng.integers(0, 9, (count, count))))
    assert f"{count} classes" in found.alt
    assert ("class numbe…" in found.svg) == (count <= 30)
    y = rng.normal(size=(5000, 1))
    values = predicted_plot(ValueQuality(("value",), y, y + 0.1))
    assert "every 2th value" not in values.caption
    assert "MAE 0.1" in values.caption


def test_a_run_keeps_the_confusion_matrix_and_its_worst_mistakes(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 256, (120, 6, 6, 3), dtype=np.uint8), np.arange(120) % 3
    network = Network((3, 6, 6), [Flatten(), Dense(3)], name="linear")
    folder = tmp_path / "run"
    with Trainer(
        network, (x, y), classes=["a, b", "c", "d"], epochs=2, batch_size=10, run_dir=folder,
        backend="reference", progress=False,
    ) as trainer:  # fmt: skip
        trainer.fit()
        found = trainer.evaluate()
        test = trainer.data.test
        inputs, labels = np.empty((len(test), 3, 6, 6), np.float32), np.empty(len(test), np.int32)
        test.read(np.arange(len(test)), inputs, labels)
        probabilities = trainer.job.replica.predict(inputs)
    quality = trainer.progress.test_quality
    assert isinstance(quality, ClassQuality)
    kept = read_confusion(folder / "confusion.csv")
    assert kept is not None
    assert kept.names == ("a, b", "c", "d")
    assert kept.confusion.tolist() == found["confusion"]
    predicted = probabilities.argmax(axis=1)
    wrong = np.flatnonzero(predicted != labels)
    order = wrong[np.argsort(-probabilities[wrong].max(axis=1), kind="stable")][:MOST_MISTAKES]
    assert [mistake.sample for mistake in quality.mistakes] == order.tolist()
    for mistake in quality.mistakes:
        row = probabilities[mistake.sample]
        assert (mistake.expected, mistake.predicted) == (labels[mistake.sample], row.argmax())
        assert mistake.probability == pytest.approx(row.max(), rel=1e-5)
    with Image.open(folder / "mistakes.png") as picture:
        assert min(picture.size) > 96
    page = write_report(folder).read_text()
    assert page.count('<figure class="image">') == 1
    assert "Confusion matrix of 3 classes" in page
    (folder / "confusion.csv").write_text("class,a\nb,1\n")
    with pytest.raises(UserError, match="damaged: its lines are not those of its columns"):
        write_report(folder)


def test_labels_in_a_file_are_those_of_the_run(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    expected, predicted = draw.integers(0, 2, (2, 30, 3))
    quality = LabelQuality(("red", "a,b", "Öl"), expected, predicted)
    path = tmp_path / LABELS
    assert read_labels(path) is None
    path.write_text(labels_text(quality))
    found = read_labels(path)
    assert found is not None
    assert found.names == quality.names
    for number in range(3):
        of_label = expected[:, number] == 1
        assert found.samples[number] == of_label.sum()
        assert found.correct[number] == (of_label & (predicted[:, number] == 1)).sum()
    np.testing.assert_allclose(found.correct / found.predicted, quality.shares[0])
    for damaged in ("label,samples,predicted,correct\nred,1,2\n", "label,samples\nred,1\n",
                    "label,samples,predicted,correct\nred,1,2,2\n", "x"):  # fmt: skip
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"labels.csv is damaged"):
            read_labels(path)
