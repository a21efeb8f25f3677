"""Verdicts on the results of study D."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.studies.claims.published import TRAINING_RATIO, VARIANTS
from benchmarks.studies.claims.spreads import Row as Times
from benchmarks.studies.claims.spreads import decided, ratio, shown
from benchmarks.studies.claims.verdicts import (
    MissingResultError,
    Results,
    Row,
    Verdict,
    decide,
    exactly,
    percent,
    times,
)
from benchmarks.studies.store import Result
from dptrain.measure.statistics import Estimate

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


def shares_on(result: Result) -> dict[str, float]:
    """Return the share of each kind of operation on a machine, the largest first."""
    kinds = result.values["variants"]["base"]["kinds"]
    return {k: kinds[k]["share"] for k in sorted(kinds, key=lambda k: -kinds[k]["share"])}


def trained(results: Results) -> tuple[Mapping[str, Any], str]:
    """Return the trained variants with the most steps, and the name of the measurement."""
    name = "variants-gpu" if results.has("variants-gpu") else "variants"
    found: Mapping[str, Any] = results.values(name)
    return found, name


def on_cifar10(results: Results) -> bool:
    """Return whether the variants were trained on study D's data."""
    return bool(trained(results)[0]["data"] == "CIFAR-10")


def accuracy(results: Results, variant: str) -> float:
    """Return the mean accuracy of a variant."""
    return float(trained(results)[0]["variants"][variant]["accuracy_mean"])


def accuracy_text(results: Results, *variants: str) -> str:
    """Return accuracies of variants, with that of the base first."""
    found, name = trained(results)
    names = ", ".join(f"{percent(accuracy(results, v))} ({v})" for v in ("base", *variants))
    return f"Accuracy on {found['data']}, {results.hardware(name)}: {names}"


def accuracies_missing(results: Results) -> str:
    """Return that the accuracies of study D were not measured; empty if they were."""
    if results.has("variants-gpu") and on_cifar10(results):
        return ""
    return (
        "- D2, D3, D4, Q35, Q37, Q38: the accuracies on CIFAR-10 (86, 79.6, 74.7, 70, 83.7 and "
        "86.3%). No variant was trained on CIFAR-10; ours are accuracies on generated images and "
        "decide nothing. `--cifar10 DIR` trains on it."
    )


def variants_note(results: Results) -> str:
    """Return the conditions under which the variants were trained."""
    try:
        found, name = trained(results)
    except MissingResultError as reason:
        return f"Not measured: {reason}."
    other = "" if on_cifar10(results) else ", generated images that are not those of CIFAR-10"
    return (
        f"Trained on {found['data']}{other}, for {found['steps']:,} steps of {found['batch']} "
        f"images with SGD at a rate of {found['learning_rate']}, {found['seeds']} "
        f"seed{'s' if found['seeds'] > 1 else ''}, on {results.hardware(name)}."
    )


def _d1(results: Results) -> Verdict:
    machines = {result.kind: shares_on(result) for result in results.on_each_machine("profile")}
    if results.has("profile-gpu"):
        machines |= {r.kind: shares_on(r) for r in results.on_each_machine("profile-gpu")}
    text = "; ".join(
        f"{kind}: " + ", ".join(f"{name} {percent(part)}" for name, part in list(found.items())[:3])
        for kind, found in machines.items()
    )
    holds = all(next(iter(found)) == "Conv2D" and found["Conv2D"] > 0.5
                for found in machines.values())  # fmt: skip
    return Verdict(
        decide(holds),
        text,
        "the convolutions dominate, as in the study; the three largest shares of each machine. "
        "Layers are computed one by one here; our usual kernels fuse them",
        results.hardware("profile"),
    )


def faster(results: Results, variant: str, kind: str = "Conv2D") -> Estimate:
    """Return how many times faster a kind of operation of a variant is than that of the base."""
    rows: list[Times] = [profile(results, v)["kinds"][kind] for v in ("base", variant)]
    return ratio(*rows)


def faster_in_all(results: Results, variant: str) -> Estimate:
    """Return how many times faster the inference of a variant is than that of the base."""
    return ratio(*(profile(results, v)["total_ms"] for v in ("base", variant)))


def published_conv(variant: str) -> float:
    """Return how many times faster the convolutions of a variant are in the study."""
    return VARIANTS["base"].conv_ms / VARIANTS[variant].conv_ms


def _d2(results: Results) -> Verdict:
    names = ("stride 2", "stride 3", "stride 5")
    speeds = {name: faster(results, name) for name in names}
    shares = [share(results, name) for name in ("base", *names)]
    falls = all(a > b for a, b in pairwise(shares))
    return Verdict(
        decided(speeds.values(), 2),
        "Conv2D faster by " + ", ".join(map(shown, speeds.values())),
        f"times only, published {', '.join(times(published_conv(n)) for n in names)}; the work "
        "falls 10.9, 24.4 and 78.7 times. The share of the convolutions "
        f"{'falls' if falls else 'does not fall'} with the stride. "
        f"{accuracy_text(results, *names)}",
        results.hardware("profile"),
    )


def _d3(results: Results) -> Verdict:
    ours = faster(results, "32 filters")
    return Verdict(
        decided([ours], 1.5),
        f"Conv2D faster by {shown(ours)}",
        f"times only, published {times(published_conv('32 filters'))} for 3.45 times less work. "
        f"{accuracy_text(results, '32 filters')}",
        results.hardware("profile"),
    )


def _d4(results: Results) -> Verdict:
    ours, total = faster(results, "larger pooling"), faster_in_all(results, "larger pooling")
    return Verdict(
        decided([total.below(NOTABLE)]),
        f"Conv2D faster by {shown(ours)}, all by {shown(total)}",
        f"times only, published {times(published_conv('larger pooling'))} for 1.16 times less "
        f"work, no notable gain. {accuracy_text(results, 'larger pooling')}",
        results.hardware("profile"),
    )


def training_ratio(results: Results, name: str) -> Estimate:
    """Return the time of a training step of the base divided by that with stride 5."""
    variants = results.values(name)["variants"]
    return ratio(variants["base"]["step"], variants["stride 5"]["step"])


def on_cpu(results: Results) -> str:
    """Return the measurement of training steps on a CPU."""
    return "variant-steps" if results.has("variant-steps") else "variants"


def d5(results: Results) -> Verdict:
    """Return the verdict on the training time with stride 5."""
    gain = training_ratio(results, on_cpu(results))
    names, text = [on_cpu(results)], f"{shown(gain)} on the CPU"
    if results.has("variants-gpu"):
        names.append("variants-gpu")
        text += f", {shown(training_ratio(results, 'variants-gpu'))} on the GPU"
    return Verdict(
        decided([gain], TRAINING_RATIO / 2),
        text,
        "training steps of 128 images. The work of a forward pass falls 57 times; on a GPU a step "
        "with stride 5 mostly waits for its kernels to start",
        results.hardware(*names),
    )


def d6(results: Results) -> Verdict:
    """Return the verdict on the cost of profiling."""
    names = [n for n in ("profiling-cost", "profiling-cost-gpu") if results.has(n)]
    rows = {n: results.values(n)["ratio"] for n in names or ["profiling-cost"]}
    parts = [f"{row['median']:.3g}× ({row['q1']:.3g} to {row['q3']:.3g}) on {results.hardware(n)}"
             for n, row in rows.items()]  # fmt: skip
    return Verdict(
        decide(rows["profiling-cost"]["median"] >= CHEAP),
        ", ".join(parts),
        "every step profiled, quartiles of alternating blocks; `train` profiles 1 step in 250. The "
        "factor belongs to the study's profiler, not to profiling",
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
        f"{reason}. The study quotes 19.5 M operations from a tutorial; the count of its network "
        "is 18.47 M. Bytes are those of tables 4.4, 4.7 and 4.8, whose labels are shifted: table "
        "4.4 prints 1.31 MB for BiasAdd and 0 B for MaxPool, which we exchange. Tables 4.3, 4.5 "
        "and 4.6 have up to 1.43 times as many in some rows, which the study does not explain",
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
        d5),
    Row("D6", "D", "the profiler slows training", "about 5×", "T", d6),
    Row("D7", "D", "parameters, multiply-adds, bytes", "1,068,298; 19.5 M; columns of bytes",
        "T, C", _d7),
)  # fmt: skip
