"""The documentation stays short: a limit for all of it, and one for each page."""

from __future__ import annotations

from docs.tools.count import ROOT, count_words, words_by_page

MOST_WORDS = 45_000
"""Of prose, without code, tables and what is generated."""
MOST_OF_A_PAGE = 1_500
LONGER = {
    "docs/developers/architecture.md": (
        2_700,
        "the one page that shows how the parts fit together",
    ),
    "docs/how-to/optimisation.md": (2_000, "one section for each setting, which readers look up"),
    "docs/how-to/troubleshooting.md": (2_000, "a list of messages, which readers search"),
    "docs/how-to/data.md": (1_700, "one section for each kind of data, which readers look up"),
    "docs/explanation/numerics.md": (1_600, "one argument, from rounding to equal bits"),
    "docs/reference/equations.md": (
        1_700,
        "every layer with its derivative, which readers look up",
    ),
    "docs/studies.md": (1_700, "generated: four studies on one page, which readers compare"),
}
"""Limit of pages that must be longer, and why."""


def limit_of(page: str) -> int:
    """Return the largest number of words of a page."""
    return LONGER[page][0] if page in LONGER else MOST_OF_A_PAGE


def test_the_documentation_has_at_most_its_limit_of_words() -> None:
    total = sum(words_by_page().values())
    assert total <= MOST_WORDS, "shorten what is said twice: python -m docs.tools.count"


def test_no_page_is_longer_than_its_limit() -> None:
    long = {page: n for page, n in words_by_page().items() if n > limit_of(page)}
    assert long == {}, "divide the page by purpose, or state in LONGER why it is long"


def test_exceptions_are_pages_that_need_them() -> None:
    words = words_by_page()
    needless = [page for page in LONGER if words[page] <= MOST_OF_A_PAGE]
    assert needless == []
    assert all((ROOT / page).is_file() and reason for page, (_, reason) in LONGER.items())


def test_prose_counts_and_nothing_else() -> None:
    text = (
        "# Two words\n\n![a picture](a.svg)\n\n| a | table |\n\n<!-- generate: settings -->\n\n"
        "```sh\nmake docs\n```\n\n    y = a · x + b · z\n\n- a list\n\n    second paragraph\n"
    )
    assert count_words(text) == 2 + 2 + 2
