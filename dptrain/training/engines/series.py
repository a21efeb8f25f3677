"""Short steps of a device that are enqueued in series, as one program."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from dptrain.backends.device_replica import DeviceReplica
from dptrain.batch import Batch
from dptrain.training.engines.programs import Kind, Programs


class Series:
    """Steps that are enqueued together; while they run, the host stages the next ones.

    Args:
        replica: makes the steps.
        slots: staging slots that they may use.
        global_count: samples of each global minibatch.

    Attributes:
        slots: staging slots of its steps.
        is_full: True if no further step fits.
    """

    def __init__(self, replica: DeviceReplica, slots: range, global_count: int) -> None:
        self._replica, self._all_slots, self.global_count = replica, slots, global_count
        self.slots = slots[:0]
        self._wait: Callable[[float], None] | None = None
        self._clock_shift: int | None = None

    def add_step(self) -> int:
        """Add a step; return the staging slot of its minibatch."""
        self.slots = self._all_slots[: len(self.slots) + 1]
        return self.slots[-1]

    @property
    def is_full(self) -> bool:
        return len(self.slots) == len(self._all_slots)

    def enqueue(self, batch: Batch, programs: Programs, enqueue_step: Callable[[], None]) -> None:
        """Enqueue all steps.

        Args:
            batch: the minibatch of one of them; all have the same size.
            programs: has the captured programs.
            enqueue_step: enqueues a step whose minibatch is unpacked.
        """

        def enqueue_all() -> None:
            replica = self._replica
            replica.unpack_series_step(self.slots[0], ahead=False)
            for slot in self.slots:
                if slot + 1 in self.slots:
                    replica.unpack_series_step(slot + 1, ahead=True)
                replica.open_series_step(slot)
                enqueue_step()
                replica.end_series_step()

        programs.run(batch, enqueue_all, kind=Kind.SERIES, slot=self.slots.start)
        self._replica.open_series_step(self.slots[-1])
        self._wait = self._replica.series_future()

    def sums_of(self, slot: int) -> Callable[[float], list[float]]:
        """Return a function that waits for a step and returns its loss sums, see `SumsFuture`."""

        def wait(timeout: float) -> list[float]:
            self._wait_for_end(timeout)
            return self._replica.staged_sums(slot)

        return wait

    def _wait_for_end(self, timeout: float) -> None:
        if self._wait is not None:
            self._wait(timeout)
            self._wait = None
            last = self._replica.staged_time(self.slots[-1])
            self._clock_shift = perf_counter_ns() - last

    @property
    def clock_shift(self) -> int:
        """Nanoseconds from the clock of the device to `time.perf_counter_ns`.

        It is too large by the time that the host took to notice the end of the series.
        """
        assert self._clock_shift is not None, "the series has not ended"
        return self._clock_shift


class SeriesClock:
    """Times at which steps of series ended, on the clock of the host.

    The device writes when its steps end. The host notices it later, once for a whole series and
    after a time that varies, so that the first series after `reset` converts the times of all.
    """

    def __init__(self, replica: DeviceReplica) -> None:
        self._replica = replica
        self._shift: int | None = None

    def ended_ns(self, series: Series, slot: int) -> int:
        """Return the time at which a step ended, in nanoseconds of `time.perf_counter_ns`."""
        if self._shift is None:
            self._shift = series.clock_shift
        return self._replica.staged_time(slot) + self._shift

    def reset(self) -> None:
        """Forget the difference of the clocks, which drift apart."""
        self._shift = None
