"""The studies: exact counts, verdicts, storage, choice of measurements, the page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu.compiling import Request
from benchmarks.studies import measuring, merge, running, strategies_gpu
from benchmarks.studies.__main__ import main
from benchmarks.studies.claims import reader, spreads
from benchmarks.studies.claims.judgements import (
    CONFIRMED,
    NOT_COMPARABLE,
    NOT_MEASURED,
    REFUTED,
    RULES,
    UNDECIDED,
    VERDICTS,
    above,
    differences,
)
from benchmarks.studies.claims.reader import all_rows, find_row
from benchmarks.studies.claims.results import MissingResultError, Results
from benchmarks.studies.claims.texts import filled, times
from benchmarks.studies.claims.values import Values, lead
from benchmarks.studies.compiling import requests
from benchmarks.studies.exact import counts, cross_entropy
from benchmarks.studies.measuring import (
    CPU,
    EXACT,
    GPU,
    Context,
    Measurement,
    gpu_kind,
    load_measurements,
)
from benchmarks.studies.networks import find
from benchmarks.studies.page import page, plots
from benchmarks.studies.page.tables import raw_results, specifications, table
from benchmarks.studies.store import FOLDER, PARTIAL, Result, Store
from dptrain.errors import UserError
from dptrain.measure.statistics import Estimate
from tests.unit.benchmarks.studies_results import published_results

MEASUREMENTS = load_measurements()
ROWS = all_rows()
TABLES = specifications()
INDEX_IDS = (
    *(f"A{i}" for i in range(1, 10)), *(f"B{i}" for i in range(1, 14)),
    *(f"D{i}" for i in range(1, 8)),
)  # fmt: skip
CONTEXT = Context((0, 1))


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(published_results())


def verdict_of(name: str, results: Results) -> str:
    return find_row(name).judge(results).verdict


def test_every_row_of_the_index_and_every_claim_is_on_the_page() -> None:
    found = [row.id for row in ROWS]
    assert len(found) == len(set(found))
    assert set(found) == {*INDEX_IDS, "A, 2.2", *(f"Q{i}" for i in range(1, 44))}


def test_every_measurement_that_a_row_names_exists() -> None:
    needed = {name for row in ROWS for name in row.measurements}
    assert needed <= set(MEASUREMENTS)
    # Those are in tables only.
    assert set(MEASUREMENTS) - needed == {"keras", "sizes-gpu"}


def test_with_all_results_each_row_has_a_verdict(results: Results) -> None:
    found = {row.id: row.judge(results) for row in ROWS}
    assert [name for name, v in found.items() if v.verdict == NOT_MEASURED] == []
    assert all(v.ours and v.verdict in VERDICTS for v in found.values())


def test_results_equal_to_the_published_ones_confirm_them(results: Results) -> None:
    # Those of batch sizes (B1) contradict the claim on the study's own GPU.
    names = ("A2", "A3", "A4", "B3", "B7", "B8", "D1", "D2", "D3", "D4", "D5", "Q6", "Q8",
             "Q10", "Q21", "Q22", "Q23", "Q24")  # fmt: skip
    assert {name: verdict_of(name, results) for name in names} == dict.fromkeys(names, CONFIRMED)


def times_longer(results: list[Result], factor: float) -> list[Result]:
    """Return results whose times in ms and whose sizes of batches are multiplied by a factor."""

    def scaled(values: Any) -> Any:
        if isinstance(values, list):
            return [scaled(each) for each in values]
        if not isinstance(values, dict):
            return values
        return {
            key: factor * value if isinstance(value, float) and "_ms" in key else scaled(value)
            for key, value in values.items()
        }

    return [replace(result, values=scaled(result.values)) for result in results]


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e3])
def test_seconds_of_other_hardware_decide_nothing(factor: float) -> None:
    """Nor do crossovers of one pair, and other data."""
    results = Results(times_longer(published_results(), factor))
    names = ("A, 2.2", "B2", "B5", "B9", "B10", "B13", "Q14", "Q17", "Q27", "Q28",
             "Q34", "Q35")  # fmt: skip
    found = {name: verdict_of(name, results) for name in names}
    assert found == dict.fromkeys(names, NOT_COMPARABLE)


def changed_results(name: str, change: Callable[[Any], object]) -> Results:
    """Return the published results with a change of the values of one of them."""
    found = []
    for result in published_results():
        values = json.loads(json.dumps(result.values))
        if result.name == name:
            change(values)
        found.append(replace(result, values=values))
    return Results(found)


def test_gemm_is_compared_with_a_direct_convolution() -> None:
    def slow_down(values: Any) -> None:
        row = values["layers"]["larger:conv2"]["forward"][1]
        row["rounds_ms"] = [100.0, 101.0, 99.0]

    def remove_direct(values: Any) -> None:
        del values["layers"]["larger:conv2"]["forward"][:2]

    assert verdict_of("Q6", changed_results("ladder", slow_down)) == REFUTED
    found = find_row("Q6").judge(changed_results("ladder-gpu", remove_direct))
    assert (found.verdict, found.used) == (CONFIRMED, ("ladder",))
    assert "(H100)" not in found.ours


@pytest.mark.parametrize("name", ["A3", "A4", "Q4", "Q5"])
def test_cudnn_is_judged_at_its_best_only(name: str) -> None:
    def only_training(values: Any) -> None:
        for key in ("rows", "batch 1"):
            for row in values.get(key, ()):
                for setting in [k for k in row if k.startswith(("cudnn, ", "PyTorch"))]:
                    del row[setting]
                if isinstance(row["cuda"], dict) and "size" in row:
                    row["cuda"], row["cudnn"] = 1.0, 3.0

    found = published_results()
    for each in ("steps-gpu", "layers-gpu", "sizes-gpu"):
        found = [
            r if r.name != each else next(x for x in changed_results(each, only_training).all
                                          if x.name == each)
            for r in found
        ]  # fmt: skip
    verdict = find_row(name).judge(Results(found))
    assert verdict.verdict == NOT_MEASURED
    assert "no value 'cudnn, all engines'" in verdict.reason


def test_one_launch_of_each_program_does_not_decide_a_small_difference() -> None:
    def one_launch(values: Any) -> None:
        values["steps"] = {
            f"{name}, 2 GPUs, batch {batch}": {"median_ms": ms, "q1_ms": 0.999 * ms,
                                               "q3_ms": 1.001 * ms}
            for name, ms in (("mirrored, NCCL", 1.0), ("central, NCCL", 1.015))
            for batch in (128, 2048)
        }  # fmt: skip

    assert verdict_of("Q22", changed_results("strategies-gpu", one_launch)) == UNDECIDED


def test_a_speed_up_has_one_interval_on_the_page() -> None:
    text = table("strategies on GPUs", STORED).replace("2,048", "2048")
    ours = find_row("B8").judge(STORED).ours.partition("speed-up ")[2]
    gains = re.findall(r"([\d.]+)× \(([\d.]+) to ([\d.]+)\) \(([^)]+)\)", ours)
    assert len(gains) == 4
    for value, low, high, case in gains:
        assert re.search(rf"\| {re.escape(case)} \|.*\| {value} \({low}–{high}\) \|", text)


def test_strategies_are_trained_in_alternating_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that fails is not tried again; two ranks on one GPU are no claim about several."""
    calls: list[tuple[str, str, int]] = []

    def train(ranks: int, batch: int, strategy: str, transport: str, steps: int) -> float:
        calls.append((strategy, transport, ranks))
        if strategy == "central":
            raise UserError("no")
        return float(len(calls))

    monkeypatch.setattr(strategies_gpu, "train", train)
    found = strategies_gpu.strategies_on_one_gpu(Context((0,), gpus=1, say=lambda text: None))
    one, both = ("mirrored", "auto", 1), ("mirrored", "host", 2)
    assert calls == [one, both, ("central", "host", 2), *[one, both] * 4]
    steps = found["steps"]
    assert steps["1 GPU, batch 128"]["medians_ms"] == [1.0, 4.0, 6.0, 8.0, 10.0]
    assert steps["mirrored, host, 2 ranks on 1 GPU, batch 128"]["median_ms"] == 7.0
    assert steps["central, host, 2 ranks on 1 GPU, batch 128"]["why"] == "no"
    with pytest.raises(UserError, match="two GPUs"):
        strategies_gpu.strategies_on_gpus(Context((0,), gpus=1))


def test_ranks_that_share_a_gpu_do_not_decide_a_claim_about_several() -> None:
    def slow_mirrored(values: Any) -> None:
        values["steps"]["mirrored, host, 2 ranks on 1 GPU, batch 128"]["medians_ms"] = [9.0] * 3

    assert verdict_of("Q22", changed_results("strategies-one-gpu", slow_mirrored)) == CONFIRMED


def test_two_machines_that_differ_decide_nothing() -> None:
    def less(values: Any) -> None:
        values["variants"]["base"]["kinds"]["Conv2D"]["share"] = 0.55

    other = next(r for r in changed_results("profile", less).all if r.name == "profile")
    both = Results([*published_results(), replace(other, kind="cpu-2")])
    assert verdict_of("Q32", Results(published_results())) == CONFIRMED
    assert verdict_of("Q32", both) == UNDECIDED


def test_accuracies_count_on_the_data_of_the_study_only() -> None:
    def on_cifar(values: Any) -> None:
        values["data"] = "CIFAR-10"

    assert verdict_of("Q35", changed_results("variants-gpu", on_cifar)) == CONFIRMED
    for results, is_missing in ((Results(published_results()), True),
                                (changed_results("variants-gpu", on_cifar), False)):  # fmt: skip
        judged = [(find_row("Q35"), find_row("Q35").judge(results))]
        assert ("on CIFAR-10" in page.missing(judged)) == is_missing


def test_ratios_are_paired_by_round_where_rounds_are_stored() -> None:
    slow = {"medians_ms": [2.0, 4.0, 8.0, 2.2], "median_ms": 3.1}
    fast = {"medians_ms": [1.0, 2.0, 4.0, 1.1], "median_ms": 1.55}
    found = spreads.ratio(slow, fast)
    assert (found.value, found.n) == (pytest.approx(2.0), 4)
    assert found.high - found.low < 1e-9
    by_quartiles = spreads.ratio(
        {"median_ms": 4.0, "q1_ms": 3.0, "q3_ms": 5.0}, {"median": 2.0, "low": 1.0, "high": 2.5}
    )
    assert (by_quartiles.value, by_quartiles.low, by_quartiles.high) == (2.0, 1.2, 5.0)
    assert by_quartiles.n == 1


def test_two_groups_of_rounds_are_named() -> None:
    base = {"medians_ms": [150.7, 149.2, 213.4, 220.2, 146.4], "median_ms": 150.7}
    assert spreads.spread(base) == "two groups: 146–151, 213–220"
    assert spreads.spread({"median_ms": 2.0, "q1_ms": 1.9, "q3_ms": 2.1}) == "±5%"
    assert spreads.spread({"median_ms": 2.0}) == "no spread stored"
    assert spreads.spread({"median_ms": 2.0, "q1_ms": 2.0, "q3_ms": 2.0, "n": 1}) == "one run"


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(1.1, 1.2), (1.3, 1.4)], CONFIRMED),
        ([(1.1, 1.2), (0.9, 1.4)], UNDECIDED),
        ([(0.9, 1.4), (0.7, 0.8)], REFUTED),
    ],
)
def test_an_interval_that_contains_the_threshold_is_undecided(
    intervals: list[tuple[float, float]], verdict: str
) -> None:
    assert above({str(e): Estimate(e[0], *e, 5) for e in intervals}, 1) == verdict


def rounding(values: Any) -> None:
    values["networks"]["model0, numba"]["first_step_difference"] = 0.1


def slow_stride(values: Any) -> None:
    values["variants"]["stride 5"]["step"] = {"median": 200.0}


def harm(values: Any) -> None:
    values["samples_per_s"]["unlike by 2, equal shares"] = {"median": 99.0}


@pytest.mark.parametrize(
    ("name", "measurement", "change"),
    [("A5", "agreement", rounding), ("D5", "variant-steps", slow_stride), ("Q24", "unlike", harm)],
)
def test_a_contradiction_is_not_reproduced(
    name: str, measurement: str, change: Callable[[Any], None]
) -> None:
    assert verdict_of(name, changed_results(measurement, change)) == REFUTED


def test_a_result_that_is_missing_is_not_guessed() -> None:
    alone = Results(r for r in published_results() if r.kind == "exact")
    verdict = find_row("A4").judge(alone)
    assert verdict.verdict == NOT_MEASURED
    assert "gpu" in verdict.reason


def test_eight_threads_need_eight_cores() -> None:
    def few_cores(values: Any) -> None:
        for steps in values["cases"].values():
            for count in (4, 8, 16):
                del steps[f"threads {count}"]

    for name in ("A1", "A9"):
        verdict = find_row(name).judge(changed_results("equal-arithmetic", few_cores))
        assert (verdict.verdict, verdict.reason) == (
            NOT_MEASURED, "`equal-arithmetic` has no value 'threads 8'"
        )  # fmt: skip


@pytest.mark.parametrize(
    ("eight", "verdict"), [(12.0, CONFIRMED), (40.0, REFUTED), ((10.0, 12.8, 14.0), UNDECIDED)]
)
def test_speed_ups_of_threads_are_decided_in_steps_of_much_arithmetic(
    eight: Any, verdict: str
) -> None:
    """One thread takes 80 ms; at least 80% of the published 7.92× must be reached."""

    def slow_down(values: Any) -> None:
        rounds = list(eight) if isinstance(eight, tuple) else [eight] * 3
        values["cases"]["model0, batch 1024"] |= {
            "threads 1": {"medians_ms": [80.0] * 3, "median_ms": 80.0},
            "threads 8": {"medians_ms": rounds, "median_ms": rounds[1]},
        }
        values["cases"]["model0, batch 32"]["threads 8"]["median_ms"] = 79.0

    assert verdict_of("A1", changed_results("equal-arithmetic", slow_down)) == verdict


def test_the_result_of_the_most_cores_is_used() -> None:
    found = [Result(kind, "solar", {}, {"kind": kind}) for kind in ("cpu-2", "cpu-16", "cpu-4")]
    assert Results(found).at("solar/kind") == "cpu-16"
    assert Results(found).at("solar@cpu-2/kind") == "cpu-2"


@pytest.mark.parametrize("name", ["A6", "A7", "A8", "B11", "D7"])
def test_exact_counts_match_to_the_digit(name: str, results: Results) -> None:
    assert verdict_of(name, results) == CONFIRMED


def test_a_count_that_differs_by_one_is_named() -> None:
    found = {"right": 7, "wrong": 8}
    assert differences(found, {"right": 7, "wrong": 9}) == ["wrong: 8 instead of 9"]
    assert RULES["equal"](found, {"right": 7, "wrong": 9}) == REFUTED
    assert differences(1_310_720, "1.31 MB") == []


def test_counts_of_the_base_network() -> None:
    base = counts(CONTEXT)["cifar"]["base"]
    assert base["parameters"] == 1_068_298
    assert base["multiply_adds"]["conv1"] + base["multiply_adds"]["conv2"] == 17_510_400
    assert base["bytes"]["Conv2D"] == 128 * 4 * 64 * (24 * 24 + 12 * 12)


def test_the_worked_loss_is_the_negative_logarithm() -> None:
    assert cross_entropy([0.5, 0.25, 0.25], 1) == pytest.approx(1.3862943611)


def test_a_lead_within_its_interval_over_seeds_decides_nothing() -> None:
    seeds, worse = [0.93, 0.92, 0.94], [0.90, 0.89, 0.91]
    assert above(lead([seeds, worse, [0.5, 0.5, 0.5]]), 0) == CONFIRMED
    assert above(lead([worse, seeds, [0.5, 0.5, 0.5]]), 0) == REFUTED
    found = lead([seeds, [0.92, 0.94, 0.92]])
    assert above(found, 0) == UNDECIDED
    assert found.low < 0 < found.high


ROWS_OF_A_LIST = [
    {"n": 2, "median_ms": 4.0}, {"n": 8, "median_ms": 8.0}, {"n": 16, "median_ms": 64.0},
    {"n": 32, "median_ms": 1.0, "why": "no memory"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("solar/rows/n=8/median_ms", 8.0),
        ("missing|solar/rows/n=8/median_ms", 8.0),
        ("solar/rows/n>2/n", 8),
        ("solar/rows/-1/n", 32),
        ("solar/steps/a|b/median_ms", 1.0),
        ("solar/steps/a|c*/median_ms", 2.0),
        ("solar/steps/*!a/median_ms", {"b": 1.0, "c d": 3.0}),
        ("solar/sums/+x.", 3.0),
    ],
)
def test_paths_select_values(path: str, wanted: Any) -> None:
    steps = {name: {"median_ms": ms} for name, ms in (("a", 2.0), ("b", 1.0), ("c d", 3.0))}
    values = {"rows": ROWS_OF_A_LIST, "steps": steps, "sums": {"x.a": 1.0, "x.b": 2.0, "y": 9.0}}
    assert Results([Result("cpu-2", "solar", {}, values)]).at(path) == wanted


@pytest.mark.parametrize(
    "path", ["none/x", "solar/rows/n=3", "solar/rows/n=32", "solar/steps/a|z", "solar/steps/z"]
)
def test_a_path_without_a_value_says_what_is_missing(path: str) -> None:
    values = {"rows": ROWS_OF_A_LIST, "steps": {"a": {"median_ms": 1.0}}}
    with pytest.raises(MissingResultError, match=r"not measured yet|has no value"):
        Results([Result("cpu-2", "solar", {}, values)]).at(path)


def test_values_of_cases_are_summed_counted_and_compared() -> None:
    rows = {f"{name} {n}": {"median_ms": ms, "q1_ms": 0.9 * ms, "q3_ms": 1.1 * ms}
            for name, n, ms in (("a", 1, 4.0), ("a", 2, 6.0), ("b", 1, 1.0), ("b", 2, 4.0))
            }  # fmt: skip
    values = Values(Results([Result("cpu-2", "solar", {}, rows)]))
    values.add({
        "gains": {"of": "solar/a {case}", "over": "solar/b {case}", "cases": [1, 2, 3],
                  "skip": True},
        "whole": {"of": "solar/a {part}", "over": "solar/b {part}", "parts": [1, 2]},
        "many": {"count": "gains", "above": 1.5},
    })  # fmt: skip
    assert {case: round(gain.value, 9) for case, gain in values.known["gains"].items()} == {
        "1": 4.0, "2": 1.5
    }  # fmt: skip
    whole = values.known["whole"]
    assert (whole.value, whole.low, whole.high) == pytest.approx((2.0, 9 / 5.5, 11 / 4.5))
    assert (values.known["many"], list(values.used)) == (1, ["solar"])
    assert filled("{gains:range times} of {gains}", values.known) == (
        "1.5× to 4× of 4× (3.27 to 4.89) (1), 1.5× (1.23 to 1.83) (2)"
    )


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ("rulle = 1", "unknown key 'rulle'"),
        ('as = "A1"\nverdict = "true"', "unknown verdict 'true'"),
        ("values.x = {off = 1}", "nothing decides it"),
        ('as = "A1"\nvalues.x = {off = 1}', "value 'x' has an unknown key 'off'"),
        ('as = "A1"\nvalues.x = {of = "a", reduce = "sum"}', "value 'x' has an unknown 'reduce'"),
        ('as = "A1"\nvalues.x = {cases = [1]}', "value 'x' has no 'of'; expected a path"),
        ('decide = [{rule = "over", of = "x"}]', "unknown rule 'over'; expected one of above"),
        ('decide = [{rule = "above", of = "x"}]', "a condition is 'of' 'x'"),
        ('as = "A1"\nours = "{y:range times}"', "a text has {y}; expected the name of a value"),
    ],
)
def test_a_mistake_in_a_claim_is_one_line(change: str, mistake: str, tmp_path: Path) -> None:
    path = tmp_path / "study-a.toml"
    path.write_text(f'[Q1]\ntitle = "a title"\norigin = "T"\n{change}\n', encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(mistake)) as error:
        reader.read_rows(path)
    assert str(error.value).startswith(f"{path}: [Q1]: ")
    assert "\n" not in str(error.value)


def test_every_rule_decides_a_row_and_has_a_sentence() -> None:
    assert {rule for row in ROWS for rule in row.rules} == set(RULES)
    assert all((rule.__doc__ or "").splitlines()[0].endswith(".") for rule in RULES.values())


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

    return Measurement(name, needs, many_cores, measure)


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
    store, stopped = Store(tmp_path), Measurement("a", CPU, False, measure)
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
    assert Results(found).at("profile/which") == "idle"


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


def test_a_measurement_is_the_same_function_on_a_gpu() -> None:
    context = Context((0, 1, 2), gpus=1, gpu_name="NVIDIA H200")
    assert (context.backend, context.threads) == ("numba", 3)
    on_gpu = replace(context, on_gpu=True)
    assert (on_gpu.backend, on_gpu.threads) == ("cuda", 1)
    seen: list[str] = []
    register = measuring.measurement("twice", CPU, many_cores=True, also_gpu=True)
    try:
        register(lambda context: {"seen": seen.append(context.backend)})
        for name in ("twice", "twice-gpu"):
            MEASUREMENTS[name].measure(context)
        assert (MEASUREMENTS["twice-gpu"].needs, seen) == (GPU, ["numba", "cuda"])
    finally:
        for name in ("twice", "twice-gpu"):
            measuring.MEASUREMENTS.pop(name)


def test_requests_survive_the_command_line() -> None:
    chosen = requests()
    assert [Request.parse(str(request)) for request in chosen] == chosen
    assert all(find(request.network).num_parameters for request in chosen)
    # Engines of cuDNN are timed, which another process on the same GPU would disturb.
    assert {request.backend for request in chosen} == {"cuda"}


def test_the_page_has_every_row_and_no_placeholder(results: Results) -> None:
    text = page.fill(page.TEMPLATE.read_text(encoding="utf-8"), results, {"threads": "a plot"})
    assert "{{" not in text
    assert all(f"| {row.id} |" in text for row in ROWS)
    assert "![a plot](images/studies-threads.svg)" in text
    assert "43 claims" in text


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_rows_of_equal_length(name: str, results: Results) -> None:
    lines = [line for line in table(name, results).splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1


STORED = Results(Store(FOLDER).results())
SPREAD = re.compile(r"±|two groups|one run|no spread|\(\d[^)]*[–,][^)]*\d\)|\(from |n = 1\b")


@pytest.mark.parametrize("name", sorted(TABLES.keys() - {"engines", "largest"}))
def test_every_measured_line_has_a_spread_and_its_source(name: str) -> None:
    """The other two tables have counts and names of engines."""
    text = table(name, STORED)
    if text.startswith("Not measured"):
        return
    assert re.search(r"Source: `[a-z-]+` in `[a-z0-9-]+\.json`.*load [0-9.]+", text)
    if "no spread was stored" not in text:
        lines = [line for line in text.splitlines() if line.startswith("|")][2:]
        assert [line for line in lines if not SPREAD.search(line) and "base" not in line] == []


def test_raw_results_of_every_judged_row_are_named() -> None:
    assert {result.name for result in STORED.all} <= set(MEASUREMENTS)
    judged = [(row, row.judge(STORED)) for row in ROWS]
    text = raw_results(STORED, page.served(judged))
    for row, verdict in judged:
        named = re.search(rf"\| (?:.* )?{re.escape(row.id)}(?: .*)? \|$", text, re.MULTILINE)
        assert bool(named) == (verdict.verdict != NOT_MEASURED), row.id
    for line in text.splitlines()[2:]:
        name, file = (cell.strip().strip("`") for cell in line.split("|")[1:3])
        assert name in json.loads((FOLDER / file).read_text(encoding="utf-8"))


def test_every_plot_is_drawn_from_results_of_all_measurements(results: Results) -> None:
    found = {drawn.name: drawn.alt for drawn in plots.draw_plots(results)}
    names = ("threads", "batch", "crossover", "strategies", "inference", "variants")
    assert list(found) == [f"studies-{name}" for name in names]
    assert found["studies-strategies"].startswith(
        "Speed-up with 16 ranks: 16× (mirrored, shared memory)"
    )


def test_the_page_is_that_of_the_stored_results() -> None:
    stored = page.PAGE.read_text(encoding="utf-8")
    template = page.TEMPLATE.read_text(encoding="utf-8")
    drawn = re.findall(r"!\[([^\]]*)\]\(images/studies-(\w+)\.svg\)", stored)
    assert len(drawn) == 6
    found = page.fill(template, STORED, {name: alt for alt, name in drawn})
    assert found == stored, "run python -m benchmarks.studies --only exact"
    assert "—" not in stored
    assert len(stored.split()) < 11_000


def test_unknown_results_end_with_exit_code_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["A99", "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "there is no result 'A99'" in done.output


def test_one_command_measures_one_result(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["A8", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [r.name for r in Store(tmp_path).results()] == ["counts"]


def test_results_of_another_machine_are_added_and_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were stopped before their end are not added."""
    store, other = Store(tmp_path / "own"), Store(tmp_path / "other")
    for name in ("speed-up", "solar"):
        store.add("cpu-16", name, {}, {"x": 1})
    other.add("cpu-16", "solar", {}, {"x": 2})
    other.add("cpu-16", "speed-up", {}, {"x": 3, PARTIAL: True})
    other.add("gpu-h200", "steps-gpu", {}, {"x": 4})
    written: list[Store] = []
    monkeypatch.setattr(page, "write_page", lambda store: written.append(store) or [])
    monkeypatch.setattr(merge, "FOLDER", store.folder)
    done = CliRunner().invoke(merge.main, [str(other.folder), "--output", str(store.folder)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == ["added: cpu-16: solar", "added: gpu-h200: steps-gpu"]
    found = {(r.kind, r.name): r.values["x"] for r in store.results()}
    assert found == {
        ("cpu-16", "speed-up"): 1, ("cpu-16", "solar"): 2, ("gpu-h200", "steps-gpu"): 4
    }  # fmt: skip
    assert [each.folder for each in written] == [store.folder]
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(merge.main, [str(tmp_path / "empty")])
    assert done.exit_code == 2
    assert "has no complete results; expected files such as cpu-16.json" in done.output
