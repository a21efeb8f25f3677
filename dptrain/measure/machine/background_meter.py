"""An energy meter that a thread opens and reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dptrain.measure.machine.energy import POLL_S, EnergyMeter


class BackgroundMeter:
    """An energy meter whose caller does not wait for the counters.

    A reading of NVML takes 3 to 4 ms, and the first call 30 ms (one H100), during which a GPU would
    complete all steps that are enqueued and wait for the next one.

    Args:
        open_meter: opens the meter; the thread calls it.
    """

    def __init__(self, open_meter: Callable[[], EnergyMeter]) -> None:
        self._executor = ThreadPoolExecutor(1, "dptrain-energy")
        self._meter = self._executor.submit(open_meter)
        self._readings: list[Future[None]] = []
        self._called_s = time.monotonic()

    def read(self, samples: float) -> None:
        """Let the thread do what `EnergyMeter.read` does."""
        self._readings.append(self._executor.submit(lambda: self._meter.result().read(samples)))
        self._called_s = time.monotonic()

    def poll(self) -> None:
        """Let the thread do what `EnergyMeter.poll` does, if it is due."""
        if time.monotonic() - self._called_s >= POLL_S:
            self._readings.append(self._executor.submit(lambda: self._meter.result().poll()))
            self._called_s = time.monotonic()

    def close(self) -> EnergyMeter:
        """End the thread.

        Returns:
            The meter with its readings; one without counters if a counter could not be read.
        """
        self._executor.shutdown()
        meter = self._meter.result()
        errors = [reading.exception() for reading in self._readings]
        reasons = list(dict.fromkeys(str(error) for error in errors if error is not None))
        return EnergyMeter((), [*meter.missing, *reasons]) if reasons else meter
