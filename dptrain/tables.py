"""Tables as lines of text, which lose no character whatever the width of the terminal.

A table that is too wide is reduced in this order: headings are wrapped, texts are wrapped,
and the columns are divided into blocks, one below the other, each with the key columns. Numbers
are broken only if one alone is wider than the terminal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GAP, MARGIN = 2, 1
"""Spaces between two columns, and before the first one."""

TEXT_WIDTH = 100
"""Columns at which titles and captions are wrapped if the output has no width."""

WRAPPED = 12
"""Least width of a column of texts that is wrapped."""


BREAKS = "+/_-,="
"""Characters after which a long word is broken."""


@dataclass
class Table:
    """A table of text.

    Attributes:
        title: line above the table.
        columns: headings, which may have several lines.
        text: headings of the columns that contain text: they are left-aligned and may be wrapped.
        caption: text below the table.
        rows: cells of each row; an empty row draws a line.
        keys: number of columns at the left that identify a row, which each block repeats if they
            take no more than half of the width.

    Example:
        >>> table = Table("Ranks", ("host", "step ms"), text=("host",))
        >>> table.add_row("node1", "2.5")
        >>> print(*table.lines(), sep="|")
        Ranks|| host   step ms| ──────────────| node1      2.5|
    """

    title: str
    columns: Sequence[str]
    text: Collection[str] = ()
    caption: str = ""
    rows: list[Any] = field(default_factory=list)
    keys: int = 1

    def add_row(self, *cells: str) -> None:
        """Add a row; cells that are missing at its end are empty."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

    def add_line(self) -> None:
        """Draw a line below the last row."""
        self.rows.append(())

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines of the table.

        Args:
            width: columns of the terminal, at least 20; None if there is no limit.
        """
        return [*self._title(width), *(line for _, line in self._body(width)), ""]

    def to_html(self) -> str:
        """Return the table for a notebook."""
        sides = ["left" if name in self.text else "right" for name in self.columns]

        def row(tag: str, cells: Sequence[str]) -> str:
            pairs = zip(cells, sides, strict=True)
            return "".join(f'<{tag} align="{side}">{escape(cell)}</{tag}>' for cell, side in pairs)

        rows = "".join(f"<tr>{row('td', cells)}</tr>" for cells in self.rows if cells)
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        below = f"<div>{escape(self.caption)}</div>" if self.caption else ""
        return f"<table>{title}<tr>{row('th', self.columns)}</tr>{rows}</table>{below}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        width = options.max_width
        for line in self._title(width):
            yield Text(line, style="bold", no_wrap=True)
        for style, line in [*self._body(width), ("", "")]:
            yield Text(line, style=style, no_wrap=True)

    def _title(self, width: int | None) -> list[str]:
        return [*wrap(self.title, min(width or TEXT_WIDTH, TEXT_WIDTH)), ""] if self.title else []

    def _body(self, width: int | None) -> Iterator[tuple[str, str]]:
        """Yield the style and the text of each line below the title."""
        columns = [self._column(index) for index in range(len(self.columns))]
        available = None if width is None else width - MARGIN
        for number, block in enumerate(_blocks(columns, self.keys, available)):
            if number:
                yield "", ""
            yield from self._block(block)
        for line in (
            wrap(self.caption, min(width or TEXT_WIDTH, TEXT_WIDTH)) if self.caption else ()
        ):
            yield "dim", line

    def _column(self, index: int) -> _Column:
        heading = self.columns[index]
        is_text = heading in self.text
        cells = [width_of(line) for row in self.rows if row for line in row[index].split("\n")]
        words = [width_of(word) for word in heading.split()]
        widest = max(cells, default=0)
        least = min(widest, WRAPPED) if is_text else widest
        natural = max(widest, *(width_of(line) for line in heading.split("\n")))
        return _Column(index, is_text, max([least, *words, 1]), max(natural, 1))

    def _block(self, block: Sequence[_Column]) -> Iterator[tuple[str, str]]:
        """Yield the style and the text of the lines of some columns."""
        rule = "─" * _width(block)
        for line in _row_lines(self.columns, block):
            yield "bold", line
        yield "", " " * MARGIN + rule
        for row in self.rows:
            for line in _row_lines(row, block) if row else (" " * MARGIN + rule,):
                yield "", line


@dataclass
class _Column:
    """A column, and how wide it is: `width` is between the least and the natural one."""

    index: int
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


def _row_lines(row: Sequence[str], block: Sequence[_Column]) -> Iterator[str]:
    """Yield the lines of some cells of a row."""
    cells = [wrap(row[column.index], column.width) for column in block]
    for number in range(max(map(len, cells), default=0)):
        parts = []
        for column, lines in zip(block, cells, strict=True):
            line = lines[number] if number < len(lines) else ""
            space = " " * (column.width - width_of(line))
            parts.append(line + space if column.is_text else space + line)
        yield (" " * MARGIN + (" " * GAP).join(parts)).rstrip()


def width_of(text: str) -> int:
    """Return the number of columns of a terminal that a text takes.

    Example:
        >>> width_of("step"), width_of("猫")
        (4, 2)
    """
    from rich.cells import cell_len

    return cell_len(text)


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text, broken at spaces; words that are wider are broken anywhere.

    Args:
        text: one or several lines.
        width: columns of a terminal, at least 2.

    Example:
        >>> wrap("95% interval of abcdefghij", 8)
        ['95%', 'interval', 'of', 'abcdefgh', 'ij']
    """
    found = []
    for line in text.split("\n"):
        if width_of(line) <= width:
            found.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())] if width > WRAPPED else ""
        present = ""
        for word in _pieces(line.split(), width - len(indent)):
            joined = f"{present} {word}" if present else indent + word
            if present and width_of(joined) > width:
                found.append(present)
                joined = indent + word
            present = joined
        found.append(present)
    return found


def _pieces(words: Iterable[str], width: int) -> Iterator[str]:
    """Yield words; one that is wider than `width` in pieces, if possible after punctuation."""
    for word in words:
        piece = ""
        for letter in word:
            while piece and width_of(piece + letter) > width:
                end = max(piece.rfind(mark) for mark in BREAKS) + 1 or len(piece)
                yield piece[:end]
                piece = piece[end:]
            piece += letter
        yield piece
