"""Frequencies of processors and GPUs during a measurement, and why a GPU was slowed down.

The frequency of a processor is that of the core on which the calling thread runs, as Linux states
it. Source: Linux, Documentation/admin-guide/pm/cpufreq.rst, "scaling_cur_freq". That of a GPU is
the clock of its multiprocessors. Source: NVIDIA, "NVML API reference", nvmlDeviceGetClockInfo and
nvmlDeviceGetCurrentClocksThrottleReasons.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dptrain.measure.machine.nvml import check_nvml, open_gpu

CPUS = Path("/sys/devices/system/cpu")
STAT = Path("/proc/thread-self/stat")
PROCESSOR_FIELD = 36
"""Index of the number of the core in a stat file, counted after the name of the program."""
SM_CLOCK = 1
REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "external power brake",
}
"""Bits of throttle reasons that name a disturbance. Others are idle times and settings."""


class FrequencyReader:
    """Reads the frequency of a rank now and then.

    Attributes:
        missing: why there is none; "" if there is.

    Args:
        identity: UUID of the GPU of this rank; empty if it computes on a processor.
        cpus, stat: files of the system.
        load_nvml: loads NVIDIA's library.
    """

    def __init__(
        self,
        identity: str = "",
        *,
        cpus: Path = CPUS,
        stat: Path = STAT,
        load_nvml: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1"),
    ) -> None:
        self.missing, self._mhz, self._reasons = "", list[float](), 0
        self._cpus, self._stat = cpus, stat
        self._gpu: _Gpu | None = None
        if identity:
            try:
                self._gpu = _Gpu(load_nvml(), identity)
            except (OSError, AttributeError) as error:
                self.missing = f"NVML: {str(error).removeprefix('NVML: ')}"

    def read(self) -> None:
        """Read the present frequency, and why it is reduced."""
        if self.missing:
            return
        try:
            if self._gpu is None:
                self._mhz.append(self._core_mhz())
            else:
                self._mhz.append(self._gpu.clock_mhz())
                self._reasons |= self._gpu.throttle_reasons()
        except FileNotFoundError:
            self.missing = "the system states none of its cores, as in most virtual machines"
        except (OSError, AttributeError, ValueError, IndexError) as error:
            self.missing = getattr(error, "strerror", None) or str(error)

    def facts(self) -> dict[str, Any]:
        """Return the readings as values for JSON."""
        found = [name for bit, name in REASONS.items() if self._reasons & bit]
        return {"mhz": self._mhz, "throttled": found, "missing": self.missing}

    def _core_mhz(self) -> float:
        core = int(self._stat.read_text().rpartition(")")[2].split()[PROCESSOR_FIELD])
        path = self._cpus / f"cpu{core}" / "cpufreq" / "scaling_cur_freq"
        return int(path.read_text()) / 1e3


class _Gpu:
    """The clocks of a GPU.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, nvml: Any, identity: str) -> None:
        self._nvml, self._device = nvml, open_gpu(nvml, identity)

    def clock_mhz(self) -> float:
        mhz = ctypes.c_uint()
        check_nvml(
            self._nvml,
            self._nvml.nvmlDeviceGetClockInfo(self._device, SM_CLOCK, ctypes.byref(mhz)),
        )
        return float(mhz.value)

    def throttle_reasons(self) -> int:
        bits = ctypes.c_ulonglong()
        check_nvml(
            self._nvml,
            self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(bits)),
        )
        return int(bits.value)


def frequency_lines(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines for the terminal: frequencies of the ranks, and what slowed GPUs down.

    Args:
        ranks: of each rank its `FrequencyReader.facts`.

    Example:
        >>> frequency_lines([{"mhz": [1980.0, 1965.0], "throttled": [], "missing": ""}])
        ['frequency: 1,965 to 1,980 MHz']
    """
    missing = next((str(each["missing"]) for each in ranks if each["missing"]), "")
    if missing:
        return [f"frequency not measured: {missing}"]
    found = [float(mhz) for each in ranks for mhz in each["mhz"]]
    lines = [f"frequency: {min(found):,.0f} to {max(found):,.0f} MHz"] if found else []
    return lines + [
        f"rank {number} was slowed down: {', '.join(each['throttled'])}"
        for number, each in enumerate(ranks)
        if each["throttled"]
    ]
