"""The record of a training run: one entry per epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from dptrain.errors import UserError
from dptrain.tables import Table

Record = dict[str, Any]
"""Values by name: `epoch`, `step`, `train_loss`, `train_accuracy`, `validation_loss`,
`validation_accuracy`, `learning_rate`, `samples_per_s`. A value that was not measured is None.
`epoch` is a fraction if training ends within an epoch."""


class History(Sequence[Record]):
    """Records of the epochs, the oldest first; also readable by column.

    `frame` returns it as a table of pandas, and notebooks show one.

    Examples:
        >>> history = History()
        >>> history.append({"epoch": 1, "train_loss": 1.2, "validation_accuracy": 0.9})
        >>> history.append({"epoch": 2, "train_loss": 0.4, "validation_accuracy": None})
        >>> history["train_loss"], history[-1]["epoch"]
        ([1.2, 0.4], 2)
        >>> history.columns()["validation_accuracy"]
        [0.9, None]
        >>> history
        epoch  train_loss  validation_accuracy
            1         1.2                  0.9
            2         0.4
    """

    def __init__(self) -> None:
        self._records: list[Record] = []

    def append(self, record: Record) -> None:
        """Add the record of an epoch."""
        self._records.append(record)

    @overload
    def __getitem__(self, key: int) -> Record: ...

    @overload
    def __getitem__(self, key: slice) -> list[Record]: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            if self._records and key not in self.names:
                raise KeyError(f"no column '{key}'; the columns are {', '.join(self.names)}")
            return [record.get(key) for record in self._records]
        return self._records[key]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(dict.fromkeys(name for record in self._records for name in record))

    def columns(self) -> dict[str, list[Any]]:
        """Return the values of each column by its name, one for each epoch; None if missing."""
        return {name: self[name] for name in self.names}

    def frame(self) -> Any:
        """Return the history as a `pandas.DataFrame` with a row for each epoch; NaN if missing.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError(
                "history.frame() needs pandas, which is not installed: pip install pandas; or use "
                "history.columns(), a dictionary of lists"
            ) from None
        return pandas.DataFrame(self.columns())

    def _repr_html_(self) -> str:
        rows = [[_text(record.get(name)) for name in self.names] for record in self._records]
        return Table.of_rows("", self.names, rows).to_html()

    def __repr__(self) -> str:
        if not self._records:
            return "History of no epochs"
        rows = [self.names, *([_text(r.get(n)) for n in self.names] for r in self._records)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths = [max(width, 8) if i else width for i, width in enumerate(widths)]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
