"""The files of a report: the page, its plots as SVG and PNG, and the fitted curves as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dptrain.errors import UserError
from dptrain.files import write_whole, writing
from dptrain.measure.profile_files import PROFILE, TRACE, csv_text
from dptrain.scaling.files import STUDY
from dptrain.scaling.report.page import GENERATOR, Page, render
from dptrain.scaling.report.profile_page import MeasuredProfile, profile_page
from dptrain.scaling.report.run_page import run_page
from dptrain.scaling.report.run_record import TrainingRun
from dptrain.scaling.report.study_page import largest_points, study_page
from dptrain.scaling.study import Study
from dptrain.training.settings import CONFIG_FILE

REPORT, PLOTS = "report.html", "plots"
FLAG = "--output"
CURVES = "curves.csv"


def write_report(folder: Path, output: Path | None = None, *, replace: bool = False) -> Path:
    """Write the report of a study or of a profile; equal records result in equal bytes.

    Args:
        folder: contains ``study.json`` or ``profile.json``.
        output: folder of the report [default: `folder`].
        replace: whether to overwrite files that do not belong to a report.

    Returns:
        The path of the page.

    Raises:
        UserError: there is no record, a file belongs to no report, or a file cannot be written.
    """
    target = folder if output is None else output
    if not replace:
        _check_ours(target / REPORT, "")
    page, tables = _contents(folder)
    files: dict[str, str | bytes] = {f"{PLOTS}/{name}": text for name, text in tables.items()}
    for plot in page.plots:
        files[f"{PLOTS}/{plot.name}.svg"] = plot.svg
        files[f"{PLOTS}/{plot.name}.png"] = plot.png
    files[REPORT] = render(page)  # The page is last, so that its plots exist.
    if not replace:
        for name, contents in files.items():
            _check_ours(target / name, contents)
    with writing(target, FLAG):
        (target / PLOTS).mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        write_whole(target / name, contents, FLAG)
    return target / REPORT


def _contents(folder: Path) -> tuple[Page, dict[str, str]]:
    """Return the page, and the contents of CSV files by name."""
    if (folder / STUDY).exists():
        study = Study.read(folder / STUDY)
        return study_page(study, _profiles(study, folder)), _tables(study)
    if (folder / PROFILE).exists():
        return profile_page(MeasuredProfile.read(folder)), {}
    if (folder / CONFIG_FILE).is_file():
        return run_page(TrainingRun.read(folder)), {}
    raise UserError(
        f"{folder} contains neither {STUDY} nor {PROFILE}; expected a folder of `dptrain scale` or "
        "`dptrain profile --output`"
    )


def _profiles(study: Study, folder: Path) -> Mapping[str, MeasuredProfile]:
    """Return the profiles of the largest points, if they exist.

    A study may be copied without its launches. Not every launch has a trace, so the timeline of a
    point may show another launch than its profile.
    """
    found = {}
    for point in largest_points(study):
        launch = folder / study.profiles.get(point.name, point.launches[0].folder)
        if (launch / PROFILE).exists():
            folders = [launch, *(folder / other.folder for other in point.launches)]
            trace = next((other for other in folders if (other / TRACE).exists()), launch)
            found[point.name] = MeasuredProfile.read(launch, trace)
    return found


def _tables(study: Study) -> dict[str, str]:
    """Return the fitted curves, which no other CSV file of the study contains."""
    curves = [
        {"scaling": f.scaling, "threads": f.threads, "model": f.model, "ranks": ranks,
         "step_ms": step_ms}
        for f in study.fits
        for ranks, step_ms in f.curve
    ]  # fmt: skip
    return {CURVES: csv_text(curves)} if curves else {}


def _check_ours(path: Path, contents: str | bytes) -> None:
    """Refuse to overwrite a file that belongs to no report.

    A page and its plots contain the name of the program; a CSV file is ours if it has the same
    columns.
    """
    if not path.exists():
        return
    with writing(path, FLAG):
        there = path.read_bytes()
    if path.suffix == ".csv" and isinstance(contents, str):
        mark = contents.partition("\n")[0].encode()
        ours = there.startswith(mark)
    else:
        ours = GENERATOR.encode() in there
    if not ours:
        raise UserError(
            f"{path} exists and was not written by {GENERATOR}; move it, choose another {FLAG}, or "
            f"use {GENERATOR} --replace"
        )
