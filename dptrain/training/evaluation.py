"""Loss and accuracy on a split, by all ranks together; predictions into a file."""

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
from dptrain.data import open_data
from dptrain.data.base import Samples
from dptrain.data.inputs import Inputs, open_inputs
from dptrain.data.sharding import shard
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
"""Samples at a time: large enough for full speed, small enough for any machine."""


@dataclass(frozen=True)
class Score:
    """What a network achieves on a split.

    Attributes:
        loss: mean over samples.
        accuracy: share of correct answers; None where targets are values.
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
    """Read `indices` in pieces of at most the replica's batch size; the arrays are reused."""
    network, room = replica.plan.network, replica.plan.batch_size
    classes = network.loss.targets == "classes"
    x = np.zeros((room, *network.input_shape), np.float32)
    y = np.zeros(room, np.int32) if classes else np.zeros((room, network.num_outputs), np.float32)
    for start in range(0, len(indices), room):
        chosen = indices[start : start + room]
        n = len(chosen)
        samples.read(chosen, x[:n], y[:n])
        yield chosen, x[:n], y[:n]


def score(replica: Replica, samples: Samples, world: World) -> Score:
    """Evaluate every sample once, a share on each rank; all ranks get the same answer."""
    mine = shard(len(samples), world.rank, world.size)
    totals = np.zeros(2)
    for _, x, y in batches_of(replica, samples, np.arange(len(samples), dtype=np.int64)[mine]):
        loss, correct = replica.evaluate(x, y)
        totals += loss, correct
    world.all_reduce(totals)
    count = len(samples)
    has_answers = replica.plan.network.loss.targets != "values"
    accuracy = float(totals[1]) / count if has_answers else None
    return Score(float(totals[0]) / count, accuracy, count)


@dataclass(frozen=True)
class Trained:
    """A trained network brought back for inference."""

    config: Settings
    network: Network
    replica: Replica
    step: int


def load_trained(run_dir: Path, world: World, step: int | None) -> Trained:
    """Rebuild the network of a run with the parameters of a checkpoint, on every rank.

    Args:
        run_dir: of a run; rank 0 reads it.
        world: the ranks.
        step: of the checkpoint; the newest whole one where left out.

    Raises:
        UserError: no such run or checkpoint, or one of another network; on every rank.
    """
    found = call_on_rank_zero(world, lambda: _read_run(run_dir, step))
    values = world.broadcast_json(None if found is None else found[0])
    config = call_on_all_ranks(
        world, lambda: Settings.from_values(values, str(run_dir)).with_recipe()
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
    return Trained(config, network, replica, int(world.broadcast_json(taken)))


def _restore(replica: Replica, found: tuple[dict[str, Any], Checkpoint] | None) -> int:
    assert found is not None, "rank 0 has read the run"
    restore_replica(replica, found[1], parameters_only=True)
    return found[1].step


def _read_run(run_dir: Path, step: int | None) -> tuple[dict[str, Any], Checkpoint]:
    run = RunDirectory.open(run_dir)
    return run.read_config(), run.checkpoints.load(step)


def evaluate(
    run_dir: Path, world: World, *, data: str | None = None, checkpoint: int | None = None
) -> dict[str, Any]:
    """Score a trained network on the test split of its data, or of other data.

    Args:
        run_dir: of the run.
        world: the ranks; every rank calls this.
        data: another data spec.
        checkpoint: step; the newest whole one where left out.

    Returns:
        Facts to print, the same on every rank: step, samples, test_loss, test_accuracy.
    """
    trained = load_trained(run_dir, world, checkpoint)
    spec = data or str(trained.config.data)
    dataset = call_on_all_ranks(
        world, lambda: open_data(spec, trained.network, seed=trained.config.seed)
    )
    result = score(trained.replica, dataset.test, world)
    return {
        "network": trained.network.name,
        "data": spec,
        "step": trained.step,
        "samples": result.samples,
        "test_loss": result.loss,
        "test_accuracy": result.accuracy,
    }


def predict(
    run_dir: Path, source: Path, output: Path, world: World, *, checkpoint: int | None = None
) -> int:
    """Write what a trained network says about new samples to a CSV file, a line a sample.

    Args:
        run_dir: of the run.
        source: what `dptrain.data.inputs.open_inputs` reads.
        output: file to write; one that is there is not overwritten.
        world: the ranks; they share the samples, rank 0 writes.
        checkpoint: step; the newest whole one where left out.

    Returns:
        Number of samples.
    """
    trained = load_trained(run_dir, world, checkpoint)
    spec, seed = str(trained.config.data), trained.config.seed
    inputs = call_on_all_ranks(world, lambda: open_inputs(source, trained.network, spec, seed=seed))
    call_on_rank_zero(world, lambda: _refuse_existing(output))
    answers = np.zeros((len(inputs.samples), trained.network.num_outputs))
    mine = shard(len(answers), world.rank, world.size)
    indices = np.arange(len(answers), dtype=np.int64)[mine]
    for chosen, x, _ in batches_of(trained.replica, inputs.samples, indices):
        answers[chosen] = trained.replica.predict(x)
    # Every row was written by one rank and is zero on the others.
    world.all_reduce(answers)
    call_on_rank_zero(world, lambda: _write_answers(output, inputs, answers, trained.network))
    return len(answers)


def _refuse_existing(output: Path) -> None:
    if output.exists():
        raise UserError(f"{output} exists already; choose another file, or move it away first")


def _write_answers(
    output: Path, inputs: Inputs, answers: NDArray[np.float64], network: Network
) -> None:
    """Columns: sample, then the answer and its probability and those of all classes, or values."""
    width = network.num_outputs
    classes = inputs.classes or tuple(str(i) for i in range(width))
    names = [f"probability_{name}" for name in classes]
    if network.loss.targets != "classes":
        names = ["value"] if width == 1 else [f"value_{i}" for i in range(width)]
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    is_class = network.loss.targets == "classes"
    writer.writerow(["sample", *(["class"] if is_class else []), *names])
    for name, row in zip(inputs.names, answers, strict=True):
        chosen = [classes[int(row.argmax())]] if is_class else []
        writer.writerow([name, *chosen, *(f"{value:.6g}" for value in row)])
    write_whole(output, lines.getvalue())
