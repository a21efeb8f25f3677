"""The tables of study A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims.judge_a import gpu_steps, layer_rows
from benchmarks.studies.claims.published import LAYER_MS
from benchmarks.studies.claims.spreads import Row, median_of, ratio
from benchmarks.studies.claims.verdicts import MissingResultError, Results, hardware
from benchmarks.studies.cudnn import ALL, BEST, EXACT, PYTORCH
from benchmarks.studies.networks import STUDY_A
from benchmarks.studies.page.cells import MISSING, markdown, number, ratio_of, source, time_of

HOST_PHASES = {"forward": ("forward",), "backward": ("backward_weight", "backward_input",
                                                     "backward")}  # fmt: skip
PROGRAMS = {
    "cuda": "own CUDA", EXACT: "cuDNN, training", ALL: "cuDNN, all", BEST: "cuDNN, TF32",
    f"{PYTORCH} fp32": "PyTorch", f"{PYTORCH} tf32": "PyTorch, TF32",
}  # fmt: skip
"""Columns by the beginning of the name of a program."""


def implementations(results: Results) -> str:
    """Return the steps of the five networks on the processor, as speed-ups over one thread."""
    found = results.find("speed-up", "cpu")
    steps = found.values["steps"]
    programs = [n for n in steps["model0"] if n not in ("reference", "threads 1")]
    rows = [
        (name, time_of(own["reference"]), time_of(own["threads 1"]),
         *(ratio_of(own["threads 1"], own[p]) for p in programs))
        for name, own in ((name, steps[name]) for name in STUDY_A)
    ]  # fmt: skip
    columns = ("network", "reference, ms", "1 thread, ms", *programs)
    return f"{markdown(columns, rows)}\n\n{hardware(found)}. {source(results, 'speed-up')}"


def _program(row: Mapping[str, Any], name: str) -> Row | None:
    """Return the times of a program; of PyTorch's layouts, those of the faster one."""
    found = [row[key] for key in row if key == name or (name.startswith(PYTORCH)
                                                        and key.startswith(name))]  # fmt: skip
    return min(found, key=median_of) if found else None


def gpu_implementations(results: Results) -> str:
    """Return the steps of the five networks on a GPU."""
    steps = gpu_steps(results)
    rows = [(name, *(time_of(_program(steps[name], p)) for p in PROGRAMS)) for name in STUDY_A]
    table = markdown(("network, µs", *PROGRAMS.values()), rows)
    return f"{table}\n\n{_note(steps['model0'])} {source(results, 'steps-gpu')}"


def _note(row: Mapping[str, Any]) -> str:
    """Return which engines cuDNN uses for a network, or that they were not stored."""
    if "engines" not in row:
        return (
            "Not measured yet: cuDNN with all engines and with TF32, and PyTorch. The engines of "
            "training were not stored; they were selected while other processes used the GPU, so "
            "that faster ones may exist."
        )
    texts = [
        f"{PROGRAMS[setting]}: "
        + ", ".join(
            f"{stage} {note.split(',')[0].removeprefix('engine ')}" for stage, note in notes.items()
        )
        for setting, notes in row["engines"].items()
    ]
    return f"Engines of model0. {'; '.join(texts)}."


def layers(results: Results) -> str:
    """Return the layers of the larger network for one image."""
    rows = layer_rows(results, "batch 1")
    many = layer_rows(results, "batch 32")
    host = results.values("layers-gpu")["host, batch 1"]["cuda"]
    lines = []
    for name, published in LAYER_MS.items():
        own = rows[name]
        lines.append((
            name, *(f"{ms:g}" for ms in published), time_of(own["cuda"], 1e3),
            time_of(own[EXACT], 1e3), time_of(own.get(BEST), 1e3), time_of(own.get(PYTORCH), 1e3),
            ratio_of(own[EXACT], own["cuda"]), ratio_of(many[name][EXACT], many[name]["cuda"]),
            number(_host_us(host, name)),
        ))  # fmt: skip
    columns = (
        "operation", "cuDNN, study A, ms", "CUDA, study A, ms", "own CUDA, µs",
        "cuDNN, training, µs", "cuDNN, TF32, µs", "PyTorch, µs", "cuDNN, training ÷ own",
        "32 images", "host, own, µs",
    )  # fmt: skip
    return f"{markdown(columns, lines)}\n\n{source(results, 'layers-gpu')}"


def _host_us(stages: Mapping[str, float], name: str) -> float | None:
    layer, direction = name.split()
    found = [stages[f"{layer}.{phase}"] for phase in HOST_PHASES[direction]
             if f"{layer}.{phase}" in stages]  # fmt: skip
    return 1e3 * sum(found) if found else None


LIBRARIES = ("im2col, cuBLAS", "PyTorch")
"""Beginnings of the names of versions that are not ours."""


def ladder(results: Results) -> str:
    """Return the versions of a convolution, on a GPU and on one core."""
    lines, notes = [], []
    for name in ("ladder", "ladder-gpu"):
        if not results.has(name):
            notes.append(f"`{name}` was not measured yet.")
            continue
        for layer, directions in results.values(name)["layers"].items():
            lines += list(_rungs(f"{layer}, {results.hardware(name)}", directions["forward"]))
    if results.has("ladder-gpu"):
        first = results.values("ladder-gpu")["layers"]["larger:conv2"]["forward"][0]["rung"]
        if not first.startswith("direct"):
            notes.append("The direct convolution was not measured on a GPU yet.")
    if not lines:
        raise MissingResultError("`ladder` was not measured yet")
    table = markdown(("layer, version", "µs", "GFLOP/s", "÷ row before", "buffer, MB"), lines)
    return " ".join([f"{table}\n\n{source(results, 'ladder', 'ladder-gpu')}", *notes])


def _rungs(title: str, rows: list[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    before = None
    for row in rows:
        is_ours = not row["rung"].startswith(LIBRARIES)
        gain = f"{ratio(before, row).value:.3g}" if before and is_ours else MISSING
        memory = f"{row['extra_bytes'] / 1e6:.2f}" if is_ours else "unknown"
        lines.append((f"{title}: {row['rung']}", time_of(row, 1e3), f"{row['gflops']:,.0f}", gain,
                      memory))  # fmt: skip
        before = row
    return lines


def sizes(results: Results) -> str:
    """Return cuDNN ÷ own CUDA of single convolutions, with the engines of training and the best."""
    found = results.values("sizes-gpu")["rows"]
    lines: dict[str, list[str]] = {}
    for row in found:
        name = f"{row['size']}×{row['size']}, {row['filters']} filters"
        if isinstance(row["cuda"], Mapping):
            best = min((row[n] for n in (ALL, BEST, PYTORCH) if n in row), key=median_of)
            cell = f"{ratio_of(row[EXACT], row['cuda'])}; {ratio_of(best, row['cuda'])}"
        else:
            cell = f"{row[EXACT] / row['cuda']:.3g}"
        lines.setdefault(name, []).append(cell)
    note = "" if isinstance(found[0]["cuda"], Mapping) else (
        " Engines of training only; no spread was stored, and cuDNN at its best was not measured "
        "yet.")  # fmt: skip
    columns = ("input", "1 image, forward", "backward", "32 images, forward", "backward")
    table = markdown(columns, ((name, *cells) for name, cells in lines.items()))
    return f"{table}\n\n{source(results, 'sizes-gpu')}{note}"
