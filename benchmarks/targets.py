"""Targets of speedups over the fastest peer, and how close measurements are to them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.report import OURS, STEPS, Report, Row, comparisons
from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Target:
    """The least value of a figure."""

    value: float

    def share(self, figure: float) -> float:
        """Return 1 or more if the target is reached, otherwise the reached share."""
        return figure / self.value

    def verdict(self, figure: float) -> str:
        """Return ``reached``, or for example ``0.87 of target``."""
        share = self.share(figure)
        # 0.999 is not reached and must not be shown as 1.00.
        return "reached" if share >= 1.0 else f"{min(share, 0.99):.2f} of target"


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


@dataclass(frozen=True)
class Figure:
    """The speedup of dptrain over the fastest peer in a case, and its target."""

    case: str
    value: Ratio
    target: Target

    @property
    def bound(self) -> str:
        """The target as text."""
        return f"≥ {self.target.value:g}"

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
    """Return the speedups that have a target by section."""
    found = dict[str, list[Figure]]()
    for section, rows in report.sections().items():
        for each in comparisons(rows) if section in STEPS else ():
            target, ratio = speedup_target(report.kind, section, each.ours), each.ratio
            if target is not None and ratio is not None:
                found.setdefault(section, []).append(Figure(case_of(each.ours), ratio, target))
    return found


def case_of(row: Row) -> str:
    """Name the case of a row."""
    parts = [row["network"], f"batch {row['batch']}" if "batch" in row else ""]
    parts += [f"{row[name]} {name}" for name in ("threads", "ranks", "gpus") if name in row]
    parts += [row.get("precision", ""), row["program"] if row["program"] != OURS else ""]
    return ", ".join(filter(None, parts))
