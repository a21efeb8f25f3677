"""Verdicts on the results of study A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims.published import EPOCH_S, LAYER_MS, LOG_SECONDS, MODELS
from benchmarks.studies.claims.spreads import Row as Times
from benchmarks.studies.claims.spreads import decided, median_of, ratio, shown
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    NOT_COMPARABLE,
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    exactly,
    times,
)
from benchmarks.studies.cudnn import ALL, BEST, EXACT, PYTORCH
from benchmarks.studies.networks import STUDY_A
from dptrain.measure.statistics import Estimate

EPOCH_STEPS = 32
"""Steps of an epoch of 1,000 images with minibatches of 32."""
NEAR = 0.1
"""A ratio that differs by at most this share counts as equal."""
SAME = 1e-4
"""Largest relative difference that rounding to float32 explains in a step."""
TWELVE = tuple(LAYER_MS)


def step(results: Results, network: str, program: str) -> Times:
    """Return the times of a step of a network of study A."""
    steps = results.values("speed-up")["steps"][network]
    if program not in steps:
        count = program.split()[-1]
        raise MissingResultError(f"it needs {count} cores")
    found: Times = steps[program]
    return found


def step_ms(results: Results, network: str, program: str) -> float:
    """Return the median time of a step of a network of study A."""
    return median_of(step(results, network, program))


def speed_up(results: Results, network: str, program: str) -> Estimate:
    """Return the speed-up of a number of threads or ranks over one thread."""
    return ratio(step(results, network, "threads 1"), step(results, network, program))


def by_arithmetic(results: Results, network: str) -> str:
    """Return the speed-up of 8 threads with minibatches of 32 and of 1,024 images."""
    cases = results.values("equal-arithmetic")["cases"] if results.has("equal-arithmetic") else {}
    found = {
        name.rpartition(" ")[2]: ratio(case["threads 1"], case["threads 8"])
        for name, case in cases.items()
        if name.startswith(f"{network},") and "threads 8" in case
    }
    if not found:
        return "the other minibatch was not measured yet"
    return ", ".join(
        f"{shown(gain)} with minibatches of {int(batch):,}" for batch, gain in found.items()
    )


def _a1(results: Results) -> Verdict:
    threads, ranks = (speed_up(results, "model0", f"{unit} 8") for unit in ("threads", "ranks"))
    one = step_ms(results, "model0", "threads 1")
    theirs = 1e3 * EPOCH_S["sequential"] / EPOCH_STEPS
    return Verdict(
        NOT_COMPARABLE,
        f"{shown(threads)} with 8 threads, {shown(ranks)} with 8 ranks",
        f"the arithmetic of a step is the same, but ours takes {one:.2f} ms on one thread and the "
        f"study's {theirs:,.0f} ms: starting and joining threads weighs {theirs / one:,.0f} times "
        f"as much. By arithmetic per step: {by_arithmetic(results, 'model0')}",
        results.hardware("speed-up"),
    )


def gpu_steps(results: Results, batch: int = 32) -> dict[str, Mapping[str, Any]]:
    """Return the rows of the steps on a GPU by network."""
    rows = results.values("steps-gpu")["rows"]
    return {row["network"]: row for row in rows if row["batch"] == batch}


def library_at_its_best(row: Mapping[str, Any]) -> Times:
    """Return the fastest times of cuDNN: of all engines, or of PyTorch's use of it.

    Raises:
        MissingResultError: only engines of training were measured.
    """
    names = [n for n in row if n in (ALL, BEST) or n.startswith(PYTORCH)]
    if BEST not in names:
        raise MissingResultError("cuDNN with all engines and PyTorch are not measured yet")
    return min((row[name] for name in names), key=median_of)


def of_training(ratios: list[float]) -> str:
    """Return how cuDNN compares with its engines of training."""
    return (
        f"with the engines of training (exact fp32), cuDNN ÷ own CUDA is {times(min(ratios))} to "
        f"{times(max(ratios))}"
    )


def exact_ratios(rows: Mapping[Any, Mapping[str, Any]]) -> list[float]:
    """Return the time of cuDNN with its engines of training divided by that of our kernels."""
    return [median_of(row[EXACT]) / median_of(row["cuda"]) for row in rows.values()]


def _a2(results: Results) -> Verdict:
    rows = gpu_steps(results)
    orders, leads = [], []
    for name in STUDY_A:
        slow = step_ms(results, name, "reference")
        cpu = min(step_ms(results, name, f"{unit} 8") for unit in ("threads", "ranks"))
        gpu = [median_of(rows[name][backend]) / 1e3 for backend in ("cuda", EXACT)]
        orders.append(slow > cpu > max(gpu))
        leads.append(cpu / min(gpu))
    return Verdict(
        decide(all(orders)),
        f"the same order; 8 cores ÷ GPU {times(min(leads))} to {times(max(leads))}",
        "sequential (reference) is slower than 8 threads or ranks, and these are slower than both "
        f"GPU implementations, for {sum(orders)} of 5 networks; {of_training(exact_ratios(rows))}",
        results.hardware("speed-up", "steps-gpu"),
    )


def _a3(results: Results) -> Verdict:
    rows = gpu_steps(results)
    try:
        ratios = {n: ratio(library_at_its_best(row), row["cuda"]) for n, row in rows.items()}
    except MissingResultError as missing:
        raise MissingResultError(f"{missing}; {of_training(exact_ratios(rows))}") from None
    smallest, largest = ratios[STUDY_A[0]], ratios[STUDY_A[-1]]
    return Verdict(
        decided([smallest, largest.below(1.0)]),
        f"cuDNN at its best ÷ own CUDA: {shown(smallest)} on the smallest network, "
        f"{shown(largest)} on the largest",
        f"batch 32; {of_training(exact_ratios(rows))}",
        results.hardware("steps-gpu"),
    )


def layer_rows(results: Results, case: str) -> dict[str, Mapping[str, Times]]:
    """Return the times of the twelve operations of table 5.1 by program, in ms."""
    found: dict[str, Mapping[str, Times]] = {}
    for row in results.values("layers-gpu")[case]:
        name = f"{row['layer']} {row['direction']}"
        if name in LAYER_MS:
            found[name] = {program: t for program, t in row.items() if isinstance(t, Mapping)}
    missing = [name for name in TWELVE if not {"cuda", EXACT} <= found.get(name, {}).keys()]
    if missing:
        raise MissingResultError(f"no time for {', '.join(missing)}")
    return found


def layer_sums(results: Results, case: str = "batch 1") -> dict[str, dict[int, float]]:
    """Return sums of times in ms by program and depth: own CUDA, and cuDNN at its best."""
    rows = layer_rows(results, case)
    sums: dict[str, dict[int, float]] = {"cuda": {}, "best": {}, EXACT: {}}
    for depth in (1, 2, 3):
        own = [row for name, row in rows.items() if name.split()[0].endswith(str(depth))]
        for program in ("cuda", EXACT):
            sums[program][depth] = sum(median_of(row[program]) for row in own)
        try:
            sums["best"][depth] = sum(median_of(library_at_its_best(row)) for row in own)
        except MissingResultError as missing:
            training = sum(sums["cuda"].values()) / sum(sums[EXACT].values())
            raise MissingResultError(
                f"{missing}; own CUDA takes {times(training)} the time of cuDNN with the engines "
                "of training"
            ) from None
    return sums


def _a4(results: Results) -> Verdict:
    sums = {program: sum(parts.values()) for program, parts in layer_sums(results).items()}
    return Verdict(
        decide(sums["cuda"] > sums["best"]),
        f"sum {sums['best']:.4f} (cuDNN at its best, {sums[EXACT]:.4f} with the engines of "
        f"training) against {sums['cuda']:.4f} ms (own CUDA): "
        f"{times(sums['cuda'] / sums['best'])}",
        "device time, one image; the study's own CUDA takes 1.44 times as long as cuDNN in total",
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


def a5(results: Results) -> Verdict:
    """Return the verdict on equal results of all implementations."""
    first, last, programs = agreement(results)
    names = [n for n in ("agreement", "agreement-gpu", "speed-up") if results.has(n)]
    return Verdict(
        decide(first <= SAME),
        f"largest relative difference {first:.0e} after one step, {last:.0e} after 20",
        f"parameter changes compared with float64: {programs}. Rounding decides units whose input "
        "is almost 0; such a unit of ReLU or max pooling makes most of the difference after 20 "
        "steps, also between float32 and float64 of the reference",
        results.hardware(*names),
    )


def _a6(results: Results) -> Verdict:
    found = results.values("counts")["im2col"]
    verdict, reason = exactly({
        "values": (found["example_values"], 16), "inputs": (found["example_inputs"], 9),
    })  # fmt: skip
    ours = f"{found['example_values']}/{found['example_inputs']}"
    reason += f"; the factor of a 1000×1000 map and a 3×3 kernel is {found['limit_factor']:.3f}"
    return Verdict(verdict, ours, reason, "any")


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
    return Verdict(verdict, "50 × 50 = 2,500 threads", reason, hardware)


def _a8(results: Results) -> Verdict:
    losses = results.values("counts")["losses"]
    verdict, reason = exactly({
        "−ln 0.1": (round(losses["0.6, 0.3, 0.1"], 1), 2.3),
        "−ln 0.6": (round(losses["0.1, 0.3, 0.6"], 1), 0.5),
    })  # fmt: skip
    ours = ", ".join(f"{value:.4f}" for value in list(losses.values())[:2])
    return Verdict(verdict, ours, f"{reason}, computed by the reference backend", "any")


def log_speed_ups(results: Results) -> dict[int, Estimate]:
    """Return our speed-ups of the network of study A's log with 1,024 images, by threads."""
    if results.has("equal-arithmetic"):
        found = results.values("equal-arithmetic")["cases"]["log-network, batch 1024"]
    else:
        found = results.values("speed-up")["log"]
    return {int(name.split()[1]): ratio(found["threads 1"], row) for name, row in found.items()}


def _a9(results: Results) -> Verdict:
    ours = log_speed_ups(results)
    if 8 not in ours:
        raise MissingResultError("it needs 8 cores")
    return Verdict(
        NOT_COMPARABLE,
        ", ".join(f"{shown(gain)} ({n})" for n, gain in sorted(ours.items()) if n > 1),
        "threads in brackets, 1,024 images per step: 32 times the arithmetic of the log's step. "
        f"By arithmetic per step, 8 threads: {by_arithmetic(results, 'log-network')}. The log "
        "itself has 1.7× to 7.6×",
        results.hardware("speed-up"),
    )


def _shapes(results: Results) -> Verdict:
    models = results.values("counts")["models"]
    verdict, reason = exactly({
        f"{name} {what}": (own, published)
        for name, (parameters, work) in MODELS.items()
        for what, own, published in (
            ("parameters", models[name]["parameters"], parameters),
            ("multiply-adds", sum(models[name]["multiply_adds"].values()), work),
        )
    })  # fmt: skip
    if verdict == CONFIRMED:
        verdict, reason = NOT_COMPARABLE, "the study prints shapes only, so both counts are ours"
    return Verdict(verdict, "parameters and multiply-adds of five networks", reason, "any")


ROWS = (
    Row("A1", "A", "8 threads against 1, model0, one epoch", "101 s → 12.76 s: 7.92×, efficiency "
        "98.9%", "T, C", _a1),
    Row("A2", "A", "order of the four implementations", "sequential > OpenMP ≫ CUDA ≈ cuDNN", "T",
        _a2),
    Row("A3", "A", "own CUDA against cuDNN as the network grows", "CUDA slightly ahead when small, "
        "cuDNN ahead when large", "T", _a3),
    Row("A4", "A", "times per layer, larger network, 12 rows", "sum 0.2596 (cuDNN) against 0.3739 "
        "ms (CUDA)", "T, C", _a4),
    Row("A5", "A", "all implementations give the same results", "equal without randomness", "T",
        a5),
    Row("A6", "A", "expansion factor of im2col", "16/9 for a 3×3 input and a 2×2 kernel; tends to "
        "K²", "T", _a6),
    Row("A7", "A", "matrix product in a single block", "50×50 results need 2,500 threads, limit "
        "1,024", "T", _a7),
    Row("A8", "A", "worked values of the loss", "−ln 0.1 = 2.3; −ln 0.6 = 0.5", "T", _a8),
    Row("A9", "A", "1 to 8 threads, development log", f"{LOG_SECONDS[1] / LOG_SECONDS[8]:.2f}× "
        "with 8 threads; 7.55× for another network", "R", _a9),
    Row("A, 2.2", "A", "counts of the five networks", "34,998 to 326,198 parameters", "C",
        _shapes),
)  # fmt: skip
