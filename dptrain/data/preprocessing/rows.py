"""How rows of a table become a sample: one row, several rows together, or a map of sensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.preprocessing.sensor_maps import interpolate, interpolation_weights
from dptrain.errors import UserError
from dptrain.network.layers import Shape


@dataclass(frozen=True)
class RowLayout:
    """The rows of a sample, and the position of their numbers in the input of a network.

    Attributes:
        num_columns: F, the number of input columns.
        lags: how many rows before row i each row of sample i is, from the oldest to the newest; ()
            if a sample is the row i alone.
        input_shape: of the network. With L lags, (L·F,) receives the rows one after the other,
            (1, L, F) has time on the vertical axis, and (F, 1, L) has a channel for each column.
        positions: x and y of the sensor of each column, one after the other; () unless rows become
            maps, (L, H, W), by `interpolation_weights`.
    """

    num_columns: int
    lags: tuple[int, ...]
    input_shape: Shape
    positions: tuple[float, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if a sample is a row as it is."""
        return not (self.lags or self.positions)

    @property
    def num_rows(self) -> int:
        """L, the number of rows of a sample."""
        return len(self.lags) or 1

    @property
    def depth(self) -> int:
        """Number of rows at the beginning of a table that have no complete sample."""
        return max(self.lags, default=0)

    @property
    def stored_shape(self) -> Shape:
        """Shape of a raw sample: (F,), or (1, L, F) with lags."""
        return (1, self.num_rows, self.num_columns) if self.lags else (self.num_columns,)

    @property
    def transposes(self) -> bool:
        """True if each column is a channel of the input."""
        is_arranged = bool(self.lags) and not self.positions
        return is_arranged and self.input_shape == (self.num_columns, 1, self.num_rows)

    def check(self, where: str) -> None:
        """Raise `UserError` unless the samples fit the input of the network.

        Args:
            where: name of the table, for messages.
        """
        length, width = self.num_rows, self.num_columns
        if self.positions:
            if len(self.input_shape) != 3 or self.input_shape[0] != length:
                raise UserError(
                    f"{where} has maps with {length} channels, one for each row of a sample, but "
                    f"the network's input is {self.input_shape}; expected ({length}, H, W)"
                )
            return
        shapes = [(length * width,), (1, length, width), (width, 1, length)]
        if self.lags and self.input_shape not in shapes:
            raise UserError(
                f"{where} has samples of {length} rows × {width} columns, but the network's input "
                f"is {self.input_shape}; expected {shapes[0]}, {shapes[1]} or {shapes[2]}"
            )

    def samples_of(self, table: NDArray[Any]) -> NDArray[Any]:
        """Return all samples of consecutive rows.

        Args:
            table: (n, F).

        Returns:
            (n − depth, 1, L, F) with lags, otherwise `table`.
        """
        if not self.lags:
            return table
        return self.gather(table, np.arange(self.depth, len(table), dtype=np.int64))

    def gather(self, table: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the raw samples of some rows, (n, *stored_shape)."""
        if not self.lags:
            return table[rows]
        found: NDArray[Any] = table[rows[:, None] - np.array(self.lags, np.int64)][:, None]
        return found

    def arrange(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return inputs of the network for standardised samples, (n, *stored_shape)."""
        if self.positions:
            weights = interpolation_weights(self.positions, *self.input_shape[1:])
            samples = interpolate(samples, weights)
        elif self.transposes:
            samples = samples.transpose(0, 3, 1, 2)
        return samples.reshape(len(samples), *self.input_shape)

    def __str__(self) -> str:
        """Return what a sample is for people; "" for one row."""
        if self.positions:
            height, width = self.input_shape[1:]
            size = f"{height}×{width}"
            return f"{size} maps of {self._rows_text}" if self.lags else f"a {size} map"
        return self._rows_text if self.lags else ""

    @property
    def _rows_text(self) -> str:
        if self.lags == tuple(range(self.depth, -1, -1)):
            return f"the last {self.num_rows} rows"
        return f"the rows {', '.join(map(str, self.lags))} rows earlier"


@dataclass(frozen=True)
class RowSamples:
    """The samples of a table as an array without memory: they are put together when read.

    Attributes:
        table: float32 (n, F), standardised.
        layout: of the samples. Sample i ends `RowLayout.lags` rows before row i; the first
            `RowLayout.depth` rows have none.
    """

    table: NDArray[np.float32]
    layout: RowLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an array with the inputs of all rows."""
        return (len(self.table), *self.layout.input_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the inputs."""
        return self.table.dtype

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Return the inputs of some rows."""
        return self.layout.arrange(self.layout.gather(self.table, rows))
