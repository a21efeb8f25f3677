"""Write docs/studies.md and its plots from all results."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.studies.claims.judgements import NOT_MEASURED, RULES, VERDICTS
from benchmarks.studies.claims.reader import Row, Verdict, all_rows
from benchmarks.studies.claims.results import MissingResultError, Results
from benchmarks.studies.measuring import load_measurements
from benchmarks.studies.page.plots import PREFIX, draw_plots
from benchmarks.studies.page.tables import machines, raw_results, table
from benchmarks.studies.store import Store
from benchmarks.tables import markdown
from dptrain.files import write_whole

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "studies.md"
IMAGES = ROOT / "docs" / "images"
TEMPLATE = Path(__file__).with_name("page.template")

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
    judged: Judged = [(row, row.judge(results)) for row in all_rows()]
    index = [each for each in judged if not each[0].is_claim]
    claims = [each for each in judged if each[0].is_claim]
    parts: dict[str, Callable[[str], str]] = {
        "summary": lambda _: summary(index, claims),
        "index": lambda study: table_of([r for r in index if r[0].study == study]),
        "claims": lambda study: claims_table([r for r in claims if r[0].study == study]),
        "missing": lambda _: missing(judged),
        "rules": lambda _: rules(),
        "plot": lambda name: f"![{alts[name]}](images/{PREFIX}{name}.svg)" if name in alts else "",
        "table": lambda name: _table(name, results),
        "machines": lambda _: machines(results),
        "raw": lambda _: raw_results(results, served(judged)),
    }

    def replace(match: re.Match[str]) -> str:
        kind, _, name = match[1].partition(" ")
        return parts[kind](name)

    filled = re.sub(r"\{\{([^}]+)\}\}", replace, template)
    return re.sub(r"\n{3,}", "\n\n", filled)


def _table(name: str, results: Results) -> str:
    try:
        return table(name, results)
    except MissingResultError as reason:
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
        (row.id, row.spec["title"], f"{row.spec['published']} ({row.spec['origin']})",
         _ours_cell(verdict), _verdict_cell(verdict))
        for row, verdict in judged
    ]  # fmt: skip
    return markdown(("", "result", "published", "ours", "verdict"), rows, of_text=True)


def claims_table(judged: Judged) -> str:
    """Return the table of claims."""
    rows = []
    for row, verdict in judged:
        marks = ", ".join(row.spec[key] for key in ("published", "origin") if key in row.spec)
        rows.append((row.id, f"{row.spec['title']} ({marks})", _ours_cell(verdict),
                     _verdict_cell(verdict)))  # fmt: skip
    return markdown(("", "claim", "ours", "verdict"), rows, of_text=True)


def rules() -> str:
    """Return the rules in words, with the results and claims that each decides."""
    lines = []
    for name, rule in RULES.items():
        rows = [row.id for row in all_rows() if name in row.rules]
        lines.append((name, (rule.__doc__ or "").splitlines()[0], " ".join(rows)))
    return markdown(("rule", "confirmed if", "decides"), lines, of_text=True)


def served(judged: Judged) -> dict[str, list[str]]:
    """Return the results and claims that use a measurement, by its name."""
    found = defaultdict[str, list[str]](list)
    for row, verdict in judged:
        for name in verdict.used:
            found[name].append(row.id)
    return found


def summary(index: Judged, claims: Judged) -> str:
    """Return how many results and claims have which verdict."""

    def counted(judged: Judged, what: str) -> str:
        counts = Counter(verdict.verdict for _, verdict in judged)
        text = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
        return f"{len(judged)} {what}: {text}"

    return f"{counted(index, 'published results')}. {counted(claims, 'claims')}."


def missing(judged: Judged) -> str:
    """Return the results that were not measured, with the reasons."""
    lines = [
        f"- {row.id}, {row.spec['title']}: {verdict.reason}."
        for row, verdict in judged
        if verdict.verdict == NOT_MEASURED
    ]
    lines += [
        f"- {row.id}: {row.spec['needs']}."
        for row, verdict in judged
        if "unless" in row.spec and verdict.verdict == row.spec["verdict"]
    ]
    return "\n".join(lines) or "Every result was measured."
