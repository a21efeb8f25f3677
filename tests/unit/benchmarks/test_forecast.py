"""Forecasts contain the efficiencies that SimGrid has simulated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.forecast import node
from benchmarks.forecast.coverage import (
    CAUSES,
    STUDY_LAUNCHES,
    Checked,
    check,
    check_node,
    count_given,
    observed,
)
from benchmarks.forecast.simulate import CASES, FIRST, TUNED, append, draw, read_truths
from dptrain.scaling.forecasts import ensemble
from dptrain.scaling.forecasts.ensemble import WIDEST


def checked() -> list[Checked]:
    """Return the forecasts of held-back cases that do not saturate."""
    cases = [case for number, case in read_truths().items() if number >= TUNED]
    within = [case for case in cases if not case["parameters"].get("backbone")]
    return [found for case in within for found in check(case, 2)]


@pytest.mark.more
def test_intervals_contain_nine_of_ten_truths() -> None:
    given = [found for found in checked() if found.is_given]
    assert len(given) >= 30
    assert sum(found.holds for found in given) >= 0.9 * len(given)
    for found in given:
        assert found.predicted is not None
        assert found.predicted.high <= WIDEST * found.predicted.low


@pytest.mark.more
def test_weights_from_hindcasts_make_intervals_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    def median_width() -> float:
        known = [found.predicted for found in checked() if found.predicted]
        return float(np.median([np.log(at.high / at.low) for at in known]))

    scored = median_width()
    monkeypatch.setattr(
        ensemble, "score_weights", lambda errors, deviations: np.ones(errors.shape[1])
    )
    assert scored < median_width()


@pytest.mark.more
def test_nine_of_ten_truths_within_a_node_are_in_the_interval() -> None:
    found = check_node(node.TUNED, node.TUNED + 25)
    given = [one for one in found["all"] if one.is_given]
    assert len(given) >= 0.5 * len(found["all"])
    assert sum(one.holds for one in given) >= 0.9 * len(given)
    for one in given:
        assert one.predicted is not None
        assert one.predicted.high <= WIDEST * one.predicted.low


def test_every_case_is_stored_and_that_of_the_seed() -> None:
    truths = read_truths()
    assert list(truths) == list(range(FIRST, CASES))
    for number, case in truths.items():
        assert draw(number).bucket_bytes == case["parameters"]["bucket_bytes"]


def test_commands_that_run_at_the_same_time_lose_no_case(tmp_path: Path) -> None:
    path = tmp_path / "truths.jsonl"
    append({"case": 52}, path)
    # Each of two commands has read the file before the other one stores its case.
    first, second = read_truths(path), read_truths(path)
    append({"case": 53}, path)
    append({"case": 54}, path)
    assert (list(first), list(second), list(read_truths(path))) == ([52], [52], [52, 53, 54])


def test_the_simulated_step_is_the_sum_of_its_parts() -> None:
    """Step and parts are means over all ranks and steps, so they add up even with rare delays."""
    for case in read_truths().values():
        for point in case["points"][:4]:
            parts = sum(np.array(point[name]) for name in ("compute", "transfer", "imbalance"))
            assert np.array(point["step_ms"]) == pytest.approx(parts, rel=2e-3)


def test_replications_draw_different_launches() -> None:
    case = read_truths()[TUNED]
    steps = [observed(case, replication)[0].launches for replication in range(2)]
    assert all(len(set(launches)) == STUDY_LAUNCHES for launches in steps)
    assert steps[0] != steps[1]


@pytest.mark.more
def test_a_known_network_narrows_forecasts() -> None:
    case = read_truths()[53]
    first, *_, last = CAUSES
    assert count_given([case], *first[1:])[64] == 0
    assert count_given([case], *last[1:])[64] == 1
