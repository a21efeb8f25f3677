"""Verdicts on the claims of study B, Q12 to Q31."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from benchmarks.studies.claims.judge_b import (
    ADDITIVE,
    HALF_MILLION,
    additivity,
    calls,
    crossover,
    flat_from,
    gpu_strategies,
    perceptron_ms,
    ranks_of,
    sample_ms,
    strategy_ms,
    update_shares,
    width_ratios,
)
from benchmarks.studies.claims.published import PERCEPTRON_COUNTS, WIDE_AND_DEEP
from benchmarks.studies.claims.verdicts import (
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    duration,
    percent,
    times,
)


def _q12(results: Results) -> Verdict:
    cpu = flat_from(sample_ms(results, "solar"))
    text, names = f"flat from {cpu} on the CPU", ["solar"]
    if results.has("solar-gpu"):
        text += f", from {flat_from(sample_ms(results, 'solar-gpu'))} on the GPU"
        names.append("solar-gpu")
    return Verdict(
        decide(cpu <= 128),
        text,
        "time per map of training steps of the solar CNN, batch 2 to 1,024 (2,048 on the GPU)",
        hardware=results.hardware(*names),
    )


def _q13(results: Results) -> Verdict:
    maps = results.values("precision-by-batch")["maps"]
    losses = {int(name.split()[-1]): loss for name, loss in maps.items()}
    text = ", ".join(f"{loss:.3f} ({n})" for n, loss in sorted(losses.items()))
    worse = losses[max(losses)] / losses[min(losses)]
    return Verdict(
        decide(worse < 1.5),
        f"test MSE of the CNN after an epoch: {text}",
        "batch size in brackets, 2,048 generated maps. At equal epochs a large batch makes few "
        "updates; the study's own CNN shows the same (0.0105 at batch 8, 0.19 at 512)",
        hardware=results.hardware("precision-by-batch"),
    )


def _q14(results: Results) -> Verdict:
    rows = results.values("minibatches")["rows"]
    reached = {row["batch"]: row["goal_seconds"] for row in rows if row["goal_reached"]}
    best = min(reached, key=lambda n: reached[n])
    late = [str(row["batch"]) for row in rows if not row["goal_reached"]]
    text = ", ".join(f"{duration(s)} ({n})" for n, s in sorted(reached.items()))
    return Verdict(
        decide(best == max(row["batch"] for row in rows)),
        f"CPU time to 90% validation accuracy: {text}",
        f"batch size in brackets, model0 on digits, the same learning rate; batch {best} is the "
        "fastest" + (f"; not reached with {', '.join(late)}" if late else ""),
        hardware=results.hardware("minibatches"),
    )


def _q15(results: Results) -> Verdict:
    rows = additivity(results)
    shares = [row["inside_steps_share"]["median"] for row in rows.values()]
    ratios = [row["two_epochs_over_one"]["median"] / 2 for row in rows.values()]
    return Verdict(
        decide(max(abs(r - 1) for r in ratios) <= ADDITIVE),
        f"inside steps {percent(min(shares))} to {percent(max(shares))} of all time; two epochs ÷ "
        f"2 epochs' time {min(ratios):.3f} to {max(ratios):.3f}",
        "time inside and between steps measured apart, which the study's proof does not do",
        hardware=results.hardware("additivity"),
    )


def _q16(results: Results) -> Verdict:
    found = results.values("perceptrons-by-threads")
    most = max(found["counts"])
    if most < 8:
        raise MissingResultError("it needs at least 8 cores")
    gains = [
        (row["parameters"], found["steps"][name.replace(f"threads {most}", "threads 1")])
        for name, row in found["steps"].items()
        if name.endswith(f"threads {most}")
    ]
    ratios = [
        one["median_ms"] / found["steps"][f"{one['network']}, threads {most}"]["median_ms"]
        for _, one in sorted(gains, key=lambda pair: pair[0])
    ]
    return Verdict(
        decide(all(r > 1 for r in ratios) and ratios[-1] > ratios[0]),
        f"{most} threads ÷ 1: " + ", ".join(times(r) for r in ratios),
        "perceptrons from the smallest to the largest, batch 1,000",
        hardware=results.hardware("perceptrons-by-threads"),
    )


def _q17(results: Results) -> Verdict:
    first, always = crossover(results)
    return Verdict(
        decide(HALF_MILLION / 2 <= always <= 2 * HALF_MILLION),
        f"the GPU is faster from {always:,} parameters on",
        f"{first:,} for the smallest network that the GPU computes faster; the pair of devices "
        "decides",
        hardware=results.hardware("perceptrons", "perceptrons-gpu"),
    )


def _q18(results: Results) -> Verdict:
    cpu, gpu = width_ratios(results, "perceptrons"), width_ratios(results, "perceptrons-gpu")
    means = [float(np.exp(np.mean(np.log(list(found.values()))))) for found in (cpu, gpu)]
    published = np.exp(np.mean(np.log([row[1] for row in WIDE_AND_DEEP.values()])))
    return Verdict(
        decide(means[0] > 1 and means[0] > means[1]),
        f"wide ÷ deep: {times(means[0])} on the CPU, {times(means[1])} on the GPU",
        f"geometric mean of six pairs; {times(float(published))} on the study's Xeon",
        hardware=results.hardware("perceptrons", "perceptrons-gpu"),
    )


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
        hardware=results.hardware("perceptrons"),
    )


def _q20(results: Results) -> Verdict:
    perceptron = "mlp-3200-1600-832"
    mlp = perceptron_ms(results, "perceptrons")[perceptron]
    cnn = sample_ms(results, "solar")
    batch = 1024 if 1024 in cnn else max(cnn)
    per_sample = cnn[batch] / (mlp / 1000)
    work = 44.0e6 / 6.612e6
    return Verdict(
        decide(0.5 < per_sample < 2),
        f"a map takes {times(per_sample)} the time of a row",
        f"solar (4.35 million parameters) against {perceptron} (6.62 million) at batch {batch:,} "
        f"and 1,000. The ratio of multiply-adds, {times(work)}, predicts it better than that of "
        "parameters, 0.66×",
        hardware=results.hardware("perceptrons", "solar"),
    )


def _q21(results: Results) -> Verdict:
    one = strategy_ms(results, "", 1)
    counts = ranks_of(results)
    gains = {n: one / strategy_ms(results, "mirrored, shared memory", n) for n in counts}
    central = {n: one / strategy_ms(results, "central, MPI", n) for n in counts}
    return Verdict(
        decide(min(*gains.values(), *central.values()) > 1),
        "mirrored " + ", ".join(f"{times(g)} ({n})" for n, g in gains.items())
        + "; central " + ", ".join(f"{times(g)} ({n})" for n, g in central.items()),
        "speed-up over one rank, ranks in brackets, the same global minibatch of "
        f"{results.values('strategies')['batch']} maps",
        hardware=results.hardware("strategies"),
    )  # fmt: skip


def _q22(results: Results) -> Verdict:
    counts = ranks_of(results)
    ratios = {
        f"{n} ranks": strategy_ms(results, "central, MPI", n)
        / strategy_ms(results, "mirrored, MPI", n)
        for n in counts
    }
    gpu, names = gpu_strategies(results), ["strategies"]
    for batch in (128, 2048):
        pair = [f"{s}, 2 GPUs, batch {batch}" for s in ("central, NCCL", "mirrored, NCCL")]
        if gpu.keys() >= set(pair):
            ratios[f"2 GPUs, batch {batch}"] = gpu[pair[0]] / gpu[pair[1]]
            names = ["strategies", "strategies-gpu"]
    return Verdict(
        decide(all(ratio > 1 for ratio in ratios.values())),
        "central ÷ mirrored: " + ", ".join(f"{times(r)} ({n})" for n, r in ratios.items()),
        "the same transport for both: MPI on CPUs, NCCL on GPUs; the study has 1.09×",
        hardware=results.hardware(*names),
    )


def _q23(results: Results) -> Verdict:
    counts = ranks_of(results)
    times_ms = [strategy_ms(results, "mirrored, shared memory", n) for n in counts]
    later = zip(counts[1:], pairwise(times_ms), strict=True)
    slower = [n for n, (before, after) in later if after > before]
    if len(counts) < 2:
        raise MissingResultError("it needs more than two cores")
    return Verdict(
        decide(bool(slower)),
        ", ".join(f"{ms:.1f} ms ({n})" for n, ms in zip(counts, times_ms, strict=True)),
        "ranks in brackets, steps after warm-up: more ranks are "
        + (f"slower from {slower[0]} on" if slower else "never slower")
        + ". Three GPUs were not available",
        hardware=results.hardware("strategies"),
    )


def _q24(results: Results) -> Verdict:
    found = results.values("unlike")
    rates = {name: row["median"] for name, row in found["samples_per_s"].items()}
    gains = {
        factor: [rates[f"unlike by {factor:g}, {shares}"] / rates["one"]
                 for shares in ("equal shares", "shares by speed")]
        for factor in found["slowdowns"]
    }  # fmt: skip
    does_no_harm = all(gain >= 1 for both in gains.values() for gain in both)
    return Verdict(
        decide(does_no_harm),
        "; ".join(
            f"second worker {times(factor)} slower: {times(equal)} with equal shares, "
            f"{times(by_speed)} with shares by speed"
            for factor, (equal, by_speed) in gains.items()
        ),
        f"solar, {found['batch']} maps; samples per second relative to the faster worker alone; "
        f"two equal workers reach {times(rates['two, equal'] / rates['one'])}. CPU workers, of "
        "which one sleeps; unlike GPUs were not available. With equal shares, as in the study, a "
        "worker that is more than twice as slow must do harm",
        hardware=results.hardware("unlike"),
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
        hardware=results.hardware(name),
    )


def _q26(results: Results) -> Verdict:
    inference, training = calls(results, "inference"), sample_ms(results, "solar")
    ratio = training[512] * 512 / inference[512]["median_ms"]
    text, names = f"{times(ratio)} on the CPU", ["inference", "solar"]
    if results.has("inference-gpu") and results.has("solar-gpu"):
        gpu = sample_ms(results, "solar-gpu")[512] * 512
        text += f", {times(gpu / calls(results, 'inference-gpu')[512]['device_ms'])} on the GPU"
        names += ["inference-gpu", "solar-gpu"]
    return Verdict(
        decide(ratio > 1.5),
        text,
        "a training step divided by a forward pass, 512 maps; the study has 1.6 to 3.3×",
        hardware=results.hardware(*names),
    )


def _q27(results: Results) -> Verdict:
    cpu, names = calls(results, "inference"), ["inference"]
    parts = [f"CPU {duration(cpu[n]['p99_ms'] / 1e3)} ({n:,})" for n in (64, 1024)]
    if results.has("inference-gpu"):
        gpu = calls(results, "inference-gpu")
        parts += [f"GPU {duration(gpu[n]['p99_ms'] / 1e3)} ({n:,})" for n in (64, 1024)]
        names.append("inference-gpu")
    return Verdict(
        decide(cpu[64]["p99_ms"] < 1e3 < cpu[1024]["median_ms"]),
        ", ".join(parts),
        "99th percentiles of 20 real calls, maps in brackets; 64 maps are in time on all devices",
        hardware=results.hardware(*names),
    )


def _q28(results: Results) -> Verdict:
    found = perceptron_ms(results, "perceptrons", "inference")
    worst = max(found, key=lambda n: found[n])
    return Verdict(
        decide(found[worst] < 1e3),
        f"at most {duration(found[worst] / 1e3)} for 1,000 rows ({worst})",
        f"{len(found)} perceptrons on the CPU; the two largest, with 329 and 414 million "
        "parameters, were not run, as in the study",
        hardware=results.hardware("perceptrons"),
    )


def _q29(results: Results) -> Verdict:
    shares = update_shares(results, "update-share")
    pairs = [(shares[f"{n}, batch 100"], shares[f"{n}, batch 1000"])
             for n in ("mlp-50", "mlp-1600-800-416")]  # fmt: skip
    return Verdict(
        decide(all(small > large for small, large in pairs)),
        ", ".join(f"{percent(a)} → {percent(b)}" for a, b in pairs),
        "mlp-50 and mlp-1600-800-416, batch 100 → 1,000, CPU time of one thread",
        hardware=results.hardware("update-share"),
    )


def _q30(results: Results) -> Verdict:
    rows = {r["samples"]: r["gflops"] for r in results.values("solar-gpu")["rows"] if "gflops" in r}
    text = ", ".join(f"{rate / 1e3:.2f} ({n:,})" for n, rate in sorted(rows.items()))
    return Verdict(decide(rows[2] < max(rows.values()) / 5), f"TFLOP/s: {text}",
                   "training steps of the solar CNN, batch size in brackets, fp32",
                   hardware=results.hardware("solar-gpu"))  # fmt: skip


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
        hardware="any",
    )


ROWS = (
    Row("Q12", "B", "epoch time falls with the batch size and is flat from about 100", "", "T",
        _q12),
    Row("Q13", "B", "precision hardly depends on the batch size", "", "T", _q13),
    Row("Q14", "B", "use the largest batch that fits", "", "T", _q14),
    Row("Q15", "B", "total = epochs × steps × step time", "0.9 to 1.07 in single runs", "T, R",
        _q15),
    Row("Q16", "B", "more CPU cores are faster, and the gap grows with the parameters",
        "3.5× → 8.0×", "T, R", _q16),
    Row("Q17", "B", "CPUs are fine to about half a million parameters", "500,000", "T", _q17),
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
        _q27),
    Row("Q28", "B", "no perceptron needs a GPU to answer in 1 s", "at most 0.62 s", "T, R", _q28),
    Row("Q29", "B", "the optimiser's share falls with the batch size", "", "T", _q29),
    Row("Q30", "B", "small batches do not fill a GPU", "", "T", _q30),
    Row("Q31", "B", "forward and backward need about twice the memory of forward", "2×", "T", _q31),
)  # fmt: skip
