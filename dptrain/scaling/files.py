"""The files of a study: one JSON record, and tables as CSV for other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import parse_json, write_whole
from dptrain.measure.profile.profile_files import csv_text
from dptrain.scaling.study import Point, Study

STUDY, POINTS, LAUNCHES, FORECASTS = (
    "study.json",
    "points.csv",
    "launches.csv",
    "forecasts.csv",
)


def write_study(study: Study, folder: Path) -> None:
    """Write `STUDY` and the CSV files; files of an earlier study are replaced.

    Raises:
        UserError: a file cannot be written, or would replace a file that belongs to no study.
    """
    refuse_foreign(folder)
    rows = {
        POINTS: [_point(point) for point in study.points],
        LAUNCHES: [
            {"point": point.name, **asdict(launch)}
            for point in study.points
            for launch in point.launches
        ],
        FORECASTS: [
            {
                "scaling": forecast.scaling, "threads": forecast.threads,
                "hindcast_error": forecast.hindcast_error, "ranks": ranks, "step_ms": step_ms,
                "efficiency": efficiency, "low": low, "high": high, "wide": is_wide,
                "assumes": assumed,
            }
            for forecast in study.forecasts
            for (ranks, step_ms, efficiency), (low, high), is_wide, assumed in zip(
                forecast.points, forecast.intervals, forecast.wide, forecast.assumed, strict=True
            )
        ],
    }  # fmt: skip
    study.write(folder / STUDY)
    for name, records in rows.items():
        write_whole(folder / name, csv_text(records), "--output")


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace a file that belongs to no study.

    Raises:
        UserError: the folder contains a file with one of our names, but no study.
    """
    names = (STUDY, POINTS, LAUNCHES, FORECASTS)
    present = [name for name in names if (folder / name).exists()]
    if present and not _is_study(folder / STUDY):
        raise UserError(
            f"{folder / present[0]} exists and does not belong to a study, so it is not "
            "overwritten; choose another --output"
        )


def _is_study(path: Path) -> bool:
    """Return True if the file is a study of any version."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"version", "points", "forecasts"} <= values.keys()


def _point(point: Point) -> dict[str, Any]:
    values = asdict(point)
    del values["launches"]
    values["outliers"] = " ".join(map(str, point.outliers))
    values["recoveries"] = {r.name.replace(" ", "_"): asdict(r) for r in point.recoveries}
    if point.karp_flatt is None:
        values["karp_flatt"] = dict.fromkeys(("value", "low", "high", "n"))
    return {"point": point.name, **values}
