"""Verdicts on the claims of study B, Q12 to Q31."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from benchmarks.studies.claims import judge_b
from benchmarks.studies.claims.judge_b import (
    ON_GPUS,
    calls,
    gpu_strategies,
    mirrored_and_central,
    on_several_gpus,
    perceptron_ms,
    ranks_of,
    sample_rows,
    speed_ups_on_gpus,
    strategy,
    thread_gains,
    width_ratios,
)
from benchmarks.studies.claims.published import PERCEPTRON_COUNTS, WIDE_AND_DEEP
from benchmarks.studies.claims.spreads import decided, ratio, shown
from benchmarks.studies.claims.verdicts import (
    NOT_COMPARABLE,
    MissingResultError,
    Results,
    Row,
    Verdict,
    absolute,
    decide,
    duration,
    same_as,
    times,
)
from dptrain.measure.statistics import Estimate


def _q13(results: Results) -> Verdict:
    maps = results.values("precision-by-batch")["maps"]
    rows = {int(name.split()[-1]): row for name, row in maps.items()}
    worse = ratio(rows[max(rows)], rows[min(rows)])
    text = ", ".join(f"{row['median']:.3f} ({row['q1']:.3f} to {row['q3']:.3f}, batch {n})"
                     for n, row in sorted(rows.items()))  # fmt: skip
    return Verdict(
        decided([worse.below(1.5)]),
        f"test MSE of the CNN after an epoch: {text}",
        f"2,048 generated maps, quartiles of {rows[min(rows)]['n']} seeds. At equal epochs a large "
        "batch makes few updates; the study's own CNN shows the same (0.0105 at batch 8, 0.19 at "
        "512)",
        results.hardware("precision-by-batch"),
    )


def _q14(results: Results) -> Verdict:
    rows = results.values("minibatches")["rows"]
    reached = {row["batch"]: row["goal_seconds"] for row in rows if row["goal_reached"]}
    text = ", ".join(f"{duration(s)} ({n})" for n, s in sorted(reached.items()))
    return Verdict(
        NOT_COMPARABLE,
        f"CPU time to 90% validation accuracy: {text}",
        "batch size in brackets, model0 on digits, one core, one run. The study's advice is about "
        "epochs of perceptrons and of the solar CNN on GPUs",
        results.hardware("minibatches"),
    )


def _q16(results: Results) -> Verdict:
    most, gains = thread_gains(results, 1)
    found = list(gains.values())
    rises = sum(a.value < b.value for a, b in pairwise(found))
    grows = found[-1].times(1 / found[0].high)
    return Verdict(
        decided([*found, grows]),
        f"{most} threads ÷ 1: " + ", ".join(shown(gain) for gain in found),
        "perceptrons from the smallest to the largest, batch 1,000: the last gain is larger than "
        f"the first, but only {rises} of {len(found) - 1} steps between neighbours rise",
        results.hardware("perceptrons-by-threads"),
    )


def _q18(results: Results) -> Verdict:
    cpu, gpu = width_ratios(results, "perceptrons"), width_ratios(results, "perceptrons-gpu")
    means = [_mean(found.values()) for found in (cpu, gpu)]
    published = np.exp(np.mean(np.log([row[1] for row in WIDE_AND_DEEP.values()])))
    return Verdict(
        decided([means[0], means[0].times(1 / means[1].high)]),
        f"wide ÷ deep: {shown(means[0])} on the CPU, {shown(means[1])} on the GPU",
        f"geometric mean of six pairs; {times(float(published))} on the study's Xeon",
        results.hardware("perceptrons", "perceptrons-gpu"),
    )


def _mean(found: Iterable[Estimate]) -> Estimate:
    """Return the geometric mean of ratios and of the ends of their intervals."""
    ends = np.array([[each.value, each.low, each.high] for each in found])
    value, low, high = np.exp(np.log(ends).mean(axis=0))
    return Estimate(float(value), float(low), float(high), len(ends))


def _residuals(results: Results, largest: int) -> tuple[float, float]:
    """Return the spread of the time per parameter and per multiply-add, as factors.

    Args:
        results: all results.
        largest: largest width of a layer.
    """
    found = perceptron_ms(results, "perceptrons")
    chosen = [n for n in found if max(map(int, n.split("-")[1:])) <= largest]
    logs = np.log([found[n] for n in chosen])
    sizes = np.log([PERCEPTRON_COUNTS[n] for n in chosen])
    slope, level = np.polyfit(sizes, logs, 1)
    left = logs - slope * sizes - level
    return math.exp(float(np.abs(left).max())), float(np.corrcoef(sizes, logs)[0, 1])


def _q19(results: Results) -> Verdict:
    factor, correlation = _residuals(results, 1000)
    return Verdict(
        decide(factor < 1.5),
        f"largest deviation from a power law: {times(factor)}; correlation {correlation:.3f}",
        "logarithms of time and parameters, perceptrons with at most 1,000 neurons a layer, CPU",
        results.hardware("perceptrons"),
    )


def _q20(results: Results) -> Verdict:
    perceptron = "mlp-3200-1600-832"
    mlp = perceptron_ms(results, "perceptrons")[perceptron]
    cnn = sample_rows(results, "solar")
    batch = 1024 if 1024 in cnn else max(cnn)
    per_sample = cnn[batch]["median_ms"] / batch / (mlp / 1000)
    work = 44.0e6 / 6.612e6
    return Verdict(
        decide(0.5 < per_sample < 2),
        f"a map takes {times(per_sample)} the time of a row",
        f"solar (4.35 million parameters) against {perceptron} (6.62 million) at batch {batch:,} "
        f"and 1,000. The ratio of multiply-adds, {times(work)}, predicts it better than that of "
        "parameters, 0.66×",
        results.hardware("perceptrons", "solar"),
    )


def _q21(results: Results) -> Verdict:
    one = strategy(results, "", 1)
    gains = [
        ratio(one, strategy(results, how, n))
        for how in ("mirrored, shared memory", "central, MPI")
        for n in ranks_of(results)
    ]
    on_gpus = speed_ups_on_gpus(results)
    spans = {f"ranks on {results.hardware('strategies')}": gains,
             "2 or more GPUs": list(on_gpus.values())}  # fmt: skip
    text = ", ".join(
        f"{times(min(g.value for g in own))} to {times(max(g.value for g in own))} ({name})"
        for name, own in spans.items() if own
    )  # fmt: skip
    names = ["strategies", *(["strategies-gpu"] if on_gpus else [])]
    return Verdict(
        decided([*gains, *on_gpus.values()]),
        f"speed-up over one: {text}",
        "mirrored and central, the same global minibatch. The study's own data cannot show it: "
        "its distributed runs train another network",
        results.hardware(*names),
    )


def _q22(results: Results) -> Verdict:
    ratios = mirrored_and_central(results)
    cpu = [ratio(strategy(results, "central, MPI", n), strategy(results, "mirrored, MPI", n))
           for n in ranks_of(results)] if results.has("strategies") else []  # fmt: skip
    note = ""
    if cpu:
        low, high = min(e.low for e in cpu), max(e.high for e in cpu)
        note = (f". Between CPU ranks, which the claim is not about, the intervals extend from "
                f"{low:.2g} to {high:.2g}")  # fmt: skip
    return Verdict(
        decided(on_several_gpus(ratios)),
        "central ÷ mirrored: " + ", ".join(f"{shown(r)} ({n})" for n, r in ratios.items()),
        f"GPUs, the same transport for both; the study has 1.09×{note}",
        results.hardware(*(name for name in ON_GPUS if results.has(name))),
    )


def _q23(results: Results) -> Verdict:
    steps = gpu_strategies(results)
    names = [f"mirrored, NCCL, {n} GPUs, batch 2048" for n in (3, 2)]
    if not steps.keys() >= set(names):
        raise MissingResultError("it needs three GPUs")
    slower = ratio(*(steps[name] for name in names))
    return Verdict(decided([slower]), f"3 ÷ 2 GPUs: {shown(slower)}", "batch 2,048, after warm-up",
                   results.hardware("strategies-gpu"))  # fmt: skip


def _q24(results: Results) -> Verdict:
    found = results.values("unlike")
    rows = found["samples_per_s"]
    gains = {
        factor: [ratio(rows[f"unlike by {factor:g}, {shares}"], rows["one"])
                 for shares in ("equal shares", "shares by speed")]
        for factor in found["slowdowns"]
    }  # fmt: skip
    return Verdict(
        decided(gain for both in gains.values() for gain in both),
        "; ".join(
            f"second worker {times(factor)} slower: {shown(equal)} with equal shares, "
            f"{shown(by_speed)} with shares by speed"
            for factor, (equal, by_speed) in gains.items()
        ),
        f"solar, {found['batch']} maps, throughput relative to the faster worker alone; two equal "
        f"workers reach {shown(ratio(rows['two, equal'], rows['one']))}. CPU workers, of which one "
        "sleeps; unlike GPUs were not available",
        results.hardware("unlike"),
    )


def _q25(results: Results) -> Verdict:
    name = "largest-gpu" if results.has("largest-gpu") else "largest"
    found = results.values(name)["largest"]
    batches = {size: found[f"{size} GB, training"]["batch"] for size in (2, 4, 8)}
    return Verdict(
        decide(batches[2] < batches[4] < batches[8]),
        ", ".join(f"{n:,} ({size} GB)" for size, n in batches.items()),
        "largest batch per replica of the solar CNN in training, from its plan; every replica has "
        "the same share, so that the smallest memory sets it",
        results.hardware(name),
    )


def _q26(results: Results) -> Verdict:
    gains, names = {}, []
    for name, steps in (("inference", "solar"), ("inference-gpu", "solar-gpu")):
        if results.has(name) and results.has(steps):
            call = calls(results, name)[512]
            forward = call.get("device_ms", call["median_ms"])
            gains[results.hardware(name)] = sample_rows(results, steps)[512]["median_ms"] / forward
            names += [name, steps]
    if not gains:
        raise MissingResultError("`inference` and `solar` were not measured yet")
    return Verdict(
        decide(min(gains.values()) > 1.5),
        ", ".join(f"{times(gain)} ({device})" for device, gain in gains.items()),
        "medians of a training step divided by those of a forward pass, 512 maps; the study has "
        "1.6 to 3.3×",
        results.hardware(*names),
    )


def _q28(results: Results) -> Verdict:
    found = perceptron_ms(results, "perceptrons", "inference")
    worst = max(found, key=lambda n: found[n])
    return absolute(
        f"at most {duration(found[worst] / 1e3)} for 1,000 rows ({worst})",
        f"seconds of other hardware; {len(found)} perceptrons",
        results.hardware("perceptrons"),
    )


def _q30(results: Results) -> Verdict:
    rows = {r["samples"]: r["gflops"] for r in results.values("solar-gpu")["rows"] if "gflops" in r}
    text = ", ".join(f"{rate / 1e3:.2f} ({n:,})" for n, rate in sorted(rows.items()))
    return Verdict(decide(rows[2] < max(rows.values()) / 5), f"TFLOP/s: {text}",
                   "training steps of the solar CNN, batch size in brackets, fp32",
                   results.hardware("solar-gpu"))  # fmt: skip


def _q31(results: Results) -> Verdict:
    plans = results.values("memory")["plans"]
    ratios = {
        name: (sum(p["training"].values()) - p["training"].get("optimizer", 0))
        / sum(p["inference"].values())
        for name, p in plans.items()
    }
    return Verdict(
        decide(all(1.5 <= ratio <= 3 for ratio in ratios.values())),
        ", ".join(f"{times(ratio)} ({name})" for name, ratio in ratios.items()),
        "bytes of the plan with gradients, without the optimiser, divided by those of inference. "
        "Buffers whose lifetimes do not overlap share memory, which changes the factor by network",
        "any",
    )


ROWS = (
    Row("Q12", "B", "epoch time falls with the batch size and is flat from about 100", "", "T",
        same_as("B1", judge_b.b1)),
    Row("Q13", "B", "precision hardly depends on the batch size", "", "T", _q13),
    Row("Q14", "B", "use the largest batch that fits", "", "T", _q14),
    Row("Q15", "B", "total = epochs × steps × step time", "0.9 to 1.07 in single runs", "T, R",
        same_as("B3", judge_b.b3)),
    Row("Q16", "B", "more CPU cores are faster, and the gap grows with the parameters",
        "3.5× → 8.0×", "T, R", _q16),
    Row("Q17", "B", "CPUs are fine to about half a million parameters", "500,000", "T",
        same_as("B5", judge_b.crossover_verdict)),
    Row("Q18", "B", "width hurts CPUs more than GPUs, and more than depth", "up to 3.75×", "T, C",
        _q18),
    Row("Q19", "B", "to about 1,000 neurons a layer, parameters alone set the time", "", "T", _q19),
    Row("Q20", "B", "parameters predict the time across kinds of networks", "21.9 s and 27.2 s",
        "T", _q20),
    Row("Q21", "B", "any distribution beats one device", "", "T", _q21),
    Row("Q22", "B", "mirrored beats central", "9% on three GPUs", "T, R", _q22),
    Row("Q23", "B", "three GPUs are slower than two", "13.42 s against 11.26 s", "T, R", _q23),
    Row("Q24", "B", "unlike GPUs do no harm", "", "T", _q24),
    Row("Q25", "B", "the smallest memory sets the batch per replica", "", "T", _q25),
    Row("Q26", "B", "inference is much faster than training", "1.6–3.3×", "T, C", _q26),
    Row("Q27", "B", "all devices answer 64 maps in less than 1 s; CPUs miss it at 1,024", "", "T",
        same_as("B9", judge_b.b9)),
    Row("Q28", "B", "no perceptron needs a GPU to answer in 1 s", "at most 0.62 s", "T, R", _q28),
    Row("Q29", "B", "the optimiser's share falls with the batch size", "", "T",
        same_as("B12", judge_b.b12)),
    Row("Q30", "B", "small batches do not fill a GPU", "", "T", _q30),
    Row("Q31", "B", "forward and backward need about twice the memory of forward", "2×", "T", _q31),
)  # fmt: skip
