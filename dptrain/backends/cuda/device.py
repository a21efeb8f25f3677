"""What the CUDA backend knows of the world: memory, and kernels that run on it.

A device runs what it is given in order, and returns before it is done; `download` and
`synchronize` wait. Work that is started within `Device.beside` runs beside what follows, until
`join`. `gpu.GPU` is one; another, which the tests supply, runs the same kernels on the CPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.errors import UserError
from dptrain.network.layers import Shape

KERNELS = Path(__file__).parents[2] / "kernels"
"""Folder of the sources of kernels."""

Array = Any
"""Memory on a device: contiguous, with ``shape``, ``dtype``, ``size``, ``nbytes``, ``reshape``,
``view`` and slices of its first dimension, as NumPy has them. Its values are on the device: only
kernels, `Device.upload` and `Device.download` reach them."""

Extent = tuple[int, int, int]
"""Blocks of a grid, or threads of a block, in x, y and z."""


class Function(Protocol):
    """A kernel, compiled."""

    def __call__(
        self,
        grid: Extent,
        block: Extent,
        args: Sequence[Array | np.generic],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Enqueue the kernel.

        Args:
            grid, block: extents, at least 1 in every direction.
            args: one for each of the kernel's parameters: an array for a pointer, a NumPy scalar of
                the parameter's very type for a number.
            shared_bytes: of what the kernel declares ``extern __shared__``.
        """


SHORT = 2 << 10
"""Bytes of a message up to which kernels read it where the host wrote it: some 50 samples that are
places. To start a copy apart takes the host 7 µs of a step's 45 (one H200), and as part of a step's
graph one took 10."""

WEIGHTS, SUMS = "weights", "sums"
"""Lanes beside a device's main one: gradients of weights, with what is updated as soon as they are
there, and their sums over the ranks."""


class Mailbox:
    """How messages of bytes come to a device, and a few numbers back.

    A message is written to memory of the host and posted. Several may be under way, in turns, so
    that one is written while others are used. Short ones, and the answer, pass between the host's
    memory and kernels: an engine for copies would wait for those that compute, and these for it.

    Args:
        device: where messages go.
        memory: uint8 (turns, bytes) there.
        answer: float32 there, at most 32 numbers, what comes back.

    Attributes:
        host: uint8 (bytes,) of the host for each turn.
        turn: of the message that is open, or was posted last.
    """

    def __init__(self, device: Device, memory: Array, answer: Array) -> None:
        self._device, self._memory, self._answer = device, memory, answer
        turns, nbytes = memory.shape
        self.host = [device.host_memory(nbytes) for _ in range(turns)]
        self._answers = [device.host_memory(answer.nbytes).view(np.float32) for _ in range(turns)]
        self._told = [device.reach(values) for values in self._answers]
        self._near = [device.reach(host) for host in self.host]
        self._tell = device.function("unpack_batch.cu", "copy_loss_sums")
        self.turn = 0
        self._nbytes = 0

    def open(self) -> int:
        """The turn of the next message, when nothing uses what was in its memory any more."""
        self.turn = (self.turn + 1) % len(self.host)
        return self.turn

    def post(self, nbytes: int) -> None:
        """The open message is written; so many bytes are it."""
        self._nbytes = nbytes
        if nbytes > SHORT:
            self._bring()

    def _bring(self) -> None:
        """Enqueue a copy of the open message to the device."""
        span = slice(self._nbytes)
        self._device.upload(self._memory[self.turn][span], self.host[self.turn][span])

    @property
    def message(self) -> Array:
        """Where kernels that are enqueued behind `post` read the message.

        A program that they are part of is for this turn only, and so it is with `reply`.
        """
        return (self._memory if self._nbytes > SHORT else self._near)[self.turn]

    def reply(self) -> None:
        """Enqueue what writes the answer, as it is then, to memory of the host."""
        with self._device.beside():
            args = [self._answer, self._told[self.turn], np.int32(self._answer.size)]
            self._tell((1, 1, 1), (32, 1, 1), args)

    def sent(self) -> Callable[[float], list[float]]:
        """All that reads the open message is enqueued, and its answer, if one is wanted.

        Returns:
            What waits for all that, at most so many seconds (`TimeoutError`), and gives the answer.
        """
        self._device.join()
        values = self._answers[self.turn]
        return lambda timeout: values.tolist()


class Device(ABC):
    """Memory and kernels of one accelerator.

    Attributes:
        asynchronous: that it returns before it is done, as `Memory` has it.
        on_gpu: whether arrays are memory of a GPU, as NCCL takes it.
        identity: what tells it from the other devices of this machine.
        name: of its kind, such as ``NVIDIA H200``.
        shared_bytes: of shared memory that a block may have.
        specializes: whether kernels are to be compiled for each layer, which makes them faster and
            costs a compilation.
    """

    asynchronous: bool = True
    on_gpu: bool = False
    identity: str = ""
    name: str = ""
    shared_bytes: int = 227 << 10
    specializes: bool = True

    @property
    def free_bytes(self) -> int:
        """Memory that `zeros` may still give."""
        raise NotImplementedError

    @abstractmethod
    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Memory that holds zeros, aligned to at least 256 bytes."""

    @abstractmethod
    def upload(self, target: Array, source: NDArray[Any]) -> None:
        """Copy an array of the same shape from the host, converted to the target's dtype.

        The source may be changed as soon as this returns.
        """

    @abstractmethod
    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """A copy on the host, in `out` if given, taken when everything enqueued before is done."""

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeros in memory of the host that this device's kernels may use, by `reach`."""
        return np.zeros(nbytes, np.uint8)

    def reach(self, host: NDArray[Any]) -> Array:
        """`host_memory` as kernels of this device know it."""
        return host

    def host_copy(self, source: Array) -> NDArray[Any]:
        """`download` to memory that later copies from and to the device reach fastest."""
        return self.download(source)

    @abstractmethod
    def function(self, file: str, name: str, **defines: int) -> Function:
        """A kernel, compiled for this device unless it has been before.

        Args:
            file: source in the folder of kernels, such as ``pooling.cu``.
            name: of an ``extern "C" __global__`` function in it.
            defines: macros that the source is compiled with.
        """

    def tensor_map(
        self, maps: Array, shape: Shape, box: Shape, kind: str, *, as_factors: bool = True
    ) -> np.void | None:
        """What the device's engine for bulk copies knows of maps.

        Args:
            maps: of activations, or marks of pooling.
            shape: (N, H, W, C), as they lie in memory.
            box: of each dimension how many come at once.
            kind: precision of products, or ``marks``.
            as_factors: whether they come as tensor cores take them: in an order for which C of the
                box is 32, 64 or 128 bytes, numbers of tf32 rounded.

        Returns:
            An argument for kernels, or None where there is no such engine.
        """
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""

    def copy(self, target: Array, source: Array) -> None:
        """Enqueue a copy from one array of the device to another of the same shape and dtype."""
        self.upload(target, self.download(source))

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        """Milliseconds of a product of square matrices by the maker's library, if there is one."""
        return None

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        """Milliseconds that what `start` enqueues takes, several times over.

        Raises:
            RuntimeError: it cannot be run, or not in a captured step.
        """
        self.synchronize()
        begin = time.perf_counter()
        start()
        self.synchronize()
        return [(time.perf_counter() - begin) * 1e3]

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        """See `Memory.program`; a GPU captures what `start` enqueues as one graph."""
        return start

    def mailbox(self, memory: Array, answer: Array) -> Mailbox:
        """A way for messages to uint8 (turns, bytes) of this device's memory, and back."""
        return Mailbox(self, memory, answer)

    @contextmanager
    def beside(self, lane: str = WEIGHTS) -> Iterator[None]:
        """Have what is enqueued inside run when all before is done, beside what comes behind.

        Args:
            lane: where; what is in one lane runs in order. `SUMS` waits for what is in the others.
        """
        yield

    def address(self, array: Array) -> int:
        """Where an array begins in the device's memory."""
        raise NotImplementedError

    @property
    def stream_address(self) -> int:
        """The CUDA stream that work goes to at present."""
        return 0

    def join(self) -> None:
        """Have what is enqueued from now on wait for what runs beside."""

    def share(self, nbytes: int) -> tuple[Array, bytes]:
        """Memory that devices of other processes of this machine can use.

        Returns:
            uint8 (bytes,), which lives until `unshare`, and what `open_shared` knows it by.

        Raises:
            UserError: there is none.
        """
        raise UserError(f"{self.name or 'this device'} has no memory that processes can share")

    def unshare(self, memory: Array) -> None:
        """Give back memory that nobody uses any more."""

    def open_shared(self, handle: bytes) -> int:
        """Where kernels of this device find memory of another's `share`, until `close_shared`.

        Raises:
            UserError: they cannot reach it.
        """
        raise UserError(f"{self.name or 'this device'} reaches no memory of other processes")

    def close_shared(self, address: int) -> None:
        """Leave memory that `open_shared` found."""
