"""Loss and optimizer kernels, compared with PyTorch and with their equations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.backend import loss_kernel
from dptrain.backends.memory import as_numbers
from dptrain.network import LOSSES as DESCRIBED
from tests.lazy import LazyModule
from tests.tiers import tiered
from tests.unit.cuda.launching import BF16, FP32, Kept, ints, launch_in_every_order

torch = LazyModule("torch")

EPSILON = float(np.finfo(np.float32).eps)

LOSSES = tuple(DESCRIBED)


THREADS = 512


def evaluate(
    name: str,
    z: NDArray[Any],
    target: NDArray[Any],
    scale: float,
    *,
    backward: bool = True,
    kept: Kept = FP32,
    lanes: int = 16,
    blocks: int = 1,
    smoothing: float | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the gradient and the loss sums of the kernel; the stop request is 1."""
    blank, sums = np.full_like(z, 7.0), np.full(3, 7.0, np.float32)
    numbers, between = np.float32([0.0, 0.0, 1.0, 0.0, 0.0]), np.zeros(1 + blocks, np.uint64)
    last = [] if smoothing is None else [np.float32(smoothing)]
    kernel, macros = loss_kernel(DESCRIBED[name]())
    _, _, gradient, sums, _, between = launch_in_every_order(
        "losses.cu", kernel, blocks * THREADS,
        kept.store(z), target, kept.store(blank), sums, numbers, between, *ints(*z.shape),
        np.float32(scale), np.int32(backward), *last, block=THREADS, SMOOTHED=len(last),
        SAMPLE_LANES=lanes, PRECISION=kept.precision, **macros,
    )  # fmt: skip
    assert between[0] == 0
    assert sums[2] == 1.0
    return as_numbers(gradient), sums


def exact(
    name: str, z: NDArray[Any], target: NDArray[Any], smoothing: float = 0.0
) -> tuple[float, Any, int]:
    """Return the sum of losses, its gradient and the correct predictions, by PyTorch."""
    outputs = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    y = torch.tensor(target)
    functional = torch.nn.functional
    if name == "softmax_cross_entropy":
        loss = functional.cross_entropy(
            outputs, y.long(), reduction="sum", label_smoothing=smoothing
        )
        correct = int((outputs.argmax(1) == y).sum())
    elif name == "softmax_squared_error":
        onehot = functional.one_hot(y.long(), z.shape[1]).double()
        loss = ((outputs.softmax(1) - onehot) ** 2).mean(1).sum()
        correct = int((outputs.argmax(1) == y).sum())
    elif name == "sigmoid_cross_entropy":
        loss = functional.binary_cross_entropy_with_logits(outputs, y.double(), reduction="none")
        loss, correct = loss.mean(1).sum(), int(((outputs > 0) == (y > 0.5)).all(1).sum())
    else:
        loss, correct = ((outputs - y) ** 2).mean(1).sum(), 0
    loss.backward()
    assert outputs.grad is not None
    return float(loss.detach()), outputs.grad.numpy(), correct


def numbers(name: str, n: int, outputs: int, spread: float) -> tuple[Any, Any]:
    rng = np.random.default_rng(n + outputs)
    z = (spread * rng.standard_normal((n, outputs))).astype(np.float32)
    if DESCRIBED[name].targets == "classes":
        return z, rng.integers(0, outputs, n).astype(np.int32)
    if name == "sigmoid_cross_entropy":
        return z, rng.integers(0, 2, (n, outputs)).astype(np.float32)
    return z, rng.standard_normal((n, outputs)).astype(np.float32)


@pytest.mark.parametrize(("kept", "spread"), [(FP32, 30.0), (BF16, 1.0)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("n", "outputs", "lanes", "blocks"),
    tiered(
        [
            (1, 1, 1, 1), (1, 11, 16, 1), (7, 3, 1, 1), (256, 2, 1, 1), (301, 10, 16, 2),
            (301, 10, 16, 10), (5, 1000, 32, 1), (37, 70, 32, 3),
        ],
        [(7, 3, 1, 1), (301, 10, 16, 2), (37, 70, 32, 3)],
    ),
)  # fmt: skip
@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_pytorch(
    name: str, n: int, outputs: int, lanes: int, blocks: int, spread: float, kept: Kept
) -> None:
    """Allow a few roundings of the largest loss of a sample, and of probabilities up to 1.

    A gradient stored as bfloat16 has one more rounding error.
    """
    z, target = numbers(name, n, outputs, spread)
    z = kept.round(z)
    scale = 1.0 / (n + 3)
    gradient, sums = evaluate(name, z, target, scale, kept=kept, lanes=lanes, blocks=blocks)
    loss, dz, correct = exact(name, z, target)
    largest = max(1.0, float(np.abs(z).max())) ** (2 if name == "mean_squared_error" else 1)
    assert abs(sums[0] - loss * scale) <= 8 * EPSILON * largest
    assert sums[1] == correct
    slope = max(1.0, 2.0 * float(np.abs(z).max())) if name == "mean_squared_error" else 1.0
    bound = (outputs + 4) * EPSILON * slope * scale
    np.testing.assert_allclose(gradient, dz * scale, kept.unit, bound)


@pytest.mark.parametrize("kept", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("n", "outputs", "lanes", "blocks"),
    tiered([(1, 2, 2, 1), (301, 10, 16, 2), (5, 1000, 32, 1)], [(301, 10, 16, 2)]),
)
def test_smoothed_labels_equal_pytorch(
    n: int, outputs: int, lanes: int, blocks: int, kept: Kept
) -> None:
    z, target = numbers("softmax_cross_entropy", n, outputs, 3.0)
    z, scale = kept.round(z), 1.0 / (n + 3)
    options: dict[str, Any] = {"kept": kept, "lanes": lanes, "blocks": blocks}
    gradient, sums = evaluate("softmax_cross_entropy", z, target, scale, smoothing=0.2, **options)
    loss, dz, correct = exact("softmax_cross_entropy", z, target, 0.2)
    assert abs(sums[0] - loss * scale) <= 16 * EPSILON * float(np.abs(z).max())
    assert sums[1] == correct
    bound = (outputs + 4) * EPSILON * scale
    np.testing.assert_allclose(gradient, dz * scale, kept.unit, bound)
    # Evaluations do not smooth.
    plain = evaluate("softmax_cross_entropy", z, target, scale, backward=False, **options)[1]
    smoothed = evaluate(
        "softmax_cross_entropy", z, target, scale, backward=False, smoothing=0.2, **options
    )[1]
    np.testing.assert_array_equal(smoothed, plain)


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_does_not_write_the_gradient(name: str) -> None:
    z, target = numbers(name, 5, 3, 1.0)
    gradient, sums = evaluate(name, z, target, 0.5, backward=False)
    assert (gradient == 7.0).all()
    assert sums[0] == evaluate(name, z, target, 0.5)[1][0]


@pytest.mark.parametrize("name", LOSSES)
def test_no_samples_add_nothing(name: str) -> None:
    z, target = numbers(name, 1, 3, 1.0)
    gradient, sums = evaluate(name, z[:0], target[:0], 1.0)
    assert gradient.size == 0
    assert sums.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_shows_in_the_loss(name: str) -> None:
    z, target = numbers(name, 3, 2, 1.0)
    z[1, 0] = np.nan
    assert np.isnan(evaluate(name, z, target, 1.0)[1][0])


def test_the_first_of_equal_outputs_is_the_prediction() -> None:
    z = np.array([[2.0, 2.0], [2.0, 2.0]], np.float32)
    labels = np.array([0, 1], np.int32)
    assert evaluate("softmax_cross_entropy", z, labels, 1.0)[1][1] == 1.0


# Optimizers.

STOPS, DECAYS, FACTORS = [16, 48, 304], [0.0, 0.3, 0.004], [1.0, 0.5, 2.0]
"""Ends of segments with the same weight decay and factor of the learning rate: multiples of 16
elements."""


def state(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(STOPS[-1]).astype(np.float32)


def update(
    name: str,
    vector: int,
    arrays: list[NDArray[Any]],
    *rest: Any,
    rate: float = 0.1,
    correction: float = 1.0,
    decay_rate: float = 0.0,
    loss: float = 1.0,
) -> list[NDArray[Any]]:
    """Return w and the state after an update; the first two arrays are w and g."""
    rates = np.array([DECAYS, FACTORS], np.float32).T.reshape(-1)
    size, runs = STOPS[-1], [np.array(STOPS, np.int32), rates]
    values = np.float32([loss, 0, 0]), np.float32([rate, correction, 0, 0, decay_rate])
    arguments = *arrays, *values, *runs, *ints(len(DECAYS), size), *rest
    results = launch_in_every_order(
        "optimizers.cu", name, size // vector, *arguments, VECTOR=vector
    )
    np.testing.assert_array_equal(results[1], arrays[1])
    return [results[0], *results[2 : len(arrays)]]


def of_elements(values: list[float]) -> NDArray[np.float64]:
    """Return the values of the segments for each element."""
    return np.repeat(values, np.diff([0, *STOPS]))


def decayed(w: NDArray[Any], g: NDArray[Any]) -> NDArray[Any]:
    return g.astype(np.float64) + of_elements(DECAYS) * w


def assert_close(actual: NDArray[Any], wanted: NDArray[Any]) -> None:
    """Allow four roundings of numbers of this size."""
    np.testing.assert_allclose(actual, wanted, 4 * EPSILON, 8 * EPSILON)


by_vector = pytest.mark.parametrize("vector", [1, 4])


@by_vector
def test_sgd_equals_its_equation(vector: int) -> None:
    w, g = state(1), state(2)
    [result] = update("sgd", vector, [w, g])
    assert_close(result, w - 0.1 * of_elements(FACTORS) * decayed(w, g))


@by_vector
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_equals_its_equation(vector: int, nesterov: bool) -> None:
    w, g, v = state(1), state(2), state(3)
    options = np.float32(0.9), np.int32(nesterov)
    result, velocity = update("sgd_momentum", vector, [w, g, v], *options)
    d = decayed(w, g)
    expected = 0.9 * v + d
    assert_close(velocity, expected)
    change = d + 0.9 * expected if nesterov else expected
    assert_close(result, w - 0.1 * of_elements(FACTORS) * change)


@by_vector
@pytest.mark.parametrize("t", [1, 7])
def test_adam_equals_its_equation(vector: int, t: int) -> None:
    w, g, m, v = state(1), state(2), state(3), np.abs(state(4))
    beta1, beta2, epsilon, rate = 0.8, 0.95, 1e-3, 0.1
    options = beta1, beta2, epsilon, 1 - beta1, 1 - beta2
    result, first, second = update(
        "adam", vector, [w, g, m, v], *map(np.float32, options),
        rate=rate / (1 - beta1**t), correction=1 / np.sqrt(1 - beta2**t),
    )  # fmt: skip
    d = decayed(w, g)
    mean, square = beta1 * m + (1 - beta1) * d, beta2 * v + (1 - beta2) * d * d
    assert_close(first, mean)
    assert_close(second, square)
    step = mean / (1 - beta1**t) / (np.sqrt(square / (1 - beta2**t)) + epsilon)
    expected = w - rate * of_elements(FACTORS) * step
    np.testing.assert_allclose(result, expected, 8 * EPSILON, 32 * EPSILON)


@by_vector
@pytest.mark.parametrize("t", [1, 7])
def test_adamw_equals_its_equation(vector: int, t: int) -> None:
    w, g, m, v = state(1), state(2), state(3), np.abs(state(4))
    beta1, beta2, epsilon, rate = 0.8, 0.95, 1e-3, 0.1
    options = beta1, beta2, epsilon, 1 - beta1, 1 - beta2
    result, first, second = update(
        "adamw", vector, [w, g, m, v], *map(np.float32, options),
        rate=rate / (1 - beta1**t), correction=1 / np.sqrt(1 - beta2**t), decay_rate=rate,
    )  # fmt: skip
    mean, square = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * np.float64(g)
    assert_close(first, mean)
    assert_close(second, square)
    step = mean / (1 - beta1**t) / (np.sqrt(square / (1 - beta2**t)) + epsilon)
    expected = w - rate * of_elements(FACTORS) * (of_elements(DECAYS) * w + step)
    np.testing.assert_allclose(result, expected, 8 * EPSILON, 32 * EPSILON)


def test_small_state_becomes_zero_and_nan_stays() -> None:
    w, g, v = state(1), np.zeros(STOPS[-1], np.float32), state(3)
    w[:] = 0.0
    v[:3] = 1e-30, -1e-30, np.nan
    options = np.float32(0.5), np.int32(0)
    _, velocity = update("sgd_momentum", 1, [w, g, v], *options)
    assert velocity[:2].tolist() == [0.0, 0.0]
    assert np.isnan(velocity[2])
    assert velocity[3] == np.float32(0.5) * v[3]


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "state_arrays", "options"),
    [
        ("sgd", 0, []),
        ("sgd_momentum", 1, [np.float32(0.9), np.int32(0)]),
        ("adam", 2, list(np.float32([0.9, 0.99, 1e-8, 0.1, 0.01]))),
        ("adamw", 2, list(np.float32([0.9, 0.99, 1e-8, 0.1, 0.01]))),
    ],
)
def test_nothing_is_updated_if_the_loss_is_not_finite(
    name: str, state_arrays: int, options: list[Any], loss: float
) -> None:
    """The state before the failure remains available for inspection."""
    arrays = [state(seed) for seed in range(2 + state_arrays)]
    kept = update(name, 4, arrays, *options, loss=loss)
    for array, same in zip([arrays[0], *arrays[2:]], kept, strict=True):
        np.testing.assert_array_equal(array, same)
    moved = update(name, 4, arrays, *options)
    for array, other in zip([arrays[0], *arrays[2:]], moved, strict=True):
        assert (array != other).any()


@by_vector
@pytest.mark.parametrize("loss", [1.0, np.nan])
def test_the_average_of_parameters(vector: int, loss: float) -> None:
    average, w, size = state(1), state(2), STOPS[-1]
    values = np.float32([loss, 0, 0]), np.float32([0, 0, 0, 0, 0, 0.25])
    found, same, *_ = launch_in_every_order(
        "optimizers.cu", "average_parameters", size // vector, average, w, *values, *ints(size),
        VECTOR=vector,
    )  # fmt: skip
    np.testing.assert_array_equal(same, w)
    if np.isnan(loss):
        np.testing.assert_array_equal(found, average)
    else:
        assert_close(found, 0.75 * average.astype(np.float64) + 0.25 * w)


# Gradient clipping.


@pytest.mark.parametrize(("size", "blocks"), [(16, 1), (1000, 3), (1024, 4)])
@pytest.mark.parametrize("clip_norm", [0.5, 1e4])
def test_gradients_are_clipped(size: int, blocks: int, clip_norm: float) -> None:
    """A gradient that is not clipped keeps its bits."""
    gradient = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    _, partials = launch_in_every_order(
        "clipping.cu", "add_squares", blocks * 256, gradient, np.zeros(blocks), *ints(size)
    )
    norm = float(np.linalg.norm(gradient.astype(np.float64)))
    assert np.sqrt(partials.sum()) == pytest.approx(norm, rel=1e-14)
    clipped, _ = launch_in_every_order(
        "clipping.cu", "clip_gradient", blocks * 256, gradient, partials, *ints(blocks),
        np.float32(clip_norm), *ints(size),
    )  # fmt: skip
    factor = min(1.0, clip_norm / (norm + 1e-6))
    np.testing.assert_allclose(clipped, gradient * factor, rtol=EPSILON)
    assert np.array_equal(clipped, gradient) == (clip_norm > norm)
