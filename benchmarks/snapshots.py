"""Time steps with and without snapshots, in turn.

    python -m benchmarks.snapshots model0@256 resnet20@128 resnet50@64 --threads 1 --minutes 2

A round is a snapshot with as many steps after it as one interval has, and the same number of steps
without a snapshot. The interval is the default one, which follows from the time of snapshots, or
that of ``--every``: with short intervals the cost of a snapshot is larger than the noise of the
steps. A line has medians over the rounds: how much longer the steps with a snapshot take, which
includes its effect on the steps around it; how long training waits for it; and the time of its
write, which on a device is next to training. The first figure at the default interval is about 0.5%
x cost / wait.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dptrain import Callback, Trainer

WARM = 3
"""Snapshots before the first round, after which the interval is known."""

SIDES = {"model0": 28, "resnet20": 32}
"""Sides of the images of networks whose images do not have 224 rows and columns."""


class Rounds(Callback):
    """Measures rounds until the time is over.

    Args:
        seconds: time of all rounds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._num_saved, self._end_at = seconds, 0, math.inf
        self._began, self._ends = 0.0, [-1, -1]
        self.without, self.with_one, self.waits = list[float](), list[float](), list[float]()
        self.intervals, self.writes = list[int](), list[float]()

    def on_fit_begin(self, trainer: Trainer) -> None:
        snapshots = trainer._snapshots
        save = snapshots._save

        def timed(trainer: Trainer) -> None:
            begin = time.perf_counter()
            save(trainer)
            self._num_saved += 1
            if self._num_saved < WARM:
                return
            interval, self._began = snapshots._every, begin
            self._end_at = min(self._end_at, begin + self._seconds)
            self._ends = [trainer.step + interval, trainer.step + 2 * interval]
            self.waits.append(time.perf_counter() - begin)
            self.intervals.append(interval)
            snapshots._due = 0

        vars(snapshots)["_save"] = timed

    def on_step(self, trainer: Trainer, result: Any) -> None:
        if trainer.step not in self._ends:
            return
        now, snapshots = time.perf_counter(), trainer._snapshots
        is_without, passed_s = trainer.step == self._ends[1], now - self._began
        (self.without if is_without else self.with_one).append(passed_s)
        self._began = now
        if not is_without:
            self.writes.append(snapshots._writer.seconds)
        elif now > self._end_at and len(self.without) > 3:
            trainer.stop()
        else:
            # The next round begins with the snapshot of this step.
            snapshots._due, snapshots._saved_at = trainer.step, time.monotonic() - passed_s

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return step in self._ends


def measure(name: str, batch_size: int, seconds: float, **settings: Any) -> str:
    """Return one line about a network.

    Args:
        name: of the network.
        batch_size: number of samples.
        seconds: time of the rounds.
        **settings: of the trainer.
    """
    side, generator = SIDES.get(name, 224), np.random.default_rng(0)
    shape = (2 * batch_size, side, side) + ((3,) if name != "model0" else ())
    x, y = generator.integers(0, 256, shape, np.uint8), np.arange(2 * batch_size) % 10
    rounds = Rounds(seconds)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            name, (x, y, x[:16], y[:16]), batch_size=batch_size, run_dir=Path(folder) / "run",
            snapshots=True, steps=10**7, checkpoint_seconds=1e6, baseline_steps=0, validation=0.0,
            evaluate_every=0, log_every=10**6, progress=False, callbacks=[rounds], **settings,
        )  # fmt: skip
        with trainer:
            trainer.fit()
    pairs = [*zip(rounds.without, rounds.with_one, rounds.intervals, strict=False)]
    differences = sorted(100 * (b / a - 1) for a, b, _ in pairs)
    cost_ms = 1e3 * statistics.median(b - a for a, b, _ in pairs)
    step_ms = 1e3 * statistics.median(a / n for a, _, n in pairs)
    waits = 100 * sum(rounds.waits) / sum(rounds.with_one)
    quarter = len(differences) // 4
    return (
        f"{name}@{batch_size}: {len(pairs)} rounds, a snapshot every "
        f"{statistics.median(rounds.intervals):.0f} steps of {step_ms:.2f} ms; with snapshots "
        f"{statistics.median(differences):+.2f}% (quartiles {differences[quarter]:+.2f} to "
        f"{differences[-1 - quarter]:+.2f}%), {cost_ms:.2f} ms each; training waits for "
        f"{waits:.2f}% of the time, {1e3 * statistics.median(rounds.waits):.2f} ms each; a write "
        f"takes {1e3 * statistics.median(rounds.writes):.1f} ms"
    )


def main() -> None:
    """Print a line about each network."""
    parser = argparse.ArgumentParser("python -m benchmarks.snapshots", description=__doc__)
    parser.add_argument("networks", nargs="+", metavar="NETWORK@SAMPLES")
    parser.add_argument("--backend", default="numba")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="steps  [default: as in training]")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each network")
    options = parser.parse_args()
    chosen: dict[str, Any] = {"backend": options.backend}
    chosen |= {"precision": options.precision} if options.precision else {}
    chosen |= {"threads": options.threads} if options.backend == "numba" else {}
    chosen |= {"snapshot_every": options.every} if options.every else {}
    for text in options.networks:
        name, _, batch_size = text.partition("@")
        print(measure(name, int(batch_size), 60 * options.minutes, **chosen), flush=True)


if __name__ == "__main__":
    main()
