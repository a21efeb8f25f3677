"""The documentation site: a strict build, complete references, no network, phone and desktop."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dptrain
from dptrain.training.settings import OTHER_VARIABLES, settings
from dptrain.vocabulary import SECTIONS
from tests.system.browser import Browser
from tests.system.launch import ROOT

pytestmark = pytest.mark.more

COMMAND = "python -m mkdocs build --strict --quiet"
PAGES = (
    "index", "comparison", "tutorials/first-run", "how-to/clusters", "reference/settings",
    "reference/command-line", "reference/python", "explanation/all-reduce", "explanation/measuring",
    "explanation/intervals", "reference/study", "developers/performance",
    "developers/kernels/convolution-gpu",
)  # fmt: skip
SCROLLING = ".md-typeset__table, .md-typeset__scrollwrap, pre, code, .md-sidebar, .md-search"
"""Parts that may be wider than the page, because they scroll on their own or are hidden."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the command of `make docs`, in which a warning is an error."""
    assert COMMAND in (ROOT / "Makefile").read_text(encoding="utf-8")
    if not os.environ.get("CI"):
        pytest.importorskip("mkdocstrings", reason="make docs installs MkDocs")
    found = tmp_path_factory.mktemp("site")
    command = [sys.executable, *COMMAND.split()[1:], "--site-dir", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//', text)


def test_flags_with_alternatives_show_no_escapes(site: Path) -> None:
    """Markdown keeps the backslash of an escaped "|" in code."""
    page = site / "reference" / "command-line.html"
    text = html.unescape(page.read_text(encoding="utf-8"))
    assert "N,…|none</code>" in text
    assert r"\|" not in text


@pytest.mark.timeout(300)
def test_pages_fit_a_phone_and_a_desktop(site: Path, browser: Browser) -> None:
    for name in PAGES:
        for width in (360, 1280):
            browser.resize(width)
            browser.open(site / f"{name}.html")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            wider = browser.evaluate(
                "[...document.querySelectorAll('.md-content *')].filter(part =>"
                f" part.getBoundingClientRect().right > {width + 1} &&"
                f" !part.closest('{SCROLLING}')).map(part => part.textContent.slice(0, 60))"
            )
            assert wider == [], (name, width)
            broken = browser.evaluate(
                "[...document.querySelectorAll('.md-content :is(p, li, td) code')].filter(part =>"
                " part.getClientRects().length > 1).map(part => part.textContent)"
            )
            assert broken == [], (name, width)
            cut = browser.evaluate(
                "[...document.querySelectorAll('.md-content pre > code')].filter(part =>"
                " part.scrollWidth > part.clientWidth + 1).map(part => part.textContent)"
            )
            assert cut == [], (name, width)
            flags = browser.evaluate(
                "[...document.querySelectorAll('.md-content pre .flag')].filter(part =>"
                " part.getClientRects().length > 1).map(part => part.textContent)"
            )
            assert flags == [], (name, width)
            methods = {event["method"] for event in browser.events}
            assert not {"Runtime.exceptionThrown", "Log.entryAdded"} & methods, browser.events
            urls = [event["params"]["request"]["url"] for event in browser.events
                    if event["method"] == "Network.requestWillBeSent"]  # fmt: skip
            assert all(url.startswith(("file:", "data:")) for url in urls), urls


def test_search_works_without_a_server(site: Path, browser: Browser) -> None:
    browser.resize(1280)
    browser.open(site / "index.html")
    browser.evaluate(
        "(() => { const input = document.querySelector('.md-search__input'); input.focus();"
        " input.value = 'oversubscription'; for (const kind of ['input', 'keyup'])"
        " input.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )
    found = ""
    end = time.monotonic() + 60
    while "oversubscription.html" not in found:
        assert time.monotonic() < end, found
        time.sleep(0.2)
        found = browser.evaluate("document.querySelector('.md-search-result__list').innerHTML")


def test_references_are_complete(site: Path) -> None:
    def page(name: str) -> str:
        return (site / "reference" / f"{name}.html").read_text(encoding="utf-8")

    text = page("settings")
    for setting in settings():
        assert f"<code>{setting.flag}</code>" in text
        assert f"<code>{setting.variable}</code>" in text
    assert all(f"<code>{name}</code>" in text for name in OTHER_VARIABLES)
    text = page("python")
    assert [name for name in dptrain.__all__ if f'id="dptrain.{name}"' not in text] == []
    text = page("files")
    for section in SECTIONS.values():
        assert [term.name for term in section if f"<code>{term.name}</code>" not in text] == []
    text = page("exit-codes")
    assert [code for code in (0, 1, 2, 3, 75, 130) if f"<td>{code}</td>" not in text] == []


def test_every_explanation_has_a_drawn_image() -> None:
    from docs.figures.__main__ import NAMES

    shown = set()
    for page in (ROOT / "docs" / "explanation").glob("*.md"):
        found = re.findall(r"\(../images/([\w-]+)\.svg\)", page.read_text(encoding="utf-8"))
        assert found or page.name == "numerics.md", page
        shown.update(found)
    assert {f"explanation-{name}" for name in NAMES} <= shown


def test_images_are_those_of_the_scripts(tmp_path: Path) -> None:
    from docs.figures.__main__ import IMAGES, NAMES, draw

    def texts(path: Path) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)<", path.read_text(encoding="utf-8"))

    for name in NAMES:
        drawn = draw(name, tmp_path)
        # Versions of matplotlib differ in how they write lines.
        assert texts(drawn) == texts(IMAGES / drawn.name), f"draw it: python -m docs.figures {name}"
        assert texts(drawn)
