"""The texts and names of the project use the standard terms of the field, and no private ones."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".cu", ".cuh", ".html", ".sh"}

PRIVATE = {
    "way of summing, way": r"ways?",
    "walk": r"walk(s|ed|ing)?",
    "slide": r"(slides?|sliding|slid)",
    "pixel sum": r"pixel sums?",
    "narrow": r"narrow(s|ed|er)?",
    "behind": r"behind",
    "beside": r"besides?",
    "few (winograd, skinny GEMM)": r"(dense few|few\.(py|cuh?))",
    "tail (epilogue)": r"tails",
    "give (store)": r"gives?",
    "bring, ask, bulk (async copy)": r"(brings?|asks?)",
    "parts (split-K)": r"sum parts",
    "settle": r"settle[sd]?",
    "in_order (dependent launch)": r"in order kernels?",
    "sum_at_once, sum_by_shares": r"sum (at once|by shares)",
    "keep (dataset cache)": r"keeps? pictures",
    "pictures": r"pictures?",
    "tell": r"(tells?|told)",
    "begun": r"begun",
    "announce": r"announce[sd]?",
    "speaks": r"speaks",
    "room": r"rooms?",
    "twin": r"twins?",
    "nobody": r"nobody",
    "whoever": r"whoever",
    "wish": r"wish(es)?",
    "where left out": r"where left out",
    "main_only": r"main only",
}
"""Term that is not used, and the pattern of its forms. Underscores count as spaces."""

FOREIGN = ("sliding_window_view",)
"""Names of other libraries that contain such a term."""


def files() -> list[Path]:
    """Return the files whose terms are checked."""
    package = (path for path in (ROOT / "dptrain").rglob("*") if path.suffix in SUFFIXES)
    others = [ROOT / "README.md", ROOT / "docs" / "developers" / "architecture.md"]
    scripts = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "slurm").glob("*.sh")]
    return [*sorted(package), *others, *scripts]


def _without_foreign_names(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    for name in FOREIGN:
        text = text.replace(name, "")
    return text


PATTERN = re.compile(rf"(?<![a-z])({'|'.join(PRIVATE.values())})(?![a-z])")


def occurrences(text: str) -> list[str]:
    """Return the lines of a text that have a private term, with their numbers."""
    folded = text.replace("_", " ").lower()
    numbers = sorted({folded.count("\n", 0, found.start()) for found in PATTERN.finditer(folded)})
    lines = text.split("\n")
    return [f"{number + 1}: {lines[number].strip()}" for number in numbers]


def test_private_terms_do_not_occur() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{occurrence}"
        for path in files()
        for occurrence in occurrences(_without_foreign_names(path))
    ]
    assert not found, "\n".join(found)


def test_the_check_finds_a_private_term() -> None:
    assert len(files()) > 100
    assert occurrences("a = 1\nif it_Speaks:  # sum_at_once\n") == [
        "2: if it_Speaks:  # sum_at_once"
    ]
    assert not occurrences("loudspeakers")
