"""Probabilities and most probable classes over the whole range of numbers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, top_k_accuracy_score

from dptrain.network.outputs import (
    NO_CLASS,
    are_among_most_probable,
    are_right,
    most_probable,
    predicted_classes,
    sigmoid,
    softmax,
)

EXAMPLES = 300
floats32 = st.floats(width=32)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROUNDOFF = float(np.finfo(np.float32).eps)


def exact_sigmoid(z: float) -> float:
    """Return σ(z) in float64, by the form that does not cancel for its sign."""
    if math.isnan(z):
        return math.nan
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))


@example([-10.0, -18.0, -30.0, -87.0, -math.inf, math.inf, math.nan, 0.0, 40.0])
@given(st.lists(floats32, min_size=1, max_size=20))
def test_sigmoid_has_the_relative_error_of_its_type(values: list[float]) -> None:
    z = np.array(values, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sigmoid(z)
    assert found.dtype == np.float32
    exact = np.array([exact_sigmoid(float(value)) for value in z])
    smallest = float(np.finfo(np.float32).tiny)
    np.testing.assert_allclose(found, exact, 4 * ROUNDOFF, smallest)


@example([1e4, -1e4, 0.0])
@example([math.nan, 1.0, 2.0])
@example([-math.inf, 1.0, 2.0])
@given(st.lists(floats32, min_size=2, max_size=8))
def test_softmax_has_the_relative_error_of_its_type(values: list[float]) -> None:
    z = np.array([values], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = softmax(z)
    largest = max(values)
    if math.isnan(sum(values)) or math.isinf(largest):
        assert np.isnan(found).all()
        return
    powers = [math.exp(float(value) - float(largest)) for value in z[0]]
    exact = np.array(powers) / math.fsum(powers)
    smallest = float(np.finfo(np.float32).tiny)
    np.testing.assert_allclose(found, exact, 2 * ROUNDOFF, smallest)


def outputs_and_labels(few_values: bool) -> st.SearchStrategy[tuple[NDArray[Any], NDArray[Any]]]:
    """Return outputs (n, 12) with many equal numbers, or any, and labels."""
    elements = st.sampled_from([0.0, 0.0, 1.0, -2.0, math.inf]) if few_values else floats32
    count = st.integers(1, 6)

    def of(n: int) -> st.SearchStrategy[tuple[NDArray[Any], NDArray[Any]]]:
        labels = arrays.arrays(np.int64, n, elements=st.integers(0, 11))
        return st.tuples(arrays.arrays(np.float32, (n, 12), elements=elements), labels)

    return count.flatmap(of)


@given(st.booleans().flatmap(outputs_and_labels), st.integers(1, 12))
def test_most_probable_classes_are_those_of_scikit_learn(
    pair: tuple[NDArray[Any], NDArray[Any]], count: int
) -> None:
    """Of equal outputs, scikit-learn prefers the last class and we the first, as argmax does."""
    outputs, labels = pair
    found = are_among_most_probable(outputs, labels, count)
    predicted = most_probable(outputs)
    known = ~np.isnan(outputs).any(axis=1)
    assert not found[~known].any()
    assert (predicted[~known] == NO_CLASS).all()
    if known.any():
        # Ranks, because scikit-learn refuses infinities.
        _, ranks = np.unique(outputs[known], return_inverse=True)
        mirrored = ranks.reshape(-1, 12)[:, ::-1].astype(float)
        if count < 12:
            expected = top_k_accuracy_score(
                11 - labels[known], mirrored, k=count, labels=np.arange(12)
            )
            assert found[known].mean() == pytest.approx(expected)
        right = accuracy_score(labels[known], predicted[known])
        assert are_among_most_probable(outputs, labels, 1)[known].mean() == pytest.approx(right)


@given(arrays.arrays(np.float32, (4, 2), elements=floats32))
def test_nan_is_on_no_side_of_a_half(outputs: NDArray[Any]) -> None:
    found = [are_right(outputs, np.full((4, 2), target)) for target in (0.0, 1.0)]
    is_nan = np.isnan(outputs).any(axis=1)
    assert (found[0] == ((outputs <= 0).all(axis=1) & ~is_nan)).all()
    assert (found[1] == ((outputs > 0).all(axis=1) & ~is_nan)).all()


@pytest.mark.parametrize("count", [1, 5, 11])
def test_equal_outputs_are_found_as_often_as_by_chance(count: int) -> None:
    labels = np.arange(24) % 12
    assert are_among_most_probable(np.zeros((24, 12)), labels, count).mean() == count / 12


@given(st.integers(1, 4).flatmap(lambda f: arrays.arrays(np.float32, (3, f), elements=floats32)))
def test_the_predicted_class_has_the_largest_probability(probabilities: NDArray[Any]) -> None:
    found = predicted_classes(probabilities)
    for row, index in zip(probabilities.tolist(), found.tolist(), strict=True):
        if any(map(math.isnan, row)):
            assert index == NO_CLASS
        elif len(row) == 1:
            assert index == (row[0] > 0.5)
        else:
            assert index == row.index(max(row))
