"""Forecasts contain the efficiencies that SimGrid has simulated."""

from __future__ import annotations

import json

import pytest

from benchmarks.forecast.coverage import CAUSES, Checked, check, count_given
from benchmarks.forecast.simulate import TRUTHS, draw
from dptrain.scaling.ensemble import WIDEST

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def checked() -> list[Checked]:
    # Every fourth case, because a forecast takes about half a second.
    return [found for case in json.loads(TRUTHS.read_text())[::4] for found in check(case)]


def test_intervals_contain_nine_of_ten_truths(checked: list[Checked]) -> None:
    known = [found for found in checked if found.predicted]
    assert len(known) >= 20
    assert sum(found.holds for found in known) >= 0.9 * len(known)


def test_forecasts_that_are_given_have_close_limits(checked: list[Checked]) -> None:
    given = [found for found in checked if found.is_given]
    assert len(given) >= len(checked) / 4
    for found in given:
        assert found.predicted is not None
        assert found.predicted.high <= WIDEST * found.predicted.low


def test_the_cases_are_those_of_the_seed() -> None:
    for case in json.loads(TRUTHS.read_text()):
        assert draw(case["case"]).bucket_bytes == case["parameters"]["bucket_bytes"]


def test_a_known_network_narrows_forecasts() -> None:
    case = json.loads(TRUTHS.read_text())[2]
    first, *_, last = CAUSES
    assert count_given([case], *first[1:])[64] == 0
    assert count_given([case], *last[1:])[64] == 1
