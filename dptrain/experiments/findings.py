"""What the times of a bench say: where they are flat, what answers in time, how long it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.measuring import Result

FLAT = 0.1
"""The time a sample counts as flat where it is less than this part above the least."""


@dataclass(frozen=True)
class View:
    """What is asked of the times; it decides nothing about how they are measured.

    Attributes:
        within_s: an answer is in time if its median is at most this.
        epoch_samples, epochs: training whose time is computed from the time of a step.
    """

    within_s: float = 1.0
    epoch_samples: int = 10_000
    epochs: int = 1

    def training_s(self, result: Result) -> float:
        """Epochs × steps × step time, as if the last step of an epoch were full."""
        return self.epochs * math.ceil(self.epoch_samples / result.samples) * result.median_ms / 1e3

    def in_time(self, result: Result) -> bool:
        """Whether the answer is there in time."""
        return result.timing is not None and result.median_ms <= 1e3 * self.within_s


@dataclass(frozen=True)
class Finding:
    """What the results of one network, by the same means, say together.

    Attributes:
        network, parameters: which.
        batches: how many batch sizes of training were measured.
        flat_from: smallest batch size from which on the time a sample of training is flat; None
            where it still falls at the largest one, or where fewer than two were measured.
        samples_per_s: most of training.
        in_time, late: numbers of samples whose answer is there in time, and those that are not.
        largest_training, largest_inference: batches that fit; None where they were not looked for.
    """

    network: str
    parameters: int
    batches: int
    flat_from: int | None
    samples_per_s: float
    in_time: tuple[int, ...]
    late: tuple[int, ...]
    largest_training: int | None
    largest_inference: int | None


def by_means(results: Sequence[Result]) -> dict[tuple[str, str, int], list[Result]]:
    """Results by backend, precision and threads."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.means, []).append(result)
    return groups


def find(results: Sequence[Result], view: View) -> list[Finding]:
    """One finding a network, smallest network first.

    Args:
        results: by the same means.
        view: what is asked of them.
    """
    networks: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: (r.parameters, r.samples)):
        networks.setdefault(result.network, []).append(result)
    return [_finding(name, own, view) for name, own in networks.items()]


def _finding(network: str, results: Sequence[Result], view: View) -> Finding:
    def of(task: str) -> list[Result]:
        return [result for result in results if result.task == task]

    trained = [result for result in of(TRAINING) if result.timing is not None]
    answers = of(INFERENCE)
    searched = {r.case.trains: r.samples if r.fits else 0 for r in results if r.case.searches}
    return Finding(
        network=network,
        parameters=results[0].parameters,
        batches=len(trained),
        flat_from=flat_from({r.samples: r.median_ms / r.samples for r in trained}),
        samples_per_s=max((r.samples_per_s for r in trained), default=0.0),
        in_time=tuple(r.samples for r in answers if view.in_time(r)),
        late=tuple(r.samples for r in answers if not view.in_time(r)),
        largest_training=searched.get(True),
        largest_inference=searched.get(False),
    )


def flat_from(sample_ms: dict[int, float]) -> int | None:
    """Smallest batch size from which on every time a sample is within `FLAT` of the least.

    Args:
        sample_ms: milliseconds a sample by batch size.

    Returns:
        None where only the largest would do, or there are fewer than two.
    """
    sizes = sorted(sample_ms)
    least = min(sample_ms.values(), default=0.0)
    flat = [n for i, n in enumerate(sizes)
            if all(sample_ms[m] <= (1 + FLAT) * least for m in sizes[i:])]  # fmt: skip
    return flat[0] if flat and len(sizes) > 1 and flat[0] != sizes[-1] else None


def rows(results: Sequence[Result], view: View) -> list[dict[str, object]]:
    """Flat records for a table of a spreadsheet, with units in the names."""
    found = []
    for r in results:
        times = None if r.timing is None else r.timing.time_ms
        answers = r.task == INFERENCE
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
            "in_time": view.in_time(r) if answers else None,
            "need_bytes": r.need_bytes, "room_bytes": r.room_bytes, "taken_bytes": r.taken_bytes,
            "next_bytes": None if r.largest is None else r.largest.next_bytes,
        })  # fmt: skip
    return found
