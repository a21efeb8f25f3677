"""Tables: columns from records and the vocabulary, and five forms of each table.

A `Table` consists of columns, which `Records` makes from the records of a file. Its methods return
it as lines of a terminal, HTML, CSV, Markdown and LaTeX.
"""

from dptrain.tables.cells import (
    MISSING,
    UNKNOWN,
    Cell,
    Column,
    Number,
    cell_text,
    texts,
)
from dptrain.tables.records import Records, bounds, computed
from dptrain.tables.table import Table

__all__ = [
    "MISSING",
    "UNKNOWN",
    "Cell",
    "Column",
    "Number",
    "Records",
    "Table",
    "bounds",
    "cell_text",
    "computed",
    "texts",
]
