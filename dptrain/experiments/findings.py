"""Conclusions from a benchmark: saturation of the batch size, latency limits, time of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.measuring import Result

SATURATED = 0.9
"""Training is saturated if the throughput is at least this share of the highest one."""


@dataclass(frozen=True)
class Saturation:
    """For which batch sizes the throughput is close to the highest one.

    Attributes:
        batch_size: the smallest of these sizes.
        end: the largest of these sizes.
        smallest, largest: of all sizes that were measured.
    """

    batch_size: int
    end: int
    smallest: int
    largest: int

    def __str__(self) -> str:
        """Return ``128``, ``128; slower beyond 256``, ``8 or less`` or ``above 512``."""
        if self.batch_size == self.largest:
            return f"above {self.largest:,}"
        least = " or less" if self.batch_size == self.smallest else ""
        beyond = f"; slower beyond {self.end:,}" if self.end < self.largest else ""
        return f"{self.batch_size:,}{least}{beyond}"


@dataclass(frozen=True)
class View:
    """Parameters of the evaluation of measured times; they do not affect the measurement.

    Attributes:
        within_s: limit for the median time of inference in seconds.
        epoch_samples: number of samples in an epoch, for the time of training.
        epochs: number of epochs, for the time of training.
    """

    within_s: float = 1.0
    epoch_samples: int = 10_000
    epochs: int = 1

    def training_s(self, result: Result) -> float:
        """Return epochs × steps × time of a step; the last step of an epoch counts as full."""
        return self.epochs * math.ceil(self.epoch_samples / result.samples) * result.median_ms / 1e3

    def in_time(self, result: Result) -> bool:
        """Return True if the median time of inference is within the limit."""
        return result.timing is not None and result.median_ms <= 1e3 * self.within_s


@dataclass(frozen=True)
class Finding:
    """Summary of the results of one network in one configuration.

    Attributes:
        network: name of the network.
        parameters: number of its parameters.
        saturation: batch sizes of training with the highest throughput; None if fewer than two
            were measured.
        samples_per_s: highest throughput of training.
        in_time, too_slow: batch sizes of inference within the time limit, and beyond it.
        largest_training, largest_inference: largest batches that fit; None if not searched.
    """

    network: str
    parameters: int
    saturation: Saturation | None
    samples_per_s: float
    in_time: tuple[int, ...]
    too_slow: tuple[int, ...]
    largest_training: int | None
    largest_inference: int | None


def by_configuration(results: Sequence[Result]) -> dict[tuple[str, str, int], list[Result]]:
    """Return the results by backend, precision and threads."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.configuration, []).append(result)
    return groups


def find(results: Sequence[Result], view: View) -> list[Finding]:
    """Return one summary for each network, the smallest network first.

    Args:
        results: results of one configuration.
        view: parameters of the evaluation.
    """
    networks: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: (r.parameters, r.samples)):
        networks.setdefault(result.network, []).append(result)
    return [_finding(name, own, view) for name, own in networks.items()]


def _finding(network: str, results: Sequence[Result], view: View) -> Finding:
    def of(task: str) -> list[Result]:
        return [result for result in results if result.task == task]

    trained = [result for result in of(TRAINING) if result.timing is not None]
    inference = of(INFERENCE)
    searched = {r.case.trains: r.samples if r.fits else 0 for r in results if r.case.searches}
    return Finding(
        network=network,
        parameters=results[0].parameters,
        saturation=saturation({r.samples: r.median_ms / r.samples for r in trained}),
        samples_per_s=max((r.samples_per_s for r in trained), default=0.0),
        in_time=tuple(r.samples for r in inference if view.in_time(r)),
        too_slow=tuple(r.samples for r in inference if not view.in_time(r)),
        largest_training=searched.get(True),
        largest_inference=searched.get(False),
    )


def saturation(sample_ms: dict[int, float]) -> Saturation | None:
    """Return the batch sizes whose throughput is at least `SATURATED` of the highest one.

    Args:
        sample_ms: milliseconds per sample by batch size.

    Returns:
        None if there are fewer than two batch sizes.

    Example:
        >>> rates = {32: 799, 64: 882, 128: 1086, 256: 979, 512: 383}
        >>> print(saturation({n: 1e3 / rate for n, rate in rates.items()}))
        128; slower beyond 256
    """
    if len(sample_ms) < 2:
        return None
    limit = min(sample_ms.values()) / SATURATED
    found = [size for size, ms in sample_ms.items() if ms <= limit]
    return Saturation(min(found), max(found), min(sample_ms), max(sample_ms))


def rows(results: Sequence[Result], view: View) -> list[dict[str, object]]:
    """Return the results as flat records for CSV, with units in the names."""
    found = []
    for r in results:
        times = None if r.timing is None else r.timing.time_ms
        found.append({
            "network": r.network, "parameters": r.parameters, "task": r.task,
            "samples": r.samples, "backend": r.backend, "precision": r.precision,
            "threads": r.threads, "device": r.device, "fits": r.fits, "note": r.why,
            "batch_size": r.batch_size,
            "median_ms": times and times.median, "q1_ms": times and times.q1,
            "q3_ms": times and times.q3, "mean_ms": times and times.mean, "n": times and times.n,
            "outliers": r.timing and r.timing.outliers, "warm_up": r.timing and r.timing.warm_up,
            "first_ms": r.timing and r.timing.first_ms, "setup_s": r.setup_s,
            "samples_per_s": r.samples_per_s, "gflops": r.gflops,
            "training_s": view.training_s(r) if times and r.task == TRAINING else None,
            "in_time": view.in_time(r) if r.task == INFERENCE else None,
            "needed_bytes": r.needed_bytes, "available_bytes": r.available_bytes,
            "allocated_bytes": r.allocated_bytes,
            "next_bytes": None if r.largest is None else r.largest.next_bytes,
        })  # fmt: skip
    return found
