"""The tables of study D, and the machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims.judge_d import faster_in_all, profile, share, trained
from benchmarks.studies.claims.published import PROFILE, VARIANTS
from benchmarks.studies.claims.verdicts import Results, percent, times
from benchmarks.studies.networks import CIFAR_CHANGES
from benchmarks.studies.page.cells import MISSING, markdown, source, time_of


def operations(results: Results) -> str:
    """Return the profile of inference by operation."""
    counted = results.values("counts")["cifar"]["base"]["bytes"]
    names = [n for n in ("profile", "profile-gpu") if results.has(n)]
    profiles = [profile(results, "base", n)["kinds"] for n in names or ["profile"]]
    lines = []
    for kind, (ms, part) in PROFILE.items():
        size = f"{counted[kind] / 1e6:.2f} MB" if kind in counted else "in place"
        cells = [cell for own in profiles
                 for cell in (time_of(own[kind], 1e3), percent(own[kind]["share"]))]  # fmt: skip
        lines.append((kind, f"{ms:g}", percent(part), *cells, size))
    columns = ["operation", "study D, ms", "share"]
    for name in names:
        columns += [f"ours, {results.hardware(name)}, µs", "share"]
    return f"{markdown((*columns, 'bytes, ours'), lines)}\n\n{source(results, *names)}"


def variants(results: Results) -> str:
    """Return the variants of study D's network: work, time, share, accuracy."""
    counted = results.values("counts")["cifar"]
    found, name = trained(results)
    lines = []
    for variant in CIFAR_CHANGES:
        published = VARIANTS.get(variant)
        theirs = (MISSING,) * 3 if published is None else (
            times(VARIANTS["base"].total_ms / published.total_ms), percent(published.share, 0),
            percent(published.precision),
        )  # fmt: skip
        gain = faster_in_all(results, variant)
        lines.append((
            variant, f"{counted[variant]['parameters']:,}",
            f"{counted[variant]['total_multiply_adds'] / 1e6:.2f}", *theirs,
            "1" if variant == "base" else f"{gain.value:.3g} ({gain.low:.3g}–{gain.high:.3g})",
            percent(share(results, variant), 0), _accuracy(found["variants"][variant]),
        ))  # fmt: skip
    columns = ("variant", "parameters", "million multiply-adds", "study D: faster", "Conv2D share",
               "precision", f"ours, {results.hardware('profile')}: faster", "Conv2D share",
               f"accuracy on {found['data']}")  # fmt: skip
    return f"{markdown(columns, lines)}\n\n{source(results, 'profile', name)}"


def _accuracy(row: Mapping[str, Any]) -> str:
    """Return the accuracies of a variant, one for each seed."""
    return ", ".join(percent(value) for value in row["accuracy"])


def machines(results: Results) -> str:
    """Return the machines, with the dates and versions of their results."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results.all:
        about = result.about
        machine = f"{about['cores']} cores of {about['cpu']}"
        if "gpu" in about:
            machine = f"{about['gpu']}, driver {about['driver']}"
        packages = ("numba", "numpy", "cupy-cuda13x", "nvidia-cudnn-cu13", "torch")
        versions = ", ".join(f"{n} {about['versions'][n]}" for n in packages
                             if n in about["versions"])  # fmt: skip
        key = f"`{result.kind}.json`", machine, f"Python {about['python']}, {versions}"
        found.setdefault(key, []).append(about["date"].partition("T")[0])
    lines = [(file, machine, " to ".join(dict.fromkeys((min(dates), max(dates)))), versions)
             for (file, machine, versions), dates in found.items()]  # fmt: skip
    return markdown(("file", "machine", "dates", "versions"), lines, of_text=True)
