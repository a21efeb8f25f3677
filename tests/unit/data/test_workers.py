"""Worker processes: the same samples, errors that name them, and no process that is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.data import Augmentation, Loader, Sampler, open_data
from dptrain.data.base import Dataset
from dptrain.data.loading.workers import Workers, WorkerSamples, with_workers
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError
from tests.tiers import tiered

COUNT = 60


class Pictures:
    """Sample i is an image of the number i; some cannot be read."""

    def __init__(self, *bad: int, action: str = "raise") -> None:
        self.bad, self.action, self.targets = bad, action, np.arange(COUNT) % 3

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index in self.bad:
            if self.action == "exit":
                os._exit(7)
            raise OSError(f"disk error at {index}")
        return np.full((1, 4, 5), index, np.uint8), index % 3


def open_pictures(net: Any, monkeypatch: pytest.MonkeyPatch, data: Any) -> Dataset:
    """Open samples that do not fit in memory."""
    monkeypatch.setattr("dptrain.data.stored.free_memory", lambda: 0)
    return dataset_from(data, net((1, 4, 5), 3))


def workers_of(data: Dataset) -> Workers:
    assert isinstance(data.train, WorkerSamples)
    return data.train.workers


def read(samples: Any, indices: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.empty((len(indices), *shape), np.float32), np.empty(len(indices), np.int32)
    samples.read(np.asarray(indices), x, y)
    return x, y


@pytest.mark.parametrize("count", tiered([1, 3], [3]))
def test_samples_are_those_that_the_rank_reads(net: Any, images: Path, count: int) -> None:
    alone = open_data(f"folder:{images}", net((3, 12, 11), 2))
    data = with_workers(alone, count)
    for one, other in ((alone.train, data.train), (alone.test, data.test)):
        assert len(one) == len(other)
        indices = np.random.default_rng(0).integers(0, len(one), 40)
        for expected, found in zip(
            read(one, indices, (3, 12, 11)), read(other, indices, (3, 12, 11)), strict=True
        ):
            np.testing.assert_array_equal(expected, found)
        assert [*one.content(indices, (3, 12, 11), ())] == [
            *other.content(indices, (3, 12, 11), ())
        ]
    processes = list(workers_of(data)._processes)
    assert len(processes) == count
    workers_of(data).close()
    assert not any(process.is_alive() for process in processes)


def test_minibatches_are_the_same_for_any_number_of_workers(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_pictures(net, monkeypatch, Pictures())
    change, seen = Augmentation(crop=1, flip=True, contrast=0.3), []
    # Several requests for each minibatch.
    monkeypatch.setattr("dptrain.data.loading.workers.SHARED_BYTES", 200)
    for count in (0, 2):
        given = with_workers(data, count)
        sampler = Sampler(len(given.train), 7, seed=1)
        with Loader(given.train, sampler, range(9), (1, 4, 5), augmentation=change) as batches:
            seen.append([(b.x.copy(), b.y.copy()) for b in batches if b.x is not None])
    workers_of(given).close()
    for (x, y), (other_x, other_y) in zip(*seen, strict=True):
        np.testing.assert_array_equal(x, other_x)
        np.testing.assert_array_equal(y, other_y)


@pytest.mark.more
def test_the_first_sample_that_fails_is_named_and_others_can_still_be_read(
    net: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_workers(open_data(f"folder:{images}", net((3, 12, 11), 2)), 2)
    paths = data.train.samples.paths  # type: ignore[attr-defined]
    paths[1].write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{paths[1].name} cannot be read as an image"):
        read(data.train, [0, 1, 2], (3, 12, 11))
    read(data.train, [0, 2], (3, 12, 11))
    workers_of(data).close()
    data = with_workers(open_pictures(net, monkeypatch, Pictures(17, 35)), 3)
    rows = data.train.samples.rows  # type: ignore[attr-defined]
    for _ in range(5):
        with pytest.raises(UserError, match=r"sample .* cannot be read.*OSError: disk error at 17"):
            read(data.train, np.flatnonzero(rows >= 0), (1, 4, 5))
    workers_of(data).close()


def test_a_worker_that_ends_is_an_error(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = with_workers(open_pictures(net, monkeypatch, Pictures(17, action="exit")), 2)
    with pytest.raises(UserError, match=r"worker process .* ended with exit code 7; use"):
        read(data.train, np.arange(len(data.train)), (1, 4, 5))
    assert not workers_of(data)._processes


def test_objects_that_cannot_be_sent_are_refused(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = Pictures()
    pictures.transform = lambda x: x  # type: ignore[attr-defined]
    data = with_workers(open_pictures(net, monkeypatch, pictures), 2)
    with pytest.raises(UserError, match=r"cannot be sent to worker processes .*use --workers 0"):
        read(data.train, [0], (1, 4, 5))
    assert not workers_of(data)._processes


def test_arrays_need_no_workers(net: Any) -> None:
    data = open_data("digits", net((1, 8, 8)))
    assert with_workers(data, 2) is data
    assert with_workers(open_data("digits", net((1, 8, 8))), 0).train.decodes is False


SCRIPT = """
import time
import numpy as np
from dptrain.data.loading.workers import Workers
from tests.unit.data.test_workers import Forever

if __name__ == "__main__":
    workers = Workers((Forever(), Forever()), 2, 100)
    workers._start()
    print(*(process.pid for process in workers._processes), flush=True)
    workers.read(0, np.arange(4), np.zeros((4, 1), np.float32), np.zeros(4, np.int32))
"""


class Forever:
    """Reading a sample never ends."""

    def read(self, indices: Any, x: Any, y: Any) -> None:
        time.sleep(1e6)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.more
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        workers = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGTERM)  # The rank decides when its workers end.
        time.sleep(0.5)
        assert rank.poll() is None
        rank.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, workers))
