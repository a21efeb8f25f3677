"""A table, and its forms on a terminal, in pages, notebooks, papers and files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dptrain.tables.cells import Cell, Column, rows_of, texts_of
from dptrain.tables.html import notebook_html, page_html
from dptrain.tables.latex import tabular
from dptrain.tables.terminal import styled_lines
from dptrain.tables.text import csv_text, markdown_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A table of columns of equal length.

    Attributes:
        title: heading.
        columns: the columns.
        note: text below the title of a page, and below the table on a terminal.
        name: identifier within a page.
        file: file of the sources of the numbers.
        folded: whether a reader of a page opens it; in print, it is open.
        keys: number of columns at the left that identify a row. On a terminal each block of columns
            repeats them if they take no more than half of the width.
        rules: indices of the rows above which a line is drawn.

    Example:
        >>> table = Table.of_rows("Ranks", ("host", "step ms"), [("node1", "2.5")], text=("host",))
        >>> print(*table.lines(), sep="|")
        Ranks|| host   step ms| ──────────────| node1      2.5|
    """

    title: str
    columns: tuple[Column, ...]
    note: str = ""
    name: str = ""
    file: str = ""
    folded: bool = False
    keys: int = 1
    rules: frozenset[int] = frozenset()

    @classmethod
    def of_rows(
        cls,
        title: str,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        text: Collection[str] = (),
        note: str = "",
        keys: int = 1,
    ) -> Table:
        """Return a table of texts that are formatted already.

        Args:
            title, note, keys: as in `Table`.
            heads: headings; a unit is on a second line.
            rows: cells of each row; those that are missing at its end are empty, and an empty row
                draws a line.
            text: headings of the columns that contain text: they are left-aligned.
        """
        found = [(*row, *[""] * (len(heads) - len(row))) for row in rows if row]
        columns = []
        for i, heading in enumerate(heads):
            head, _, unit = heading.partition("\n")
            kind = "prose" if heading in text else "computed"
            columns.append(Column(head, unit, tuple((row[i],) for row in found), kind))
        rules = frozenset(sum(map(bool, rows[:i])) for i, row in enumerate(rows) if not row)
        return cls(title, tuple(columns), note, keys=keys, rules=rules)

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The cells by row."""
        return rows_of(self.columns)

    @property
    def heads(self) -> list[str]:
        """The headings."""
        return [column.head for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The cells by row as people read them."""
        return texts_of(self.columns)[1:]

    def with_cells(self, change: Callable[[Cell], Cell]) -> Table:
        """Return the table with changed cells."""
        columns = (
            replace(column, cells=tuple(map(change, column.cells))) for column in self.columns
        )
        return replace(self, columns=tuple(columns))

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines of the table on a terminal.

        Args:
            width: columns of the terminal, at least 20; None if there is no limit.
        """
        return [line for _, line in self._styled(width)]

    def to_html(self) -> str:
        """Return the table for a notebook."""
        return notebook_html(self.title, self.columns, self.note)

    def to_page(self) -> str:
        """Return the ``table`` element of a report."""
        return page_html(self.columns, self.file, self.rules)

    def to_latex(self) -> str:
        """Return a ``tabular`` without packages; the title and the note are comments."""
        return tabular(self.title, self.columns, self.note)

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        return markdown_text(self.title, self.columns, self.note)

    def to_csv(self) -> str:
        r"""Return the table as CSV with exact numbers, in the units of their file.

        A column with intervals has one column per number, such as ``step_ms.value`` and
        ``step_ms.low``. A cell without a number is empty; that of a text contains the text.

        Example:
            >>> Table("Points", (Column("step", "ms", (("–",),)),)).to_csv()
            'step\n–\n'
        """
        return csv_text(self.columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for style, line in self._styled(options.max_width):
            yield Text(line, style=style, no_wrap=True)

    def _styled(self, width: int | None) -> Iterator[tuple[str, str]]:
        shown = [column for column in self.columns if not column.is_detail]
        keys = sum(not column.is_detail for column in self.columns[: self.keys])
        return styled_lines(self.title, shown, self.note, width=width, keys=keys, rules=self.rules)
