"""What a data set contains, and whether every sample of it can be trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.base import Dataset, Samples
from dptrain.data.fingerprint import data_fingerprint
from dptrain.data.image_files.decoder import RuleCounts
from dptrain.data.sources.folder import SPLITS, ImageSamples

BATCH = 256
"""Samples that are read at once."""
MOST_READ = 4096
"""Samples of a split from which `describe` computes statistics."""


@dataclass
class SplitReport:
    """What was found in a split.

    Attributes:
        name: ``training``, ``test`` or ``validation``.
        samples: number of samples.
        read: number of samples that were read.
        low, high, mean, deviation: of all input numbers that were read, after preprocessing.
        classes: samples of each class among those that were read; empty for values.
        target_low, target_high: of values; None for classes.
        digests: one for each sample that was read, if duplicates are looked for.
    """

    name: str
    samples: int
    read: int = 0
    low: float = np.inf
    high: float = -np.inf
    mean: float = 0.0
    deviation: float = 0.0
    classes: dict[int, int] = field(default_factory=dict)
    target_low: float | None = None
    target_high: float | None = None
    digests: list[bytes] = field(default_factory=list)


def inspect_split(
    dataset: Dataset,
    name: str,
    samples: Samples,
    *,
    most: int | None = MOST_READ,
    with_digests: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> SplitReport:
    """Read samples of a split and return what they contain.

    Args:
        dataset: to which the split belongs.
        name: of the split.
        samples: the split.
        most: largest number of samples that are read, evenly spaced; None for all.
        with_digests: compute a digest of each sample.
        progress: called with the number of samples that were read.

    Raises:
        UserError: a sample cannot be read; the message names it.
    """
    report, total, squares, numbers = SplitReport(name, len(samples)), 0.0, 0.0, 0
    for x, y in _batches(dataset, samples, most):
        report.read += len(x)
        _add_targets(report, dataset, y)
        if x.size:
            report.low, report.high = min(report.low, x.min()), max(report.high, x.max())
        total += float(x.sum(dtype=np.float64))
        squares += float(np.square(x, dtype=np.float64).sum())
        numbers += x.size
        if with_digests:
            report.digests += [hashlib.sha256(image.tobytes()).digest() for image in x]
        progress(len(x))
    if numbers:
        report.mean = total / numbers
        report.deviation = max(squares / numbers - report.mean**2, 0.0) ** 0.5
    return report


def _batches(
    dataset: Dataset, samples: Samples, most: int | None
) -> Iterator[tuple[NDArray[np.float32], NDArray[Any]]]:
    count = len(samples)
    read = count if most is None else min(count, most)
    indices = (np.arange(read, dtype=np.int64) * count) // max(read, 1)
    kind = np.int32 if dataset.targets == "classes" else np.float32
    for first in range(0, read, BATCH):
        part = indices[first : first + BATCH]
        x = np.empty((len(part), *dataset.input_shape), np.float32)
        y = np.empty((len(part), *dataset.target_shape), kind)
        samples.read(part, x, y)
        yield x, y


def _add_targets(report: SplitReport, dataset: Dataset, y: NDArray[Any]) -> None:
    if dataset.class_list is not None:
        for label, count in zip(*np.unique(y, return_counts=True), strict=True):
            report.classes[int(label)] = report.classes.get(int(label), 0) + int(count)
    elif y.size:
        values = dataset.preprocessing.to_values(y)
        low, high = float(values.min()), float(values.max())
        report.target_low = low if report.target_low is None else min(report.target_low, low)
        report.target_high = high if report.target_high is None else max(report.target_high, high)


def splits(dataset: Dataset) -> dict[str, Samples]:
    """Return the splits of a data set by name."""
    return dict(zip(SPLITS, dataset.splits, strict=False))


def describe_data(dataset: Dataset) -> dict[str, Any]:
    """Return a description of a data set as plain values; some thousand samples are read."""
    reports = [inspect_split(dataset, name, part) for name, part in splits(dataset).items()]
    facts = data_fingerprint(dataset)
    return {
        "name": dataset.name,
        "description": dataset.description,
        "notes": list(dataset.notes),
        "stored_shape": facts["shape"],
        "stored_type": facts["dtype"],
        "input_shape": list(dataset.input_shape),
        "preprocessing": str(dataset.preprocessing),
        "targets": dataset.targets,
        "classes": dataset.classes,
        "digest": facts["content"],
        "splits": [_plain(report, dataset) for report in reports],
    }


def _plain(report: SplitReport, dataset: Dataset) -> dict[str, Any]:
    classes = dataset.class_list
    found = sorted(report.classes.items()) if classes is not None else ()
    counts = {classes.name(label): count for label, count in found} if classes else {}
    return {
        "name": report.name,
        "samples": report.samples,
        "read": report.read,
        "inputs": {
            "low": float(report.low),
            "high": float(report.high),
            "mean": report.mean,
            "deviation": report.deviation,
        },
        "classes": counts,
        "targets": None if report.target_low is None else [report.target_low, report.target_high],
    }


def find_problems(
    dataset: Dataset, progress: Callable[[int], None] = lambda count: None
) -> list[str]:
    """Read all samples; return a line for each problem.

    Problems are classes without training samples, inputs that are all equal, and test samples that
    are also training samples.

    Raises:
        UserError: a sample cannot be read or has numbers that are not finite; the message names it.
    """
    reports = [
        inspect_split(dataset, name, part, most=None, with_digests=True, progress=progress)
        for name, part in splits(dataset).items()
    ]
    problems = []
    for report in reports:
        if report.read and report.low == report.high:
            problems.append(f"all inputs of the {report.name} samples are {report.low:g}")
    problems += _missing_classes(dataset, reports[0])
    known = set(reports[0].digests)
    repeated = [i for i, digest in enumerate(reports[1].digests) if digest in known]
    if repeated:
        problems.append(
            f"{len(repeated):,} of {reports[1].samples:,} test samples are also training samples, "
            f"the first is test sample {repeated[0]}"
        )
    return problems


def counting_rules(dataset: Dataset) -> tuple[Dataset, RuleCounts]:
    """Return the data set, and what will count the rules by which its image files are decoded."""
    counts = RuleCounts()
    parts = [
        replace(part, counts=counts) if isinstance(part, ImageSamples) else part
        for part in dataset.splits
    ]
    return dataset.with_splits(parts), counts


def _missing_classes(dataset: Dataset, training: SplitReport) -> list[str]:
    classes = dataset.class_list
    names = () if classes is None else classes.names
    missing = [name for label, name in enumerate(names) if not training.classes.get(label)]
    return [f"no training sample has the class {', '.join(missing)}"] if missing else []
