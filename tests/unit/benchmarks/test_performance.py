"""The page on performance is the one that the results generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.performance.page import PAGE, page
from benchmarks.performance.tables import TABLES
from benchmarks.report import Report
from benchmarks.tables import new_files, write
from benchmarks.timing import Series

CASE = {"network": "a", "batch": 8}


def row(program: str, *medians: float, **facts: Any) -> dict[str, Any]:
    return {**CASE, **facts, "program": program, **Series(medians, medians, 9).as_dict()}


def read_again(folder: Path, kind: str, **rows: Sequence[dict[str, Any]]) -> Report:
    """Write a result as a run does, and return what the page reads."""
    about = {"kind": kind, "date": "2026-01-02T03:04", "cpu": "a", "cores": 1, "sections": [*rows]}
    paths = new_files(folder, kind, "2026-01-02")
    write(Report(about, {name: list(found) for name, found in rows.items()}), paths)
    return Report.read(paths[0])


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.performance"


def test_later_results_replace_equal_cases_as_a_whole(tmp_path: Path) -> None:
    """The peer of a case belongs to the same run, also if another run had more rounds."""

    def run(ours: float, peer: float, rounds: int) -> Report:
        times = (("dptrain", ours), ("PyTorch eager", peer))
        found = [row(name, *[ms] * rounds, threads=1) for name, ms in times]
        return read_again(tmp_path, "cpu", threads=found)

    head, rows = TABLES["node-steps"]([run(2.0, 8.0, rounds=9), run(1.0, 3.0, rounds=2)])
    assert head == ["network, batch", "1 thread"]
    assert rows == [["a, 8", "3.00<br>1 ms"]]


def test_steps_on_a_gpu_are_compared_with_peers_that_are_at_least_as_precise(
    tmp_path: Path,
) -> None:
    """The columns begin with the most exact precision; other backends are no default."""
    report = read_again(tmp_path, "gpu", training=[
        row("dptrain cuda", 0.01, 0.01, precision="bf16"),
        row("dptrain cuda", 0.02, 0.02, precision="fp32"),
        row("dptrain cudnn", 0.005, 0.005, precision="fp32"),
        row("PyTorch eager", 0.05, 0.07, precision="fp32"),
        row("PyTorch graph", 0.03, 0.03, precision="bf16"),
    ])  # fmt: skip
    assert TABLES["gpu-steps"]([report]) == (
        ["network, batch", "fp32", "bf16"], [["a, 8", "3.00 (20 µs)", "3.00 (10 µs)"]],
    )  # fmt: skip
    assert TABLES["gpu-inference"]([report])[1] == []


def test_images_and_ranks_of_a_gpu_are_read(tmp_path: Path) -> None:
    times = ((2, 0.5), (1, 0.4))
    report = read_again(
        tmp_path, "gpu",
        data=[row("dptrain cuda", 0.1, 0.3, gpus=1, precision="tf32", bare_ms=0.1),
              row("PyTorch graph", 0.8, 0.8, gpus=1, precision="tf32"),
              row("dptrain cuda", 0.4, 0.4, gpus=2, precision="tf32", bare_ms=0.3)],
        ranks=[row("dptrain", ms, gpus=gpus, precision="tf32") for gpus, ms in times],
    )  # fmt: skip
    case = "a, 8 per GPU"
    assert TABLES["gpu-images"]([report])[1] == [
        [f"{case}, tf32", "1", "200 µs", "0.500", "4.00", "40,000"],
        [f"{case}, tf32", "2", "400 µs", "0.750", "", "40,000"],
    ]
    assert TABLES["gpu-ranks"]([report]) == (
        ["case", "1 GPUs", "2 GPUs"], [[f"{case}, dptrain", "400 µs", "500 µs (0.80)"]],
    )  # fmt: skip


def test_a_stored_speedup_counts_if_there_are_no_times_of_rounds() -> None:
    ours, peer = (
        row("dptrain", 2.0, threads=1, speedup=[3.0, 2.5, 3.5]),
        row("peer", 5.0, threads=1),
    )
    report = Report({"kind": "cpu"}, {"threads": [ours, peer]})
    assert TABLES["cpu-steps"]([report])[1] == [["a", "3.00 (2.50–3.50)<br>2 ms"]]


def test_a_marker_names_a_table_and_results() -> None:
    assert page("text {{no marker}}\n") == "text {{no marker}}\n"
    with pytest.raises(KeyError):
        page("{{unknown-table gpu-2026-11-26}}\n")
    with pytest.raises(FileNotFoundError):
        page("{{gpu-steps gpu-1999-01-01}}\n")
