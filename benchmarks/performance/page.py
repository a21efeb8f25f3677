"""The page on performance: a template whose markers name results."""

from __future__ import annotations

import csv
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.performance.tables import TABLES, pivot, threads_text
from benchmarks.report import Report
from benchmarks.tables import markdown, three_digits

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "developers" / "performance.md"
TEMPLATE = Path(__file__).with_name("page.template")
RESULTS = ROOT / "benchmarks" / "results"
MARKER = re.compile(r"^\{\{([\w-]+)((?: [\w-]+)+)\}\}$", re.MULTILINE)
VERSIONS = {"torch": "PyTorch", "jax": "JAX", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
WIDTHS = {"512 bits": "AVX-512", "256 bits": "AVX2"}


def page(template: str | None = None) -> str:
    """Return the text of the page.

    Args:
        template: text with markers such as ``{{training gpu-2026-11-26}}``: the name of a table of
            `TABLES`, and the names of results, of which later ones replace equal cases of earlier
            ones. Each marker becomes the table and a line with its conditions and sources.

    Raises:
        KeyError: a marker names a table that does not exist.
        OSError: a marker names a result that does not exist.
    """
    text = TEMPLATE.read_text(encoding="utf-8") if template is None else template
    return MARKER.sub(lambda marker: _table(marker[1], marker[2].split()), text)


def _table(kind: str, names: Sequence[str]) -> str:
    if kind == "classifiers":
        return _classifiers([RESULTS / f"{name}.csv" for name in names])
    reports = [_read(name) for name in names]
    head, rows = TABLES[kind](reports)
    links: dict[str, list[str]] = {}
    for name, report in zip(names, reports, strict=True):
        link = f"[{name}](../../benchmarks/results/{name}.md)"
        links.setdefault(conditions(report.about), []).append(link)
    sources = [(shown, "<br>".join(found)) for shown, found in links.items()]
    shown = markdown(("measured on", "runs"), sources, of_text=True)
    # A narrow cell breaks before an interval, not within it.
    table = re.sub(r"(?<=\d)–(?=\d)", "–&NoBreak;", markdown(head, rows))
    return f"{table}\n\n{shown}"


def _classifiers(paths: Sequence[Path]) -> str:
    """Return the ratios that `benchmarks.zoo.steps` measured, the smallest first.

    A later row replaces an earlier one of the same case.
    """
    ratios, cells = dict[tuple[str, str], float](), dict[tuple[Hashable, Hashable], str]()
    measured: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name, ratio = "{network} ({library}), {size}²".format_map(row), float(row["ratio"])
                where = (
                    "GPU" if row["backend"] in ("cuda", "cudnn") else threads_text(row["threads"])
                )
                column = f"{where}, {row['precision']}, batch {row['batch']}"
                cells[name, column] = f"{ratio:.2f}<br>{three_digits(float(row['samples/s']))}/s"
                ratios[name, column] = ratio
                day = row["date"].partition("T")[0]
                measured.setdefault((row["machine"], row["versions"]), set()).add(day)
    smallest: dict[Hashable, float] = {}
    for (name, _), ratio in ratios.items():
        smallest[name] = min(ratio, smallest.get(name, ratio))
    ordered = sorted(cells, key=lambda cell: smallest[cell[0]])
    head, lines = pivot("classifier", {cell: cells[cell] for cell in ordered})
    conditions = [(f"{machine}, {versions}", ", ".join(sorted(days)))
                  for (machine, versions), days in measured.items()]  # fmt: skip
    shown = markdown(("measured on", "dates"), conditions, of_text=True)
    return f"{markdown(head, lines)}\n\n{shown}"


def _read(name: str) -> Report:
    """Read a result, which may be compressed."""
    path = RESULTS / f"{name}.json"
    return Report.read(path if path.exists() else path.with_suffix(".json.gz"))


def conditions(about: Mapping[str, Any]) -> str:
    """Return a line with the hardware, the versions and the date of a result.

    Example:
        >>> about = {"cpu": "AMD EPYC", "cores": 2, "vectors": "256 bits", "date": "2026-11-28T10"}
        >>> conditions({**about, "versions": {"torch": "2.13.0+cpu"}})
        'AMD EPYC (AVX2), 2 cores, PyTorch 2.13.0, 2026-11-28'
    """
    dates = about["date"] if isinstance(about["date"], list) else [about["date"]]
    days = sorted({date.partition("T")[0] for date in dates})
    versions = [f"{shown} {about['versions'][key].partition('+')[0].partition('-')[0]}"
                for key, shown in VERSIONS.items() if key in about["versions"]]  # fmt: skip
    if "gpu" in about:
        number, _, model = about["gpu"].partition(" × ")
        hardware = [f"{number} {model.removesuffix(' 80GB HBM3')}"]
    else:
        cores = about["cores"]
        width = WIDTHS.get(about["vectors"], about["vectors"])
        model = about["cpu"].replace("(R)", "").replace(" Processor", "")
        hardware = [f"{model} ({width})", f"{cores} core{'s' * (cores != 1)}"]
    return ", ".join([*hardware, *versions, " to ".join(dict.fromkeys((days[0], days[-1])))])
