"""Verdicts on the results of study B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims.published import (
    INFERENCE_S,
    PERCEPTRON_COUNTS,
    SOLAR_PARAMETERS,
    WIDE_AND_DEEP,
    solar_s,
)
from benchmarks.studies.claims.verdicts import (
    NOT_COMPARABLE,
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    duration,
    exactly,
    percent,
    times,
)

FLAT = 0.1
"""Time per sample is flat from a batch size on if no larger one is faster by more than this."""
ADDITIVE = 0.05
"""Deviation from additivity that the variation of a machine with other users explains."""
HALF_MILLION = 500_000
XEON = "2 × Xeon E5-2695 v3"

Timed = Mapping[str, Any]


def sample_ms(results: Results, name: str) -> dict[int, float]:
    """Return milliseconds per map of training steps of the solar network, by batch size."""
    rows = results.values(name)["rows"]
    return {row["samples"]: row["median_ms"] / row["samples"] for row in rows if "median_ms" in row}


def flat_from(by_batch: Mapping[int, float]) -> int:
    """Return the smallest batch size from which the time per sample is flat."""
    sizes = sorted(by_batch)
    return next(n for n in sizes if by_batch[n] <= (1 + FLAT) * min(by_batch[m] for m in sizes
                                                                      if m >= n))  # fmt: skip


def _b1(results: Results) -> Verdict:
    cpu = sample_ms(results, "solar")
    flat = {"CPU": flat_from(cpu)}
    falls = {"CPU": cpu[2] / cpu[128]}
    names = ["solar"]
    if results.has("solar-gpu"):
        gpu = sample_ms(results, "solar-gpu")
        flat["GPU"], falls["GPU"] = flat_from(gpu), gpu[2] / gpu[128]
        names.append("solar-gpu")
    published = solar_s(XEON, 2) / solar_s(XEON, 128)
    return Verdict(
        decide(falls["CPU"] > 1 and flat["CPU"] <= 128),
        "; ".join(f"{name}: batch 2 ÷ batch 128 {times(falls[name])}, flat from {flat[name]}"
                  for name in flat),
        "flat means that no larger batch size is faster by more than 10%. From batch 128 to 512, "
        f"the time per map on our CPU falls by {percent(1 - cpu[512] / cpu[128], 0)}; in the "
        "study, it falls by 5% on the Xeon and by 15 to 23% on the GTX 980 and GTX 1080",
        times(falls["CPU"] / published),
        results.hardware(*names),
    )  # fmt: skip


def _b2(results: Results) -> Verdict:
    found = results.values("precision-by-batch")["perceptron"]
    epochs = [v["median"] for name, v in found.items() if name.endswith("epochs")]
    steps = [v["median"] for name, v in found.items() if name.endswith("steps")]
    spans = max(epochs) / min(epochs), max(steps) / min(steps)
    return Verdict(
        NOT_COMPARABLE,
        f"largest ÷ smallest test MSE: {times(spans[0])} after 2 epochs, {times(spans[1])} after "
        "equal steps",
        "batch sizes 100, 500, 1,000 and three seeds; generated data with 20,000 rows instead of "
        "1.37 million, so that two epochs are 40 to 400 steps instead of 2,700 to 27,000. The "
        "number of steps decides, not the batch size",
        "",
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


def _b3(results: Results) -> Verdict:
    rows, names = additivity(results), ["additivity"]
    ratios = _spans(rows, "two_epochs_over_one")
    shares = _spans(rows, "inside_steps_share")
    products = _spans(rows, "steps_times_median_over_total")
    note = ""
    if results.has("additivity-gpu"):
        gpu = results.values("additivity-gpu")["networks"]
        low, high = _spans(gpu, "two_epochs_over_one")
        note = (
            f". On the GPU, two epochs of {next(iter(gpu.values()))['steps']} steps take "
            f"{low:.2f} to {high:.2f} times as long as one"
        )
        names.append("additivity-gpu")
    worst = max(abs(ratio / 2 - 1) for ratio in ratios)
    return Verdict(
        decide(worst <= ADDITIVE),
        f"two epochs ÷ one: {ratios[0]:.3f} to {ratios[1]:.3f}; inside steps: "
        f"{percent(shares[0])} to {percent(shares[1])}",
        "each epoch is timed on its own, and so are the steps. Steps × median step is "
        f"{products[0]:.2f} to {products[1]:.2f} of the total. The study's second proof is "
        f"ceil(x) ÷ x, which is just above 1 for any data{note}",
        f"{max(ratios, key=lambda r: abs(r - 2)) / 2.0027:.3f}",
        results.hardware(*names),
    )


def perceptron_ms(results: Results, name: str, task: str = "training") -> dict[str, float]:
    """Return the milliseconds of a step with 1,000 rows by network."""
    return {
        row["network"]: row["median_ms"]
        for row in results.values(name)["rows"]
        if row["task"] == task and row["samples"] == 1000 and "median_ms" in row
    }


def _b4(results: Results) -> Verdict:
    found = results.values("perceptrons-by-threads")
    most = max(found["counts"])
    if most < 8:
        raise MissingResultError("it needs at least 8 cores")
    gains = {}
    for name, row in found["steps"].items():
        network, _, count = name.partition(", threads ")
        if int(count) == most:
            gains[network] = found["steps"][f"{network}, threads 4"]["median_ms"] / row["median_ms"]
    least, best = min(gains, key=lambda n: gains[n]), max(gains, key=lambda n: gains[n])
    return Verdict(
        decide(all(gain > 1 for gain in gains.values())),
        f"{most} threads against 4: {times(gains[least])} ({least}) to {times(gains[best])} "
        f"({best})",
        f"the study compares 28 cores of one processor with 4 of another one (3.5× at 2,601 "
        f"parameters, 8.0× at 26 million); we compare {most} threads with 4 of the same one, so "
        f"that {most / 4:g}× is possible",
        "",
        results.hardware("perceptrons-by-threads"),
    )


def crossover(results: Results) -> tuple[int, int]:
    """Return two numbers of parameters between CPU and GPU.

    Returns:
        That of the smallest network for which the GPU is faster, and the smallest one from which
        it is faster for all larger networks.
    """
    cpu, gpu = perceptron_ms(results, "perceptrons"), perceptron_ms(results, "perceptrons-gpu")
    both = sorted((PERCEPTRON_COUNTS[n], cpu[n] / gpu[n]) for n in cpu if n in gpu)
    first = next((count for count, ratio in both if ratio > 1), both[-1][0])
    lost = [i for i, (_, ratio) in enumerate(both) if ratio <= 1]
    always = both[min(lost[-1] + 1, len(both) - 1)][0] if lost else both[0][0]
    return first, always


def _b5(results: Results) -> Verdict:
    first, always = crossover(results)
    cpu, gpu = perceptron_ms(results, "perceptrons"), perceptron_ms(results, "perceptrons-gpu")
    ratios = [cpu[n] / gpu[n] for n in cpu if n in gpu]
    return Verdict(
        decide(HALF_MILLION / 2 <= always <= 2 * HALF_MILLION),
        f"the GPU is faster from {always:,} parameters on",
        f"CPU time ÷ GPU time is {times(min(ratios))} to {times(max(ratios))}. The first network "
        f"for which the GPU is faster has {first:,} parameters. The pair of devices decides: in "
        "the study's own numbers, the GTX 1080 is faster than the Xeon from 3,851 parameters, and "
        "the GTX 950M from 5.3 million",
        times(always / HALF_MILLION),
        results.hardware("perceptrons", "perceptrons-gpu"),
    )


def width_ratios(results: Results, name: str) -> dict[tuple[str, str], float]:
    """Return the time of a wide network divided by that of a deeper one, by pair."""
    found = perceptron_ms(results, name)
    return {pair: found[pair[0]] / found[pair[1]] for pair in WIDE_AND_DEEP}


def _b6(results: Results) -> Verdict:
    cpu, gpu = width_ratios(results, "perceptrons"), width_ratios(results, "perceptrons-gpu")
    pair = ("mlp-25600", "mlp-1600-800")
    slower = sum(cpu[p] > gpu[p] for p in cpu)
    costs = sum(cpu[p] > 1 for p in cpu)
    return Verdict(
        decide(slower >= 5 and costs >= 4),
        f"25600 ÷ 1600-800: {times(cpu[pair])} on the CPU, {times(gpu[pair])} on the GPU",
        f"of six pairs of like size, the wide network is slower on the CPU in {costs}, and the "
        f"ratio is larger on the CPU than on the GPU in {slower}",
        times(cpu[pair] / WIDE_AND_DEEP[pair][1]),
        results.hardware("perceptrons", "perceptrons-gpu"),
    )


def _b7(results: Results) -> Verdict:
    cpu, gpu = sample_ms(results, "solar"), sample_ms(results, "solar-gpu")
    ratios = {n: cpu[n] / gpu[n] for n in (2, 512)}
    theirs = {n: solar_s(XEON, n) / solar_s("GTX 1080", n) for n in ratios}
    return Verdict(
        decide(all(ratio > 1 for ratio in ratios.values()) and ratios[512] > ratios[2]),
        f"CPU ÷ GPU: {times(ratios[2])} at batch 2, {times(ratios[512])} at batch 512",
        f"the study's Xeon ÷ GTX 1080 is {times(theirs[2])} and {times(theirs[512])}: its text "
        "gives the factors of batch 2 for batch 512. The verdict is about the direction: the GPU "
        "is faster, and more so with large batches; the factors are of devices that are 8 years "
        "apart",
        times(ratios[512] / theirs[512]),
        results.hardware("solar", "solar-gpu"),
    )


def strategy_ms(results: Results, strategy: str, ranks: int) -> float:
    """Return the milliseconds of a step of the solar network on the processor."""
    steps = results.values("strategies")["steps"]
    name = "threads 1" if ranks == 1 else f"{strategy}, ranks {ranks}"
    if name not in steps:
        raise MissingResultError(f"it needs {ranks} cores")
    return float(steps[name]["median_ms"])


def ranks_of(results: Results) -> list[int]:
    """Return the numbers of ranks for which strategies were measured."""
    steps = results.values("strategies")["steps"]
    return sorted({int(name.split()[-1]) for name in steps if "ranks" in name})


def gpu_strategies(results: Results) -> dict[str, float]:
    """Return the milliseconds of steps on one and more GPUs by case; empty without results."""
    if not results.has("strategies-gpu"):
        return {}
    steps = results.values("strategies-gpu")["steps"]
    return {name: row["median_ms"] for name, row in steps.items() if "median_ms" in row}


def _b8(results: Results) -> Verdict:
    counts = ranks_of(results)
    one = strategy_ms(results, "", 1)
    parts, wins, faster = [], 0, 0
    for n in counts:
        mirrored = min(strategy_ms(results, f"mirrored, {how}", n)
                       for how in ("shared memory", "MPI"))  # fmt: skip
        central = strategy_ms(results, "central, MPI", n)
        wins += mirrored < central
        faster += max(mirrored, central) < one
        parts.append(f"{n} ranks: {times(one / mirrored)} mirrored, {times(one / central)} central")
    names, cases = ["strategies"], len(counts)
    gpu = gpu_strategies(results)
    for batch in (128, 2048):
        alone, both = f"1 GPU, batch {batch}", f"mirrored, 2 GPUs, batch {batch}"
        third = f"central, NCCL, 2 GPUs, batch {batch}"
        if alone in gpu and both in gpu:
            parts.append(f"2 GPUs, batch {batch}: {times(gpu[alone] / gpu[both])} mirrored")
        if both in gpu and third in gpu:
            parts.append(f"2 GPUs, batch {batch}: mirrored {times(gpu[third] / gpu[both])} as fast "
                         "as central")  # fmt: skip
            wins += gpu[both] < gpu[third]
            cases += 1
            names = ["strategies", "strategies-gpu"]
    last = strategy_ms(results, "mirrored, shared memory", counts[-1])
    slower = last > min(strategy_ms(results, "mirrored, shared memory", n) for n in counts)
    return Verdict(
        decide(wins == cases),
        "; ".join(parts),
        f"speed-up over one worker on the same network, data and global minibatch. Mirrored is "
        f"faster than central in {wins} of {cases} cases, each with its best transport. The most "
        f"workers are {'not ' if slower else ''}the fastest; the study's epochs of 8 to 12 steps "
        "consist mostly of start-up, which our steps exclude",
        "",
        results.hardware(*names),
    )


def calls(results: Results, name: str) -> dict[int, Mapping[str, float]]:
    """Return the times of real calls by number of maps."""
    return {row["samples"]: row for row in results.values(name)["rows"]}


def _b9(results: Results) -> Verdict:
    cpu, names = calls(results, "inference"), ["inference"]
    parts = [f"CPU {n:,}: {duration(cpu[n]['median_ms'] / 1e3)}" for n in (2, 64, 512, 1024)]
    if results.has("inference-gpu"):
        gpu = calls(results, "inference-gpu")
        parts += [f"GPU {n:,}: {duration(gpu[n]['median_ms'] / 1e3)}" for n in (2, 1024)]
        names.append("inference-gpu")
    limit = results.values("inference")["maps_within_1_s"]
    small = cpu[64]["p99_ms"] < 1e3
    misses = cpu[1024]["median_ms"] > 1e3
    published = INFERENCE_S[64][1]
    assert published is not None
    return Verdict(
        decide(small and misses),
        ", ".join(parts),
        "medians of 20 real calls, from host memory to host memory; the study divides the time "
        f"of 45,322 maps in batches of 32. 1,024 maps take {'more' if misses else 'less'} than "
        f"1 s on our CPU, which computes about {limit:,} maps in 1 s",
        times(cpu[64]["median_ms"] / 1e3 / published),
        results.hardware(*names),
    )


def _b10(results: Results) -> Verdict:
    name = "largest-gpu" if results.has("largest-gpu") else "largest"
    found = results.values(name)["largest"]
    training, inference = (found[f"2 GB, {task}"]["batch"] for task in ("training", "inference"))
    return Verdict(
        decide(inference < 1024),
        f"2 GB hold {training:,} maps in training and {inference:,} in inference",
        "calculated from the plan of the step, without a trial. The study most likely has no "
        "measurement for 1,024 maps: its GPU failed in training at this batch size",
        times(training / 512),
        results.hardware(name),
    )


def _b11(results: Results) -> Verdict:
    found = results.values("counts")
    pairs = {name: (found["perceptrons"][name], count) for name, count in PERCEPTRON_COUNTS.items()}
    verdict, reason = exactly({**pairs, "solar": (found["solar"]["parameters"], SOLAR_PARAMETERS)})
    return Verdict(verdict, "2,601 … 414,208,513; 4,352,641", reason, "1", "any")


def update_shares(results: Results, name: str) -> dict[str, float]:
    """Return the share of the update in a step by network and batch size."""
    return {case: row["share"] for case, row in results.values(name)["shares"].items()}


def _b12(results: Results) -> Verdict:
    names = [n for n in ("update-share", "update-share-gpu") if results.has(n)]
    parts, holds = [], True
    for name in names or ["update-share"]:
        shares = update_shares(results, name)
        for network in ("mlp-50", "mlp-1600-800-416"):
            small, large = (shares[f"{network}, batch {n}"] for n in (100, 1000))
            holds &= small > large
            parts.append(f"{network} on {results.hardware(name)}: {percent(small)} → "
                         f"{percent(large)}")  # fmt: skip
    return Verdict(
        decide(holds),
        "; ".join(parts),
        "share of Adam's update at batch 100 and 1,000; its work does not depend on the batch size",
        "",
        results.hardware(*names),
    )


TRACED, TRACED_MS, TRACED_GFLOP = "mlp-6400-3200-1664", 574.719, 52.25
"""The perceptron whose forward pass of 1,000 rows study B traced, and its matrix product."""


def _b13(results: Results) -> Verdict:
    names = [n for n in ("perceptrons", "perceptrons-gpu") if results.has(n)]
    passes = [perceptron_ms(results, n, "inference")[TRACED] for n in names or ["perceptrons"]]
    text = ", ".join(
        f"{ms:.3g} ms on {results.hardware(n)} ({1e3 * TRACED_GFLOP / ms:,.0f} GFLOP/s)"
        for n, ms in zip(names, passes, strict=True)
    )
    return Verdict(
        NOT_COMPARABLE,
        text,
        "absolute times of other hardware; the ratio is that of the CPU. Our times are whole "
        "forward passes; in the study the matrix product is 98.3% of the pass on the i7 "
        "(91 GFLOP/s)",
        times(passes[0] / TRACED_MS),
        results.hardware(*names),
    )


ROWS = (
    Row("B1", "B", "epoch time against batch size, CNN", "falls, flat from about 100", "T, R", _b1),
    Row("B2", "B", "precision against batch size", "hardly changes (perceptrons)", "T", _b2),
    Row("B3", "B", "total = epochs × steps × step time", "within 0.14% (epochs), 0.013% (steps)",
        "T", _b3),
    Row("B4", "B", "28-core Xeon against 4-core i7", "Xeon faster on every perceptron: 3.5× to "
        "8.0×", "T, R", _b4),
    Row("B5", "B", "crossover of CPU and GPU by parameters", "CPU is fine to about 0.5 million",
        "T, R", _b5),
    Row("B6", "B", "width hurts CPUs more than depth", "25600 ÷ 1600-800: 3.75× on the Xeon, "
        "1.75× on the GTX 980", "T, C", _b6),
    Row("B7", "B", "CNN, CPU against GPU", "up to 10×; Xeon ÷ GTX 1080 7.0× at batch 2, 16.4× at "
        "512", "T, C", _b7),
    Row("B8", "B", "distributed strategies", "mirrored < central in time (9%); 2 GPUs < 3 GPUs; "
        "all < 1 GPU", "T, R", _b8),
    Row("B9", "B", "inference within 1 s", "all devices to 64 maps; CPUs miss at 1,024", "T, R",
        _b9),
    Row("B10", "B", "largest batch that fits", "1,024 maps do not fit into 2 GB", "T", _b10),
    Row("B11", "B", "parameters of 30 + 1 networks", "2,601 … 414,208,513; 4,352,641", "T, C",
        _b11),
    Row("B12", "B", "share of the optimiser in a step", "larger at batch 100 than at 1,000", "T",
        _b12),
    Row("B13", "B", "matrix product of a traced forward pass", "574.719 ms (i7), 48.08 ms (GTX "
        "950M)", "T, R", _b13),
)  # fmt: skip
