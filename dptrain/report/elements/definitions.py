"""The definitions of a report, from the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.vocabulary import SECTIONS
from dptrain.vocabulary.terms import Term

OF_PROFILES = (
    "Parts of a step",
    "Phases of a stage",
    "Of a stage, or of all stages of a kind",
    "Of a rank",
    "Of parallel efficiency",
    "Of sums, roofs and memory",
)
"""Sections of the vocabulary that define the terms of a profile in the report."""
OF_RUNS = (
    "Of training",
    "Parts of a step",
    "Phases of a stage",
    "Of a stage, or of all stages of a kind",
    "Of parallel efficiency",
)
"""Sections of the vocabulary that define the terms of a training run in the report."""
OF_STUDIES = ("Scaling study", *OF_PROFILES)

SHOWN = {
    "Of training": (
        "epoch", "metrics.loss", "learning_rate", "train_loss", "train_accuracy",
        "validation_loss", "validation_accuracy", "test_loss", "test_accuracy",
        "time_to_accuracy", "weak", "strong", "other_cores",
    ),
}  # fmt: skip
"""Names of the terms that a report shows, of sections that contain others, too."""


@dataclass(frozen=True)
class Definition:
    """A definition: the label of plots and tables, the name in files with its unit, the meaning."""

    label: str
    name: str
    meaning: str


Definitions = tuple[tuple[str, tuple[Definition, ...]], ...]
"""Headings with the definitions below them."""


def definitions(titles: Sequence[str]) -> Definitions:
    """Return the definitions by heading.

    Args:
        titles: `OF_STUDIES`, `OF_PROFILES` or `OF_RUNS`.
    """
    return tuple(
        (title, tuple(_definition(term) for term in SECTIONS[title] if _is_shown(title, term)))
        for title in titles
    )


def _is_shown(title: str, term: Term) -> bool:
    return title not in SHOWN or term.name in SHOWN[title]


def _definition(term: Term) -> Definition:
    plain = term.unit in ("", "1") or term.name.endswith(f"_{term.unit}")
    name = term.name if plain else f"{term.name}, {term.unit}"
    return Definition(term.label, "" if name == term.label else name, term.meaning)
