"""Every table of every kind of report: its numbers are those of its file, in each of its forms."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dptrain.audit.coverage import Coverage
from dptrain.audit.noise import Noise
from dptrain.audit.study import AUDIT, Audit, Interval
from dptrain.files import parse_json
from dptrain.measure.machine.energy import Energy
from dptrain.measure.profile.known import KnownLoss
from dptrain.measure.profile.profile_files import LOSSES, PROFILE
from dptrain.measure.statistics import Estimate
from dptrain.report.comparisons.compare_page import compare_page
from dptrain.report.comparisons.comparison import FILE, compare_runs
from dptrain.report.elements.page import Page, render
from dptrain.report.files import make_page, read_result
from dptrain.report.runs.run_record import TrainingRun
from dptrain.scaling.analysis import analyse
from dptrain.scaling.files import POINTS, write_study
from dptrain.tables import Column, Number, Table
from dptrain.tables.latex import latex
from dptrain.tables.text import markdown
from tests.unit.measure.test_losses import known, record
from tests.unit.report.test_bench_page import random_benchmark, write_benchmark
from tests.unit.report.test_experiment_page import random_sweep, write_sweep
from tests.unit.report.test_files import Reader
from tests.unit.report.test_runs import write_run
from tests.unit.scaling.synthetic import Law, make_launches, make_profile
from tests.unit.scaling.test_efficiencies import with_pop

CONFUSION = "class,a,b,c\na,100,10,10\nb,5,110,5\nc,0,0,120\n"


def study(folder: Path, *, threads: tuple[int, ...] = (1,)) -> None:
    """Write a study with profiles, POP efficiencies, energies, forecasts and an audit."""
    energy = Energy(Estimate(0.5, 0.4, 0.6, 10), 100.0, ("package-0",), ())
    law = Law(per_node=1, sample=2.0, noise=0.005)
    launches = [
        replace(m, profile=replace(with_pop(m.profile), energy=energy))
        for m in make_launches(law, (1, 2, 4, 8), threads=threads)
    ]
    for measured in launches:
        (folder / measured.folder).mkdir(parents=True)
        measured.profile.write(folder / measured.folder / PROFILE)
    found = analyse(launches)
    write_study(found, folder)
    names = {p.name: tuple(launch.step_ms for launch in p.launches) for p in found.points}
    noises = {name: Noise(burst_share=0.1 * (i % 2)) for i, name in enumerate(names)}
    intervals = (
        Interval(found.points[1].name, "efficiency", Coverage(100, 90, 60, 0.1)),
        Interval(found.points[1].name, "step_ms", Coverage(100, 0, 0, 0.0)),
    )
    Audit(names, noises, intervals).write(folder / AUDIT)


def profile(folder: Path) -> None:
    """Write a profile with losses."""
    with_pop(make_profile(Law(), ranks=2, batch_size=64)).write(folder / PROFILE)
    losses = record(known(noise=0.1))
    injected = KnownLoss("delay", (5.0,) * 8, tuple(5.0 + 0.01 * i for i in range(8)))
    replace(losses, known=(injected, KnownLoss("message", reason="one rank"))).write(
        folder / LOSSES
    )


def run(folder: Path) -> None:
    """Write a run with a confusion matrix."""
    write_run(folder / "run", ranks=2)
    (folder / "run" / "confusion.csv").write_text(CONFUSION)
    for path in (folder / "run").iterdir():
        path.rename(folder / path.name)


def sweep(seed: int, folder: Path) -> None:
    """Write a random sweep."""
    write_sweep(random_sweep(random.Random(seed)), folder)


def bench(seed: int, folder: Path) -> None:
    """Write a random benchmark."""
    write_benchmark(random_benchmark(seed), folder)


KINDS: dict[str, Callable[[Path], None]] = {
    "threads": lambda folder: study(folder, threads=(1, 2)),
    "profile": profile,
    "run": run,
    **{f"sweep {seed}": partial(sweep, seed) for seed in (0, 3)},
    **{f"bench {seed}": partial(bench, seed) for seed in (1, 3)},
}


def comparison_of(tmp_path: Path) -> Page:
    """Return the comparison of two runs, and write its file."""
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", accuracy=0.8, step_ms=3.0)]
    results = [TrainingRun.read(folder) for folder in folders]
    found = compare_runs(results)
    (tmp_path / FILE).write_text(found.text())
    return compare_page(found, results)


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """A folder with a study, and its page."""
    folder = tmp_path_factory.mktemp("study")
    study(folder)
    return folder, make_page(read_result(folder), folder)


@pytest.fixture(scope="module", params=["study", *KINDS, "comparison"])
def reported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Page]:
    """A folder with results, and its page."""
    if request.param == "study":
        return request.getfixturevalue("studied")  # type: ignore[no-any-return]
    folder = tmp_path_factory.mktemp("results")
    if request.param == "comparison":
        return folder, comparison_of(folder)
    KINDS[request.param](folder)
    return folder, make_page(read_result(folder), folder)


def tables(page: Page) -> list[Table]:
    return [table for section in page.sections for table in section.tables]


def numbers(table: Table) -> Iterator[tuple[Column, Number]]:
    for column in table.columns:
        for cell in column.cells:
            yield from ((column, part) for part in cell if isinstance(part, Number))


def contents(path: Path) -> Any:
    """The values of a file: of JSON, of lines of JSON, or of the rows of CSV."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    return list(map(parse_json, text.splitlines())) if path.suffix == ".jsonl" else parse_json(text)


def value_at(values: Any, source: str) -> float:
    for name in source.split("."):
        values = values[int(name)] if isinstance(values, list) else values[name]
    return float(values)


def test_each_number_is_that_of_its_file(reported: tuple[Path, Page]) -> None:
    folder, page = reported
    count = 0
    for table in tables(page):
        sourced = [number for _, number in numbers(table) if number.source]
        values = contents(folder / table.file) if sourced else None
        for number in sourced:
            written = value_at(values, number.source)
            # An interval of an accuracy ends at 0% and 100%.
            is_limit = number.part in ("low", "high") and number.value in (0.0, 1.0)
            assert number.value == written or is_limit, (table.name, number)
        count += len(sourced)
    assert count > 0


def test_csv_has_the_exact_numbers(reported: tuple[Path, Page]) -> None:
    for table in tables(reported[1]):
        lines = list(csv.reader(table.to_csv().splitlines()))
        assert len(lines) == 1 + len(table.rows)
        assert len(set(lines[0])) == len(lines[0])
        for row, line in zip(table.rows, lines[1:], strict=True):
            exact = [part.value for cell in row for part in cell if isinstance(part, Number)]
            found = [float(text) for text in line if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text)]
            assert all(value in found for value in exact), (table.name, line)


def test_html_has_each_number_once_in_order(reported: tuple[Path, Page], tmp_path: Path) -> None:
    _, page = reported
    path = tmp_path / "page.html"
    path.write_text(render(replace(page, keys=())))
    elements = [names for tag, names in Reader(path).elements if tag == "data"]
    expected = [
        part
        for table in tables(page)
        for row in table.rows
        for cell in row
        for part in cell
        if isinstance(part, Number)
    ]
    assert [float(str(names["value"])) for names in elements] == [n.value for n in expected]
    assert [names.get("data-from") or "" for names in elements] == [n.source for n in expected]


def test_papers_and_terminals_have_each_text(reported: tuple[Path, Page]) -> None:
    for table in tables(reported[1]):
        printed, text = table.to_latex(), table.to_markdown()
        for cell in (cell for row in table.texts for cell in row if cell):
            assert latex(cell) in printed
            assert markdown(cell) in text
        shown = replace(table, columns=tuple(c for c in table.columns if not c.is_detail))
        for width in (60, 80, 120, None):
            lines = table.lines(width)
            assert width is None or max(map(len, lines)) <= width
            joined = re.sub(r"\s", "", "".join(lines))
            words = [part.text for _, part in numbers(shown)]
            assert all(re.sub(r"\s", "", w.replace("\u202f", ",")) in joined for w in words)


def test_each_quantity_is_defined(reported: tuple[Path, Page]) -> None:
    """Columns of a comparison are its results, whose rows name the quantities."""
    for table in tables(reported[1]):
        for column in table.columns:
            is_defined = column.term is not None or table.name == "quantities"
            assert is_defined or not column.is_numeric, (table.name, column.head)


def test_names_in_csv_are_those_of_the_files_of_a_study(studied: tuple[Path, Page]) -> None:
    folder, page = studied
    names = set((folder / POINTS).read_text().splitlines()[0].split(","))
    points = [table for table in tables(page) if table.name.startswith("points-")]
    assert len(points) == 2
    for table in points:
        assert set(table.to_csv().splitlines()[0].split(",")) <= names


def test_headings_have_definitions_as_tooltips(
    studied: tuple[Path, Page], tmp_path: Path
) -> None:  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(render(studied[1]))
    titles = [names.get("title") for tag, names in Reader(path).elements if tag == "th"]
    assert "Throughput in samples/s over that of the smallest point." in titles
