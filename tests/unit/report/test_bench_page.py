"""Pages of benchmarks: the numbers of bench.csv, whatever these are."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from dptrain.errors import UserError
from dptrain.experiments.bench import read_results
from dptrain.experiments.cases import INFERENCE, TRAINING
from dptrain.experiments.findings import View, rows
from dptrain.experiments.ledger import write_csv
from dptrain.experiments.measuring import Result
from dptrain.experiments.timing import Timing
from dptrain.measure.profile.analysis import spread
from dptrain.report.files import write_report
from dptrain.report.paper.files import write_paper
from dptrain.report.studies.bench_page import Benchmark, bench_page
from tests.unit.report.test_files import HOSTILE, Reader

FACTS = {"networks": ["a"], "processor": "CPU", "cores": 2, "dptrain": "1.0", "memory": None}
SEARCH = "largest training"


def random_result(random_: random.Random, network: str, parameters: int) -> Result:
    """Return the result of a case: timed, searched or refused."""
    task = random_.choice((TRAINING, TRAINING, INFERENCE, SEARCH))
    samples, fits = random_.choice((1, 8, 64, 4096)), random_.random() < 0.8
    times = np.exp(np.array([random_.gauss(0.0, 2.0) for _ in range(9)]))
    timing = None
    if fits and task != SEARCH:
        timing = Timing(time_ms=spread(times), first_ms=1.0, warm_up=1, outliers=2)
    return Result(
        network, task, samples, "numba", "fp32", random_.choice((1, 2)), parameters, fits,
        "" if fits else "too large", 10**6, 10**9, samples, 5000, timing=timing,
        samples_per_s=0.0 if timing is None else 1e3 * samples / timing.time_ms.median,
        gflops=random_.random() * 100, other_cores=random_.choice((None, 0.0, 1.5)),
    )  # fmt: skip


def random_benchmark(seed: int) -> Benchmark:
    random_ = random.Random(seed)
    networks = random_.sample(["model0", HOSTILE, r"$\x{$"], random_.randint(1, 3))
    found = {}
    for _ in range(random_.randint(1, 12)):
        place = random_.randrange(len(networks))
        result = random_result(random_, networks[place], 1000 * (place + 1))
        found[result.case.key] = result
    return Benchmark(FACTS, tuple(found.values()))


def write_benchmark(found: Benchmark, folder: Path) -> None:
    (folder / "bench.json").write_text(json.dumps(found.settings))
    lines = [json.dumps({"case": r.case.key, **asdict(r)}) for r in found.results]
    (folder / "bench.jsonl").write_text("\n".join(lines) + "\n")
    write_csv(folder / "bench.csv", rows(found.results, View()))


@pytest.mark.parametrize("seed", range(8))
def test_each_number_of_the_page_is_in_the_file(seed: int, tmp_path: Path) -> None:
    found = random_benchmark(seed)
    write_benchmark(found, tmp_path)
    assert tuple(read_results(tmp_path)[1]) == found.results
    page = Reader(write_report(tmp_path))
    written = list(csv.DictReader((tmp_path / "bench.csv").read_text().splitlines()))
    numbers = [attributes for tag, attributes in page.elements if tag == "data"]
    for attributes in numbers:
        row, _, name = str(attributes["data-from"]).partition(".")
        assert float(str(attributes["value"])) == float(written[int(row)][name])
    timed = sum(bool(row["median_ms"]) for row in written)
    assert len(numbers) >= 5 * timed
    for result in found.results:
        assert result.fits or result.case.searches or "too large" in page.text
    paper = write_paper(tmp_path)
    assert (paper / "values.tex").exists()


def test_the_headline_is_the_highest_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dptrain.report.studies.bench_page._plots", lambda *_: [])
    for seed in range(200):
        found = random_benchmark(seed)
        timed = [r for r in found.results if r.timing is not None]
        head = bench_page(found).headline
        trained = [r for r in timed if r.task == TRAINING]
        if not timed:
            assert head == "Nothing was timed."
            continue
        best = max(trained or timed, key=lambda r: r.samples_per_s)
        assert f"{best.network} {'trains' if trained else 'infers'} up to " in head, seed
        assert f"{best.samples_per_s:,.0f}" in head, seed


def test_other_load_is_the_first_restriction() -> None:
    for seed in range(50):
        found = random_benchmark(seed)
        is_loaded = any(r.other_cores for r in found.results)
        assert bench_page(found).notes[0].startswith("Other programs used") == is_loaded


def test_a_damaged_benchmark_is_one_error(tmp_path: Path) -> None:
    write_benchmark(random_benchmark(1), tmp_path)
    lines = (tmp_path / "bench.jsonl").read_text()
    for text in ('{"case": "x"}\n', lines.replace('"network"', '"net"')):
        (tmp_path / "bench.jsonl").write_text(text)
        with pytest.raises(UserError, match="repeat its `dptrain bench` command"):
            write_report(tmp_path)
