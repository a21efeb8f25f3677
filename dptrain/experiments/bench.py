"""`dptrain bench`: measures every case, stores each result at once, writes tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from dptrain.backends import load_backend
from dptrain.backends.base import Backend
from dptrain.comm.signals import StopRequest
from dptrain.experiments.cases import BenchSettings, Case, list_cases
from dptrain.experiments.display import CaseDisplay
from dptrain.experiments.findings import View, by_configuration, find, rows
from dptrain.experiments.ledger import (
    Ledger,
    machine,
    read_ledger,
    write_csv,
)
from dptrain.experiments.measuring import Result, TimeEstimator, measure
from dptrain.experiments.tables import bench_tables, digits, duration, energy_reasons
from dptrain.measure.machine.environment import environment
from dptrain.measure.machine.load import Clock, cores_of_others, is_busy
from dptrain.network.adaptation import adaptation_lines
from dptrain.network.network import Network

NAME = "bench"
"""Name of the files."""


def bench(
    settings: BenchSettings, view: View, folder: Path, *, verbose: bool = True
) -> dict[str, Any]:
    """Measure the cases that `folder` does not contain, print all results, write CSV and plots.

    Args:
        settings: what is measured; it must equal that of the results in `folder`.
        view: parameters of the evaluation; they may differ between calls.
        folder: directory of the results.
        verbose: True to print tables and progress.

    Returns:
        The values that ``--json`` prints: settings, view, environment, results and findings; and
        ``stopped``, True if a signal ended the measurement early.

    Raises:
        UserError: a name does not exist, a backend cannot run here, or `folder` contains results of
            other settings.
    """
    cases, networks = list_cases(settings)
    backends = {name: load_backend(name) for name in settings.backends}
    for backend in backends.values():
        backend.choose_device(0)
    machine_facts = environment()
    ledger = Ledger.open(
        folder,
        NAME,
        {
            **settings.values(),
            "layers": _layers(networks),
            **machine(machine_facts),
        },
    )
    left = [case for case in cases if case.key not in ledger.records]
    stopped = _measure_all(left, len(cases), settings, networks, backends, ledger, verbose=verbose)
    measured = ledger.results(Result)
    results = [measured[case.key] for case in cases if case.key in measured]
    found = _conclude(settings, view, machine_facts, results, folder, verbose=verbose)
    return {**found, "stopped": stopped}


def about_load(results: Sequence[Result]) -> list[str]:
    """Return a warning if other programs used the cores while cases were measured."""
    busy = [r.other_cores for r in results if r.other_cores and is_busy(r.other_cores)]
    if not busy:
        return []
    return [
        f"other programs used up to {max(busy):.1f} cores during {len(busy)} of "
        f"{len(results)} cases: an idle machine would be faster, and these times scatter"
    ]


def read_results(folder: Path) -> tuple[dict[str, Any], list[Result]]:
    """Return the settings and the results of a benchmark in the order of measurement.

    Raises:
        UserError: nothing was measured, or a file cannot be read.
    """
    return read_ledger(folder, NAME, Result, "benchmark", "dptrain bench")


def _layers(networks: Mapping[str, Network]) -> list[str]:
    """Return the layers of networks from files, whose content may change between calls."""
    files = (network for name, network in networks.items() if name.endswith((".toml", ".onnx")))
    return [repr(layer) for network in files for layer in network.layers]


def _measure_all(
    cases: Sequence[Case],
    total: int,
    settings: BenchSettings,
    networks: Mapping[str, Network],
    backends: Mapping[str, Backend],
    ledger: Ledger,
    *,
    verbose: bool,
) -> bool:
    """Measure the cases; return True if a signal ended the measurement early."""
    estimator = TimeEstimator(networks, settings.seconds_per_case)
    for result in ledger.results(Result).values():
        estimator.learn(result)

    def left_s(number: int) -> float:
        # Estimates have a systematic error, which is corrected by the error so far.
        expected, spent = sum(first_s[:number]), monotonic() - start
        factor = spent / expected if number else 1.0
        return factor * sum(estimator.case_s(case) for case in cases[number:])

    first_s = [estimator.case_s(case) for case in cases]
    with StopRequest() as stop, CaseDisplay(verbose, first_s) as display:
        start = monotonic()
        display.print(_opening(len(cases), total, sum(first_s), ledger.folder))
        for line in (line for network in networks.values() for line in adaptation_lines(network)):
            display.print(line)
        for number, case in enumerate(cases):
            display.begin(_case_text(case), left_s(number))
            load = Clock.now()
            result = measure(
                case,
                networks[case.network],
                backends[case.backend],
                budget_s=settings.seconds_per_case,
                memory=settings.memory,
            )
            result = replace(result, other_cores=cores_of_others(load))
            estimator.learn(result)
            ledger.append(case.key, asdict(result))
            display.end(_outcome(case, result), left_s(number + 1))
            if stop.requested and case is not cases[-1]:
                display.print("stopped on request; repeat the command to continue")
                return True
    return False


def _opening(left: int, total: int, seconds: float, folder: Path) -> str:
    if not left:
        return f"{folder} contains all {total} cases; pass another --output to measure again"
    kept = f" ({total - left} of {total} are measured already)" if left < total else ""
    cases = "1 case" if left == 1 else f"{left} cases"
    return f"{cases} to measure{kept}, estimated {duration(seconds)} or less; results: {folder}"


def _case_text(case: Case) -> str:
    count = "" if case.searches else f" {case.samples:,}"
    configuration = f"{case.backend} {case.precision}"
    threads = f" x{case.threads}" if case.threads > 1 else ""
    return f"{case.network} {case.task}{count}, {configuration}{threads}"


def _outcome(case: Case, result: Result) -> str:
    if case.searches:
        return f"{_case_text(case)}: {result.samples:,}" + (f", {result.why}" if result.why else "")
    if result.timing is None:
        return f"{_case_text(case)}: {result.why}"
    return (
        f"{_case_text(case)}: {digits(result.median_ms)} ms, {result.samples_per_s:,.0f} samples/s"
    )


def _conclude(
    settings: BenchSettings,
    view: View,
    machine_facts: Mapping[str, Any],
    results: Sequence[Result],
    folder: Path,
    *,
    verbose: bool,
) -> dict[str, Any]:
    from dptrain.experiments.plots import plot_bench

    written = [write_csv(folder / f"{NAME}.csv", rows(results, view))]
    written += plot_bench(results, folder)
    display = CaseDisplay(verbose, ())
    display.print(f"\n{machine_facts['cpu']}, {machine_facts['cores']} cores")
    for table in bench_tables(results, view):
        display.print(table)
    for line in (*energy_reasons(results), *about_load(results)):
        display.print(line)
    for path in written:
        display.print(f"written: {path}")
    findings = [
        {
            "backend": configuration[0],
            "precision": configuration[1],
            "threads": configuration[2],
            **asdict(finding),
        }
        for configuration, own in by_configuration(results).items()
        for finding in find(own, view)
    ]
    return {
        "settings": settings.values(),
        "view": asdict(view),
        "environment": dict(machine_facts),
        "results": [asdict(result) for result in results],
        "findings": findings,
    }
