"""Prediction by all ranks into a CSV file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.data.inputs import RawInputs, open_inputs
from dptrain.data.loading.sharding import shard
from dptrain.data.loading.workers import read_by_workers
from dptrain.data.spec import parse_names
from dptrain.errors import UserError
from dptrain.files import write_whole
from dptrain.training.evaluation.evaluation import batches_of

if TYPE_CHECKING:
    from dptrain.training.evaluation.model import TrainedModel


def predict_to_file(
    model: TrainedModel,
    source: Path,
    output: Path,
    world: World,
    *,
    workers: int = 0,
    classes: str | None = None,
) -> int:
    """Write predictions for new samples to a CSV file, one line for each sample.

    The training data is not needed.

    Args:
        model: the trained model, on every rank.
        source: what `dptrain.data.inputs.open_inputs` reads.
        output: file to write; an existing file is not overwritten.
        world: the ranks; every rank calls this function. Each one predicts its shard, and rank 0
            writes.
        workers: processes of each rank that decode images; 0 decodes in the rank itself.
        classes: names of the labels in the source, see `dptrain.data.spec.parse_names`; None if
            it has names for them, or integers.

    Returns:
        Number of samples.

    Raises:
        UserError: the source cannot be read or does not match the model, or the output exists.
    """

    def open_source() -> RawInputs:
        names = None if classes is None else parse_names(classes, "--classes")
        return open_inputs(source, model.preprocessing, names, outputs=model.network.num_outputs)

    inputs = call_on_all_ranks(world, open_source)
    call_on_rank_zero(world, lambda: _refuse_existing(output))
    predictions = np.zeros((len(inputs.samples), model.network.num_outputs))
    mine = shard(len(predictions), world.rank, world.size)
    indices = np.arange(len(predictions), dtype=np.int64)[mine]
    with read_by_workers(inputs.samples, workers, model.network.input_shape) as samples:
        for chosen, x, _ in batches_of(model.replica, samples, indices):
            predictions[chosen] = model.preprocessing.to_values(model.replica.predict(x))
    # Every row was written by one rank and is zero on the others.
    world.all_reduce(predictions)
    call_on_rank_zero(world, lambda: _write_predictions(output, inputs, predictions, model))
    return len(predictions)


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise UserError(f"{output} exists already; choose another file, or move it away first")


def _write_predictions(
    output: Path, inputs: RawInputs, predictions: NDArray[np.float64], model: TrainedModel
) -> None:
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
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    targets = inputs.targets or [()] * len(predictions)
    width = len(targets[0])
    known = model.preprocessing.targets or range(width)
    columns = ["target"] if width == 1 else [f"target_{column}" for column in known]
    writer.writerow(["sample", *header, *columns])
    chosen = (
        [[]] * len(predictions)
        if classes is None
        else ([[name] for name in classes.predicted(predictions)])
    )
    for name, row, own, target in zip(inputs.names, predictions, chosen, targets, strict=True):
        writer.writerow([name, *own, *(f"{value:.6g}" for value in row), *target])
    write_whole(output, lines.getvalue(), "--output")
