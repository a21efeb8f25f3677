"""Verdicts on the claims of study A, Q1 to Q11."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.studies.claims.judge_a import (
    NEAR,
    SAME,
    TWELVE,
    agreement,
    gpu_steps,
    layer_rows,
    speed_up,
)
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    Results,
    Row,
    Verdict,
    decide,
    percent,
    times,
)
from benchmarks.studies.networks import STUDY_A


def _q1(results: Results) -> Verdict:
    first, last, programs = agreement(results)
    return Verdict(decide(first <= SAME), f"{first:.0e} after one step, {last:.0e} after 20",
                   f"relative differences of {programs}; tolerance {SAME:.0e} a step",
                   hardware=results.hardware("agreement"))  # fmt: skip


def _q2(results: Results) -> Verdict:
    best = {
        name: max(speed_up(results, name, f"{unit} 8") for unit in ("threads", "ranks"))
        for name in STUDY_A
    }
    text = ", ".join(f"{times(value)} ({name})" for name, value in best.items())
    return Verdict(
        decide(all(value >= 8 * (1 - 2 * NEAR) for value in best.values())),
        text,
        "the faster of 8 threads and 8 ranks, batch 32. The author's own log has 1.7 to 7.6 times",
        hardware=results.hardware("speed-up"),
    )


def _q3(results: Results) -> Verdict:
    rows = gpu_steps(results)
    gains = []
    for name in STUDY_A:
        steps = results.values("speed-up")["steps"][name]
        cpu = min(row["median_ms"] for program, row in steps.items() if program != "reference")
        gains.append(cpu / (rows[name]["cuda"]["median_us"] / 1e3))
    return Verdict(
        decide(min(gains) > 2),
        f"GPU {times(min(gains))} to {times(max(gains))} as fast as the best of up to 16 cores",
        "training steps at batch 32",
        hardware=results.hardware("speed-up", "steps-gpu"),
    )


def _q4(results: Results) -> Verdict:
    rows = results.values("sizes-gpu")["rows"]
    ratios = {
        (row["size"], row["filters"], row["batch"], row["direction"]): row["cudnn"] / row["cuda"]
        for row in rows
    }
    lost = [key for key, ratio in ratios.items() if ratio < 1]
    steps = [row["cudnn"]["median_us"] / row["cuda"]["median_us"]
             for row in gpu_steps(results).values()]  # fmt: skip
    return Verdict(
        decide(steps[-1] < 1 or len(lost) > len(ratios) / 2),
        f"cuDNN ÷ own: steps {times(min(steps))} to {times(max(steps))}, single convolutions "
        f"{times(min(ratios.values()))} to {times(max(ratios.values()))}",
        f"inputs of 12×12 to 224×224, 16 to 256 filters, batch 1 and 32, fp32: cuDNN is faster in "
        f"{len(lost)} of {len(ratios)} cases" + (f", first at {lost[0]}" if lost else "")
        + f", and in {sum(ratio < 1 for ratio in steps)} of 5 steps",
        hardware=results.hardware("sizes-gpu"),
    )  # fmt: skip


def _q5(results: Results) -> Verdict:
    rows = layer_rows(results, "batch 1")
    by_depth = []
    for number in (1, 2, 3):
        own = [rows[name] for name in TWELVE if name.split()[0].endswith(str(number))]
        by_depth.append(sum(r["cuda"] for r in own) / sum(r["cudnn"] for r in own))
    lead = ", ".join(times(ratio) for ratio in by_depth)
    return Verdict(
        decide(by_depth[0] > by_depth[1] > by_depth[2]),
        f"own CUDA ÷ cuDNN by depth: {lead}",
        "sums of convolution and pooling, forward and backward, one image. The published table "
        "gives 1.62×, 2.07× and 0.76×, which does not shrink steadily either",
        hardware=results.hardware("layers-gpu"),
    )


def _forward(results: Results) -> dict[str, Mapping[str, Any]]:
    rows = results.values("ladder-gpu")["layers"]["larger:conv2"]["forward"]
    return {row["rung"]: row for row in rows}


def _q6(results: Results) -> Verdict:
    rows = _forward(results)
    im2col, implicit = rows["shared tiles"], rows["implicit"]
    return Verdict(
        decide(im2col["extra_bytes"] > 0 and im2col["median_ms"] < implicit["median_ms"]),
        f"im2col {im2col['median_ms'] * 1e3:.0f} µs with a buffer of "
        f"{im2col['extra_bytes'] / 1e3:.0f} kB, implicit GEMM {implicit['median_ms'] * 1e3:.0f} µs "
        "with none",
        "the same product with tiles in shared memory, 32 images; the implicit GEMM reads the "
        "input directly and takes "
        f"{times(implicit['median_ms'] / im2col['median_ms'])} the time",
        hardware=results.hardware("ladder-gpu"),
    )


def _q7(results: Results) -> Verdict:
    found = results.values("counts")["im2col"]
    return Verdict(
        decide(found["image_bytes"] * 32 == found["batch_bytes"]),
        f"{found['image_bytes'] / 1e6:.2f} MB for any batch size instead of "
        f"{found['batch_bytes'] / 1e6:.2f} MB for 32 images",
        "a test checks that the buffer of the ladder's kernels does not grow with the batch size",
        hardware="any",
    )


def _q8(results: Results) -> Verdict:
    rows = _forward(results)
    names = ["one block", "one block, tiles", "many blocks", "shared tiles"]
    if "im2col, cuBLAS" in rows:
        names.append("im2col, cuBLAS")
    rates = [rows[name]["gflops"] for name in names]
    rising = all(a < b for a, b in pairwise(rates))
    return Verdict(
        decide(rising),
        ", ".join(f"{name} {rate:,.0f}" for name, rate in zip(names, rates, strict=True)),
        "GFLOP/s of a convolution by im2col and a product for each of 32 images. The block with "
        "tiles has 256 threads, the one without 1,024; PyTorch launches im2col and cuBLAS "
        f"(own kernels of training: {rows['dptrain fp32']['gflops']:,.0f})",
        hardware=results.hardware("ladder-gpu"),
    )


def _q9(results: Results) -> Verdict:
    found = results.values("counts")["padding"]
    ratios = [row["with"] / row["without"] for row in found.values()]
    return Verdict(
        CONFIRMED,
        f"{percent(1 - 1 / min(ratios))} to {percent(1 - 1 / max(ratios))} of the multiply-adds "
        "are saved",
        "exact: (H + 2P)(W + 2P) ÷ HW of the input gradient, convolutions of model0 and model2",
        hardware="any",
    )


def _minibatches(results: Results) -> dict[int, Mapping[str, Any]]:
    return {row["batch"]: row for row in results.values("minibatches")["rows"]}


def _q10(results: Results) -> Verdict:
    rows = _minibatches(results)
    losses = {n: row["losses"][-1] for n, row in rows.items()}
    ordered = [losses[n] for n in sorted(losses)]
    # After one epoch of the largest batch size, the smaller ones have made more updates.
    return Verdict(
        decide(ordered[0] < ordered[-1]),
        ", ".join(f"{loss:.3g} ({n})" for n, loss in sorted(losses.items())),
        "training loss after the same number of samples, batch size in brackets, constant "
        "learning rate: small minibatches need less computation for the same loss. A single step "
        f"of batch 8 is {times(_step_s(rows[512]) / _step_s(rows[8]))} cheaper than one of 512",
        hardware=results.hardware("minibatches"),
    )


def _step_s(row: Mapping[str, Any]) -> float:
    return float(row["seconds"] / row["steps"])


def _q11(results: Results) -> Verdict:
    found = results.values("gradients")["activations"]
    relu, sigmoid = (found[name]["first_over_last"] for name in ("ReLU", "sigmoid"))
    return Verdict(
        decide(sigmoid < relu / 100),
        f"{relu:.2g} with ReLU, {sigmoid:.1g} with sigmoid",
        "gradient norm of the first hidden layer divided by that of the tenth, He initialisation",
        hardware=results.hardware("gradients"),
    )


ROWS = (
    Row("Q1", "A", "all implementations give the same result without randomness", "", "T", _q1),
    Row("Q2", "A", "8 threads give nearly 8×", "7.92×", "T", _q2),
    Row("Q3", "A", "GPU versions are far ahead of CPU ones", "", "T", _q3),
    Row("Q4", "A", "own CUDA beats cuDNN on small networks and loses on large ones", "", "T", _q4),
    Row("Q5", "A", "cuDNN's lead shrinks with depth", "", "T", _q5),
    Row("Q6", "A", "convolution by GEMM trades memory for time", "factor K²", "T", _q6),
    Row("Q7", "A", "one unrolled buffer bounds the memory", "0.72 MB against 23 MB", "C", _q7),
    Row("Q8", "A", "each of four matrix products is faster than the one before", "", "T", _q8),
    Row("Q9", "A", "no gradient is needed for padding", "", "T", _q9),
    Row("Q10", "A", "SGD on minibatches cuts computation at lower convergence per step", "", "T",
        _q10),
    Row("Q11", "A", "ReLU avoids vanishing gradients; sigmoid saturates", "", "T", _q11),
)  # fmt: skip
