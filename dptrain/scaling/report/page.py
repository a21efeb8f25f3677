"""A page as data, and its HTML."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dptrain.scaling.report.canvas import DARK, LIGHT, Plot, inline
from dptrain.scaling.report.definitions import Words
from dptrain.scaling.report.tables import Cell, Table

GENERATOR = "dptrain report"
"""By which a file is known to be ours."""


@dataclass(frozen=True)
class Key:
    """A key figure: what it is, its value, and the interval or what else there is to say."""

    label: str
    value: Cell
    detail: Cell = ()


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is left out.

    Attributes:
        name: to link to.
        text: paragraphs below the heading.
        lists: (introduction, items).
        facts: (name, value).
        commands: (heading, command line).
        words: definitions.
        new_page: where it is printed.
    """

    name: str
    title: str
    text: tuple[str, ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    words: Words = ()
    new_page: bool = False


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        kind: above the title.
        about: what was measured, in a line.
        conclusion: the conclusion in sentences, the most important first.
        keys: key figures, from `file`.
        notes: what to know before believing it.
        closing: the last line.
    """

    kind: str
    title: str
    about: str
    conclusion: tuple[str, ...]
    file: str
    keys: tuple[Key, ...]
    notes: tuple[str, ...]
    sections: tuple[Section, ...]
    closing: str

    @property
    def plots(self) -> list[Plot]:
        """All of them, in the order of the page."""
        return [plot for section in self.sections for plot in section.plots]


def render(page: Page) -> str:
    """The page as one HTML file that needs no other and no network.

    Whatever comes from a user is escaped; the plots are ours, and escape what they were given.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("dptrain.scaling.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["coded"] = _coded
    template = environment.get_template("page.html")
    text = template.render(
        page=page,
        generator=GENERATOR,
        light=LIGHT,
        dark=DARK,
        inline=lambda plot: Markup(inline(plot)),
    )
    return text.lstrip() + "\n"


def _breakable(text: str) -> str:
    """A name that may break behind ``+`` and ``.``, and before ``_``: ``conv1+relu1.forward``."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=[+.])(?=[a-z])|(?=_)", "<wbr>", str(escape(text))))


def _coded(text: str) -> str:
    """Prose in which backticks stand around code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
