"""The page of a benchmark: times by batch size, the largest batches, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dptrain.numbers import short
from dptrain.report.elements.canvas import Plot, plot
from dptrain.report.elements.page import Key, Page, Section, restrictions_section
from dptrain.report.studies.experiment_parts import closing, settings_section
from dptrain.tables import Number, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dptrain.experiments.findings import Saturation
    from dptrain.experiments.measuring import Result

BENCH = "bench"
"""Name of the files of a benchmark, without suffix."""


@dataclass(frozen=True)
class Benchmark:
    """The results of `dptrain bench`.

    Attributes:
        settings: what was measured, and the machine.
        results: the results in the order of measurement.
    """

    settings: Mapping[str, Any]
    results: tuple[Result, ...]


def bench_page(found: Benchmark) -> Page:
    """Return the page of a benchmark."""
    settings, results = found.settings, found.results
    networks = list(dict.fromkeys(result.network for result in results))
    trained, passed = _by_kind(results)
    named = networks[0] if len(networks) == 1 else f"{len(networks)} networks"
    notes = _notes(results)
    sections = [Section(table.name, table.title, tables=(table,)) for table in _tables(results)]
    return Page(
        kind="dptrain benchmark",
        title=f"Benchmark of {named}",
        about=f"{len(results)} cases on {settings['processor']}, {settings['cores']} cores, "
        f"dptrain {settings['dptrain']}.",
        headline=_headline(trained, passed),
        lead=tuple(_plots(trained, passed)),
        text=tuple(_saturations(results)),
        file=f"{BENCH}.csv",
        keys=tuple(_keys(results, trained)),
        notes=notes,
        sections=(*sections, settings_section(settings, "all cases"), *restrictions_section(notes)),
        closing=closing(BENCH),
    )


def _by_kind(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Return the timed training steps and forward passes, the smallest first."""
    from dptrain.experiments.cases import INFERENCE, TRAINING

    ordered = sorted(results, key=lambda r: (r.parameters, r.network, r.samples))
    timed = [r for r in ordered if r.timing is not None and not r.case.searches]
    trained, passed = ([r for r in timed if r.task == task] for task in (TRAINING, INFERENCE))
    return trained, passed


def _tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield the tables of training steps, forward passes and largest batches, if there are any."""
    from dptrain.experiments.cases import INFERENCE, TRAINING
    from dptrain.experiments.findings import View
    from dptrain.experiments.tables import largest_table, times_table

    several = len({r.case.configuration for r in results}) > 1
    ordered = sorted(results, key=lambda r: (r.parameters, r.network, r.samples))
    for task, title in ((TRAINING, "Training steps"), (INFERENCE, "Forward passes")):
        chosen = [r for r in ordered if r.task == task and not r.case.searches]
        if chosen:
            name = "training" if task == TRAINING else "inference"
            yield times_table(
                results, chosen, View(), title, name=name, shows_configuration=several
            )
    searches = [r for r in ordered if r.case.searches]
    if searches:
        yield largest_table(
            results, searches, "Largest batches", name="largest", shows_configuration=several
        )


def _headline(trained: Sequence[Result], passed: Sequence[Result]) -> str:
    best: dict[str, Result] = {}
    for result in sorted(trained or passed, key=lambda r: r.samples_per_s):
        best[result.network] = result
    if not best:
        return "Nothing was timed."
    what = "trains" if trained else "infers"
    slowest, *_, fastest = sorted([*best.values()] * 2, key=lambda r: r.samples_per_s)
    if len(best) == 1:
        return (
            f"{fastest.network} {what} up to {fastest.samples_per_s:,.0f} samples/s, with a batch "
            f"size of {fastest.samples:,} ({_configuration(fastest)})."
        )
    return (
        f"{fastest.network} {what} up to {fastest.samples_per_s:,.0f} samples/s, {slowest.network} "
        f"up to {slowest.samples_per_s:,.0f}."
    )


def _saturations(results: Sequence[Result]) -> list[str]:
    """Return from which batch size training is saturated, as a sentence for each network."""
    from dptrain.experiments.findings import View, by_configuration, find

    groups = by_configuration(results)
    found = []
    for own in groups.values():
        where = f", {_configuration(own[0])}" if len(groups) > 1 else ""
        found += [
            f"{finding.network}{where}: {_saturation(finding.saturation)}."
            for finding in find(own, View())
            if finding.saturation is not None
        ]
    return found[:4]


def _saturation(found: Saturation) -> str:
    from dptrain.experiments.findings import SATURATED

    if found.batch_size == found.largest:
        return f"training is fastest with the largest batch size, {found.largest:,}"
    beyond = f", and less beyond {found.end:,}" if found.end < found.largest else ""
    return (
        f"training reaches {SATURATED:.0%} of its highest throughput with a batch size of "
        f"{found.batch_size:,}{beyond}"
    )


def _keys(results: Sequence[Result], trained: Sequence[Result]) -> list[Key]:
    if not trained:
        return []
    best = max(trained, key=lambda r: r.samples_per_s)
    row = list(results).index(best)
    rate = Number(f"{best.samples_per_s:,.0f}", best.samples_per_s, f"{row}.samples_per_s")
    step = Number(short(best.median_ms), best.median_ms, f"{row}.median_ms")
    return [
        Key("Highest throughput", (rate, " samples/s"), (_case(best),)),
        Key("Its step, median", (step, " ms"), (_configuration(best),)),
    ]


def _notes(results: Sequence[Result]) -> tuple[str, ...]:
    from dptrain.experiments.bench import about_load

    loads = [f"{line[0].upper()}{line[1:]}." for line in about_load(results)]
    return (*loads, "Times are medians of one process; quartiles stand next to them.")


def _configuration(result: Result) -> str:
    threads = f", {result.threads} threads" if result.threads > 1 else ""
    return f"{result.backend} {result.precision}{threads}"


def _case(result: Result) -> str:
    return f"{result.network}, {result.task}, {result.samples:,}, {_configuration(result)}"


def _plots(trained: Sequence[Result], passed: Sequence[Result]) -> list[Plot]:
    from dptrain.experiments.plots import can_draw_by_samples, draw_by_samples

    found = []
    for name, what, own in (
        ("training", "a training step", trained), ("inference", "a forward pass", passed),
    ):  # fmt: skip
        if not can_draw_by_samples(own):
            continue

        def draw(axes: Axes, own: Sequence[Result] = own) -> None:
            draw_by_samples(axes, own)
            axes.set_xlabel("batch size (log scale)", labelpad=2)

        alt = "; ".join(f"{_case(r)}: {short(r.median_ms)} ms" for r in own)
        found.append(
            plot(
                f"{name}-by-batch", f"Time of {what} per sample", "ms per sample, log scale", draw,
                caption="Points are medians, vertical lines the quartiles.", alt=alt, legend=1,
                lines=True, left=44.0,
            )
        )  # fmt: skip
    return found
