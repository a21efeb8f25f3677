"""A rank's device, that no other rank has it, and what is summed at a time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.pixels import PixelFormat
from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.comm.world import World
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.stored import CachedSamples, StoredSamples
from dptrain.errors import UserError
from dptrain.training.job import _cache_images
from dptrain.training.resources import bucket_bytes, node_facts, notice_if_slow, open_backend
from dptrain.training.settings import GivenSettings


class Neighbours(World):
    """This rank and another, which chose the device that it is told to have chosen."""

    def __init__(self, other: Any) -> None:
        super().__init__(None, None, 1.0)
        self._other = other

    def all_gather_json(self, value: Any) -> list[Any]:
        if value is None or isinstance(value, str):
            return [value, value]
        return [value, [value[0] if self._other[0] == "here" else "elsewhere", self._other[1]]]


class Bound(World):
    """This rank and a second one of its node, which has other cores or the same ones."""

    def __init__(self, cores: set[int], *, is_bound: bool) -> None:
        super().__init__(None, None, 1.0)
        self.local_size, self.local_cores = 2, len(cores) * (1 + is_bound)
        self._is_bound = is_bound

    def all_gather_json(self, value: Any) -> list[Any]:
        is_mask = isinstance(value[0], str)
        return [value, [value[0], [-1]] if is_mask and self._is_bound else value]


@pytest.mark.parametrize(("is_bound", "expected"), [(False, 2), (True, 6)])
def test_more_ranks_of_a_node_could_use_the_cores_to_which_none_is_bound(
    monkeypatch: pytest.MonkeyPatch, is_bound: bool, expected: int
) -> None:
    own = {0, 1}
    for module in ("dptrain.training.resources", "dptrain.comm.world"):
        monkeypatch.setattr(f"{module}.own_cores", lambda: own)
        monkeypatch.setattr(f"{module}.available_cores", lambda: len(own))
        monkeypatch.setattr(f"{module}.physical_cores", lambda cores: cores)
    monkeypatch.setattr("dptrain.training.resources.allowed_cores", lambda: set(range(6)))
    found = node_facts(Bound(own, is_bound=is_bound), 4)
    assert found == {"node_cores": expected, "node_gpus": 4}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "choose_device", lambda backend, local_rank: "GPU-0")


@pytest.mark.usefixtures("gpu")
def test_two_ranks_on_one_gpu_are_refused_unless_allowed() -> None:
    world = Neighbours(("here", "GPU-0"))
    with pytest.raises(UserError, match=r"2 ranks would use one GPU; .*--share-gpus"):
        open_backend(GivenSettings(backend="cuda"), world)
    assert open_backend(GivenSettings(backend="cuda", share_gpus=True), world).name == "cuda"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("other", [("here", "GPU-1"), ("elsewhere", "GPU-0")])
def test_ranks_with_gpus_of_their_own_are_welcome(other: tuple[str, str]) -> None:
    open_backend(GivenSettings(backend="cuda"), Neighbours(other))


def test_ranks_share_processors() -> None:
    open_backend(GivenSettings(backend="numba"), Neighbours(("here", "")))


def test_a_bucket_suits_those_who_carry_it() -> None:
    world = World.single()
    config = GivenSettings()
    assert bucket_bytes(config, world, "host") == 0
    assert bucket_bytes(config, world, "mpi") == 0
    assert bucket_bytes(config, world, "mpi", on_gpu=True) == 1024 * 1024
    assert bucket_bytes(config, world, "peer", on_gpu=True) == 256 * 1024
    assert bucket_bytes(config, world, "nccl", on_gpu=True) == 1024 * 1024
    world.size = 2  # The other rank is on another node.
    assert bucket_bytes(config, world, "host") == 256 * 1024
    assert bucket_bytes(GivenSettings(bucket_kib=3), world, "peer", on_gpu=True) == 3 * 1024


@pytest.mark.parametrize(
    ("spare", "local_size", "changes", "cached"),
    [
        (0, 1, {}, True), (-1, 1, {}, False), (0, 2, {}, True), (0, 2, {"share_gpus": True}, False),
        (-1, 1, {"device_cache": 0.6}, True), (0, 1, {"device_cache": 0.4}, False),
        (1 << 40, 1, {"device_cache": 0.0}, False),
    ],
)  # fmt: skip
def test_images_are_cached_on_the_device_up_to_a_share_of_its_free_memory(
    spare: int, local_size: int, changes: dict[str, Any], cached: bool
) -> None:
    samples = CachedSamples(np.zeros((4, 3, 32, 32), np.float32), np.zeros(4, np.int32))
    backend = SimpleNamespace(free_bytes=lambda: 2 * (samples.x.nbytes + spare))
    replica: Any = Mock(spec=DeviceReplica, backend=backend)
    world = World.single()
    world.local_size = local_size
    inputs: Any = SimpleNamespace(
        dataset=SimpleNamespace(train=samples, validation=None), augmentation=None
    )
    found, _ = _cache_images(replica, inputs, world, GivenSettings(**changes))
    assert replica.cache_images.called == cached
    assert found is (samples if cached else None)


@pytest.mark.parametrize("kind", [DeviceReplica, CropWindowReplica])
def test_a_device_also_caches_images_that_are_in_files(kind: type[Replica]) -> None:
    images, labels = np.arange(5 * 12, dtype=np.uint8).reshape(5, 3, 2, 2), np.arange(5)
    preprocessing = Preprocessing("image", (3, 2, 2), (3, 2, 2), "uint8", 2 / 255, -1.0)
    samples = StoredSamples(images, labels, np.array([4, 0, 2]), preprocessing, "x.npy")
    free = None if kind is CropWindowReplica else 1 << 20
    replica: Any = Mock(spec=kind, backend=SimpleNamespace(free_bytes=lambda: free))
    inputs: Any = SimpleNamespace(
        dataset=SimpleNamespace(train=samples, validation=None), augmentation=None
    )
    found, validation_at = _cache_images(replica, inputs, World.single(), GivenSettings())
    assert validation_at is None
    if kind is CropWindowReplica:
        assert found is None
        return
    assert found is not None
    cached, pixels = replica.cache_images.call_args.args
    assert (cached.shape, cached.dtype, cached.nbytes) == ((3, 3, 2, 2), np.uint8, 36)
    assert pixels == PixelFormat("uint8", 2 / 255, -1.0)
    np.testing.assert_array_equal(cached[0:2], images[[4, 0]])
    np.testing.assert_array_equal(cached[2:3], images[[2]])
    np.testing.assert_array_equal(found.y, [4, 0, 2])


@pytest.mark.parametrize(
    ("size", "share", "kept"), [(2, 0.5, True), (2, 6e-5, False), (3, 0.5, False)]
)
def test_a_device_keeps_the_validation_images_behind_the_training_images(
    size: int, share: float, kept: bool
) -> None:
    """If there is memory for both, 384 and 288 bytes of 8 MiB, and if they are alike."""
    train = CachedSamples(np.arange(48).reshape(4, 3, 2, 2), np.zeros(4, np.int32))
    validation = CachedSamples(np.ones((3, 3, size, size)), np.zeros(3, np.int32))
    replica: Any = Mock(
        spec=DeviceReplica,
        backend=SimpleNamespace(free_bytes=lambda: 8 << 20),
        resizes_images=False,
    )
    dataset: Any = SimpleNamespace(train=train, validation=validation)
    inputs: Any = SimpleNamespace(dataset=dataset, augmentation=None)
    found = _cache_images(replica, inputs, World.single(), GivenSettings(device_cache=share))
    assert found == (train, 4 if kept else None)
    images = replica.cache_images.call_args.args[0]
    assert len(images) == (7 if kept else 4)
    np.testing.assert_array_equal(images[2:5][:2], train.x[2:])
    assert not kept or (images[2:5][2] == 1).all()
    assert images[0:0].shape == (0, 3, 2, 2)


@pytest.mark.parametrize(("kind", "kept"), [(CropWindowReplica, True), (Replica, False)])
def test_images_in_host_memory_are_kept_if_the_replica_can_load_parts_of_them(
    kind: type[Replica], kept: bool
) -> None:
    samples = CachedSamples(np.zeros((4, 3, 32, 32), np.float32), np.zeros(4, np.int32))
    replica: Any = Mock(spec=kind, backend=SimpleNamespace(free_bytes=lambda: None))
    inputs: Any = SimpleNamespace(
        dataset=SimpleNamespace(train=samples, validation=None), augmentation=None
    )
    found, _ = _cache_images(replica, inputs, World.single(), GivenSettings())
    assert found is (samples if kept else None)


def test_a_slow_block_prints_a_notice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.training.resources.NOTICE_AFTER_S", 0.05)
    with notice_if_slow("compiling kernels"):
        printed, deadline = "", time.monotonic() + 60
        while not printed.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
            printed += capsys.readouterr().err
    assert printed == "dptrain: compiling kernels\n"
    monkeypatch.setattr("dptrain.training.resources.NOTICE_AFTER_S", 60.0)
    with notice_if_slow("compiling kernels"):
        pass
    with notice_if_slow(""):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_slow_block_prints_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    for name in ("NOTICE_AFTER_S", "PROGRESS_AFTER_S", "UPDATE_EVERY_S"):
        monkeypatch.setattr(f"dptrain.training.resources.{name}", 0.01)
    width = 30 if on_terminal else None
    monkeypatch.setattr("dptrain.measure.console.terminal_width", lambda descriptor: width)
    counts = iter([(0, 0), (3, 22), (4, 22)])
    is_over = threading.Event()

    def progress() -> tuple[int, int]:
        found = next(counts, None)
        if found is None:
            is_over.set()
        return found or (0, 0)

    with notice_if_slow("compiling kernels", progress):
        assert is_over.wait(60)
    lines, printed = capsys.readouterr()
    if on_terminal:
        assert printed == "dptrain: compiling kernels\n"
        assert lines.split("\r") == [
            "", "dptrain: compiling 4 of 22 ke\x1b[K", "dptrain: compiling 5 of 22 ke\x1b[K",
            "\x1b[K",
        ]  # fmt: skip
        return
    assert lines == ""
    assert printed.splitlines() == [
        "dptrain: compiling kernels",
        "dptrain: compiling 4 of 22 kernels, 0 s",
        "dptrain: compiling 5 of 22 kernels, 0 s",
    ]
