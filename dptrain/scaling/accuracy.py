"""Time to accuracy of weak scaling, whose minibatch grows: equal steps are not equal progress.

With the setting `until_accuracy`, each launch of a weak point also trains until an evaluation on
the test data has that accuracy. The launches of a round start from the same seed at every point,
and other rounds from other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.errors import UserError
from dptrain.files import parse_json
from dptrain.measure.statistics import Estimate, median_of_launches, ratio_of_launches
from dptrain.scaling.pairing import mean_ratio, pairs
from dptrain.scaling.study import TimeToAccuracy

if TYPE_CHECKING:
    from dptrain.scaling.points import Measured

TRAINING, SUMMARY = "training", "run/summary.json"
"""Folder of the training in the folder of a launch, and the results in it."""


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
    times, of_base = _times(launches), _times(base)
    reached = [training for training in trainings if training.time_s is not None]
    known = len(reached) == len(trainings)
    speed_up = None
    if known and of_base and all(m.training is None or m.training.time_s for m in base):
        ratios = pairs(of_base, times)
        independent = ratio_of_launches(list(of_base.values()), list(times.values()))
        speed_up = independent if ratios is None else mean_ratio(ratios)
    return TimeToAccuracy(
        accuracy=trainings[0].requested,
        trainings=len(trainings),
        reached=len(reached),
        epochs=_median([t.epochs for t in reached]) if known else None,
        samples=_median([t.samples for t in reached]) if known else None,
        time_s=_median([t.time_s for t in reached]) if known else None,
        speed_up=speed_up,
    )


def _times(launches: Sequence[Measured]) -> dict[str, float]:
    """Return the time to accuracy in s of each launch that reached it, by round or folder."""
    return {
        m.round or m.folder: m.training.time_s
        for m in launches
        if m.training is not None and m.training.time_s is not None
    }


def _median(values: Sequence[float | None]) -> Estimate:
    return median_of_launches([value for value in values if value is not None])
