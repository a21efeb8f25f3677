"""Measuring, resuming, and what follows from times."""

from __future__ import annotations

import csv
import json
import random
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain
from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.experiments import bench as module
from dptrain.experiments.bench import bench
from dptrain.experiments.cases import INFERENCE, LARGEST, TRAINING, BenchSettings, Case
from dptrain.experiments.findings import View, find, rows, saturation
from dptrain.experiments.measuring import (
    Result,
    inference_run,
    measure,
    training_run,
)
from dptrain.experiments.memory_budget import Largest
from dptrain.experiments.tables import comparison_tables, findings_table
from dptrain.experiments.timing import Timing
from dptrain.files import dump_json, parse_json
from dptrain.measure.console import make_console
from dptrain.measure.profile.analysis import spread
from dptrain.network.random_batch import random_batch
from dptrain.records import from_values
from tests.tiers import tiered

SETTINGS = BenchSettings(("mlp-50",), batch_sizes=(2, 8), samples=(3,), largest=True,
                    seconds_per_case=0.02, memory=2_000_000)  # fmt: skip


def measured(task: str, samples: int, memory: int | None = None, backend: str = "numba") -> Result:
    network = dptrain.get_network("model-small")
    case = Case("model-small", task, samples, backend, "fp32", 1)
    chosen = load_backend(backend)
    return measure(case, network, chosen, budget_s=0.02, memory=memory)


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_steps_are_those_of_training_and_leave_parameters_alone(backend: str) -> None:
    network = dptrain.get_network("mlp-50-25")
    replica = dptrain.make_replica(network, backend=backend, batch_size=4, optimizer=dptrain.Adam())
    before = {name: value.copy() for name, value in replica.parameters.items()}
    run = training_run(replica, 4)
    assert all(run() > 0 for _ in range(12))
    assert replica.updates == 12
    x, y = random_batch(network, 4)
    replica.forward_backward(x, y)
    assert any(np.abs(gradient).max() > 0 for gradient in replica.gradients.values())
    for name, value in replica.parameters.items():
        np.testing.assert_array_equal(value, before[name])


def test_answers_are_to_all_samples() -> None:
    network = dptrain.get_network("mlp-50-25")
    replica = dptrain.make_replica(network, batch_size=3, training=False)
    run = inference_run(replica, 7)
    assert run() > 0
    # In pieces of three: the last one holds the seventh sample alone.
    assert replica.context.n == 1


@pytest.mark.parametrize("backend", tiered(["numba", "cuda"], ["numba"]))
def test_a_figure_has_its_rate(backend: str) -> None:
    result = measured(TRAINING, 2, backend=backend)
    assert result.fits
    assert result.timing is not None
    assert result.samples_per_s == pytest.approx(2 / result.median_ms * 1e3)
    flops = sum(n.flops.forward for n in dptrain.get_network("model-small").nodes) * 2
    assert result.gflops * result.median_ms * 1e6 > 2 * flops
    # Beside the plan, a batch lies on the host.
    assert 0 <= result.needed_bytes - result.allocated_bytes <= 2 * (4 * 3 * 16 * 16 + 12)
    assert from_values(Result, parse_json(dump_json(asdict(result)))) == result


def test_what_does_not_fit_says_so() -> None:
    result = measured(TRAINING, 1000, memory=1_000_000)
    assert not result.fits
    assert result.timing is None
    assert result.needed_bytes > result.available_bytes == 1_000_000
    assert "of 1.00 MB" in result.why


def test_inference_that_does_not_fit_runs_in_parts() -> None:
    result = measured(INFERENCE, 1000, memory=1_000_000)
    assert result.fits
    assert 1 <= result.batch_size < 1000
    assert result.why == f"in parts of {result.batch_size} samples"
    assert result.needed_bytes <= 1_000_000


def test_the_largest_batch_follows_from_the_plan() -> None:
    result = measured(LARGEST + TRAINING, 0, memory=1_000_000)
    assert result.fits
    assert result.largest is not None
    assert result.timing is None
    assert result.samples == result.largest.batch_size > 1
    assert not measured(TRAINING, result.samples + 1, memory=1_000_000).fits


def test_no_sample_fits() -> None:
    result = measured(LARGEST + INFERENCE, 0, memory=10_000)
    assert not result.fits
    assert result.samples == 0
    assert "for one sample" in result.why


def test_a_failed_allocation_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(type(load_backend("numba")), "allocate", refuse)
    result = measured(TRAINING, 2)
    assert not result.fits
    assert "the allocation failed" in result.why


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_continues(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_cases: list[str] = []
    monkeypatch.setattr("dptrain.experiments.plots.plot_bench", lambda *_: [])

    def measure_and_stop(case: Case, *arguments: Any, **options: Any) -> Result:
        measured_cases.append(case.key)
        if len(measured_cases) == 2:
            signal.raise_signal(number)
        return measure(case, *arguments, **options)

    monkeypatch.setattr(module, "measure", measure_and_stop)
    stopped = bench(SETTINGS, View(), tmp_path, verbose=False)
    assert stopped["stopped"]
    assert len(stopped["results"]) == 2
    kept = (tmp_path / "bench.jsonl").read_text()

    def measure_and_count(case: Case, *arguments: Any, **options: Any) -> Result:
        measured_cases.append(case.key)
        return measure(case, *arguments, **options)

    monkeypatch.setattr(module, "measure", measure_and_count)
    found = bench(SETTINGS, View(), tmp_path, verbose=False)
    assert not found["stopped"]
    assert len(measured_cases) == len(set(measured_cases)) == len(found["results"]) == 5
    assert (tmp_path / "bench.jsonl").read_text().startswith(kept)
    again = bench(SETTINGS, View(within_s=1e-9), tmp_path, verbose=False)
    assert len(measured_cases) == 5
    assert again["results"] == found["results"]
    assert again["findings"][0]["too_slow"] == (3,)
    with pytest.raises(UserError, match="measured with batch sizes 2,8, but this command has 2;"):
        bench(replace(SETTINGS, batch_sizes=(2,)), View(), tmp_path, verbose=False)


@pytest.mark.more
def test_files_contain_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(SETTINGS, View(epoch_samples=100), tmp_path)
    rows = list(csv.DictReader((tmp_path / "bench.csv").read_text().splitlines()))
    assert len(rows) == len(found["results"])
    steps = {8: 13, 2: 50}
    for row, result in zip(rows, found["results"], strict=True):
        assert row["task"] == result["task"]
        if row["task"] == TRAINING:
            expected = steps[int(row["samples"])] * float(row["median_ms"]) / 1e3
            assert float(row["training_s"]) == pytest.approx(expected)
    assert (tmp_path / "training-by-batch.svg").read_text().count("<svg") == 1
    assert (tmp_path / "training-by-batch.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "5 cases to measure, estimated" in text
    assert "saturates at" in text
    json.dumps(found)


def result_of(task: str, samples: int, ms: float, network: str = "net") -> Result:
    timing = Timing(spread(np.full(5, ms)), 0, 3, ms)
    return Result(network, task, samples, "numba", "fp32", 1, 10, True, "", 1, 2, samples,
                  timing=timing, samples_per_s=samples / ms * 1e3)  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ({32: 799, 64: 882, 128: 1086, 256: 979, 512: 383}, "128; slower beyond 256"),
        ({2: 10, 8: 95, 32: 83, 64: 95, 128: 100}, "8"),
        ({2: 10, 8: 20, 32: 100}, "above 32"),
        ({2: 100, 8: 100}, "2 or less"),
        ({2: 100, 8: 50}, "2 or less; slower beyond 2"),
        ({1000: 1, 2000: 100, 4000: 100}, "2,000"),
        ({2: 100}, "None"),
        ({}, "None"),
    ],
)
def test_the_text_of_saturation(rates: dict[int, float], text: str) -> None:
    assert str(saturation({n: 1e3 / rate for n, rate in rates.items()})) == text


def test_the_summary_has_no_column_without_values() -> None:
    timed = [result_of(TRAINING, n, 10.0 / n) for n in (2, 8)]
    searched = [replace(result_of(LARGEST + TRAINING, 700, 9.0), largest=Largest(700, 1, 3))]
    for results, extra in ((timed + searched, ("saturates at", "best samples/s")), (searched, ())):
        table = findings_table(find(results, View()), View(), "numba")
        headings = ("network", "parameters", *extra)
        assert tuple(table.heads) == headings
        assert ("saturates at" in table.note) is bool(extra)


def test_saturation_is_where_no_larger_batch_is_much_faster() -> None:
    """Random curves that rise, fall again, or scatter."""
    for seed in range(500):
        random_ = random.Random(seed)
        sizes = sorted(random_.sample(range(1, 4096), random_.randint(2, 10)))
        peak = random_.choice(sizes)
        falls = random_.choice((0, 0.5, 3))
        rates = {
            n: min(n / peak, 1) / (1 + falls * max(n - peak, 0) / peak) * random_.uniform(0.9, 1)
            for n in sizes
        }
        found = saturation({n: 1 / rate for n, rate in rates.items()})
        assert found is not None
        text = str(found)
        # The definition by larger batches: none of them is faster by more than a ninth.
        first = next(
            n
            for n in sizes
            if all(0.9 * rates[m] <= rates[n] * (1 + 1e-12) for m in sizes if m > n)
        )
        best = max(sizes, key=lambda n: rates[n])
        assert found.batch_size == first <= best, seed
        slower = [n for n in sizes if n > found.end]
        assert all(rates[n] < 0.9 * rates[best] for n in slower), seed
        assert ("slower beyond" in text) == bool(slower), seed
        assert text.startswith("above") == (first == sizes[-1]), seed


def test_findings_summarise_the_results() -> None:
    results = [
        result_of(TRAINING, 2, 20.0),
        result_of(TRAINING, 64, 65.0),
        result_of(TRAINING, 128, 128.0),
        result_of(INFERENCE, 2, 5.0),
        result_of(INFERENCE, 512, 1000.0),
        result_of(INFERENCE, 1024, 1000.1),
        replace(result_of(LARGEST + TRAINING, 700, 9.0), largest=Largest(700, 1, 3)),
    ]  # fmt: skip
    view = View(within_s=1.0, epoch_samples=1000, epochs=5)
    (finding,) = find(results, view)
    assert str(finding.saturation) == "64"
    assert finding.samples_per_s == 1000.0
    assert (finding.in_time, finding.too_slow) == ((2, 512), (1024,))
    assert (finding.largest_training, finding.largest_inference) == (700, None)
    # 5 epochs of 16 steps of 65 ms.
    assert view.training_s(results[1]) == pytest.approx(5.2)


def test_configurations_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = result_of(TRAINING, 2, 20.0), result_of(TRAINING, 2, 4.0)
    alone = result_of(TRAINING, 64, 30.0)
    results = [replace(slow, backend="reference"), fast, alone]
    for table in comparison_tables(results):
        make_console().print(table)
    text = capsys.readouterr().out
    assert "numba fp32, 5.0×" in text
    assert text.count("numba fp32, ") == 1
    assert "Comparison: forward pass" not in text
    assert not comparison_tables([fast, alone])


def test_every_column_is_defined_in_the_documentation() -> None:
    text = (Path(dptrain.__file__).parents[1] / "docs/reference/bench.md").read_text(
        encoding="utf-8"
    )
    section = text.partition("\n## Of a line in bench.csv\n")[2].partition("\n## ")[0]
    defined = {name for line in section.splitlines() if line.startswith("| `")
               for name in re.findall("`([a-z0-9_]+)`", line.split("|")[1])}  # fmt: skip
    assert defined == set(rows([result_of(TRAINING, 2, 1.0)], View())[0])
