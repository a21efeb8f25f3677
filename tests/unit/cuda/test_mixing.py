"""Mixup and CutMix on a GPU: the inputs are those that the host mixes, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.pixels import PixelFormat
from dptrain.batch import Batch
from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.crop_windows import CropWindowLoader
from dptrain.data.loading.loader import Loader
from dptrain.data.loading.sharding import Sampler
from dptrain.data.stored import CachedSamples
from dptrain.network import Dense, Flatten, MeanSquaredError, Network
from dptrain.plan import make_plan
from dptrain.plan.plan import INPUT
from dptrain.plan.shards import MicroShards
from tests.emulator.emulator import Emulator
from tests.tiers import tiered

COUNT, BATCH, SEED = 22, 6, 3
SHAPE, CANVAS = (3, 6, 5), (3, 8, 9)
PIXELS = PixelFormat("uint8", 2 / 255, -1.0)
RANDOM = np.random.default_rng(2)
IMAGES = RANDOM.integers(0, 256, (COUNT, *CANVAS), np.uint8)
VALUES = RANDOM.standard_normal((COUNT, 2), np.float32)
LABELS = RANDOM.integers(0, 4, COUNT)

PLAIN: dict[str, Any] = {}
MOVED = {"crop": 2, "flip": True}
CUT = {"crop": 2, "flip": True, "cutout": 3, "contrast": 0.4, "brightness": 0.2}
WARPED = {"rotate": 20.0, "erase": 0.5, "resized_crop": 0.3}
ANY = {"randaugment": 2, "hue": 0.1, "flip": True}
MIXUP, CUTMIX = {"mixup": 0.6}, {"cutmix": 1.0}


@lru_cache(maxsize=4)
def replica_for(rows: int, *, specializes: bool = True) -> CudaReplica:
    """Return a replica for minibatches of `rows` samples, with cached images."""
    backend = CudaBackend(Emulator(seed=1, specializes=specializes))
    backend.choose_device(0)
    network = Network(SHAPE, [Flatten()], MeanSquaredError())
    replica = backend.make_replica(make_plan(network, backend, rows, training=False))
    assert isinstance(replica, CudaReplica)
    replica.cache_images(IMAGES, PIXELS)
    return replica


def inputs(replica: CudaReplica, batch: Batch) -> NDArray[np.float32]:
    """Return the inputs (n, C, H, W) that a replica makes of a minibatch."""
    replica.load(batch._replace(y=None), training=False)
    loaded = np.array(replica.memory.download(replica._views[INPUT]))
    return loaded[: batch.size].transpose(0, 3, 1, 2)


def sources(
    change: Augmentation, sampler: Sampler, steps: range, replica: CudaReplica, *, values: bool
) -> Iterator[Loader | CropWindowLoader]:
    """Yield the source of mixed inputs, and those that let a replica mix images."""
    samples = CachedSamples(IMAGES, VALUES if values else LABELS.astype(np.int32), pixels=PIXELS)
    common = samples, sampler, steps, SHAPE, (2,) if values else ()
    encode = replica.encode_windows
    yield Loader(*common, augmentation=change, depth=0)
    yield CropWindowLoader(*common, augmentation=change, encode=encode)
    yield Loader(*common, augmentation=change, depth=2, keeps_pixels=True, encode=encode)
    yield Loader(*common, augmentation=change, depth=0, keeps_pixels=True)


def check(
    change: Augmentation, sampler: Sampler, *, steps: range = range(1, 9), values: bool = True,
    specializes: bool = True, exact: bool = True,
) -> int:  # fmt: skip
    """Check that all sources make the same minibatches; return the number of samples."""
    count, replica = 0, replica_for(BATCH, specializes=specializes)
    host, *others = sources(change, sampler, steps, replica, values=values)
    expected = []
    with host:
        for batch in host:
            assert batch.mixings is None
            x, y = np.array(batch.x), np.array(batch.y)
            expected.append((batch._replace(x=None, y=None), x, y))
    for other in others:
        with other as batches:
            for (own, x, y), batch in zip(expected, batches, strict=True):
                assert (own.step, own.part, own.global_count) == (
                    batch.step, batch.part, batch.global_count
                )  # fmt: skip
                np.testing.assert_array_equal(batch.samples, own.samples)
                np.testing.assert_array_equal(np.asarray(batch.y), y)
                assert batch.crop_windows is not None
                assert len(batch.crop_windows) == batch.size + 1
                found = inputs(replica, batch)
                if exact:
                    np.testing.assert_array_equal(found.view(np.int32), x.view(np.int32))
                else:
                    np.testing.assert_allclose(found, x, rtol=0, atol=4e-6)
                count += batch.size
    return count // len(others)


@pytest.mark.parametrize(
    ("changes", "specializes"),
    tiered(
        [(changes, specializes) for changes in (PLAIN, MOVED, CUT, WARPED, ANY)
         for specializes in (True, False)],
        [(CUT, True), (WARPED, False), (ANY, True)],
    ),
)  # fmt: skip
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX], ids=["mixup", "CutMix"])
@pytest.mark.parametrize("values", [True, False], ids=["values", "labels"])
def test_a_replica_mixes_images_as_the_host_mixes_inputs(
    mixing: dict[str, Any], changes: dict[str, Any], *, values: bool, specializes: bool
) -> None:
    """Cached or streamed; interpolated and mixed colours differ by rounding."""
    change = Augmentation(**changes, **mixing)
    exact = not (change.warps or change.hue)
    sampler = Sampler(COUNT, BATCH, SEED)
    assert check(change, sampler, values=values, specializes=specializes, exact=exact) > 0


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX], ids=["mixup", "CutMix"])
@pytest.mark.parametrize(
    "settings",
    [{"size": 2}, {"size": 5}, {"passes": 2}, {"size": 2, "passes": 3}, {"counts": (4, 2)},
     {"shards": 6, "size": 4}, {"shards": 4, "size": 2, "passes": 2}, {"labels": LABELS}],
    ids=str,
)  # fmt: skip
def test_a_partner_may_belong_to_another_rank_or_pass(
    mixing: dict[str, Any], settings: dict[str, Any]
) -> None:
    """The last minibatch of an epoch is smaller, so that some ranks may have none of it."""
    change, total = Augmentation(**CUT, **mixing), 0
    shards, others = settings.get("shards", 0), {k: v for k, v in settings.items() if k != "shards"}
    size = max(settings.get("size", 1), len(settings.get("counts", ())))
    for rank in range(size):
        passes = settings.get("passes", 1)
        micro = MicroShards.of_rank(shards, rank, size, passes) if shards else None
        own = {**others, "rank": rank, "size": size, "micro_shards": micro}
        total += check(change, Sampler(COUNT, BATCH, SEED, **own))
    assert total == 2 * COUNT


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX], ids=["mixup", "CutMix"])
def test_a_resumed_run_mixes_the_same_pairs(mixing: dict[str, Any]) -> None:
    """A source that begins within an epoch continues with the minibatches of a whole one."""
    change, sampler = Augmentation(**MOVED, **mixing), Sampler(COUNT, BATCH, SEED)
    replica = replica_for(BATCH)
    found = []
    for steps in (range(2, 7), range(5, 7)):
        _, source, *_ = sources(change, sampler, steps, replica, values=True)
        with source as batches:
            found.append([inputs(replica, batch) for batch in batches][-2:])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert check(change, sampler, steps=range(5, 7)) > 0


def test_messages_grow_only_if_samples_are_mixed() -> None:
    """By a window, and by one number of each sample for mixup and five for CutMix."""
    replica, sizes = replica_for(BATCH), {}
    for name, mixing in (("none", {}), ("mixup", MIXUP), ("CutMix", CUTMIX)):
        change = Augmentation(crop=1, **mixing)
        _, source, *_ = sources(
            change, Sampler(COUNT, BATCH, SEED), range(1), replica, values=False
        )
        with source as batches:
            (batch,) = batches
        assert batch.message is not None
        sizes[name] = len(batch.message)
    assert sizes["mixup"] - sizes["none"] == 4 * (4 + BATCH)
    assert sizes["CutMix"] - sizes["none"] == 4 * (4 + 5 * BATCH)


def test_vectors_are_mixed_on_the_device() -> None:
    """Mixup of rows of tables; a minibatch of one sample is mixed with itself."""
    rows = np.random.default_rng(0).standard_normal((5, 7), np.float32)
    backend = CudaBackend(Emulator(seed=1))
    backend.choose_device(0)
    network = Network((7,), [Dense(1)], MeanSquaredError())
    replica = backend.make_replica(make_plan(network, backend, 2, training=False))
    assert isinstance(replica, CudaReplica)
    replica.cache_images(rows)
    samples, change = CachedSamples(rows, rows[:, :1].copy()), Augmentation(mixup=1.0)
    common = samples, Sampler(5, 2, SEED), range(3), (7,), (1,)
    with (
        Loader(*common, augmentation=change, depth=0) as host,
        CropWindowLoader(*common, augmentation=change) as windows,
    ):
        for one, other in zip(host, windows, strict=True):
            replica.load(other._replace(y=None), training=False)
            found = np.array(replica.memory.download(replica._views[INPUT]))[: other.size]
            np.testing.assert_array_equal(found.reshape(-1, 7), one.x)
            np.testing.assert_array_equal(other.y, one.y)
