"""Every layer, loss and update rule, in every backend, against PyTorch and finite differences."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dptrain.api
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.errors import UserError
from dptrain.network import (
    GELU,
    LAYERS,
    LOSSES,
    Add,
    AveragePool2d,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    GroupNorm,
    LayerNorm,
    LeakyReLU,
    Loss,
    MaxPool2d,
    MeanSquaredError,
    Network,
    NodeSpec,
    ReLU,
    SigmoidBinaryCrossEntropy,
    SiLU,
    SoftmaxCrossEntropy,
    SoftmaxSquaredError,
    Tanh,
)
from dptrain.philox import dropout_keep, philox
from dptrain.plan import LAMB, LARS, SGD, Adam, AdamW, MicroShards, Optimizer, RMSProp
from dptrain.plan.freezing import rate_factors
from dptrain.plan.shards import add_in_order, rank_contributions
from tests.lazy import LazyModule
from tests.unit.backends import cases, pytorch_reference
from tests.unit.backends.cases import Case, behind_maps, spread
from tests.unit.backends.cuda.gemm_tile import gather_first_layers, use_one_gemm_tile
from tests.unit.backends.pytorch_reference import Result
from tests.unit.backends.selection import (
    CASES,
    QUICK_VARIANTS,
    VARIANTS,
    cover,
    kinds,
    marked,
    trials,
)

torch = LazyModule("torch")

every_variant = pytest.mark.parametrize(
    ("backend", "precision"),
    [
        marked(*variant, name="-".join(variant), is_quick=variant in QUICK_VARIANTS)
        for variant in VARIANTS
    ],
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_selected_case = pytest.mark.parametrize(
    ("case", "backend", "precision"), [trial.parameter for trial in trials()]
)

SEED, STEP, FIRST_SAMPLE = 5, 3, 41


@pytest.fixture(autouse=True)
def one_gemm_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_gemm_tile(monkeypatch)
    gather_first_layers(monkeypatch)


def compile_case(case: Case, backend: str, precision: str) -> Replica:
    """A replica with the case's parameters, rounded to its dtype."""
    replica = dptrain.api.make_replica(
        case.network, backend, case.batch_size, precision=precision, seed=SEED
    )
    for name, value in case.parameters().items():
        replica.parameters[name] = value
    return replica


def rounded_parameters(case: Case, dtype: str) -> dict[str, NDArray[np.generic]]:
    return {name: value.astype(dtype) for name, value in case.parameters().items()}


@functools.cache
def exact_results(case: Case, dtype: str) -> Result:
    """Return what PyTorch computes for a case, once for all backends."""
    x, y = case.data()
    samples = np.arange(len(x)) + FIRST_SAMPLE
    return pytorch_reference.compute(
        case.network, rounded_parameters(case, dtype), x, y, seed=SEED, step=STEP, samples=samples
    )


@functools.cache
def error_bounds(case: Case, dtype: str, precision: str) -> Result:
    """Return the bounds of the errors of a backend."""
    x, y = case.data()
    parameters = rounded_parameters(case, dtype)
    return pytorch_reference.bounds(case.network, parameters, x, y, dtype, precision)


def assert_within(actual: object, expected: object, bound: object, what: str) -> None:
    """Element by element, |actual − expected| ≤ bound."""
    error = np.abs(np.asarray(actual, np.float64) - np.asarray(expected))
    excess = np.max(error - np.asarray(bound), initial=-1.0)
    assert excess <= 0.0, f"{what}: error exceeds its bound by {excess:.3g}"
    assert np.isfinite(error).all(), f"{what}: not finite"


def test_the_reference_computes_every_case() -> None:
    assert all(case.is_implemented("reference") for case in CASES)
    features = frozenset[str]().union(*(case.features for case in CASES))
    assert features == cases.IMPLEMENTED["reference"]


def test_the_cases_cover_every_layer_and_loss() -> None:
    covered = {type(layer) for case in CASES for layer in case.network.layers}
    assert covered == set(LAYERS.values())
    assert {type(case.network.loss) for case in CASES} == set(LOSSES.values())


@every_selected_case
def test_output_loss_and_gradients_equal_pytorch(case: Case, backend: str, precision: str) -> None:
    replica = compile_case(case, backend, precision)
    x, y = case.data()
    loss = replica.forward_backward(x, y, step=STEP, samples=np.arange(len(x)) + FIRST_SAMPLE)
    dtype = replica.plan.dtype
    exact, bounds = exact_results(case, dtype), error_bounds(case, dtype, precision)
    assert_within(replica.output(), exact.output, bounds.output, "output")
    assert_within(loss, exact.loss, bounds.loss, "loss")
    for name, gradient in exact.gradients.items():
        assert_within(replica.gradients[name], gradient, bounds.gradients[name], name)


@every_case
def test_the_bounds_are_narrow_enough_to_see_a_mistake(case: Case) -> None:
    """In float32 the bound stays under a tenth of the largest gradient it guards.

    Bounds are proportional to the unit roundoff.
    """
    exact, bounds = exact_results(case, "float64"), error_bounds(case, "float64", "fp64")
    first = f"{case.network.nodes[0].name}.weight"
    largest = np.abs(exact.gradients[first]).max()
    assert largest > 0.0
    float32 = float(np.finfo("float32").eps / np.finfo("float64").eps)
    assert float32 * bounds.gradients[first].max() < 0.1 * largest


@every_case
def test_gradients_equal_finite_differences(case: Case) -> None:
    """Central differences of the reference in float64, in a random direction of each parameter.

    With h = 1e-5 the truncation error is h²/6 times a third derivative and the rounding error
    u/h ≈ 1e-11 times the loss: 1e-8 leaves room for both, and h is far below the distance of the
    numbers from each other, so that no maximum changes place and no ReLU its side.
    """
    replica = compile_case(case, "reference", "fp64")
    x, y = case.data()
    replica.forward_backward(x, y, step=3)
    gradients = dict(replica.gradients)
    rng = np.random.default_rng(3)
    h = 1e-5
    for name, gradient in gradients.items():
        value = replica.parameters[name]
        direction = rng.standard_normal(value.shape)
        direction /= np.linalg.norm(direction)
        losses = []
        for step in (h, -h):
            replica.parameters[name] = value + step * direction
            losses.append(replica.forward_backward(x, y, step=3))
        replica.parameters[name] = value
        slope = (losses[0] - losses[1]) / (2.0 * h)
        scale = 1.0 + abs(losses[0])
        expected = np.sum(gradient * direction)
        assert slope == pytest.approx(expected, abs=1e-8 * scale, rel=1e-7), name


@every_variant
def test_the_first_of_equals_gets_the_gradient_of_a_maximum(backend: str, precision: str) -> None:
    case = behind_maps("equals", (1, 2, 4, 6), [MaxPool2d(2)])
    replica = compile_case(case, backend, precision)
    replica.parameters["conv1.weight"] = np.ones((2, 24, 1, 1))
    x, y = case.data()
    replica.forward_backward(x, np.zeros_like(y))
    dx = np.array(replica.gradients["conv1.weight"]).reshape(2, 4, 6)
    assert (dx[:, ::2, ::2] > 0.0).all()
    dx[:, ::2, ::2] = 0.0
    assert (dx == 0.0).all()


@every_variant
def test_relu_has_no_gradient_at_zero(backend: str, precision: str) -> None:
    case = behind_maps("zero", (1, 1, 2, 2), [ReLU()])
    replica = compile_case(case, backend, precision)
    replica.parameters["conv1.weight"] = np.zeros((1, 4, 1, 1))
    x, y = case.data()
    replica.forward_backward(x, np.ones_like(y))
    assert (replica.gradients["conv1.weight"] == 0.0).all()


@every_variant
@pytest.mark.parametrize(
    "loss", [SoftmaxCrossEntropy(), SigmoidBinaryCrossEntropy(), SoftmaxSquaredError()]
)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_losses_stay_finite_far_from_zero(
    backend: str, precision: str, loss: SoftmaxCrossEntropy, size: float
) -> None:
    network = Network((1,), [Dense(4)], loss)
    replica = dptrain.api.make_replica(network, backend, 2, precision=precision)
    replica.parameters["dense1.weight"] = np.array([[size], [-size], [0.0], [1.0]])
    x = np.array([[1.0], [-1.0]])
    y = np.array([1, 0]) if loss.targets == "classes" else np.array([[0, 1, 1, 0], [1, 0, 0, 1.0]])
    value = replica.forward_backward(x, y)
    exact = pytorch_reference.compute(network, dict(replica.parameters), x, y)
    relative = 16.0 * float(np.finfo(replica.plan.dtype).eps)
    relative += 4.0 * pytorch_reference.ROUNDOFFS.get(precision, 0.0)
    assert value == pytest.approx(exact.loss, rel=relative)
    for name, gradient in exact.gradients.items():
        np.testing.assert_allclose(replica.gradients[name], gradient, relative, 2.0 * relative)


@every_variant
def test_correct_answers_are_counted(backend: str, precision: str) -> None:
    z = np.array([[1.0, 3.0, 2.0], [2.0, 2.0, -1.0], [0.5, -1.0, 4.0], [-1.0, -2.0, -3.0]])
    expected = {
        "classes": (np.array([1, 0, 1, 2]), 2),
        "binary": (z > 0, 4),
        "values": (z, 0),
    }
    for loss in LOSSES.values():
        network = Network((3,), [Dense(3)], loss())
        replica = dptrain.api.make_replica(network, backend, 4, precision=precision)
        replica.parameters["dense1.weight"] = np.eye(3)
        y, correct = expected[loss.targets]
        assert replica.evaluate(z, y)[1] == correct
    replica = dptrain.api.make_replica(
        Network((3,), [Dense(3)], SigmoidBinaryCrossEntropy()), backend, 4, precision=precision
    )
    replica.parameters["dense1.weight"] = np.eye(3)
    wrong = (z > 0).astype(float)
    wrong[2, 1] = 1.0
    assert replica.evaluate(z, wrong)[1] == 3


STACK = Network(
    (3, 7, 5),
    [Conv2d(5), ReLU(), MaxPool2d(2), Dropout(0.25), Flatten(), Dense(9), ReLU(), Dense(4)],
)


BRANCHES = Network.from_nodes(
    (3, 7, 5),
    [
        NodeSpec(Conv2d(6), "a"), NodeSpec(GroupNorm(2, epsilon=0.5), "n"), NodeSpec(GELU(), "g"),
        NodeSpec(Conv2d(6, groups=6, bias=False), "b"), NodeSpec(LayerNorm(epsilon=0.5), "m"),
        NodeSpec(Add(), "sum", ("m", "n")), NodeSpec(SiLU(), "s"),
        NodeSpec(Concatenate(), "both", ("s", "g")),
        NodeSpec(Conv2d(5, 3, 2, padding="valid", rounding="floor")), NodeSpec(LeakyReLU()),
        NodeSpec(AveragePool2d(2, 1, padding=1)), NodeSpec(Tanh()), NodeSpec(Dropout(0.25)),
        NodeSpec(GlobalAveragePool2d()), NodeSpec(Flatten()), NodeSpec(Dense(4)),
    ],
)  # fmt: skip

every_stack = pytest.mark.parametrize(
    ("stack", "backend", "precision"),
    [
        marked(network, *variant, name="-".join((name, *variant)),
               is_quick=variant in QUICK_VARIANTS)
        for name, network in (("chain", STACK), ("branches", BRANCHES))
        for variant in VARIANTS
    ],
)  # fmt: skip


def _batch(n: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    return spread(rng, (n, 3, 7, 5)), rng.integers(0, 4, n)


@every_stack
def test_a_smaller_batch_leaves_the_rest_of_the_memory_out(
    stack: Network, backend: str, precision: str
) -> None:
    x, y = _batch(5)
    large = dptrain.api.make_replica(stack, backend, 5, precision=precision, seed=SEED)
    small = dptrain.api.make_replica(stack, backend, 3, precision=precision, seed=SEED)
    large.forward_backward(x, y)
    losses = [replica.forward_backward(x[:3], y[:3]) for replica in (large, small)]
    # A backend may cut sums otherwise for other sizes, so the last bits may differ.
    bounds = pytorch_reference.bounds(
        stack, dict(small.parameters), x[:3], y[:3], small.plan.dtype, precision
    )
    assert_within(losses[0], losses[1], 2.0 * bounds.loss, "loss")
    for name, gradient in small.gradients.items():
        assert_within(large.gradients[name], gradient, 2.0 * bounds.gradients[name], name)


@every_stack
def test_a_rank_without_samples_contributes_zeros(
    stack: Network, backend: str, precision: str
) -> None:
    x, y = _batch(3)
    replica = dptrain.api.make_replica(stack, backend, 3, precision=precision)
    replica.forward_backward(x, y)
    assert replica.forward_backward(x[:0], y[:0], global_count=3) == 0.0
    for name, gradient in replica.gradients.items():
        assert (gradient == 0.0).all(), name
    assert replica.loss_sums()[1] == 0.0


@every_stack
def test_shares_of_a_minibatch_sum_to_the_whole(
    stack: Network, backend: str, precision: str
) -> None:
    """The loss divided by the global count: unequal shares need no weights."""
    x, y = _batch(7)
    replica = dptrain.api.make_replica(stack, backend, 7, precision=precision, seed=SEED)
    whole = replica.forward_backward(x, y)
    expected = dict(replica.gradients)
    loss, sums = 0.0, {name: np.zeros(g.shape) for name, g in expected.items()}
    for start, stop in ((0, 4), (4, 6), (6, 7)):
        samples = np.arange(start, stop)
        loss += replica.forward_backward(
            x[start:stop], y[start:stop], samples=samples, global_count=7
        )
        for name in sums:
            sums[name] += replica.gradients[name]
    bounds = pytorch_reference.bounds(
        stack, dict(replica.parameters), x, y, replica.plan.dtype, precision
    )
    assert_within(loss, whole, 2.0 * bounds.loss, "loss")
    for name, total in sums.items():
        assert_within(total, expected[name], 2.0 * bounds.gradients[name], name)


SHARDED = [
    case
    for case in CASES
    # Ranks with batch normalisation wait for each other, see test_batch_norm.py.
    if case.batch_size > 1 and case.features and "batchnorm" not in case.features
]
FEW_SHARDED = cover(SHARDED, lambda case: kinds(case.network))
SHARDED_CASES = [
    marked(case, backend, name=f"{case.name}-{backend}", is_quick=case in FEW_SHARDED)
    for case in SHARDED
    for backend in sorted({backend for backend, _ in VARIANTS})
    if load_backend(backend).supports_shards
]


@pytest.mark.parametrize(("case", "backend"), SHARDED_CASES)
def test_micro_shards_give_the_same_bits_on_two_ranks(case: Case, backend: str) -> None:
    shards, (x, y) = 3, case.data()

    def gradient_slots(own: MicroShards) -> list[NDArray[np.generic]]:
        replica = dptrain.api.make_replica(
            case.network, backend, case.batch_size, seed=SEED, micro_shards=own
        )
        span = own.span(len(x))
        samples = np.arange(len(x))[span]
        replica.forward_backward(x[span], y[span], samples=samples, global_count=len(x))
        return list(np.array(replica.memory.download(replica.gradient_slots)))

    def of_rank(rank: int, ranks: int) -> MicroShards:
        return MicroShards.of_rank(shards, rank, ranks, batch_size=len(x))

    (one,) = gradient_slots(of_rank(0, 1))
    slots = [slot for rank in (0, 1) for slot in gradient_slots(of_rank(rank, 2))]
    (two,) = add_in_order(slots, rank_contributions(shards, 2)[1])
    np.testing.assert_array_equal(one, two)


# Dropout.


def _mask(
    backend: str, precision: str, rate: float, width: int, **context: object
) -> NDArray[np.float64]:
    """What dropout makes of ones: 0, or 1 / (1 − rate)."""
    samples = context["samples"]
    assert isinstance(samples, np.ndarray)
    network = Network((width,), [Dropout(rate)], MeanSquaredError())
    replica = dptrain.api.make_replica(
        network, backend, max(len(samples), 1), precision=precision, seed=SEED
    )
    ones = np.ones((len(samples), width))
    replica.forward_backward(ones, ones, **context)
    return np.asarray(replica.output(), np.float64)


@every_variant
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_the_mean(backend: str, precision: str, rate: float) -> None:
    """Five standard deviations of a binomial around the expected share."""
    mask = _mask(backend, precision, rate, 997, samples=np.arange(20), step=1)
    kept = mask > 0.0
    deviation = (rate * (1.0 - rate) / mask.size) ** 0.5
    assert abs(kept.mean() - (1.0 - rate)) <= 5.0 * deviation
    rounding = 1e-6 + pytorch_reference.ROUNDOFFS.get(precision, 0.0)
    assert abs(mask.mean() - 1.0) <= 5.0 * deviation / (1.0 - rate) + rounding
    np.testing.assert_allclose(mask[kept], 1.0 / (1.0 - rate), rtol=rounding)


@every_variant
def test_a_samples_mask_does_not_depend_on_its_batch(backend: str, precision: str) -> None:
    samples = np.array([907, 3, 2**33 + 5, 41, 0])
    whole = _mask(backend, precision, 0.4, 61, samples=samples, step=9)
    for part in ([2], [4, 1], [0, 3, 2]):
        alone = _mask(backend, precision, 0.4, 61, samples=samples[part], step=9)
        np.testing.assert_array_equal(alone, whole[part])


@every_variant
def test_masks_are_those_of_the_published_generator(backend: str, precision: str) -> None:
    samples = np.array([12, 5])
    mask = _mask(backend, precision, 0.4, 61, samples=samples, step=9)
    keep = dropout_keep(0.4, 61, seed=SEED, step=9, layer=0, samples=samples)
    np.testing.assert_array_equal(mask > 0.0, keep)


@every_variant
def test_masks_differ_by_step_and_sample(backend: str, precision: str) -> None:
    first = _mask(backend, precision, 0.5, 256, samples=np.arange(2), step=1)
    second = _mask(backend, precision, 0.5, 256, samples=np.arange(2), step=2)
    # Independent masks agree in half of 256 places, give or take 8.
    for one, other in ((first[0], first[1]), (first[0], second[0]), (first[1], second[1])):
        assert 256 / 2 - 48 < np.sum(one == other) < 256 / 2 + 48


@every_variant
def test_dropout_is_off_outside_of_training(backend: str, precision: str) -> None:
    network = Network((61,), [Dropout(0.5)], MeanSquaredError())
    replica = dptrain.api.make_replica(network, backend, 3, precision=precision)
    # Numbers of few bits, which no precision rounds.
    x = ((np.arange(183.0) - 91.0) / 128.0).reshape(3, 61)
    np.testing.assert_array_equal(replica.forward(x), x)


KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """The test vectors that come with the paper's own implementation, Random123."""
    assert tuple(int(word) for word in philox(counter, key)) == words


# Updates.

Arrays = dict[str, np.ndarray]

RULES: dict[str, tuple[Optimizer, str, dict[str, object]]] = {
    "sgd": (SGD(), "SGD", {}),
    "momentum": (SGD(momentum=0.9), "SGD", {"momentum": 0.9}),
    "nesterov": (SGD(momentum=0.8, nesterov=True), "SGD", {"momentum": 0.8, "nesterov": True}),
    "adam": (Adam(), "Adam", {}),
    "adam, other constants": (
        Adam(beta1=0.8, beta2=0.95, epsilon=1e-3),
        "Adam",
        {"betas": (0.8, 0.95), "eps": 1e-3},
    ),
    "adamw": (AdamW(weight_decay=None), "AdamW", {}),
    "rmsprop": (RMSProp(), "RMSprop", {}),
    "rmsprop, momentum": (
        RMSProp(decay=0.9, epsilon=1e-3, momentum=0.8),
        "RMSprop",
        {"alpha": 0.9, "eps": 1e-3, "momentum": 0.8},
    ),
    "adamw, other constants": (
        AdamW(beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=None),
        "AdamW",
        {"betas": (0.8, 0.95), "eps": 1e-3},
    ),
}


@every_variant
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.004, 0.3)], ids=["plain", "weight decay"])
def test_updates_equal_pytorch(
    backend: str, precision: str, rule: str, decays: tuple[float, float]
) -> None:
    layers = [Dense(n, weight_decay=decay) for n, decay in zip((13, 5), decays, strict=True)]
    network = Network((7,), layers, MeanSquaredError())
    decay = {p.name: p.weight_decay for p in network.parameters}
    _expect_the_updates_of_pytorch(backend, precision, rule, network, decay)


@every_variant
@pytest.mark.parametrize("rule", RULES)
def test_one_weight_decay_is_that_of_all_weights(backend: str, precision: str, rule: str) -> None:
    layers = [Conv2d(5, 3), BatchNorm2d(), Flatten(), Dense(5, weight_decay=0.7)]
    network = Network((2, 4, 4), layers, MeanSquaredError())
    decay = {p.name: 0.3 if p.name.startswith(("conv1.w", "dense1.w")) else 0.0
             for p in network.parameters}  # fmt: skip
    assert sorted(decay.values()) == [0.0] * 4 + [0.3] * 2
    _expect_the_updates_of_pytorch(backend, precision, rule, network, decay, weight_decay=0.3)


@every_variant
@pytest.mark.parametrize("rule", RULES)
def test_factors_of_the_learning_rate_are_parameter_groups(
    backend: str, precision: str, rule: str
) -> None:
    """The last pattern that matches a parameter counts."""
    layers = [Dense(13, weight_decay=0.3), Dense(9), Dense(5, weight_decay=0.1)]
    network = Network((7,), layers, MeanSquaredError())
    factors = "dense*=0.1,dense2=3,*.bias=0.5"
    optimizer = dataclasses.replace(RULES[rule][0], rate_factor=factors)
    assert [*rate_factors(network, optimizer).values()] == [0.1, 0.5, 3.0, 0.5, 0.1, 0.5]
    decay = {p.name: p.weight_decay for p in network.parameters}
    _expect_the_updates_of_pytorch(backend, precision, rule, network, decay, rate_factor=factors)


@every_variant
@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
@pytest.mark.parametrize("rule", RULES)
def test_clipped_updates_equal_pytorch(
    backend: str, precision: str, rule: str, clip_norm: float
) -> None:
    network = Network((7,), [Dense(13, weight_decay=0.3), Dense(5)], MeanSquaredError())
    decay = {p.name: p.weight_decay for p in network.parameters}
    _expect_the_updates_of_pytorch(backend, precision, rule, network, decay, clip_norm=clip_norm)


@every_variant
def test_the_average_follows_the_parameters(backend: str, precision: str) -> None:
    network = Network((7,), [Dense(13), Dense(5)], MeanSquaredError())
    replica = dptrain.api.make_replica(
        network, backend, 1, precision=precision, optimizer=SGD(momentum=0.9, average_decay=0.3)
    )
    plain = dptrain.api.make_replica(
        network, backend, 1, precision=precision, optimizer=SGD(momentum=0.9)
    )
    rng, averages = np.random.default_rng(4), dict[str, Any]()
    bound = 8 * float(np.finfo(replica.plan.dtype).eps)
    for number in range(1, 7):
        for name, value in plain.parameters.items():
            gradient = rng.standard_normal(value.shape)
            replica.gradients[name] = plain.gradients[name] = gradient
        replica.update(0.1)
        plain.update(0.1)
        weight = 1.0 - min(0.3, (number - 1) / (number + 9))
        for name, value in plain.parameters.items():
            np.testing.assert_array_equal(replica.parameters[name], value)
            before = averages.get(name, np.zeros(value.shape))
            averages[name] = before + weight * (np.float64(value) - before)
            np.testing.assert_allclose(
                replica.state["average"][name], averages[name], number * bound, number * bound
            )


def _expect_the_updates_of_pytorch(
    backend: str,
    precision: str,
    rule: str,
    network: Network,
    decay: dict[str, float],
    **changes: float | str,
) -> None:
    optimizer, theirs, options = RULES[rule]
    replica = dptrain.api.make_replica(
        network, backend, 1, precision=precision,
        optimizer=dataclasses.replace(optimizer, **changes),
    )  # fmt: skip
    tensors = {name: torch.tensor(np.float64(v)) for name, v in replica.parameters.items()}
    groups = [{"params": [tensor], "weight_decay": decay[n]} for n, tensor in tensors.items()]
    factors = rate_factors(network, replica.plan.optimizer)
    reference = getattr(torch.optim, theirs)(groups, lr=0.1, **options)
    rng = np.random.default_rng(4)
    steps = 5
    for step in range(steps):
        rate = 0.1 / (1 + step)
        for name, tensor in tensors.items():
            replica.gradients[name] = rng.standard_normal(tuple(tensor.shape))
            tensor.grad = torch.tensor(np.float64(replica.gradients[name]))
        if "clip_norm" in changes:
            torch.nn.utils.clip_grad_norm_(list(tensors.values()), changes["clip_norm"])
        for name, group in zip(tensors, reference.param_groups, strict=True):
            group["lr"] = rate * factors[name]
        replica.update(rate)
        reference.step()
    # Some ten roundings a step, of numbers no larger than the sums they end in.
    roundings = 16 * steps * float(np.finfo(replica.plan.dtype).eps)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(replica.parameters[name], tensor, roundings, roundings)


def _scaled_layers(rule: LARS | LAMB, w: Arrays, g: Arrays, state: Any, rate: float) -> None:
    """Update parameters in float64 by algorithms 1 (You et al., 2017) and 2 (You et al., 2020)."""
    state["t"] = t = state.get("t", 0) + 1
    directions, ratios = {}, {}
    for name, value in w.items():
        decay = rule.weight_decay if value.ndim > 1 else 0.0
        assert decay is not None
        if isinstance(rule, LAMB):
            m, v = state.get(name, (0.0, 0.0))
            m = rule.beta1 * m + (1 - rule.beta1) * g[name]
            v = rule.beta2 * v + (1 - rule.beta2) * g[name] ** 2
            state[name] = m, v
            mean, square = m / (1 - rule.beta1**t), v / (1 - rule.beta2**t)
            directions[name] = mean / (np.sqrt(square) + rule.epsilon) + decay * value
            below = np.linalg.norm(directions[name])
        else:
            directions[name] = g[name] + decay * value
            below = np.linalg.norm(g[name]) + decay * np.linalg.norm(value)
        norm = np.linalg.norm(value) * (1.0 if isinstance(rule, LAMB) else rule.trust)
        ratios[name] = norm / below if norm and below else 1.0
    for name in w:
        weight = f"{name.partition('.')[0]}.weight"
        step = directions[name] * (ratios[weight] if w[weight].ndim > 1 else 1.0)
        if isinstance(rule, LARS):
            state[name] = step = rule.momentum * state.get(name, 0.0) + step
        w[name] = w[name] - rate * step


@every_variant
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("rule", [
    LARS(weight_decay=0.1, momentum=0.8, trust=0.02), LAMB(weight_decay=0.3, beta2=0.9),
])  # fmt: skip
def test_layers_are_scaled_as_in_float64(
    backend: str, precision: str, rule: LARS | LAMB, clip_norm: float | None
) -> None:
    layers = [Conv2d(5, 3), BatchNorm2d(), Flatten(), Dense(70), Dense(3)]
    network = Network((2, 4, 4), layers, MeanSquaredError())
    replica = dptrain.api.make_replica(
        network, backend, 1, precision=precision,
        optimizer=dataclasses.replace(rule, clip_norm=clip_norm),
    )  # fmt: skip
    expected = {name: np.float64(value) for name, value in replica.parameters.items()}
    rng, state, steps = np.random.default_rng(4), dict[str, Any](), 5
    for step in range(steps):
        rate = 0.1 / (1 + step)
        gradients = {n: rng.standard_normal(v.shape) for n, v in expected.items()}
        if step == 2:  # The ratio of this layer is 1.
            gradients["dense2.weight"] *= 0.0
        for name, value in gradients.items():
            replica.gradients[name] = value
            gradients[name] = np.float64(replica.gradients[name])
        if clip_norm is not None:
            norm = np.sqrt(sum(np.square(value).sum() for value in gradients.values()))
            gradients = {n: v * min(1.0, clip_norm / (norm + 1e-6)) for n, v in gradients.items()}
        _scaled_layers(rule, expected, gradients, state, rate)
        replica.update(rate)
    roundings = 64 * steps * float(np.finfo(replica.plan.dtype).eps)
    for name, value in expected.items():
        np.testing.assert_allclose(replica.parameters[name], value, roundings, roundings)


# Label smoothing.


@every_variant
@pytest.mark.parametrize("classes", [2, 10, 40])
def test_smoothed_labels_equal_pytorch(backend: str, precision: str, classes: int) -> None:
    """Gradients of the biases of the last layer are sums of dz over the samples."""
    network, rng = Network((6,), [Dense(classes)], SoftmaxCrossEntropy()), np.random.default_rng(2)
    x, y = rng.standard_normal((9, 6)), rng.integers(0, classes, 9)
    options: dict[str, Any] = {"precision": precision, "seed": 1}
    plain = dptrain.api.make_replica(network, backend, 9, **options)
    replica = dptrain.api.make_replica(network, backend, 9, **options, label_smoothing=0.2)
    found = replica.forward_backward(x, y)
    logits = torch.tensor(np.float64(replica.output()), requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y), label_smoothing=0.2)
    loss.backward()
    assert logits.grad is not None
    unit = 2.0**-8 if precision == "bf16" else float(np.finfo(replica.plan.dtype).eps)
    largest = float(logits.detach().abs().max())
    assert abs(found - float(loss.detach())) <= 32 * unit * max(largest, 1.0)
    # A GPU rounds the gradients of the outputs to the type of its matrix units.
    rounding = {"bf16": 2.0**-8, "tf32": 2.0**-11}.get(precision, 0.0)
    eps = float(np.finfo(replica.plan.dtype).eps)
    tolerance = (32 * eps + 2 * rounding) * logits.grad.abs().sum(0).numpy()
    difference = np.abs(replica.gradients["dense1.bias"] - logits.grad.sum(0).numpy())
    assert (difference <= tolerance).all()
    assert found != plain.forward_backward(x, y)
    assert replica.evaluate(x, y) == plain.evaluate(x, y)
    # An evaluation between two steps does not stay.
    assert replica.forward_backward(x, y) == found


@every_variant
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_weighted_samples_equal_pytorch(backend: str, precision: str, loss: type[Loss]) -> None:
    """Gradients of the biases of the last layer are sums of dz over the samples."""
    network, rng = Network((6,), [Dense(5)], loss()), np.random.default_rng(2)
    x, weights = rng.standard_normal((9, 6)), np.float32([0, 0.1, 1, 2, 3, 0.5, 7, 1, 1])
    y = rng.integers(0, 5, 9) if loss.targets == "classes" else rng.integers(0, 2, (9, 5))
    replica = dptrain.api.make_replica(network, backend, 9, precision=precision, weighted=True)
    plain = dptrain.api.make_replica(network, backend, 9, precision=precision)
    found = replica.forward_backward(x, y, weights=weights, global_count=11)
    logits = torch.tensor(np.float64(replica.output()), requires_grad=True)
    target = torch.tensor(y if loss.targets == "classes" else np.float64(y))
    losses = pytorch_reference.losses_of(loss.kind, logits, target)
    total = (losses * torch.tensor(np.float64(weights))).sum() / 11
    total.backward()
    assert logits.grad is not None
    eps = float(np.finfo(replica.plan.dtype).eps)
    rounding = {"bf16": 2.0**-8, "tf32": 2.0**-11}.get(precision, 0.0)
    assert abs(found - float(total.detach())) <= (32 * eps + rounding) * (weights.sum() / 11 + 4)
    tolerance = (32 * eps + 2 * rounding) * logits.grad.abs().sum(0).numpy()
    difference = np.abs(replica.gradients["dense1.bias"] - logits.grad.sum(0).numpy())
    assert (difference <= tolerance).all()
    # Without weights, all are 1; evaluations do not weigh samples.
    assert replica.forward_backward(x, y) == plain.forward_backward(x, y) != found
    assert replica.evaluate(x, y) == plain.evaluate(x, y)
    with pytest.raises(UserError, match="weighs no samples"):
        plain.forward_backward(x, y, weights=weights)
    with pytest.raises(UserError, match=r"weights have shape \(8,\); expected one per sample"):
        replica.forward_backward(x, y, weights=weights[:8])


def test_only_labels_of_classes_are_smoothed() -> None:
    for loss in (MeanSquaredError(), SoftmaxSquaredError()):
        network = Network((6,), [Dense(2)], loss)
        with pytest.raises(UserError, match="label smoothing needs softmax_cross_entropy, but"):
            dptrain.api.make_replica(network, "reference", 2, label_smoothing=0.1)
    with pytest.raises(UserError, match="label smoothing is 1; expected"):
        dptrain.api.make_replica(network, "reference", 2, label_smoothing=1)


@every_variant
def test_an_update_leaves_the_padding_between_parameters_alone(
    backend: str, precision: str
) -> None:
    network = dataclasses.replace(STACK)
    replica = dptrain.api.make_replica(network, backend, 2, precision=precision, optimizer=Adam())
    x, y = _batch(2)
    for _ in range(2):
        replica.forward_backward(x, y)
        replica.update(0.1)
    inside = np.zeros(replica.plan.layout.size, bool)
    for slot in replica.plan.layout.slots:
        inside[slot.start : slot.stop] = True
    parameters = replica.memory.download(replica.flat_parameters)
    assert (parameters[~inside] == 0.0).all()
