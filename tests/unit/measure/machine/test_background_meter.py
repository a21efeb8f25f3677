"""A meter that a thread reads: the same readings, in order, and errors as reasons."""

from __future__ import annotations

from threading import Event

import pytest

from dptrain.measure.machine import background_meter
from dptrain.measure.machine.background_meter import BackgroundMeter
from dptrain.measure.machine.energy import EnergyMeter


class Slow:
    """A counter whose calls wait for an event, and that fails from one call on."""

    name = "slow"

    def __init__(self, fails_at: int = 10**6) -> None:
        self.released, self.calls, self._fails_at = Event(), 0, fails_at

    def joules(self) -> float:
        assert self.released.wait(60)
        self.calls += 1
        if self.calls >= self._fails_at:
            raise OSError("NVML: the GPU is lost")
        return float(self.calls)


def test_readings_are_those_of_the_meter_and_the_caller_does_not_wait() -> None:
    counter = Slow()
    meter = BackgroundMeter(lambda: EnergyMeter([counter], ["RAPL: none"]))
    for samples in (0, 32, 64):
        meter.read(samples)
    assert counter.calls == 0
    counter.released.set()
    found = meter.close()
    assert [reading[1:] for reading in found.readings] == [(1.0, 0), (2.0, 32), (3.0, 64)]
    assert (found.names, found.missing) == (["slow"], ["RAPL: none"])


def test_a_counter_that_fails_later_is_named_and_has_no_readings() -> None:
    counter = Slow(fails_at=2)
    counter.released.set()
    meter = BackgroundMeter(lambda: EnergyMeter([counter], ["RAPL: none"]))
    for samples in (0, 32, 64):
        meter.read(samples)
    found = meter.close()
    assert (found.names, found.readings) == ([], [])
    assert found.missing == ["RAPL: none", "NVML: the GPU is lost"]


def test_wraps_are_counted_if_no_reading_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Slow()
    counter.released.set()
    meter = BackgroundMeter(lambda: EnergyMeter([counter]))
    meter.poll()
    # A meter that was never called is due at once.
    monkeypatch.setattr(background_meter, "POLL_S", 0.0)
    meter.poll()
    assert not meter.close().readings
    assert counter.calls == 1
