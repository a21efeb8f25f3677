"""Maps from sensors: tables of measurements with a table of the sensors' positions."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dptrain.data.preprocessing.names import same_form
from dptrain.errors import UserError, shown

NAMES = ("sensor", "name", "station", "column")
ACROSS = ("x", "longitude", "lon")
UP = ("y", "latitude", "lat")
DEGREES = ACROSS[1:]
"""Names of columns in degrees, which are converted to distances of equal length."""

LIMITS = {"longitude": 360.0, "lon": 360.0, "latitude": 90.0, "lat": 90.0}
"""Largest absolute values in columns in degrees."""

MOST_LENGTH = 1e100
"""Largest absolute value of a length; the sum of two squares is finite."""

Position = tuple[float, float]
"""Coordinates from left to right and from bottom to top."""


def interpolation_weights(
    positions: Sequence[float], height: int, width: int
) -> NDArray[np.float32]:
    """Return the weights of sensors in the pixels of a map.

    The map covers the sensors: the first column of pixels has the smallest x, the first row the
    largest y. The weights of a pixel are inversely proportional to the squares of the distances
    and add up to 1; a pixel on a sensor has its value. Source: D. Shepard, A two-dimensional
    interpolation function for irregularly-spaced data, 1968.

    Args:
        positions: x and y of the first sensor, of the second one, ….
        height, width: of the map in pixels.

    Returns:
        float32 (sensors, height, width).
    """
    points = np.asarray(positions, np.float64).reshape(-1, 2)
    (left, bottom), (right, top) = points.min(axis=0), points.max(axis=0)
    rows, columns = np.linspace(top, bottom, height), np.linspace(left, right, width)
    across = columns[None, None, :] - points[:, 0, None, None]
    up = rows[None, :, None] - points[:, 1, None, None]
    squares = across**2 + up**2
    nearest = squares.min(axis=0, keepdims=True)
    # Ratios instead of reciprocals, which are infinite on a sensor.
    ratios = np.divide(nearest, squares, out=np.ones_like(squares), where=squares > 0.0)
    return np.asarray(ratios / ratios.sum(axis=0), np.float32)


def interpolate(samples: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return maps (…, height, width) of the numbers of sensors, (…, sensors).

    Sensors are added in their order, so that a map does not depend on other samples.
    """
    maps = np.zeros((*samples.shape[:-1], *weights.shape[1:]), np.float32)
    for sensor, weight in enumerate(weights):
        maps += samples[..., sensor, None, None] * weight
    return maps


def read_positions(path: Path) -> dict[str, Position]:
    """Return the positions of sensors by name.

    The file is a table with a column of names (`NAMES`) and two of coordinates: x and y in any
    unit of length, or longitude and latitude in degrees.

    Raises:
        UserError: a column is missing, a number is not valid, or a name or a position occurs twice.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[same_form(text.strip()) for text in row] for row in csv.reader(file) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as csv ({error}); expected UTF-8 text") from None
    header = [name.lower() for name in rows[0]] if rows else []
    chosen = [_column(header, names, path) for names in (NAMES, ACROSS, UP)]
    found: dict[str, Position] = {}
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise UserError(
                f"{path}, row {number} has {len(row)} fields; expected {len(header)} as in row 1"
            )
        name, *texts = (row[index] for index in chosen)
        if name in found:
            raise UserError(f"{path} has sensor '{shown(name)}' more than once; remove one")
        x, y = (
            _coordinate(text, path, name, LIMITS.get(header[column], MOST_LENGTH))
            for text, column in zip(texts, chosen[1:], strict=True)
        )
        found[name] = x, y
    if len(found) < 2:
        raise UserError(f"{path} has {len(found)} sensors; expected at least 2")
    if header[chosen[1]] in DEGREES:
        scale = math.cos(math.radians(sum(y for _, y in found.values()) / len(found)))
        found = {name: (scale * x, y) for name, (x, y) in found.items()}
    _refuse_equal(found, path)
    return found


def positions_of(
    sensors: Mapping[str, Position], names: Sequence[str], path: Path
) -> tuple[float, ...]:
    """Return x and y of the named sensors, one after the other.

    Raises:
        UserError: a sensor has no position.
    """
    for name in names:
        if name not in sensors:
            raise UserError(
                f"{path} has no position of sensor '{shown(name)}'; add it, or leave it out of "
                "columns="
            )
    return tuple(number for name in names for number in sensors[name])


def _column(header: Sequence[str], names: Sequence[str], path: Path) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    found = ", ".join(shown(name, 40) for name in header[:10]) or "nothing"
    raise UserError(
        f"{path} has the columns {found}; expected one of them to be {' or '.join(names)}"
    )


def _coordinate(text: str, path: Path, name: str, limit: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= limit:
        raise UserError(
            f"{path}, sensor '{shown(name)}': a coordinate is '{shown(text)}'; expected a number "
            f"from -{limit:g} to {limit:g}"
        )
    return value


def _refuse_equal(sensors: Mapping[str, Position], path: Path) -> None:
    first: dict[Position, str] = {}
    for name, position in sensors.items():
        if first.setdefault(position, name) != name:
            raise UserError(
                f"{path}: sensors '{shown(first[position])}' and '{shown(name)}' have the same "
                "position; remove one"
            )
