"""Energy from counters that the tests write, and the reasons if there are none."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dptrain.measure.machine import energy
from dptrain.measure.machine.energy import Energy, EnergyMeter, energy_lines, energy_of, meter_facts
from dptrain.records import from_values

INTERVAL_S = 0.5
"""Time between two calls of the clock that the tests replace."""
IDENTITY = "00112233445566778899aabbccddeeff"


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0.0, INTERVAL_S)
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: next(times)))


def add_domain(powercap: Path, folder: str, name: str, microjoules: int) -> Path:
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text("1000000\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


class Nvml:
    """NVIDIA's library with one GPU."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.millijoules, self.uuid = code, 5000, b""

        def error_string(_: int) -> bytes:
            return b"Not Supported"

        self.nvmlErrorString = error_string

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, _: Any) -> int:
        self.uuid = uuid
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, _: Any, target: Any) -> int:
        ctypes.cast(target, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        return self.code


def test_processors_and_their_memory_are_counted_once(tmp_path: Path) -> None:
    package = add_domain(tmp_path, "intel-rapl:0", "package-0", 100_000)
    add_domain(tmp_path, "intel-rapl:0:0", "core", 50_000)
    dram = add_domain(tmp_path, "intel-rapl:0:1", "dram", 999_000)
    add_domain(tmp_path, "intel-rapl:1", "psys", 7)
    meter = energy.open_meter(powercap=tmp_path)
    assert (meter.names, meter.missing) == (["package-0", "dram"], [])
    meter.read(0)
    package.write_text("400000")
    dram.write_text("9000")  # The counter has wrapped around at 1 J.
    meter.read(10)
    found = energy_of([meter_facts(meter)])
    assert found.joules_per_sample is not None
    assert found.joules_per_sample.value == pytest.approx((0.3 + 0.01) / 10)
    assert found.watts is not None
    assert found.watts > 0
    assert np.isinf(found.joules_per_sample.high)


def test_a_counter_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    path = add_domain(tmp_path, "intel-rapl:0", "package-0", 1)
    path.unlink()
    path.mkdir()  # Unlike a mode, this also stops root.
    meter = energy.open_meter(powercap=tmp_path)
    assert meter.names == []
    (reason,) = meter.missing
    assert str(path) in reason
    assert "Is a directory" in reason
    found = energy_of([meter_facts(meter)])
    assert found == Energy(None, None, (), (reason,))
    assert energy_lines(found) == [f"energy not measured: {reason}"]
    (reason,) = energy.open_meter(powercap=tmp_path / "none").missing
    assert "has no processor" in reason


def test_a_gpu_is_found_by_its_uuid(tmp_path: Path) -> None:
    nvml = Nvml()
    meter = energy.open_meter(IDENTITY, reads_processors=False, load_nvml=lambda: nvml)
    assert nvml.uuid == b"GPU-00112233-4455-6677-8899-aabbccddeeff"
    meter.read(0)
    nvml.millijoules += 1500
    meter.read(3)
    found = energy_of([meter_facts(meter)])
    assert found.joules_per_sample is not None
    assert found.joules_per_sample.value == pytest.approx(0.5)
    assert "of GPU" in energy_lines(found)[0]


@pytest.mark.parametrize("code", [3, None])
def test_a_gpu_without_a_counter_is_named(code: int | None) -> None:
    def load() -> Any:
        if code is None:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return Nvml(code)

    meter = energy.open_meter(IDENTITY, reads_processors=False, load_nvml=load)
    assert meter.names == []
    assert ("Not Supported" if code else "libnvidia-ml.so.1") in meter.missing[0]
    assert meter.missing[0].count("NVML: ") == 1


class Constant:
    """A counter that rises by about 2 J for each reading."""

    name = "package-0"

    def __init__(self) -> None:
        self.generator, self.total = np.random.default_rng(0), 0.0

    def joules(self) -> float:
        self.total += 2 + 0.1 * self.generator.standard_normal()
        return self.total


def test_ranks_are_added_and_blocks_have_an_interval() -> None:
    meters = [EnergyMeter([Constant()], ["NVML: no"]), EnergyMeter([Constant()]), EnergyMeter([])]
    for block in range(31):
        for meter in meters:
            meter.read(4 * block)
    found = energy_of([meter_facts(meter) for meter in meters])
    value = found.joules_per_sample
    assert value is not None
    assert value.value == pytest.approx(1.0, abs=0.1)
    assert value.low < 1 < value.high < 1.2
    assert value.n == 30
    assert found.missing == ("NVML: no",)
    assert from_values(Energy, asdict(found)) == found
    assert energy_lines(found)[1] == "not included: NVML: no"


def test_wraps_between_readings_are_counted_by_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_domain(tmp_path, "intel-rapl:0", "package-0", 0)
    now_s = 0.0
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: now_s))
    meter = energy.open_meter(powercap=tmp_path)
    meter.read(0)
    # 10 mW for an hour; the counter wraps after every 100 s.
    for second in range(0, 3601, 5):
        now_s = float(second)
        path.write_text(str(10_000 * second % 1_000_000))
        meter.poll()
    meter.read(1)
    assert len(meter.readings) == 2
    assert meter.readings[1][1] == pytest.approx(36.0)


def facts_every(seconds: float, joules: list[float]) -> dict[str, Any]:
    """The facts of a meter that was read after every sample."""
    readings = [(number * seconds, value, number) for number, value in enumerate(joules)]
    return {"names": ["package-0"], "missing": [], "readings": readings}


def test_a_measurement_that_is_shorter_than_five_blocks_is_too_short() -> None:
    for facts in (facts_every(0.001, [0.0] * 11), facts_every(1, [3.0]), facts_every(1, [])):
        found = energy_of([facts])
        assert (found.joules_per_sample, found.watts) == (None, None)
        assert found.sources == ("package-0",)
        assert "too short" in found.missing[0]
        assert energy_lines(found)[0].startswith("energy not measured: too short: less")


def test_blocks_that_are_shorter_than_the_update_of_the_counter_are_joined() -> None:
    # Every sample takes 2 J and 20 ms; the counter is updated after every third one.
    found = energy_of([facts_every(0.02, [6.0 * (number // 3) for number in range(61)])])
    value = found.joules_per_sample
    assert value is not None
    assert (value.value, value.low) == pytest.approx((2, 2))
    # There is room for two interruptions of 100 ms in the 1.2 s.
    assert value.high == pytest.approx(2 * (1 + 0.2 / 1.2))
    assert value.n == 20
    # What is left at the end belongs to the last block.
    found = energy_of([facts_every(0.02, [2.0 * number for number in range(33)])])
    assert found.joules_per_sample is not None
    assert found.joules_per_sample.value == pytest.approx(2)
    assert found.joules_per_sample.n == 10
    assert np.isinf(found.joules_per_sample.high)
    assert "no interval: fewer than 16 blocks of 0.05 s" in energy_lines(found)[0]
