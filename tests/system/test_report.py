"""The report in a browser, as its reader has it: on a phone, on a desk, in the dark, on paper."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dptrain.report.comparisons.comparison import FILE as COMPARISON
from dptrain.report.files import REPORT, write_report
from dptrain.scaling.analysis import analyse
from dptrain.scaling.study import Study
from tests.system.browser import Browser
from tests.system.launch import succeed
from tests.unit.scaling.synthetic import Law, make_launches, write_study

pytestmark = pytest.mark.more

RANKS = (1, 2, 4, 8, 16)
WIDTHS = (360, 768, 1280)
KINDS = ("study", "profile", "run", "runs", "profiles", "studies")
"""Reports of one result, and comparisons of two."""
HOSTILE = "<script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"
SCALES = {"%": 100.0, "MB": 1e-6}
"""What a column multiplies its numbers with, by its unit."""

CELLS = """
[...document.querySelectorAll('table, dl.keys')].flatMap(box => {
  const units = [...box.querySelectorAll('thead th')].map(
    th => (th.querySelector('.unit')?.textContent ?? '').split(' ')[0]);
  return [...box.querySelectorAll('tbody th, tbody td, dd')].map(cell => ({
    file: box.dataset.file, unit: units[cell.cellIndex] ?? '', kind: cell.className,
    text: cell.textContent, numbers: [...cell.querySelectorAll('data')].map(
      data => ({text: data.textContent, value: data.value, source: data.dataset.from})),
  }));
})
"""
OUTSIDE = """
[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const t = text.getBoundingClientRect();
    return t.left < box.left - 1 || t.right > box.right + 1
      || t.top < box.top - 1 || t.bottom > box.bottom + 1;
  }).map(text => text.textContent);
})
"""
COVERED = """
[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text:not([transform])')].map(
    text => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([other, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.4 * a.height
  ).map(([other, b]) => [svg.querySelector('title').textContent, one, other]));
})
"""
PLOTS = """
[...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return {
    width: box.width, height: box.height, shapes: svg.querySelectorAll('path, use').length,
    name: svg.querySelector('title').textContent, alt: svg.querySelector('desc').textContent,
    role: svg.getAttribute('role'), caption: svg.parentNode.querySelector('figcaption').textContent,
    small: Math.min(...[...svg.querySelectorAll('text')].map(text =>
      parseFloat(getComputedStyle(text).fontSize) * box.width / svg.viewBox.baseVal.width)),
  };
})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study on 1 to 16 ranks that share 12 cores, and its report by the command line."""
    found = tmp_path_factory.mktemp("study")
    write_study(found, Law(cores=12, noise=0.01), RANKS)
    told = succeed("report", found)
    assert told == f"report: {found / REPORT}\n"
    return found


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with several numbers of threads, whose plots have more to say; no profiles."""
    found = tmp_path_factory.mktemp("crowded")
    launches = make_launches(Law(cores=16, noise=0.02), RANKS, threads=(1, 2, 4))
    analyse(launches).write(found / "study.json")
    write_report(found)
    return found


@pytest.fixture(scope="module")
def reports(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of reports of all kinds; the training runs are real ones."""
    found = tmp_path_factory.mktemp("reports")
    profiles = Study.read(folder / "study.json").profiles
    launches = [folder / profiles[name] for name in ("strong-r8-t1", "weak-r4-t1")]
    for launch in launches:
        write_report(launch)
    other = found / "other"
    write_study(other, Law(cores=16, noise=0.02, beta=9e-7), RANKS)
    options = ("--network", "model0", "--data", "digits", "--epochs", 3, "--threads", 1)
    runs = [found / "runs" / name for name in ("small", "large")]
    for run, rate in zip(runs, (0.002, 0.02), strict=True):
        succeed("train", *options, "--learning-rate", rate, "--run-dir", run)
    succeed("report", runs[0])
    compared = {"runs": runs, "profiles": launches, "studies": [folder, other]}
    for name, folders in compared.items():
        assert succeed("report", *folders, "--output", found / name) == (
            f"report: {found / name / REPORT}\n"
        )
    return {"study": folder, "profile": launches[0], "run": runs[0],
            **{name: found / name for name in compared}}  # fmt: skip


@pytest.fixture
def page(browser: Browser, folder: Path) -> Browser:
    """The study's page on a desk, in the light."""
    browser.resize(1280)
    browser.prefer("light")
    browser.open(folder / REPORT)
    return browser


def test_it_loads_without_complaint_and_asks_for_nothing(page: Browser) -> None:
    page.evaluate("document.title")
    methods = [event["method"] for event in page.events]
    assert not {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"} & {
        *methods
    }, page.events
    asked = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == asked[:1]
    assert asked[0].startswith("file:///")
    assert page.evaluate("document.scripts.length") == 0


def test_plots_are_there_and_say_what_they_show(page: Browser, folder: Path) -> None:
    plots = page.evaluate(PLOTS)
    drawn = {path.stem for path in (folder / "plots").glob("*.svg")}
    assert len(plots) == len(drawn) >= 12
    assert {path.stem for path in (folder / "plots").glob("*.png")} == drawn
    for plot in plots:
        assert plot["width"] > 250
        assert plot["height"] > 100
        assert plot["shapes"] > 10, plot
        assert plot["role"] == "img"
        assert plot["name"]
        assert plot["caption"]
        assert any(digit.isdigit() for digit in plot["alt"]), plot


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [*KINDS, "crowded"])
def test_no_word_of_a_plot_is_cut_off_or_too_small(
    browser: Browser, width: int, name: str, reports: dict[str, Path], crowded: Path
) -> None:
    browser.resize(width)
    browser.open({**reports, "crowded": crowded}[name] / REPORT)
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(COVERED) == []
    # The smallest type that people are asked to read in print is 6 points, 8 pixels.
    assert min(plot["small"] for plot in browser.evaluate(PLOTS)) >= 8.0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_makes_the_page_scroll_sideways(
    browser: Browser, reports: dict[str, Path], width: int, name: str
) -> None:
    browser.resize(width)
    browser.open(reports[name] / REPORT)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(
        "[...document.querySelectorAll('figure, .scroll, pre, dl, p, h1, h2, h3, li')].filter("
        f"box => box.getBoundingClientRect().right > {width}).length"
    ) == 0  # fmt: skip
    # No text is wider than its box, unless the box is a table that scrolls.
    assert browser.evaluate(
        "[...document.querySelectorAll('p, h1, h2, h3, dt, dd, li, pre, figcaption, .keys > div')]"
        ".filter(box => box.scrollWidth > box.clientWidth + 1 && box.clientWidth > 0)"
        ".map(box => box.textContent)"
    ) == []  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", KINDS)
def test_no_column_of_a_table_is_out_of_reach(
    browser: Browser, reports: dict[str, Path], width: int, name: str
) -> None:
    browser.resize(width)
    browser.open(reports[name] / REPORT)
    tables = browser.evaluate(
        "[...document.querySelectorAll('table')].map(table => {"
        " const box = table.closest('.scroll');"
        " box.scrollLeft = 1e6;"
        " return {title: box.getAttribute('aria-label'), scrolls: getComputedStyle(box).overflowX,"
        "  beyond: table.getBoundingClientRect().right - box.getBoundingClientRect().right,"
        "  wider: box.scrollWidth - box.clientWidth, focus: box.tabIndex}; })"
    )
    assert tables
    for table in tables:
        assert table["scrolls"] == "auto", table
        assert table["beyond"] <= 1, table
        assert table["focus"] == 0, table
    if width == 1280:
        assert [table for table in tables if table["wider"] > 0] == []


@pytest.mark.parametrize("name", KINDS)
def test_a_phone_shows_the_headline_and_a_plot_first(
    browser: Browser, reports: dict[str, Path], name: str
) -> None:
    browser.resize(360, height=800)
    browser.open(reports[name] / REPORT)
    boxes = browser.evaluate(
        "['.result', 'figure svg', '.keys', 'table'].map(name => {"
        " const box = document.querySelector(name).getBoundingClientRect();"
        " return [box.top, box.bottom]; })"
    )
    headline, plot, keys, table = boxes
    assert headline[1] <= plot[0] < plot[1] <= keys[0] < keys[1] <= table[0]
    assert plot[0] < 500
    assert plot[1] < 1000


@pytest.mark.parametrize("name", KINDS)
def test_every_number_is_that_of_the_record(
    browser: Browser, reports: dict[str, Path], name: str
) -> None:
    target = reports[name]
    browser.open(target / REPORT)
    cells = browser.evaluate(CELLS)
    records: dict[str, Any] = {}
    sources = set()
    for cell in cells:
        rest = cell["text"]
        for number in cell["numbers"]:
            exact, rest = float(number["value"]), rest.replace(number["text"], "", 1)
            assert rounds_to(number["text"], scale_of(cell, number["text"]) * exact), cell
            if "source" not in number:  # A sum, or a share, of numbers of the file.
                continue
            if cell["file"] not in records:
                records[cell["file"]] = record_of(target / cell["file"])
            assert exact == looked_up(records[cell["file"]], number["source"]), number
            sources.add((cell["file"], number["source"]))
        if "number" in cell["kind"].split():
            assert not re.search(r"\d", rest), f"a number without a source in {cell}"
    if name == "study":
        # The base of the efficiencies has none: its ratio to itself is no measurement.
        base = (0, len(RANKS))
        expected = {
            f"points.{i}.{quantity}.{end}"
            for i in range(2 * len(RANKS))
            for quantity in ("step_ms", "efficiency", "speed_up", "samples_per_s")
            for end in ("value", "low", "high")
            if quantity in ("step_ms", "samples_per_s") or i not in base
        }
        assert expected <= {source for file, source in sources if file == "study.json"}
    if name == "run":
        assert {"metrics.jsonl", "summary.json"} <= {file for file, _ in sources}
    assert len(sources) >= 7


def record_of(path: Path) -> Any:
    """The contents of a JSON file, or the lines of a ``.jsonl`` file."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def scale_of(cell: dict[str, Any], text: str) -> float:
    """What a number was multiplied with: a card has its unit after the number."""
    if cell["file"] == COMPARISON:
        return 1.0
    if cell["kind"] in ("value", "detail"):
        return 100.0 if f"{text}%" in re.sub(r"\s(?=%)", "", cell["text"]) else 1.0
    return SCALES.get(cell["unit"], 1.0)


def looked_up(record: Any, source: str) -> Any:
    """The value at ``points.3.step_ms.value``."""
    for key in source.split("."):
        record = record[int(key)] if isinstance(record, list) else record[key]
    return record


def rounds_to(text: str, exact: float) -> bool:
    """Whether a number as it is read is the exact one, rounded to the decimals it shows."""
    plain = re.sub(r"\s", "", text).replace("−", "-")
    decimals = len(plain.partition(".")[2])
    return math.isclose(float(plain), exact, abs_tol=0.5000001 * 10**-decimals, rel_tol=0)


def test_it_is_dark_where_the_reader_wants_it(page: Browser) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        seen[scheme] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('figure svg text')).fill]"
        )
    luminance = {
        scheme: [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
        for scheme, colours in seen.items()
    }
    assert luminance["light"][0] > 700 > 300 > luminance["light"][1]
    assert luminance["dark"][0] < 100 < 450 < luminance["dark"][1]


def test_paper_has_every_section_on_white(page: Browser) -> None:
    page.prefer("dark")
    headings = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => h.textContent)")
    printed = page.print()
    pages = len(re.findall(rb"/Type /Page\b", printed))
    assert 5 <= pages <= 30
    titles = outline(printed)
    assert [title for title in headings if title not in titles] == []
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.call("Emulation.setEmulatedMedia", media="", features=[])
    assert ground == "rgb(255, 255, 255)"


def outline(pdf: bytes) -> list[str]:
    """Titles in a PDF's table of contents, which are plain or UTF-16 strings."""
    found = []
    for raw, coded in re.findall(rb"/Title (?:\(((?:[^()\\]|\\.)*)\)|<([0-9A-Fa-f]+)>)", pdf):
        if coded:
            found.append(bytes.fromhex(coded.decode()).decode("utf-16"))
        else:
            text = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), raw)
            text = re.sub(rb"\\(.)", rb"\1", text)
            found.append(
                text.decode("utf-16") if text.startswith(b"\xfe\xff") else text.decode("latin-1")
            )
    return found


def test_names_stay_text(browser: Browser, folder: Path, tmp_path: Path) -> None:
    study = Study.read(folder / "study.json")
    job = {**study.job, "network": HOSTILE, "data": HOSTILE}
    environment = {**study.environment, "host": HOSTILE, "command": ["dptrain", HOSTILE]}
    replace(
        study, job=job, environment=environment, conclusion=(HOSTILE,), notes=(HOSTILE,),
        profiles={}, commands={HOSTILE: HOSTILE},
    ).write(tmp_path / "study.json")  # fmt: skip
    browser.open(write_report(tmp_path))
    assert browser.evaluate("document.title") == f"Scaling of {HOSTILE}"
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.evaluate("document.body.textContent.split('<script>').length") >= 7
