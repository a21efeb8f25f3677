"""The tables of study B."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.studies.claims.judge_b import (
    ON_GPUS,
    calls,
    gpu_strategies,
    of_launches,
    perceptron_rows,
    sample_rows,
    strategy,
    width_ratios,
)
from benchmarks.studies.claims.published import (
    INFERENCE_S,
    PERCEPTRON_COUNTS,
    PERCEPTRON_S,
    SOLAR_BATCHES,
    SOLAR_S,
    WIDE_AND_DEEP,
)
from benchmarks.studies.claims.spreads import Row
from benchmarks.studies.claims.verdicts import MissingResultError, Results, duration
from benchmarks.studies.networks import perceptron_names
from benchmarks.studies.page.cells import MISSING, markdown, number, ratio_of, source, time_of
from benchmarks.studies.solar import MAPS

STEPS_OF_TWO_EPOCHS = 2 * 1366


def _measured(results: Results, name: str) -> list[str]:
    """Return a measurement on the processor and on a GPU, as far as they were made."""
    found = [n for n in (name, f"{name}-gpu") if results.has(n)]
    if not found:
        raise MissingResultError(f"`{name}` was not measured yet")
    return found


def solar(results: Results) -> str:
    """Return the seconds of an epoch of the solar network by batch size."""
    names = _measured(results, "solar")
    ours = [sample_rows(results, name) for name in names]
    lines = []
    for index, batch in enumerate(SOLAR_BATCHES):
        cells = [time_of(own.get(batch), MAPS / batch / 1e3) for own in ours]
        lines.append((f"{batch:,}", *(number(s[index]) for s in SOLAR_S.values()), *cells))
    columns = ("batch", *SOLAR_S, *(f"**ours, {results.hardware(n)}**" for n in names))
    return f"{markdown(columns, lines)}\n\n{source(results, *names)}"


def perceptrons(results: Results) -> str:
    """Return the milliseconds of a step of the perceptrons."""
    names = _measured(results, "perceptrons")
    ours = [perceptron_rows(results, name) for name in names]
    lines = []
    for network in perceptron_names():
        published = PERCEPTRON_S.get(network, (None, None, None))
        cells = [number(s and 1e3 * s / STEPS_OF_TWO_EPOCHS) for s in published]
        lines.append((network.removeprefix("mlp-"), f"{PERCEPTRON_COUNTS[network]:,}", *cells,
                      *(time_of(own.get(network)) for own in ours)))  # fmt: skip
    columns = ("hidden layers", "parameters", "i7-5700HQ", "2 × Xeon", "GTX 1080",
               *(f"**ours, {results.hardware(n)}**" for n in names))  # fmt: skip
    return f"{markdown(columns, lines)}\n\n{source(results, *names)}"


def width(results: Results) -> str:
    """Return the time of a wide perceptron divided by that of a deeper one."""
    names = _measured(results, "perceptrons")
    ours = [width_ratios(results, name) for name in names]
    lines = [
        (f"{wide.removeprefix('mlp-')} ÷ {deep.removeprefix('mlp-')}",
         *(f"{v:.2f}" for v in published),
         *(f"{own[wide, deep].value:.2f} ({own[wide, deep].low:.2f}–{own[wide, deep].high:.2f})"
           for own in ours))
        for (wide, deep), published in WIDE_AND_DEEP.items()
    ]  # fmt: skip
    columns = ("wide ÷ deep", "i7-5700HQ", "2 × Xeon", "GTX 980",
               *(f"**ours, {results.hardware(n)}**" for n in names))  # fmt: skip
    return f"{markdown(columns, lines)}\n\n{source(results, *names)}"


def largest(results: Results) -> str:
    """Return the largest batch of the solar network that fits; counts without a spread."""
    names = _measured(results, "largest")
    found = [results.values(name)["largest"] for name in names]
    lines = [
        (size, *(f"{own[f'{size}, {task}']['batch']:,}"
                 for own in found for task in ("training", "inference")))
        for size in ("2 GB", "4 GB", "8 GB")
    ]  # fmt: skip
    columns = ["memory"]
    for name in names:
        device = "GPU" if name.endswith("gpu") else "CPU"
        columns += [f"{task}, {device}" for task in ("training", "inference")]
    return f"{markdown(columns, lines)}\n\n{source(results, *names)}"


def _call(row: Mapping[str, float] | None) -> str:
    """Return the median of real calls, and the fastest and slowest if they were stored."""
    if row is None:
        return MISSING
    slowest = f" to {duration(row['max_ms'] / 1e3)}" if "max_ms" in row else ""
    fastest = f"from {duration(row['min_ms'] / 1e3)}{slowest}" if "min_ms" in row else "no spread"
    return f"{duration(row['median_ms'] / 1e3)} ({fastest})"


def inference(results: Results) -> str:
    """Return the times of real calls."""
    names = _measured(results, "inference")
    found = {n: calls(results, n) for n in names}
    lines = []
    for samples in sorted({s for rows in found.values() for s in rows}):
        cells = [_call(own.get(samples)) for own in found.values()]
        published = INFERENCE_S.get(samples, (None, None, None))
        lines.append((f"{samples:,}", *("–" if s is None else duration(s) for s in published),
                      *cells))  # fmt: skip
    columns = ["maps", "i7-5700HQ", "2 × Xeon", "GTX 1080",
               *(f"**ours, {results.hardware(n)}**" for n in names)]  # fmt: skip
    return f"{markdown(columns, lines)}\n\n{source(results, *names)}"


def keras(results: Results) -> str:
    """Return the comparison with Keras."""
    found = results.values("keras")
    lines = [
        (f"{row['network']}, batch {row['batch']}", number(row["dptrain_ms"]),
         number(row["keras_ms"]),
         f"{row['ratio']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})")
        for row in found["rows"]
    ]  # fmt: skip
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    table = markdown(("network", "dptrain ms", "Keras ms", "Keras ÷ dptrain (quartiles)"), lines)
    return (
        f"{table}\n\n{versions}. The ratio is the median of alternating blocks, not the ratio of "
        "the medians. `solar-linear` is the solar CNN without dropout and without its last ReLU. "
        f"{source(results, 'keras')}"
    )


def strategies(results: Results) -> str:
    """Return the steps of mirrored and central training, and their speed-ups."""
    lines: list[tuple[str, ...]] = []
    if results.has("strategies"):
        one, device = strategy(results, "", 1), results.hardware("strategies")
        lines.append((f"1 rank, {device}", time_of(one), "1"))
        for name, row in results.values("strategies")["steps"].items():
            if name != "threads 1":
                how, _, ranks = name.rpartition(", ranks ")
                lines.append((f"{how}, {ranks} ranks", time_of(row), ratio_of(one, row)))
    for name in ON_GPUS:
        lines += _on_gpus(gpu_strategies(results, name), results, name)
    if not lines:
        raise MissingResultError("`strategies` was not measured yet")
    table = markdown(("strategy and workers", "ms per step", "speed-up over one"), lines)
    rows = [row for name in ON_GPUS for row in gpu_strategies(results, name).values()]
    note = "" if all("medians_ms" in row for row in rows) else (
        " Ratios of GPUs without stored rounds: quartiles of the steps of one launch, and 5% by "
        "which launches may differ.")  # fmt: skip
    return f"{table}\n\n{source(results, 'strategies', *ON_GPUS)}{note}"


def _on_gpus(steps: Mapping[str, Row], results: Results, name: str) -> list[tuple[str, ...]]:
    return [
        (f"{case}, {results.hardware(name)}", time_of(row), "1" if case.startswith("1 GPU") else
         ratio_of(steps.get(f"1 GPU, batch {case.rpartition(' ')[2]}"), row, of_launches))
        for case, row in steps.items()
    ]  # fmt: skip
