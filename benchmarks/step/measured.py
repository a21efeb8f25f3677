"""The table of products whose fastest configuration has not the lowest estimate."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dptrain.backends.cuda import measured
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution.algorithms import CONVOLUTION
from dptrain.backends.cuda.convolution.convolution import Convolution
from dptrain.backends.cuda.dense.dense import DenseGemm, label
from dptrain.backends.cuda.device.device import Device
from dptrain.backends.cuda.tuning import MIN_GAIN, Candidate
from dptrain.network.normalization import BatchNorm2d
from dptrain.plan.lowering import Group, Phase, Setting
from dptrain.plan.plan import Plan, with_selection
from dptrain.plan.selection import rank

COLUMNS = "product", "configuration", "gain"


@dataclass(frozen=True)
class Times:
    """The measured times of a product.

    Attributes:
        label: of the product.
        default: configuration with the lowest estimate.
        ms: shortest milliseconds by configuration.
    """

    label: str
    default: str
    ms: dict[str, float]


class Recorder(CudaBackend):
    """A backend that notes for which normalisations input gradients could be summed.

    Args:
        device: the device.

    Attributes:
        normalizations: the groups of the normalisations, by the name of the convolution.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.normalizations: dict[str, Group] = {}

    def sums_gradient(self, group: Group, normalization: Group, setting: Setting) -> bool:
        if isinstance(normalization.head.layer, BatchNorm2d):
            self.normalizations[group.name] = normalization
        return super().sums_gradient(group, normalization, setting)


def times_of(
    backend: CudaBackend, plan: Plan, stages: Mapping[str, Sequence[Candidate]]
) -> Iterator[Times]:
    """Yield the times of the products of a plan.

    Args:
        backend, plan: the backend and its plan.
        stages: measured candidates by stage.
    """
    recorder = Recorder(backend.device)
    with_selection(plan, recorder, plan.setting.selection)
    for group in plan.groups:
        operation = backend.operation(group, plan.setting)
        if operation is Convolution:
            found = _convolution(plan, group, recorder.normalizations.get(group.name))
        elif issubclass(operation, DenseGemm):
            found = _dense(plan, group, stages)
        else:
            continue
        for phase, name, default in found:
            candidates = stages.get(group.stage(phase), ())
            ms = {each.name: each.time_ms for each in candidates if each.time_ms is not None}
            if ms:
                yield Times(name, default, ms)


def _convolution(
    plan: Plan, group: Group, normalization: Group | None
) -> Iterator[tuple[Phase, str, str]]:
    """Yield phase, label and default of the products of a convolution.

    Whether an input gradient is summed for a batch normalisation follows from its algorithm, which
    is selected first as if it were. So both cases have the same times, which contain that of the
    kernel that sums otherwise.
    """
    for either in {replace(group, normalization=each) for each in (None, normalization)}:
        for phase, (case, _) in Convolution.choices(either, plan.setting).items():
            yield phase, case.label, str(rank(CONVOLUTION, phase, case)[0])


def _dense(
    plan: Plan, group: Group, stages: Mapping[str, Sequence[Candidate]]
) -> Iterator[tuple[Phase, str, str]]:
    """Yield phase, label and default of the products of a dense layer."""
    for phase in (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT):
        name, found = label(group, plan.setting, phase), stages.get(group.stage(phase), ())
        # The measured configuration comes first.
        names = [each.name for each in found if each.name != measured.rows().get(name)]
        if names:
            yield phase, name, names[0]


def rows(found: Iterable[Times]) -> dict[str, tuple[str, float] | None]:
    """Return configuration and gain by label; None if the lowest estimate is right.

    Several stages can have the same label; the shortest time of each configuration counts.
    """
    by_label: dict[str, Times] = {}
    for each in found:
        known = by_label.setdefault(each.label, Times(each.label, each.default, {})).ms
        for name, time in each.ms.items():
            known[name] = min(time, known.get(name, time))
    return {name: _row(times) for name, times in by_label.items()}


def _row(times: Times) -> tuple[str, float] | None:
    best = min(times.ms, key=lambda name: times.ms[name])
    default = times.ms.get(times.default)
    if default is None or times.ms[best] >= (1 - MIN_GAIN) * default:
        return None
    return best, default / times.ms[best]


def write(path: Path, found: Mapping[str, tuple[str, float] | None]) -> int:
    """Replace the rows of the measured products in a file; return the number of all rows."""
    kept: dict[str, tuple[str, str]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                kept[row["product"]] = row["configuration"], row["gain"]
    for name, better in found.items():
        kept.pop(name, None)
        if better is not None:
            kept[name] = better[0], f"{better[1]:.2f}"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((name, *kept[name]) for name in sorted(kept))
    return len(kept)
