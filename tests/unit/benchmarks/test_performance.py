"""The page on performance is the one that the results generate."""

from __future__ import annotations

import pytest

from benchmarks.performance.page import PAGE, page
from benchmarks.performance.tables import gpu_steps, node_steps


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.performance"


def test_later_results_replace_equal_cases_as_a_whole() -> None:
    """The peer of a case belongs to the same run, also if another run had more rounds."""

    def run(ours: float, peer: float, rounds: int) -> dict[str, object]:
        facts = {"network": "a", "batch": 8, "threads": 1, "rounds": rounds}
        times = (("dptrain", ours), ("PyTorch eager", peer))
        return {"rows": {"threads": [
            {**facts, "program": name, "median_ms": ms, "medians_ms": [ms] * rounds}
            for name, ms in times
        ]}}  # fmt: skip

    head, rows = node_steps([run(2.0, 8.0, rounds=9), run(1.0, 3.0, rounds=2)])
    assert head == ["network, batch", "1 thread"]
    assert rows == [["a, 8", "3.00 (3.00–3.00)<br>1 ms"]]


def test_precisions_are_columns_from_the_most_exact_one() -> None:
    case = {"network": "a", "batch_size": 8}
    found = [{**case, "precision": p, "ratio": 2.0, "dptrain_us": 10.0} for p in ("bf16", "fp32")]
    assert gpu_steps([{"training": found}])[0] == ["network, batch", "fp32", "bf16"]


def test_a_marker_names_a_table_and_results() -> None:
    assert page("text {{no marker}}\n") == "text {{no marker}}\n"
    with pytest.raises(KeyError):
        page("{{unknown-table gpu-2026-11-26}}\n")
    with pytest.raises(FileNotFoundError):
        page("{{gpu-steps gpu-1999-01-01}}\n")
