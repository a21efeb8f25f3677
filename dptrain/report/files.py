"""The files of a report: the page, and its plots as SVG and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dptrain.audit.study import AUDIT, Audit
from dptrain.errors import UserError
from dptrain.files import write_whole, writing
from dptrain.measure.profile.profile_files import LOSSES, PROFILE, TRACE
from dptrain.measure.profile.rooflines import with_roofs
from dptrain.report.comparisons.compare_page import compare_page
from dptrain.report.comparisons.compare_plots import ROLES
from dptrain.report.comparisons.comparison import (
    FILE,
    Comparison,
    Result,
    compare_profiles,
    compare_runs,
    compare_studies,
)
from dptrain.report.elements.conditions import conditions_text, png_with, svg_with
from dptrain.report.elements.page import GENERATOR, Page, render
from dptrain.report.profiles.profile_page import MeasuredProfile, profile_page
from dptrain.report.runs.run_page import run_page
from dptrain.report.runs.run_record import TrainingRun
from dptrain.report.studies.bench_page import Benchmark
from dptrain.report.studies.experiment_page import (
    Experiment,
    Sweep,
    experiment_page,
    read_experiment,
)
from dptrain.report.studies.study_page import largest_points, study_page
from dptrain.runs.names import CONFIG
from dptrain.scaling.files import STUDY
from dptrain.scaling.study import Study
from dptrain.texts import command_line

REPORT, PLOTS = "report.html", "plots"
FLAG = "--output"
EXPECTED = (
    "a folder of `dptrain train`, `dptrain profile --output`, `dptrain scale`, `dptrain study` "
    "or `dptrain bench`"
)
_KINDS = {TrainingRun: "a training run", MeasuredProfile: "a profile", Study: "a study"}


def write_report(folder: Path, output: Path | None = None, *, replace: bool = False) -> Path:
    """Write the report of a training run, a profile, a study or an experiment.

    Equal records result in equal bytes.

    Args:
        folder: contains ``study.json``, ``profile.json``, ``sweep.json``,
            ``bench.json``, or a training run that has ended.
        output: folder of the report [default: `folder`].
        replace: whether to overwrite files that do not belong to a report.

    Returns:
        The path of the page.

    Raises:
        UserError: there is no record, a file belongs to no report, or a file cannot be written.
    """
    target = folder if output is None else output
    if not replace:
        _check_ours(target / REPORT)
    result = read_result(folder)
    page = make_page(result, folder)
    return _write(target, page, {}, environment_of(result), replace=replace)


def make_page(result: Result | Experiment, folder: Path) -> Page:
    """Return the page of a result that `read_result` has read from a folder."""
    if isinstance(result, Study):
        audit, notes = _audit(folder)
        return study_page(result, _profiles(result, folder), audit, notes)
    if isinstance(result, MeasuredProfile):
        return profile_page(result)
    if isinstance(result, Sweep | Benchmark):
        return experiment_page(result)
    return run_page(result)


def _audit(folder: Path) -> tuple[Audit | None, tuple[str, ...]]:
    """Return the audit of a study, and why it is left out if it cannot be read."""
    if not (folder / AUDIT).exists():
        return None, ()
    try:
        return Audit.read(folder / AUDIT), ()
    except UserError as error:
        return None, (f"The page lacks the audit of the intervals: {error}.",)


def write_comparison(folders: Sequence[Path], output: Path, *, replace: bool = False) -> Path:
    """Write the report that compares several results of one kind with the first one.

    Args:
        folders: folders as for `write_report`, two to six.
        output: folder of the report.
        replace: as for `write_report`.

    Returns:
        The path of the page.

    Raises:
        UserError: as for `write_report`, or the results cannot be compared.
    """
    if not replace:
        _check_ours(output / REPORT)
    if len(folders) > len(ROLES):
        raise UserError(
            f"{len(folders)} results are too many for one plot; compare at most {len(ROLES)}"
        )
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise UserError(f"{folder} occurs twice; compare different folders")
    found = [read_result(folder) for folder in folders]
    results = [result for result in found if not isinstance(result, Sweep | Benchmark)]
    if len(results) < len(found):
        raise UserError(
            "sweeps and benchmarks cannot be compared on a page; write the report of each one "
            "(`dptrain report DIR`)"
        )
    comparison = compare(folders, results)
    text = comparison.text() + "\n"
    environments = [environment_of(result) for result in results]
    same = environments[0] if all(map(environments[0].__eq__, environments)) else {}
    return _write(output, compare_page(comparison, results), {FILE: text}, same, replace=replace)


def read_result(folder: Path) -> Result | Experiment:
    """Return the result that a folder contains.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if not folder.exists():
        raise UserError(f"{folder} does not exist; expected {EXPECTED}")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; expected {EXPECTED}")
    if (folder / STUDY).exists():
        return Study.read(folder / STUDY)
    if (folder / PROFILE).exists():
        return MeasuredProfile.read(folder)
    if (folder / CONFIG).is_file():
        return TrainingRun.read(folder)
    if experiment := read_experiment(folder):
        return experiment
    if (folder / LOSSES).exists():
        raise UserError(
            f"{folder} contains only {LOSSES}, and a report also needs a profile: "
            f"{command_line('profile', '--output', folder)}"
        )
    raise UserError(f"{folder} contains no results of these commands; expected {EXPECTED}")


def compare(folders: Sequence[Path], results: Sequence[Result]) -> Comparison:
    """Return the comparison of results of one kind.

    Raises:
        UserError: the results are of different kinds, or cannot be compared.
    """
    kinds = [_KINDS[type(result)] for result in results]
    for folder, kind in zip(folders, kinds, strict=True):
        if kind != kinds[0]:
            raise UserError(
                f"{folders[0]} is {kinds[0]} and {folder} is {kind}; compare results of one kind"
            )
    first = results[0]
    if isinstance(first, TrainingRun):
        return compare_runs([r for r in results if isinstance(r, TrainingRun)])
    if isinstance(first, MeasuredProfile):
        return compare_profiles(
            folders, [r.profile for r in results if isinstance(r, MeasuredProfile)]
        )
    return compare_studies(folders, [r for r in results if isinstance(r, Study)])


def environment_of(result: Result | Experiment) -> Mapping[str, Any]:
    """Return the contents of ``env.json``; nothing if the page names the machine itself."""
    if isinstance(result, Sweep | Benchmark):
        return {}
    return result.profile.environment if isinstance(result, MeasuredProfile) else result.environment


def _write(
    target: Path,
    page: Page,
    others: Mapping[str, str],
    environment: Mapping[str, Any],
    *,
    replace: bool,
) -> Path:
    """Write a page, its plots with their conditions, and other files."""
    files: dict[str, str | bytes] = {**others}
    conditions = conditions_text(page, environment)
    for plot in page.plots:
        files[f"{PLOTS}/{plot.name}.svg"] = svg_with(plot, conditions)
        files[f"{PLOTS}/{plot.name}.png"] = png_with(plot, conditions)
    files[REPORT] = render(page)  # The page is last, so that its plots exist.
    if not replace:
        for name in files:
            _check_ours(target / name)
    with writing(target, FLAG):
        (target / PLOTS).mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        write_whole(target / name, contents, FLAG)
    return target / REPORT


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
            measured = MeasuredProfile.read(launch, trace)
            roofs = study.roofs.get(point.name)
            if roofs is not None:
                measured = replace(measured, profile=with_roofs(measured.profile, roofs))
            found[point.name] = measured
    return found


def _check_ours(path: Path) -> None:
    """Refuse to overwrite a file that belongs to no report.

    A page and its plots contain the name of the program.
    """
    if not path.exists():
        return
    with writing(path, FLAG):
        there = path.read_bytes()
    mark = b'"quantities"' if path.name == FILE else GENERATOR.encode()
    if mark not in there:
        raise UserError(
            f"{path} exists and was not written by {GENERATOR}; move it, choose another {FLAG}, or "
            f"use {GENERATOR} --replace"
        )
