"""The page of one profile, and the sections that it shares with the page of a study."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dptrain.measure.counters import processor_line
from dptrain.measure.energy import energy_lines
from dptrain.measure.losses import Losses
from dptrain.measure.profile import Profile, Spread
from dptrain.measure.profile_files import LOSSES, PROFILE, TRACE
from dptrain.measure.profile_tables import straggler_line
from dptrain.scaling.report.canvas import part_name
from dptrain.scaling.report.definitions import definitions
from dptrain.scaling.report.loss_tables import loss_tables
from dptrain.scaling.report.numbers import fixed, flop_rate, percent, scaled_bytes, short
from dptrain.scaling.report.page import Key, Page, Section
from dptrain.scaling.report.profile_plots import profile_plots
from dptrain.scaling.report.profile_tables import profile_tables
from dptrain.scaling.report.tables import Number
from dptrain.scaling.report.timeline import StepSpans, read_step

FILE = PROFILE


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile; a step of its trace, and losses by experiment, if there are any."""

    profile: Profile
    step: StepSpans | None = None
    losses: Losses | None = None

    @classmethod
    def read(cls, folder: Path, traced: Path | None = None) -> MeasuredProfile:
        """Read the files of `dptrain profile --output`.

        Args:
            folder: folder of the profile.
            traced: folder of the trace [default: `folder`].

        Raises:
            UserError: there is no profile, or it cannot be read.
        """
        losses = Losses.read(folder / LOSSES) if (folder / LOSSES).exists() else None
        return cls(Profile.read(folder / PROFILE), read_step((traced or folder) / TRACE), losses)


def profile_page(measured: MeasuredProfile) -> Page:
    """Return the report of one profile."""
    profile = measured.profile
    job = profile.job
    ranks = int(job["ranks"])
    return Page(
        kind="dptrain profile",
        title=f"{_step_name(profile)} of {job['network']} on {ranks} rank{'s' * (ranks > 1)}",
        about=f"{job_line(job)}. {profile.steps} steps.",
        conclusion=_conclusion(profile),
        file=FILE,
        keys=_keys(profile),
        notes=(),
        sections=(
            step_section(measured, "", "Profile of a step", FILE),
            *_losses(measured.losses),
            environment_section(profile.environment, []),
            definitions_section(study=False),
        ),
        closing="Written by dptrain from profile.json, which contains each number in full "
        "precision.",
    )


def _losses(losses: Losses | None) -> list[Section]:
    if losses is None:
        return []
    tables = tuple(loss_tables(losses, LOSSES))
    return [Section("losses", "Losses by experiment", tables=tables)]


def job_line(job: Mapping[str, Any]) -> str:
    """Return the network, data, backend and strategy of a job in a line."""
    threads = job.get("threads")  # None if a study has several numbers of threads.
    each = "" if threads is None else f", {threads} thread{'s' * (threads > 1)} per rank"
    return (
        f"{job['network']} ({fixed(job['parameters'], 0)} parameters) on {job['data']}, "
        f"{job['backend']} in {job['precision']}, {job['strategy']}{each}"
    )


def step_section(measured: MeasuredProfile, suffix: str, title: str, file: str) -> Section:
    """Return the section with the plots and tables of one profile.

    Args:
        measured: the profile.
        suffix: suffix of the names of the plots and tables.
        title: heading of the section.
        file: path of the profile, relative to the page.
    """
    profile = measured.profile
    text = []
    if profile.roofs is not None:
        roofs = profile.roofs
        text.append(
            f"Measured limits of the machine: {flop_rate(roofs.gflops)} and "
            f"{short(roofs.gb_per_s)} GB/s ({roofs.how})."
        )
    if profile.energy is not None:
        text += map(sentence, energy_lines(profile.energy))
    if profile.processor is not None:
        text.append(sentence(processor_line(profile.processor)))
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
    """Return the text with a capital letter, unless it starts with a path, and a full stop."""
    word = text.partition(" ")[0].rstrip(":,")
    begin = f"{text[:1].upper()}{text[1:]}" if word.isalpha() else text
    return begin if begin.endswith((".", "!", "?")) else f"{begin}."


def environment_section(
    environment: Mapping[str, Any], commands: Sequence[tuple[str, str]]
) -> Section:
    """Return the section with the machine, the versions and the commands."""
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
        commands = [*commands, ("Command line of the process", shlex.join(found["command"]))]
    return Section(
        "environment", "Environment and commands", facts=tuple(facts), commands=tuple(commands)
    )


def definitions_section(*, study: bool) -> Section:
    """Return the section with the definitions of all terms."""
    found = definitions(study=study)
    return Section("definitions", "Definitions", definitions=found, new_page=True)


def _step_name(profile: Profile) -> str:
    return "A forward pass" if profile.job.get("task") == "inference" else "A step"


def _conclusion(profile: Profile) -> tuple[str, ...]:
    parts = asdict(profile.parts)
    whole = profile.parts.total or 1.0
    longest = max(profile.stages, key=lambda stage: stage.share)
    ordered = sorted(parts, key=lambda name: -parts[name])
    shares = [
        f"{percent(parts[name] / whole, decimals=0)} {part_name(name)}"
        for name in ordered
        if parts[name] >= 0.01 * whole
    ]
    return (
        f"{_step_name(profile)} takes {short(profile.step_ms.median)} ms: {', '.join(shares)}.",
        f"The longest stage is {longest.name} with {percent(longest.share, decimals=0)} of the "
        "step.",
    )


def _step_interval(step: Spread) -> tuple[str | Number, ...]:
    """Return the interval of the median and the 99th percentile; quartiles if there are none."""
    if step.low is None or step.high is None or step.p99 is None:
        low, high = (Number(short(step.q1), step.q1, "step_ms.q1"),
                     Number(short(step.q3), step.q3, "step_ms.q3"))  # fmt: skip
        return "quartiles ", low, "–", high
    return (
        "95% interval ", Number(short(step.low), step.low, "step_ms.low"), "–",
        Number(short(step.high), step.high, "step_ms.high"),
        "; p99 ", Number(short(step.p99), step.p99, "step_ms.p99"),
    )  # fmt: skip


def _keys(profile: Profile) -> tuple[Key, ...]:
    step = profile.step_ms
    parts = asdict(profile.parts)
    whole = profile.parts.total or 1.0
    exposed = parts["transfer"] + parts["imbalance"]
    keys = [
        Key("Step time", (Number(short(step.median), step.median, "step_ms.median"), " ms"),
            _step_interval(step)),
        Key("Throughput", (Number(fixed(profile.samples_per_s, 0), profile.samples_per_s,
                            "samples_per_s"),), ("samples/s",)),
        Key("Computation", (percent(parts["compute"] / whole),), ("of the step",)),
    ]  # fmt: skip
    if len(profile.ranks) > 1:
        keys.append(
            Key(
                f"{part_name('transfer').capitalize()} and {part_name('imbalance')}",
                (percent(exposed / whole),),
                ("of the step",),
            )
        )
    return tuple(keys)
