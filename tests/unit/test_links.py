"""Links and names of pages lead somewhere: in the Markdown files, and in the code.

Every relative link leads to a file, and every anchor to a heading.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from docs.tools.reference import expand

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "tests", ROOT / "benchmarks", ROOT / "dptrain")
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*([^()\s]+)\s*\)")
CODE = [
    path
    for folder in ("dptrain", "benchmarks", "docs", "launch", "slurm", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cu", ".cuh", ".sh", ".toml", ".template"}
]
NAMED = re.compile(r"\b(?:docs|benchmarks/results)/[\w/.-]*\w\.md\b")


def prose(path: Path) -> str:
    """Return the text of a document, with its generated parts, without its code blocks."""
    return FENCED.sub("", expand(path.read_text(encoding="utf-8")))


def links(text: str) -> list[str]:
    """Return the targets of all links and images within a repository."""
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors that GitHub generates for the headings of a document."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *$", prose(path), re.MULTILINE):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchor, number = name, 0
        while anchor in found:
            number += 1
            anchor = f"{name}-{number}"
        found.add(anchor)
    return frozenset(found)


def broken(path: Path) -> list[str]:
    """Return the links of a document whose file or anchor does not exist."""
    found = []
    for link in links(prose(path)):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_lead_somewhere() -> None:
    found = {str(path.relative_to(ROOT)): broken(path) for path in DOCUMENTS}
    assert not {path: links for path, links in found.items() if links}


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n## Same\n## Same\n[x](#a-b-c) [x](#same-1) [wrapped](\npage.md#same)\n"
        "[x](https://example.org) ![p](missing.svg) [x](page.md#none)\n"
        "```sh\n# not a heading\necho [x](ignored.md)\n```\n[x](#not-a-heading)\n"
    )
    assert broken(page) == ["missing.svg", "page.md#none", "#not-a-heading"]


def missing(text: str) -> list[str]:
    """Return the pages and results that do not exist and that a text names."""
    return [name for name in NAMED.findall(text) if not (ROOT / name).exists()]


def test_code_names_pages_that_exist() -> None:
    found = {str(path.relative_to(ROOT)): missing(path.read_text("utf-8")) for path in CODE}
    assert len(found) > 100
    assert not {path: names for path, names in found.items() if names}


def test_missing_pages_are_found() -> None:
    folder = "docs"
    assert missing(f"see {folder}/index.md, {folder}/none.md.") == [f"{folder}/none.md"]
