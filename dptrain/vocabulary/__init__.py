"""Names in tables, files, reports, traces and dashboards, each with its unit and its definition.

Tables, plots, pages and docs/reference/files.md take them from `SECTIONS`. A test compares them
with what the program writes.
"""

from __future__ import annotations

from functools import cache

from dptrain.vocabulary import experiments, profiles, runs, studies
from dptrain.vocabulary.terms import Term

SECTIONS = {
    "Phases of a stage": profiles.PHASES,
    "Parts of a step": profiles.PARTS,
    "A profile": profiles.PROFILE,
    "Of a sample": profiles.SPREAD,
    "Of a stage, or of all stages of a kind": profiles.STAGE,
    "Of a rank": profiles.RANK,
    "Of sums, roofs and memory": profiles.OTHERS,
    "Of parallel efficiency": profiles.POP,
    "Of energy": profiles.ENERGY,
    "Of the processor": profiles.PROCESSOR,
    "Of losses by experiment": profiles.LOSSES,
    "Of a trace": profiles.TRACE,
    "Of a job": runs.JOB,
    "Of training": runs.TRAINING,
    "Of a class or label": runs.QUALITY,
    "Scaling study": studies.STUDY,
    "Audit of a study": studies.AUDIT,
    "Sweeps and variants": experiments.EXPERIMENTS,
    "Benchmarks": experiments.BENCH,
}
"""Definitions by subject."""


@cache
def _terms() -> dict[str, Term]:
    return {term.name: term for section in SECTIONS.values() for term in section}


def find_term(*path: str) -> Term | None:
    """Return the definition of a key; one with enclosing keys is preferred.

    Args:
        path: keys from the outermost to the key itself.

    Example:
        >>> find_term("memory", "parameters").meaning
        'Parameters of one rank.'
    """
    for start in range(len(path)):
        if found := _terms().get(".".join(path[start:])):
            return found
    return None


def label_of(*path: str) -> str:
    """Return the name of a key in tables and plots; the key itself if it is not defined.

    Example:
        >>> label_of("compute"), label_of("load_time")
        ('computation', 'load time')
    """
    found = find_term(*path)
    return path[-1].replace("_", " ") if found is None else found.label


def vocabulary_table(title: str) -> str:
    """Return the definitions of a section as a Markdown table."""
    rows = ["| name | unit | meaning |", "|---|---|---|"]
    rows += [f"| `{term.name}` | {term.unit} | {term.meaning} |" for term in SECTIONS[title]]
    return "\n".join(rows)
