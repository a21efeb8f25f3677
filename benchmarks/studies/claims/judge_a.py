"""Verdicts on the results of study A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims.published import (
    EPOCH_S,
    LAYER_MS,
    LOG_SECONDS,
    MODELS,
    SPEED_UP,
)
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    NOT_MEASURED,
    REFUTED,
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    duration,
    exactly,
    times,
)
from benchmarks.studies.networks import STUDY_A

EPOCH_STEPS = 32
"""Steps of an epoch of 1,000 images with minibatches of 32."""
NEAR = 0.1
"""A ratio that differs by at most this share counts as equal."""
SAME = 1e-4
"""Largest relative difference that rounding to float32 explains in a step."""
TWELVE = tuple(LAYER_MS)


def step_ms(results: Results, network: str, program: str) -> float:
    """Return the median time of a step of a network of study A."""
    steps = results.values("speed-up")["steps"][network]
    if program not in steps:
        count = program.split()[-1]
        raise MissingResultError(f"it needs {count} cores")
    return float(steps[program]["median_ms"])


def speed_up(results: Results, network: str, program: str) -> float:
    """Return the speed-up of a number of threads or ranks over one thread."""
    return step_ms(results, network, "threads 1") / step_ms(results, network, program)


def _a1(results: Results) -> Verdict:
    threads, ranks = (speed_up(results, "model0", f"{unit} 8") for unit in ("threads", "ranks"))
    best = max(threads, ranks)
    one = EPOCH_STEPS * step_ms(results, "model0", "threads 1") / 1e3
    return Verdict(
        CONFIRMED if best >= (1 - NEAR) * SPEED_UP else REFUTED,
        f"{times(threads)} with 8 threads, {times(ranks)} with 8 ranks",
        f"our epoch takes {duration(one)} on one thread instead of {EPOCH_S['sequential']:.0f} s "
        "(absolute times are not comparable: the study's hardware is unknown). A step of 32 "
        f"images takes {step_ms(results, 'model0', 'threads 1'):.2f} ms on one thread. "
        f"With 1,024 images, the network of row A9 reaches {times(log_speed_ups(results)[8])}",
        times(best / SPEED_UP),
        results.hardware("speed-up"),
    )


def gpu_steps(results: Results, batch: int = 32) -> dict[str, Mapping[str, Any]]:
    """Return the rows of the steps on a GPU by network."""
    rows = results.values("steps-gpu")["rows"]
    return {row["network"]: row for row in rows if row["batch"] == batch}


def _ms(row: Mapping[str, Any], backend: str) -> float:
    return float(row[backend]["median_us"]) / 1e3


def _a2(results: Results) -> Verdict:
    rows = gpu_steps(results)
    orders = []
    for name in STUDY_A:
        slow = step_ms(results, name, "reference")
        cpu = min(step_ms(results, name, f"{unit} 8") for unit in ("threads", "ranks"))
        gpu = [_ms(rows[name], backend) for backend in ("cuda", "cudnn")]
        orders.append((slow > cpu > max(gpu), cpu / min(gpu), gpu[1] / gpu[0]))
    leads = sorted(order[1] for order in orders)
    between = sorted(order[2] for order in orders)
    return Verdict(
        decide(all(order[0] for order in orders)),
        f"the same order; 8 cores ÷ GPU {times(leads[0])} to {times(leads[-1])}",
        "sequential (reference) is slower than 8 threads or ranks, and these are slower than "
        f"both GPU implementations, for {sum(order[0] for order in orders)} of 5 networks. cuDNN "
        f"takes {times(between[0])} to {times(between[-1])} the time of our kernels",
        "",
        results.hardware("speed-up", "steps-gpu"),
    )


def _a3(results: Results) -> Verdict:
    steps = gpu_steps(results)
    ratios = {name: _ms(row, "cudnn") / _ms(row, "cuda") for name, row in steps.items()}
    smallest, largest = ratios[STUDY_A[0]], ratios[STUDY_A[-1]]
    found = results.values("sizes-gpu")["rows"]
    lost = [row for row in found if row["cudnn"] < row["cuda"]]
    return Verdict(
        decide(largest < 1 < smallest),
        f"cuDNN ÷ own CUDA: {times(smallest)} on the smallest network, {times(largest)} on the "
        "largest",
        "a step with our kernels is faster than one with cuDNN on "
        f"{sum(r > 1 for r in ratios.values())} of 5 networks at batch 32. Of {len(found)} single "
        f"convolutions, cuDNN is faster in {len(lost)}",
        "",
        results.hardware("steps-gpu"),
    )


def layer_rows(results: Results, case: str) -> dict[str, Mapping[str, float]]:
    """Return the times of the twelve operations of table 5.1 in ms, with cuDNN and with cuda."""
    found: dict[str, Mapping[str, float]] = {}
    for row in results.values("layers-gpu")[case]:
        name = f"{row['layer']} {row['direction']}"
        if name in LAYER_MS:
            found[name] = {b: float(row[b]["median"]) for b in ("cudnn", "cuda") if b in row}
    return found


def _a4(results: Results) -> Verdict:
    rows = layer_rows(results, "batch 1")
    missing = [name for name in TWELVE if len(rows.get(name, {})) < 2]
    if missing:
        return Verdict(NOT_MEASURED, "–", f"no time for {', '.join(missing)}")
    sums = {b: sum(rows[name][b] for name in TWELVE) for b in ("cudnn", "cuda")}
    theirs = [sum(row[i] for row in LAYER_MS.values()) for i in (0, 1)]
    lead = sum(rows[name]["cuda"] < rows[name]["cudnn"] for name in TWELVE)
    ratio = sums["cuda"] / sums["cudnn"]
    return Verdict(
        decide(ratio > 1),
        f"sum {sums['cudnn']:.4f} (cuDNN) against {sums['cuda']:.4f} ms (own CUDA): {times(ratio)}",
        "the study's own CUDA takes 1.44 times as long as cuDNN in total. Our kernels are faster "
        f"than cuDNN in {lead} of 12 rows (device time, one image)",
        times(ratio / (theirs[1] / theirs[0])),
        results.hardware("layers-gpu"),
    )


def agreement(results: Results) -> tuple[float, float, str]:
    """Return the largest difference after a step and after twenty, and the implementations."""
    found = dict(results.values("agreement")["networks"])
    if results.has("agreement-gpu"):
        found |= results.values("agreement-gpu")["networks"]
    first = max(row["first_step_difference"] for row in found.values())
    last = max(row["parameter_difference"] for row in found.values())
    programs = list(dict.fromkeys(name.partition(", ")[2] for name in found))
    if results.has("speed-up"):
        steps = results.values("speed-up")["steps"]
        first = max(first, *(p["loss_difference"] for s in steps.values() for p in s.values()))
        programs.append("ranks (losses)")
    return first, last, ", ".join(programs)


def _a5(results: Results) -> Verdict:
    first, last, programs = agreement(results)
    names = [n for n in ("agreement", "agreement-gpu", "speed-up") if results.has(n)]
    return Verdict(
        decide(first <= SAME),
        f"largest relative difference {first:.0e} after one step, {last:.0e} after 20",
        f"parameter changes compared with float64: {programs}. Rounding decides units whose input "
        "is almost 0; such a unit of ReLU or max pooling makes most of the difference after 20 "
        "steps, also between float32 and float64 of the reference",
        "",
        results.hardware(*names),
    )


def _a6(results: Results) -> Verdict:
    found = results.values("counts")["im2col"]
    verdict, reason = exactly({
        "values": (found["example_values"], 16), "inputs": (found["example_inputs"], 9),
        "bytes of one image": (found["image_bytes"], 720_000),
        "bytes of 32 images": (found["batch_bytes"], 23_040_000),
    })  # fmt: skip
    ours = f"{found['example_values']}/{found['example_inputs']}"
    reason += f"; the factor of a 1000×1000 map and a 3×3 kernel is {found['limit_factor']:.3f}"
    return Verdict(verdict, ours, reason, "1", "any")


def _a7(results: Results) -> Verdict:
    found = results.values("counts")["one_block"]
    pairs = {"threads": (found["threads"], 2500), "limit": (found["limit"], 1024)}
    verdict, reason = exactly(pairs)
    hardware = "any"
    if results.has("ladder-gpu"):
        reply = results.values("ladder-gpu")["block_of_2500_threads"]
        verdict = decide(verdict == CONFIRMED and reply.startswith("refused"))
        reason += f"; a GPU replies to such a launch: {reply}"
        hardware = results.hardware("ladder-gpu")
    return Verdict(verdict, "50 × 50 = 2,500 threads", reason, "1", hardware)


def _a8(results: Results) -> Verdict:
    losses = results.values("counts")["losses"]
    verdict, reason = exactly({
        "−ln 0.1": (round(losses["0.6, 0.3, 0.1"], 1), 2.3),
        "−ln 0.6": (round(losses["0.1, 0.3, 0.6"], 1), 0.5),
    })  # fmt: skip
    return Verdict(
        verdict,
        ", ".join(f"{value:.4f}" for value in list(losses.values())[:2]),
        f"{reason}, computed by the reference backend. An earlier draft prints 0.585 for a "
        "prediction of 0.26, which is the decimal logarithm; the loss is "
        f"{losses['0.04, 0.7, 0.26']:.3f}",
        "1",
        "any",
    )


def log_speed_ups(results: Results) -> dict[int, float]:
    """Return our speed-ups of the network of study A's log, by threads."""
    found = results.values("speed-up")["log"]
    base = found["threads 1"]["median_ms"]
    return {int(name.split()[1]): base / row["median_ms"] for name, row in found.items()}


def _a9(results: Results) -> Verdict:
    ours = log_speed_ups(results)
    if 8 not in ours:
        raise MissingResultError("it needs 8 cores")
    published = LOG_SECONDS[1] / LOG_SECONDS[8]
    return Verdict(
        decide(ours[8] >= (1 - NEAR) * published),
        ", ".join(f"{times(value)} ({n})" for n, value in sorted(ours.items())),
        "threads in brackets, batch 1,024. The log's second network reaches 7.55×; the speed-up "
        "depends on the work of a step, in the log as in ours",
        times(ours[8] / published),
        results.hardware("speed-up"),
    )


def _counts(results: Results) -> tuple[str, str]:
    models = results.values("counts")["models"]
    return exactly({
        f"{name} {what}": (own, published)
        for name, (parameters, work) in MODELS.items()
        for what, own, published in (
            ("parameters", models[name]["parameters"], parameters),
            ("multiply-adds", sum(models[name]["multiply_adds"].values()), work),
        )
    })  # fmt: skip


def _shapes(results: Results) -> Verdict:
    verdict, reason = _counts(results)
    return Verdict(verdict, "parameters and multiply-adds of five networks", reason, "1", "any")


ROWS = (
    Row("A1", "A", "8 threads against 1, model0, one epoch", "101 s → 12.76 s: 7.92×, efficiency "
        "98.9%", "T, C", _a1),
    Row("A2", "A", "order of the four implementations", "sequential > OpenMP ≫ CUDA ≈ cuDNN", "T",
        _a2),
    Row("A3", "A", "own CUDA against cuDNN as the network grows", "CUDA slightly ahead when small, "
        "cuDNN ahead when large", "T", _a3),
    Row("A4", "A", "times per layer, larger network, 12 rows", "0.0029–0.16 ms; sum 0.2596 (cuDNN) "
        "against 0.3739 ms (CUDA)", "T, C", _a4),
    Row("A5", "A", "all implementations give the same results", "equal without randomness", "T",
        _a5),
    Row("A6", "A", "expansion factor of im2col", "16/9 for a 3×3 input and a 2×2 kernel; tends to "
        "K²", "T", _a6),
    Row("A7", "A", "matrix product in a single block", "50×50 results need 2,500 threads, limit "
        "1,024", "T", _a7),
    Row("A8", "A", "worked values of the loss", "−ln 0.1 = 2.3; −ln 0.6 = 0.5", "T", _a8),
    Row("A9", "A", "1 to 8 threads, development log", "4.52× with 8 threads; 7.55× for another "
        "network", "R", _a9),
    Row("A, 2.2", "A", "shapes of the five networks", "34,998 to 326,198 parameters", "C",
        _shapes),
)  # fmt: skip
