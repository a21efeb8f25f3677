"""Evaluation of a trained network by all ranks together, and prediction into a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.replica import Replica
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.data import Preprocessing, open_data
from dptrain.data.base import Dataset, Samples
from dptrain.data.inputs import UnlabelledInputs, open_inputs
from dptrain.data.sharding import shard
from dptrain.data.spec import absolute
from dptrain.errors import UserError
from dptrain.files import write_whole
from dptrain.network.network import Network
from dptrain.plan.plan import make_plan
from dptrain.training.checkpoints import Checkpoint, restore_replica
from dptrain.training.rundir import RunDirectory
from dptrain.training.settings import Settings
from dptrain.training.setup import (
    broadcast_flat,
    make_replica,
    open_backend,
    resolve,
)

EVALUATION_BATCH = 256
"""Samples in a batch: enough for full speed, and little memory on any machine."""


@dataclass(frozen=True)
class Score:
    """Quality of a network's predictions.

    Attributes:
        loss: mean over samples.
        accuracy: share of correct predictions; None if targets are values.
        samples: number of samples.
    """

    loss: float
    accuracy: float | None
    samples: int

    def __str__(self) -> str:
        if self.accuracy is None:
            return f"loss {self.loss:.4g}"
        return f"{self.accuracy:.1%}"


def batches_of(
    replica: Replica, samples: Samples, indices: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[Any]]]:
    """Yield samples in batches of at most the replica's batch size, in arrays that are reused."""
    network, size = replica.plan.network, replica.plan.batch_size
    classes = network.loss.targets == "classes"
    x = np.zeros((size, *network.input_shape), np.float32)
    y = np.zeros(size, np.int32) if classes else np.zeros((size, network.num_outputs), np.float32)
    for start in range(0, len(indices), size):
        chosen = indices[start : start + size]
        n = len(chosen)
        samples.read(chosen, x[:n], y[:n])
        yield chosen, x[:n], y[:n]


def score(replica: Replica, samples: Samples, world: World) -> Score:
    """Return the score of all samples; each rank evaluates its shard, all receive the result."""
    mine = shard(len(samples), world.rank, world.size)
    totals = np.zeros(2)
    for _, x, y in batches_of(replica, samples, np.arange(len(samples), dtype=np.int64)[mine]):
        loss, correct = replica.evaluate(x, y)
        totals += loss, correct
    world.all_reduce(totals)
    count = len(samples)
    has_labels = replica.plan.network.loss.targets != "values"
    accuracy = float(totals[1]) / count if has_labels else None
    return Score(float(totals[0]) / count, accuracy, count)


@dataclass(frozen=True)
class Trained:
    """A trained network that was restored for inference.

    Attributes:
        config: settings of its run.
        network: description.
        replica: has the trained parameters.
        preprocessing: saved with the parameters.
        step: of the checkpoint.
    """

    config: Settings
    network: Network
    replica: Replica
    preprocessing: Preprocessing
    step: int


def load_trained(run_dir: Path, world: World, step: int | None) -> Trained:
    """Restore the network of a run with the parameters of a checkpoint, on every rank.

    Args:
        run_dir: of a run; rank 0 reads it.
        world: the ranks.
        step: of the checkpoint; None: the newest complete one.

    Raises:
        UserError: the run or the checkpoint does not exist or is of another network; on every rank.
    """
    found = call_on_rank_zero(world, lambda: _read_run(run_dir, step))
    facts = None if found is None else (found[0], found[1].facts.get("preprocessing"))
    values, saved = world.broadcast_json(facts)
    config = call_on_all_ranks(
        world, lambda: Settings.from_values(values, str(run_dir)).with_recipe()
    )
    preprocessing = call_on_all_ranks(
        world, lambda: Preprocessing.from_dict(saved, f"the preprocessing saved in {run_dir}")
    )
    network = call_on_all_ranks(world, config.load_network)
    backend = open_backend(config, world)
    config = resolve(config, backend, world)
    plan = make_plan(
        network,
        backend,
        EVALUATION_BATCH,
        precision=str(config.precision),
        training=False,
        threads=int(config.threads or 1),
    )
    replica = make_replica(world, backend, plan, config.seed)
    taken = call_on_rank_zero(world, lambda: _restore(replica, found))
    broadcast_flat(world, replica, replica.flat_parameters)
    step = int(world.broadcast_json(taken))
    return Trained(config, network, replica, preprocessing, step)


def _restore(replica: Replica, found: tuple[dict[str, Any], Checkpoint] | None) -> int:
    assert found is not None, "only rank 0 calls this, and it has read the run"
    restore_replica(replica, found[1], parameters_only=True)
    return found[1].step


def _read_run(run_dir: Path, step: int | None) -> tuple[dict[str, Any], Checkpoint]:
    run = RunDirectory.open(run_dir)
    checkpoint = run.checkpoints.load(step)
    checkpoint.print_warning()
    return run.read_config(), checkpoint


def open_test_data(
    data: str | None,
    trained_on: str,
    network: Network,
    preprocessing: Preprocessing,
    *,
    seed: int,
    ranks_per_node: int = 1,
) -> tuple[Samples, str]:
    """Open the samples on which a trained network is evaluated.

    Other data than the training data is used as a whole if it has no split of its own.

    Args:
        data: spec; None: the data that the network was trained on.
        trained_on: spec of the training data with absolute paths.
        network: that was trained.
        preprocessing: saved with the network.
        seed: of the run.
        ranks_per_node: as for `open_data`.

    Returns:
        The samples, and a description of them such as "all 120 samples of folder:shapes".
    """
    own = data is None or absolute(data) == trained_on
    spec = trained_on if data is None else data
    dataset = open_data(
        spec,
        network,
        seed=seed,
        ranks_per_node=ranks_per_node,
        preprocessing=preprocessing,
        split=own,
    )
    return dataset.test, describe_scored(dataset, spec, whole=not own)


def describe_scored(dataset: Dataset, spec: str, *, whole: bool) -> str:
    """Return a description of the samples in `dataset.test`.

    Args:
        dataset: from `open_data`.
        spec: of the data set; its options are left out of the description.
        whole: True if the data set was opened with ``split=False``.
    """
    count, name = len(dataset.test), spec.partition("?")[0]
    if whole and not dataset.has_split:
        return f"all {count:,} samples of {name}"
    return f"the test split of {name}, {count:,} samples"


def evaluate(
    run_dir: Path, world: World, *, data: str | None = None, checkpoint: int | None = None
) -> dict[str, Any]:
    """Score a trained network on the test split of its data, or on other data.

    The data is preprocessed as the model's saved preprocessing requires.

    Args:
        run_dir: of the run.
        world: the ranks; every rank calls this.
        data: another data spec.
        checkpoint: step; None: the newest complete one.

    Returns:
        The same on every rank: network, data, step, samples, scored (a description of the samples),
        loss, and accuracy unless the network predicts values.

    Raises:
        UserError: the run, the checkpoint or the data cannot be read, or the data does not match
            the model.
    """
    trained = load_trained(run_dir, world, checkpoint)
    trained_on = str(trained.config.data)
    samples, scored = call_on_all_ranks(
        world,
        lambda: open_test_data(
            data,
            trained_on,
            trained.network,
            trained.preprocessing,
            seed=trained.config.seed,
            ranks_per_node=world.local_size,
        ),
    )
    result = score(trained.replica, samples, world)
    accuracy = {} if result.accuracy is None else {"accuracy": result.accuracy}
    return {
        "network": trained.network.name,
        "data": data or trained_on,
        "step": trained.step,
        "scored": scored,
        "samples": result.samples,
        "loss": result.loss,
        **accuracy,
    }


def predict(
    run_dir: Path, source: Path, output: Path, world: World, *, checkpoint: int | None = None
) -> int:
    """Write predictions for new samples to a CSV file, one line for each sample.

    The training data is not needed.

    Args:
        run_dir: of the run.
        source: what `dptrain.data.inputs.open_inputs` reads.
        output: file to write; an existing file is not overwritten.
        world: the ranks; each predicts its shard, rank 0 writes.
        checkpoint: step; None: the newest complete one.

    Returns:
        Number of samples.

    Raises:
        UserError: the run, the checkpoint or the source cannot be read, the source does not match
            the model, or the output exists.
    """
    trained = load_trained(run_dir, world, checkpoint)
    inputs = call_on_all_ranks(world, lambda: open_inputs(source, trained.preprocessing))
    call_on_rank_zero(world, lambda: _refuse_existing(output))
    predictions = np.zeros((len(inputs.samples), trained.network.num_outputs))
    mine = shard(len(predictions), world.rank, world.size)
    indices = np.arange(len(predictions), dtype=np.int64)[mine]
    for chosen, x, _ in batches_of(trained.replica, inputs.samples, indices):
        predictions[chosen] = trained.preprocessing.to_values(trained.replica.predict(x))
    # Every row was written by one rank and is zero on the others.
    world.all_reduce(predictions)
    call_on_rank_zero(world, lambda: _write_predictions(output, inputs, predictions, trained))
    return len(predictions)


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise UserError(f"{output} exists already; choose another file, or move it away first")


def _write_predictions(
    output: Path, inputs: UnlabelledInputs, predictions: NDArray[np.float64], trained: Trained
) -> None:
    """Write the columns sample, class and the probability of each class; or sample and values."""
    names = trained.preprocessing.output_names(trained.network)
    is_class = trained.network.loss.targets == "classes"
    header = ["class", *(f"probability_{name}" for name in names)] if is_class else names
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["sample", *header])
    for name, row in zip(inputs.names, predictions, strict=True):
        chosen = [names[int(row.argmax())]] if is_class else []
        writer.writerow([name, *chosen, *(f"{value:.6g}" for value in row)])
    write_whole(output, lines.getvalue())
