"""Verdicts on the claims of study A, Q1 to Q11."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.studies.claims import judge_a
from benchmarks.studies.claims.judge_a import (
    NEAR,
    exact_ratios,
    gpu_steps,
    layer_sums,
    library_at_its_best,
    of_training,
    speed_up,
)
from benchmarks.studies.claims.spreads import Row as Times
from benchmarks.studies.claims.spreads import decided, median_of, ratio, shown
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    percent,
    same_as,
    times,
)
from benchmarks.studies.networks import STUDY_A
from dptrain.measure.statistics import Estimate


def _q2(results: Results) -> Verdict:
    best = {
        name: max((speed_up(results, name, f"{unit} 8") for unit in ("threads", "ranks")),
                  key=lambda gain: gain.value)
        for name in STUDY_A
    }  # fmt: skip
    return Verdict(
        decided(best.values(), 8 * (1 - 2 * NEAR)),
        ", ".join(f"{shown(value)} ({name})" for name, value in best.items()),
        "as a general rule, at equal arithmetic per step: the faster of 8 threads and 8 ranks, "
        "batch 32. The author's own log has 1.7× to 7.6×",
        results.hardware("speed-up"),
    )


def _q3(results: Results) -> Verdict:
    rows = gpu_steps(results)
    gains = []
    for name in STUDY_A:
        steps = results.values("speed-up")["steps"][name]
        cpu = min((row for program, row in steps.items() if program != "reference"), key=median_of)
        in_us = ratio(cpu, rows[name]["cuda"])
        gains.append(in_us.times(1e3))
    low, high = min(gains, key=lambda g: g.value), max(gains, key=lambda g: g.value)
    return Verdict(
        decided(gains, 2),
        f"GPU {shown(low)} to {shown(high)} as fast as the best of up to 16 cores",
        "training steps at batch 32",
        results.hardware("speed-up", "steps-gpu"),
    )


def _q4(results: Results) -> Verdict:
    rows = {
        (row["size"], row["filters"], row["batch"], row["direction"]): row
        for row in results.values("sizes-gpu")["rows"]
    }
    try:
        ratios = {key: ratio(library_at_its_best(row), row["cuda"]) for key, row in rows.items()}
    except MissingResultError as missing:
        exact = of_training([row["cudnn"] / row["cuda"] for row in rows.values()])
        _, _, steps = of_training(exact_ratios(gpu_steps(results))).rpartition(" is ")
        raise MissingResultError(
            f"for single convolutions, {missing} (networks: A3); {exact} for single convolutions "
            f"and {steps} for steps"
        ) from None
    sizes = sorted({key[0] for key in ratios})
    small = [r for key, r in ratios.items() if key[0] == sizes[0]]
    large = [r.below(1.0) for key, r in ratios.items() if key[0] == sizes[-1]]
    lost = sum(r.high < 1 for r in ratios.values())
    values = [r.value for r in ratios.values()]
    return Verdict(
        decided([*small, *large]),
        f"cuDNN at its best ÷ own: {times(min(values))} to {times(max(values))}",
        f"single convolutions, inputs of {sizes[0]}×{sizes[0]} to {sizes[-1]}×{sizes[-1]}, batch 1 "
        f"and 32, fp32: cuDNN is faster in {lost} of {len(ratios)} cases",
        results.hardware("sizes-gpu"),
    )


def _q5(results: Results) -> Verdict:
    sums = layer_sums(results)
    by_depth = [sums["cuda"][depth] / sums["best"][depth] for depth in (1, 2, 3)]
    return Verdict(
        decide(by_depth[0] > by_depth[1] > by_depth[2]),
        f"own CUDA ÷ cuDNN at its best, by depth: {', '.join(map(times, by_depth))}",
        "convolution and pooling, forward and backward, one image. The published table has 1.62×, "
        "2.07× and 0.76×, which does not shrink steadily either",
        results.hardware("layers-gpu"),
    )


def _forward(results: Results, name: str = "ladder-gpu") -> dict[str, Times]:
    rows = results.values(name)["layers"]["larger:conv2"]["forward"]
    return {row["rung"]: row for row in rows}


def _q6(results: Results) -> Verdict:
    gains: dict[str, Estimate] = {}
    missing, names = "", []
    for name, direct, product in (("ladder", "direct", "im2col, own product"),
                                  ("ladder-gpu", "direct, by image", "shared tiles")):  # fmt: skip
        rows = _forward(results, name) if results.has(name) else {}
        if direct in rows:
            gains[f"{results.hardware(name)}, {product}"] = ratio(rows[direct], rows[product])
            names.append(name)
        else:
            missing = f"; a direct convolution on {name.replace('ladder-gpu', 'a GPU')} is missing"
    if not gains:
        raise MissingResultError("no direct convolution was measured yet")
    return Verdict(
        decided(gains.values()),
        "direct ÷ GEMM: " + ", ".join(f"{shown(gain)} ({how})" for how, gain in gains.items()),
        f"layer conv2 of the larger network, 32 images one after the other; the im2col matrix of "
        f"an image has 720 kB, 9 times its input, and a direct convolution none{missing}",
        results.hardware(*names),
    )


def _q7(results: Results) -> Verdict:
    found = results.values("counts")["im2col"]
    return Verdict(
        decide(found["image_bytes"] * 32 == found["batch_bytes"]),
        f"{found['image_bytes'] / 1e6:.2f} MB for any batch size instead of "
        f"{found['batch_bytes'] / 1e6:.2f} MB for 32 images",
        "the bytes are our counts; a test checks that the buffer of the ladder's kernels does not "
        "grow with the batch size",
        "any",
    )


def _q8(results: Results) -> Verdict:
    rows = _forward(results)
    names = ("one block", "one block, tiles", "many blocks", "shared tiles")
    pairs = ((0, 2), (1, 2), (2, 3))
    gains = [ratio(rows[names[slow]], rows[names[fast]]) for slow, fast in pairs]
    return Verdict(
        decided(gains),
        "GFLOP/s: " + ", ".join(f"{rows[name]['gflops']:,.0f} ({name})" for name in names),
        f"version 4 ÷ 3: {shown(gains[2])}, im2col included. Of versions 1 and 2, the study says "
        "only that they share a ceiling",
        results.hardware("ladder-gpu"),
    )


def _q9(results: Results) -> Verdict:
    found = results.values("counts")["padding"]
    ratios = [row["with"] / row["without"] for row in found.values()]
    return Verdict(
        CONFIRMED,
        f"{percent(1 - 1 / min(ratios))} to {percent(1 - 1 / max(ratios))} of the multiply-adds "
        "are saved",
        "exact: (H + 2P)(W + 2P) ÷ HW of the input gradient, convolutions of model0 and model2",
        "any",
    )


def _minibatches(results: Results) -> dict[int, Mapping[str, Any]]:
    return {row["batch"]: row for row in results.values("minibatches")["rows"]}


def _q10(results: Results) -> Verdict:
    rows = [row for _, row in sorted(_minibatches(results).items())]
    if "equal_steps_loss" not in rows[0]:
        raise MissingResultError("the loss after equal steps is not stored; use `--again`")
    small, large = rows[0], rows[-1]
    cheaper = small["losses"][-1] < large["losses"][-1]
    slower = small["equal_steps_loss"] > large["equal_steps_loss"]
    equal = ", ".join(f"{row['equal_steps_loss']:.3g} ({row['batch']})" for row in rows)
    return Verdict(
        decide(cheaper and slower),
        ", ".join(f"{row['losses'][-1]:.3g} ({row['batch']})" for row in rows),
        "loss after equal samples, batch size in brackets, model0 on digits, one seed. Test loss "
        f"after {small['equal_steps']} steps: {equal}: a step of a small minibatch converges "
        f"{'less' if slower else 'no less'}",
        results.hardware("minibatches"),
    )


def _q11(results: Results) -> Verdict:
    found = results.values("gradients")["activations"]
    relu, sigmoid = (found[name]["first_over_last"] for name in ("ReLU", "sigmoid"))
    return Verdict(
        decide(sigmoid < relu / 100),
        f"{relu:.2g} with ReLU, {sigmoid:.1g} with sigmoid",
        "gradient norm of the first hidden layer divided by that of the tenth, He initialisation",
        results.hardware("gradients"),
    )


ROWS = (
    Row("Q1", "A", "all implementations give the same result without randomness", "", "T",
        same_as("A5", judge_a.a5)),
    Row("Q2", "A", "8 threads give nearly 8×", "7.92×", "T", _q2),
    Row("Q3", "A", "GPU versions are far ahead of CPU ones", "", "T", _q3),
    Row("Q4", "A", "own CUDA beats cuDNN on small networks and loses on large ones", "", "T", _q4),
    Row("Q5", "A", "cuDNN's lead shrinks with depth", "", "T", _q5),
    Row("Q6", "A", "convolution by GEMM is faster than direct convolution and needs more memory",
        "factor K²", "T", _q6),
    Row("Q7", "A", "one unrolled buffer bounds the memory", "0.72 MB against 23 MB", "C", _q7),
    Row("Q8", "A", "the third matrix product is faster than the first two, and the fourth possibly "
        "faster than the third", "", "T", _q8),
    Row("Q9", "A", "no gradient is needed for padding", "", "T", _q9),
    Row("Q10", "A", "SGD on minibatches cuts computation at lower convergence per step", "", "T",
        _q10),
    Row("Q11", "A", "ReLU avoids vanishing gradients; sigmoid saturates", "", "T", _q11),
)  # fmt: skip
