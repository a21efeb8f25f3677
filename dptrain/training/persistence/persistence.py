"""Files of the run directory that a job reads when it starts and writes while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dptrain.backends.replica import Replica
from dptrain.comm.world import World
from dptrain.data import Dataset
from dptrain.errors import UserError, shown
from dptrain.foreign import refuse_foreign
from dptrain.measure.machine.environment import environment
from dptrain.network.files import network_from_dict, network_to_dict
from dptrain.network.network import Network
from dptrain.network.zoo import build_network
from dptrain.runs.labels import Labels, parse_tags
from dptrain.runs.names import CONFIG
from dptrain.runs.spans import Span, Spans, changed_text, environment_of
from dptrain.toml import read_toml
from dptrain.training.history import Record
from dptrain.training.persistence.checkpoints import (
    MANIFEST,
    Checkpoint,
    CheckpointFacts,
    CheckpointStore,
    fits_replica,
    other_setting,
    restore_replica,
)
from dptrain.training.persistence.repeating import repeating_commands
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.selection import Selection
from dptrain.training.settings import Settings
from dptrain.training.spec import JobSpec, RunSpec, all_settings


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
    if not chosen.weights or chosen.resume is None:
        return bool(chosen.weights)
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
    _refuse_other_network(checkpoint, run_spec, replica)
    checkpoint.run_facts.check_same_run(
        checkpoint.path,
        batch_size=spec.batch_size,
        seed=spec.seed,
        data=spec.data,
    )
    _refuse_other_minibatches(checkpoint, spec)
    _refuse_other_data(checkpoint, run_spec)
    _refuse_other_state(checkpoint, spec, replica)
    run_spec = run_spec.with_schedule_start(schedule_start(checkpoint, spec))
    _refuse_settings_without_effect(chosen, run, run_spec, checkpoint.step)
    restore_replica(replica, checkpoint)
    return checkpoint


def schedule_start(checkpoint: Checkpoint, spec: JobSpec) -> int:
    """Return `JobSpec.schedule_start` of a run that continues from a checkpoint."""
    facts = checkpoint.run_facts
    if facts.total_steps != spec.steps:
        return checkpoint.step
    return int(facts.spec.get("job", {}).get("schedule_start", 0))


def set_rate(checkpoint: Checkpoint, spec: JobSpec) -> float | None:
    """Return the learning rate that a callback had set; None if the schedule decides."""
    facts = checkpoint.run_facts
    before, names = facts.spec.get("job", {}), ("steps", "schedule", "learning_rate")
    is_changed = any(before.get(name) != getattr(spec, name) for name in names)
    return None if is_changed else facts.set_rate or None


def _refuse_other_network(checkpoint: Checkpoint, run_spec: RunSpec, replica: Replica) -> None:
    """Refuse another network, before differences of the data that follow from it."""
    facts, spec = checkpoint.run_facts, run_spec.job
    stored = facts.spec.get("network")
    if not isinstance(stored, Mapping):
        return
    # Files of earlier versions leave out what has a default.
    before = network_to_dict(network_from_dict(stored))
    found = _first_difference(before, dict(run_spec.network))
    if found is not None:
        where, old, new = found
        then = facts.spec.get("job", {}).get("network", spec.network)
        if then != spec.network and not fits_replica(replica, checkpoint):
            raise other_setting(checkpoint.path, "network", then, spec.network)
        raise UserError(
            f"checkpoint {checkpoint.path} was trained with another network than "
            f"{shown(spec.network)}: {where} is {shown(new)} (so far {shown(old)}); restore the "
            "network, or start a new run"
        )


def _first_difference(before: Any, now: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Return the place and both values of the first difference of two networks."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*before, *now)):
            if not where and key == "name":
                continue
            found = _first_difference(before.get(key), now.get(key), f"{where} {key}".strip())
            if found is not None:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True), 1):
            found = _first_difference(*pair, f"{where} {index}")
            if found is not None:
                return found
        return None
    return None if before == now else (where, before, now)


def _refuse_other_minibatches(checkpoint: Checkpoint, spec: JobSpec) -> None:
    """Refuse settings with which the run would compute other bits, or on other minibatches."""
    before = checkpoint.run_facts.spec.get("job", {})
    for name, default in (("shards", 0), ("validation", 0.0), ("weights", ""), ("freeze", "")):
        then, now = before.get(name, default), getattr(spec, name)
        if then != now:
            raise other_setting(checkpoint.path, name, then, now)


def _refuse_other_state(checkpoint: Checkpoint, spec: JobSpec, replica: Replica) -> None:
    """Refuse settings that need other arrays than the checkpoint holds."""
    if fits_replica(replica, checkpoint):
        return
    before = checkpoint.run_facts.spec.get("job", {})
    for name in ("precision", "optimizer", "momentum", "average_weights"):
        then, now = before.get(name, getattr(spec, name)), getattr(spec, name)
        if then != now:
            raise other_setting(checkpoint.path, name, then, now)


def _refuse_settings_without_effect(
    chosen: Settings, run: RunDirectory, run_spec: RunSpec, step: int
) -> None:
    """Refuse other settings for a run that has no step left to make with them."""
    spans = Spans.read(run.path)
    if not (_is_over(run, run_spec.job, step) and spans.items):
        return
    last, now = spans.items[-1], plain(chosen.to_toml_values())
    changes = span_of(run_spec, chosen, {}, step, spans).changes_from(last)
    # What the machine decides, such as the number of threads, may differ.
    given = {
        name: values
        for name, values in changes.items()
        if name in chosen.origins and now.get(name) != last.config.get(name)
    }
    if given:
        raise UserError(
            f"the run in {run.path} has no step left after step {step}, so {changed_text(given)} "
            "would have no effect; add --epochs or --steps, or resume without it"
        )


def _is_over(run: RunDirectory, spec: JobSpec, step: int) -> bool:
    """Return True if a run that continues after step number `step` makes no further step."""
    return step >= spec.steps or Selection.of(spec, _evaluations(run, step), step).ends_training


def _evaluations(run: RunDirectory, step: int) -> list[Record]:
    """Return the evaluations on the validation data up to a step."""
    records = run.metrics.read()
    return [r for r in records if r.get("validation_loss") is not None and r["step"] <= step]


def span_of(
    run_spec: RunSpec,
    chosen: Settings,
    env: Mapping[str, Any],
    completed: int,
    before: Spans,
) -> Span:
    """Return the span that begins after `completed` steps.

    Args:
        run_spec: the specification of this start.
        chosen: its settings.
        env: contents of ``env.json``; empty if only the settings matter.
        completed: number of completed steps.
        before: the spans of the run so far.
    """
    found = all_settings(run_spec, chosen)
    if before.items:
        # It is the same network, although its file is now in the run directory.
        found["network"] = before.items[-1].settings.get("network", found["network"])
    return Span(
        completed + 1,
        plain(found),
        dict(chosen.origins),
        digest=run_spec.digest,
        ranks=[asdict(rank) for rank in run_spec.ranks],
        environment=environment_of(env, run_spec.version),
    )


def _refuse_other_data(checkpoint: Checkpoint, run_spec: RunSpec) -> None:
    """Refuse a data set whose content has changed since the checkpoint was written."""
    before = checkpoint.run_facts.spec.get("data", {})
    then, now = before.get("augment"), run_spec.data.get("augment")
    if then != now:
        raise UserError(
            f"{checkpoint.path} was trained with augment={shown(then)}, but this run has "
            f"augment={now}; pass the function of the run to Trainer.resume, or start a new run"
        )
    changed = [name for name, value in run_spec.data.items() if before.get(name, value) != value]
    names = checkpoint.run_facts.preprocessing.get("classes")
    given = run_spec.preprocessing.get("classes")
    if changed == ["preprocessing"] and list(names or ()) != list(given or ()):
        raise UserError(
            f"the classes of {checkpoint.path} are {_classes_text(names)}, but those of the data "
            f"{shown(run_spec.job.data)} are {_classes_text(given)}; restore them, for arrays with "
            f"classes={_classes_text(names)}"
        )
    if changed:
        raise UserError(
            f"the data {shown(run_spec.job.data)} has changed since {checkpoint.path} was written "
            f"({', '.join(changed)}); restore the data of the run, or start a new run"
        )


def _classes_text(names: Any) -> str:
    """Return names of classes as Python writes them; they may come from a file."""
    return shown(repr(list(names))) if names else "none"


def start_run(
    run: RunDirectory,
    chosen: Settings,
    run_spec: RunSpec,
    network: Network,
    world: World,
    first_step: int,
) -> tuple[list[Record], Spans]:
    """Write the settings, the specification and the environment; called on rank 0.

    A run that has no step left keeps them, because they describe the steps that it made.

    Returns:
        The evaluations on the validation data that the run made before it was resumed, and its
        spans.
    """
    if chosen.tags or chosen.note is not None:
        labels = Labels.read(run.path).changed(parse_tags([chosen.tags]), note=chosen.note)
        labels.write(run.path)
    spans = Spans.read(run.path)
    run.metrics.truncate_after(first_step)
    evaluations = _evaluations(run, first_step)
    if first_step and spans.items and _is_over(run, run_spec.job, first_step):
        return evaluations, spans
    return evaluations, begin_span(run, chosen, run_spec, network, world, first_step)


def begin_span(
    run: RunDirectory,
    chosen: Settings,
    run_spec: RunSpec,
    network: Network,
    world: World,
    completed: int,
) -> Spans:
    """Write the settings of the steps that follow, the specification and the environment.

    Args:
        run: the run directory, on rank 0.
        chosen, run_spec, network, world: of the run.
        completed: number of completed steps.

    Returns:
        The spans of the run.
    """
    env = environment(world)
    spans = _write_settings(run, chosen, run_spec, network, env, Spans.read(run.path), completed)
    run.write_specification(run_spec.to_dict())
    run.write_environment(env)
    if not _is_over(run, run_spec.job, completed):
        run.remove_summary()
    return spans


def _write_settings(
    run: RunDirectory,
    chosen: Settings,
    run_spec: RunSpec,
    network: Network,
    env: Mapping[str, Any],
    spans: Spans,
    completed: int,
) -> Spans:
    """Add a span to a run, and write the settings with which the run began; return the spans."""
    values = plain(chosen.to_toml_values())
    if spans.items and not spans.items[0].config:
        # The configuration file of an earlier version holds the settings of the last start.
        first = replace(spans.items[0], config=read_toml(run.path / CONFIG))
        spans = Spans((first, *spans.items[1:]), spans.is_complete)
    span = span_of(run_spec, chosen, env, completed, spans)
    # The configuration comes first: only a directory that has one counts as a run.
    if not spans.until(completed).items:
        run.write_config(values, chosen.origins)
    if not _is_listed(chosen.network, network):
        values["network"] = run.keep_network(network)
    spans = spans.followed_by(replace(span, config=values))
    run.write_spans(spans)
    first = spans.items[0]
    run.write_config(first.config, first.origins, repeating_commands(spans))
    return spans


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


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


def checkpoint_facts(
    run_spec: RunSpec, updates: int, shares: Mapping[str, Any], set_rate: float
) -> CheckpointFacts:
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
        set_rate=set_rate,
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
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a run directory or a checkpoint")
    if (path / MANIFEST).is_file():
        number = path.name.removeprefix("step-")
        if not number.isdigit():
            raise UserError(f"{path} is not the folder of a checkpoint; expected step-00000100")
        return CheckpointStore(path.parent).load(int(number))
    if (path / CONFIG).is_file():
        run = RunDirectory.open(path)
        in_best = run.best.steps() if best or step is not None else []
        if in_best and step in (None, *in_best):
            return run.best.load(step)
        return run.checkpoints.load(step)
    return CheckpointStore(path).load(step)
