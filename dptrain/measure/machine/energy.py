"""Energy of processors (RAPL) and GPUs (NVML), and joules per sample with an interval.

RAPL counts whole processors with their memory, other programs included; NVML counts a whole GPU.
What cannot be read is named with the reason, and nothing is estimated in its place.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.machine.nvml import check_nvml, open_gpu
from dptrain.measure.series import half_width_of_mean
from dptrain.measure.statistics import UNSEEN, UNSEEN_MS, Estimate

POWERCAP = Path("/sys/class/powercap")
BLOCK_S = 0.05
"""Least duration of a block. RAPL is updated every millisecond, NVML every 20 to 100 ms."""

POLL_S = 60.0
"""Time after which counters are read between two readings. They can count one wrap between two
calls; the counter of a processor wraps after 262 kJ, which is 22 minutes at 200 W."""
FEWEST_BLOCKS = 5
"""Least number of blocks of a measurement."""
FEWEST_FOR_INTERVAL = 16
"""Least number of blocks with an interval; the correlation of fewer blocks is hardly known."""
LEAST_S = FEWEST_BLOCKS * BLOCK_S
"""Least duration of a measurement."""


@dataclass(frozen=True)
class Energy:
    """Energy of a measurement.

    Attributes:
        joules_per_sample: of all counters that could be read, with its 95% interval; None if there
            is none.
        watts: mean power; None as above.
        sources: the counters.
        missing: the counters that could not be read, with the reasons.
    """

    joules_per_sample: Estimate | None
    watts: float | None
    sources: tuple[str, ...]
    missing: tuple[str, ...]


class Counter(Protocol):
    """A counter of energy.

    Attributes:
        name: name in reports.
    """

    name: str

    def joules(self) -> float:
        """Return the energy since some moment before the first call."""


class RaplCounter:
    """The counter of a processor or of its memory, which wraps around every few minutes or hours.

    Args:
        folder: its folder in `POWERCAP`.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.name = (folder / "name").read_text().strip()
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj, self._wrapped_uj = self._read(), 0

    def joules(self) -> float:
        now_uj = self._read()
        if now_uj < self._last_uj:
            self._wrapped_uj += self._range_uj
        self._last_uj = now_uj
        return (self._wrapped_uj + now_uj) / 1e6

    def _read(self) -> int:
        return int(self._file.read_text())


class GpuCounter:
    """The counter of a GPU.

    Args:
        nvml: the library.
        identity: UUID of the GPU in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, nvml: Any, identity: str) -> None:
        self.name, self._nvml, self._device = "GPU", nvml, open_gpu(nvml, identity)
        self.joules()

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        check_nvml(
            self._nvml,
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)),
        )
        return millijoules.value / 1e3


Reading = tuple[float, float, float]
"""Time in s, energy in J and number of samples since the first reading."""


class EnergyMeter:
    """The counters of one rank, and their readings.

    Attributes:
        names: names of the counters that can be read.
        missing: counters that cannot be read, with the reasons.
        readings: the readings, one for each call of `read`.
        after_reading: called after each reading.
    """

    def __init__(self, counters: Sequence[Counter], missing: Sequence[str] = ()) -> None:
        self._counters = tuple(counters)
        self.names = [counter.name for counter in counters]
        self.missing = list(missing)
        self.readings: list[Reading] = []
        self._called_s = 0.0
        self.after_reading: Callable[[], None] = lambda: None

    def read(self, samples: float) -> None:
        """Read all counters after `samples` samples since the first reading."""
        joules = self._joules()
        self._called_s = time.monotonic()
        self.readings.append((self._called_s, joules, samples))
        self.after_reading()

    def poll(self) -> None:
        """Count wraps of the counters; call this method at least every few minutes."""
        if self._counters and time.monotonic() - self._called_s >= POLL_S:
            self._joules()
            self._called_s = time.monotonic()

    def read_if_due(self, samples: float) -> None:
        """Read all counters if `BLOCK_S` have passed since the last reading."""
        if self._counters and time.monotonic() - self.readings[-1][0] >= BLOCK_S:
            self.read(samples)

    def _joules(self) -> float:
        return sum(counter.joules() for counter in self._counters)


def open_meter(
    identity: str = "",
    *,
    reads_processors: bool = True,
    powercap: Path = POWERCAP,
    load_nvml: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1"),
) -> EnergyMeter:
    """Return the meter of a rank.

    Args:
        identity: UUID of the GPU of this rank; empty if it computes on a processor.
        reads_processors: True on one rank of each node.
        powercap: folder of the counters of processors.
        load_nvml: loads NVIDIA's library.
    """
    counters: list[Counter] = []
    missing: list[str] = []
    if reads_processors:
        folders = _rapl_folders(powercap)
        if not folders:
            missing.append(f"RAPL: {powercap} has no processor; virtual machines rarely offer it")
        for folder in folders:
            try:
                counters.append(RaplCounter(folder))
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                missing.append(f"RAPL: cannot read {folder / 'energy_uj'}: {reason}")
    if identity:
        try:
            counters.append(GpuCounter(load_nvml(), identity))
        except (OSError, AttributeError) as error:
            missing.append(f"NVML: {str(error).removeprefix('NVML: ')}")
    return EnergyMeter(counters, missing)


def _rapl_folders(powercap: Path) -> list[Path]:
    """Return the folders of processors and of their memory, which processors do not include."""
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            found.append(folder)
    return found


def energy_of(meters: Sequence[Mapping[str, Any]]) -> Energy:
    """Return the energy of all ranks, which made their readings after the same samples.

    Args:
        meters: of each rank its `meter_facts`.
    """
    names = list(dict.fromkeys(name for meter in meters for name in meter["names"]))
    missing = tuple(dict.fromkeys(reason for meter in meters for reason in meter["missing"]))
    counted = [np.array(meter["readings"], float) for meter in meters if meter["names"]]
    if not counted:
        return Energy(None, None, (), missing)
    seconds = float(np.ptp(counted[0][:, 0])) if len(counted[0]) else 0.0
    if seconds < LEAST_S:
        # Without the duration, because notes list each reason once for many measurements.
        reason = f"too short: less than {LEAST_S:g} s were measured; make more steps"
        return Energy(None, None, tuple(names), (*missing, reason))
    kept = _block_ends(counted[0][:, 0])
    counted = [readings[kept] for readings in counted]
    joules = sum(readings[:, 1] - readings[0, 1] for readings in counted)
    times, samples = counted[0][:, 0], counted[0][:, 2]
    value = float(joules[-1] / samples[-1])
    watts = float(joules[-1] / (times[-1] - times[0]))
    estimate = Estimate(value, 0.0, math.inf, len(samples) - 1)
    if estimate.n >= FEWEST_FOR_INTERVAL:
        # Blocks count by their samples, because the value is a ratio of sums.
        weights = np.diff(samples) * estimate.n / samples[-1]
        half = half_width_of_mean((np.diff(joules) / np.diff(samples) - value) * weights)
        unseen = UNSEEN * UNSEEN_MS / 1e3 / seconds
        estimate = replace(estimate, low=max(value - half, 0.0), high=(value + half) * (1 + unseen))
    return Energy(estimate, watts, tuple(names), missing)


def _block_ends(times: NDArray[np.float64]) -> list[int]:
    """Return the first reading, the last one, and those between that end blocks of `BLOCK_S`.

    A shorter block is joined with its neighbour: the counter may not have been updated in it.
    """
    ends, last = [0], len(times) - 1
    for number in range(1, last):
        if min(times[number] - times[ends[-1]], times[last] - times[number]) >= BLOCK_S:
            ends.append(number)
    return [*ends, last]


def meter_facts(meter: EnergyMeter) -> dict[str, Any]:
    """Return the readings of a meter as values for JSON."""
    return {"names": meter.names, "missing": meter.missing, "readings": meter.readings}


def energy_lines(energy: Energy) -> list[str]:
    """Return lines for the terminal: joules per sample, and what could not be read."""
    found = []
    if energy.joules_per_sample is not None:
        value = energy.joules_per_sample
        interval = (
            f" ({value.low:.3g} – {value.high:.3g})"
            if math.isfinite(value.high)
            else f" (no interval: fewer than {FEWEST_FOR_INTERVAL} blocks of {BLOCK_S:g} s; make "
            "more steps)"
        )
        found.append(
            f"energy: {value.value:.3g} J per sample{interval}, {energy.watts:.0f} W of "
            f"{', '.join(energy.sources)}"
        )
    prefix = "energy not measured" if energy.joules_per_sample is None else "not included"
    return [*found, *(f"{prefix}: {reason}" for reason in energy.missing)]
