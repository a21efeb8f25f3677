"""`dptrain bench`: every case once, kept as soon as it is known, then tables, files and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from dptrain.backends import load_backend
from dptrain.backends.base import Backend
from dptrain.comm.signals import StopRequest
from dptrain.experiments.cases import Case, Question, list_cases
from dptrain.experiments.display import CaseDisplay
from dptrain.experiments.findings import View, by_means, find, rows
from dptrain.experiments.ledger import Ledger, machine, write_csv
from dptrain.experiments.measuring import Pace, Result, measure
from dptrain.experiments.tables import bench_tables, digits, duration
from dptrain.measure.environment import environment
from dptrain.network.network import Network

NAME = "bench"
"""Of the files."""


def bench(question: Question, view: View, folder: Path, *, verbose: bool = True) -> dict[str, Any]:
    """Measure what is not yet in `folder`, show all that is, and write CSV and plots.

    Args:
        question: what is measured; decides whether `folder` can be gone on with.
        view: what is asked of the times; may be another one each time.
        folder: of the results.
        verbose: whether tables and progress are printed.

    Returns:
        What ``--json`` prints: question, view, environment, results and findings; and ``stopped``,
        which says that a signal ended the measuring early.

    Raises:
        UserError: an unknown name, a backend that cannot run here, or a folder of another bench.
    """
    cases, networks = list_cases(question)
    backends = {name: load_backend(name) for name in question.backends}
    for backend in backends.values():
        backend.place(0)
    surroundings = environment()
    ledger = Ledger.open(folder, NAME, {
        **question.values(), "layers": _layers(networks), **machine(surroundings),
    })  # fmt: skip
    left = [case for case in cases if case.key not in ledger.records]
    stopped = _measure_all(left, len(cases), question, networks, backends, ledger, verbose=verbose)
    kept = [ledger.records[case.key] for case in cases if case.key in ledger.records]
    results = [Result.from_record(record) for record in kept]
    found = _conclude(question, view, surroundings, results, folder, verbose=verbose)
    return {**found, "stopped": stopped}


def _layers(networks: Mapping[str, Network]) -> list[str]:
    """Of networks that come from files, which may change under their names."""
    files = (network for name, network in networks.items() if name.endswith(".toml"))
    return [repr(layer) for network in files for layer in network.layers]


def _measure_all(
    cases: Sequence[Case],
    total: int,
    question: Question,
    networks: Mapping[str, Network],
    backends: Mapping[str, Backend],
    ledger: Ledger,
    *,
    verbose: bool,
) -> bool:
    """Measure all that are left; whether a signal ended that early."""
    pace = Pace(networks, question.seconds_per_case)
    for record in ledger.records.values():
        pace.learn(Result.from_record(record))

    def left_s(number: int) -> float:
        # Estimates err on one side: what they were off by so far, they will be.
        expected, spent = sum(first_s[:number]), monotonic() - start
        factor = spent / expected if number else 1.0
        return factor * sum(pace.case_s(case) for case in cases[number:])

    first_s = [pace.case_s(case) for case in cases]
    with StopRequest() as stop, CaseDisplay(verbose, first_s) as display:
        start = monotonic()
        display.say(_opening(len(cases), total, sum(first_s), ledger.folder))
        for number, case in enumerate(cases):
            display.begin(_words(case), left_s(number))
            result = measure(
                case, networks[case.network], backends[case.backend], pace,
                budget_s=question.seconds_per_case, memory=question.memory,
            )  # fmt: skip
            pace.learn(result)
            ledger.append(case.key, asdict(result))
            display.end(_outcome(case, result), left_s(number + 1))
            if stop.requested and case is not cases[-1]:
                display.say("stopped on request; the same command goes on")
                return True
    return False


def _opening(left: int, total: int, seconds: float, folder: Path) -> str:
    if not left:
        return f"all {total} cases are in {folder} already; measure anew with another --output"
    kept = f" ({total - left} of {total} are kept)" if left < total else ""
    cases = "1 case" if left == 1 else f"{left} cases"
    return f"{cases} to measure{kept}, at most about {duration(seconds)}; results: {folder}"


def _words(case: Case) -> str:
    count = "" if case.searches else f" {case.samples:,}"
    means = f"{case.backend} {case.precision}"
    threads = f" x{case.threads}" if case.threads > 1 else ""
    return f"{case.network} {case.task}{count}, {means}{threads}"


def _outcome(case: Case, result: Result) -> str:
    if case.searches:
        return f"{_words(case)}: {result.samples:,}" + (f", {result.why}" if result.why else "")
    if result.timing is None:
        return f"{_words(case)}: {result.why}"
    return f"{_words(case)}: {digits(result.median_ms)} ms, {result.samples_per_s:,.0f} samples/s"


def _conclude(
    question: Question,
    view: View,
    surroundings: Mapping[str, Any],
    results: Sequence[Result],
    folder: Path,
    *,
    verbose: bool,
) -> dict[str, Any]:
    from dptrain.experiments.plots import plot_bench

    written = [write_csv(folder / f"{NAME}.csv", rows(results, view))]
    written += plot_bench(results, folder)
    display = CaseDisplay(verbose, ())
    display.say(f"\n{surroundings['cpu']}, {surroundings['cores']} cores")
    for table in bench_tables(results, view):
        display.say(table)
    for path in written:
        display.say(f"written: {path}")
    findings = [
        {"backend": means[0], "precision": means[1], "threads": means[2], **asdict(finding)}
        for means, own in by_means(results).items()
        for finding in find(own, view)
    ]
    return {
        "question": question.values(),
        "view": asdict(view),
        "environment": dict(surroundings),
        "results": [asdict(result) for result in results],
        "findings": findings,
    }
