"""A trained network that predicts on raw inputs: `dptrain.load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.arguments import named_arguments
from dptrain.attributes import Sealed
from dptrain.backends.base import Backend
from dptrain.backends.replica import Replica
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError
from dptrain.network.files import network_from_dict
from dptrain.network.network import Network
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import MicroShards
from dptrain.training.evaluation.evaluation import evaluate_model
from dptrain.training.persistence.checkpoints import CheckpointFacts, restore_replica
from dptrain.training.persistence.persistence import load_checkpoint
from dptrain.training.persistence.weights import check_weights, load_weights, save_weights
from dptrain.training.resources import (
    broadcast_flat,
    broadcast_statistics,
    compile_kernels,
    compute_threads,
    open_backend,
)
from dptrain.training.setting_names import resolved_name
from dptrain.training.settings import GivenSettings

INFERENCE_BATCH = 256
"""Samples that are computed at a time: enough for full speed, and little memory."""


INSTEAD_OF_METHODS = {
    "predict_proba": "predict(x) returns the probabilities of the classes",
    "score": "evaluate((x, y)) returns the accuracy, or R² of values, and other results",
    "decision_function": "predict(x) returns the probabilities of the classes",
    "state_dict": "parameters and statistics have the arrays by name",
}
"""Methods of scikit-learn and PyTorch, and what to call instead."""


class TrainedModel(Sealed):
    """A network with trained parameters and the preprocessing of its training data.

    Attributes are read-only. Several threads may call `predict`; one call waits for the other.

    Attributes:
        network: the network.
        preprocessing: how raw samples become inputs of the network.
        step: number of updates that made the parameters.
        facts: what the checkpoint records about its run.
        warning: one line if damaged newer checkpoints were skipped, else None.
        replica: the network in memory.
    """

    _instead_of: ClassVar[Mapping[str, str]] = {
        **INSTEAD_OF_METHODS,
        "fit": "train it further with Trainer(network, data, weights=RUN_DIR)",
    }
    _instead_of_pickle = "load it again with dptrain.load(PATH), also in another process"

    def __init__(
        self,
        network: Network,
        preprocessing: Preprocessing,
        replica: Replica,
        facts: CheckpointFacts,
        *,
        step: int,
        warning: str | None = None,
        world: World | None = None,
    ) -> None:
        self.network, self.preprocessing, self.replica = network, preprocessing, replica
        self.facts, self.step, self.warning = facts, step, warning
        self._world = world or World.single()
        self.seal()

    def _advice(self, name: str, value: Any) -> str | None:
        if name in ("parameters", "statistics"):
            return f"assign single arrays: model.{name}['NAME'] = array"
        named, advice = resolved_name(name)
        if named is not None:
            return f"a trained model has no settings; '{named}' is one of Trainer"
        return advice

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of the outputs; None for a regression."""
        return self.preprocessing.classes

    @property
    def parameters(self) -> Mapping[str, NDArray[Any]]:
        """Parameters by name, for example ``conv1.weight`` (K, C, R, S).

        Reading returns a read-only copy; ``model.parameters[name] = array`` replaces one.
        """
        return self.replica.parameters

    @property
    def statistics(self) -> Mapping[str, NDArray[Any]]:
        """Statistics by name, for example ``bn1.running_mean`` (C,), like `parameters`."""
        return self.replica.statistics

    @named_arguments()
    def predict(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the predictions for raw samples.

        Args:
            x: raw samples as the training data stores them, for example uint8 images
                (n, H, W, C) or (n, C, H, W), or rows (n, F).

        Returns:
            (n, F): probabilities of the classes, or predicted values in the unit of the data.

        Raises:
            UserError: the samples do not fit the preprocessing; the message names the difference.
        """
        predictions = self.replica.predict(self.preprocessing.apply(x))
        return np.asarray(self.preprocessing.to_values(predictions), np.float32)

    @named_arguments()
    def predict_classes(self, x: ArrayLike) -> list[str]:
        """Return the name of the most probable class of each raw sample.

        A network with one sigmoid output predicts the second class above a probability of 0.5. The
        name is empty if outputs contain NaN.

        Raises:
            UserError: as for `predict`, or the network predicts values.
        """
        width = self.network.num_outputs
        classes = self.preprocessing.class_list(self.network)
        if classes is not None:
            return classes.predicted(self.predict(x))
        raise UserError(
            f"{self.network.label} ends in {self.network.loss.kind} with {width} "
            f"output{'s' * (width > 1)}, so it has no most probable class; use predict"
        )

    @named_arguments("pass arrays as one argument: evaluate((x, y))")
    def evaluate(
        self, data: Any = None, *, classes: Any = None, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Evaluate the model; see `evaluation.evaluate_model` for the result.

        Args:
            data: None for the test split of the training data; else the name of a data set as for
                ``dptrain evaluate --data``, or an object as for `Trainer`.
            classes: names of the labels of an object: a list in the order of the labels 0, 1, …, or
                a mapping from label to name. Integers without names are matched with the classes of
                the network by their value, never by their position.
            sample_weight: as for `Trainer.evaluate`.
        """
        found, _ = evaluate_model(
            self, data, self._world, classes=classes, sample_weight=sample_weight
        )
        return found

    @named_arguments()
    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and statistics to a safetensors file with PyTorch's names and shapes.

        Raises:
            UserError: the file cannot be written.
        """
        save_weights(self.replica, path)

    @named_arguments()
    def export(self, path: str | os.PathLike[str], *, replace: bool = False) -> tuple[Path, ...]:
        """Write the model to a file for other programs; see `dptrain.interchange.export`.

        Args:
            path: ends in ``.onnx`` (preprocessing, network and predictions), ``.py`` (the same as
                a PyTorch module, whose parameters are in a safetensors file next to it) or
                ``.safetensors`` (parameters and statistics).
            replace: overwrite existing files.

        Returns:
            The files that were written.

        Raises:
            UserError: a file exists or cannot be written, or the format cannot represent the
                network.
        """
        from dptrain.interchange.export import export_model

        return export_model(self, path, replace=replace)

    def __repr__(self) -> str:
        return (
            f"TrainedModel({self.network.name}, {self.network.num_parameters:,} parameters, "
            f"step {self.step}; {self.preprocessing})"
        )


def load(
    path: str | os.PathLike[str],
    *,
    checkpoint: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    backend: str = "numba",
    threads: int | None = None,
) -> TrainedModel:
    """Load a trained network from a run directory or a checkpoint, on this process alone.

    Args:
        path: a run directory, a folder that `Trainer.save` wrote, or the folder of a checkpoint.
        checkpoint: step of the checkpoint. If it is None, the best one by the validation data, or
            the newest valid one if the run has no best one.
        weights: a safetensors file whose parameters and statistics replace those of the
            checkpoint; see `dptrain.training.persistence.weights`.
        backend: what computes, in its default precision.
        threads: compute threads; all cores of this process if it is None.

    Returns:
        A model that predicts on raw inputs.

    Raises:
        UserError: there is no valid checkpoint, or the backend cannot run here.

    Examples:
        >>> model = load("runs/mine")                              # doctest: +SKIP
        >>> model.predict(images)                                  # doctest: +SKIP
    """
    chosen = GivenSettings(backend=backend, threads=threads, share_gpus=True)
    file = None if weights is None else Path(weights)
    return load_on_all_ranks(Path(path), World.single(), checkpoint, chosen, weights=file)


def load_on_all_ranks(
    path: Path,
    world: World,
    checkpoint: int | None = None,
    chosen: GivenSettings | None = None,
    *,
    weights: Path | None = None,
) -> TrainedModel:
    """Load a trained network on every rank; rank 0 reads the files.

    Args:
        path: as for `load`.
        world: the ranks; every rank calls this function.
        checkpoint: as for `load`.
        chosen: backend, precision and threads; those of the run, on this machine, if it is None.
        weights: as for `load`.

    Raises:
        UserError: as for `load`, on every rank.
    """
    found = call_on_rank_zero(world, lambda: load_checkpoint(path, checkpoint, best=True))
    read = None if found is None else (asdict(found.run_facts), found.step, found.warning)
    values, step, warning = world.broadcast_json(read)
    facts = CheckpointFacts.from_mapping(values, path)
    network, preprocessing = call_on_all_ranks(world, lambda: _restore_description(facts, path))
    if chosen is None:
        job = facts.spec["job"]
        chosen = GivenSettings(backend=job["backend"], precision=job["precision"], share_gpus=True)
    if weights is not None:
        call_on_rank_zero(world, partial(check_weights, network, weights))
    backend = open_backend(chosen, world)
    plan = make_plan(
        network,
        backend,
        INFERENCE_BATCH,
        precision=chosen.precision or next(iter(backend.precisions)),
        training=False,
        threads=compute_threads(chosen, world),
        micro_shards=_micro_shards(facts, backend),
    )
    replica = backend.make_replica(plan, seed=facts.seed, compiles=False)
    compile_kernels(world, backend)

    def restore() -> None:
        assert found is not None, "rank 0 has read the checkpoint"
        restore_replica(replica, found, parameters_only=True)
        if weights is not None:
            load_weights(replica, weights)

    call_on_rank_zero(world, restore)
    with replica.parameters.write_flat() as flat:
        broadcast_flat(world, replica, flat)
    broadcast_statistics(world, replica)
    return TrainedModel(
        network, preprocessing, replica, facts, step=step, warning=warning, world=world
    )


def _micro_shards(facts: CheckpointFacts, backend: Backend) -> MicroShards | None:
    """Return micro-shards for evaluations that are equal to those during training; None if
    training had none, or if the backend supports none.
    """
    job = facts.spec["job"]
    shards = job.get("shards", 0)
    if not shards or not backend.supports_shards:
        return None
    return MicroShards.of_rank(shards, batch_size=job["batch_size"])


def _restore_description(facts: CheckpointFacts, path: Path) -> tuple[Network, Preprocessing]:
    for key in ("network", "job"):
        if not isinstance(facts.spec.get(key), Mapping):
            raise UserError(
                f"the checkpoint in {path} does not describe its {key}; it was written by another "
                "version of dptrain"
            )
    network = network_from_dict(facts.spec["network"])
    where = f"the preprocessing saved in {path}"
    return network, Preprocessing.from_dict(facts.preprocessing, where)
