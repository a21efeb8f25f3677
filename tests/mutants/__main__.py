"""Put every fault of the table into a copy of the code, and run the tests that must notice it.

    python -m tests.mutants                    all mutants, both tiers of tests
    python -m tests.mutants --quick-tier       the tests of the quick tier alone
    python -m tests.mutants ID ID              these mutants
    python -m tests.mutants --own-tests        survivors do not meet the rest of the tests
    python -m tests.mutants --gpu              the faults of code that only a GPU executes

First, the tests of every row must pass without a fault. Then each row's tests run with its fault:
those of the quick tier, then those of the parts. What survives them meets the quick tier as a
whole. The rows are divided among all cores, each of which works in a copy of the repository. The
caches of compiled kernels are those of the normal tests, because their keys contain the sources.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.table import GENERATED, GPU, ROOT, WRITTEN, Mutant, load
from tests.run import MORE, is_in
from tests.run import QUICK as NOT_MORE

PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
WITHOUT_SETTINGS = ("-c", os.devnull, "--rootdir=.", "--import-mode=importlib")
"""On a machine with a GPU, the plugins that the project's settings require may be missing."""

QUICK, PARTS, SURVIVED, UNTESTED = "quick tier", "parts", "survived", "tests fail without it"
NOT_COLLECTED = 5
"""Exit status of pytest if no test was selected."""
LEAST_TIMEOUT_S, MOST_TIMEOUT_S, SLOWER = 60, 900, 5
"""A fault may make its tests this many times slower before they are ended."""
COMPILING_S = 240
"""Time to compile kernels again that have a fault."""
REST_TIMEOUT_S = 1800
MOST_CHARACTERS = 100
"""Of a line of output that does not name a test."""

COMPILED = ("dptrain/backends/numba/", "dptrain/backends/cuda/")
"""Folders of kernels, which are compiled again if they have a fault."""

PACKAGES = tuple(
    str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
)
"""Folders of further packages, which follow the copy."""


@dataclass(frozen=True)
class Run:
    """The result of a run of tests.

    Attributes:
        status: exit status; None if the run was ended after its time limit.
        seconds: its duration.
        output: standard output and error.
    """

    status: int | None
    seconds: float
    output: str

    @property
    def failed(self) -> str:
        """The first test that failed, or the beginning of the last line of the output."""
        pattern = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$|^(\S+::.+) failed on rank"
        found = re.search(pattern, self.output, re.MULTILINE)
        last = self.output.strip().rpartition("\n")[2]
        return (found[1] or found[2]) if found else last[:MOST_CHARACTERS]


@dataclass(frozen=True)
class Selection:
    """The tests of a row in a tier: options that select them, and their time without a fault."""

    tier: str
    options: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        result: the tier that killed it, `SURVIVED` or `UNTESTED`.
        seconds: time of its tests.
        killer: the run that failed.
    """

    mutant: Mutant
    result: str
    seconds: float
    killer: Run | None = None

    @property
    def ended(self) -> bool:
        """Whether the tests were ended after their time limit."""
        return self.killer is not None and self.killer.status is None

    def __str__(self) -> str:
        how = f"killed by {self.result}" if self.killer else self.result
        by = "after its time limit" if self.ended else self.killer.failed if self.killer else ""
        return f"{self.mutant.id}: {how} in {self.seconds:.0f} s  {by}"


class Copy:
    """A copy of the repository in which tests run.

    Args:
        folder: receives the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None
        shutil.copytree(ROOT, folder, ignore=_ignored, symlinks=True)

    def run(self, command: Sequence[str], timeout_s: float) -> Run:
        """Run a command in the copy, and end all its processes after a time limit."""
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
            "PYTHONPATH": os.pathsep.join((str(self.folder), *PACKAGES)),
            "OMP_NUM_THREADS": "1",
            "DPTRAIN_ALLOW_SINGLE": "1",
        }
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        status: int | None = None
        self._process = process
        try:
            output, _ = process.communicate(timeout=timeout_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            self.end()
            output, _ = process.communicate()
        return Run(status, time.perf_counter() - begin, output)

    def end(self) -> None:
        """End the present command with all its processes."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def test(self, mutant: Mutant, options: Sequence[str], timeout_s: float) -> Run:
        """Run the tests of a row."""
        test = (sys.executable, *PYTEST, *options, *_arguments(mutant))
        if mutant.ranks > 1:
            test = ("mpirun", "-n", str(mutant.ranks), *test, "--with-mpi")
        return self.run(test, timeout_s)

    def change(self, mutant: Mutant, number: int) -> None:
        """Put a fault into the copy; `number` is another one for every fault."""
        path = self.folder / mutant.file
        changed = path.stat().st_mtime + number
        path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
        # Python compares the time in whole seconds, and the size, with those of its bytecode.
        os.utime(path, (changed, changed))

    def restore(self, mutant: Mutant) -> None:
        """Remove the fault."""
        shutil.copy2(ROOT / mutant.file, self.folder / mutant.file)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Return the files of a folder that git ignores; `.gitignore` has simple patterns only."""
    patterns = [".git", *(ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    is_root = Path(folder) == ROOT
    here = [each.strip("/") for each in patterns if is_root or not each.startswith("/")]
    return {name for pattern in here for name in fnmatch.filter(names, pattern)}


class Runner:
    """Runs rows of the table in copies of the repository.

    Args:
        folder: of the copies.
        workers: number of rows that run at the same time.
        on_gpu: the tests need a GPU and have no tiers.
        quick_only: leave the parts out.
        meets_rest: what survives its tests meets the whole quick tier.
    """

    def __init__(
        self, folder: Path, workers: int, *, on_gpu: bool, quick_only: bool, meets_rest: bool
    ) -> None:
        tiers = ((QUICK, ("-m", NOT_MORE)), (PARTS, ("-m", MORE)))
        self._tiers = ((GPU, WITHOUT_SETTINGS),) if on_gpu else tiers[: 1 if quick_only else 2]
        self._meets_rest = meets_rest and not on_gpu
        self._all = [Copy(folder / f"copy-{number}") for number in range(workers)]
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        for copy in self._all:
            self._copies.put(copy)
        self._selections: dict[tuple[str, int], list[Selection]] = {}
        self._count = 0

    def run(self, mutants: Sequence[Mutant]) -> list[Verdict]:
        """Run rows, and print a line for each."""
        self._count = len(mutants)
        distinct = {(mutant.tests, mutant.ranks): mutant for mutant in mutants}
        with ThreadPoolExecutor(len(self._all)) as pool:
            try:
                found = pool.map(self._select, distinct.values())
                self._selections = dict(zip(distinct, found, strict=True))
                longest_first = sorted(mutants, key=lambda mutant: -self._seconds(mutant))
                tried = pool.map(self._try, longest_first, range(1, self._count + 1))
                return list(tried)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in self._all:
                    copy.end()
                raise

    def _seconds(self, mutant: Mutant) -> float:
        return sum(each.seconds for each in self._selections[mutant.tests, mutant.ranks])

    def _select(self, mutant: Mutant) -> list[Selection]:
        """Return the tests of a row by tier; none if a test fails without the fault."""
        copy, selections = self._copies.get(), []
        try:
            for tier, options in self._tiers:
                if tier != GPU and not any(is_in(options[-1], file) for file in mutant.test_files):
                    continue
                run = copy.test(mutant, options, MOST_TIMEOUT_S)
                if run.status == NOT_COLLECTED:
                    continue
                if run.status != 0 or " passed" not in run.output:
                    print(f"{run.output[-2000:]}\nwithout a fault, this fails: {mutant.tests}")
                    return []
                selections.append(Selection(tier, options, run.seconds))
                print(f"without a fault in {run.seconds:.0f} s: {mutant.tests}", flush=True)
        finally:
            self._copies.put(copy)
        return selections

    def _try(self, mutant: Mutant, number: int) -> Verdict:
        copy = self._copies.get()
        try:
            copy.change(mutant, number)
            verdict = self._verdict(copy, mutant)
        finally:
            copy.restore(mutant)
            self._copies.put(copy)
        print(f"[{number}/{self._count}] {verdict}", flush=True)
        return verdict

    def _verdict(self, copy: Copy, mutant: Mutant) -> Verdict:
        selections, seconds = self._selections[mutant.tests, mutant.ranks], 0.0
        if not selections:
            return Verdict(mutant, UNTESTED, 0.0)
        for selection in selections:
            limit_s = max(LEAST_TIMEOUT_S, SLOWER * selection.seconds)
            if mutant.file.startswith(COMPILED):
                limit_s += COMPILING_S
            run = copy.test(mutant, selection.options, min(limit_s, MOST_TIMEOUT_S))
            seconds += run.seconds
            if run.status != 0:
                return Verdict(mutant, selection.tier, seconds, run)
        if self._meets_rest:
            run = copy.run((sys.executable, "tests/run.py"), REST_TIMEOUT_S)
            seconds += run.seconds
            if run.status != 0:
                return Verdict(mutant, QUICK, seconds, run)
        return Verdict(mutant, SURVIVED, seconds)


def _arguments(mutant: Mutant) -> list[str]:
    """Return the arguments of pytest; an expression after `-k` extends to the end."""
    files, separator, expression = mutant.tests.partition(" -k ")
    return [*files.split(), *(("-k", expression) if separator else ())]


def summarize(verdicts: Sequence[Verdict]) -> str:
    """Return how many mutants were killed by which tier, and the survivors by name."""
    tiers = Counter(verdict.result for verdict in verdicts if verdict.killer)
    lines = [
        f"killed by {name}: {count} of {len(verdicts)}, {count / len(verdicts):.1%}"
        for name, count in [*tiers.items(), ("any", tiers.total())]
    ]
    lines.append(f"{sum(v.ended for v in verdicts)} of them were ended after their time limit")
    for v in verdicts:
        if not v.killer:
            lines.append(f"{v.result}: {v.mutant.id} ({v.mutant.file}: {v.mutant.breaks})")
    return "\n".join(lines)


def main() -> int:
    """Run the mutants that the command line selects; 0 if all were killed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.split("\n")[0]
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="only these mutants")
    parser.add_argument("--quick-tier", action="store_true", help="leave the parts out")
    parser.add_argument("--own-tests", action="store_true", help="run the tests of each row only")
    parser.add_argument(
        "--gpu", action="store_true", help="faults of code that only a GPU executes"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="rows at the same time")
    chosen = parser.parse_args()
    rows = load(GPU) if chosen.gpu else (*load(WRITTEN), *load(GENERATED))
    unknown = sorted(set(chosen.ids) - {row.id for row in rows})
    if unknown:
        parser.error(f"no mutant '{unknown[0]}'")
    mutants = [
        row for row in rows if not row.equivalent and (row.id in chosen.ids or not chosen.ids)
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{len(mutants)} mutants, {chosen.workers} at a time", flush=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dptrain-mutants-") as folder:
        runner = Runner(
            Path(folder), min(chosen.workers, len(mutants)), on_gpu=chosen.gpu,
            quick_only=chosen.quick_tier, meets_rest=not chosen.own_tests,
        )  # fmt: skip
        verdicts = runner.run(mutants)
    print(f"\n{summarize(verdicts)}\nin {time.perf_counter() - begin:.0f} s")
    return 0 if all(verdict.killer for verdict in verdicts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
