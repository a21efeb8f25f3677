"""What limits training: the part that takes most of the time, and which settings reduce it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from dptrain.data.base import Dataset
from dptrain.measure.input_times import InputCost
from dptrain.measure.profile.profile import StepParts
from dptrain.runs.settings import CHECKPOINT_SECONDS
from dptrain.training.data_settings import AugmentationSettings
from dptrain.training.spec import JobSpec

NAMES = {
    "compute": "computation",
    "transfer": "communication",
    "imbalance": "waiting for other ranks",
    "without_core": "a lack of cores",
    "data_wait": "waiting for data",
    "checkpoint": "writing checkpoints",
    "evaluation": "evaluation",
    "other": "the time between the stages of a step",
}
"""What a run spends its time on, by the fields of `Parts`."""

ACCEPTABLE = 0.1
"""Share of the time that checkpoints or evaluations may take according to the advice."""
MOST_SHARE = 0.99
"""Largest share of checkpoints for which the advice is computed."""


@dataclass(frozen=True)
class TrainingLimit:
    """The part that takes most of the time of training.

    Attributes:
        part: a field of `Parts`.
        share: its share of all steps, with checkpoints and evaluations.
        advice: what reduces it; empty if nothing is known to.
    """

    part: str
    share: float
    advice: str = ""

    def __str__(self) -> str:
        """Return one line for people."""
        line = f"training was limited by {NAMES[self.part]}: {self.share:.0%} of the time"
        return f"{line}; {self.advice}" if self.advice else line

    def to_dict(self) -> dict[str, Any]:
        """Return the values for ``summary.json``."""
        return {"part": self.part, "share": self.share, "text": str(self)}


def training_limit(
    parts: StepParts, spec: JobSpec, data: Dataset, times: InputCost | None
) -> TrainingLimit | None:
    """Return what limits training; None if no time was measured.

    Args:
        parts: where the time goes.
        spec, data: the settings and the data of the job.
        times: what input takes; None if there were few steps.
    """
    found, total = parts.all_steps.known, parts.all_steps.total
    part = max(found, key=lambda name: float(found[name]))
    if not found[part]:
        return None
    longest_ms, share = found[part], found[part] / total
    advice: dict[str, Callable[[], str]] = {
        "compute": lambda: _copy_advice(longest_ms, times),
        "transfer": lambda: (
            "increase --batch-size or use fewer ranks; `dptrain profile --losses` "
            "measures the causes"
        ),
        "imbalance": lambda: _waiting_advice(parts.load_imbalance),
        "without_core": lambda: (
            "end other programs on these nodes, or use fewer ranks and threads than cores"
        ),
        "data_wait": lambda: _input_advice(longest_ms, spec, data, times),
        "checkpoint": lambda: _checkpoint_advice(share, spec),
        "evaluation": lambda: _evaluation_advice(share, spec, data),
        "other": lambda: _other_advice(times),
    }
    return TrainingLimit(part, share, advice[part]())


def _copy_advice(compute_ms: float, times: InputCost | None) -> str:
    if times is None or 2 * times.copy_ms < compute_ms:
        return ""
    return f"copying the minibatch to the network's input is {times.copy_ms / compute_ms:.0%} of it"


def _waiting_advice(load_imbalance: float) -> str:
    if load_imbalance < 0.5:
        return (
            "in each step another rank is late, so look for other programs on these nodes and for "
            "fewer cores than threads"
        )
    return "the same ranks are late; --balance measured assigns them fewer samples"


def _input_advice(wait_ms: float, spec: JobSpec, data: Dataset, times: InputCost | None) -> str:
    """Return what makes input faster, by the part of input that takes longest."""
    if times is None:
        return ""
    if 2 * times.wait_ms < wait_ms:
        return "most of it is for the first minibatch, so a longer run waits less"
    detail = (
        f"a minibatch takes {times.reading_ms:.3g} ms to read and {times.assembling_ms:.3g} ms to "
        "assemble"
    )
    if times.copies_all_the_time:
        return f"copying a minibatch to the device takes {times.early_copy_ms:.3g} ms"
    if times.part == "reading" and data.train.decodes:
        return f"{detail}; use --workers, or convert the data with `dptrain data convert`"
    changes = [each.name for each in fields(AugmentationSettings) if getattr(spec, each.name)]
    used = [f"--{name.replace('_', '-')}" for name in changes if name != "randaugment_magnitude"]
    if times.part == "assembling" and used:
        return f"{detail}; {', '.join(used)} take part of it"
    return detail


def _other_advice(times: InputCost | None) -> str:
    if times is not None and times.copies_all_the_time:
        return f"copying a minibatch to the device takes {times.early_copy_ms:.3g} ms"
    return "increase --batch-size, so that there are fewer steps"


def _checkpoint_advice(share: float, spec: JobSpec) -> str:
    """Return the time between checkpoints that reduces their share to `ACCEPTABLE`."""
    seconds = max(spec.checkpoint_seconds, CHECKPOINT_SECONDS)
    if spec.checkpoint_seconds:
        seconds *= _reduction(min(share, MOST_SHARE))
    return f"--checkpoint-seconds {math.ceil(seconds)} writes fewer"


def _evaluation_advice(share: float, spec: JobSpec, data: Dataset) -> str:
    flags = " ".join(_evaluations(share, spec, data))
    return f"{flags} evaluates less often" if flags else "the run is short compared with one"


def _evaluations(share: float, spec: JobSpec, data: Dataset) -> Iterable[str]:
    """Yield the flag that makes evaluations on validation data rarer, if there are several."""
    if data.validation is None or not spec.evaluate_every:
        return
    every = _rarer(spec.evaluate_every, share, math.ceil(spec.steps / spec.epoch_steps))
    if every > spec.evaluate_every:
        yield f"--evaluate-every {every}"


def _rarer(every: int, share: float, most: int) -> int:
    """Return a multiple of an interval that reduces `share` to `ACCEPTABLE`; at most `most`.

    Example:
        >>> _rarer(10, 0.5, 1000), _rarer(10, 0.05, 1000), _rarer(10, 1.0, 1000)
        (90, 10, 1000)
    """
    if share == 1:
        return max(every, most)
    return max(min(every * math.ceil(round(_reduction(share), 6)), most), every)


def _reduction(share: float) -> float:
    """Return by what factor a part must become rarer so that its share is `ACCEPTABLE`."""
    return share / (1 - share) * (1 - ACCEPTABLE) / ACCEPTABLE
