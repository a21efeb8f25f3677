"""The tables of details of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.studies.claims.judge_a import gpu_steps, layer_rows, log_speed_ups
from benchmarks.studies.claims.judge_b import calls, gpu_strategies, perceptron_ms, width_ratios
from benchmarks.studies.claims.judge_d import profile, share, total_ms, trained
from benchmarks.studies.claims.published import (
    INFERENCE_S,
    LAYER_MS,
    LOG_SECONDS,
    PERCEPTRON_COUNTS,
    PERCEPTRON_S,
    PROFILE,
    SOLAR_BATCHES,
    SOLAR_S,
    VARIANTS,
    WIDE_AND_DEEP,
)
from benchmarks.studies.claims.verdicts import (
    MissingResultError,
    Results,
    duration,
    hardware,
    percent,
    times,
)
from benchmarks.studies.networks import CIFAR_CHANGES, STUDY_A, perceptron_names
from benchmarks.studies.solar import MAPS

STEPS_OF_TWO_EPOCHS = 2 * 1366
HOST_PHASES = {"forward": ("forward",), "backward": ("backward_weight", "backward_input",
                                                     "backward")}  # fmt: skip


def markdown(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, of_text: bool = False
) -> str:
    """Return a Markdown table.

    Args:
        columns: names of the columns.
        rows: the cells of each row.
        of_text: False aligns all columns but the first to the right.
    """
    rules = ["---", *["---" if of_text else "---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(columns), rules, *map(list, rows)])


def _ms(value: float | None) -> str:
    """Return milliseconds with three digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _implementations(results: Results) -> str:
    found = results.find("speed-up", "cpu")
    steps = found.values["steps"]
    programs = [name for name in steps["model0"] if name != "reference"]
    rows = []
    for name in STUDY_A:
        own = steps[name]
        base = own["threads 1"]["median_ms"]
        rows.append((name, _ms(own["reference"]["median_ms"]), *(
            f"{_ms(own[p]['median_ms'])}" + (f" ({times(base / own[p]['median_ms'])})"
                                             if p != "threads 1" else "")
            for p in programs
        ), *_gpu_cells(results, name)))  # fmt: skip
    columns = ["network", "reference", *programs]
    if results.has("steps-gpu"):
        columns += [f"{b}, {results.hardware('steps-gpu')}" for b in ("cuda", "cudnn")]
    log = ", ".join(f"{times(v)} ({n})" for n, v in sorted(log_speed_ups(results).items()))
    published = ", ".join(f"{times(LOG_SECONDS[1] / LOG_SECONDS[n])} ({n})" for n in (2, 4, 8))
    return (
        f"{markdown(columns, rows)}\n\nCPU: {hardware(found)}. The network of the study's log, "
        f"batch 1,024, threads in brackets: {log}. Published (R): {published}."
    )


def _gpu_cells(results: Results, name: str) -> list[str]:
    if not results.has("steps-gpu"):
        return []
    row = gpu_steps(results)[name]
    return [_ms(row[b]["median_us"] / 1e3) for b in ("cuda", "cudnn")]


def _layers(results: Results) -> str:
    one, many = (layer_rows(results, f"batch {n}") for n in (1, 32))
    host = results.values("layers-gpu")["host, batch 1"]
    rows = []
    for name, (cudnn, cuda) in LAYER_MS.items():
        ours = one.get(name, {})
        batch = many.get(name, {})
        rows.append((
            name, f"{cudnn:g}", f"{cuda:g}", times(cuda / cudnn), _ms(ours.get("cudnn")),
            _ms(ours.get("cuda")), _ratio(ours), _ratio(batch), _ms(_host_ms(host["cuda"], name)),
        ))  # fmt: skip
    sums = {b: sum(row.get(b, 0.0) for row in one.values()) for b in ("cudnn", "cuda")}
    sums_many = {b: sum(row.get(b, 0.0) for row in many.values()) for b in ("cudnn", "cuda")}
    rows.append(("**sum**", "0.2596", "0.3739", "1.44×", _ms(sums["cudnn"]), _ms(sums["cuda"]),
                 _ratio(sums), _ratio(sums_many), ""))  # fmt: skip
    columns = (
        "operation", "cuDNN, study A", "CUDA, study A", "CUDA ÷ cuDNN", "cuDNN, ours",
        "cuda, ours", "cuda ÷ cuDNN", "the same, 32 images", "host, cuda",
    )  # fmt: skip
    return f"{markdown(columns, rows)}\n\nHardware: {results.hardware('layers-gpu')}."


def _ratio(row: Mapping[str, float]) -> str:
    return times(row["cuda"] / row["cudnn"]) if {"cuda", "cudnn"} <= row.keys() else "–"


def _host_ms(stages: Mapping[str, float], name: str) -> float | None:
    layer, direction = name.split()
    found = [stages[f"{layer}.{phase}"] for phase in HOST_PHASES[direction]
             if f"{layer}.{phase}" in stages]  # fmt: skip
    return sum(found) if found else None


LIBRARIES = ("im2col, cuBLAS", "PyTorch")
"""Beginnings of the names of versions that are not ours."""


def _ladder(results: Results) -> str:
    layers = results.values("ladder-gpu")["layers"]
    rows = []
    for name in layers:
        before = None
        for row in layers[name]["forward"]:
            is_ours = not row["rung"].startswith(LIBRARIES)
            gain = times(before / row["median_ms"]) if before and is_ours else "–"
            memory = f"{row['extra_bytes'] / 1e6:.2f}" if is_ours else "unknown"
            rows.append((f"{name}: {row['rung']}", f"{1e3 * row['median_ms']:,.1f}",
                         f"{row['gflops']:,.0f}", gain, memory))  # fmt: skip
            before = row["median_ms"]
    columns = ("version", "µs", "GFLOP/s", "faster than the row before", "buffer MB")
    return f"{markdown(columns, rows)}\n\nHardware: {results.hardware('ladder-gpu')}."


def _sizes(results: Results) -> str:
    rows: dict[str, list[str]] = {}
    for row in results.values("sizes-gpu")["rows"]:
        name = f"{row['size']}×{row['size']}, {row['filters']} filters"
        rows.setdefault(name, []).append(times(row["cudnn"] / row["cuda"]))
    columns = ("input", "1 image, forward", "backward", "32 images, forward", "backward")
    table = markdown(columns, ((name, *cells) for name, cells in rows.items()))
    return f"{table}\n\nHardware: {results.hardware('sizes-gpu')}."


def _solar(results: Results) -> str:
    ours = {}
    for name in ("solar", "solar-gpu"):
        if results.has(name):
            rows = results.values(name)["rows"]
            ours[results.hardware(name)] = {r["samples"]: r["median_ms"] for r in rows
                                            if "median_ms" in r}  # fmt: skip
    if not ours:
        raise MissingResultError("`solar` was not measured yet")
    lines = []
    for index, batch in enumerate(SOLAR_BATCHES):
        cells = [_ms(MAPS / batch * own[batch] / 1e3 if batch in own else None)
                 for own in ours.values()]  # fmt: skip
        lines.append((f"{batch:,}", *(_ms(column[index]) for column in SOLAR_S.values()), *cells))
    return markdown(("batch", *SOLAR_S, *(f"**ours, {name}**" for name in ours)), lines)


def _perceptrons(results: Results) -> str:
    names = [n for n in ("perceptrons", "perceptrons-gpu") if results.has(n)]
    ours = [perceptron_ms(results, name) for name in names or ["perceptrons"]]
    rows = []
    for network in perceptron_names():
        published = PERCEPTRON_S.get(network, (None, None, None))
        cells = [_ms(s and 1e3 * s / STEPS_OF_TWO_EPOCHS) for s in published]
        own = [found.get(network) for found in ours]
        ratio = times(own[0] / own[1]) if len(own) == 2 and own[0] and own[1] else "–"
        rows.append((network.removeprefix("mlp-"), f"{PERCEPTRON_COUNTS[network]:,}", *cells,
                     *(_ms(value) for value in own), ratio))  # fmt: skip
    columns = ("hidden layers", "parameters", "i7-5700HQ", "2 × Xeon", "GTX 1080",
               *(f"**ours, {results.hardware(n)}**" for n in names), "ours, CPU ÷ GPU")  # fmt: skip
    return markdown(columns, rows)


def _width(results: Results) -> str:
    names = [n for n in ("perceptrons", "perceptrons-gpu") if results.has(n)]
    ours = [width_ratios(results, name) for name in names or ["perceptrons"]]
    rows = [
        (wide.removeprefix("mlp-"), deep.removeprefix("mlp-"), *(f"{v:.2f}" for v in published),
         *(f"{own[wide, deep]:.2f}" for own in ours))
        for (wide, deep), published in WIDE_AND_DEEP.items()
    ]  # fmt: skip
    columns = ("wide", "deep", "i7-5700HQ", "2 × Xeon", "GTX 980",
               *(f"**ours, {results.hardware(n)}**" for n in names))  # fmt: skip
    return markdown(columns, rows)


def _largest(results: Results) -> str:
    names = [n for n in ("largest", "largest-gpu") if results.has(n)]
    found = [results.values(name)["largest"] for name in names or ["largest"]]
    rows = []
    for size in ("2 GB", "4 GB", "8 GB", "free memory"):
        cells = [f"{own[f'{size}, {task}']['batch']:,}"
                 for own in found for task in ("training", "inference")]  # fmt: skip
        rows.append((size, *cells))
    devices = {"largest": "CPU", "largest-gpu": "GPU"}
    columns = ["memory"]
    for name in names:
        columns += [f"{task}, {devices[name]}" for task in ("training", "inference")]
    free = ", ".join(
        f"{own['free memory, training']['limit_bytes'] / 1e9:.0f} GB ({devices[name]})"
        for name, own in zip(names, found, strict=True)
    )
    reasons = {own[case]["why"] for own in found for case in own if own[case].get("why")}
    note = f" Limits other than memory: {'; '.join(sorted(reasons))}." if reasons else ""
    return f"{markdown(columns, rows)}\n\nFree memory: {free}.{note}"


def _inference(results: Results) -> str:
    names = [n for n in ("inference", "inference-gpu") if results.has(n)]
    found = {n: calls(results, n) for n in names or ["inference"]}
    rows = []
    for samples in sorted({s for rows in found.values() for s in rows}):
        cells = []
        for own in found.values():
            row = own.get(samples)
            cells.append("–" if row is None else f"{duration(row['median_ms'] / 1e3)} "
                         f"({duration(row['p99_ms'] / 1e3)})")  # fmt: skip
        if "inference-gpu" in found:
            device = found["inference-gpu"].get(samples)
            cells.append("–" if device is None else duration(device["device_ms"] / 1e3))
        published = INFERENCE_S.get(samples, (None, None, None))
        rows.append((f"{samples:,}", *("–" if s is None else duration(s) for s in published),
                     *cells))  # fmt: skip
    columns = ["maps", "i7-5700HQ", "2 × Xeon", "GTX 1080",
               *(f"**ours, {results.hardware(n)}**: median (p99)" for n in names)]  # fmt: skip
    if "inference-gpu" in found:
        columns.append("GPU without copies")
    limits = ", ".join(
        f"{results.values(n)['maps_within_1_s']:,} ({results.hardware(n)})" for n in names
    )
    return f"{markdown(columns, rows)}\n\nMaps within 1 s at the highest rate: {limits}."


def _keras(results: Results) -> str:
    found = results.values("keras")
    rows = [
        (f"{row['network']}, batch {row['batch']}", _ms(row["dptrain_ms"]), _ms(row["keras_ms"]),
         f"{row['ratio']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})")
        for row in found["rows"]
    ]  # fmt: skip
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    table = markdown(("network", "dptrain ms", "Keras ms", "Keras ÷ dptrain (quartiles)"), rows)
    return (
        f"{table}\n\nHardware: {results.hardware('keras')}; {versions}. `solar-linear` is the "
        "solar CNN without dropout and without its last ReLU."
    )


def _strategies(results: Results) -> str:
    steps = results.values("strategies")["steps"]
    base = steps["threads 1"]["median_ms"]
    where = results.hardware("strategies")
    rows = [(f"1 rank, {where}", f"{base:.1f}", "1")]
    for name, row in steps.items():
        if name != "threads 1":
            strategy, _, ranks = name.rpartition(", ranks ")
            rows.append((f"{strategy}, {ranks} ranks", f"{row['median_ms']:.1f}",
                         f"{base / row['median_ms']:.2f}"))  # fmt: skip
    gpu = gpu_strategies(results)
    for name, value in gpu.items():
        one = gpu.get(f"1 GPU, batch {name.rpartition(' ')[2]}")
        rows.append((f"{name}, {results.hardware('strategies-gpu')}", f"{value:.2f}",
                     f"{one / value:.2f}" if one else "–"))  # fmt: skip
    table = markdown(("strategy and workers", "ms per step", "speed-up over one"), rows)
    return f"{table}\n\nCPU: global minibatch {results.values('strategies')['batch']}."


def _profile(results: Results) -> str:
    counted = results.values("counts")["cifar"]["base"]["bytes"]
    names = [n for n in ("profile", "profile-gpu") if results.has(n)]
    profiles = [profile(results, "base", n)["kinds"] for n in names or ["profile"]]
    rows = []
    for kind, (ms, part) in PROFILE.items():
        size = f"{counted[kind] / 1e6:.2f} MB" if kind in counted else "in place"
        cells = [cell for own in profiles
                 for cell in (_ms(own[kind]["median"]), percent(own[kind]["share"]))]  # fmt: skip
        rows.append((kind, f"{ms:g}", percent(part), *cells, size))
    columns = ["operation", "study D, ms", "share"]
    for name in names:
        columns += [f"ours, {results.hardware(name)}, ms", "share"]
    return markdown((*columns, "bytes, ours"), rows)


def _variants(results: Results) -> str:
    counted = results.values("counts")["cifar"]
    found, name = trained(results)
    rows = []
    base = total_ms(results, "base")
    for variant in CIFAR_CHANGES:
        published = VARIANTS.get(variant)
        own = found["variants"][variant]
        theirs = ("–", "–", "–") if published is None else (
            times(VARIANTS["base"].total_ms / published.total_ms), percent(published.share, 0),
            percent(published.precision),
        )  # fmt: skip
        spread = max(own["accuracy"]) - min(own["accuracy"])
        rows.append((
            variant, f"{counted[variant]['parameters']:,}",
            f"{counted[variant]['total_multiply_adds'] / 1e6:.2f}", *theirs,
            f"{total_ms(results, variant):.2f}", times(base / total_ms(results, variant)),
            percent(share(results, variant), 0), f"{own['step']['median']:.2f}",
            percent(own["accuracy_mean"]) + (f" ± {50 * spread:.1f}" if spread else ""),
        ))  # fmt: skip
    columns = ("variant", "parameters", "million multiply-adds", "study D: faster", "Conv2D share",
               "precision", f"ours, {results.hardware('profile')}: ms", "faster", "Conv2D share",
               f"step ms, {results.hardware(name)}", f"accuracy on {found['data']}")  # fmt: skip
    return markdown(columns, rows)


def _conditions(results: Results) -> str:
    rows = []
    for result in sorted(results.all, key=lambda r: (r.kind, r.name)):
        about: Mapping[str, Any] = result.about
        machine = f"{about['cores']} cores of {about['cpu']}, vectors of {about['vectors']}"
        if "gpu" in about:
            machine = f"{about['gpus']} × {about['gpu']}, driver {about['driver']}"
        load = about["load"][0]
        packages = ("numba", "numpy", "cupy-cuda13x", "nvidia-cudnn-cu13", "torch")
        versions = ", ".join(f"{n} {about['versions'][n]}" for n in packages
                             if n in about["versions"])  # fmt: skip
        rows.append((result.name, machine, about["date"].replace("T", " ").split("+")[0],
                     f"Python {about['python']}, {versions}", f"{load:g}",
                     f"{about['seconds']:.0f} s"))  # fmt: skip
    columns = ("measurement", "machine", "date (UTC)", "versions", "load", "took")
    return markdown(columns, rows)


TABLES: Mapping[str, Callable[[Results], str]] = {
    "implementations": _implementations, "layers": _layers, "ladder": _ladder, "sizes": _sizes,
    "solar": _solar, "perceptrons": _perceptrons, "width": _width, "largest": _largest,
    "inference": _inference, "keras": _keras, "strategies": _strategies, "profile": _profile,
    "variants": _variants, "conditions": _conditions,
}  # fmt: skip
