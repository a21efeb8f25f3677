"""The paragraph of methods: software, job, machine, launches, other load, and definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptrain.measure.profile.profile import Profile
from dptrain.measure.profile.profile_files import PROFILE
from dptrain.numbers import scaled_bytes
from dptrain.report.elements.definitions import Definition
from dptrain.report.elements.page import Page
from dptrain.report.paper.references import Reference
from dptrain.scaling.design import launch_facts
from dptrain.scaling.points import round_of
from dptrain.scaling.study import Study
from dptrain.tables.latex import latex
from dptrain.texts import without_folders

DEFINED = ("step_ms", "interval", "speed_up", "efficiency", "karp_flatt")
"""Names of the terms of a page that the methods define."""
SOFTWARE = ("numpy", "numba", "mpi4py", "cupy", "cudnn", "nccl")
"""Beginnings of the names of packages whose versions affect measurements."""


@dataclass(frozen=True)
class Statement:
    """A sentence of fragments, each with the keys of its references."""

    fragments: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, text: str, *cites: str) -> Statement:
        """Return a sentence of one fragment."""
        return cls(((text.rstrip("."), cites),))

    def latex(self) -> str:
        """Return the sentence in LaTeX."""
        cited = [
            latex(text) + (rf"~\cite{{{','.join(cites)}}}" if cites else "")
            for text, cites in self.fragments
        ]
        return f"{'; '.join(cited)}."

    def markdown(self) -> str:
        """Return the sentence in Markdown with citations as Pandoc reads them."""
        cited = [
            text + (f" [{'; '.join(f'@{key}' for key in cites)}]" if cites else "")
            for text, cites in self.fragments
        ]
        return f"{'; '.join(cited)}."


@dataclass(frozen=True)
class Methods:
    """The methods of a page: sentences, and definitions of terms."""

    statements: tuple[Statement, ...]
    definitions: tuple[Definition, ...]


def methods(
    page: Page,
    environment: Mapping[str, Any],
    launches: Sequence[str],
    references: Sequence[Reference],
) -> Methods:
    """Return the methods of a page.

    Args:
        page: the page.
        environment: contents of ``env.json``; empty if the page names the machine itself.
        launches: sentences of `launch_sentences`.
        references: sources of the methods.
    """
    software, commit = "dptrain", str(environment.get("commit") or "")[:12]
    if version := dict(environment.get("versions") or {}).get("dptrain"):
        software += f" {version}" + (f" (commit {commit})" if commit else "")
    sections = {section.name: section for section in page.sections}
    first = next((section.tables for section in page.sections if section.tables), ())
    measured = sections["environment"].text if "environment" in sections else ()
    found = [
        Statement.of(f"The measurements were made with {software}", "dptrain"),
        *map(Statement.of, (f"{page.title}: {page.about}", *measured)),
        *map(Statement.of, _machine(environment)),
        *map(Statement.of, (*launches, *dict.fromkeys(t.note for t in first if t.note))),
    ]
    if references:
        sources = [(reference.use, (reference.key,)) for reference in references]
        sources[0] = (f"Sources: {sources[0][0]}", sources[0][1])
        found.append(Statement(tuple(sources)))
    terms = [
        each
        for section in page.sections
        for _, group in section.definitions
        for each in group
        if each.name.partition(",")[0] in DEFINED or each.label in DEFINED
    ]
    statements = [
        Statement(tuple((without_folders(text), cites) for text, cites in each.fragments))
        for each in found
    ]
    return Methods(
        tuple(statements), tuple({each.label: each for each in terms[::-1]}.values())[::-1]
    )


def _machine(environment: Mapping[str, Any]) -> list[str]:
    """Return the machine and the versions as a sentence; none if they are not known."""
    versions = dict(environment.get("versions") or {})
    library = str((environment.get("mpi") or {}).get("library", "")).partition(",")[0]
    parts = [
        str(environment.get("cpu") or ""),
        f"{environment['cores']} cores" if environment.get("cores") else "",
        f"{scaled_bytes(environment['memory_bytes'])} of memory"
        if environment.get("memory_bytes")
        else "",
        str(environment.get("os") or ""),
        f"Python {environment['python']}" if environment.get("python") else "",
        " ".join(library.split()),
        *(f"{name} {text}" for name, text in versions.items() if name.startswith(SOFTWARE)),
    ]
    known = [part for part in parts if part]
    return [f"Machine and versions: {', '.join(known)}"] if known else []


def launch_sentences(study: Study, folder: Path) -> list[str]:
    """Return the number of launches and steps of a study, and the load by other programs.

    Args:
        study: the study.
        folder: its folder; a copy without launches has neither steps nor loads.
    """
    folders = dict.fromkeys(launch.folder for point in study.points for launch in point.launches)
    counts = sorted({len(point.launches) for point in study.points})
    rounds = " in rounds of all points in random order" if all(map(round_of, folders)) else ""
    paths = [folder / each / PROFILE for each in folders]
    steps = sorted({Profile.read(path).steps for path in paths if path.exists()})
    found = [
        f"Each point has {_span(counts)} launches{rounds}",
        f"Each launch has {_span(steps)} timed steps"
        if steps
        else "The number of timed steps is unknown, because the launches are not stored",
    ]
    loads = [launch_facts(folder / each).get("other_cores") for each in folders]
    known = [float(load) for load in loads if load is not None]
    if not known:
        return [*found, "The load by other programs was not recorded"]
    of_all = "" if len(known) == len(loads) else f" ({len(known)} of {len(loads)} launches)"
    mean = sum(known) / len(known)
    return [
        *found,
        f"Other programs used {mean:.2f} cores on average during a launch, at most "
        f"{max(known):.2f}{of_all}",
    ]


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
