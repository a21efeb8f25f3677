"""Prediction by all ranks: lines for people, and a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.data.inputs import RawInputs, open_inputs
from dptrain.data.loading.sharding import shard
from dptrain.data.loading.workers import read_by_workers
from dptrain.data.preprocessing.names import printable
from dptrain.data.spec import parse_names
from dptrain.errors import UserError
from dptrain.files import csv_of_rows, write_whole
from dptrain.training.evaluation.evaluation import batches_of

if TYPE_CHECKING:
    from dptrain.training.evaluation.model import TrainedModel

MOST_SHOWN = 3
"""Largest number of classes of a sample in the lines for people."""
LEAST_SHOWN = 0.0005
"""Least probability of a class in these lines, except for the most probable one."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for samples that were opened together.

    Attributes:
        names: of the samples: a file, or the number of a row.
        values: float64 (n, F): probabilities, or predicted values in the unit of the data.
        targets: texts for each sample; empty texts, or no texts, if they are not known.
    """

    names: Sequence[str]
    values: NDArray[np.float64]
    targets: Sequence[Sequence[str]]


def predict_all(
    model: TrainedModel,
    sources: Sequence[Path],
    world: World,
    *,
    workers: int = 0,
    classes: str | None = None,
) -> Predictions:
    """Predict new samples. The training data is not needed.

    Args:
        model: the trained model, on every rank.
        sources: what `dptrain.data.inputs.open_inputs` reads; of several, the names of samples
            begin with the file or folder.
        world: the ranks; every rank calls this function and predicts its shard.
        workers: processes of each rank that decode images; 0 decodes in the rank itself.
        classes: names of the labels in the sources, see `dptrain.data.spec.parse_names`; None if
            they have names for them, or integers.

    Raises:
        UserError: a source cannot be read or does not match the model.
    """

    def open_sources() -> list[RawInputs]:
        names = None if classes is None else parse_names(classes, "--classes")
        outputs = model.network.num_outputs
        return [open_inputs(path, model.preprocessing, names, outputs=outputs) for path in sources]

    opened = call_on_all_ranks(world, open_sources)
    values = [_predict(model, inputs, world, workers) for inputs in opened]
    names: list[str] = []
    for path, inputs in zip(sources, opened, strict=True):
        prefix = "" if len(sources) == 1 else printable(str(path))
        names += [_name(prefix, name) for name in inputs.names]
    known = [inputs.targets or [()] * len(inputs.names) for inputs in opened]
    width = max(len(row) for rows in known for row in rows[:1])
    targets = [row or ("",) * width for rows in known for row in rows]
    return Predictions(names, np.concatenate(values), targets)


def _name(source: str, name: str) -> str:
    """Return the name of a sample of one of several sources.

    Example:
        >>> _name("a/x.png", "x.png"), _name("a", "x.png"), _name("x.npy", "0"), _name("", "0")
        ('a/x.png', 'a/x.png', 'x.npy/0', '0')
    """
    if not source:
        return name
    return source if Path(source).name == name else f"{source}/{name}"


def _predict(
    model: TrainedModel, inputs: RawInputs, world: World, workers: int
) -> NDArray[np.float64]:
    predictions = np.zeros((len(inputs.samples), model.network.num_outputs))
    mine = shard(len(predictions), world.rank, world.size)
    indices = np.arange(len(predictions), dtype=np.int64)[mine]
    with read_by_workers(inputs.samples, workers, model.network.input_shape) as samples:
        for chosen, x, _ in batches_of(model.replica, samples, indices):
            predictions[chosen] = model.preprocessing.to_values(model.replica.predict(x))
    # Every row was written by one rank and is zero on the others.
    world.all_reduce(predictions)
    return predictions


def prediction_lines(predictions: Predictions, model: TrainedModel) -> Iterator[str]:
    """Yield a line for each sample: the most probable classes, or the predicted values."""
    names, values = model.preprocessing.output_names(model.network), predictions.values
    classes = model.preprocessing.class_list(model.network)
    if classes is not None and len(names) == 1:
        names, values = tuple(classes.names), np.hstack([1 - values, values])
    is_value = model.network.loss.targets == "values"
    width = max(map(len, predictions.names), default=0)
    for name, row, target in zip(predictions.names, values, predictions.targets, strict=True):
        if is_value:
            shown = [f"{label} {value:.6g}" for label, value in zip(names, row, strict=True)]
        else:
            order = np.argsort(-row, kind="stable")[:MOST_SHOWN].tolist()
            chosen = [i for i in order if row[i] >= LEAST_SHOWN or i == order[0]]
            shown = [f"{names[i]} {row[i]:.1%}" for i in chosen]
        if is_value:
            target = [f"{float(value):.6g}" for value in target if value]
        elif len(target) > 1 and any(target):
            target = [label for label, value in zip(names, target, strict=True) if float(value)]
            target = target or ["none"]
        known = [f"(target {', '.join(target)})"] if any(target) else []
        yield "  ".join([f"{name:{width}}", *shown, *known])


def refuse_existing(output: Path) -> None:
    """Raise `UserError` if a file exists that predictions would replace."""
    if output.exists():
        raise UserError(f"{output} exists already; choose another file, or move it away first")


def predict_to_file(
    model: TrainedModel,
    sources: Sequence[Path],
    output: Path,
    world: World,
    *,
    workers: int = 0,
    classes: str | None = None,
) -> int:
    """Write predictions for new samples to a CSV file, one line for each sample.

    Args:
        model: as of `predict_all`, like `sources`, `world`, `workers` and `classes`.
        output: file to write, by rank 0; an existing file is not overwritten.

    Returns:
        Number of samples.

    Raises:
        UserError: a source cannot be read or does not match the model, or the output exists.
    """
    call_on_rank_zero(world, lambda: refuse_existing(output))
    found = predict_all(model, sources, world, workers=workers, classes=classes)
    call_on_rank_zero(world, lambda: _write_predictions(output, found, model))
    return len(found.names)


def _write_predictions(output: Path, found: Predictions, model: TrainedModel) -> None:
    """Write the columns sample, class and the probabilities, or sample and values; and the targets
    that are known. One sigmoid output is the probability of the second class. The class is empty if
    the outputs contain NaN.
    """
    names, kind = model.preprocessing.output_names(model.network), model.network.loss.targets
    classes = model.preprocessing.class_list(model.network)
    if classes is not None and len(names) == 1:
        names = classes.names[1:]
    header = [*names] if kind == "values" else [f"probability_{name}" for name in names]
    header = header if classes is None else ["class", *header]
    width = max(map(len, found.targets), default=0)
    known = model.preprocessing.targets or range(width)
    columns = ["target"] if width == 1 else [f"target_{column}" for column in known]
    chosen = (
        [[]] * len(found.names)
        if classes is None
        else ([[name] for name in classes.predicted(found.values)])
    )
    values = [[f"{value:.6g}" for value in row] for row in found.values]
    rows = zip(found.names, chosen, values, found.targets, strict=True)
    lines = [[name, *own, *row, *target] for name, own, row, target in rows]
    write_whole(output, csv_of_rows([["sample", *header, *columns], *lines]), "--output")
