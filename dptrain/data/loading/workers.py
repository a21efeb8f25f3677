"""Worker processes that decode samples: image files, or objects with ``data[i]``.

A worker writes samples to memory that it shares with its rank; only indices and errors pass through
pipes. The rank decides where each sample goes, so the order does not depend on which worker is
faster. Workers are new processes (``spawn``), because a fork copies the state of MPI, of CUDA and
of locks that other threads hold. They end when their rank ends, however it ends.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import (
    connection,
    get_context,
    parent_process,
    reduction,
    resource_tracker,
    util,
)
from pickle import PickleError
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.pixels import PixelFormat
from dptrain.data.base import Dataset, Samples
from dptrain.errors import UserError
from dptrain.network.layers import Shape

SHARED_BYTES = 64 << 20
"""Shared memory of a rank's workers. Pages that are never written take no memory."""
CHUNKS_PER_WORKER = 4
"""Parts into which a worker's share of a minibatch is divided, so that all end at the same time."""
QUEUED = 2
"""Parts that a worker has at a time: it needs not wait for the next one."""
CLOSING_S = 2.0
"""Time that workers have to end before they are killed."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that launchers and terminals send to all processes; the rank handles them."""
_THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Part(NamedTuple):
    """Samples for a worker, and where it writes them.

    Attributes:
        split: 0 for the training split, 1 for the test split, 2 for the validation split.
        start: position in the minibatch.
        indices: of the samples.
        x, y: offset in the shared memory, shape and type of the arrays.
    """

    split: int
    start: int
    indices: NDArray[np.int64]
    x: tuple[int, Shape, str]
    y: tuple[int, Shape, str]


class Workers:
    """Processes of one rank that decode samples. They start at the first read.

    Args:
        splits: the splits of a data set, see `Dataset.splits`.
        count: number of processes.
        sample_bytes: size of the largest sample that is read, with its target.
    """

    def __init__(self, splits: tuple[Samples, ...], count: int, sample_bytes: int) -> None:
        self._splits, self._count = splits, count
        self._lock = threading.Lock()
        self._connections: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._size = max(SHARED_BYTES, sample_bytes)

    def read(
        self, split: int, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]
    ) -> None:
        """Fill `x` and `y` as `Samples.read`, or as `Samples.read_kept` if `x` is not float32.

        Raises:
            UserError: a sample cannot be read, or a worker ended.
        """
        x_bytes, y_bytes = (a.itemsize * math.prod(a.shape[1:]) for a in (x, y))
        most = max(self._size // max(x_bytes + y_bytes, 1), 1)
        # The loader's thread reads training samples while the main thread evaluates.
        with self._lock:
            if not self._processes:
                self._start()
            for start in range(0, len(indices), most):
                span = slice(start, start + most)
                self._read(split, indices[span], x[span], y[span])

    def _read(
        self, split: int, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]
    ) -> None:
        count = len(indices)
        step = -(-count // (self._count * CHUNKS_PER_WORKER))
        offset = x.itemsize * x.size
        parts = deque(
            _Part(
                split,
                start,
                indices[start : start + step],
                *(
                    (
                        base + start * a.itemsize * math.prod(a.shape[1:]),
                        (min(step, count - start), *a.shape[1:]),
                        a.dtype.str,
                    )
                    for base, a in ((0, x), (offset, y))
                ),
            )
            for start in range(0, count, step)
        )
        failures = self._distribute(parts)
        if failures:
            # Parts are sent in order, so this is the first damaged sample on any machine.
            raise UserError(min(failures)[1])
        x[...] = _view(self._memory, (0, x.shape, x.dtype.str))
        y[...] = _view(self._memory, (offset, y.shape, y.dtype.str))

    def _distribute(self, parts: deque[_Part]) -> list[tuple[int, str]]:
        """Send parts to workers that have few; return positions and messages of failures."""
        failures: list[tuple[int, str]] = []
        queued = dict.fromkeys(self._connections, 0)
        try:
            while True:
                for each in queued:
                    while parts and not failures and queued[each] < QUEUED:
                        each.send(parts.popleft())
                        queued[each] += 1
                waiting = [each for each, number in queued.items() if number]
                if not waiting:
                    return failures
                for ready in connection.wait(waiting):
                    assert isinstance(ready, connection.Connection)
                    failure = ready.recv()
                    queued[ready] -= 1
                    failures += [] if failure is None else [failure]
        except (EOFError, OSError):
            raise UserError(self._describe_end()) from None

    def _describe_end(self) -> str:
        """End all workers, one of which has ended, and return a message."""
        sentinels = [process.sentinel for process in self._processes]
        ended = connection.wait(sentinels, timeout=CLOSING_S)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(CLOSING_S)
        codes = [process.exitcode for process in self._processes if process.exitcode]
        self.close()
        code = f" with exit code {codes[0]}" if codes else ""
        return (
            f"a worker process that reads samples ended{code}; use --workers 0 to read them in the "
            'rank itself (a script that is its own module needs if __name__ == "__main__":)'
        )

    def _start(self) -> None:
        context, descriptor = get_context("spawn"), _anonymous_file(self._size)
        self._memory = mmap.mmap(descriptor, self._size)
        self._finalizer = util.Finalize(
            self, _close, (self._connections, self._processes), exitpriority=100
        )
        try:
            with _inherited_settings():
                for _ in range(self._count):
                    mine, theirs = context.Pipe()
                    self._connections.append(mine)
                    args = theirs, _Descriptor(descriptor), self._size, self._splits
                    process = context.Process(target=_serve, args=args, name="dptrain-worker")
                    process.start()
                    theirs.close()
                    self._processes.append(process)
        except (PickleError, TypeError, AttributeError) as error:
            self.close()
            raise UserError(
                f"the data set cannot be sent to worker processes ({error}); define its class, and "
                "a function of augment, in a module, without open files or lambdas, or use "
                "--workers 0"
            ) from None
        except OSError:
            raise UserError(self._describe_end()) from None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End the workers."""
        _close(self._connections, self._processes)


@dataclass(frozen=True, repr=False)
class WorkerSamples(Samples):
    """A split of a data set that worker processes read.

    Attributes:
        samples: the split.
        workers: the processes.
        split: number of the split in `workers`.
    """

    samples: Samples
    workers: Workers
    split: int

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def readable_shape(self) -> Shape | None:
        return self.samples.readable_shape

    @property
    def changes_by_epoch(self) -> bool:
        return self.samples.changes_by_epoch

    @property
    def pixels(self) -> PixelFormat:
        return self.samples.pixels

    def read(self, indices: NDArray[np.int64], x: NDArray[np.float32], y: NDArray[Any]) -> None:
        self.workers.read(self.split, indices, x, y)

    def read_kept(self, indices: NDArray[np.int64], x: NDArray[Any], y: NDArray[Any]) -> None:
        self.workers.read(self.split, indices, x, y)

    def content(
        self, indices: NDArray[np.int64], input_shape: Shape, target_shape: Shape
    ) -> Iterator[bytes]:
        return self.samples.content(indices, input_shape, target_shape)


def with_workers(dataset: Dataset, count: int) -> Dataset:
    """Return the data set with splits that `count` processes read, if samples are decoded."""
    train, splits = dataset.train, dataset.splits
    if not count or not train.decodes:
        return dataset
    shape = train.readable_shape or dataset.input_shape
    sample_bytes = 4 * (math.prod(shape) + math.prod(dataset.target_shape))
    workers = Workers(splits, count, sample_bytes)
    read = [
        WorkerSamples(split, workers, number) if split.decodes else split
        for number, split in enumerate(splits)
    ]
    return dataset.with_splits(read)


@contextmanager
def read_by_workers(
    samples: Samples, count: int, input_shape: Shape, target_shape: Shape = ()
) -> Iterator[Samples]:
    """Yield samples that `count` processes read, if they are decoded; the processes then end.

    Args:
        samples: one split of a data set, or inputs without targets.
        count: number of processes; 0 yields `samples`.
        input_shape, target_shape: of a sample; see `Dataset`.
    """
    if not count or not samples.decodes:
        yield samples
        return
    numbers = math.prod(samples.readable_shape or input_shape) + math.prod(target_shape)
    workers = Workers((samples, samples), count, 4 * numbers)
    try:
        yield WorkerSamples(samples, workers, 1)
    finally:
        workers.close()


class _Descriptor:
    """A file descriptor that a new process inherits: it arrives there as its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._descriptor),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


def _anonymous_file(size: int) -> int:
    """Return the descriptor of a file in memory that no directory contains."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dptrain-samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


@contextmanager
def _inherited_settings() -> Iterator[None]:
    """Let processes that are started compute with one thread each, and receive no signal before
    they ignore it.
    """
    # The process that Python starts before the first worker changes the mask of this thread.
    resource_tracker.ensure_running()
    before = {name: os.environ.get(name) for name in _THREAD_LIMITS}
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, "1"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _close(connections: list[connection.Connection], processes: list[Any]) -> None:
    """End workers: a closed pipe ends one that waits, and the others are killed."""
    for each in connections:
        each.close()
    for process in processes:
        process.join(CLOSING_S)
        if process.exitcode is None:
            process.kill()
            process.join()
    connections.clear()
    processes.clear()


def _view(memory: mmap.mmap, array: tuple[int, Shape, str]) -> NDArray[Any]:
    offset, shape, dtype = array
    count = math.prod(shape)
    return np.frombuffer(memory, dtype, count, offset).reshape(shape)


# In a worker.


def _serve(
    requests: connection.Connection, descriptor: int, size: int, splits: tuple[Samples, ...]
) -> None:
    """Read the samples that are requested until the rank closes the pipe or ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    threading.Thread(target=_end_with_rank, daemon=True).start()
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    with suppress(EOFError, OSError):
        while True:
            requests.send(_read_part(splits, memory, requests.recv()))


def _end_with_rank() -> None:
    """End this process, even in the middle of a sample, as soon as its rank has ended."""
    rank = parent_process()
    assert rank is not None
    connection.wait([rank.sentinel])
    os._exit(1)


def _read_part(
    splits: tuple[Samples, ...], memory: mmap.mmap, part: _Part
) -> tuple[int, str] | None:
    """Read samples one by one; return the position of one that fails with a message, or None."""
    x, y = _view(memory, part.x), _view(memory, part.y)
    for row, index in enumerate(part.indices):
        one = slice(row, row + 1)
        try:
            split = splits[part.split]
            read = split.read if x.dtype == np.float32 else split.read_kept
            read(part.indices[one], x[one], y[one])
        except UserError as error:
            return part.start + row, str(error)
        except Exception as error:
            name = ("training", "test", "validation")[part.split]
            text = f"{name} sample {index} cannot be read ({type(error).__name__}: {error})"
            return part.start + row, text
    return None
