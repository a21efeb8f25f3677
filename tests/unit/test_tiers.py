"""Every test runs in the quick tier or in one of the parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import run
from tests.run import FAILURES, MORE, NUM_PARTS, QUICK, ROOT, WAITING

OTHERS = ("tests/gpu", "tests/ranks", "tests/slurm", "tests/nodes")
"""Folders of suites that are chosen as a whole, and of tests on a machine with a GPU."""


def modules(suite: run.Suite) -> set[str]:
    return {word for word in suite.command if word.endswith(".py") and word.startswith("tests/")}


def test_every_module_is_in_a_tier() -> None:
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    written = {name for name in written if not name.startswith(OTHERS)}
    quick = modules(run.quick_suites()["single"])
    parts = [modules(run.part_suites(part)["single"]) for part in range(1, NUM_PARTS + 1)]
    assert quick | set().union(*parts) | set(FAILURES) == written
    assert sum(map(len, parts)) == len(set().union(*parts))
    for name in written:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert (name in quick) == (not re.search(r"^pytestmark = .*more", text, re.MULTILINE))
        if re.search("mark.more|hypothesis", text) and name not in FAILURES:
            assert name in set().union(*parts)


def test_every_other_suite_is_in_a_part() -> None:
    parts = [run.part_suites(part) for part in range(1, NUM_PARTS + 1)]
    names = [name for part in parts for name in part if name != "single"]
    assert sorted(names) == sorted([*run.rank_suites(), *WAITING])
    for part in parts:
        for name in {*run.QUICK_RANKS, "single", "failures"} & part.keys():
            assert part[name].selecting(QUICK).command[-4:-2] == ("-m", MORE)


def test_the_ranks_of_a_suite_select_the_same_tests() -> None:
    suite = run.rank_suites()["ranks-3"].selecting(QUICK)
    assert suite.command[-2:] == suite.others[-2:] == ("-m", QUICK)
    assert run.rank_suites()["ranks-1"].selecting(QUICK).others == ()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_take_equal_time(count: int) -> None:
    times = {f"m{i}": float(1 + i * i % 17) for i in range(count)}
    parts = run.divide(times)
    assert sorted(name for part in parts for name in part) == sorted(times)
    sums = [sum(times[name] for name in part) for part in parts]
    assert max(sums) - min(sums) <= max(times.values())


def test_no_time_is_of_a_test_that_is_in_no_part() -> None:
    recorded = run.tomllib.loads(run.TIMES.read_text(encoding="utf-8"))
    assert recorded.keys() <= run.read_times().keys()


def test_recorded_times_are_those_of_tests_in_the_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = tmp_path / "times.toml"
    monkeypatch.setattr(run, "TIMES", times)
    before = run.read_times()
    name = next(name for name in before if name.endswith(".py"))
    single, ranks = run.Result("single"), run.Result("ranks-4", processor_s=7.0)
    single.module_times_s[name] = 12.25
    run.record([single, ranks])
    after = run.read_times()
    assert after.keys() == before.keys()
    assert (after[name], after["ranks-4"]) == (12.2, 7.0)
