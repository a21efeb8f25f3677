"""The files of ``dptrain evaluate --output``: metrics, and the confusion matrix or the values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptrain.errors import UserError
from dptrain.files import dump_json, write_whole, writing
from dptrain.report.elements.canvas import Plot
from dptrain.report.runs.quality_plots import confusion_plot, predicted_plot
from dptrain.training.evaluation.class_files import CONFUSION, confusion_text
from dptrain.training.evaluation.predicted_values import FILE as VALUES
from dptrain.training.evaluation.predicted_values import values_text
from dptrain.training.evaluation.quality import ClassQuality, LabelQuality, Quality

METRICS = "metrics.json"


def claim(folder: Path) -> None:
    """Create the directory of an evaluation.

    Raises:
        UserError: it has files, which are never overwritten, or it cannot be created.
    """
    with writing(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; choose another --output")


def write_evaluation(folder: Path, results: Mapping[str, Any], quality: Quality) -> None:
    """Write the results of an evaluation.

    Args:
        folder: from `claim`.
        results: from `evaluate_model`.
        quality: of the predictions; that of several labels is in ``metrics.json`` alone.

    Raises:
        UserError: a file cannot be written.
    """
    if not isinstance(quality, LabelQuality):
        drawn: Plot
        if isinstance(quality, ClassQuality):
            name, text, drawn = CONFUSION, confusion_text(quality), confusion_plot(quality)
        else:
            name, text, drawn = VALUES, values_text(quality), predicted_plot(quality)
        write_whole(folder / name, text, "--output")
        write_whole(folder / f"{drawn.name}.svg", drawn.svg, "--output")
    write_whole(folder / METRICS, dump_json(results, indent=2) + "\n", "--output")
