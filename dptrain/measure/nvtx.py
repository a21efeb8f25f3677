"""Ranges for NVIDIA's Nsight tools, under the names of stages.

Source: NVIDIA Tools Extension (NVTX), push and pop ranges of a thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.comm.base import GradientSum
from dptrain.errors import UserError
from dptrain.measure.recorder import DATA_WAIT
from dptrain.plan.lowering import Phase

T = TypeVar("T")

LIBRARIES = (("cupy.cuda.nvtx", "RangePush", "RangePop"), ("nvtx", "push_range", "pop_range"))
"""Modules that have ranges, and what they call pushing and popping one."""


class Ranges(Protocol):
    """Opens a range, and closes the one that was opened last."""

    def push(self, name: str) -> None:
        """Open a range."""

    def pop(self) -> None:
        """Close the last one."""


class _Library:
    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop

    def push(self, name: str) -> None:
        self._push(name)

    def pop(self) -> None:
        self._pop()


def load_ranges() -> Ranges:
    """NVTX by CuPy, or by NVIDIA's package ``nvtx``.

    Raises:
        UserError: neither is there.
    """
    for name, push, pop in LIBRARIES:
        try:
            module = importlib.import_module(name)
            found = _Library(getattr(module, push), getattr(module, pop))
            found.push("dptrain")
            found.pop()
        # CuPy has a module in place of what is missing, which fails when it is used.
        except (ImportError, AttributeError, RuntimeError, OSError):
            continue
        return found
    raise UserError("--nvtx finds no NVTX; pip install nvtx, or leave --nvtx out")


def annotate(replica: Replica, gradient_sum: GradientSum, ranges: Ranges) -> None:
    """From now on, open a range around each stage and each call that sums gradients."""
    replica.stages = [(s, _within(ranges, s.name, kernel)) for s, kernel in replica.stages]
    names = {stage.phase: stage.name for stage in replica.plan.stages}
    methods = [("load", Phase.LOAD), ("update_slice", Phase.UPDATE)]
    if isinstance(replica, DeviceReplica):
        methods = [
            ("stage_batch", Phase.LOAD),
            ("unpack_staged_batch", Phase.LOAD),
            ("enqueue_update", Phase.UPDATE),
        ]
    for method, phase in methods:
        _wrap(replica, method, ranges, names[phase])
    for method in ("start", "finish"):
        _wrap(gradient_sum, method, ranges, f"sum.{method}")


def waiting(batches: Iterator[T], ranges: Ranges) -> Iterator[T]:
    """The same items, with a range around waiting for each."""
    ask = _within(ranges, DATA_WAIT, lambda: next(batches, None))
    while (item := ask()) is not None:
        yield item


def _wrap(owner: Any, method: str, ranges: Ranges, name: str) -> None:
    setattr(owner, method, _within(ranges, name, getattr(owner, method)))


def _within(ranges: Ranges, name: str, action: Callable[..., T]) -> Callable[..., T]:
    def run(*args: Any, **kwargs: Any) -> T:
        ranges.push(name)
        try:
            return action(*args, **kwargs)
        finally:
            ranges.pop()

    return run
