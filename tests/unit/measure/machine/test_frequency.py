"""Frequencies from files and a library that the tests make, and the reasons if there are none."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from dptrain.measure.machine.frequency import FrequencyReader, frequency_lines

IDENTITY = "00112233445566778899aabbccddeeff"


class Nvml:
    """NVIDIA's library with one GPU."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.mhz, self.reasons = code, 1980, 0

        def error_string(_: int) -> bytes:
            return b"Not Supported"

        self.nvmlErrorString = error_string

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, _: bytes, __: Any) -> int:
        return 0

    def nvmlDeviceGetClockInfo(self, _: Any, kind: int, target: Any) -> int:
        assert kind == 1, "the clock of the multiprocessors"
        ctypes.cast(target, ctypes.POINTER(ctypes.c_uint))[0] = self.mhz
        return self.code

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: Any, target: Any) -> int:
        ctypes.cast(target, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.reasons
        return self.code


def test_the_frequency_is_that_of_the_core_of_the_thread(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("7 (a b) c) " + " ".join(["R"] + ["0"] * 35 + ["3"] + ["0"] * 10))
    for core, khz in ((0, 800_000), (3, 2_600_500)):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
    reader = FrequencyReader(cpus=tmp_path, stat=stat)
    reader.read()
    assert reader.facts() == {"mhz": [2600.5], "throttled": [], "missing": ""}
    missing = FrequencyReader(cpus=tmp_path / "none", stat=stat)
    missing.read()
    assert missing.facts()["mhz"] == []
    assert frequency_lines([reader.facts(), missing.facts()])[0].startswith(
        "frequency not measured: the system states none"
    )


def test_what_slows_a_gpu_down_is_named() -> None:
    nvml = Nvml()
    reader = FrequencyReader(IDENTITY, load_nvml=lambda: nvml)
    reader.read()
    nvml.mhz, nvml.reasons = 1400, 0x4 | 0x1  # The power limit; the GPU was idle, too.
    reader.read()
    nvml.reasons = 0
    reader.read()
    facts = reader.facts()
    assert facts == {"mhz": [1980.0, 1400.0, 1400.0], "throttled": ["power limit"], "missing": ""}
    assert frequency_lines([facts]) == [
        "frequency: 1,400 to 1,980 MHz", "rank 0 was slowed down: power limit",
    ]  # fmt: skip


@pytest.mark.parametrize("code", [3, None])
def test_a_gpu_without_clocks_is_named_with_the_reason(code: int | None) -> None:
    def load() -> Any:
        if code is None:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return Nvml(code)

    reader = FrequencyReader(IDENTITY, load_nvml=load)
    reader.read()
    reader.read()
    (line,) = frequency_lines([reader.facts()])
    assert ("Not Supported" if code else "libnvidia-ml.so.1") in line
