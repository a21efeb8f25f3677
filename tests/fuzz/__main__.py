"""Try random inputs of a kind.

    python -m tests.fuzz KIND                  10 minutes
    python -m tests.fuzz KIND --minutes 60     another time
    python -m tests.fuzz KIND --trials 20000   another number of trials
    python -m tests.fuzz KIND --seed 123       the trial with this seed, its files are kept
    python -m tests.fuzz                       the kinds

The seeds of a run are consecutive numbers from a random one, which is printed. The files of trials
that fail are kept. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tests.fuzz.kinds import KINDS, find_trial
from tests.fuzz.outcome import Verdict
from tests.fuzz.workers import Finished, run_trial, run_trials

LINE_S = 10.0
"""Time between two lines of progress that do not go to a terminal."""
MOST_FAILURES = 25
"""The run ends after so many failures, which mostly have few causes."""


def main(arguments: list[str] | None = None) -> int:
    """Run the trials; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.kind is None:
        for name, kind in KINDS.items():
            print(f"{name:14} {kind.summary}")
        return 0
    trial = find_trial(options.kind, options.backend, options.precision)
    if options.seed is not None and options.trials is None and options.minutes is None:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{options.kind}-{options.seed}-"))
        outcome = run_trial(trial, options.seed, folder)
        print(f"{outcome.verdict.value}: {outcome.text}\nfiles: {folder}")
        return int(outcome.verdict is Verdict.FAILED)
    first = secrets.randbelow(10**9) * 1000 if options.seed is None else options.seed
    minutes = 10.0 if options.minutes is None and options.trials is None else options.minutes
    print(f"{options.kind}: seeds from {first}", flush=True)
    progress = Progress(options.kind)
    for finished in run_trials(
        trial, _seeds(first, options.trials, minutes), options.workers, options.limit
    ):
        progress.add(finished)
        if progress.counts[Verdict.FAILED] >= options.most_failures:
            break
    return progress.end()


def _seeds(first: int, trials: int | None, minutes: float | None) -> Iterator[int]:
    end = time.monotonic() + 60.0 * (minutes or float("inf"))
    for number in count() if trials is None else range(trials):
        if time.monotonic() > end:
            return
        yield first + number


class Progress:
    """Counts of results: one line that is updated on a terminal, else a line every 10 s."""

    def __init__(self, kind: str) -> None:
        self.kind, self.counts, self.kept = kind, Counter[Verdict](), Path()
        self._start = self._shown = time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def add(self, finished: Finished) -> None:
        """Count a trial; print a failure and keep its files."""
        self.counts[finished.outcome.verdict] += 1
        if finished.outcome.verdict is Verdict.FAILED:
            self._clear()
            text = finished.outcome.text.strip()
            readable = text.encode(errors="backslashreplace").decode()
            print(f"seed {finished.seed}: {readable}", flush=True)
            self._keep(finished)
        now = time.monotonic()
        if now - self._shown > (0.2 if self._is_terminal else LINE_S):
            self._shown = now
            self._clear()
            print(self, end="" if self._is_terminal else "\n", flush=True)

    def end(self) -> int:
        """Print the counts; return the exit code."""
        self._clear()
        failures = self.counts[Verdict.FAILED]
        print(f"{self}; {f'files of failures: {self.kept}' if failures else 'no failure'}")
        return int(failures > 0)

    def _keep(self, finished: Finished) -> None:
        if finished.folder is None or not finished.folder.exists():
            return
        if self.kept == Path():
            self.kept = Path(tempfile.mkdtemp(prefix=f"fuzz-{self.kind}-"))
        shutil.copytree(
            finished.folder, self.kept / str(finished.seed), symlinks=True, dirs_exist_ok=True,
            ignore=_special_files,
        )  # fmt: skip

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="")

    def __str__(self) -> str:
        total, seconds = sum(self.counts.values()), time.monotonic() - self._start
        parts = [f"{self.counts[verdict]:,} {verdict.value}" for verdict in Verdict]
        return (
            f"{self.kind}: {total:,} trials in {seconds:.0f} s, {60 * total / seconds:,.0f} a "
            f"minute: {', '.join(parts)}"
        )


def _special_files(folder: str, names: list[str]) -> set[str]:
    """Return the names that are no files, folders or links; a named pipe cannot be copied."""
    paths = {name: Path(folder, name) for name in names}
    return {
        name
        for name, path in paths.items()
        if not (path.is_symlink() or path.is_dir() or path.is_file())
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=list(KINDS), metavar="KIND")
    parser.add_argument("--minutes", type=float, help="duration  [default: 10]")
    parser.add_argument("--trials", type=int, help="number of trials")
    parser.add_argument("--seed", type=int, help="of the first trial; alone: of the only one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes  [default: one for each core]")  # fmt: skip
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS",
                        help="a longer trial failed  [default: 60]")  # fmt: skip
    parser.add_argument("--most-failures", type=int, default=MOST_FAILURES, metavar="N",
                        help=f"end after N failures  [default: {MOST_FAILURES}]")  # fmt: skip
    parser.add_argument("--backend", default="reference", help="for the kind networks")
    parser.add_argument("--precision", help="for the kind networks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
