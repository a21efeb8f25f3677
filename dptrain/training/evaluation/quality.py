"""The quality of predictions beyond loss and accuracy: per class, and in the unit of the data.

A rank evaluates its share of the samples, and one table with a row for each sample is summed over
the ranks. The rows of other ranks are zero, so the sum rounds nothing, and every rank computes the
same numbers from the same table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import World
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.network.network import Network
from dptrain.network.outputs import NO_CLASS, are_among_most_probable, most_probable, softmax

TOP = 5
"""A prediction counts for the top-5 accuracy if the class is among the 5 most probable ones."""
MORE_THAN = 10
"""Number of classes above which the top-5 accuracy is computed."""
MOST_CURVES = 100
"""Largest number of classes of which the area under the ROC curve is computed."""


MOST_MISTAKES = 12
"""Number of wrong predictions that are kept, the most confident ones."""


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction: the sample, its class, the predicted class and its probability."""

    sample: int
    expected: int
    predicted: int
    probability: float


@dataclass(frozen=True)
class ClassQuality:
    """How well each class is predicted.

    Attributes:
        names: of the classes.
        confusion: int64 (classes, classes), number of samples by class and predicted class.
        top5: share of samples whose class is among the five most probable ones; None for up to ten
            classes.
        unpredicted: int64 (classes,), number of samples by class whose outputs contain NaN. They
            have no predicted class and count as wrong; None if there are none.
        mistakes: the wrong predictions with the highest probabilities, the highest first.
        auc: area under the ROC curve, see `mean_area`; None if it is unknown.
    """

    names: tuple[str, ...]
    confusion: NDArray[np.int64]
    top5: float | None = None
    unpredicted: NDArray[np.int64] | None = None
    mistakes: tuple[Mistake, ...] = ()
    auc: float | None = None

    @property
    def samples(self) -> NDArray[np.int64]:
        """Number of samples of each class, int64 (classes,)."""
        predicted = np.asarray(self.confusion.sum(axis=1))
        return predicted if self.unpredicted is None else predicted + self.unpredicted

    @property
    def num_unpredicted(self) -> int:
        """Number of samples whose outputs contain NaN."""
        return 0 if self.unpredicted is None else int(self.unpredicted.sum())

    @property
    def precision(self) -> NDArray[np.float64]:
        """Share of the predictions of each class that are correct; NaN without predictions."""
        return _share(self.confusion.diagonal(), self.confusion.sum(axis=0))

    @property
    def recall(self) -> NDArray[np.float64]:
        """Share of the samples of each class that are recognised; NaN without samples."""
        return _share(self.confusion.diagonal(), self.samples)

    @property
    def f1(self) -> NDArray[np.float64]:
        """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN); NaN without either."""
        return _share(2 * self.confusion.diagonal(), self.samples + self.confusion.sum(axis=0))

    def results(self) -> dict[str, float]:
        """Return the results that are single numbers."""
        known = self.f1[np.isfinite(self.f1)]
        found = {} if self.top5 is None else {"top5_accuracy": self.top5}
        found |= {} if self.auc is None else {"auc": self.auc}
        return {**found, "mean_f1": float(known.mean())} if len(known) else found

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain JSON values; a share of nothing is null."""
        columns = zip(self.samples, self.precision, self.recall, self.f1, strict=True)
        classes = [
            {
                "name": name,
                "samples": int(samples),
                **{key: _number(value) for key, value in zip(SHARES, shares, strict=True)},
            }
            for name, (samples, *shares) in zip(self.names, columns, strict=True)
        ]
        unpredicted = {"unpredicted": self.num_unpredicted} if self.num_unpredicted else {}
        confusion = self.confusion.tolist()
        return {**self.results(), **unpredicted, "classes": classes, "confusion": confusion}


SHARES = ("precision", "recall", "f1")
"""Keys of the shares of a class."""


@dataclass(frozen=True)
class ValueQuality:
    """How well values are predicted, in the unit of the data.

    Attributes:
        names: of the outputs.
        expected, predicted: float64 (n, F), a row for each sample.
        weights: float64 (n,), of the samples; None if all are equal.
    """

    names: tuple[str, ...]
    expected: NDArray[np.float64]
    predicted: NDArray[np.float64]
    weights: NDArray[np.float64] | None = None

    def results(self) -> dict[str, float]:
        """Return mean absolute error, root mean square error and coefficient of determination.

        With several outputs, the errors are means over all of them; R² compares the sum of the
        squared errors with that of the deviations from the mean of each output. Outputs whose
        targets are all equal have no deviation that a prediction could explain: R² leaves them out,
        and is absent if there are no others. Means and sums are by the weights of the samples.
        """
        errors = self.predicted - self.expected
        found = {
            "mae": float(self._means(np.abs(errors)).mean()),
            "rmse": float(np.sqrt(self._means(np.square(errors)).mean())),
        }
        # The mean of equal numbers is rounded, so their deviations may differ from 0.
        varies = (self.expected != self.expected[:1]).any(axis=0)
        if not varies.any():
            return found
        deviations = (self.expected - self._means(self.expected))[:, varies]
        unexplained = float(self._means(np.square(errors[:, varies])).sum())
        all_deviations = float(self._means(np.square(deviations)).sum())
        return {**found, "r2": 1 - unexplained / all_deviations} if all_deviations else found

    def _means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of each column over the samples."""
        return np.asarray(np.average(values, axis=0, weights=self.weights))

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain JSON values."""
        return dict(self.results())


@dataclass(frozen=True)
class LabelCounts:
    """Numbers of samples by label.

    Attributes:
        names: of the labels.
        samples: that have each label, int64 (F,).
        predicted: for which each label is predicted, int64 (F,).
        correct: that have each label and for which it is predicted, int64 (F,).
    """

    names: tuple[str, ...]
    samples: NDArray[np.int64]
    predicted: NDArray[np.int64]
    correct: NDArray[np.int64]


@dataclass(frozen=True)
class LabelQuality:
    """How well each of several labels of a sample is predicted.

    Attributes:
        names: of the labels.
        expected, predicted: int64 (n, F), 1 if a sample has a label. A prediction that is NaN is
            `NO_CLASS` and counts as wrong.
    """

    names: tuple[str, ...]
    expected: NDArray[np.int64]
    predicted: NDArray[np.int64]

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Share of the samples for which each label is predicted correctly, float64 (F,)."""
        return np.asarray((self.expected == self.predicted).mean(axis=0))

    @property
    def counts(self) -> LabelCounts:
        """Numbers of samples by label."""
        positive = self.predicted == 1
        correct = (positive & (self.expected == 1)).sum(axis=0)
        return LabelCounts(self.names, self.expected.sum(axis=0), positive.sum(axis=0), correct)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Precision, recall and F1 of each label, float64 (3, F); NaN for a share of nothing."""
        counts = self.counts
        found, predicted, samples = counts.correct, counts.predicted, counts.samples
        parts = (found, predicted), (found, samples), (2 * found, samples + predicted)
        return np.array([_share(*part) for part in parts])

    def results(self) -> dict[str, float]:
        """Return the results that are single numbers."""
        f1 = self.shares[2]
        known = f1[np.isfinite(f1)]
        found = {"label_accuracy": float(self.accuracy.mean())}
        return {**found, "mean_f1": float(known.mean())} if len(known) else found

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain JSON values; a share of nothing is null."""
        columns = zip(self.expected.sum(axis=0), self.accuracy, *self.shares, strict=True)
        labels = [
            {
                "name": name,
                "samples": int(samples),
                "accuracy": float(accuracy),
                **{key: _number(value) for key, value in zip(SHARES, shares, strict=True)},
            }
            for name, (samples, accuracy, *shares) in zip(self.names, columns, strict=True)
        ]
        return {**self.results(), "labels": labels}


Quality = ClassQuality | LabelQuality | ValueQuality


class Collector(ABC):
    """Collects what the quality of predictions needs, batch by batch.

    Args:
        count: number of samples of all ranks.
        width: numbers that are kept of each sample.
    """

    def __init__(self, count: int, width: int) -> None:
        self._table = np.zeros((count, width))

    @abstractmethod
    def add(self, indices: NDArray[np.int64], outputs: NDArray[Any], targets: NDArray[Any]) -> None:
        """Add samples.

        Args:
            indices: int64 (n,), which samples.
            outputs: (n, F), outputs of the network, before softmax or sigmoid.
            targets: of the samples, as the loss reads them.
        """

    @abstractmethod
    def result(self, world: World) -> Any:
        """Return the result over the samples of all ranks; every rank calls this method."""

    def _rows(self, world: World) -> NDArray[np.float64]:
        """Return the table of all samples; every rank calls this method."""
        world.all_reduce(self._table)
        return self._table


class _ClassCollector(Collector):
    """Collects class, predicted class, whether it is among the five most probable, the probability
    of the predicted class, and scores.

    Scores are the probabilities of the classes, of which the areas under ROC curves are computed.
    """

    def __init__(self, count: int, names: Sequence[str], outputs: int) -> None:
        self._scores = outputs if len(names) <= MOST_CURVES else 0
        super().__init__(count, 4 + self._scores)
        self._names = tuple(names)

    def add(self, indices: NDArray[np.int64], outputs: NDArray[Any], targets: NDArray[Any]) -> None:
        if outputs.shape[1] == 1:
            labels = targets.reshape(-1) > 0.5
            predicted = np.where(np.isnan(outputs[:, 0]), NO_CLASS, outputs[:, 0] > 0)
            in_top, logits = labels == predicted, outputs * [[0, 1]]
        else:
            labels, predicted = targets, most_probable(outputs)
            in_top, logits = are_among_most_probable(outputs, labels, TOP), outputs
        probabilities = softmax(np.asarray(logits, np.float64))
        found = [labels, predicted, in_top, probabilities.max(axis=1)]
        self._table[indices, :4] = np.stack(found, axis=1)
        if self._scores:
            self._table[indices, 4:] = outputs if self._scores == 1 else probabilities

    def result(self, world: World) -> ClassQuality:
        table, count = self._rows(world), len(self._names)
        labels, predicted, in_top = table[:, :3].astype(np.int64).T
        known = predicted != NO_CLASS
        pairs = labels[known] * count + predicted[known]
        confusion = np.bincount(pairs, minlength=count * count).reshape(count, count)
        top5 = float(in_top.mean()) if count > MORE_THAN else None
        unpredicted = None if known.all() else np.bincount(labels[~known], minlength=count)
        wrong = np.flatnonzero(known & (labels != predicted))
        worst = wrong[np.argsort(-table[wrong, 3], kind="stable")][:MOST_MISTAKES].tolist()
        mistakes = tuple(
            Mistake(i, int(labels[i]), int(predicted[i]), float(table[i, 3])) for i in worst
        )
        matrix, auc = confusion.astype(np.int64), mean_area(table[:, 4:], labels)
        return ClassQuality(self._names, matrix, top5, unpredicted, mistakes, auc)


def mean_area(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> float | None:
    """Return the area under the ROC curve.

    It is the probability that a sample of a class has a higher score for it than one of another
    class, where equal scores count one half. With several classes it is the mean over the classes,
    each against all others, of those that have samples.

    Args:
        scores: (n, K), one for each class; or (n, 1), that of the second of two classes.
        labels: int64 (n,).

    Returns:
        None without scores, if a score is NaN, or if no class has samples and others too.

    Examples:
        >>> mean_area(np.array([[0.1], [0.4], [0.3], [0.8]]), np.array([0, 0, 1, 1]))
        0.75
    """
    if not scores.shape[1] or np.isnan(scores).any():
        return None
    first = 1 if scores.shape[1] == 1 else 0
    areas = [_area(column, labels == k) for k, column in enumerate(scores.T, first)]
    known = [area for area in areas if area is not None]
    return float(np.mean(known)) if known else None


def _area(scores: NDArray[np.float64], is_positive: NDArray[np.bool_]) -> float | None:
    """Return the area of one class by the rank sum of Mann and Whitney."""
    positive = int(is_positive.sum())
    pairs = positive * (len(scores) - positive)
    if not pairs:
        return None
    _, order, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = float(ranks[order.reshape(-1)][is_positive].sum())
    return (rank_sum - positive * (positive + 1) / 2) / pairs


class _LabelCollector(Collector):
    """Collects expected and predicted labels."""

    def __init__(self, count: int, names: Sequence[str]) -> None:
        super().__init__(count, 2 * len(names))
        self._names = tuple(names)

    def add(self, indices: NDArray[np.int64], outputs: NDArray[Any], targets: NDArray[Any]) -> None:
        predicted = np.where(np.isnan(outputs), NO_CLASS, outputs > 0)
        self._table[indices] = np.hstack([targets.reshape(outputs.shape) > 0.5, predicted])

    def result(self, world: World) -> LabelQuality:
        expected, predicted = np.hsplit(self._rows(world).astype(np.int64), 2)
        return LabelQuality(self._names, expected, predicted)


class _ValueCollector(Collector):
    """Collects expected and predicted values."""

    def __init__(
        self,
        count: int,
        names: Sequence[str],
        preprocessing: Preprocessing,
        weights: NDArray[np.float64] | None,
    ) -> None:
        super().__init__(count, 2 * len(names))
        self._names, self._preprocessing = tuple(names), preprocessing
        self._weights = weights

    def add(self, indices: NDArray[np.int64], outputs: NDArray[Any], targets: NDArray[Any]) -> None:
        both = np.float64(targets.reshape(outputs.shape)), np.float64(outputs)
        self._table[indices] = np.hstack([self._preprocessing.to_values(each) for each in both])

    def result(self, world: World) -> ValueQuality:
        expected, predicted = np.hsplit(self._rows(world), 2)
        return ValueQuality(self._names, expected, predicted, self._weights)


def make_collector(
    count: int,
    network: Network,
    preprocessing: Preprocessing,
    weights: NDArray[np.float64] | None = None,
) -> Collector:
    """Return a collector for `count` samples; results of classes and labels count them alike."""
    if network.loss.targets == "values":
        return _ValueCollector(count, preprocessing.output_names(network), preprocessing, weights)
    classes = preprocessing.class_list(network)
    if classes is None:
        return _LabelCollector(count, preprocessing.output_names(network))
    return _ClassCollector(count, classes.names, network.num_outputs)


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return part / whole; NaN where the whole is 0."""
    found = np.full(len(whole), np.nan)
    np.divide(part, whole, out=found, where=whole > 0)
    return found


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
