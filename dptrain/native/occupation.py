"""A thread that keeps a core busy, so that what else runs there loses a known part of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from types import TracebackType

import numpy as np

from dptrain.native.atomics import load32
from dptrain.native.entries import address_of
from dptrain.native.jit import interpreted, native


@native
def _spin(stop):
    while load32(stop) == 0:
        pass
    return 0


@cache
def _compiled_spin() -> Callable[..., int]:
    return interpreted(_spin, 1)


class OccupiedCore:
    """Keeps a core busy within a ``with`` block, outside the interpreter.

    Args:
        core: number of the core, one that this process may use.
    """

    def __init__(self, core: int) -> None:
        self._stop = np.zeros(1, np.int32)
        self._core, self._spin = core, _compiled_spin()
        self._thread = threading.Thread(target=self._run, name="dptrain-occupy", daemon=True)

    def _run(self) -> None:
        os.sched_setaffinity(0, {self._core})  # Of the calling thread.
        self._spin(address_of(self._stop))

    def __enter__(self) -> OccupiedCore:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop[0] = 1
        self._thread.join()
