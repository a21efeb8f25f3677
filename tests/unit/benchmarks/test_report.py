"""Reports: targets, tables, and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import table
from benchmarks.report import Report, Rows, comparisons
from benchmarks.tables import (
    comparison_table,
    headline,
    new_files,
    tables_of,
    text_of,
    time_of,
    write,
)
from benchmarks.targets import Target, figures, speedup_target
from benchmarks.timing import Series, quotient


def row(program: str, ms: float, **facts: Any) -> dict[str, Any]:
    return {**facts, "program": program, **Series((ms, ms, ms), (ms, ms, ms), 30).as_dict()}


def make_report() -> Report:
    case = {"network": "model0", "batch": 256}
    times = {1: (16.0, 80.0, 16.0), 16: (1.25, 4.0, 1.0)}
    threads = [
        row(program, ms, threads=count, **case)
        for count, values in times.items()
        for program, ms in zip(("dptrain", "PyTorch eager", "copies"), values, strict=True)
    ]
    sizes = {"network": "cifar", "bytes": 4_273_192, "ranks": 8}
    summed = [row(program, ms, **sizes) for program, ms in (
        ("dptrain", 0.6), ("traffic.c", 0.4), ("MPICH", 3.0), ("Open MPI", 4.0))]  # fmt: skip
    about = {
        "date": "2026-01-02T03:04", "cpu": "a processor", "kind": "cpu",
        "sections": ["threads", "sums"],
    }  # fmt: skip
    return Report(
        about, {"threads": threads, "sums": summed}, {"JAX": "not installed"}, {"a": 1e-6}
    )


def gpu_report(*rows: dict[str, Any], section: str = "training") -> Report:
    return Report({"date": "2026-01-02", "kind": "gpu", "gpu": "H200", "sections": [section]},
                  {section: list(rows)})  # fmt: skip


def write_to(folder: Path, report: Report) -> Path:
    paths = new_files(folder, report.kind, str(report.about["date"]))
    write(report, paths)
    return paths[0]


@pytest.mark.parametrize(
    ("target", "figure", "verdict"),
    [
        (Target(3.0), 3.0, "reached"),
        (Target(3.0), 2.61, "0.87 of target"),
        (Target(3.0), 2.9999, "0.99 of target"),
    ],
)
def test_verdicts(target: Target, figure: float, verdict: str) -> None:
    assert target.verdict(figure) == verdict


def test_the_summary_names_the_case_that_is_farthest_from_its_target() -> None:
    assert tables_of(make_report())[0].rows == (
        ("threads", "3.20–5.00", "≥ 4", "1 of 2", "model0, batch 256, 16 threads (3.20)"),
    )
    assert headline(make_report()).splitlines() == [
        "1 of 2 figures reach their target",
        "1 results were checked before they were timed; the largest error is 1e-06 of the allowed "
        "one",
        "not measured: JAX: not installed",
    ]


def test_sums_are_compared_with_the_traffic_and_with_mpi() -> None:
    (found,) = (each for each in tables_of(make_report()) if each.title == "Sum and update alone")
    line = dict(zip(found.columns, found.rows[0], strict=True))
    assert line["dptrain / traffic.c"] == "1.50"
    assert line["times faster than MPI"] == "5.00"


@pytest.mark.parametrize(
    ("network", "batch", "precision", "least"),
    [("cifar", 512, "bf16", 2.0), ("cifar", 32, "bf16", 3.0), ("cifar", 512, "fp32", 2.5),
     ("cifar", 32, "fp32", 2.0), ("vgg", 512, "tf32", 2.5), ("vgg", 32, "fp32", 1.7),
     ("perceptron", 512, "bf16", 1.3), ("odd", 512, "fp32", None), ("resnet20", 128, "fp32", 1.5)],
)  # fmt: skip
def test_targets_depend_on_network_batch_and_precision(
    network: str, batch: int, precision: str, least: float | None
) -> None:
    facts = {"network": network, "batch": batch, "precision": precision}
    target = speedup_target("gpu", "training", facts)
    assert (None if target is None else target.value) == least


def test_inference_at_batch_1_of_solar_reads_weights() -> None:
    for batch, least in ((1, 1.0), (8, 1.3)):
        target = speedup_target("cpu", "inference", {"network": "solar", "batch": batch})
        assert target == Target(least)


@pytest.mark.parametrize(
    ("precision", "program"), [("fp32", "PyTorch a"), ("tf32", "PyTorch b"), ("bf16", "PyTorch b")]
)
def test_peers_may_be_more_precise_but_not_less(precision: str, program: str) -> None:
    case = {"network": "vgg", "batch": 32}
    peers = [
        row(f"PyTorch {name}", ms, precision=p, **case)
        for name, p, ms in (("a", "fp32", 9.0), ("b", "tf32", 2.0), ("c", "bf16", 3.0))
    ]
    (found,) = comparisons(Rows([row("dptrain cuda", 1.0, precision=precision, **case), *peers]))
    assert found.best is not None
    assert found.best["program"] == program


def test_without_a_peer_there_is_no_ratio() -> None:
    rows = [row("dptrain cuda", 0.04, precision="tf32", network="model0", batch=256),
            row("PyTorch graph", 0.1, precision="bf16", network="model0", batch=256)]  # fmt: skip
    (found,) = comparisons(Rows(rows))
    assert found.best is found.ratio is None
    assert figures(gpu_report(*rows)) == {}
    assert tables_of(gpu_report(*rows))[0].rows[0][:3] == ("model0", "256", "tf32")


def test_training_on_images_is_compared_with_the_bare_step_and_streams_with_their_limit() -> None:
    case = {"network": "cifar", "batch": 32, "precision": "bf16", "gpus": 1}
    ours = row("dptrain cuda", 0.051, bare_ms=0.049, **case)
    report = gpu_report(ours, row("PyTorch graph", 0.305, **case), section="data")
    assert "0.961" in tables_of(report)[0].rows[0]
    stream = row("dptrain cuda", 0.165, source="PNG files", says="no limit, 2%",
                 limits_ms={"step": 0.14, "link": 0.008, "reading": 0.15}, **case)  # fmt: skip
    assert "0.909" in tables_of(gpu_report(stream, section="streams"))[0].rows[0]


def test_errors_of_fp32_are_listed_next_to_pytorchs() -> None:
    case = {"network": "small", "batch": 2, "layer": "conv1", "quantity": "output"}
    rows = [{**case, "program": "dptrain cuda", "error": 1e-7},
            {**case, "program": "PyTorch", "error": 5e-8}]  # fmt: skip
    (found,) = tables_of(gpu_report(*rows, section="precision"))
    assert [line[-2:] for line in found.rows] == [
        ("dptrain cuda", "1.00e-07"), ("PyTorch", "5.00e-08"),
    ]  # fmt: skip


def test_reports_are_written_read_and_combined(tmp_path: Path) -> None:
    first, second = make_report(), make_report()
    second.rows = {"sums": second.rows["sums"][:2]}
    second.about = {**second.about, "date": "2026-01-03T00:00", "sections": ["sums"]}
    paths = [write_to(tmp_path, report) for report in (first, second)]
    assert [path.name for path in paths] == ["cpu-2026-01-02.json", "cpu-2026-01-03.json"]
    assert "not measured: JAX: not installed" in (tmp_path / "cpu-2026-01-02.md").read_text()
    combined = Report.combine(paths)
    assert len(combined.rows["threads"]) == 6
    assert len(combined.rows["sums"]) == 2
    assert combined.about["date"] == ["2026-01-02T03:04", "2026-01-03T00:00"]
    done = CliRunner().invoke(
        table.main, ["--combine", "--output", str(tmp_path), *map(str, paths)]
    )
    assert done.exit_code == 0, done.output
    assert Report.read(tmp_path / "cpu-2026-01-02-2.json").rows == combined.rows


def test_a_case_of_a_later_report_replaces_all_programs_of_an_earlier_one(tmp_path: Path) -> None:
    one, two = make_report(), make_report()
    last = one.rows["threads"][-1]
    again = {**last, "program": "dptrain", "median_ms": 1.0}
    other = {**again, "network": "vgg"}
    two.rows = {"threads": [again, other]}
    combined = Report.combine([write_to(tmp_path, report) for report in (one, two)])
    combined = Report.combine([write_to(tmp_path, combined)])
    found = [(row["network"], row["threads"], row["program"]) for row in combined.rows["threads"]]
    assert found == [
        ("model0", 1, "dptrain"), ("model0", 1, "PyTorch eager"), ("model0", 1, "copies"),
        ("model0", 16, "dptrain"), ("vgg", 16, "dptrain"),
    ]  # fmt: skip
    assert combined.rows["threads"][3]["median_ms"] == 1.0
    assert combined.about["date"] == one.about["date"]


def test_a_later_run_of_the_day_leaves_the_earlier_one_alone(tmp_path: Path) -> None:
    names = [write_to(tmp_path, make_report()).name for _ in range(3)]
    assert names == ["cpu-2026-01-02.json", "cpu-2026-01-02-2.json", "cpu-2026-01-02-3.json"]


def test_one_table_has_all_devices_and_the_last_result_of_a_case() -> None:
    case = {"network": "model0", "batch": 32, "precision": "tf32"}
    reports = [make_report()]
    for ours, date in ((0.04, "2026-01-02"), (0.02, "2026-01-03")):
        report = gpu_report(row("dptrain cuda", ours, **case), row("PyTorch graph", 0.12, **case))
        reports.append(Report({**report.about, "date": date}, report.rows))
    rows = comparison_table(reports).rows
    assert [line[:3] for line in rows] == [
        ("training", "H200", "model0, batch 32, tf32, dptrain cuda"),
        ("training", "a processor", "model0, batch 256, 1 threads"),
        ("training", "a processor", "model0, batch 256, 16 threads"),
    ]
    assert rows[0][-2:] == ("6.00", "2026-01-03")


@pytest.mark.parametrize(("load", "warns"), [([0.3, 0.2, 0.1], False), ([13.7, 1.0, 1.0], True)])
def test_a_busy_machine_is_warned_of(load: list[float], warns: bool) -> None:
    report = make_report()
    report.about |= {"cores": 2, "load at the start": load}
    assert headline(report).startswith("warning: the machine was busy") is warns


def test_results_are_small(tmp_path: Path) -> None:
    rows = [row("dptrain cuda", 1 / 3, network=f"n{i}", batch=2) for i in range(100)]
    path = write_to(tmp_path, gpu_report(*rows))
    assert path.stat().st_size < 35_000
    assert json.loads(path.read_text())["rows"]["training"][0]["median_ms"] == 0.333333


def test_a_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"comparisons": []}')
    done = CliRunner().invoke(table.main, [str(path)])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1


def test_quartiles_are_those_of_the_rounds_or_the_stored_ones() -> None:
    """A single value has no quartiles: its own would claim a spread of 0."""
    alone = {"medians_ms": [2.0], "quartiles_ms": [1.5, 2.5]}
    assert time_of(alone) == "2 (1.5–2.5) ms"
    assert text_of(quotient([6.0], [2.0])) == "3.00"
    assert text_of(quotient([6.0, 8.0], [2.0, 2.0])) == "3.50 (3.25–3.75)"
