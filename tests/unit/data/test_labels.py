"""Several labels of a sample: targets, results of each label, and predictions."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support

from dptrain import Trainer, UserError
from dptrain.cli.main import run
from dptrain.comm.world import World
from dptrain.data import Preprocessing, open_data
from dptrain.network import get_network
from dptrain.training.evaluation.quality import LabelQuality, make_collector

NAMES = ("red", "wet, cold", "odd")


def _table(path: Path) -> tuple[str, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((150, 4)).round(4)
    y = (x[:, :3] > [0.0, 0.3, 0.6]).astype(int)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["a", NAMES[1], "b", "c", "d", NAMES[0], NAMES[2]])
        for row, (red, wet, odd) in zip(x.tolist(), y.tolist(), strict=True):
            writer.writerow([row[0], wet, *row[1:], red, odd])
    return f"csv:{path}?target=red,wet%2C cold,odd", x, y


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 5))
def test_results_of_labels_are_those_of_scikit_learn(seed: int, count: int, labels: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, targets = rng.standard_normal((count, labels)), rng.integers(0, 2, (count, labels))
    network = get_network("multilabel-3", outputs=labels)
    collector = make_collector(count, network, Preprocessing("vector", (50,)))
    order = rng.permutation(count)
    for part in np.array_split(order, 3):
        collector.add(part, outputs[part], targets[part].astype(np.float32))
    found = collector.result(World.single())
    assert isinstance(found, LabelQuality)
    predicted = (outputs > 0).astype(int)
    expected = [accuracy_score(*pair) for pair in zip(targets.T, predicted.T, strict=True)]
    np.testing.assert_allclose(found.accuracy, expected)
    *shares, _ = precision_recall_fscore_support(targets, predicted, zero_division=np.nan)
    np.testing.assert_allclose(found.shares, shares)
    assert found.results()["label_accuracy"] == pytest.approx(np.mean(expected))
    if np.isfinite(shares[2]).all():
        macro = f1_score(targets, predicted, average="macro")
        assert found.results()["mean_f1"] == pytest.approx(macro)


def test_labels_in_columns_are_trained_evaluated_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, x, y = _table(tmp_path / "t.csv")
    trainer = Trainer(
        "multilabel-16", spec, backend="reference", learning_rate=0.01, weight_decay=0.0,
        progress=False, run_dir=str(tmp_path / "run"), steps=300,
    )  # fmt: skip
    trainer.fit()
    assert trainer.job.dataset.preprocessing.columns == ("a", "b", "c", "d")
    results = trainer.evaluate()
    probabilities = trainer.predict(x[120:])
    predicted = (probabilities > 0.5).astype(int)
    assert [label["name"] for label in results["labels"]] == list(NAMES)
    for i, label in enumerate(results["labels"]):
        assert label["accuracy"] == pytest.approx(np.mean(predicted[:, i] == y[120:, i]))
        assert label["accuracy"] > 0.8
    assert results["accuracy"] == pytest.approx(np.mean((predicted == y[120:]).all(axis=1)))
    assert trainer.summary["test_label_accuracy"] == pytest.approx(results["label_accuracy"])
    output = tmp_path / "p.csv"
    arguments = ["predict", str(tmp_path / "run"), "-i", str(tmp_path / "t.csv"), "-o", str(output)]
    assert run(arguments, is_rank_zero=True) == 0
    with output.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    columns = [f"probability_{name}" for name in NAMES] + [f"target_{name}" for name in NAMES]
    assert header == ["sample", *columns]
    np.testing.assert_allclose(
        np.array([row[1:4] for row in rows[120:]], float), probabilities, rtol=1e-5
    )
    assert [list(map(int, row[4:])) for row in rows] == y.tolist()
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "run")], is_rank_zero=True) == 0
    assert "F1" in capsys.readouterr().out
    with pytest.raises(UserError, match="was trained to predict 'red, wet, cold, odd'"):
        trainer.evaluate(f"csv:{tmp_path / 't.csv'}?target=red")


def test_several_columns_of_values_have_units_of_their_own(tmp_path: Path) -> None:
    spec, x, _ = _table(tmp_path / "t.csv")
    data = open_data(f"{spec.partition('?')[0]}?target=d,a&columns=b,c", get_network("mlp-4"))
    known = data.preprocessing.to_values(data.train.known_targets())
    np.testing.assert_allclose(known, x[:120, [3, 0]], atol=1e-6)
    assert data.preprocessing.output_names(get_network("mlp-4", outputs=2)) == ("d", "a")
    for option, message in (("a,a", "target has 'a' more than once"), ("a,e", "no column 'e'")):
        with pytest.raises(UserError, match=message):
            open_data(f"csv:{tmp_path / 't.csv'}?target={option}", get_network("mlp-4"))
    with pytest.raises(UserError, match="expects 0 and 1"):
        open_data(f"csv:{tmp_path / 't.csv'}?target=red,a", get_network("multilabel-4"))
