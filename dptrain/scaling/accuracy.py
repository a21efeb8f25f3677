"""Time to accuracy of weak scaling, whose minibatch grows: equal steps are not equal progress.

With the setting `until_accuracy`, each launch of a weak point also trains until an evaluation on
the validation data has that accuracy. The launches of a round start from the same seed at every
point, and other rounds from other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.files import parse_json
from dptrain.measure.statistics import Estimate
from dptrain.scaling.pairing import mean_ratio
from dptrain.scaling.study import UNITY, TimeToAccuracy

if TYPE_CHECKING:
    from dptrain.scaling.points import Measured

TRAINING, SUMMARY = "training", "run/summary.json"
"""Folder of the training in the folder of a launch, and the results in it."""

EVALUATED_EVERY = 1
"""Epochs between two evaluations; studies use the default of training."""


@dataclass(frozen=True)
class Training:
    """The training of one launch until the requested accuracy; see ``time_to_accuracy`` in
    ``summary.json``.

    Attributes:
        requested: the accuracy.
        epochs, samples: passes over the training data and samples until it was reached; None if it
            was not.
        time_s: time of these steps in seconds, or None.
    """

    requested: float
    epochs: float | None
    samples: int | None
    time_s: float | None

    @property
    def earliest(self) -> float:
        """Share of the epochs until the evaluation before: the accuracy was reached after it."""
        return 0.0 if not self.epochs else max(1 - EVALUATED_EVERY / self.epochs, 0.0)


def read_training(folder: Path) -> Training | None:
    """Return the training of the launch in `folder`; None if there was none.

    Raises:
        UserError: the summary of the training cannot be read.
    """
    path = folder / TRAINING / SUMMARY
    if not path.is_file():
        return None
    try:
        found = parse_json(path.read_bytes())["time_to_accuracy"]
        return Training(
            float(found["requested"]), found["epochs"], found["samples"], found["time_s"]
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"cannot read time_to_accuracy in {path}: {error!r}; delete the folder of this launch "
            "and continue the study"
        ) from None


def find_time_to_accuracy(
    launches: Sequence[Measured], base: Sequence[Measured]
) -> TimeToAccuracy | None:
    """Return the time to accuracy of a point; None if its launches did not train.

    Args:
        launches: of the point.
        base: of the base point.
    """
    trainings = [m.training for m in launches if m.training is not None]
    if not trainings:
        return None
    reached = [training for training in trainings if training.time_s is not None]
    known = len(reached) == len(trainings)
    return TimeToAccuracy(
        accuracy=trainings[0].requested,
        trainings=len(trainings),
        reached=len(reached),
        epochs=_mean(reached, "epochs") if known else None,
        samples=_mean(reached, "samples") if known else None,
        time_s=_mean(reached, "time_s") if known else None,
        speed_up=_speed_up(launches, base) if known else None,
    )


def _mean(trainings: Sequence[Training], name: str) -> Estimate:
    """Return the geometric mean over launches of an attribute.

    The accuracy was reached between the last evaluation without it and the first with it. So the
    lower limit of the 95% interval is that of the values at the former, and the upper limit that of
    the values at the latter, both by Student's t over logarithms.
    """
    last = np.array([getattr(training, name) for training in trainings], float)
    first = last * [training.earliest for training in trainings]
    return _between(last, first, last)


def _speed_up(launches: Sequence[Measured], base: Sequence[Measured]) -> Estimate | None:
    """Return time of the base / time of the point in the same round; None if one is not known."""
    if launches is base:
        return UNITY
    of_base = _by_round(base)
    pairs = [(of_base[name], own) for name, own in _by_round(launches).items() if name in of_base]
    if not pairs or any(one.time_s is None for one in of_base.values()):
        return None
    ratios = np.array([(one.time_s or 0.0) / (own.time_s or math.inf) for one, own in pairs])
    least = ratios * [one.earliest for one, _ in pairs]
    with np.errstate(divide="ignore"):
        most = ratios / [own.earliest for _, own in pairs]
    return _between(ratios, least, most)


def _between(
    values: NDArray[np.float64], least: NDArray[np.float64], most: NDArray[np.float64]
) -> Estimate:
    """Return the geometric mean of values that are only known to lie between limits."""
    found = mean_ratio(values)
    low = mean_ratio(least).low if least.all() else 0.0
    high = mean_ratio(most).high if np.isfinite(most).all() else math.inf
    return Estimate(found.value, low, high, found.n)


def _by_round(launches: Sequence[Measured]) -> dict[str, Training]:
    """Return the trainings by round."""
    return {m.round: m.training for m in launches if m.round and m.training is not None}
