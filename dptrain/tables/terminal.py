"""Tables as lines of text, which lose no character whatever the width of the terminal.

A table that is too wide is reduced in this order: headings are wrapped, texts are wrapped,
and the columns are divided into blocks, one below the other, each with the key columns. Numbers
are broken only if one alone is wider than the terminal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dptrain.numbers import THOUSANDS_SEPARATOR
from dptrain.tables.cells import INTERVAL, Column, cell_text
from dptrain.texts import WRAPPED, width_of, with_escapes, wrap

GAP, MARGIN = 2, 1
"""Spaces between two columns, and before the first one."""
TEXT_WIDTH = 100
"""Columns at which titles and notes are wrapped if the output has no width."""
ENDING = f"({INTERVAL})"
"""End of a unit that terminals omit: the note of the table replaces it."""


def styled_lines(
    title: str,
    columns: Sequence[Column],
    note: str,
    *,
    width: int | None = None,
    keys: int = 1,
    rules: Collection[int] = (),
) -> Iterator[tuple[str, str]]:
    """Yield the style and the text of each line of a table.

    Args:
        title, columns, note, keys, rules: as in `dptrain.tables.Table`.
        width: columns of the terminal, at least 20; None if there is no limit.
    """
    text_width = min(width or TEXT_WIDTH, TEXT_WIDTH)
    if INTERVAL not in note and any(column.unit.endswith(ENDING) for column in columns):
        note = f"{note} Parentheses: {INTERVAL}s.".strip()
    for line in [*wrap(_plain(title), text_width), ""] if title else ():
        yield "bold", line
    layouts = [_layout(column, rules) for column in columns]
    available = None if width is None else width - MARGIN
    for number, block in enumerate(_blocks(layouts, keys, available)):
        if number:
            yield "", ""
        yield from _block_lines(block)
    for line in wrap(_plain(note), text_width) if note else ():
        yield "dim", line
    yield "", ""


def _plain(text: str) -> str:
    """Return a text with digits grouped by commas, which other programs read."""
    return with_escapes(text.replace(THOUSANDS_SEPARATOR, ","))


def _layout(column: Column, rules: Collection[int]) -> _Column:
    cells = [_plain(cell_text(cell)) for cell in column.cells]
    widths = [width_of(line) for cell in cells for line in cell.split("\n")]
    widest = max(widths, default=0)
    unit = column.unit.removesuffix(ENDING).strip()
    separator = "\n" if unit and width_of(f"{column.head} {unit}") > widest else " "
    heading = f"{_plain(column.head)}{separator}{unit}".strip()
    words = [width_of(word) for word in heading.split()]
    least = widest if column.is_numeric else min(widest, WRAPPED)
    natural = max(widest, *(width_of(line) for line in heading.split("\n")))
    contents: list[str | None] = [*cells]
    for index in sorted(rules, reverse=True):
        contents.insert(index, None)
    return _Column(
        heading, contents, not column.is_numeric, max([least, *words, 1]), max(natural, 1)
    )


@dataclass
class _Column:
    """A column, and how wide it is: `width` is between the least and the natural one.

    Attributes:
        heading: with its unit.
        cells: text of each row; None draws a line.
        is_text: True if the column is left-aligned and may be wrapped.
    """

    heading: str
    cells: list[str | None]
    is_text: bool
    least: int
    width: int


def _blocks(
    columns: Sequence[_Column], keys: int, available: int | None
) -> Iterator[list[_Column]]:
    """Yield columns that fit next to each other, with their widths; the keys in each block."""
    if available is None or len(columns) < 2:
        for column in columns:
            column.width = min(column.width, available or column.width)
        yield list(columns)
        return
    widest = max(column.least for column in columns[1:])
    limit = max(available - GAP - widest, (available - GAP) // 2)
    while keys > 1 and _width(columns[:keys], least=True) > limit:
        keys -= 1
    first, others = columns[:keys], columns[keys:]
    if keys == 1:
        first[0].least = min(first[0].least, limit)
    for column in others:
        column.least = min(column.least, available - GAP - _width(first, least=True))
    natural, block = [column.width for column in first], [*first]
    for column in others:
        if _width([*block, column], least=True) > available:
            yield _reduced(block, available)
            block = [*first]
            for key, width in zip(first, natural, strict=True):
                key.width = width
        block.append(column)
    yield _reduced(block, available)


def _width(block: Sequence[_Column], *, least: bool = False) -> int:
    """Return the width of columns next to each other."""
    widths = [column.least if least else column.width for column in block]
    return sum(widths) + GAP * (len(widths) - 1)


def _reduced(block: list[_Column], available: int) -> list[_Column]:
    """Reduce the widest columns until all fit."""
    for _ in range(_width(block) - available):
        widest = max((c for c in block if c.width > c.least), key=lambda column: column.width)
        widest.width -= 1
    return block


def _block_lines(block: Sequence[_Column]) -> Iterator[tuple[str, str]]:
    """Yield the style and the text of the lines of some columns."""
    rule = " " * MARGIN + "─" * _width(block)
    for line in _row_lines([column.heading for column in block], block):
        yield "bold", line
    yield "", rule
    for row in zip(*(column.cells for column in block), strict=True):
        cells = [cell for cell in row if cell is not None]
        for line in _row_lines(cells, block) if cells else (rule,):
            yield "", line


def _row_lines(row: Sequence[str], block: Sequence[_Column]) -> Iterator[str]:
    """Yield the lines of the cells of a row."""
    cells = [wrap(text, column.width) for text, column in zip(row, block, strict=True)]
    for parts in zip_longest(*cells, fillvalue=""):
        line = []
        for column, part in zip(block, parts, strict=True):
            space = " " * (column.width - width_of(part))
            line.append(part + space if column.is_text else space + part)
        yield (" " * MARGIN + (" " * GAP).join(line)).rstrip()
