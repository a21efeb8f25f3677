"""Verdicts on the claims of study D, Q32 to Q43."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import stdev
from typing import Any

from benchmarks.studies.claims import judge_d
from benchmarks.studies.claims.judge_d import (
    NOTABLE,
    accuracy,
    accuracy_text,
    faster_in_all,
    on_cifar10,
    share,
    shares_on,
    trained,
)
from benchmarks.studies.claims.published import PROFILE
from benchmarks.studies.claims.spreads import decided, ratio, shown
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    NOT_COMPARABLE,
    REFUTED,
    UNDECIDED,
    Results,
    Row,
    Verdict,
    decide,
    percent,
    same_as,
)
from dptrain.measure.statistics import Estimate
from dptrain.measure.student import student

STRIDES = ("base", "stride 2", "stride 3", "stride 5")


def _q32(results: Results) -> Verdict:
    found = {r.kind: shares_on(r)["Conv2D"] for r in results.on_each_machine("profile")}
    near = [abs(value - PROFILE["Conv2D"][1]) <= 0.1 for value in found.values()]
    verdict = CONFIRMED if all(near) else UNDECIDED if any(near) else REFUTED
    return Verdict(verdict, ", ".join(f"{percent(v)} ({kind})" for kind, v in found.items()),
                   "share of Conv2D in inference, layers computed one by one, every machine that "
                   "was measured; within 10 points counts as equal",
                   results.hardware("profile"))  # fmt: skip


def _q33(results: Results) -> Verdict:
    machines = {r.kind: shares_on(r) for r in results.on_each_machine("profile")}
    seconds = [list(found)[1] for found in machines.values()]
    text = ", ".join(f"LRN {percent(found['LRN'])}, second is {list(found)[1]} ({kind})"
                     for kind, found in machines.items())  # fmt: skip
    near = [name == "LRN" for name in seconds]
    verdict = CONFIRMED if all(near) else UNDECIDED if any(near) else REFUTED
    return Verdict(verdict, text, "", results.hardware("profile"))


def _q34(results: Results) -> Verdict:
    sizes = results.values("counts")["cifar"]["base"]["bytes"]
    largest = max(sizes, key=lambda kind: sizes[kind])
    return Verdict(
        NOT_COMPARABLE,
        f"largest: {largest}, {sizes[largest] / 1e6:.1f} MB; one minibatch has "
        f"{sizes['batch'] / 1e3:.0f} kB",
        "dptrain has no queue of 4,384 prepared images (30.3 MB): it prepares one minibatch ahead, "
        "so the outputs of the convolutions are the largest",
        "any",
    )


def _q35(results: Results) -> Verdict:
    kept = accuracy(results, "stride 5") / accuracy(results, "base")
    verdict = decide(kept > 0.7) if on_cifar10(results) else NOT_COMPARABLE
    return Verdict(
        verdict,
        f"stride 5: faster by {shown(faster_in_all(results, 'stride 5'))}, {percent(kept)} of the "
        f"accuracy is left. {accuracy_text(results, 'stride 5')}",
        "the study has 19.7× and 81%, on CIFAR-10",
        results.hardware("profile", trained(results)[1]),
    )


def _q36(results: Results) -> Verdict:
    shares = [share(results, name) for name in STRIDES]
    return Verdict(decide(all(a > b for a, b in pairwise(shares))),
                   ", ".join(percent(s, 0) for s in shares),
                   "stride 1, 2, 3, 5; the study has 72, 65, 57 and 44%",
                   results.hardware("profile"))  # fmt: skip


def _q37(results: Results) -> Verdict:
    gain = faster_in_all(results, "32 filters")
    found = results.values("counts")["cifar"]
    memory = found["base"]["bytes"]["Conv2D"] / found["32 filters"]["bytes"]["Conv2D"]
    return Verdict(
        decided([gain], 1.7) if memory == 2 else REFUTED,
        f"faster by {shown(gain)}, {memory:g} times less memory of outputs",
        "time and memory only; the work falls 3.45 times. The points are not measured on CIFAR-10",
        results.hardware("profile"),
    )


def _q38(results: Results) -> Verdict:
    gain = faster_in_all(results, "larger pooling")
    return Verdict(
        decided([gain.below(NOTABLE)]),
        f"faster by {shown(gain)}",
        "time only; the study calls its 1.29× no notable gain",
        results.hardware("profile"),
    )


def _layers(results: Results) -> Mapping[str, Any]:
    found: Mapping[str, Any] = results.values("layers-by-accuracy")["networks"]
    return found


def compared(first: Sequence[float], others: Sequence[Sequence[float]]) -> tuple[str, Estimate]:
    """Return whether the first of some accuracies is the best, and its lead over the best other.

    Args:
        first: accuracies by seed.
        others: accuracies of the other networks with the same seeds.

    Returns:
        The verdict by the 95% t interval of the differences over seeds, and this interval.
    """
    best = max(others, key=lambda own: sum(own) / len(own))
    gaps = [a - b for a, b in zip(first, best, strict=True)]
    mean, n = sum(gaps) / len(gaps), len(gaps)
    half = student(n - 1) * stdev(gaps) / math.sqrt(n)
    lead = Estimate(mean, mean - half, mean + half, n)
    return decided([lead], 0.0), lead


def _best(results: Results, names: Mapping[str, str]) -> Verdict:
    """Return the verdict on whether the first network of `names` has the best accuracy."""
    found = _layers(results)
    own = {short: found[name] for short, name in names.items()}
    first, *others = (row["accuracies"] for row in own.values())
    verdict, lead = compared(first, others)
    text = ", ".join(f"{percent(row['accuracy_mean'])} ({short})" for short, row in own.items())
    return Verdict(
        verdict,
        text,
        f"digits, {lead.n} seeds, six epochs, each network at the best of three learning rates for "
        f"another seed; lead over the best other {100 * lead.value:.1f} points "
        f"({100 * lead.low:.1f} to {100 * lead.high:.1f})",
        results.hardware("layers-by-accuracy"),
    )


def _q39(results: Results) -> Verdict:
    names = {"max": "max pooling, ReLU", "average": "average pooling, ReLU",
             "sum": "sum pooling, ReLU"}  # fmt: skip
    return _best(results, names)


def _q40(results: Results) -> Verdict:
    names = {"ReLU": "max pooling, ReLU", "tanh": "max pooling, tanh",
             "sigmoid": "max pooling, sigmoid"}  # fmt: skip
    return _best(results, names)


def _q43(results: Results) -> Verdict:
    found = _layers(results)
    names = {"max pooling": "max pooling, ReLU",
             "stride 2 instead": "stride 2 instead of pooling, ReLU"}  # fmt: skip
    kept = {
        short: {"accuracies": [a / b for a, b in zip(*(found[name]["by_shift"][shift]
                                                       for shift in ("2", "0")), strict=True)]}
        for short, name in names.items()
    }  # fmt: skip
    gain = ratio(*kept.values())
    means = {short: sum(row["accuracies"]) / len(row["accuracies"]) for short, row in kept.items()}
    return Verdict(
        decided([gain]),
        ", ".join(f"{percent(value)} ({name})" for name, value in means.items()),
        "share of the accuracy that remains if test images are shifted by 2 of 32 pixels; trained "
        f"without shifts. Ratio over {gain.n} seeds: {shown(gain)}",
        results.hardware("layers-by-accuracy"),
    )


ROWS = (
    Row("Q32", "D", "convolution takes about 72% of inference on a CPU", "72.02%", "T", _q32),
    Row("Q33", "D", "LRN is second with about 10%", "10.33%", "T", _q33),
    Row("Q34", "D", "the input queue is the largest user of memory", "43.30 MB", "T", _q34),
    Row("Q35", "D", "stride cuts time far more than it costs precision", "86% → 70%", "T", _q35),
    Row("Q36", "D", "the share of convolution falls with the stride", "72, 65, 57, 44%", "T", _q36),
    Row("Q37", "D", "half the filters halve time and memory for 3 points", "2.01×", "T, C", _q37),
    Row("Q38", "D", "a larger first pooling gains nothing notable", "1.29×, +0.3 points", "T, C",
        _q38),
    Row("Q39", "D", "max pooling works better than average or sum pooling", "", "T", _q39),
    Row("Q40", "D", "ReLU works better than tanh or sigmoid in CNNs", "", "T", _q40),
    Row("Q41", "D", "profiling slows training 5×", "5×", "T", same_as("D6", judge_d.d6)),
    Row("Q42", "D", "stride 5 trains 16× faster", "16×", "T, C", same_as("D5", judge_d.d5)),
    Row("Q43", "D", "pooling makes the network tolerant of small shifts", "", "T", _q43),
)  # fmt: skip
