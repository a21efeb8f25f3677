"""Perceptrons on small tables, with no settings, compared with scikit-learn.

    python -m benchmarks.small_tables [--splits 20] [DATA …]

Each split shuffles the rows of a data set of scikit-learn, writes them to a CSV file, and uses the
last fifth of the rows for the test, as ``--network mlp-32 --data csv:FILE?target=TARGET`` does.
scikit-learn's perceptron has the same hidden layer, standardised inputs and ``max_iter=2000``; its
linear model is the least-squares or the logistic regression. Numbers are means of R² or of the
accuracy over the splits, with their standard errors.
"""

from __future__ import annotations

import csv
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.flags import flags
from dptrain import Trainer

DATA = ("diabetes", "wine", "breast_cancer", "digits")
UNITS = 32

Split = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""x_train, y_train, x_test, y_test."""


def load(name: str, split: int) -> tuple[Split, NDArray[np.int64]]:
    """Return a data set of scikit-learn in a random order, divided, and the labels of the rows."""
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    order = np.random.default_rng(split).permutation(len(found.target))
    x, y, test = found.data[order], found.target[order], len(order) // 5
    return (x[:-test], y[:-test], x[-test:], y[-test:]), y


def ours(split: Split, predicts_values: bool, seed: int, folder: Path) -> float:
    """Return the score of a perceptron with the settings of its recipe."""
    x_train, y_train, x_test, y_test = split
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{column}" for column in range(x_train.shape[1])), "target"])
        for x, y in ((x_train, y_train), (x_test, y_test)):
            targets = y.tolist() if predicts_values else [f"class {label}" for label in y]
            writer.writerows(
                [*row, target] for row, target in zip(x.tolist(), targets, strict=True)
            )
    network = f"{'mlp' if predicts_values else 'classifier'}-{UNITS}"
    trainer = Trainer(network, f"csv:{path}?target=target", seed=seed, progress=False)
    trainer.fit()
    return float(trainer.evaluate()["r2" if predicts_values else "accuracy"])


def theirs(split: Split, predicts_values: bool, seed: int) -> tuple[float, float]:
    """Return the scores of scikit-learn's perceptron and of its linear model."""
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    kind: Callable[..., Any] = MLPRegressor if predicts_values else MLPClassifier
    perceptron = kind(hidden_layer_sizes=(UNITS,), max_iter=2000, random_state=seed)
    linear = LinearRegression() if predicts_values else LogisticRegression(max_iter=2000)
    x_train, y_train, x_test, y_test = split
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        perceptron_score, linear_score = (
            make_pipeline(StandardScaler(), model).fit(x_train, y_train).score(x_test, y_test)
            for model in (perceptron, linear)
        )
    return float(perceptron_score), float(linear_score)


@click.command()
@flags(splits=20)
@click.argument("data", nargs=-1)
def main(splits: int, data: tuple[str, ...]) -> None:
    """Print a row for each data set: diabetes, wine, breast_cancer, digits."""
    print(f"{'data':14} {'dptrain':>15} {'MLP':>15} {'linear':>15}")
    for name in data or DATA:
        scores = []
        for split in range(splits):
            divided, y = load(name, split)
            predicts_values = len(np.unique(y)) > 20
            with tempfile.TemporaryDirectory() as folder:
                own = ours(divided, predicts_values, split, Path(folder))
            scores.append((own, *theirs(divided, predicts_values, split)))
        columns = np.array(scores).T
        error = columns.std(axis=1, ddof=min(1, splits - 1)) / math.sqrt(splits)
        cells = (f"{m:.4f} ± {e:.4f}" for m, e in zip(columns.mean(axis=1), error, strict=True))
        print(f"{name:14} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
