"""Tables as HTML, for pages of reports and for notebooks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from html import escape

from dptrain.tables.cells import Cell, Column, Number, rows_of, texts_of
from dptrain.texts import without_folders

RULE = ' class="rule"'
MANY_COLUMNS = 9
"""Columns beyond which the text of a table is smaller in print."""


def breakable(text: str) -> str:
    """Return HTML in which a name may be broken after ``+`` and ``.``, and before ``_``."""
    return re.sub(r"(?<=[+.])(?=[a-z])|(?=_)", "<wbr>", escape(text))


def cell_html(cell: Cell) -> str:
    """Return the HTML of a cell; numbers have their exact values and sources."""
    return "".join(
        _number(part) if isinstance(part, Number) else breakable(without_folders(part))
        for part in cell
    )


def page_html(columns: Sequence[Column], file: str, rules: Collection[int]) -> str:
    """Return the ``table`` element of a page; headings have their definitions as tooltips."""
    dense = ' class="dense"' if len(columns) > MANY_COLUMNS else ""
    heads = "\n".join(map(_head, columns))
    rows = "\n".join(
        f"<tr{RULE * (i in rules)}>\n{_row(columns, row)}\n</tr>"
        for i, row in enumerate(rows_of(columns))
    )
    return (
        f'<table data-file="{escape(file)}"{dense}>\n<thead>\n<tr>\n{heads}\n</tr>\n</thead>'
        f"\n<tbody>\n{rows}\n</tbody>\n</table>"
    )


def notebook_html(title: str, columns: Sequence[Column], note: str) -> str:
    """Return a table for a notebook, which has no styles of its own."""

    def row(tag: str, cells: Iterable[str]) -> str:
        sides = ("right" if column.is_numeric else "left" for column in columns)
        pairs = zip(cells, sides, strict=True)
        return "".join(f'<{tag} align="{side}">{escape(cell)}</{tag}>' for cell, side in pairs)

    heads, *others = texts_of(columns)
    rows = "".join(f"<tr>{row('td', cells)}</tr>" for cells in others)
    above = f"<caption>{escape(title)}</caption>" if title else ""
    below = f"<div>{escape(note)}</div>" if note else ""
    return f"<table>{above}<tr>{row('th', heads)}</tr>{rows}</table>{below}"


def _head(column: Column) -> str:
    meaning = column.term.meaning.replace("`", "") if column.term else ""
    tooltip = f' title="{escape(meaning)}"' if meaning else ""
    unit = f' <span class="unit">{escape(column.unit)}</span>' if column.unit else ""
    return f'<th scope="col" class="{column.kind}"{tooltip}>{escape(column.head)}{unit}</th>'


def _row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    cells = []
    for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
        start, end = ("td", "td") if number else ('th scope="row"', "th")
        range_ = f'<span class="range">{cell_html(cell[1:])}</span>' if len(cell) > 1 else ""
        cells.append(f'<{start} class="{column.kind}">{cell_html(cell[:1])}{range_}</{end}>')
    return "\n".join(cells)


def _number(number: Number) -> str:
    source = f' data-from="{escape(number.source)}"' if number.source else ""
    return f'<data value="{number.value}"{source}>{escape(number.text)}</data>'
