"""The cuda backend trains, evaluates and restores as the reference backend does.

`test_operations` has every layer at odd shapes; here are whole networks, and batches large enough
that sums are cut into parts. ``tests/gpu`` runs the same tests on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cuda import replica as cuda_replica
from dptrain.backends.cuda.device.device import Device
from dptrain.backends.cuda.normalization import group_norm
from dptrain.backends.cuda.replica import CudaReplica, early_update
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.pixels import PixelFormat
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data.loading.augmentation import Augmentation, centred_windows
from dptrain.data.stored import CachedSamples
from dptrain.measure.recorder import StepRecorder
from dptrain.network import (
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    GroupNorm,
    LocalResponseNorm,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    Sigmoid,
    zoo,
)
from dptrain.plan import SGD, Adam, AdamW, make_buckets, make_plan
from dptrain.plan.plan import INPUT
from dptrain.training.engines import Engine, make_engine
from dptrain.training.persistence.checkpoints import Checkpoint, replica_arrays, restore_replica
from dptrain.training.persistence.state_copy import StateCopy
from tests.tiers import tiered

EPSILON = float(np.finfo(np.float32).eps)

PLAIN = Network(
    (3, 12, 10),
    [Conv2d(6), ReLU(), MaxPool2d(2), Conv2d(20), ReLU(), MaxPool2d(2), Flatten(), Dense(21),
     ReLU(), Dense(5)],
    name="plain",
)  # fmt: skip
RICH = Network(
    (2, 9, 8),
    [
        Conv2d(5, 5), ReLU(), MaxPool2d(3, 2, "same"), LocalResponseNorm(1, alpha=0.2),
        Conv2d(4, (2, 3), weight_decay=0.01), ReLU(), Dropout(0.25), Conv2d(3, stride=2),
        Sigmoid(), Flatten(), Dense(17, weight_decay=0.1), ReLU(), Dropout(0.5), Dense(3),
    ],
    MeanSquaredError(),
    name="rich",
)  # fmt: skip
NETWORKS = (PLAIN, RICH)

every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
rich_first = pytest.mark.parametrize(
    "network", tiered(NETWORKS, [RICH]), ids=lambda network: network.name
)


def batch(network: Network, n: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Samples, and targets that fit."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, *network.input_shape), dtype=np.float32)
    if network.loss.targets == "classes":
        return x, rng.integers(0, network.num_outputs, n)
    return x, rng.standard_normal((n, network.num_outputs), dtype=np.float32)


def rounding(network: Network, n: int) -> float:
    """How far float32 may be from float64, as a part of the largest value.

    Rounding errors of a sum of T terms grow like sqrt(T); a gradient has passed every layer
    twice, and its own sum runs over every sample and pixel. 4 is for what is not a sum.
    """
    terms = [4 + math.sqrt(p.fan_in) for p in network.parameters] + [4.0] * len(network.nodes)
    largest = max(math.prod(node.output_maps[1:]) for node in network.nodes)
    return EPSILON * (2 * sum(terms) + math.sqrt(n * largest))


def assert_close(got: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Equal to `tolerance` of the largest value."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max(), what


def step(replica: Replica, n: int, number: int) -> float:
    x, y = batch(replica.plan.network, n, seed=number)
    loss = replica.forward_backward(x, y, step=number, samples=np.arange(n) + 100 * number)
    replica.update(0.01)
    return loss


def test_factors_in_tf32_are_the_nearest() -> None:
    """Halves may go either way, which GPUs before 9.0 and since do differently."""
    n, size = 8, 16
    replica = make_replica(
        Network((size,), [Dense(size)], MeanSquaredError()), "cuda", n, precision="tf32"
    )
    replica.parameters["dense1.weight"] = np.eye(size, dtype=np.float32)
    replica.parameters["dense1.bias"] = np.zeros(size, np.float32)
    x = batch(replica.plan.network, n)[0]
    bits = x.view(np.uint32)
    bits[0] = bits[0] & 0xFFFFE000 | 0x1000  # Halves.
    bits[1] |= 0x7FFFFF  # The largest below a power of two.
    y = replica.predict(x)
    assert not (y.view(np.uint32) & 0x1FFF).any()
    half = np.exp2(np.frexp(x)[1] - 12.0)  # Of the last of 11 bits.
    assert (np.abs(y - x) <= half).all()


@every_network
@pytest.mark.parametrize(
    "optimizer", tiered([SGD(momentum=0.9), Adam()], [SGD(momentum=0.9)]), ids=["sgd", "adam"]
)
def test_five_steps_follow_the_reference(network: Network, optimizer: SGD | Adam) -> None:
    """Each of another size, the first with sums in several parts."""
    ours, reference = (
        make_replica(network, backend, 24, optimizer=optimizer) for backend in ("cuda", "reference")
    )
    for number, n in enumerate((24, 7, 1, 24, 13)):
        # What one step rounds, the next ones carry on; the rate keeps them from growing it.
        tolerance = (number + 1) * 2 * rounding(network, n)
        assert_close(step(ours, n, number), step(reference, n, number), tolerance)
        assert ours.loss_sums()[1] == reference.loss_sums()[1]
        for name, value in reference.gradients.items():
            # Adam divides by the size of gradients: its steps are as wrong as the smallest.
            if isinstance(optimizer, SGD) or number == 0:
                assert_close(ours.gradients[name], value, tolerance, name)
    if isinstance(optimizer, SGD):
        for name, value in reference.parameters.items():
            assert_close(ours.parameters[name], value, tolerance, name)


def test_sums_in_parts_are_tested() -> None:
    """The networks above are large enough that some gradients are, and some are not."""
    plan = make_replica(PLAIN, "cuda", 24).plan
    stages = [stage for stage in plan.stages if stage.phase.value == "backward_weight"]
    cut = [any(name.endswith(".partial") for name in stage.writes) for stage in stages]
    assert any(cut)
    assert not all(cut)


@rich_first
def test_the_same_step_gives_the_same_bits(network: Network) -> None:
    first, second = (
        make_replica(network, "cuda", 24, optimizer=SGD(momentum=0.9)) for _ in range(2)
    )
    for number in range(3):
        assert step(first, 24, number) == step(second, 24, number)
    for name, value in first.parameters.items():
        np.testing.assert_array_equal(second.parameters[name], value)


@rich_first
def test_inference_needs_no_training(network: Network) -> None:
    ours, reference = (
        make_replica(network, backend, 4, training=False) for backend in ("cuda", "reference")
    )
    x, y = batch(network, 9)
    tolerance = rounding(network, 4)
    for replica in (ours, make_replica(network, "cuda", 4)):
        assert_close(replica.forward(x), reference.forward(x), tolerance)
        assert_close(replica.predict(x), reference.predict(x), tolerance)
        loss, correct = replica.evaluate(x, y)
        assert_close(loss, reference.evaluate(x, y)[0], tolerance)
        assert correct == reference.evaluate(x, y)[1]


def test_blocks_normalise_groups_as_warps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every warp of a block has elements of a group."""
    network = Network((3, 16, 16), [Conv2d(8), GroupNorm(groups=2), Flatten(), Dense(3)])
    warps = make_replica(network, "cuda", 2)
    monkeypatch.setattr(group_norm, "MAX_WARP_ELEMENTS", 0)
    blocks = make_replica(network, "cuda", 2)
    tolerance = rounding(network, 2)
    assert_close(step(blocks, 2, 0), step(warps, 2, 0), tolerance)
    for name, value in warps.gradients.items():
        assert_close(blocks.gradients[name], value, tolerance, name)


def test_evaluation_leaves_the_sums_of_the_step() -> None:
    replica = make_replica(PLAIN, "cuda", 8)
    loss = step(replica, 8, 0)
    replica.evaluate(*batch(PLAIN, 5))
    assert replica.loss_sums()[0] == np.float32(loss)


def test_a_step_tells_loss_and_the_wish_to_stop() -> None:
    replica = make_replica(PLAIN, "cuda", 8)
    for stop in (True, False):
        assert replica.forward_backward(*batch(PLAIN, 8), stop=stop) > 0.0
        assert replica.loss_sums()[2] == stop


def test_gradients_summed_on_the_host_are_what_the_update_takes() -> None:
    """As if three ranks had the same samples: that is a rate three times as high."""
    ours, expected = (make_replica(PLAIN, "cuda", 8) for _ in range(2))
    for replica in (ours, expected):
        replica.forward_backward(*batch(PLAIN, 8))
    gradients = ours.memory.host_copy(ours.flat_gradients)
    assert gradients.any()
    gradients *= 3.0
    ours.memory.upload(ours.flat_gradients, gradients)
    ours.update(0.01)
    expected.update(0.03)
    for name, value in expected.parameters.items():
        assert_close(ours.parameters[name], value, 4 * EPSILON, name)


@rich_first
def test_training_goes_on_from_a_checkpoint_bit_by_bit(network: Network) -> None:
    straight, stopped, resumed = (
        make_replica(network, "cuda", 8, optimizer=Adam()) for _ in range(3)
    )
    for number in range(2):
        assert step(straight, 8, number) == step(stopped, 8, number)
    facts = {"updates": stopped.updates}
    checkpoint = Checkpoint(2, replica_arrays(stopped), facts, Path("checkpoint"), ())
    restore_replica(resumed, checkpoint)
    for number in range(2, 4):
        assert step(straight, 8, number) == step(resumed, 8, number)
    for name, value in straight.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], value)


@rich_first
def test_a_copy_of_the_state_has_the_bits_of_its_step(network: Network) -> None:
    """It reaches the host after later steps."""
    replica, copy = make_replica(network, "cuda", 8, optimizer=Adam()), StateCopy()
    assert not copy.fits(replica)
    assert copy.allocate(replica)
    for number in range(3):
        step(replica, 8, number)
        expected = replica_arrays(replica)
        copy.assign(replica)
        receive = copy.begin_arrays()
        step(replica, 8, number + 3)
        found = receive()
        assert list(found) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, name)
    copy.restore(replica)
    for name, values in replica_arrays(replica).items():
        np.testing.assert_array_equal(found[name], values, name)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", ">f4"])
@pytest.mark.parametrize("channels", [1, 3])
def test_input_of_any_kind(dtype: str, channels: int) -> None:
    """Whatever the dtype and strides, what is loaded are the values."""
    network = Network((channels, 5, 3), [Flatten()], MeanSquaredError())
    replica = make_replica(network, "cuda", batch_size=4)
    x = np.random.default_rng(0).integers(0, 200, (8, channels, 5, 3)).astype(dtype)
    frozen = x[:4].copy()
    frozen.flags.writeable = False
    for images in (x[:4], x[::2], frozen):
        np.testing.assert_array_equal(replica.forward(images), images.reshape(len(images), -1))


def stage(
    replica: Replica,
    y: NDArray[Any] | None,
    crop_windows: NDArray[np.int64],
    recolourings: NDArray[np.float32] | None = None,
) -> None:
    """Load crop windows of cached images."""
    assert isinstance(replica, DeviceReplica)
    replica.stage_batch(Batch.of_windows(crop_windows, y, recolourings=recolourings))
    replica.unpack_staged_batch()
    replica.sums_future()


@pytest.mark.parametrize("canvas", [(2, 9, 8), (2, 14, 9)], ids=["as seen", "larger"])
def test_places_in_kept_pictures_are_what_augmentation_reads(canvas: tuple[int, ...]) -> None:
    """Bit for bit, wherever the window lies, mirrored or not; and no place moves nothing."""
    pictures = np.random.default_rng(0).standard_normal((5, *canvas), dtype=np.float32)
    change, rows = Augmentation(crop=4, flip=True), np.array([3, 0, 4, 4, 1, 2, 0, 3])
    draws = change.draw(1, 2, np.arange(8))
    seen = np.empty((8, *RICH.input_shape), np.float32)
    change.change(seen, draws, pictures, rows)
    still = np.empty_like(seen)
    CachedSamples(pictures, np.zeros(5, np.float32)).read(rows, still, np.zeros(8, np.float32))
    replica = make_replica(RICH, "cuda", 8)
    assert isinstance(replica, DeviceReplica)
    assert replica.memory_bytes == replica.plan.memory
    replica.cache_images(pictures)
    assert replica.memory_bytes == {**replica.plan.memory, "dataset cache": pictures.nbytes}
    moved = change.crop_windows(RICH.input_shape, draws, canvas, rows)
    assert moved[:, 3].any()
    assert not moved[:, 3].all()
    for places, expected in (
        (moved, seen),
        (centred_windows(RICH.input_shape, canvas, rows), still),
    ):
        stage(replica, None, places)
        taken = replica.memory.download(replica._views[INPUT])
        np.testing.assert_array_equal(taken.transpose(0, 3, 1, 2), expected)


@pytest.mark.parametrize("shape", [(3, 9, 8), (2, 40, 41), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("change", [
    Augmentation(crop=0, brightness=0.3), Augmentation(flip=True, contrast=0.5),
    Augmentation(flip=True, brightness=0.2, contrast=1.0),
], ids=["brightness", "contrast", "both"])  # fmt: skip
def test_colours_change_on_the_device_as_on_the_host(
    shape: tuple[int, int, int], change: Augmentation
) -> None:
    """Pixels are eighths, so that every sum of them is exact and the results are equal bits."""
    if shape[1] > 1:
        change = replace(change, crop=3)
    network = Network(shape, [Flatten()], MeanSquaredError())
    pictures = np.random.default_rng(0).integers(-8, 9, (5, *shape)).astype(np.float32) / 8
    rows, samples = np.array([3, 0, 4, 4, 1, 2, 0, 3]), np.arange(8)
    draws = change.draw(1, 2, samples)
    expected = pictures[rows]
    change.change(expected, draws, pictures, rows)
    replica = make_replica(network, "cuda", 8)
    assert isinstance(replica, DeviceReplica)
    replica.cache_images(pictures)
    windows = change.crop_windows(shape, draws, shape, rows)
    stage(replica, None, windows, change.recolourings(draws, shape[0]))
    taken = replica.memory.download(replica._views[INPUT])
    np.testing.assert_array_equal(taken.transpose(0, 3, 1, 2), expected)
    assert (expected != pictures[rows]).any()


@pytest.mark.parametrize("recolours", [False, True])
@pytest.mark.parametrize("canvas", [(2, 9, 8), (2, 14, 9)], ids=["same size", "larger"])
def test_8_bit_pixels_are_converted_on_the_device_as_on_the_host(
    canvas: tuple[int, ...], recolours: bool
) -> None:
    """Bit for bit: converted pixels are multiples of 2⁻²⁴, so sums of doubles are exact."""
    pictures = np.random.default_rng(0).integers(0, 256, (5, *canvas), np.uint8)
    pixels = PixelFormat("uint8", 2 / 255, -1.0)
    converted = np.empty(pictures.shape, np.float32)
    pixels.convert(pictures, converted)
    changes = {"brightness": 0.2, "contrast": 0.7, "cutout": 4} if recolours else {}
    change, rows = Augmentation(crop=4, flip=True, **changes), np.array([3, 0, 4, 4, 1, 2, 0, 3])
    draws = change.draw(1, 2, np.arange(8))
    expected = np.empty((8, *RICH.input_shape), np.float32)
    change.change(expected, draws, converted, rows)
    replica = make_replica(RICH, "cuda", 8)
    assert isinstance(replica, DeviceReplica)
    replica.cache_images(pictures, pixels)
    assert replica.memory_bytes["dataset cache"] == pictures.size
    other = replica.backend.make_replica(replica.plan)
    assert isinstance(other, DeviceReplica)
    other.share_cached_images(replica)
    windows = change.crop_windows(RICH.input_shape, draws, canvas, rows)
    colours = change.recolourings(draws, RICH.input_shape[0]) if recolours else None
    for each in (replica, other):
        stage(each, None, windows, colours)
        taken = each.memory.download(each._views[INPUT])
        np.testing.assert_array_equal(taken.transpose(0, 3, 1, 2), expected)
    # The same images as a part of the message.
    streaming = replica.backend.make_replica(replica.plan)
    assert isinstance(streaming, DeviceReplica)
    assert streaming.prepare_images(canvas, pixels)
    assert not streaming.prepare_images((2, 90, 80), pixels)
    assert "dataset cache" not in streaming.memory_bytes
    for order in (np.arange(8), np.arange(8)[::-1], np.arange(3)):
        moved = windows[order]
        moved[:, 0] = np.arange(len(order))
        changes = None if colours is None else colours[order]
        images = pictures[rows[order]]
        streaming.load(Batch.of_windows(moved, images=images, recolourings=changes))
        taken = streaming.memory.download(streaming._views[INPUT])[: len(order)]
        np.testing.assert_array_equal(taken.transpose(0, 3, 1, 2), expected[order])


@pytest.mark.parametrize(
    ("shape", "samples"), [((3, 40, 41), 2), ((2, 1, 3), 200)], ids=["large pictures", "many"]
)
def test_batches_of_any_size_are_taken(shape: tuple[int, int, int], samples: int) -> None:
    """Pictures that a block takes in several turns; messages of places that are copied first."""
    network = Network(shape, [Flatten()], MeanSquaredError())
    pictures = np.random.default_rng(0).standard_normal((7, *shape), dtype=np.float32)
    replica = make_replica(network, "cuda", samples)
    assert isinstance(replica, DeviceReplica)
    replica.cache_images(pictures)
    for rows in (np.arange(samples) % 7, np.arange(samples // 2) % 3):
        y = pictures[rows].reshape(len(rows), -1)
        stage(replica, y, centred_windows(shape, shape, rows))
        taken = replica.memory.download(replica._views[INPUT])[: len(rows)]
        np.testing.assert_array_equal(taken.transpose(0, 3, 1, 2), pictures[rows])
        replica.run_forward(loss=True)
        assert replica.loss_sums()[0] == 0.0  # The very targets.
    other = replica.backend.make_replica(replica.plan)  # On the same device.
    assert isinstance(other, DeviceReplica)
    other.share_cached_images(replica)
    assert other.cached_images is replica.cached_images
    stage(other, None, centred_windows(shape, shape, rows))
    taken = other.memory.download(other._views[INPUT])[: len(rows)]
    np.testing.assert_array_equal(taken.transpose(0, 3, 1, 2), pictures[rows])


@pytest.mark.parametrize("training", [False, True])
def test_inference_launches_a_captured_pass_for_each_number_of_samples(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    monkeypatch.setattr(cuda_replica, "MAX_FORWARD_PROGRAMS", 3)
    ours = make_replica(PLAIN, "cuda", 4, training=training)
    assert isinstance(ours, CudaReplica)
    make_program = ours.device.program

    def program(start: Callable[[], None]) -> Callable[[], None]:
        number, run = len(captured), make_program(start)
        captured.append(0)

        def count() -> None:
            captured[number] += 1
            run()

        return count

    monkeypatch.setattr(ours.device, "program", program)
    exact = make_replica(PLAIN, "reference", 4, training=training)
    x, y = batch(PLAIN, 7)
    for _ in range(2):
        assert_close(ours.predict(x), exact.predict(x), 2 * rounding(PLAIN, 7))
        assert_close(ours.evaluate(x, y)[0], exact.evaluate(x, y)[0], 2 * rounding(PLAIN, 7))
    # 4 and 3 samples without the loss, 4 with it; 3 with it is one too many.
    assert captured == [2, 2, 2]


@rich_first
def test_what_is_not_finite_is_found(network: Network) -> None:
    x, y = batch(network, 4)
    replica = make_replica(network, "cuda", 4, seed=5)
    assert math.isfinite(replica.forward_backward(x, y))
    assert replica.first_non_finite() is None
    for name, value in replica.parameters.items():
        replica.parameters[name] = np.full_like(value, np.nan)
        assert math.isnan(replica.forward_backward(x, y)), name
        assert replica.first_non_finite() == f"parameter {name}"
        replica.parameters[name] = value
    x[2] = np.inf
    assert not math.isfinite(replica.forward_backward(x, y))
    assert replica.first_non_finite() == "the input"


every_rule = pytest.mark.parametrize(
    "optimizer",
    tiered([SGD(), SGD(momentum=0.9), Adam(), AdamW()], [Adam()]),
    ids=["sgd", "momentum", "adam", "adamw"],
)


@every_rule
def test_nothing_is_updated_where_a_loss_is_not_finite(optimizer: SGD | Adam) -> None:
    """The state that broke can be looked at."""
    replica = make_replica(PLAIN, "cuda", 8, optimizer=optimizer)
    step(replica, 8, 0)
    kept = {name: dict(arrays) for name, arrays in replica_views(replica).items()}
    x, y = batch(PLAIN, 8)
    x[3] = np.inf
    assert not math.isfinite(replica.forward_backward(x, y))
    replica.update(0.01)
    assert_same_bits(replica, kept)


def replica_views(replica: Replica) -> dict[str, Any]:
    return {"parameters": replica.parameters, **replica.state}


def assert_same_bits(replica: Replica, expected: dict[str, Any]) -> None:
    for kind, arrays in replica_views(replica).items():
        for name, value in arrays.items():
            np.testing.assert_array_equal(value, expected[kind][name], f"{kind} {name}")


@pytest.fixture
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks, too, are updated beside their last stages."""
    monkeypatch.setattr(cuda_replica, "EARLY_ELEMENTS", 1)
    monkeypatch.setattr(cuda_replica, "EARLY_FLOPS", 1)


def engine_of(replica: Replica) -> Engine:
    """Return the training loop's engine, of one rank."""
    buckets = make_buckets(replica.plan)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    return make_engine(replica, alone, buckets, StepRecorder(replica.plan.stages))


@every_rule
@pytest.mark.parametrize("late", tiered([True, False], [True]))
@pytest.mark.usefixtures("all_is_worth_it")
def test_an_update_beside_later_stages_gives_the_same_bits(
    optimizer: SGD | Adam, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As late as may be or at once. Decays differ; the last loss is not finite."""
    ours, expected = (make_replica(RICH, "cuda", 8, optimizer=optimizer) for _ in range(2))
    if not late:
        monkeypatch.setattr(type(ours.memory), "side_stream", Device.side_stream)
    part = early_update(ours.plan)
    assert part is not None
    assert 0 < part.stop < ours.plan.layout.size
    engine = engine_of(ours)
    for number in range(4):
        x, y = batch(RICH, 8, seed=number)
        x[2, 0, 3, 4] = np.inf if number == 3 else 0.0
        samples = np.arange(8) + 8 * number
        engine.step(iter([Batch(number, 0, x, y, samples, 8)]), 0.01)
        loss = expected.forward_backward(x, y, step=number, samples=samples)
        expected.update(0.01)
        np.testing.assert_equal(engine.results(wait=True)[0].loss, loss)
        assert math.isfinite(loss) == (number < 3)
        assert_same_bits(ours, replica_views(expected))


@pytest.mark.usefixtures("all_is_worth_it")
def test_what_is_settled_is_updated_when_the_stages_are_over() -> None:
    """And nothing else, nor twice; nor anything where that was not asked for."""
    replica = make_replica(RICH, "cuda", 8)
    part = early_update(replica.plan)
    assert part is not None
    assert isinstance(replica, DeviceReplica)
    replica.stage_batch(Batch.of(*batch(RICH, 8)), learning_rate=0.5)
    replica.unpack_staged_batch()
    replica.sums_future()
    before = {name: np.array(value) for name, value in replica.parameters.items()}

    def changed() -> set[str]:
        new = replica.parameters
        return {name for name, value in before.items() if not np.array_equal(value, new[name])}

    replica.run()
    assert changed() == set()
    replica.run(early=True)
    early = {s.name for s in replica.plan.layout.slots if s.stop <= part.stop}
    assert changed() == early
    kept = {name: np.array(replica.parameters[name]) for name in early}
    replica.enqueue_update(rest=True)
    assert changed() == set(before)
    for name, value in kept.items():
        np.testing.assert_array_equal(replica.parameters[name], value, name)


@pytest.mark.parametrize("batch_size", [32, 2048])
@pytest.mark.parametrize(("name", "group"), [
    ("model0", None), ("model1", None), ("model2", None), ("cifar", "dense1"), ("solar", "dense1"),
    ("mlp-2048-2048", None),
])  # fmt: skip
def test_large_layers_are_updated_early_if_there_is_enough_beside(
    name: str, group: str | None, batch_size: int
) -> None:
    """A small layer behind it does not delay that."""
    plan = make_plan(zoo.build_network(name), load_backend("cuda"), batch_size, precision="tf32")
    part = early_update(plan)
    last = plan.stages[part.after] if part else None
    assert (last and last.group.split("+")[0]) == group
    if last:
        assert last.phase.value == "backward_input"


@pytest.mark.parametrize("training", [True, False])
def test_a_device_is_asked_for_what_the_plan_says(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 KiB are left for sample numbers and tables; copies on the host are not the plan's."""
    allocated = []
    device = make_replica(RICH, "cuda", 1).memory
    zeros = device.zeros

    def counted(shape: Any, dtype: Any) -> Any:
        allocated.append(math.prod(shape) * np.dtype(dtype).itemsize)
        return zeros(shape, dtype)

    monkeypatch.setattr(device, "zeros", counted)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda local_rank: device)
    plan = make_replica(RICH, "cuda", 16, optimizer=Adam(), training=training).plan
    planned = sum(plan.memory.values())
    assert planned <= sum(allocated) <= planned + 4096
