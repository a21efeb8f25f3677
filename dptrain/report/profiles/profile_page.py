"""The page of one profile, and the sections that it shares with the page of a study."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from dptrain.measure.machine.counters import processor_line
from dptrain.measure.machine.energy import energy_lines
from dptrain.measure.machine.load import load_line
from dptrain.measure.profile.known_tables import NOT_VERIFIED
from dptrain.measure.profile.loss_tables import loss_tables
from dptrain.measure.profile.losses import Losses
from dptrain.measure.profile.pop import Pop
from dptrain.measure.profile.profile import Parts, Profile, Spread
from dptrain.measure.profile.profile_files import LOSSES, PROFILE, TRACE
from dptrain.measure.profile.profile_lines import STRAGGLER_SHARE, straggler_line
from dptrain.measure.profile.tables import (
    balance_table,
    memory_table,
    parts_table,
    pop_table,
    ranks_table,
    stages_table,
    statistics_table,
    sums_table,
)
from dptrain.measure.tail_index import tail_note
from dptrain.numbers import fixed, flop_rate, percent, scaled_bytes, short
from dptrain.report.elements.bars import parts_bars
from dptrain.report.elements.canvas import Plot
from dptrain.report.elements.definitions import OF_PROFILES, definitions
from dptrain.report.elements.page import Key, Page, Section
from dptrain.report.profiles.loss_plots import losses_plot
from dptrain.report.profiles.profile_plots import profile_plots
from dptrain.report.profiles.timeline import StepSpans, read_step
from dptrain.tables import Cell, Number, Table
from dptrain.vocabulary import label_of

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
        title=f"A {_noun(profile)} of {job['network']} on {ranks} rank{'s' * (ranks > 1)}",
        about=f"{job_line(job)}.",
        headline=_headline(profile),
        lead=(_lead(profile),),
        text=_text(profile),
        file=FILE,
        keys=_keys(profile),
        notes=tuple(map(sentence, _notes(profile))),
        sections=(
            step_section(measured, "", f"Profile of a {_noun(profile)}", FILE),
            *_losses(measured.losses),
            environment_section(profile.environment, [], _not_measured(profile)),
            definitions_section(OF_PROFILES),
        ),
        closing="Written by dptrain from profile.json, which contains each number in full "
        "precision.",
    )


def _notes(profile: Profile) -> list[str]:
    """Return what a reader should know of the steps before their times."""
    tail = tail_note(profile.step_times_ms, "this profile")
    return [*load_line(profile.other_cores, "these steps"), *([tail] if tail else [])]


def _lead(profile: Profile) -> Plot:
    return parts_bars(
        "parts",
        f"Where the time of a {_noun(profile)} goes",
        profile.step_parts.all_steps,
        caption="Means over all ranks and steps, slow steps included; they add up.",
        unit="ms",
    )


def _not_measured(profile: Profile) -> tuple[str, ...]:
    """Return why energy, and instructions and frequency, are missing, as sentences."""
    found: list[str] = []
    if profile.energy is not None and profile.energy.joules_per_sample is None:
        found += map(sentence, energy_lines(profile.energy))
    if profile.processor is not None and profile.processor.missing:
        found.append(sentence(processor_line(profile.processor)))
    return tuple(found)


def _losses(losses: Losses | None) -> list[Section]:
    if losses is None:
        return []
    reason = losses.withheld
    text = (
        ()
        if losses.known and not reason
        else (
            f"The table of losses is withheld, because {reason}."
            if reason
            else sentence(NOT_VERIFIED),
        )
    )
    plots = () if reason else (losses_plot(losses),)
    tables = tuple(loss_tables(losses, LOSSES))
    return [Section("losses", "Losses by experiment", text=text, plots=plots, tables=tables)]


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
    if suffix:
        text.append(_headline(profile))
        if len(profile.ranks) > 1:
            text.append(lateness_sentence(profile))
    if profile.roofs is not None:
        roofs = profile.roofs
        text.append(
            f"Measured limits of the machine: {flop_rate(roofs.gflops)} and "
            f"{short(roofs.gb_per_s)} GB/s ({roofs.how})."
        )
    if profile.shares_withheld:
        text.append(f"No shares of these limits, because {profile.shares_withheld}.")
    if profile.energy is not None and profile.energy.joules_per_sample is not None:
        text += map(sentence, energy_lines(profile.energy))
    if profile.processor is not None and not profile.processor.missing:
        text.append(sentence(processor_line(profile.processor)))
    ranks = len(profile.ranks)
    where = f", {ranks} rank{'s' * (ranks > 1)}" if suffix else ""
    return Section(
        f"inside{suffix}",
        title,
        text=tuple(text),
        plots=tuple(profile_plots(profile, suffix, where, measured.step)),
        tables=tuple(_tables(profile, file, suffix)),
        new_page=bool(suffix),
    )


def _tables(profile: Profile, file: str, suffix: str) -> Iterator[Table]:
    """Yield all tables of a profile; the plot of the layers has the times of the stages, too."""
    several = len(profile.ranks) > 1
    step, parts = profile.step_ms, profile.step_parts
    yield parts_table(
        step, parts, several=several, noun=_noun(profile), name=f"step-parts{suffix}", file=file
    )
    for where, stages in (("stages", profile.stages), ("kinds", profile.kinds)):
        table = stages_table(stages, where, several=several, name=f"{where}{suffix}", file=file)
        yield replace(table, folded=bool(suffix) or where == "kinds")
    yield ranks_table(profile, name=f"ranks{suffix}", file=file)
    if profile.pop is not None:
        yield from efficiency_tables(profile.pop, file, suffix)
    if profile.sums:
        yield sums_table(profile, name=f"sums{suffix}", file=file)
    if found := profile.batch_statistics:
        yield statistics_table(found, name=f"batch-statistics{suffix}", file=file)
    yield memory_table(profile.memory, name=f"memory{suffix}", file=file)


def efficiency_tables(pop: Pop, file: str, suffix: str = "") -> Iterator[Table]:
    """Yield the factors of the parallel efficiency, and the balance of the layers.

    Args:
        pop: the efficiencies.
        file: path of their file, relative to the page.
        suffix: suffix of the names of the tables.
    """
    yield pop_table(pop, name=f"pop-step{suffix}", file=file)
    if pop.layers:
        yield balance_table(pop, name=f"pop-layers{suffix}", file=file)


def sentence(text: str) -> str:
    """Return the text with a capital letter, unless it starts with a path, and a full stop."""
    word = text.partition(" ")[0].rstrip(":,")
    begin = f"{text[:1].upper()}{text[1:]}" if word.isalpha() else text
    return begin if begin.endswith((".", "!", "?")) else f"{begin}."


def without_folders(line: str) -> str:
    """Return a command line with the names of its programs instead of their absolute paths.

    Example:
        >>> without_folders("/opt/bin/mpirun -n 2 /opt/bin/python3 -m dptrain train")
        'mpirun -n 2 python3 -m dptrain train'
        >>> without_folders("/opt/dptrain/__main__.py train --data npz:/tmp/a.npz")
        'python -m dptrain train --data npz:/tmp/a.npz'
    """
    words = line.split(" ")
    first = min((i for i, word in enumerate(words) if word == "-m"), default=0)
    for index, word in enumerate(words[: first + 1]):
        name = PurePath(word).name
        words[index] = name if PurePath(word).is_absolute() else word
    return re.sub(r"^__main__\.py\b", "python -m dptrain", " ".join(words))


def environment_section(
    environment: Mapping[str, Any],
    commands: Sequence[tuple[str, str]],
    text: Sequence[str] = (),
) -> Section:
    """Return the section with the machine, the versions and the commands.

    Args:
        environment: contents of ``env.json``.
        commands: pairs of heading and command line.
        text: paragraphs at the start.
    """
    found = dict(environment)
    if "started" in found:
        found["started"] = f"{str(found['started'])[:16].replace('T', ' ')} UTC"
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
    commands = [(heading, without_folders(line)) for heading, line in commands]
    return Section(
        "environment",
        "Environment and commands",
        text=tuple(text),
        facts=tuple(facts),
        commands=tuple(commands),
    )


def definitions_section(titles: Sequence[str]) -> Section:
    """Return the section with the definitions of all terms.

    Args:
        titles: as in `dptrain.report.elements.definitions.definitions`.
    """
    return Section(
        "definitions",
        "Definitions",
        definitions=definitions(titles),
        new_page=True,
        folded=True,
        text=("Each term as in plots and tables, followed by its name in files.",),
    )


def _noun(profile: Profile) -> str:
    return "forward pass" if profile.job.get("task") == "inference" else "step"


def step_sentence(name: str, step: Spread) -> str:
    """Return the step and the median step: ``A step takes 3.11 ms (median 2.92, 95% …)``."""
    interval = ""
    if step.low is not None and step.high is not None:
        interval = f", 95% interval {short(step.low)} to {short(step.high)} ms"
    return f"{name} takes {short(step.mean)} ms (median {short(step.median)} ms{interval})"


def shares(parts: Parts) -> str:
    """Return the shares of the parts, the largest first, without those below 1%."""
    found = parts.known
    whole = parts.total or 1.0
    return ", ".join(
        f"{percent(found[name] / whole, decimals=0)} {label_of(name)}"
        for name in sorted(found, key=lambda name: -found[name])
        if found[name] >= 0.01 * whole
    )


def _headline(profile: Profile) -> str:
    first = step_sentence(f"A {_noun(profile)}", profile.step_ms)
    return f"{first}: {shares(profile.step_parts.all_steps)}."


def _text(profile: Profile) -> tuple[str, ...]:
    longest = max(profile.stages, key=lambda stage: stage.share)
    found = [
        f"The longest stage is {longest.name} with {percent(longest.share, decimals=0)} of the "
        f"{_noun(profile)}.",
    ]
    if len(profile.ranks) > 1 and profile.job.get("task") != "inference":
        found.append(lateness_sentence(profile))
    return tuple(found)


def lateness_sentence(profile: Profile) -> str:
    """Return who the other ranks wait for: stragglers, or a different rank in each step."""
    step = profile.parts.total or 1.0
    late = [rank for rank in profile.ranks if rank.delay_ms > STRAGGLER_SHARE * step]
    waiting = profile.parts.imbalance
    if late:
        return sentence(straggler_line(profile))
    if waiting < 0.01 * step:
        return "The ranks hardly wait for each other: no rank is a straggler."
    return (
        f"Ranks wait {short(waiting)} ms per step for later ones; no rank is a straggler (late by "
        f"more than {percent(STRAGGLER_SHARE, decimals=0)} of a step on average)."
    )


def step_interval(step: Spread, at: str) -> tuple[str | Number, ...]:
    """Return the median step, and its interval and the 99th percentile, or else the quartiles.

    Args:
        step: the durations of the steps.
        at: path of `step` in its file.
    """

    def number(name: str) -> Number:
        value = getattr(step, name)
        return Number(short(value), value, f"{at}.{name}")

    median = "median ", number("median"), " ms, "
    if step.low is None or step.high is None or step.p99 is None:
        return *median, "quartiles ", number("q1"), " to ", number("q3"), " ms"
    interval = "95% interval ", number("low"), " to ", number("high"), " ms; p99 "
    return *median, *interval, number("p99"), " ms"


def _keys(profile: Profile) -> tuple[Key, ...]:
    step, parts = profile.step_ms, profile.step_parts.all_steps
    whole = parts.total or 1.0
    keys = [
        Key(
            _noun(profile).capitalize(),
            (Number(short(step.mean), step.mean, "step_ms.mean"), " ms"),
            step_interval(step, "step_ms"),
        ),
        Key(
            "Throughput",
            (Number(fixed(profile.samples_per_s, 0), profile.samples_per_s, "samples_per_s"),),
            ("samples/s",),
        ),
        Key(
            "Computation",
            (percent(parts.compute / whole, decimals=0),),
            ("of the time of all steps",),
        ),
    ]
    if profile.pop is not None:
        found, at = profile.pop.parallel, "pop.parallel"
        number = partial(percent_number, at=at)
        detail: Cell = ("too few steps for an interval",)
        if math.isfinite(found.high):
            detail = (
                "95% interval ",
                number(found.low, "low"),
                "% to ",
                number(found.high, "high"),
                "%",
            )
        keys.append(Key("Parallel efficiency", (number(found.value, "value"), "%"), detail))
    return tuple(keys)


def percent_number(value: float, end: str, *, at: str) -> Number:
    """Return a share as a number of per cent without decimals, from the path ``at.end``."""
    return Number(fixed(100 * value, 0), value, f"{at}.{end}")
