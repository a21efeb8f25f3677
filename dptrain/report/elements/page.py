"""The contents of a page, and its HTML."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from dptrain.report.elements.canvas import DARK, LIGHT, Plot, inline
from dptrain.report.elements.definitions import Definitions
from dptrain.tables import Cell, Table
from dptrain.tables.html import breakable, cell_html
from dptrain.texts import without_folders

GENERATOR = "dptrain report"
"""Name of the program, which marks the files of a report."""


@dataclass(frozen=True)
class Key:
    """A key result: its label, its value, and its interval or another detail."""

    label: str
    value: Cell
    detail: Cell = ()


@dataclass(frozen=True)
class Section:
    """A section of a page; empty elements are omitted.

    Attributes:
        name: identifier for links.
        title: heading.
        text: paragraphs below the heading.
        lists: pairs of introduction and items.
        plots: plots, two in a row on wide screens.
        images: PNG files with their captions.
        tables: tables below the plots.
        facts: pairs of name and value.
        commands: pairs of heading and command line.
        definitions: definitions of terms.
        new_page: whether it starts a new page in print.
        folded: whether a reader opens it; in print, all is open.
    """

    name: str
    title: str
    text: tuple[str, ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    plots: tuple[Plot, ...] = ()
    images: tuple[tuple[bytes, str], ...] = ()
    tables: tuple[Table, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    definitions: Definitions = ()
    new_page: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        kind: text above the title.
        title: title of the page.
        about: what was measured, in a short line.
        headline: the main result with its interval, as one or two sentences.
        lead: the plots of the headline, which follow it directly.
        text: further sentences, the most important first.
        file: JSON file that contains the key results.
        keys: key results.
        notes: restrictions of the validity, the most important first.
        sections: sections in order.
        closing: the last line.
    """

    kind: str
    title: str
    about: str
    headline: str
    lead: tuple[Plot, ...]
    text: tuple[str, ...]
    file: str
    keys: tuple[Key, ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    closing: str

    @property
    def plots(self) -> list[Plot]:
        """All plots, in the order of the page."""
        return [*self.lead, *(plot for section in self.sections for plot in section.plots)]


def restrictions_section(notes: tuple[str, ...]) -> list[Section]:
    """Return the section with all notes; none if the top of the page shows them."""
    if len(notes) < 2:
        return []
    return [Section("restrictions", "Restrictions", lists=(("", notes),))]


def render(page: Page) -> str:
    """Return the page as one HTML file that needs no other file and no network.

    Jinja escapes all text; the plots are inserted as they are and escape their own text.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("dptrain.report.elements"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: Markup(breakable(text))
    environment.filters["data_uri"] = _data_uri
    environment.filters["coded"] = _coded
    environment.filters["without_folders"] = without_folders
    environment.filters["cell"] = lambda cell: Markup(cell_html(cell))
    environment.filters["table"] = lambda table: Markup(table.to_page())
    template = environment.get_template("page.html")
    text = template.render(
        page=page,
        generator=GENERATOR,
        light=LIGHT,
        dark=DARK,
        inline=lambda plot: Markup(inline(plot)),
    )
    return text.lstrip() + "\n"


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _coded(text: str) -> str:
    """Turn backticks into ``code`` elements."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
