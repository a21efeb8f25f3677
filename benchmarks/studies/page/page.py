"""Write docs/studies.md and its plots from all results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.studies.claims import claims_a, claims_b, claims_d, judge_a, judge_b, judge_d
from benchmarks.studies.claims.verdicts import (
    NOT_MEASURED,
    VERDICTS,
    MissingResultError,
    Results,
    Row,
    Verdict,
)
from benchmarks.studies.measuring import load_measurements
from benchmarks.studies.page.cells import markdown
from benchmarks.studies.page.plots import PREFIX, draw_plots
from benchmarks.studies.page.tables import TABLES
from benchmarks.studies.store import Store
from dptrain.files import write_whole

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "studies.md"
IMAGES = ROOT / "docs" / "images"
TEMPLATE = Path(__file__).with_name("page.template")

INDEX: tuple[Row, ...] = (*judge_a.ROWS, *judge_b.ROWS, *judge_d.ROWS)
CLAIMS: tuple[Row, ...] = (*claims_a.ROWS, *claims_b.ROWS, *claims_d.ROWS)

Judged = list[tuple[Row, Verdict]]


def write_page(store: Store, page: Path = PAGE, images: Path = IMAGES) -> list[Path]:
    """Write the page and its plots; return the paths.

    Args:
        store: the results.
        page: path of the page.
        images: folder of the plots.
    """
    load_measurements()
    results = Results(store.results())
    written = []
    alts = {}
    for drawn in draw_plots(results):
        path = images / f"{drawn.name}.svg"
        write_whole(path, drawn.svg, "--output")
        alts[drawn.name.removeprefix(PREFIX)] = drawn.alt
        written.append(path)
    write_whole(page, fill(TEMPLATE.read_text(encoding="utf-8"), results, alts), "--output")
    return [page, *written]


def fill(template: str, results: Results, alts: Mapping[str, str]) -> str:
    """Replace the ``{{…}}`` of the template by tables, plots and sentences.

    Args:
        template: the text of the page.
        results: all results.
        alts: descriptions of the plots that exist, by name.
    """
    index: Judged = [(row, row.verdict(results)) for row in INDEX]
    claims: Judged = [(row, row.verdict(results)) for row in CLAIMS]
    parts: dict[str, Callable[[str], str]] = {
        "summary": lambda _: summary(index, claims),
        "index": lambda study: table_of([r for r in index if r[0].study == study]),
        "claims": lambda study: claims_table([r for r in claims if r[0].study == study]),
        "missing": lambda _: missing([*index, *claims], results),
        "variants note": lambda _: judge_d.variants_note(results),
        "plot": lambda name: f"![{alts[name]}](images/{PREFIX}{name}.svg)" if name in alts else "",
        "table": lambda name: _table(name, results),
    }

    def replace(match: re.Match[str]) -> str:
        text = match[1]
        if text in parts:
            return parts[text]("")
        kind, _, name = text.partition(" ")
        return parts[kind](name)

    filled = re.sub(r"\{\{([^}]+)\}\}", replace, template)
    return re.sub(r"\n{3,}", "\n\n", filled)


def _table(name: str, results: Results) -> str:
    try:
        return TABLES[name](results)
    except (MissingResultError, KeyError) as reason:
        return f"Not measured: {reason}."


def _verdict_cell(verdict: Verdict) -> str:
    if verdict.verdict == NOT_MEASURED:
        return f"[{NOT_MEASURED}](#not-measured)"
    reason = verdict.reason
    return f"**{verdict.verdict}**" + (f": {reason}" if reason else "")


def _ours_cell(verdict: Verdict) -> str:
    return verdict.ours + (f"; {verdict.hardware}" if verdict.hardware else "")


def table_of(judged: Judged) -> str:
    """Return the table of published results: number, origin, ours with the hardware, verdict."""
    rows = [
        (row.id, row.title, f"{row.published} ({row.mark})", _ours_cell(verdict),
         _verdict_cell(verdict))
        for row, verdict in judged
    ]  # fmt: skip
    return markdown(("", "result", "published", "ours", "verdict"), rows, of_text=True)


def claims_table(judged: Judged) -> str:
    """Return the table of claims."""
    rows = [
        (row.id, row.title + (f" ({row.published}, {row.mark})" if row.published
                              else f" ({row.mark})"),
         _ours_cell(verdict), _verdict_cell(verdict))
        for row, verdict in judged
    ]  # fmt: skip
    return markdown(("", "claim", "ours", "verdict"), rows, of_text=True)


def summary(index: Judged, claims: Judged) -> str:
    """Return how many results and claims have which verdict."""

    def counted(judged: Judged, what: str) -> str:
        counts = Counter(verdict.verdict for _, verdict in judged)
        text = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
        return f"{len(judged)} {what}: {text}"

    return f"{counted(index, 'published results')}. {counted(claims, 'claims')}."


def missing(judged: Judged, results: Results) -> str:
    """Return the results that were not measured, with the reasons."""
    lines = [
        f"- {row.id}, {row.title}: {verdict.reason}."
        for row, verdict in judged
        if verdict.verdict == NOT_MEASURED
    ]
    if accuracies := judge_d.accuracies_missing(results):
        lines.append(accuracies)
    return "\n".join(lines) or "Every result was measured."
