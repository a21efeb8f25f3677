"""Words of prose on each page: ``python -m docs.tools.count``.

Prose is what a reader reads from the first to the last word. Code blocks, tables and parts that
are generated from the code are looked up, and do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
LIST = re.compile(r"([-*]|\d+\.) ")
NO_PROSE = re.compile(r"^ *(\||<!--|!\[).*$", re.MULTILINE)
"""Lines of tables, markers of generated parts, and images."""


def pages() -> list[Path]:
    """Return the README and the pages of docs/, in order of their paths."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def count_words(text: str) -> int:
    """Return the number of words of prose.

    Args:
        text: Markdown of a page.

    Example:
        >>> count_words("Two words | and five others.")
        5
        >>> count_words("| a | table |")
        0
    """
    prose = NO_PROSE.sub("", _without_indented_code(FENCED.sub("", text)))
    return len(re.findall(r"\S*\w\S*", prose))


def _without_indented_code(text: str) -> str:
    """Remove code without a fence: lines with four spaces that do not belong to a list."""
    kept, in_list = [], False
    for line in text.splitlines():
        if line[:1].strip():
            in_list = LIST.match(line) is not None
        if in_list or not line.startswith("    "):
            kept.append(line)
    return "\n".join(kept)


def words_by_page() -> dict[str, int]:
    """Return the number of words by the path of the page."""
    return {
        page.relative_to(ROOT).as_posix(): count_words(page.read_text(encoding="utf-8"))
        for page in pages()
    }


if __name__ == "__main__":
    counts = words_by_page()
    for name, number in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{number:6,} {name}")
    print(f"{sum(counts.values()):6,} in all")
