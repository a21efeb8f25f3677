"""Forecasts that are stored before the larger job runs, and compared with it afterwards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, writing
from dptrain.machine import available_cores
from dptrain.measure.statistics import FEWEST
from dptrain.records import Form, StoredRecord
from dptrain.scaling.conclusion import withheld_sentence
from dptrain.scaling.design import PROFILE, Design
from dptrain.scaling.files import STUDY
from dptrain.scaling.forecasts.forecast import FEWEST_RANKS
from dptrain.scaling.study import Forecast, Point, Score, Study

REGISTERED = "registered-forecast.json"
IRRELEVANT = frozenset({"seed", "cores"})
"""Entries of `Profile.job` that do not change a step; launchers bind some jobs to fewer cores."""
ELSEWHERE = ("SLURM_", "PBS_", "LSB_", "PE_HOSTFILE", "FLUX_", "HYDRA_", "OMPI_MCA_", "PRTE_")
"""Prefixes of variables by which batch systems and launchers may name other nodes."""


@dataclass(frozen=True)
class Registered(StoredRecord):
    """The forecasts of a study, with hashes that show a later change.

    Attributes:
        registered: time of registration in UTC, ISO 8601.
        job: `Study.job`, the settings of the measured launches.
        base_ranks, base_threads, base_batch: of the base of the efficiencies.
        launches: SHA-256 of the ``profile.json`` of each measured launch, by its folder relative to
            this file.
        forecasts: those that are given.
        sha256: SHA-256 of the file with an empty `sha256`, as JSON with an indent of 1.
    """

    FORM = Form(
        noun="registered forecast",
        otherwise="expected a file that `dptrain scale --register` has written",
        anew="score it with the version of dptrain that registered it",
    )

    registered: str
    job: dict[str, Any]
    base_ranks: int
    base_threads: int
    base_batch: int
    launches: dict[str, str]
    forecasts: tuple[Forecast, ...]
    sha256: str = ""

    @classmethod
    def read(cls, path: Path) -> Registered:
        """Read a file that `register` has written.

        Raises:
            UserError: it cannot be read, or it or a launch next to it was changed afterwards.
        """
        found = super().read(path)
        # The hash is that of the file: other versions write other fields.
        content = _content_sha256(path.read_bytes())
        if found.sha256 != content:
            raise UserError(
                f"{path} was changed after it was registered: its content has the SHA-256 "
                f"{content[:16]}…, expected {str(found.sha256)[:16]}…; restore the file, or delete "
                "it to collect without a score"
            )
        for folder, expected in found.launches.items():
            profile = path.parent / folder / PROFILE
            if profile.is_file() and _sha256(profile) != expected:
                raise UserError(
                    f"{profile} was changed after {path} was registered from it; restore the "
                    f"profile, or delete {path.name} to collect without a score"
                )
        return found


def _content_sha256(text: str | bytes) -> str:
    """Return the hash that an unchanged file has as `sha256`."""
    content = {**parse_json(text), "sha256": ""}
    return hashlib.sha256(dump_json(content, indent=1).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refuse_second(folder: Path) -> None:
    """Refuse to replace a registered forecast.

    Raises:
        UserError: the folder has one.
    """
    path = folder / REGISTERED
    if path.exists():
        raise UserError(
            f"{path} is already registered, and a registered forecast is not replaced; use "
            "--output DIR for another study, or delete the file"
        )


def refuse_without_forecast(design: Design) -> None:
    """Refuse a study of which it is known before any launch that it will have no forecast.

    Raises:
        UserError: it has too few numbers of ranks or launches, or fills the only node.
    """
    launches = design.most_launches if design.until else design.launches
    reason = ""
    if len(design.ranks) < FEWEST_RANKS:
        reason = f"{FEWEST_RANKS} numbers of ranks or more, but --ranks has {len(design.ranks)}"
        advice = "use for example --ranks 1,2,4"
    elif launches < FEWEST:
        reason = f"{FEWEST} launches of each point or more, but the study makes {launches}"
        advice = f"use --launches {FEWEST}, or better 5"
    elif _stays_here(design):
        cores, most = available_cores(), max(design.ranks) * min(design.threads)
        if most >= cores:
            reason = (
                f"cores of this node that no measured rank uses, or ranks on 2 and 4 nodes, but "
                f"the node has {cores} cores and the largest point uses {most}"
            )
            advice = "use fewer --ranks, or a --launcher that starts ranks on several nodes"
    if reason:
        raise UserError(f"--register needs a forecast, which needs {reason}; {advice}")


def _stays_here(design: Design) -> bool:
    """Return True if all ranks of a study compute on cores of this node."""
    is_default = not design.launcher and not any(n.startswith(ELSEWHERE) for n in os.environ)
    return is_default and load_backend(str(design.settings["backend"])).threaded


def register(study: Study, folder: Path) -> Registered:
    """Store the forecasts of a study in its folder.

    Raises:
        UserError: there is no forecast, one is registered already, or the file cannot be written.
    """
    refuse_second(folder)
    given = tuple(forecast for forecast in study.forecasts if forecast.points)
    if not given:
        reasons = [withheld_sentence(forecast) for forecast in study.forecasts]
        raise UserError(
            "--register found nothing to register: "
            + (" ".join(reasons) or "the study has one number of ranks; measure more")
        )
    names = {launch.folder for point in study.points for launch in point.launches}
    record = Registered(
        registered=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        job=study.job,
        base_ranks=study.base_ranks,
        base_threads=study.base_threads,
        base_batch=_base_batch(study),
        launches={name: _sha256(folder / name / PROFILE) for name in sorted(names)},
        forecasts=given,
    )
    record = replace(record, sha256=_content_sha256(record.text()))
    path = folder / REGISTERED
    with writing(path, "--output"):
        path.touch(exist_ok=False)  # Of two commands at the same time, one registers.
    try:
        record.write(path)
    except BaseException:
        path.unlink()
        raise
    return record


def _base_batch(study: Study) -> int:
    base = (study.base_ranks, study.base_threads)
    return next(p.batch_size for p in study.points if (p.ranks, p.threads) == base)


def find_registered(folders: Iterable[Path]) -> dict[Path, Registered]:
    """Return the registered forecasts in and below folders, by their paths; copies count once.

    Raises:
        UserError: one cannot be read, or was changed.
    """
    paths = {path.resolve() for folder in folders for path in folder.rglob(REGISTERED)}
    found: dict[str, tuple[Path, Registered]] = {}
    for path in sorted(paths):
        record = Registered.read(path)
        found.setdefault(record.sha256, (path, record))
    return dict(found.values())


def scored(
    study: Study, records: Iterable[Registered], jobs: Mapping[str, Mapping[str, Any]]
) -> Study:
    """Return the study with the scores of registered forecasts, and their sentences.

    Args:
        study: the study.
        records: registered forecasts.
        jobs: `Profile.job` of each launch of the study, by its folder.
    """
    scores: list[Score] = []
    notes: list[str] = []
    for record in records:
        if reason := _incomparable(study, record):
            notes.append(f"the forecast {record.sha256[:8]} is not scored: {reason}")
            continue
        found = list(_scores(study, record, jobs))
        notes += [note for note in found if isinstance(note, str)]
        scores += [score for score in found if isinstance(score, Score)]
    return replace(
        study,
        scores=tuple(scores),
        conclusion=(*study.conclusion, *map(sentence, scores)),
        notes=(*study.notes, *notes),
    )


def _incomparable(study: Study, record: Registered) -> str:
    """Return why the study is no test of a forecast, or ""."""
    base = study.base_ranks, study.base_threads, _base_batch(study)
    expected = record.base_ranks, record.base_threads, record.base_batch
    if base != expected:
        texts = [
            "{} ranks × {} threads with a minibatch of {}".format(*b) for b in (expected, base)
        ]
        return f"its base has {texts[0]}, that of this study has {texts[1]}"
    return ""


def _scores(
    study: Study, record: Registered, jobs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Score | str]:
    """Return the score of each number of ranks that was measured, or why it has none."""
    points = {(p.scaling, p.threads, p.ranks): p for p in study.points}
    for forecast in record.forecasts:
        for (ranks, _, efficiency), limits in zip(forecast.points, forecast.intervals, strict=True):
            point = points.get((forecast.scaling, forecast.threads, ranks))
            name = f"the forecast {record.sha256[:8]} for {ranks:,} ranks"
            if point is None:
                others = [p.threads for p in study.points if p.ranks == ranks]
                if others:
                    yield (
                        f"{name} is not scored: it was made for {forecast.threads} threads per "
                        f"rank, this study has {others[0]}"
                    )
            elif reason := _untested(point, record, jobs):
                yield f"{name} is not scored: {reason}"
            elif point.efficiency is not None:
                yield Score(
                    record.sha256, forecast.scaling, forecast.threads, ranks, efficiency, *limits,
                    point.efficiency,
                )  # fmt: skip


def _untested(point: Point, record: Registered, jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why a point does not test a forecast, or ""."""
    for launch in point.launches:
        job = jobs.get(launch.folder, {})
        for name in sorted((record.job.keys() & job.keys()) - IRRELEVANT):
            if job[name] != record.job[name]:
                return f"it was made for {name} {record.job[name]}, {launch.folder} has {job[name]}"
    if point.efficiency is None:
        return "too few launches were made for an efficiency"
    registered = datetime.fromisoformat(record.registered)
    for launch in point.launches:
        if not launch.started or datetime.fromisoformat(launch.started) < registered:
            return f"{launch.folder} did not start after the registration at {record.registered}"
    return ""


def sentence(score: Score) -> str:
    """Return the verdict of a score as a sentence."""
    threads = f" × {score.threads} threads" if score.threads > 1 else ""
    return (
        f"The registered forecast of {score.efficiency:.0%} ({score.low:.0%} to {score.high:.0%}) "
        f"for {score.ranks:,} ranks{threads}, {score.scaling} scaling: measured "
        f"{score.measured.value:.0%} ({score.measured.low:.0%} to {score.measured.high:.0%}): "
        f"{score.verdict}."
    )


@dataclass(frozen=True)
class Entry:
    """A registered efficiency, with its score if it was measured."""

    path: Path
    registered: str
    forecast: Forecast
    index: int
    score: Score | None

    def facts(self) -> dict[str, Any]:
        """Return the entry as plain values; efficiencies are shares."""
        (ranks, _, efficiency), (low, high) = (
            self.forecast.points[self.index],
            self.forecast.intervals[self.index],
        )
        score = self.score
        return {
            "file": str(self.path), "registered": self.registered,
            "scaling": self.forecast.scaling, "threads": self.forecast.threads, "ranks": ranks,
            "efficiency": efficiency, "low": low, "high": high,
            "measured": None if score is None else score.measured.value,
            "verdict": "" if score is None else score.verdict,
        }  # fmt: skip


def calibration(folders: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """Return each registered efficiency below folders, with its score in a study below them.

    Returns:
        The efficiencies, and a remark on each study that cannot be read.

    Raises:
        UserError: a registered forecast cannot be read, or was changed.
    """
    records = find_registered(folders)
    studies = {path.resolve() for folder in folders for path in folder.rglob(STUDY)}
    scores: dict[tuple[str, str, int, int], Score] = {}
    remarks = []
    for path in sorted(studies):
        try:
            found = Study.read(path).scores
        except UserError as error:
            remarks.append(f"without the scores of a study: {error}")
        else:
            scores |= {(s.sha256, s.scaling, s.threads, s.ranks): s for s in found}
    entries = [
        Entry(
            path, record.registered, forecast, index,
            scores.get((record.sha256, forecast.scaling, forecast.threads, ranks)),
        )
        for path, record in records.items()
        for forecast in record.forecasts
        for index, (ranks, _, _) in enumerate(forecast.points)
    ]  # fmt: skip
    return entries, remarks
