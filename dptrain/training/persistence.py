"""Files of the run directory that a job reads when it starts and writes while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from dptrain.backends.replica import Replica
from dptrain.comm.world import World
from dptrain.data import Dataset
from dptrain.errors import UserError, shown
from dptrain.foreign import refuse_foreign
from dptrain.measure.environment import environment
from dptrain.network.network import Network
from dptrain.network.zoo import build_network
from dptrain.training.checkpoints import (
    MANIFEST,
    Checkpoint,
    CheckpointFacts,
    CheckpointStore,
    fits_replica,
    other_setting,
    restore_replica,
)
from dptrain.training.history import Record
from dptrain.training.labels import Labels, parse_tags
from dptrain.training.rundir import RunDirectory
from dptrain.training.selection import Selection
from dptrain.training.settings import CONFIG_FILE, Settings
from dptrain.training.spec import JobSpec, RunSpec


def open_run(chosen: Settings, network: Network, dataset: Dataset) -> RunDirectory:
    """Open the run directory that `resume` names, or make a new one; called on rank 0."""
    keep = chosen.keep_checkpoints
    if chosen.resume is not None:
        run = RunDirectory.open(Path(chosen.resume), keep=keep)
        run.hold()
        return run
    path = None if chosen.run_dir is None else Path(chosen.run_dir)
    return RunDirectory.create(
        path, network=network.name, data=dataset.name, now=datetime.now(), keep=keep
    )


def starts_from_weights(chosen: Settings) -> bool:
    """Return True if the run begins with the weights of a file; called on rank 0.

    Raises:
        UserError: `resume` names no run directory.
    """
    if chosen.weights is None or chosen.resume is None:
        return chosen.weights is not None
    return not RunDirectory.open(Path(chosen.resume)).has_checkpoint()


def restore_run(
    chosen: Settings, run_spec: RunSpec, run: RunDirectory | None, replica: Replica
) -> Checkpoint | None:
    """Load the newest checkpoint of a resumed run into the replica; called on rank 0.

    Returns:
        The checkpoint; None if the run starts from the beginning.

    Raises:
        UserError: the checkpoint belongs to another job; the message names the difference.
    """
    if chosen.resume is None or run is None or not run.has_checkpoint():
        return None
    checkpoint, spec = run.checkpoints.load(), run_spec.job
    _refuse_other_network(checkpoint, spec, replica)
    checkpoint.run_facts.check_same_run(
        checkpoint.path,
        batch_size=spec.batch_size,
        seed=spec.seed,
        data=spec.data,
        schedule=spec.schedule,
        total_steps=spec.steps,
    )
    _refuse_other_minibatches(checkpoint, spec)
    _refuse_other_data(checkpoint, run_spec)
    restore_replica(replica, checkpoint)
    return checkpoint


def _refuse_other_network(checkpoint: Checkpoint, spec: JobSpec, replica: Replica) -> None:
    """Refuse another network, before differences of the data that follow from it."""
    then = checkpoint.run_facts.spec.get("job", {}).get("network", spec.network)
    if then != spec.network and not fits_replica(replica, checkpoint):
        raise other_setting(checkpoint.path, "network", then, spec.network)


def _refuse_other_minibatches(checkpoint: Checkpoint, spec: JobSpec) -> None:
    """Refuse settings with which the run would compute other bits, or on other minibatches."""
    before = checkpoint.run_facts.spec.get("job", {})
    for name, default in (("shards", 0), ("validation", 0.0)):
        then, now = before.get(name, default), getattr(spec, name)
        if then != now:
            raise other_setting(checkpoint.path, name, then, now)


def _refuse_other_data(checkpoint: Checkpoint, run_spec: RunSpec) -> None:
    """Refuse a data set whose content has changed since the checkpoint was written."""
    before = checkpoint.run_facts.spec.get("data", {})
    changed = [name for name, value in run_spec.data.items() if before.get(name, value) != value]
    if changed:
        raise UserError(
            f"the data {shown(run_spec.job.data)} has changed since {checkpoint.path} was written "
            f"({', '.join(changed)}); restore the data of the run, or start a new run"
        )


def start_run(
    run: RunDirectory,
    chosen: Settings,
    run_spec: RunSpec,
    network: Network,
    world: World,
    first_step: int,
) -> list[Record]:
    """Write the settings, the specification and the environment; called on rank 0.

    Returns:
        The evaluations on the validation data that the run made before it was resumed.
    """
    values = chosen.to_toml_values()
    # The configuration comes first: only a directory that has one counts as a run.
    run.write_config(values, chosen.origins)
    if not _is_listed(chosen.network, network):
        run.write_config({**values, "network": run.keep_network(network)}, chosen.origins)
    run.write_specification(run_spec.to_dict())
    run.metrics.truncate_after(first_step)
    run.write_environment(environment(world))
    if chosen.tags is not None or chosen.note is not None:
        labels = Labels.read(run.path).changed(parse_tags([chosen.tags or ""]), note=chosen.note)
        labels.write(run.path)
    evaluations = [r for r in run.metrics.read() if r.get("validation_loss") is not None]
    is_over = Selection.of(run_spec.job, evaluations, first_step).ends_training
    if first_step < run_spec.job.steps and not is_over:
        run.remove_summary()
    return evaluations


def find_best(run: RunDirectory, selection: Selection) -> Checkpoint | None:
    """Return the best checkpoint of a run that is resumed; called on rank 0.

    A crash may have prevented the run from adding its newest checkpoint to the folder ``best``.

    Args:
        run: the run directory.
        selection: the best evaluation before the resume.

    Returns:
        None if the run has none.
    """
    for store in (run.best, run.checkpoints):
        if selection.best_step not in store.steps():
            continue
        with suppress(UserError):  # It is damaged.
            found = store.load(selection.best_step)
            if store is run.checkpoints:
                run.best.link(found.path, found.step)
            return found
    return None


def _is_listed(name: str, network: Network) -> bool:
    """Return True if dptrain builds this network by its name, so that it needs no file."""
    try:
        return build_network(name, network.input_shape, network.num_outputs) == network
    except UserError:
        return False


def checkpoint_facts(run_spec: RunSpec, updates: int, shares: Mapping[str, Any]) -> CheckpointFacts:
    """Return the facts that a checkpoint stores in addition to its arrays."""
    job = run_spec.job
    return CheckpointFacts(
        updates=updates,
        network=str(run_spec.network["name"]),
        batch_size=job.batch_size,
        seed=job.seed,
        data=job.data,
        ranks=job.ranks,
        total_steps=job.steps,
        schedule=job.schedule,
        spec=run_spec.job_part(),
        preprocessing=run_spec.preprocessing,
        shares=shares,
    )


def load_checkpoint(path: Path, step: int | None = None, *, best: bool = False) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: a run directory, a folder of checkpoints, or the folder of one checkpoint.
        step: step of the checkpoint; the newest valid one if it is None.
        best: for a run directory, prefer the best checkpoint if `step` is None.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    refuse_foreign(path)
    if (path / MANIFEST).is_file():
        number = path.name.removeprefix("step-")
        if not number.isdigit():
            raise UserError(f"{path} is not the folder of a checkpoint; expected step-00000100")
        return CheckpointStore(path.parent).load(int(number))
    if (path / CONFIG_FILE).is_file():
        run = RunDirectory.open(path)
        in_best = run.best.steps() if best or step is not None else []
        if in_best and step in (None, *in_best):
            return run.best.load(step)
        return run.checkpoints.load(step)
    return CheckpointStore(path).load(step)
