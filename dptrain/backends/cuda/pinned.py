"""Messages between the host and a GPU, in memory of the host that the system does not move."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.cuda.device import Array, Mailbox, Outbox

if TYPE_CHECKING:
    from dptrain.backends.cuda.gpu import GPU

SHORT = 64 << 10
"""Bytes of a message up to which its copy is part of the step: to start it apart would cost the
host more than waiting for it costs the GPU."""

PATIENCE_S, NAP_S = 0.02, 50e-6
"""How long to look without a pause, and the pause then."""


class PinnedMailbox(Mailbox):
    """Messages lie in memory that the system does not move.

    A short one is copied where it is fetched. A long one, such as a batch of pictures, travels on a
    stream of its own as soon as it is posted, beside the step before.
    """

    def __init__(self, gpu: GPU, memory: Array) -> None:
        self._gpu = gpu
        self._stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self._taken: list[Any] = [None, None]
        super().__init__(gpu, memory)

    def _make_host(self, nbytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return self._gpu.pinned(nbytes), self._gpu.pinned(nbytes)

    def open(self) -> int:
        turn = super().open()
        if self._taken[turn] is not None:
            self._taken[turn].synchronize()
        return turn

    def post(self, nbytes: int) -> None:
        super().post(nbytes)
        if nbytes > SHORT:
            self._copy(self._stream)
            self._gpu.stream.wait_event(self._stream.record(self._gpu.event()))

    def fetch(self) -> Array:
        if self._nbytes <= SHORT:
            self._copy(self._gpu.stream)
        return self._memory[self.turn]

    def _copy(self, stream: Any) -> None:
        runtime = self._gpu.cupy.cuda.runtime
        runtime.memcpyAsync(
            self._memory[self.turn].data.ptr, self.host[self.turn].ctypes.data, self._nbytes,
            runtime.memcpyHostToDevice, stream.ptr,
        )  # fmt: skip

    def taken(self) -> None:
        self._taken[self.turn] = self._gpu.stream.record(self._gpu.event())


class PinnedOutbox(Outbox):
    """Copies go to memory that the system does not move, beside other work."""

    def __init__(self, gpu: GPU, source: Array) -> None:
        super().__init__(gpu, source)
        self._gpu = gpu
        self._values = [gpu.pinned(source.nbytes).view(source.dtype) for _ in range(2)]

    def bring(self, turn: int) -> None:
        runtime = self._gpu.cupy.cuda.runtime
        with self._gpu.beside():
            runtime.memcpyAsync(
                self._values[turn].ctypes.data, self._source.data.ptr, self._source.nbytes,
                runtime.memcpyDeviceToHost, self._gpu.current.ptr,
            )  # fmt: skip

    def coming(self, turn: int) -> Callable[[float], NDArray[Any]]:
        self._gpu.join()
        done = self._gpu.stream.record(self._gpu.event())

        def wait(timeout: float) -> NDArray[Any]:
            wait_for(done, timeout)
            values: NDArray[Any] = self._values[turn].copy()
            return values

        return wait


def wait_for(event: Any, timeout: float) -> None:
    """Wait for an event, which may depend on other ranks.

    Raises:
        TimeoutError: it took longer than so many seconds.
    """
    begin = time.monotonic()
    while not event.done:
        waited = time.monotonic() - begin
        if waited > timeout:
            raise TimeoutError(
                f"the GPU was not done after {waited:.0f} s: another rank hangs, was stopped or "
                "has left"
            )
        if waited > PATIENCE_S:
            time.sleep(NAP_S)
