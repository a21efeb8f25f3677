"""Verdicts on the results of study B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims.published import (
    PERCEPTRON_COUNTS,
    SOLAR_PARAMETERS,
    WIDE_AND_DEEP,
    solar_s,
)
from benchmarks.studies.claims.spreads import Row as Times
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
    exactly,
    percent,
    times,
)
from dptrain.measure.statistics import Estimate

FLAT = 0.1
"""Time per sample is flat from a batch size on if no larger one is faster by more than this."""
ADDITIVE = 0.05
"""Deviation from additivity that the variation of a machine with other users explains."""
XEON = "2 × Xeon E5-2695 v3"


def sample_rows(results: Results, name: str) -> dict[int, Times]:
    """Return the times of training steps of the solar network, by batch size."""
    rows = results.values(name)["rows"]
    return {row["samples"]: row for row in rows if "median_ms" in row}


def sample_ms(results: Results, name: str) -> dict[int, float]:
    """Return milliseconds per map of training steps of the solar network, by batch size."""
    return {n: row["median_ms"] / n for n, row in sample_rows(results, name).items()}


def gain_after(rows: Mapping[int, Times], batch: int) -> Estimate:
    """Return how much less time per map the best larger batch size takes than `batch`."""
    larger = [n for n in rows if n > batch]
    best = min(larger, key=lambda n: rows[n]["median_ms"] / n)
    return ratio(rows[batch], rows[best]).times(best / batch)


def flat_verdict(results: Results) -> tuple[str, str]:
    """Return verdict and text of the claim that time is flat from a batch of 100."""
    names = [n for n in ("solar", "solar-gpu") if results.has(n)]
    rows = {results.hardware(n): sample_rows(results, n) for n in names or ["solar"]}
    gains = {device: gain_after(own, 128) for device, own in rows.items()}
    text = ", ".join(f"{shown(gain)} ({device})" for device, gain in gains.items())
    # The claim is about every device, so one that contradicts it decides.
    flat = decided(gain.below(1 + FLAT) for gain in gains.values())
    return flat, f"batch 128 ÷ the best larger one, per map: {text}"


def b1(results: Results) -> Verdict:
    """Return the verdict on the time of an epoch over batch sizes."""
    verdict, text = flat_verdict(results)
    cpu = sample_ms(results, "solar")
    theirs = [solar_s(gpu, 128) / solar_s(gpu, 512) for gpu in ("GTX 980", "GTX 1080")]
    return Verdict(
        verdict,
        f"falls by {times(cpu[2] / cpu[128])} from batch 2 to 128 on the CPU; {text}",
        "flat means that no larger batch is faster by more than 10%. By this rule, the study's "
        f"GTX 980 and 1080 ({' and '.join(map(times, theirs))}) are not flat from 128 either",
    )


def _b2(results: Results) -> Verdict:
    found = results.values("precision-by-batch")["perceptron"]
    epochs = [v["median"] for name, v in found.items() if name.endswith("epochs")]
    steps = [v["median"] for name, v in found.items() if name.endswith("steps")]
    spans = max(epochs) / min(epochs), max(steps) / min(steps)
    return Verdict(
        NOT_COMPARABLE,
        f"largest ÷ smallest test MSE: {times(spans[0])} after 2 epochs, {times(spans[1])} after "
        "equal steps",
        "three seeds; generated data with 20,000 rows instead of 1.37 million, so that two epochs "
        "are 40 to 400 steps instead of 2,700 to 27,000",
        results.hardware("precision-by-batch"),
    )


def additivity(results: Results) -> dict[str, Mapping[str, Any]]:
    """Return the rows of additivity of the processor, by network."""
    found: dict[str, Mapping[str, Any]] = dict(results.values("additivity")["networks"])
    return found


def _spans(rows: Mapping[str, Mapping[str, Any]], value: str) -> tuple[float, float]:
    """Return the smallest and the largest median of a value over networks."""
    found = [row[value]["median"] for row in rows.values()]
    return min(found), max(found)


def b3(results: Results) -> Verdict:
    """Return the verdict on the additivity of times."""
    rows = additivity(results)
    ratios = {name: row["two_epochs_over_one"] for name, row in rows.items()}
    worst = max(abs(row["median"] / 2 - 1) for row in ratios.values())
    names = [n for n in ("additivity", "additivity-gpu") if results.has(n)]
    shares = _spans(rows, "inside_steps_share")
    return Verdict(
        decide(worst <= ADDITIVE),
        "two epochs ÷ one: " + ", ".join(
            f"{row['median']:.3f} ({row['q1']:.3f} to {row['q3']:.3f})" for row in ratios.values()),
        f"quartiles of {next(iter(ratios.values()))['n']} repeats in brackets; "
        f"{percent(shares[0])} to {percent(shares[1])} of the time is inside of steps. The study's "
        "second proof is ceil(x) ÷ x, which is just above 1 for any data" + _on_gpu(results),
        results.hardware(*names),
    )  # fmt: skip


def _on_gpu(results: Results) -> str:
    if not results.has("additivity-gpu"):
        return ""
    low, high = _spans(results.values("additivity-gpu")["networks"], "two_epochs_over_one")
    return f". On the GPU, two epochs take {low:.2f} to {high:.2f} times as long as one"


def perceptron_rows(results: Results, name: str, task: str = "training") -> dict[str, Times]:
    """Return the times of a step with 1,000 rows by network."""
    return {
        row["network"]: row
        for row in results.values(name)["rows"]
        if row["task"] == task and row["samples"] == 1000 and "median_ms" in row
    }


def perceptron_ms(results: Results, name: str, task: str = "training") -> dict[str, float]:
    """Return the milliseconds of a step with 1,000 rows by network."""
    return {n: row["median_ms"] for n, row in perceptron_rows(results, name, task).items()}


def thread_gains(results: Results, fewer: int) -> tuple[int, dict[str, Estimate]]:
    """Return the most threads, and their speed-up over fewer by network, the smallest first."""
    found = results.values("perceptrons-by-threads")
    most = max(found["counts"])
    if most < 8:
        raise MissingResultError("it needs at least 8 cores")
    names = {name.partition(", threads ")[0] for name in found["steps"]}
    return most, {
        name: ratio(*(found["steps"][f"{name}, threads {n}"] for n in (fewer, most)))
        for name in sorted(names, key=lambda name: PERCEPTRON_COUNTS[name])
    }


def _b4(results: Results) -> Verdict:
    most, gains = thread_gains(results, 4)
    least, best = min(gains, key=lambda n: gains[n].value), max(gains, key=lambda n: gains[n].value)
    return Verdict(
        decided(gains.values()),
        f"{most} threads against 4: {shown(gains[least])} ({least}) to {shown(gains[best])} "
        f"({best})",
        "the study compares two processors, we compare threads of one, so that at most about "
        f"{most / 4:g}× is expected",
        results.hardware("perceptrons-by-threads"),
    )


def crossover(results: Results) -> tuple[int, float, float]:
    """Return the parameters from which the GPU is faster, and the range of CPU ÷ GPU."""
    cpu, gpu = perceptron_ms(results, "perceptrons"), perceptron_ms(results, "perceptrons-gpu")
    both = sorted((PERCEPTRON_COUNTS[n], cpu[n] / gpu[n]) for n in cpu if n in gpu)
    first = next((count for count, gain in both if gain > 1), both[-1][0])
    return first, min(gain for _, gain in both), max(gain for _, gain in both)


def crossover_verdict(results: Results) -> Verdict:
    """Return the verdict on CPUs being a good option near half a million parameters."""
    first, low, high = crossover(results)
    return absolute(
        f"the GPU is faster from {first:,} parameters on, by {times(low)} to {times(high)}",
        'the study calls multicore CPUs a good option near half a million parameters ("close to a '
        'million" in its English chapter), not a crossover of every pair of devices: its own '
        "GTX 1080 beats the Xeon from 3,851 parameters, its GTX 950M from 5.3 million. We have "
        "one pair",
        results.hardware("perceptrons", "perceptrons-gpu"),
    )


def width_ratios(results: Results, name: str) -> dict[tuple[str, str], Estimate]:
    """Return the time of a wide network divided by that of a deeper one, by pair."""
    found = perceptron_rows(results, name)
    return {pair: ratio(found[pair[0]], found[pair[1]]) for pair in WIDE_AND_DEEP}


def _b6(results: Results) -> Verdict:
    cpu, gpu = width_ratios(results, "perceptrons"), width_ratios(results, "perceptrons-gpu")
    pair = ("mlp-25600", "mlp-1600-800")
    slower = sum(cpu[p].low > gpu[p].high for p in cpu)
    costs = sum(cpu[p].low > 1 for p in cpu)
    return Verdict(
        decide(slower >= 5 and costs >= 4),
        f"25600 ÷ 1600-800: {shown(cpu[pair])} on the CPU, {shown(gpu[pair])} on the GPU",
        f"of six pairs of like size, the wide network is slower on the CPU in {costs}, and the "
        f"ratio is larger on the CPU than on the GPU in {slower}, beyond the quartiles",
        results.hardware("perceptrons", "perceptrons-gpu"),
    )


def _b7(results: Results) -> Verdict:
    cpu, gpu = sample_rows(results, "solar"), sample_rows(results, "solar-gpu")
    small, large = (ratio(cpu[n], gpu[n]) for n in (2, 512))
    theirs = {n: solar_s(XEON, n) / solar_s("GTX 1080", n) for n in (2, 512)}
    return Verdict(
        decided([small, large, large.times(1 / small.high)]),
        f"CPU ÷ GPU: {shown(small)} at batch 2, {shown(large)} at batch 512",
        f"the study's Xeon ÷ GTX 1080 is {times(theirs[2])} and {times(theirs[512])}. The verdict "
        "is about the direction: the GPU is faster, and more so with large batches",
        results.hardware("solar", "solar-gpu"),
    )


def strategy(results: Results, name: str, ranks: int) -> Times:
    """Return the times of a step of the solar network on the processor."""
    steps = results.values("strategies")["steps"]
    full = "threads 1" if ranks == 1 else f"{name}, ranks {ranks}"
    if full not in steps:
        raise MissingResultError(f"it needs {ranks} cores")
    found: Times = steps[full]
    return found


def ranks_of(results: Results) -> list[int]:
    """Return the numbers of ranks for which strategies were measured."""
    steps = results.values("strategies")["steps"]
    return sorted({int(name.split()[-1]) for name in steps if "ranks" in name})


ON_GPUS = ("strategies-gpu", "strategies-one-gpu")


def gpu_strategies(results: Results, name: str = ON_GPUS[0]) -> dict[str, Times]:
    """Return the times of steps on several GPUs, or of ranks that share one, by case."""
    if not results.has(name):
        return {}
    steps = results.values(name)["steps"]
    return {case: row for case, row in steps.items() if "median_ms" in row}


def of_launches(numerator: Times, denominator: Times) -> Estimate:
    """Return the ratio of two programs that are launched for each round.

    Older results have one launch, whose quartiles are those of its steps; then the interval is
    wider by `ADDITIVE`, by which launches may differ.
    """
    found = ratio(numerator, denominator)
    if found.n > 1:
        return found
    return Estimate(found.value, found.low / (1 + ADDITIVE), found.high * (1 + ADDITIVE), 1)


def mirrored_and_central(results: Results) -> dict[str, Estimate]:
    """Return central ÷ mirrored on GPUs, each with the same transport, by case."""
    found = {}
    for steps in (gpu_strategies(results, name) for name in ON_GPUS):
        for name, row in steps.items():
            other = name.replace("central", "mirrored")
            if name.startswith("central") and other in steps:
                found[name.removeprefix("central, ")] = of_launches(row, steps[other])
    if not found:
        raise MissingResultError("mirrored and central were not measured on GPUs yet")
    return found


def on_several_gpus(found: Mapping[str, Estimate]) -> list[Estimate]:
    """Return the ratios of several GPUs; those of ranks on one GPU if there are no others."""
    return [value for name, value in found.items() if " GPUs, " in name] or list(found.values())


def speed_ups_on_gpus(results: Results) -> dict[str, Estimate]:
    """Return the speed-up of several GPUs over one, by case."""
    steps = gpu_strategies(results)
    found = {}
    for name, row in steps.items():
        one = steps.get(f"1 GPU, batch {name.rpartition(' ')[2]}")
        if one is not None and " GPUs, " in name:
            found[name] = of_launches(one, row)
    return found


def _b8(results: Results) -> Verdict:
    central, gains = mirrored_and_central(results), speed_ups_on_gpus(results)
    parts = [f"central ÷ mirrored {shown(value)} ({name})" for name, value in central.items()]
    parts += [f"speed-up {shown(value)} ({name})" for name, value in gains.items()
              if "NCCL" in name]  # fmt: skip
    return Verdict(
        decided([*on_several_gpus(central), *gains.values()]),
        "; ".join(parts),
        "the same network, data, minibatch and transport. The study's central storage keeps the "
        "variables on the CPU, ours on GPU 0; its runs on several GPUs train a smaller network "
        "without a gradient on other data, and its epochs of 8 to 12 steps are mostly start-up. "
        "Three GPUs: Q23",
        results.hardware(*(name for name in ON_GPUS if results.has(name))),
    )


def calls(results: Results, name: str) -> dict[int, Mapping[str, float]]:
    """Return the times of real calls by number of maps."""
    return {row["samples"]: row for row in results.values(name)["rows"]}


def call_text(results: Results, counts: tuple[int, ...]) -> str:
    """Return medians of real calls by device and number of maps."""
    names = [n for n in ("inference", "inference-gpu") if results.has(n)]
    parts = []
    for name in names or ["inference"]:
        rows = calls(results, name)
        values = ", ".join(f"{duration(rows[n]['median_ms'] / 1e3)} ({n:,})" for n in counts)
        parts.append(f"{values} on {results.hardware(name)}")
    return "; ".join(parts)


def b9(results: Results) -> Verdict:
    """Return the verdict on inference within a second."""
    text = call_text(results, (2, 64, 1024))
    return absolute(
        text,
        "seconds of other hardware. Medians of real calls, maps in brackets; the study divides the "
        "time of 45,322 maps in batches of 32",
    )


def _b10(results: Results) -> Verdict:
    name = "largest-gpu" if results.has("largest-gpu") else "largest"
    found = results.values(name)["largest"]
    training, inference = (found[f"2 GB, {task}"]["batch"] for task in ("training", "inference"))
    return absolute(
        f"2 GB hold {training:,} maps in training and {inference:,} in inference",
        "bytes of another implementation; ours are calculated from the plan of the step",
        results.hardware(name),
    )


def _b11(results: Results) -> Verdict:
    found = results.values("counts")
    pairs = {name: (found["perceptrons"][name], count) for name, count in PERCEPTRON_COUNTS.items()}
    verdict, reason = exactly({**pairs, "solar": (found["solar"]["parameters"], SOLAR_PARAMETERS)})
    return Verdict(verdict, "2,601 … 414,208,513; 4,352,641", reason, "any")


UPDATED = ("mlp-50", "mlp-1600-800-416")


def update_shares(results: Results, *names: str) -> tuple[str, str]:
    """Return the verdict and the text on the share of Adam's update at batch 100 and 1,000."""
    parts, gains = [], []
    for result in (r for name in names for r in results.on_each_machine(name)):
        shares = result.values["shares"]
        for network in UPDATED:
            small, large = (dict(shares[f"{network}, batch {n}"]) for n in (100, 1000))
            for row in (small, large):
                row.setdefault("median", row["share"])
            gains.append(ratio(small, large))
            parts.append(f"{percent(small['share'])} → {percent(large['share'])} ({network}, "
                         f"{result.kind})")  # fmt: skip
    return decided(gains), "; ".join(parts)


def b12(results: Results) -> Verdict:
    """Return the verdict on the optimiser's share of a step."""
    names = [n for n in ("update-share", "update-share-gpu") if results.has(n)]
    verdict, text = update_shares(results, *(names or ["update-share"]))
    return Verdict(
        verdict,
        text,
        "share of Adam's update at batch 100 and 1,000, every machine that was measured; its work "
        "does not depend on the batch size",
    )


TRACED, TRACED_GFLOP = "mlp-6400-3200-1664", 52.25
"""The perceptron whose forward pass of 1,000 rows study B traced, and its matrix product."""


def _b13(results: Results) -> Verdict:
    names = [n for n in ("perceptrons", "perceptrons-gpu") if results.has(n)]
    passes = [perceptron_ms(results, n, "inference")[TRACED] for n in names or ["perceptrons"]]
    text = ", ".join(
        f"{ms:.3g} ms on {results.hardware(n)} ({1e3 * TRACED_GFLOP / ms:,.0f} GFLOP/s)"
        for n, ms in zip(names, passes, strict=True)
    )
    return absolute(
        text,
        "seconds of other hardware. Ours are whole forward passes, of which the matrix product is "
        "98.3% in the study (91 GFLOP/s on the i7)",
    )


ROWS = (
    Row("B1", "B", "epoch time against batch size, CNN", "falls, flat from about 100", "T, R", b1),
    Row("B2", "B", "precision against batch size", "hardly changes (perceptrons)", "T", _b2),
    Row("B3", "B", "total = epochs × steps × step time", "within 0.14% (epochs), 0.013% (steps)",
        "T", b3),
    Row("B4", "B", "28-core Xeon against 4-core i7", "Xeon faster on every perceptron: 3.5× to "
        "8.0×", "T, R", _b4),
    Row("B5", "B", "crossover of CPU and GPU by parameters", "CPU is fine to about 0.5 million",
        "T, R", crossover_verdict),
    Row("B6", "B", "width hurts CPUs more than depth", "25600 ÷ 1600-800: 3.75× on the Xeon, "
        "1.75× on the GTX 980", "T, C", _b6),
    Row("B7", "B", "CNN, CPU against GPU", "up to 10×; Xeon ÷ GTX 1080 7.0× at batch 2, 16.4× at "
        "512", "T, C", _b7),
    Row("B8", "B", "distributed strategies on GPUs", "mirrored 9% faster than central; both faster "
        "than 1 GPU", "T, R", _b8),
    Row("B9", "B", "inference within 1 s", "all devices to 64 maps; CPUs miss at 1,024", "T, R",
        b9),
    Row("B10", "B", "largest batch that fits", "1,024 maps do not fit into 2 GB", "T", _b10),
    Row("B11", "B", "parameters of 30 + 1 networks", "2,601 … 414,208,513; 4,352,641", "T, C",
        _b11),
    Row("B12", "B", "share of the optimiser in a step", "larger at batch 100 than at 1,000", "T",
        b12),
    Row("B13", "B", "matrix product of a traced forward pass", "574.719 ms (i7), 48.08 ms (GTX "
        "950M)", "T, R", _b13),
)  # fmt: skip
