"""The files of a report: the page, its plots as SVG and PNG, and what no other file has as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dptrain.errors import UserError
from dptrain.files import write_whole, writing
from dptrain.measure.profile_files import PROFILE, TRACE, csv_text
from dptrain.scaling.files import STUDY
from dptrain.scaling.report.page import GENERATOR, Page, render
from dptrain.scaling.report.profile_page import MeasuredProfile, profile_page
from dptrain.scaling.report.study_page import largest_points, study_page
from dptrain.scaling.study import Study

REPORT, PLOTS = "report.html", "plots"
FLAG = "--output"
CURVES = "curves.csv"


def write_report(folder: Path, output: Path | None = None, *, replace: bool = False) -> Path:
    """Write the report of a study or of a profile; the same records give the same bytes.

    Args:
        folder: holds ``study.json``, or else ``profile.json``.
        output: where to write; `folder` where left out.
        replace: whether files that no report has written may be overwritten.

    Returns:
        The page's path.

    Raises:
        UserError: there is nothing to report, something else is in the way, or it cannot be
            written.
    """
    target = folder if output is None else output
    if not replace:
        _check_ours(target / REPORT, "")
    page, tables = _contents(folder)
    files: dict[str, str | bytes] = {f"{PLOTS}/{name}": text for name, text in tables.items()}
    for plot in page.plots:
        files[f"{PLOTS}/{plot.name}.svg"] = plot.svg
        files[f"{PLOTS}/{plot.name}.png"] = plot.png
    files[REPORT] = render(page)  # Last: it says that all is there.
    if not replace:
        for name, contents in files.items():
            _check_ours(target / name, contents)
    with writing(target, FLAG):
        (target / PLOTS).mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        write_whole(target / name, contents, FLAG)
    return target / REPORT


def _contents(folder: Path) -> tuple[Page, dict[str, str]]:
    """The page, and CSV files by name."""
    if (folder / STUDY).exists():
        study = Study.read(folder / STUDY)
        return study_page(study, _profiles(study, folder)), _tables(study)
    if (folder / PROFILE).exists():
        return profile_page(MeasuredProfile.read(folder)), {}
    raise UserError(
        f"{folder} holds no {STUDY} and no {PROFILE}; expected a folder that `dptrain scale` or "
        "`dptrain profile --output` has written"
    )


def _profiles(study: Study, folder: Path) -> Mapping[str, MeasuredProfile]:
    """Of the largest points, if they are there; a study may have been copied without them.

    Not every launch has a trace, so a point's timeline may be of another launch than its profile.
    """
    found = {}
    for point in largest_points(study):
        launch = folder / study.profiles.get(point.name, point.launches[0].folder)
        if (launch / PROFILE).exists():
            places = [launch, *(folder / other.folder for other in point.launches)]
            trace = next((place for place in places if (place / TRACE).exists()), launch)
            found[point.name] = MeasuredProfile.read(launch, trace)
    return found


def _tables(study: Study) -> dict[str, str]:
    """What plots draw and no CSV file of the study has: fitted curves."""
    curves = [
        {"scaling": f.scaling, "threads": f.threads, "model": f.model, "ranks": ranks,
         "step_ms": step_ms}
        for f in study.fits
        for ranks, step_ms in f.curve
    ]  # fmt: skip
    return {CURVES: csv_text(curves)} if curves else {}


def _check_ours(path: Path, contents: str | bytes) -> None:
    """Refuse to overwrite what no report has written.

    A page and its plots name their maker; a table is ours if it has the same columns.
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
            f"{path} is there and was not written by {GENERATOR}; move it away, choose another "
            f"{FLAG}, or try {GENERATOR} --replace"
        )
