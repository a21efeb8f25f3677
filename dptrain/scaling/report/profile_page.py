"""The page of one profile, and the sections that a study's page shares with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dptrain.measure.profile import Profile
from dptrain.measure.profile_files import PROFILE, TRACE
from dptrain.measure.profile_tables import straggler_line
from dptrain.scaling.report.canvas import part_name
from dptrain.scaling.report.definitions import words
from dptrain.scaling.report.numbers import fixed, flop_rate, percent, scaled_bytes, short
from dptrain.scaling.report.page import Key, Page, Section
from dptrain.scaling.report.profile_plots import profile_plots
from dptrain.scaling.report.profile_tables import profile_tables
from dptrain.scaling.report.tables import Number
from dptrain.scaling.report.timeline import StepSpans, read_step

FILE = PROFILE


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile, and a step of its trace where there is one."""

    profile: Profile
    step: StepSpans | None = None

    @classmethod
    def read(cls, folder: Path, traced: Path | None = None) -> MeasuredProfile:
        """What `dptrain profile --output` has written.

        Args:
            folder: of the profile.
            traced: of the trace, if that is another.

        Raises:
            UserError: there is no profile, or it cannot be read.
        """
        return cls(Profile.read(folder / PROFILE), read_step((traced or folder) / TRACE))


def profile_page(measured: MeasuredProfile) -> Page:
    """The report of one profile."""
    profile = measured.profile
    job = profile.job
    ranks = int(job["ranks"])
    return Page(
        kind="dptrain profile",
        title=f"A step of {job['network']} on {ranks} rank{'s' * (ranks > 1)}",
        about=f"{job_line(job)}. {profile.steps} steps.",
        conclusion=_conclusion(profile),
        file=FILE,
        keys=_keys(profile),
        notes=(),
        sections=(
            inside(measured, "", "Inside a step", FILE),
            environment_section(profile.environment, []),
            definitions_section(study=False),
        ),
        closing="Written by dptrain from profile.json; each number stands there in full.",
    )


def job_line(job: Mapping[str, Any]) -> str:
    """What is trained and how, in a line."""
    threads = job.get("threads")  # None where a study has several numbers of them.
    each = "" if threads is None else f", {threads} thread{'s' * (threads > 1)} a rank"
    return (
        f"{job['network']} ({fixed(job['parameters'], 0)} parameters) on {job['data']}, "
        f"{job['backend']} in {job['precision']}, {job['strategy']}{each}"
    )


def inside(measured: MeasuredProfile, suffix: str, title: str, file: str) -> Section:
    """Plots and tables of one profile."""
    profile = measured.profile
    text = []
    if profile.roofs is not None:
        roofs = profile.roofs
        text.append(
            f"Measured roofs: {flop_rate(roofs.gflops)} and {short(roofs.gb_per_s)} GB/s "
            f"({roofs.how})."
        )
    if len(profile.ranks) > 1:
        text.append(sentence(straggler_line(profile)))
    ranks = len(profile.ranks)
    where = f", {ranks} rank{'s' * (ranks > 1)}" if suffix else ""
    return Section(
        f"inside{suffix}",
        title,
        text=tuple(text),
        plots=tuple(profile_plots(profile, suffix, where, measured.step)),
        tables=tuple(profile_tables(profile, file, suffix)),
        new_page=bool(suffix),
    )


def sentence(text: str) -> str:
    """With a capital at its beginning, unless that is a path, and a full stop at its end."""
    word = text.partition(" ")[0].rstrip(":,")
    begin = f"{text[:1].upper()}{text[1:]}" if word.isalpha() else text
    return begin if begin.endswith((".", "!", "?")) else f"{begin}."


def environment_section(
    environment: Mapping[str, Any], commands: Sequence[tuple[str, str]]
) -> Section:
    """Where it was measured, and by which commands."""
    found = dict(environment)
    facts: list[tuple[str, str]] = []
    for name in ("started", "host", "cpu", "cores", "os", "python", "directory"):
        if name in found:
            facts.append((name, str(found[name])))
    if "memory_bytes" in found:
        facts.append(("memory", scaled_bytes(found["memory_bytes"])))
    if found.get("mpi"):
        facts.append(("mpi", str(found["mpi"].get("library", ""))))
    for key in ("versions", "variables"):
        if found.get(key):
            facts.append((key, ", ".join(f"{n} {v}" for n, v in found[key].items())))
    if found.get("command"):
        commands = [*commands, ("As the process saw it", shlex.join(found["command"]))]
    return Section(
        "environment", "Environment and commands", facts=tuple(facts), commands=tuple(commands)
    )


def definitions_section(*, study: bool) -> Section:
    """What every word in the report means."""
    return Section("words", "Definitions", words=words(study=study), new_page=True)


def _conclusion(profile: Profile) -> tuple[str, ...]:
    parts = asdict(profile.parts)
    whole = profile.parts.total or 1.0
    first = max(profile.stages, key=lambda stage: stage.share)
    rest = {name: ms for name, ms in parts.items() if name != "compute"}
    largest = max(rest, key=lambda name: rest[name])
    return (
        f"A step takes {short(profile.step_ms.median)} ms, "
        f"{percent(parts['compute'] / whole, decimals=0)} of it computing; the next largest part "
        f"is {part_name(largest)} with {percent(rest[largest] / whole, decimals=0)}.",
        f"The longest stage is {first.name}, {percent(first.share, decimals=0)} of the step.",
    )


def _keys(profile: Profile) -> tuple[Key, ...]:
    step = profile.step_ms
    parts = asdict(profile.parts)
    whole = profile.parts.total or 1.0
    exposed = parts["transfer"] + parts["imbalance"]
    keys = [
        Key("Step", (Number(short(step.median), step.median, "step_ms.median"), " ms"),
            ("quartiles ", Number(short(step.q1), step.q1, "step_ms.q1"), "–",
             Number(short(step.q3), step.q3, "step_ms.q3"))),
        Key("Rate", (Number(fixed(profile.samples_per_s, 0), profile.samples_per_s,
                            "samples_per_s"),), ("samples/s",)),
        Key("Computing", (percent(parts["compute"] / whole),), ("of the step",)),
    ]  # fmt: skip
    if len(profile.ranks) > 1:
        keys.append(Key("Exposed communication", (percent(exposed / whole),), ("of the step",)))
    return tuple(keys)
