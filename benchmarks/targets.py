"""Performance targets, and how close measurements are to them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.report import (
    COPIES,
    OURS,
    STEPS,
    Report,
    Row,
    Rows,
    comparisons,
    speedup,
    wall_ratio,
)
from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Target:
    """A target: at least `value`, or at most."""

    value: float
    at_most: bool = False

    def share(self, figure: float) -> float:
        """Return 1 or more if the target is reached, otherwise the reached share."""
        return self.value / figure if self.at_most else figure / self.value

    def verdict(self, figure: float) -> str:
        """Return ``reached``, or for example ``0.87 of target``."""
        share = self.share(figure)
        # 0.999 is not reached and must not be shown as 1.00.
        return "reached" if share >= 1.0 else f"{min(share, 0.99):.2f} of target"


def _most(value: float) -> Target:
    return Target(value, at_most=True)


Conditions = Mapping[str, Container[Any]]
SMALL = range(33)
RESIDUAL = ("resnet20", "resnet18-cifar")
SHAPES = ("vgg", "input113", "strided", "odd", "lenet5", "perceptron", *RESIDUAL, "resnet50")
FAST = ("tf32", "bf16")

SPEEDUPS: tuple[tuple[str, Conditions, float | None], ...] = (
    ("cpu threads", {"network": ("model0", "model2")}, 4.0),
    # Almost only matrix products of BLAS.
    ("cpu threads", {"network": ("mlp-800-400-208", "mlp-6400-3200-1664")}, 1.3),
    ("cpu threads", {}, 3.0),
    ("cpu outside", {}, 2.0),
    ("cpu residual", {"network": ("resnet50",)}, 1.5),
    ("cpu residual", {}, 2.0),
    # Bound by reading the weights.
    ("cpu inference", {"network": ("solar",), "batch": (1,)}, 1.0),
    ("cpu inference", {}, 1.3),
    ("gpu inference", {"batch": (1, 32, 1024)}, 2.0),
    ("gpu inference", {}, None),
    ("gpu", {"network": RESIDUAL}, 1.5),
    ("gpu", {"network": ("resnet50",)}, 1.0),
    ("gpu", {"network": ("vgg",), "precision": ("fp32",)}, 1.7),
    ("gpu", {"network": ("vgg", "input113"), "precision": FAST}, 2.5),
    ("gpu", {"network": ("strided", "odd", "lenet5"), "precision": FAST}, 2.0),
    ("gpu", {"network": ("perceptron",), "precision": FAST}, 1.3),
    ("gpu", {"network": SHAPES}, None),
    ("gpu", {"precision": ("fp32",), "batch": SMALL}, 2.0),
    ("gpu", {"precision": ("fp32",)}, 2.5),
    ("gpu", {"batch": SMALL}, 3.0),
    ("gpu", {}, 2.0),
)
"""Device, or device and section; conditions of a row of dptrain; the least speedup over the fastest
peer. The first line that holds counts."""

STEP_US = {"model0": 45.0, "model1": 55.0, "model2": 70.0, "cifar": 150.0, "solar": 130.0}
"""Largest time of a training step of 32 samples on an H200 in µs."""

DOUBLED = _most(1.02)
"""Step relative to half the threads."""
COPIES_AT_16 = Target(0.90)
WEAK = {("model0", 8): 0.96, ("model0", 16): 0.94, ("cifar", 16): 0.96}
STRONG = {("model0", 16): 0.75}
TWO_CORES = {
    ("weak", 8): ("4 ranks on 2 cores, 8 samples each", "weak efficiency", 0.45),
    ("strong", 32): ("2 ranks, global batch 32", "times faster than one", 1.6),
    ("weak", 128): ("2 ranks, 128 samples each", "weak efficiency", 0.97),
}
TRAFFIC, MPI, MPI_RANKS = _most(1.5), Target(4.0), (8, 16)
SHARDS = {"model0": _most(1.05), "cifar": _most(1.05), "solar": _most(1.10)}
MEMORY = _most(1.0)
"""Peak memory divided by PyTorch's."""
DATA_SHARE, STREAM_SHARE = Target(0.95), Target(0.9)
"""Speed of training on augmented images as a share of that of the bare step, and of that which the
slowest part of reading allows."""
DATA_FASTER = Target(4.0)
"""Speedup over PyTorch with images and augmentation on the GPU."""
FP32_ERROR = _most(1.0)
"""Error of a layer in fp32 divided by that of PyTorch."""
GPU_WEAK = {32: Target(0.80), 1024: Target(0.97)}
"""Weak-scaling efficiency by samples per GPU."""
GPU_RANK_US = {("model0", 32, 8): _most(75.0)}
"""Time of a step by network, samples per GPU and number of GPUs."""
GPU_RANK_FASTER = Target(3.0)


@dataclass(frozen=True)
class Figure:
    """A measured figure and its target."""

    case: str
    quantity: str
    value: Ratio
    target: Target

    @property
    def bound(self) -> str:
        """The target as text."""
        return f"{'≤' if self.target.at_most else '≥'} {self.target.value:g}"

    @property
    def reached(self) -> bool:
        """Whether the median reaches the target."""
        return self.target.share(self.value.value) >= 1.0


def speedup_target(kind: str, section: str, row: Row) -> Target | None:
    """Return the target of a speedup of dptrain over the fastest peer."""
    for where, conditions, least in SPEEDUPS:
        if where in (kind, f"{kind} {section}") and all(
            row.get(name) in values for name, values in conditions.items()
        ):
            return None if least is None else Target(least)
    return None


def figures(report: Report) -> dict[str, list[Figure]]:
    """Return the figures that have a target by section."""
    found = {}
    for section, rows in report.sections().items():
        name = f"{report.kind} {section}"
        lines = list(FIGURES[name](rows)) if name in FIGURES else []
        if section in STEPS:
            lines += list(_speedups(report.kind, section, rows))
        found[section] = lines
    return found


def case_of(row: Row) -> str:
    """Name the case of a row."""
    parts = [row["network"], f"batch {row['batch']}" if "batch" in row else ""]
    parts += [f"{row[name]} {name}" for name in ("threads", "ranks", "gpus") if name in row]
    parts += [row.get("precision", ""), row["program"] if row["program"] != OURS else ""]
    return ", ".join(filter(None, parts))


def _figure(case: str, quantity: str, value: Ratio | None, target: Target) -> Iterator[Figure]:
    if value is not None:
        yield Figure(case, quantity, value, target)


def _number(value: float) -> Ratio:
    return Ratio(value, value, value)


def _speedups(kind: str, section: str, rows: Rows) -> Iterator[Figure]:
    for found in comparisons(rows):
        target = speedup_target(kind, section, found.ours)
        if target is not None:
            yield from _figure(
                case_of(found.ours), "times faster than the best peer", found.ratio, target
            )


def _threads(rows: Rows) -> Iterator[Figure]:
    for of_network in rows.cases("network"):
        ours = of_network.where(program=OURS)
        for count in sorted(ours.values("threads")):
            mine = ours.one(threads=count)
            assert mine is not None
            half = ours.one(threads=count // 2) if count % 2 == 0 else None
            quantity = "step relative to half the threads"
            yield from _figure(case_of(mine), quantity, wall_ratio(mine, half), DOUBLED)
            copies = of_network.one(threads=count, program=COPIES)
            if count == 16:
                quantity = "efficiency relative to independent copies"
                yield from _figure(case_of(mine), quantity, wall_ratio(copies, mine), COPIES_AT_16)


def _ranks(rows: Rows) -> Iterator[Figure]:
    for here in rows.cases("network", "scaling", "samples", "ranks"):
        mine = here.one(program=OURS)
        targets = {} if mine is None else WEAK if mine["scaling"] == "weak" else STRONG
        least = None if mine is None else targets.get((mine["network"], mine["ranks"]))
        if mine is None or least is None:
            continue
        case, kind = f"{mine['network']}, {mine['ranks']} ranks", f"{mine['scaling']} efficiency"
        others = [(COPIES, "independent copies", 1.0), ("copies that meet",
                  "copies that meet after each step", 1.0)]  # fmt: skip
        if mine["scaling"] == "strong":
            others.append(("alone", "one rank", 1.0 / mine["ranks"]))
        for program, what, factor in others:
            value = wall_ratio(here.one(program=program), mine, factor)
            yield from _figure(case, f"{kind} relative to {what}", value, Target(least))


def _two_cores(rows: Rows) -> Iterator[Figure]:
    for (scaling, samples), (case, quantity, least) in TWO_CORES.items():
        here = rows.where(scaling=scaling, samples=samples)
        value = wall_ratio(here.one(program="alone"), here.one(program=OURS))
        yield from _figure(case, quantity, value, Target(least))


def _sums(rows: Rows) -> Iterator[Figure]:
    for here in rows.cases("network", "ranks"):
        mine = here.one(program=OURS)
        if mine is None:
            continue
        case = f"sum and update of {1e-6 * mine['bytes']:.2f} MB, {mine['ranks']} ranks"
        traffic = speedup(mine, here.one(program="traffic.c"))
        yield from _figure(case, "time relative to traffic.c", traffic, TRAFFIC)
        if mine["ranks"] in MPI_RANKS:
            best = speedup(here.fastest(("MPICH", "Open MPI")), mine)
            yield from _figure(case, "times faster than the better MPI", best, MPI)


def _shards(rows: Rows) -> Iterator[Figure]:
    for here in rows.cases("network", "ranks", "threads"):
        mine = here.one(program="with shards")
        if mine is not None:
            value = wall_ratio(mine, here.one(program="without shards"))
            case = f"{mine['network']}, {mine['ranks']} ranks × {mine['threads']} threads"
            quantity = "step with micro-shards relative to none"
            yield from _figure(case, quantity, value, SHARDS[mine["network"]])


def _memory(rows: Rows) -> Iterator[Figure]:
    for here in rows.cases("network", "batch"):
        mine, theirs = here.one(program=OURS), here.one(program="PyTorch eager")
        if mine is not None and theirs is not None:
            share = _number(mine["memory_bytes"] / theirs["memory_bytes"])
            yield Figure(case_of(mine), "peak memory / PyTorch's", share, MEMORY)


def _steps_us(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        if row["program"].startswith(OURS) and row["batch"] == 32 and row["network"] in STEP_US:
            us = _number(1e3 * row["median_ms"])
            yield Figure(case_of(row), "µs of a step", us, _most(STEP_US[row["network"]]))


def _data(rows: Rows) -> Iterator[Figure]:
    for found in comparisons(rows):
        case, ours = case_of(found.ours), found.ours["median_ms"]
        share = _number(found.ours["bare_ms"] / ours)
        yield Figure(case, "speed / that of the bare step", share, DATA_SHARE)
        if found.best is not None:
            faster = _number(found.best["median_ms"] / ours)
            yield Figure(case, "times faster than the best peer", faster, DATA_FASTER)


def _streams(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        share = _number(max(row["limits_ms"].values()) / row["median_ms"])
        quantity = "speed / that which the slowest part allows"
        yield Figure(f"{row['source']}, {case_of(row)}", quantity, share, STREAM_SHARE)


def _errors(rows: Rows) -> Iterator[Figure]:
    for here in rows.cases("network", "batch", "layer", "quantity"):
        peer = here.one(program="PyTorch")
        for row in here:
            if peer is not None and row is not peer:
                value = _number(row["error"] / peer["error"])
                case = f"{row['network']} {row['layer']}, batch {row['batch']}, {row['program']}"
                yield Figure(f"{case}, {row['quantity']}", "error / PyTorch's", value, FP32_ERROR)


def _gpu_ranks(rows: Rows) -> Iterator[Figure]:
    for row in rows.where(program=OURS):
        us, case = 1e3 * row["median_ms"], case_of(row)
        facts = {name: row[name] for name in ("network", "batch")}
        one = rows.one(program=OURS, gpus=1, **facts)
        target = GPU_WEAK.get(row["batch"])
        if row["gpus"] > 1 and one is not None and target is not None:
            weak = _number(one["median_ms"] / row["median_ms"])
            yield Figure(case, "weak efficiency", weak, target)
        step = GPU_RANK_US.get((row["network"], row["batch"], row["gpus"]))
        if step is None:
            continue
        yield Figure(case, "µs of a step", _number(us), step)
        here = rows.where(gpus=row["gpus"], **facts)
        best = here.fastest(("PyTorch graph", "PyTorch DDP"))
        if best is not None:
            faster = _number(1e3 * best["median_ms"] / us)
            yield Figure(case, "times faster than the best peer", faster, GPU_RANK_FASTER)


FIGURES = {
    "cpu threads": _threads,
    "cpu ranks": _ranks,
    "cpu two-cores": _two_cores,
    "cpu sums": _sums,
    "cpu shards": _shards,
    "cpu memory": _memory,
    "gpu training": _steps_us,
    "gpu data": _data,
    "gpu streams": _streams,
    "gpu precision": _errors,
    "gpu ranks": _gpu_ranks,
}
