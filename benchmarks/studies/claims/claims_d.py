"""Verdicts on the claims of study D, Q32 to Q43."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.studies.claims.judge_d import (
    CHEAP,
    NOTABLE,
    accuracy,
    accuracy_text,
    on_cpu,
    profile,
    share,
    total_ms,
    trained,
    training_ratio,
)
from benchmarks.studies.claims.published import PROFILE, TRAINING_RATIO, VARIANTS
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    NOT_COMPARABLE,
    REFUTED,
    Results,
    Row,
    Verdict,
    decide,
    percent,
    times,
)

STRIDES = ("base", "stride 2", "stride 3", "stride 5")


def _q32(results: Results) -> Verdict:
    ours = share(results, "base")
    return Verdict(decide(abs(ours - PROFILE["Conv2D"][1]) <= 0.1), percent(ours),
                   "share of Conv2D in inference, one core, layers computed one by one",
                   times(ours / PROFILE["Conv2D"][1]), results.hardware("profile"))  # fmt: skip


def _q33(results: Results) -> Verdict:
    kinds = profile(results)["kinds"]
    ordered = sorted(kinds, key=lambda kind: -kinds[kind]["share"])
    ours = kinds["LRN"]["share"]
    return Verdict(decide(ordered[1] == "LRN"),
                   f"LRN {percent(ours)}, place {ordered.index('LRN') + 1} of {len(ordered)}",
                   f"second is {ordered[1]}", times(ours / PROFILE["LRN"][1]),
                   results.hardware("profile"))  # fmt: skip


def _q34(results: Results) -> Verdict:
    sizes = results.values("counts")["cifar"]["base"]["bytes"]
    largest = max(sizes, key=lambda kind: sizes[kind])
    return Verdict(
        NOT_COMPARABLE,
        f"largest: {largest}, {sizes[largest] / 1e6:.1f} MB; one minibatch has "
        f"{sizes['batch'] / 1e3:.0f} kB",
        "dptrain has no queue of 4,384 prepared images (30.3 MB): it prepares one minibatch ahead, "
        "so the outputs of the convolutions are the largest",
        hardware="any",
    )


def _q35(results: Results) -> Verdict:
    faster = total_ms(results, "base") / total_ms(results, "stride 5")
    kept = accuracy(results, "stride 5") / accuracy(results, "base")
    return Verdict(
        decide(faster > 1 / kept),
        f"stride 5: speed-up {times(faster)}, {percent(kept)} of the accuracy "
        f"({accuracy_text(results, 'stride 5')})",
        "the study has 19.7× and 81% of the precision. Here the accuracy falls "
        f"{times(1 / kept)}, much more than in the study, but far less than the time; accuracies "
        "are not comparable",
        hardware=results.hardware("profile", trained(results)[1]),
    )


def _q36(results: Results) -> Verdict:
    shares = [share(results, name) for name in STRIDES]
    return Verdict(decide(all(a > b for a, b in pairwise(shares))),
                   ", ".join(percent(s, 0) for s in shares),
                   "stride 1, 2, 3, 5; the study has 72, 65, 57 and 44%",
                   hardware=results.hardware("profile"))  # fmt: skip


def _q37(results: Results) -> Verdict:
    faster = total_ms(results, "base") / total_ms(results, "32 filters")
    found = results.values("counts")["cifar"]
    memory = found["base"]["bytes"]["Conv2D"] / found["32 filters"]["bytes"]["Conv2D"]
    points = 100 * (accuracy(results, "base") - accuracy(results, "32 filters"))
    return Verdict(
        decide(faster > 1.7 and memory == 2),
        f"speed-up {times(faster)}, {times(memory)} less memory of outputs, {points:.1f} points",
        f"the work falls 3.45 times. Points are those of accuracy on {trained(results)[0]['data']}",
        times(faster / (VARIANTS["base"].total_ms / VARIANTS["32 filters"].total_ms)),
        results.hardware("profile", trained(results)[1]),
    )


def _q38(results: Results) -> Verdict:
    faster = total_ms(results, "base") / total_ms(results, "larger pooling")
    points = 100 * (accuracy(results, "larger pooling") - accuracy(results, "base"))
    return Verdict(
        decide(faster < NOTABLE),
        f"speed-up {times(faster)}, {points:+.1f} points",
        "the study calls its 1.29× and +0.3 points no notable gain",
        times(faster / 1.29),
        results.hardware("profile", trained(results)[1]),
    )


def _layers(results: Results) -> Mapping[str, Any]:
    found: Mapping[str, Any] = results.values("layers-by-accuracy")["networks"]
    return found


def compared(means: Mapping[str, float], spread: float) -> str:
    """Return the verdict on whether the first of some accuracies is the best.

    Args:
        means: mean accuracies over seeds.
        spread: largest standard deviation over seeds; a smaller difference decides nothing.
    """
    first, *others = means.values()
    lead = first - max(others)
    if abs(lead) <= spread:
        return NOT_COMPARABLE
    return decide(lead > 0)


def _best(results: Results, names: Mapping[str, str]) -> Verdict:
    """Return the verdict on whether the first network of `names` has the best accuracy."""
    found = _layers(results)
    means = {short: float(found[name]["accuracy_mean"]) for short, name in names.items()}
    spread = max(float(np.std(found[name]["accuracies"])) for name in names.values())
    verdict = compared(means, spread)
    note = f"{ACCURACY_NOTE} {percent(spread)}"
    if verdict == NOT_COMPARABLE:
        note = f"the lead is not larger than the deviation over seeds; {note}"
    text = ", ".join(f"{percent(mean)} ({short})" for short, mean in means.items())
    return Verdict(verdict, text, note, hardware=results.hardware("layers-by-accuracy"))


ACCURACY_NOTE = (
    "digits, three seeds, six epochs, each network at the best of three learning rates; standard "
    "deviation over seeds at most"
)


def _q39(results: Results) -> Verdict:
    names = {"max": "max pooling, ReLU", "average": "average pooling, ReLU",
             "sum": "sum pooling, ReLU"}  # fmt: skip
    return _best(results, names)


def _q40(results: Results) -> Verdict:
    names = {"ReLU": "max pooling, ReLU", "tanh": "max pooling, tanh",
             "sigmoid": "max pooling, sigmoid"}  # fmt: skip
    return _best(results, names)


def _q41(results: Results) -> Verdict:
    ratio = results.values("profiling-cost")["ratio"]["median"]
    return Verdict(REFUTED if ratio < CHEAP else CONFIRMED, f"{ratio:.3f}×",
                   "every step profiled, CPU; the factor belongs to the study's profiler",
                   times(ratio / 5), results.hardware("profiling-cost"))  # fmt: skip


def _q42(results: Results) -> Verdict:
    ratio = training_ratio(results, on_cpu(results))
    return Verdict(decide(ratio > TRAINING_RATIO / 2), times(ratio), "training steps on the CPU",
                   times(ratio / TRAINING_RATIO), results.hardware(on_cpu(results)))  # fmt: skip


def _q43(results: Results) -> Verdict:
    found = _layers(results)
    kept = {}
    for short, name in (("max pooling", "max pooling, ReLU"),
                        ("stride 2 instead", "stride 2 instead of pooling, ReLU")):  # fmt: skip
        by_shift = found[name]["by_shift"]
        kept[short] = by_shift["2"] / by_shift["0"]
    return Verdict(
        decide(kept["max pooling"] > kept["stride 2 instead"]),
        ", ".join(f"{percent(value)} ({name})" for name, value in kept.items()),
        "share of the accuracy that remains if test images are shifted by 2 of 32 pixels; trained "
        "without shifts",
        hardware=results.hardware("layers-by-accuracy"),
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
    Row("Q41", "D", "profiling slows training 5×", "5×", "T", _q41),
    Row("Q42", "D", "stride 5 trains 16× faster", "16×", "T, C", _q42),
    Row("Q43", "D", "pooling makes the network tolerant of small shifts", "", "T", _q43),
)  # fmt: skip
