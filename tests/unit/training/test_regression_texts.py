"""Units of a regression, and what it says about results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import load
from dptrain.network import Dense, MeanSquaredError, Network, get_network
from dptrain.network.zoo import recipe
from dptrain.network.zoo.recipes import IMAGES, TABLES, VALUES, Recipe
from dptrain.training.evaluation.quality import ValueQuality
from dptrain.training.evaluation.regression import r2_remark
from dptrain.training.trainer import Trainer
from tests.lazy import LazyModule
from tests.unit.interchange.models import run_onnx, run_torch

datasets = LazyModule("sklearn.datasets")
linear_model = LazyModule("sklearn.linear_model")

REMARK = "worse than predicting the mean of the targets"


def test_worse_than_the_mean_is_what_has_larger_errors_than_the_mean() -> None:
    """Random predictions, from perfect to wrong, of one or several outputs."""
    worse = 0
    for seed in range(300):
        random_ = np.random.default_rng(seed)
        shape = random_.integers(2, 50), random_.integers(1, 4)
        expected = random_.normal(random_.normal(), 1, shape)
        predicted = expected + random_.normal(0, 10 ** random_.uniform(-2, 1), expected.shape)
        found = ValueQuality(tuple("abc"), expected, predicted).results()
        is_worse = np.mean((predicted - expected) ** 2) > np.mean(
            (expected - expected.mean(axis=0)) ** 2
        )
        assert (REMARK in r2_remark(found["r2"])) == is_worse, seed
        worse += int(is_worse)
    assert 50 < worse < 250


def test_a_run_says_that_it_is_worse_than_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 50)), rng.standard_normal((200, 1))
    trainer = Trainer("mlp-2", (np.float32(x), y), steps=1, backend="reference", progress=True)
    trainer.fit()
    text = capsys.readouterr().out
    assert REMARK in text


def test_results_of_standardised_targets_have_the_unit_of_the_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((120, 3)).astype(np.float32)
    y = np.stack([5000 + 300 * x[:, 0], 1e-3 * x[:, 1], np.full(120, 7.0)], axis=1)
    y[:, 0] += rng.normal(0, 30, 120)
    network = Network((3,), [Dense(3)], MeanSquaredError(), "units")
    trainer = Trainer(
        network, (x[:90], y[:90], x[90:], y[90:]), steps=400, learning_rate=0.02, optimizer="adam",
        backend="reference", progress=False, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    trainer.fit()
    unit = trainer.job.dataset.preprocessing
    np.testing.assert_allclose(unit.target_offset, y[:90].mean(axis=0))
    np.testing.assert_allclose(unit.target_scale, [*y[:90, :2].std(axis=0), 1.0])
    predicted, results = trainer.predict(x[90:]), trainer.evaluate()
    np.testing.assert_allclose(predicted, y[90:], rtol=0.05, atol=2e-4)
    errors = predicted - y[90:]
    assert results["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
    assert results["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)
    # Other data has the unit of the training data, whatever its own mean is.
    assert trainer.evaluate((x[90:], y[90:]))["mae"] == pytest.approx(results["mae"])
    model = load(tmp_path / "run")
    np.testing.assert_allclose(model.predict(x[90:]), predicted, rtol=1e-4)
    for name, run in (("model.onnx", run_onnx), ("model.py", run_torch)):
        path = model.export(tmp_path / name)[0]
        np.testing.assert_allclose(run(path, x[90:]), predicted, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(lambda: get_network("mlp-8"), TABLES), (lambda: get_network("classifier-8"), TABLES),
     (lambda: get_network("mlp-50"), TABLES), (lambda: get_network("model0"), IMAGES)],
)  # fmt: skip
def test_perceptrons_have_a_recipe_for_tables(make: Any, expected: Recipe) -> None:
    assert recipe(make(), data="csv:t.csv?target=a") == expected
    assert recipe(get_network("mlp-50"), data="irradiance?samples=9") == VALUES
    changed = recipe(get_network("mlp-8"), "adam", "csv:t.csv?target=a")
    assert (changed.weight_decay, changed.learning_rate) == (None, 1e-3)


def test_a_small_table_is_learnt_with_the_recipe(tmp_path: Path) -> None:
    data = datasets.load_diabetes(scaled=False)
    order = np.random.default_rng(3).permutation(len(data.target))
    rows = np.column_stack([data.data, data.target])[order]
    names = ",".join([*data.feature_names, "t"])
    np.savetxt(tmp_path / "t.csv", rows, "%g", ",", header=names, comments="")
    trainer = Trainer("mlp-32", f"csv:{tmp_path / 't.csv'}?target=t", progress=False)
    trainer.fit()
    linear = linear_model.LinearRegression().fit(rows[:-88, :-1], rows[:-88, -1])
    assert trainer.evaluate()["r2"] > linear.score(rows[-88:, :-1], rows[-88:, -1]) - 0.05
