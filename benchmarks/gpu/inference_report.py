"""Tables and JSON of the comparison of inference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu import targets
from benchmarks.gpu.inference import InferenceCase, Passes
from benchmarks.tables import make_table, with_spread
from dptrain.tables import Table

PERCENTILES = "p50, p95, p99"


def inference_tables(cases: Iterable[InferenceCase]) -> list[Table]:
    """Return the tables of throughput and latency, and of all peers."""
    rows, modes = [], []
    for case in cases:
        label = case.network, str(case.batch_size), case.precision
        for backend, mine in case.ours.items():
            rows.append((*label, backend, *_compared(case, backend, mine)))
        modes += [
            (*label, name, f"{passes.laps.median:.4g}", _latency(passes))
            for name, passes in case.theirs.items()
        ]
    columns = (
        "network", "batch", "precision", "backend", "dptrain µs", "samples/s", "best peer µs",
        "best peer", "speedup", "target", "", f"dptrain {PERCENTILES} µs",
        f"quickest peer {PERCENTILES} µs", "quickest peer", "latency ratio",
    )  # fmt: skip
    return [
        make_table(
            "Inference: µs per pass, median (quartiles), and latency of single passes",
            columns,
            rows,
        ),
        make_table(
            "Inference by peers, µs",
            ("network", "batch", "precision", "program", "pass", f"latency {PERCENTILES}"),
            modes,
        ),
    ]


def _compared(case: InferenceCase, backend: str, mine: Passes) -> tuple[str, ...]:
    """Return the cells of a row after the backend."""
    ours = with_spread(mine.laps.median, mine.laps.quartiles)
    rate = f"{1e6 * case.batch_size / mine.laps.median:,.0f}"
    target = targets.INFERENCE.get(case.batch_size)
    aim = "" if target is None else f"≥ {target.value:g}×"
    times, quicker = case.throughput_ratio(backend), case.latency_ratio(backend)
    if case.best is None or case.quickest is None or times is None or quicker is None:
        return ours, rate, "", "", "", aim, "", _latency(mine), "", "", ""
    best, quickest = case.theirs[case.best], case.theirs[case.quickest]
    return (
        ours, rate, with_spread(best.laps.median, best.laps.quartiles), case.best,
        f"{times.value:.2f} ({times.low:.2f}–{times.high:.2f})", aim,
        "" if target is None else target.verdict(times.value), _latency(mine), _latency(quickest),
        case.quickest, f"{quicker:.2f}",
    )  # fmt: skip


def _latency(passes: Passes) -> str:
    return ", ".join(f"{value:.1f}" for value in passes.percentiles_us)


def inference_headline(cases: Iterable[InferenceCase]) -> list[str]:
    """Return a line for each backend with the range of its speedups."""
    cases = list(cases)
    lines = []
    for backend in dict.fromkeys(backend for case in cases for backend in case.ours):
        mine = [case for case in cases if backend in case.ours]
        found = [(case, case.throughput_ratio(backend)) for case in mine]
        ratios = [(case, times.value) for case, times in found if times is not None]
        aimed = [(case, times) for case, times in ratios if case.batch_size in targets.INFERENCE]
        reached = sum(times >= targets.INFERENCE[case.batch_size].value for case, times in aimed)
        if ratios:
            values = [times for _, times in ratios]
            lines.append(
                f"{backend}: {reached} of {len(aimed)} inference targets reached; "
                f"{min(values):.2f} to {max(values):.2f} times the throughput of the best peer"
            )
    return lines


def inference_json(cases: Iterable[InferenceCase]) -> list[dict[str, Any]]:
    """Return all results in plain types for JSON."""
    return [
        {
            "network": case.network, "batch_size": case.batch_size, "precision": case.precision,
            "program": name, "us": passes.laps.median, "quartiles_us": passes.laps.quartiles,
            "latency_percentiles_us": passes.percentiles_us, "passes": len(passes.latencies_us),
        }
        for case in cases
        for name, passes in {**case.ours, **case.theirs}.items()
    ]  # fmt: skip
