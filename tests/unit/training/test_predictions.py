"""Predictions in a file: targets next to them, and outputs that contain NaN."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from dptrain.comm.world import World
from dptrain.network import (
    Dense,
    Loss,
    MeanSquaredError,
    Network,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
)
from dptrain.training.evaluation.prediction import (
    Predictions,
    predict_all,
    predict_to_file,
    prediction_lines,
)
from tests.unit.interchange.models import model_of, plain


@pytest.mark.parametrize(
    ("loss", "outputs"), [(SoftmaxCrossEntropy(), 3), (SigmoidBinaryCrossEntropy(), 1)]
)
def test_outputs_with_nan_have_no_class(loss: Loss, outputs: int, tmp_path: Path) -> None:
    network = Network((outputs,), [Dense(outputs)], loss, name="nan")
    names = tuple(f"class {index}" for index in range(max(outputs, 2)))
    model = model_of(network, plain(network, classes=names))
    model.replica.parameters["dense1.weight"] = np.eye(outputs)
    model.replica.parameters["dense1.bias"] = np.zeros(outputs)
    x = np.zeros((3, outputs), np.float32)
    x[0, -1], x[2] = 4.0, -1.0
    model.replica.parameters["dense1.bias"] = np.zeros(outputs)
    assert model.predict_classes(x) == [names[-1], names[0], names[0]]
    model.replica.parameters["dense1.bias"] = np.full(outputs, np.nan)
    assert model.predict_classes(x) == [""] * 3
    np.save(tmp_path / "x.npy", x)
    predict_to_file(model, [tmp_path / "x.npy"], tmp_path / "p.csv", World.single())
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == [""] * 3
    assert {row[f"probability_{names[-1]}"] for row in rows} == {"nan"}


@pytest.mark.parametrize("outputs", [1, 3])
def test_every_target_of_a_sample_has_a_column(outputs: int, tmp_path: Path) -> None:
    network = Network((2,), [Dense(outputs)], MeanSquaredError(), name="values")
    model = model_of(network, plain(network))
    y = np.arange(4 * outputs, dtype=np.float32).reshape(4, outputs)
    np.savez(tmp_path / "new.npz", x=np.ones((4, 2), np.float32), y=y)
    predict_to_file(model, [tmp_path / "new.npz"], tmp_path / "p.csv", World.single())
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    names = ["target"] if outputs == 1 else [f"target_{column}" for column in range(outputs)]
    assert list(rows[0])[1 + outputs :] == names
    assert [[float(row[name]) for name in names] for row in rows] == y.tolist()


@pytest.mark.parametrize(
    ("loss", "outputs", "expected"),
    [
        (SoftmaxCrossEntropy(), 4, ["one 0 75.0%  two 12.5%  three 12.5%", "two 100.0%"]),
        (SigmoidBinaryCrossEntropy(), 1, ["two 75.0%  one 0 25.0%", "two 100.0%"]),
        (MeanSquaredError(), 2, ["value_0 1.09861  value_1 0", "value_0 40  value_1 0"]),
    ],
)
def test_a_line_has_the_most_probable_classes_or_the_values(
    loss: Loss, outputs: int, expected: list[str], tmp_path: Path
) -> None:
    network = Network((outputs,), [Dense(outputs)], loss, name="lines")
    classes = ("one 0", "two", "three", "four")[: max(outputs, 2)]
    is_value = isinstance(loss, MeanSquaredError)
    model = model_of(network, plain(network) if is_value else plain(network, classes=classes))
    model.replica.parameters["dense1.weight"] = np.eye(outputs)
    model.replica.parameters["dense1.bias"] = np.zeros(outputs)
    x = np.zeros((2, outputs), np.float32)
    x[0, 0], x[1, min(outputs - 1, 1)] = np.log(3.0), 40.0
    if outputs == 4:
        x[0] = np.log([6.0, 1.0, 1.0, 1e-9])
    if is_value:
        x[1] = x[1, ::-1]
    np.save(tmp_path / "x.npy", x)
    files = [tmp_path / "x.npy"]
    lines = list(prediction_lines(predict_all(model, files, World.single()), model))
    assert lines == [f"{row}  {text}" for row, text in enumerate(expected)]
    both = predict_all(model, [*files, *files], World.single())
    assert [*both.names] == [f"{files[0]}/{row}" for row in (0, 1, 0, 1)]
    np.testing.assert_array_equal(both.values[:2], both.values[2:])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(SigmoidBinaryCrossEntropy(), ["1", "none"]), (MeanSquaredError(), ["0, 670.015", "0, 0"])],
)
def test_a_line_names_the_labels_of_a_target_and_rounds_its_values(
    loss: Loss, expected: list[str]
) -> None:
    network = Network((2,), [Dense(2)], loss, name="lines")
    model = model_of(network, plain(network))
    is_value = isinstance(loss, MeanSquaredError)
    targets = [("0", "670.0152587890625" if is_value else "1"), ("0", "0")]
    found = Predictions(["0", "1"], np.zeros((2, 2)), targets)
    names = model.preprocessing.output_names(network)
    texts = [names[1] if text == "1" else text for text in expected]
    for line, text in zip(prediction_lines(found, model), texts, strict=True):
        assert line.endswith(f"(target {text})")
