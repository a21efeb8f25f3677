"""What a way of summing gradients supplies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from dptrain.backends.replica import Replica
from dptrain.comm.world import World
from dptrain.plan.buckets import Bucket


class GradientSum(ABC):
    """Sums the flat gradients of all ranks, bucket by bucket, while backward goes on.

    A step calls `start` for each bucket in order, as soon as its gradients are final on this
    rank; `poll` between stages; `finish`; `update`. After `finish`, `Replica.sums` (loss, correct
    answers, wish to stop) hold their sums over all ranks on every rank, under every strategy;
    where a device keeps them, once `Replica.fetch_sums` has brought them.
    Subclasses override the `_do_…` methods, and `apply_update` where not every rank makes it.

    Attributes, of the last step:
        exposed_ns: what the calls took from the computing thread, without the update itself.
        hidden_ns: what a sum was under way besides.
        update_ns: the update itself; 0 on ranks that make none.
        bytes: payload that this rank gave into collectives.
        calls: begin and end of each stretch of `exposed_ns`, by `time.perf_counter_ns`.
        spans: begin and end of each bucket's sum, as far as they are known; by the same clock.
    """

    name: ClassVar[str]
    transport: ClassVar[str]
    """How gradients travel, a word of `dptrain.comm.TRANSPORTS` or ``none``."""

    enqueues: ClassVar[bool] = False
    """Whether `start`, `finish` and `apply_update` only enqueue work behind the replica's stages,
    so that they can be part of a program (`Memory.program`) with them; accounts then say nothing.
    """

    alone: ClassVar[bool] = False
    """Whether this rank's gradients are the sum, so that they may be used as they come."""

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        covered = [0, *(bucket.stop for bucket in buckets)]
        assert [bucket.start for bucket in buckets] == covered[:-1], "buckets leave gaps"
        assert covered[-1] == replica.host_gradients.size, "buckets do not cover the gradient"
        self.world, self.replica, self.buckets = world, replica, buckets
        self.exposed_ns = self.hidden_ns = self.update_ns = self.bytes = 0
        self.calls: list[tuple[int, int]] = []
        self.spans: list[tuple[int, int]] = [(0, 0)] * len(buckets)
        self._started = self._begun = self._done = 0
        self._under_way_ns = 0
        self._since: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Of the replica's device that sums take besides the gradient."""
        return 0

    def start(self, bucket: int) -> None:
        """Begin summing a bucket; all ranks start the same buckets in the same order."""
        assert bucket == self._started, f"bucket {bucket} started, {self._started} was due"
        if bucket == 0:
            self.exposed_ns = self.hidden_ns = self.update_ns = self.bytes = 0
            self._under_way_ns = self._begun = self._done = 0
            self.calls.clear()
        self._started += 1
        self._begun += 1
        now = time.perf_counter_ns()
        self.spans[bucket] = now, now
        if self._since is None:
            self._since = now
        with self._exposed():
            self._do_start(bucket)
        self._note()

    def poll(self) -> None:
        """Let sums progress: MPI works on them only inside its calls."""
        if self._since is not None:
            with self._exposed():
                self._do_poll()
            self._note()

    def finish(self) -> None:
        """Wait until every bucket is summed."""
        assert self._started == len(self.buckets), "finish before every bucket was started"
        self._started = 0
        with self._exposed():
            self._do_finish()
        self._note()
        # What one rank does in these calls is bookkeeping, and hides nothing.
        many = self.world.size > 1
        self.hidden_ns = max(self._under_way_ns - self.exposed_ns, 0) if many else 0

    def update(self, learning_rate: float) -> None:
        """Apply the update rule, so that all ranks end with the same parameters."""
        self._update_here(learning_rate)

    def apply_update(self, *, rest: bool = False) -> None:
        """`update` by what the device was told with the batch, without a look at the clock.

        Args:
            rest: as `Replica.apply_update` has it.
        """
        self.replica.apply_update(rest=rest)

    def time_alone(self, bucket: int) -> int:
        """Nanoseconds from when all ranks are here until a bucket's sum is there, on this rank.

        Apart from a step; what the gradients are afterwards is of no use.
        """
        self.world.barrier()
        # Ranks leave a barrier up to a nap apart, and a small sum almost at once.
        self.world.all_reduce(np.zeros(1, np.float32))
        begin = time.perf_counter_ns()
        self._do_start(bucket)
        self._do_finish()
        self.replica.memory.synchronize()
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        """Leave the other ranks in good order; programs that hold sums are gone already."""

    def stamp(self, place: int) -> None:
        """Where sums are enqueued: have the replica note when those so far are done."""

    def _update_here(self, learning_rate: float) -> None:
        begin = time.perf_counter_ns()
        self.replica.update(learning_rate)
        self.update_ns = time.perf_counter_ns() - begin

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        begin = time.perf_counter_ns()
        yield
        end = time.perf_counter_ns()
        self.exposed_ns += end - begin
        self.calls.append((begin, end))

    def _note(self) -> None:
        """Keep account of how long sums are under way."""
        now, busy = time.perf_counter_ns(), self._first_under_way()
        done = self._begun if busy is None else busy
        for bucket in range(self._done, done):
            self.spans[bucket] = self.spans[bucket][0], now
        self._done = done
        if self._since is not None and busy is None:
            self._under_way_ns += now - self._since
            self._since = None

    @abstractmethod
    def _first_under_way(self) -> int | None:
        """The first bucket whose sum is under way, as far as is known."""

    @abstractmethod
    def _do_start(self, bucket: int) -> None:
        """`start` without the accounts."""

    @abstractmethod
    def _do_poll(self) -> None:
        """`poll` without the accounts."""

    @abstractmethod
    def _do_finish(self) -> None:
        """`finish` without the accounts."""
