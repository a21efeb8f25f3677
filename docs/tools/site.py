"""Hooks of MkDocs: generated references, pages from outside of docs/, and links to both."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.tools.reference import expand

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\(\s*(?P<path>[^()\s#]+)(?P<anchor>#[^()\s]*)?\s*\)"
)
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)

BLOCK = re.compile(r"<pre\b.*?</pre>", re.DOTALL)
CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
WHOLE = re.compile(r"(?<![^\s>])-[\w-]*\w(?![^<]*>)")
"""A flag in a block of code, which wraps."""
TABLE, HEADING = re.compile(r"<table>.*?</table>", re.DOTALL), re.compile(r"<th\b.*?</th>")
LONG_TABLE = 15
"""Rows of a table that are shown."""
LONG = 36
"""Characters of code that fit next to each other on a phone."""

OUTSIDE = {
    ROOT / "CHANGELOG.md": "developers/changelog.md",
    ROOT / "CONTRIBUTING.md": "developers/contributing.md",
    ROOT / "tests" / "README.md": "developers/tests.md",
}
"""Files of the repository that are pages of the site, and their names there."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and images that are not in docs/."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    for path in sorted(outside_images()):
        files.append(File.generated(config, image_name(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Expand generated parts, and rewrite the links that leave docs/."""
    site_name = Path(page.file.src_uri)
    sources = {name: path for path, name in OUTSIDE.items()}
    source = sources.get(page.file.src_uri, DOCS / site_name)
    return expand(rewrite_links(markdown, source, site_name))


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Mark long code in sentences and flags in blocks of code, and fold long tables."""
    html = mark_long_code(html)
    return html if page.file.src_uri.startswith("reference/") else fold_long_tables(html)


def fold_long_tables(html: str) -> str:
    """Return a page on which a reader opens tables with many rows.

    Example:
        >>> row = "<tr><th>name</th><th>time</th></tr>"
        >>> fold_long_tables(f"<table>{row * 20}</table>")[:67]
        '<details><summary>Table of 19 rows: name, time</summary><table><tr>'
    """

    def fold(table: re.Match[str]) -> str:
        count = table[0].count("<tr") - 1
        if count <= LONG_TABLE:
            return table[0]
        head = table[0].partition("</tr>")[0]
        names = [TAG.sub("", name) for name in HEADING.findall(head)]
        heads = ", ".join(name for name in names if name)
        return f"<details><summary>Table of {count} rows: {heads}</summary>{table[0]}</details>"

    return TABLE.sub(fold, html)


def mark_long_code(html: str) -> str:
    """Return a page with marked code: wide code in sentences is "long", flags in blocks "flag".

    Example:
        >>> mark_long_code("<code>train</code>") == "<code>train</code>"
        True
    """

    def mark(code: re.Match[str]) -> str:
        is_long = len(unescape(TAG.sub("", code[1]))) > LONG
        return f'<code class="long">{code[1]}</code>' if is_long else code[0]

    parts: list[str] = []
    end = 0
    for block in BLOCK.finditer(html):
        whole = WHOLE.sub(r'<span class="flag">\g<0></span>', block[0])
        parts += [CODE.sub(mark, html[end : block.start()]), whole]
        end = block.end()
    return "".join([*parts, CODE.sub(mark, html[end:])])


def rewrite_links(markdown: str, source: Path, site_name: Path) -> str:
    """Return a page with links that are true on the site.

    Args:
        markdown: text of the page.
        source: file that contains it.
        site_name: name of the page, relative to the root of the site.
    """

    def rewrite(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match["path"]):
            return match[0]
        target = Path(os.path.normpath(source.parent / match["path"]))
        if target in OUTSIDE:
            name = OUTSIDE[target]
        elif target.is_relative_to(DOCS):
            name = target.relative_to(DOCS).as_posix()
        elif match["image"]:
            name = image_name(target)
        else:
            # The file is part of the repository, and not of the site.
            path = f"`{target.relative_to(ROOT).as_posix()}`"
            return path if match["text"] == target.stem else f"{match['text']} ({path})"
        link = os.path.relpath(name, site_name.parent) + (match["anchor"] or "")
        return f"{match['image']}[{match['text']}]({link})"

    parts: list[str] = []
    end = 0
    for code in FENCED.finditer(markdown):
        parts += [LINK.sub(rewrite, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(rewrite, markdown[end:])])


def outside_images() -> set[Path]:
    """Return the images outside of docs/ that pages show."""
    found = set()
    for page in DOCS.rglob("*.md"):
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            if match["image"] and not re.match(r"[a-z]+:", match["path"]):
                target = Path(os.path.normpath(page.parent / match["path"]))
                if not target.is_relative_to(DOCS):
                    found.add(target)
    return found


def image_name(path: Path) -> str:
    """Return the name on the site of an image outside of docs/."""
    return f"images/{path.name}"
