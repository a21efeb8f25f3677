"""NVTX ranges with the names of stages, for NVIDIA's Nsight tools.

Source: NVIDIA Tools Extension (NVTX), push and pop ranges of a thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.comm.sums.base import GradientSum
from dptrain.errors import UserError
from dptrain.measure.step_record import DATA_WAIT
from dptrain.plan.lowering import Phase

T = TypeVar("T")

LIBRARIES = (("cupy.cuda.nvtx", "RangePush", "RangePop"), ("nvtx", "push_range", "pop_range"))
"""Modules that provide ranges, and the names of their push and pop functions."""


class Ranges(Protocol):
    """Opens and closes ranges."""

    def push(self, name: str) -> None:
        """Open a range."""

    def pop(self) -> None:
        """Close the range that was opened last."""


class _Library:
    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop

    def push(self, name: str) -> None:
        self._push(name)

    def pop(self) -> None:
        self._pop()


def load_ranges() -> Ranges:
    """Return NVTX ranges from CuPy or from NVIDIA's package ``nvtx``.

    Raises:
        UserError: neither is installed.
    """
    for name, push, pop in LIBRARIES:
        try:
            module = importlib.import_module(name)
            found = _Library(getattr(module, push), getattr(module, pop))
            found.push("dptrain")
            found.pop()
        # CuPy has a placeholder for a missing module, which raises when it is used.
        except (ImportError, AttributeError, RuntimeError, OSError):
            continue
        return found
    raise UserError(
        "--nvtx requires NVTX, which is missing; install the package nvtx or omit --nvtx"
    )


def annotate(replica: Replica, gradient_sum: GradientSum, ranges: Ranges) -> None:
    """Open a range around each stage and each call of the gradient sum, from now on."""
    lists = replica.stage_lists if isinstance(replica, DeviceReplica) else [replica.stages]
    for stages in lists:
        stages[:] = [(stage, _within(ranges, stage.name, kernel)) for stage, kernel in stages]
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
    """Yield the same items, with a range while waiting for each."""
    next_item = _within(ranges, DATA_WAIT, lambda: next(batches, None))
    while (item := next_item()) is not None:
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
