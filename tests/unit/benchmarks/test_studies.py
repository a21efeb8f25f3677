"""The studies: exact counts, verdicts, storage, choice of measurements, the page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.studies import running
from benchmarks.studies.__main__ import main
from benchmarks.studies.claims.claims_d import compared
from benchmarks.studies.claims.judge_b import flat_from
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    NOT_COMPARABLE,
    NOT_MEASURED,
    REFUTED,
    VERDICTS,
    Results,
    exactly,
    times,
)
from benchmarks.studies.compiling import Request, requests
from benchmarks.studies.exact import counts, cross_entropy
from benchmarks.studies.measuring import (
    CPU,
    EXACT,
    GPU,
    PARTIAL,
    Context,
    Measurement,
    gpu_kind,
    load_measurements,
)
from benchmarks.studies.networks import find
from benchmarks.studies.page import page
from benchmarks.studies.page.page_tables import TABLES
from benchmarks.studies.parallel import can_be_divided, divide
from benchmarks.studies.store import Result, Store
from dptrain.errors import UserError
from tests.unit.benchmarks.studies_results import published_results

MEASUREMENTS = load_measurements()
ROWS = (*page.INDEX, *page.CLAIMS)
INDEX_IDS = (
    *(f"A{i}" for i in range(1, 10)), *(f"B{i}" for i in range(1, 14)),
    *(f"D{i}" for i in range(1, 8)),
)  # fmt: skip
CONTEXT = Context((0, 1))


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(published_results())


def verdict_of(name: str, results: Results) -> str:
    return next(row for row in ROWS if row.id == name).verdict(results).verdict


def test_every_row_of_the_index_and_every_claim_is_on_the_page() -> None:
    found = [row.id for row in ROWS]
    assert len(found) == len(set(found))
    assert set(found) == {*INDEX_IDS, "A, 2.2", *(f"Q{i}" for i in range(1, 44))}


def test_every_row_has_a_measurement_of_its_own() -> None:
    served = {name for m in MEASUREMENTS.values() for name in m.serves}
    assert {row.id for row in ROWS} - served == {"A, 2.2"}


def test_with_all_results_each_row_has_a_verdict(results: Results) -> None:
    found = {row.id: row.verdict(results) for row in ROWS}
    assert [name for name, v in found.items() if v.verdict == NOT_MEASURED] == []
    assert all(v.ours and v.verdict in VERDICTS for v in found.values())


def test_results_equal_to_the_published_ones_confirm_them(results: Results) -> None:
    names = ("A1", "A2", "A3", "A4", "A9", "B1", "B3", "B7", "B8", "B9", "B10", "D1", "D2", "D3",
             "D4", "D5", "Q24")  # fmt: skip
    assert {name: verdict_of(name, results) for name in names} == dict.fromkeys(names, CONFIRMED)


@pytest.mark.parametrize(
    ("name", "measurement", "change"),
    [
        ("A1", "speed-up", {"threads 8": 3.0, "ranks 8": 3.0}),
        ("A5", "agreement", None),
        ("B10", "largest-gpu", None),
        ("D5", "variant-steps", None),
        ("Q24", "unlike", None),
    ],
)
def test_a_contradiction_is_refuted(name: str, measurement: str, change: Any) -> None:
    changed = []
    for result in published_results():
        values = json.loads(json.dumps(result.values))
        if result.name == measurement:
            if measurement == "speed-up":
                for program, value in change.items():
                    values["steps"]["model0"][program]["median_ms"] = value
            elif measurement == "agreement":
                values["networks"]["model0, numba"]["first_step_difference"] = 0.1
            elif measurement == "largest-gpu":
                values["largest"]["2 GB, inference"]["batch"] = 5000
            elif measurement == "unlike":
                values["samples_per_s"]["unlike by 1.5, equal shares"]["median"] = 99.0
            else:
                values["variants"]["stride 5"]["step"]["median"] = 200.0
        changed.append(replace(result, values=values))
    assert verdict_of(name, Results(changed)) == REFUTED


def test_a_result_that_is_missing_is_not_guessed() -> None:
    alone = Results(r for r in published_results() if r.kind == "exact")
    verdict = next(row for row in ROWS if row.id == "A4").verdict(alone)
    assert verdict.verdict == NOT_MEASURED
    assert "gpu" in verdict.reason


def test_eight_threads_need_eight_cores() -> None:
    few = []
    for result in published_results():
        values = json.loads(json.dumps(result.values))
        if result.name == "speed-up":
            for steps in values["steps"].values():
                for count in (4, 8, 16):
                    del steps[f"threads {count}"], steps[f"ranks {count}"]
        few.append(replace(result, values=values))
    verdict = next(row for row in ROWS if row.id == "A1").verdict(Results(few))
    assert (verdict.verdict, verdict.reason) == (NOT_MEASURED, "it needs 8 cores")


def test_the_result_of_the_most_cores_is_used() -> None:
    found = [Result(kind, "solar", {}, {"kind": kind}) for kind in ("cpu-2", "cpu-16", "cpu-4")]
    assert Results(found).values("solar")["kind"] == "cpu-16"


@pytest.mark.parametrize("name", ["A6", "A7", "A8", "B11", "D7", "A, 2.2"])
def test_exact_counts_match_to_the_digit(name: str, results: Results) -> None:
    assert verdict_of(name, results) == CONFIRMED


def test_a_count_that_differs_by_one_is_named() -> None:
    verdict, reason = exactly({"right": (7, 7), "wrong": (8, 9)})
    assert verdict == REFUTED
    assert reason == "these counts differ: wrong: 8 instead of 9"


def test_counts_of_the_base_network() -> None:
    base = counts(CONTEXT)["cifar"]["base"]
    assert base["parameters"] == 1_068_298
    assert base["multiply_adds"]["conv1"] + base["multiply_adds"]["conv2"] == 17_510_400
    assert base["bytes"]["Conv2D"] == 128 * 4 * 64 * (24 * 24 + 12 * 12)


def test_the_worked_loss_is_the_negative_logarithm() -> None:
    assert cross_entropy([0.5, 0.25, 0.25], 1) == pytest.approx(1.3862943611)


def test_time_is_flat_from_the_size_that_no_larger_one_beats() -> None:
    assert flat_from({2: 10.0, 64: 2.0, 128: 1.05, 256: 1.0}) == 128
    assert flat_from({2: 1.0, 64: 1.0, 128: 1.2}) == 2


def test_a_lead_within_the_deviation_over_seeds_decides_nothing() -> None:
    assert compared({"a": 0.93, "b": 0.90}, 0.01) == CONFIRMED
    assert compared({"a": 0.90, "b": 0.93, "c": 0.5}, 0.01) == REFUTED
    assert compared({"a": 0.93, "b": 0.934}, 0.01) == NOT_COMPARABLE


def test_ratios_have_three_digits() -> None:
    assert [times(value) for value in (0.123456, 7.915, 1234.5)] == ["0.123×", "7.92×", "1,234×"]


def test_a_result_is_stored_beside_those_of_other_kinds(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    store.add("cpu-2", "one", {"date": "d"}, {"x": 1})
    store.add("cpu-2", "two", {}, {"x": 2})
    store.add("gpu-h100", "one", {}, {"x": 3})
    store.add("cpu-2", "one", {}, {"x": 4})
    found = {(r.kind, r.name): r.values["x"] for r in store.results()}
    assert found == {("cpu-2", "one"): 4, ("cpu-2", "two"): 2, ("gpu-h100", "one"): 3}


def fake(
    name: str, needs: str, *, many_cores: bool = False, fails: bool = False, value: float = 1.0
) -> Measurement:
    def measure(context: Context) -> dict[str, Any]:
        if fails:
            raise UserError("out of order")
        return {"name": name, "value": value}

    return Measurement(name, needs, (name.upper(),), many_cores, measure)


@pytest.mark.more
def test_a_run_continues_after_a_failure_and_keeps_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    chosen = [
        fake("a", CPU), fake("b", CPU, fails=True), fake("n", CPU, value=math.nan),
        fake("c", EXACT), fake("d", GPU),
    ]  # fmt: skip
    failed, not_a_number = running.run(chosen, CONTEXT, store)
    assert failed == "b: UserError: out of order"
    assert not_a_number.startswith("n: ValueError: ")
    assert {r.name for r in store.results()} == {"a", "c"}
    assert "d: not measured: it needs a GPU and CuPy" in capsys.readouterr().out
    running.run(chosen, CONTEXT, store)
    assert "a: stored already for cpu-2" in capsys.readouterr().out
    running.run(chosen[:1], CONTEXT, store, again=True)
    assert "measuring" in capsys.readouterr().out


def test_a_measurement_that_was_stopped_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(context: Context) -> dict[str, Any]:
        context.keep({"cases": 1, PARTIAL: True})
        if len(found) == 1:
            raise UserError("stopped")
        return {"cases": 2}

    found = [1]
    store, stopped = Store(tmp_path), Measurement("a", CPU, ("A",), False, measure)
    assert running.run([stopped], CONTEXT, store)
    assert next(store.results()).values["cases"] == 1
    found.append(2)
    assert not running.run([stopped], CONTEXT, store)
    assert next(store.results()).values == {"cases": 2}
    assert "measuring" in capsys.readouterr().out


def test_a_missing_package_is_reported() -> None:
    measurement = replace(fake("a", CPU), package="no_such_package")
    assert running.obstacle(CONTEXT, measurement, ()) == "it needs the package no_such_package"


def test_one_thread_is_taken_from_the_machine_with_the_least_load() -> None:
    found = [
        Result("cpu-2", "profile", {"load": [16.0]}, {"which": "busy"}),
        Result("cpu-4", "profile", {"load": [4.0]}, {"which": "idle"}),
        Result("gpu-h100", "solar", {"load": [0.0]}, {}),
    ]
    assert Results(found).values("profile")["which"] == "idle"


def test_scaling_is_not_measured_on_two_cores() -> None:
    measurement = fake("a", CPU, many_cores=True)
    assert running.obstacle(CONTEXT, measurement, ("cores",)).startswith("it needs at least 8")
    assert not running.obstacle(CONTEXT, measurement, ())
    assert not running.obstacle(Context(tuple(range(16))), measurement, ("cores",))


def test_results_are_chosen_by_identifier_and_part() -> None:
    assert "speed-up" in {m.name for m in running.choose(["A1"], [])}
    assert {m.needs for m in running.choose(["D1"], ["gpu"])} == {GPU}
    assert all(m.many_cores for m in running.choose([], ["cores"]))
    with pytest.raises(UserError, match="there is no result 'A99'"):
        running.choose(["A99"], [])
    with pytest.raises(UserError, match="expected exact, cpu, cores, gpu"):
        running.choose([], ["disk"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("My GPU", "my-gpu")],
)
def test_kinds_of_gpus_have_short_names(name: str, kind: str) -> None:
    assert gpu_kind(name) == kind


def test_requests_survive_the_command_line() -> None:
    chosen = requests()
    assert [Request.parse(str(request)) for request in chosen] == chosen
    assert all(find(request.network).num_parameters for request in chosen)


def test_work_is_divided_in_turns() -> None:
    assert divide(["a", "b", "c"], 2) == [["a", "c"], ["b"]]


def test_the_page_has_every_row_and_no_placeholder(results: Results) -> None:
    text = page.fill(page.TEMPLATE.read_text(encoding="utf-8"), results, {"threads": "a plot"})
    assert "{{" not in text
    assert all(f"| {row.id} |" in text for row in ROWS)
    assert "![a plot](images/studies-threads.svg)" in text
    assert "43 claims" in text


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_rows_of_equal_length(name: str, results: Results) -> None:
    lines = [line for line in TABLES[name](results).splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1


def test_unknown_results_end_with_exit_code_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["A99", "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "there is no result 'A99'" in done.output


def test_one_command_measures_one_result(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["A8", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [r.name for r in Store(tmp_path).results()] == ["counts"]


@pytest.mark.parametrize(
    ("cores", "gpus", "parts", "divided"),
    [
        (32, 2, ("gpu", "cores"), True),
        (32, 2, ("gpu",), False),
        (16, 2, ("gpu", "cores"), False),
        (32, 0, ("gpu", "cores"), False),
    ],
)
def test_gpus_and_cores_are_measured_together_if_there_are_enough(
    cores: int, gpus: int, parts: tuple[str, ...], *, divided: bool
) -> None:
    assert can_be_divided(Context(tuple(range(cores)), gpus), parts) == divided
