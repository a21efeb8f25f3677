"""Verdicts on the results of study D."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.studies.claims.published import PROFILE, PROFILER_RATIO, TRAINING_RATIO, VARIANTS
from benchmarks.studies.claims.verdicts import (
    CONFIRMED,
    REFUTED,
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    exactly,
    percent,
    times,
)

NOTABLE = 1.3
"""Study D calls a total that is 1.29 times faster no notable gain."""
CHEAP = 1.1
"""Largest ratio of step times with and without profiling that counts as no slowdown."""


def profile(results: Results, variant: str = "base", name: str = "profile") -> Mapping[str, Any]:
    """Return the profile of inference of a variant."""
    found: Mapping[str, Any] = results.values(name)["variants"][variant]
    return found


def share(results: Results, variant: str, kind: str = "Conv2D", name: str = "profile") -> float:
    """Return the share of a kind of operation in inference."""
    return float(profile(results, variant, name)["kinds"][kind]["share"])


def conv_ms(results: Results, variant: str, name: str = "profile") -> float:
    """Return the time of all convolutions of a forward pass in ms."""
    return float(profile(results, variant, name)["kinds"]["Conv2D"]["median"])


def total_ms(results: Results, variant: str, name: str = "profile") -> float:
    """Return the time of all operations of a forward pass in ms."""
    kinds = profile(results, variant, name)["kinds"].values()
    return float(sum(kind["median"] for kind in kinds))


def trained(results: Results) -> tuple[Mapping[str, Any], str]:
    """Return the trained variants with the most steps, and the name of the measurement."""
    name = "variants-gpu" if results.has("variants-gpu") else "variants"
    found: Mapping[str, Any] = results.values(name)
    return found, name


def accuracy(results: Results, variant: str) -> float:
    """Return the mean accuracy of a variant."""
    return float(trained(results)[0]["variants"][variant]["accuracy_mean"])


def accuracy_text(results: Results, *variants: str) -> str:
    """Return accuracies of variants, with that of the base first."""
    found, name = trained(results)
    names = ", ".join(f"{percent(accuracy(results, v))} ({v})" for v in ("base", *variants))
    return f"{names}: {found['data']}, {found['steps']:,} steps, {results.hardware(name)}"


def _comparable(results: Results) -> str:
    data = trained(results)[0]["data"]
    if data == "CIFAR-10":
        return "accuracies on CIFAR-10, with fewer steps than the study's 100,000"
    return "accuracies are not comparable: generated images instead of CIFAR-10"


def variants_note(results: Results) -> str:
    """Return the conditions under which the variants were trained."""
    try:
        found, name = trained(results)
    except MissingResultError as reason:
        return f"Not measured: {reason}."
    return (
        f"Trained on {found['data']} for {found['steps']:,} steps of {found['batch']} images with "
        f"SGD at a rate of {found['learning_rate']}, {found['seeds']} "
        f"seed{'s' if found['seeds'] > 1 else ''}, on {results.hardware(name)}; "
        f"{_comparable(results)}."
    )


def _d1(results: Results) -> Verdict:
    kinds = profile(results)["kinds"]
    ordered = sorted(kinds, key=lambda kind: -kinds[kind]["share"])
    shares = ", ".join(f"{kind} {percent(kinds[kind]['share'])}" for kind in ordered)
    gpu = ""
    names = ["profile"]
    if results.has("profile-gpu"):
        names.append("profile-gpu")
        gpu = f". On the GPU, Conv2D has {percent(share(results, 'base', name='profile-gpu'))}"
    conv = kinds["Conv2D"]["share"]
    return Verdict(
        decide(ordered[0] == "Conv2D" and conv > 0.5),
        f"{shares}; total {total_ms(results, 'base'):.1f} ms for 128 images",
        f"the convolutions dominate, as in the study{gpu}. Layers are computed one by one here; "
        "our usual kernels fuse them",
        times(conv / PROFILE["Conv2D"][1]),
        results.hardware(*names),
    )


def _speed(results: Results, variant: str) -> tuple[float, float]:
    """Return how many times faster the convolutions of a variant are: ours and published."""
    ours = conv_ms(results, "base") / conv_ms(results, variant)
    return ours, VARIANTS["base"].conv_ms / VARIANTS[variant].conv_ms


def _d2(results: Results) -> Verdict:
    names = ("stride 2", "stride 3", "stride 5")
    speeds = {name: _speed(results, name) for name in names}
    shares = [share(results, name) for name in ("base", *names)]
    falls = all(a > b for a, b in pairwise(shares))
    drops = [accuracy(results, "base") - accuracy(results, name) for name in names]
    return Verdict(
        decide(all(ours > 2 for ours, _ in speeds.values()) and drops[0] < drops[-1]),
        "speed-up of Conv2D " + ", ".join(f"{times(ours)}" for ours, _ in speeds.values())
        + "; share " + ", ".join(percent(s) for s in shares[1:])
        + "; " + accuracy_text(results, *names),
        f"published factors are {', '.join(times(p) for _, p in speeds.values())}, the work falls "
        "10.9, 24.4 and 78.7 times. The share of the convolutions "
        f"{'falls' if falls else 'does not fall'} with the stride; {_comparable(results)}",
        ", ".join(times(ours / published) for ours, published in speeds.values()),
        results.hardware("profile", trained(results)[1]),
    )  # fmt: skip


def _d3(results: Results) -> Verdict:
    ours, published = _speed(results, "32 filters")
    loss = accuracy(results, "base") - accuracy(results, "32 filters")
    return Verdict(
        decide(ours > 1.5),
        f"speed-up of Conv2D {times(ours)}; {accuracy_text(results, '32 filters')}",
        f"published: {times(published)} for 3.45 times less work. The accuracy falls by "
        f"{100 * loss:.1f} points; {_comparable(results)}",
        times(ours / published),
        results.hardware("profile", trained(results)[1]),
    )


def _d4(results: Results) -> Verdict:
    ours, published = _speed(results, "larger pooling")
    return Verdict(
        decide(total_ms(results, "base") / total_ms(results, "larger pooling") < NOTABLE),
        f"speed-up of Conv2D {times(ours)}; {accuracy_text(results, 'larger pooling')}",
        f"published: {times(published)} for 1.16 times less work, which the study calls no notable "
        f"gain; {_comparable(results)}",
        times(ours / published),
        results.hardware("profile", trained(results)[1]),
    )


def training_ratio(results: Results, name: str) -> float:
    """Return the time of a training step of the base divided by that with stride 5."""
    variants = results.values(name)["variants"]
    return float(variants["base"]["step"]["median"] / variants["stride 5"]["step"]["median"])


def on_cpu(results: Results) -> str:
    """Return the measurement of training steps on a CPU."""
    return "variant-steps" if results.has("variant-steps") else "variants"


def _d5(results: Results) -> Verdict:
    ratio = training_ratio(results, on_cpu(results))
    names, text = [on_cpu(results)], f"{times(ratio)} on the CPU"
    if results.has("variants-gpu"):
        names.append("variants-gpu")
        text += f", {times(training_ratio(results, 'variants-gpu'))} on the GPU"
    return Verdict(
        decide(ratio > TRAINING_RATIO / 2),
        text,
        "training steps of 128 images. The work of a forward pass falls 57 times; on a GPU a step "
        "with stride 5 mostly waits for its kernels to start",
        times(ratio / TRAINING_RATIO),
        results.hardware(*names),
    )


def _d6(results: Results) -> Verdict:
    names = [n for n in ("profiling-cost", "profiling-cost-gpu") if results.has(n)]
    ratios = {n: results.values(n)["ratio"]["median"] for n in names or ["profiling-cost"]}
    gpu = ratios.get("profiling-cost-gpu")
    text = f"{ratios['profiling-cost']:.3f}× on the CPU with every step profiled"
    reason = "alternating blocks of steps with and without times of each stage"
    if gpu is not None:
        usual = 1 + (gpu - 1) / 250
        text += f"; {gpu:.2f}× on the GPU, {usual:.3f}× in `train`, which profiles 1 step in 250"
        reason += ". On a GPU, a profiled step runs its stages in order, with an event after each"
    return Verdict(
        REFUTED if ratios["profiling-cost"] < CHEAP else CONFIRMED,
        text,
        f"{reason}. The study's profiler slows training 5 times; this is a property of the "
        "profiler, not of profiling",
        times(ratios["profiling-cost"] / PROFILER_RATIO),
        results.hardware(*names),
    )


def printed(nbytes: int, like: str) -> str:
    """Return a size as study D's profiler prints it, with the unit of another text."""
    unit = like.split()[-1]
    return f"{nbytes / {'MB': 1e6, 'KB': 1e3, 'B': 1}[unit]:.2f} {unit}"


def _d7(results: Results) -> Verdict:
    found = results.values("counts")["cifar"]
    pairs: dict[str, tuple[Any, Any]] = {}
    for name, published in VARIANTS.items():
        own = found[name]
        pairs[f"{name} parameters"] = own["parameters"], published.parameters
        pairs[f"{name} multiply-adds"] = own["total_multiply_adds"], published.multiply_adds
        pairs[f"{name} maps"] = tuple(own["maps"]), published.maps
        for kind, text in published.bytes.items():
            pairs[f"{name} bytes of {kind}"] = printed(own["bytes"][kind], text), text
    verdict, reason = exactly(pairs)
    return Verdict(
        verdict,
        f"{found['base']['parameters']:,}; {found['base']['total_multiply_adds'] / 1e6:.2f} M",
        f"{reason}. The study quotes 19.5 M operations from a tutorial; the count of its "
        "network is 18.47 M. Bytes are those of tables 4.4, 4.7 and 4.8; tables 4.3, 4.5 and 4.6 "
        "have up to 1.43 times as many in some rows, which the study does not explain",
        "1",
        "any",
    )


ROWS = (
    Row("D1", "D", "profile of inference by operation, base network", "Conv2D 72.02%, LRN 10.33%, "
        "BiasAdd 4.76%, MaxPool 4.26%, Relu 3.97%, MatMul 2.81%; 56.0 ms for 128 images", "T, C",
        _d1),
    Row("D2", "D", "stride 2, 3, 5", "Conv2D 6.54, 2.61, 1.24 ms instead of 40.34; precision "
        "79.6, 74.7, 70% instead of 86%", "T", _d2),
    Row("D3", "D", "32 filters instead of 64", "Conv2D 20.97 ms; 83.7%", "T", _d3),
    Row("D4", "D", "larger first pooling", "Conv2D 32.51 ms; 86.3%", "T", _d4),
    Row("D5", "D", "training of 100,000 steps", "8 h (stride 1), 30 min (stride 5): 16×", "T, C",
        _d5),
    Row("D6", "D", "the profiler slows training", "about 5×", "T", _d6),
    Row("D7", "D", "parameters, multiply-adds, bytes", "1,068,298; 19.5 M; columns of bytes",
        "T, C", _d7),
)  # fmt: skip
