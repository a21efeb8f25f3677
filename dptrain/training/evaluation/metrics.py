"""Metrics of the user: functions of the predictions and targets of all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.world import World
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError, shown
from dptrain.network.network import Network
from dptrain.network.outputs import sigmoid, softmax
from dptrain.training.evaluation.quality import Collector

Metrics = Mapping[str, Callable[[NDArray[Any], NDArray[Any]], float]]
"""Functions by name. Each is called on every rank with the predictions (n, F) of all samples, as
`Trainer.predict` returns them, and their targets: classes, int64 (n,), or values (n, F)."""

OWN_NAMES = (
    "loss", "accuracy", "top5_accuracy", "mean_f1", "auc", "mae", "rmse", "r2", "samples",
    "scored", "notes", "classes", "confusion", "unpredicted", "label_accuracy", "labels",
)  # fmt: skip
"""Names of results that every evaluation has."""


def check_metrics(metrics: Any) -> Metrics:
    """Return metrics, or raise `UserError` if they are no functions by name."""
    found = metrics or {}
    if not isinstance(found, Mapping) or not all(map(callable, found.values())):
        raise UserError(
            f"metrics is {shown(repr(metrics))}; expected functions by name, such as "
            "metrics={'error': lambda outputs, targets: ...}"
        )
    for name in found:
        if not (isinstance(name, str) and name.isidentifier()) or name in OWN_NAMES:
            raise UserError(
                f"the name of a metric is {shown(repr(name))}; expected letters, digits and _, and "
                f"none of {', '.join(OWN_NAMES)}"
            )
    return found


class MetricCollector(Collector):
    """Collects the predictions and targets of all samples for metrics.

    Args:
        metrics: functions by name, at least one.
        count: number of samples of all ranks.
        network: that predicts.
        preprocessing: of the model.
    """

    def __init__(
        self, metrics: Metrics, count: int, network: Network, preprocessing: Preprocessing
    ) -> None:
        self._kind, self._num_outputs = network.loss.targets, network.num_outputs
        super().__init__(
            count, self._num_outputs + (1 if self._kind == "classes" else self._num_outputs)
        )
        self._metrics, self._preprocessing = metrics, preprocessing

    def add(self, indices: NDArray[np.int64], outputs: NDArray[Any], targets: NDArray[Any]) -> None:
        if self._kind == "classes":
            outputs = softmax(outputs)
        elif self._kind == "binary":
            outputs = sigmoid(outputs)
        both = np.hstack([outputs, targets.reshape(len(outputs), -1)]).astype(np.float64)
        is_values = self._kind == "values"
        self._table[indices] = self._preprocessing.to_values(both) if is_values else both

    def result(self, world: World) -> dict[str, float | None]:
        """Return the metrics by name, None for one that is not finite; all ranks call this."""
        rows = self._rows(world)
        predictions, targets = np.hsplit(rows, [self._num_outputs])
        if self._kind == "classes":
            targets = targets[:, 0].astype(np.int64)
        return {
            name: _number(name, function(predictions, targets))
            for name, function in self._metrics.items()
        }


def _number(name: str, value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise UserError(f"metric {name} returned {shown(repr(value))}; expected a number") from None
    return found if math.isfinite(found) else None
