"""The first lines that a run prints, and its results at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain import __version__
from dptrain.comm.signals import stop_advice
from dptrain.comm.world import World
from dptrain.data.base import Dataset, count_text
from dptrain.data.weights import weight_lines
from dptrain.measure.console import make_console
from dptrain.measure.efficiency import Baseline, Efficiency, efficiency, efficiency_table
from dptrain.measure.input_times import MIN_STEPS, InputCost
from dptrain.measure.machine.energy import energy_lines, energy_of, meter_facts
from dptrain.measure.machine.load import Clock, cores_of_other_jobs, is_busy
from dptrain.measure.profile.analysis import Measured, profile_efficiencies, spread, stage_profiles
from dptrain.measure.profile.gathering import gather_measured
from dptrain.measure.profile.profile_lines import titled_parts
from dptrain.measure.profile.tables import MAX_LAYER_ROWS, layers_table, notes_table
from dptrain.measure.statistics import Estimate
from dptrain.measure.step_record import CHECKPOINT, DATA_WAIT, EVALUATION, HIDDEN
from dptrain.network.adaptation import adaptation_lines
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase
from dptrain.plan.shares import alone
from dptrain.runs.spans import changed_text
from dptrain.training.binding import binding_warning, gather_rank_cores
from dptrain.training.data_settings import BALANCED
from dptrain.training.engines import FIRST_TIMED
from dptrain.training.job import Job
from dptrain.training.output.answer import closing_lines, count
from dptrain.training.output.display import Display
from dptrain.training.output.limits import TrainingLimit, training_limit
from dptrain.training.output.progress import Progress
from dptrain.training.profiling.energy import samples_between
from dptrain.training.resources import possible_efficiency

if TYPE_CHECKING:
    from dptrain.tables import Table


@dataclass(frozen=True)
class Conclusion:
    """The results of a run.

    Attributes:
        summary: as in ``summary.json``, the same on every rank.
        details: tables and lines for ``--verbose``: parts of a step, layers, scaling efficiency,
            what limited training, energy; empty on other ranks than 0.
        lines: the result on the test data, where the time went and the next step, for people.
    """

    summary: Mapping[str, Any]
    details: tuple[str | Table, ...]
    lines: tuple[str, ...]


def data_lines(network: Network, dataset: Dataset) -> list[str]:
    """Return how a network differs from the published one, and what the data is.

    Every command that trains prints these lines before its first result. Opening the data prints
    its notes.
    """
    return [
        *adaptation_lines(network),
        f"data: {dataset.description}",
    ]


def print_stop_advice(world: World) -> None:
    """Print which signal stops training, if the launcher kills ranks after the others.

    It is printed before kernels are compiled, because that may take longer than a user waits.
    """
    if world.is_rank_zero and (advice := stop_advice()):
        make_console().print(advice, soft_wrap=True)


def introduce(job: Job, display: Display, step: int, *, verbose: bool = True) -> None:
    """Print the network, the data, the parallelism and the run directory; all ranks call it.

    Args:
        job: the job.
        display: prints on rank 0.
        step: number of completed steps.
        verbose: print all settings and the preprocessing of the data; otherwise three lines.
    """
    for line in _full_header(job, step) if verbose else _short_header(job, step):
        display.print(line)
    if job.snapshots is not None:
        display.print(job.snapshots.text)
    _print_restrictions(job, display, step)


def _short_header(job: Job, step: int) -> Iterator[str]:
    """Yield the run and the network, the data, and how it is trained."""
    spec, data = job.spec, job.dataset
    run = "" if job.run is None else f"{job.run.path}: "
    yield f"{run}{job.network.name} ({_parameters(job)}), {_backends(job)}, {_workers(job)}"
    first, *others = data_lines(job.network, replace(data, description=_short_data(job)))
    yield from (first, *others, *_loss_and_weights(job))
    epochs = spec.steps / spec.epoch_steps
    yield (
        f"{count(spec.steps, 'step')} ({epochs:.3g} epoch{'s' * (epochs != 1)})"
        f"{_start_text(job, step)}: minibatch {spec.batch_size}{_optimisation(job)}"
    )


def _loss_and_weights(job: Job) -> Iterator[str]:
    """Yield the weights of classes and samples, and the initial parameters, if they are set."""
    yield from weight_lines(job.spec.class_weights, job.dataset)
    if job.weights:
        yield job.weights


def _parameters(job: Job) -> str:
    """Return the number of parameters, and of those that are trained if some are frozen."""
    trained = f", {job.plan.num_trained:,} of them trained" if job.spec.freeze else ""
    return f"{job.network.num_parameters:,} parameters{trained}"


def _short_data(job: Job) -> str:
    data = job.dataset
    counts = count_text(len(data.train), len(data.test), len(data.validation or ()))
    classes = data.class_list
    of_classes = "" if classes is None else f" of {len(classes.names):,} classes"
    return f"{job.spec.data}, {counts} samples{of_classes}"


def _full_header(job: Job, step: int) -> Iterator[str]:
    """Yield what `_short_header` does, with memory, preprocessing, transport and shares."""
    spec, world = job.spec, job.world
    memory = sum(job.memory_bytes.values()) / 2**20
    yield (
        f"dptrain {__version__}: {job.network.name} ({_parameters(job)}, {memory:.1f} MiB per "
        f"rank), {_backends(job)}"
    )
    yield from (*data_lines(job.network, job.dataset), *_loss_and_weights(job))
    transport = f", transport {spec.transport}" if world.size > 1 else ""
    yield (
        f"{_workers(job)}, {spec.strategy}{transport}, at most {count(job.local_batch, 'sample')} "
        f"per rank; minibatch {spec.batch_size}{_optimisation(job)}"
    )
    if job.run is not None:
        yield f"run: {job.run.path}{_start_text(job, step)}"


def _optimisation(job: Job) -> str:
    """Return how a minibatch is divided and parameters are updated, to follow its size."""
    spec = job.spec
    shards = f" in {count(spec.shards, 'micro-shard')}" if spec.shards else ""
    passes = f" in {spec.accumulate} passes" if spec.accumulate > 1 else ""
    warmup = f", {spec.warmup_steps} steps of warm-up" if spec.warmup_steps else ""
    clipping = f", gradients clipped at norm {spec.clip_norm:g}" if spec.clip_norm else ""
    sampling = ", balanced sampling" if spec.sampling == BALANCED else ""
    decay = "" if spec.weight_decay is None else f", weight decay {spec.weight_decay:g}"
    return (
        f"{shards}{passes}{sampling}, {spec.optimizer}, learning rate {job.schedule.base:g} "
        f"({spec.schedule}{warmup}){decay}{clipping}"
    )


def _start_text(job: Job, step: int) -> str:
    if step:
        return f", resumed after step {step}"
    again = job.run is not None and job.settings.resume
    return ", started again: it had no checkpoint" if again else ""


def _print_restrictions(job: Job, display: Display, step: int) -> None:
    """Print which settings a resumed run changed, warnings, and why no step follows."""
    spec = job.spec
    if job.run is not None:
        *_, before, now = (None, None, *job.spans.items)
        if step == job.first_step and before is not None and now is not None:
            changes = now.changes_from(before)
            if changes and now.first_step == step + 1:
                display.print(f"changed settings: {changed_text(changes)}")
    if step and job.schedule.begin == step:
        display.print(f"the {spec.schedule} schedule begins anew with step {step + 1}")
    if job.warning is not None:
        display.print(f"warning: {job.warning}")
    for line in binding_lines(job):
        display.print(line)
    if spec.batch_size > len(job.dataset.train):
        display.print(
            f"warning: batch size {spec.batch_size} exceeds the {len(job.dataset.train):,} "
            "training samples, so every minibatch is the whole training data"
        )
    reason = nothing_left(job, step)
    if reason is not None:
        display.print(f"nothing left to do: {reason}")


def binding_lines(job: Job) -> list[str]:
    """Return the warning that threads of a rank share a core, if they do; every rank calls this."""
    # A GPU computes with no thread of the processor.
    threads = 0 if job.replica.memory.name else job.plan.setting.threads
    warning = binding_warning(gather_rank_cores(job.world, threads))
    return [] if warning is None else [f"warning: {warning}"]


def nothing_left(job: Job, step: int) -> str | None:
    """Return why no step follows after step number `step`, and how to continue; else None."""
    spec, reached = job.spec, job.selection.reached
    if reached is not None:
        why = (
            f"the validation accuracy after step {step} was {reached.accuracy:.2%}, at least the "
            f"{spec.until_accuracy:.2%} of --until-accuracy"
        )
        change = "a higher --until-accuracy"
    elif job.selection.is_out_of_patience:
        why = f"the last {job.selection.since_best} evaluations were no improvement"
        change = "a higher --patience"
    elif step >= spec.steps:
        why = f"{step} of {spec.steps} steps are complete"
        change = "more --epochs or --steps"
    else:
        return None
    return f"{why}; continue with {change}, in Python with fit(epochs=N)"


def _backends(job: Job) -> str:
    """Return the backend and the precision; those of each rank if they differ."""
    if not job.is_mixed:
        return f"{job.spec.backend} {job.spec.precision}"
    of_ranks = (f"{r.backend} {r.precision} (rank {r.rank})" for r in job.run_spec.ranks)
    return ", ".join(of_ranks)


def _workers(job: Job) -> str:
    """Return the number of ranks, and the GPU or the threads of each."""
    found = [
        count(rank.threads, "thread") if rank.device == "cpu" else "1 GPU"
        for rank in job.run_spec.ranks
    ]
    ranks = count(len(found), "rank")
    return f"{ranks} × {found[0]}" if len({*found}) == 1 else f"{ranks} ({', '.join(found)})"


def conclude(
    job: Job, progress: Progress, baseline: Baseline, load: Clock | None = None
) -> Conclusion:
    """Combine the measurements of all ranks; every rank calls this function.

    Args:
        job: the job.
        progress: its state.
        baseline: steps of rank 0 alone.
        load: CPU time of all programs when training began; None if it is unknown.
    """
    world = job.world
    timed = World.single() if _times_are_own(job) else world
    possible = possible_efficiency(world, job.plan.setting.threads)
    measured, in_flight, skip = None, job.engine.max_steps_in_flight, 0
    if job.recorder.steps:
        # Steps before the captured ones are slower.
        has_captures = job.replica.memory.asynchronous and job.recorder.steps > 2 * FIRST_TIMED
        skip = FIRST_TIMED if has_captures else 0
        measured = gather_measured(timed, job.recorder, ahead=in_flight, skip=skip)
    summary, limit = None, None
    details: list[str | Table] = []
    times = _input_cost(job, timed, in_flight, skip) if job.recorder.steps else None
    others = cores_of_other_jobs(world, load)
    if world.is_rank_zero:
        scaling = efficiency(
            baseline,
            world.size,
            possible=possible,
            other_cores=others,
            steps=() if measured is None else measured.step_times,
        )
        summary = _summary(job, progress, measured, scaling)
        limit = _limit(job, measured, times)
        summary["limit"] = None if limit is None else limit.to_dict()
        summary["input_times"] = None if times is None else times.to_dict()
        details += _tables(job, measured, scaling)
    meters = world.gather_json(meter_facts(job.meter))
    energy = None if meters is None or not job.recorder.steps else energy_of(meters)
    if summary is not None:
        summary["energy"] = None if energy is None else asdict(energy)
    details += [] if limit is None else [str(limit)]
    details += [ahead] if times is not None and (ahead := times.ahead_line()) else []
    details += [] if energy is None else energy_lines(energy)
    found = dict(world.broadcast_json(summary))
    return Conclusion(found, tuple(details), closing_lines(job, progress, found))


def _times_are_own(job: Job) -> bool:
    """Return whether only the times of this rank count: other ranks have other stages, or none.

    Of an idle rank, no step is timed stage by stage, in contrast to the other ranks with devices.
    """
    can_be_idle = bool(job.shares.counts) and job.replica.memory.asynchronous
    return job.is_mixed or can_be_idle or alone(job.shares.counts) is not None


def _input_cost(job: Job, world: World, in_flight: int, skip: int) -> InputCost | None:
    """Return the times of input on rank 0; None on other ranks, and if there were few steps.

    Args:
        job: the job.
        world: the ranks whose times count; each of them calls this function.
        in_flight: steps that may be enqueued when the next one starts.
        skip: number of steps at the start that do not count.
    """
    recorder, times = job.recorder, job.input_times
    counts = {*range(recorder.steps)[skip:]} - {*times.starts}
    is_captured = skip or not job.replica.memory.asynchronous
    if len(counts) < MIN_STEPS or not is_captured:
        return None
    measured = gather_measured(world, recorder, ahead=in_flight, skip=skip, without=times.starts)
    upload_ms = job.engine.passes * job.engine.upload_ms
    loader_times = world.gather_json([*times.mean_ms(), upload_ms])
    if measured is None or loader_times is None:
        return None
    between = sum(measured.column(name, ordinary=True) for name in (EVALUATION, CHECKPOINT))
    copy_ms, step_ms = 0.0, float((measured.steps - between).mean())
    wait_ms = float(measured.column(DATA_WAIT, ordinary=True).mean())
    if measured.by_stage:
        load = next(stage.name for stage in job.plan.stages if stage.phase is Phase.LOAD)
        copy_ms = float(measured.column(load).mean())
        wait_ms = measured.step_parts.all_steps.data_wait
    reading_ms, assembling_ms, early_copy_ms = np.mean(loader_times, axis=0).tolist()
    if job.engine.loads_ahead:
        copy_ms, early_copy_ms = 0.0, early_copy_ms + copy_ms
    return InputCost(step_ms, wait_ms, copy_ms, reading_ms, assembling_ms, early_copy_ms)


def _limit(job: Job, measured: Measured | None, times: InputCost | None) -> TrainingLimit | None:
    """Return what limits training; None if few steps were timed by stage."""
    if measured is None or not measured.by_stage or len(measured.step_times) < MIN_STEPS:
        return None
    return training_limit(measured.step_parts, job.spec, job.dataset, times)


def _tables(job: Job, measured: Measured | None, scaling: Efficiency) -> tuple[str | Table, ...]:
    """Return where a step spends its time, the algorithms of the stages, and the efficiency."""
    if measured is None:
        return ()
    size, found = job.world.size, list[Any]()
    if _times_are_own(job):
        size = 1
        if alone(job.shares.counts):
            return ("no times: rank 0 had no samples at the end",)
        found.append("times of rank 0; those of ranks with other work cannot be compared")
    if measured.by_stage:
        steps = "typical steps"
        if job.replica.memory.asynchronous:
            steps = f"{measured.timed.shape[1]} steps that were timed stage by stage"
        stages = stage_profiles(job.plan, measured, job.replica.notes)
        step = spread(measured.step_times)
        found.append(titled_parts(step, measured.step_parts, several=size > 1))
        title = f"Computation by layer (mean of {steps})"
        found.append(layers_table(stages, title, several=size > 1, most=MAX_LAYER_ROWS))
        if notes := notes_table(stages):
            found.append(notes)
    else:
        found.append(
            f"no step was timed stage by stage: step {FIRST_TIMED + 1} of a process is the first; "
            "dptrain profile times as many steps as you request"
        )
    if scaling.weak is not None:
        found.append(efficiency_table(scaling, size=size))
    elif scaling.baseline.why:
        found.append(scaling.baseline.why)
    if is_busy(scaling.other_cores):
        found.append(
            f"other programs used {scaling.other_cores:.1f} cores of this node during training, "
            "which lengthens steps and intervals"
        )
    return tuple(found)


def _selected(job: Job, progress: Progress) -> dict[str, Any]:
    """Return the results on the validation data of the parameters that training ended with."""
    found, last = progress.selection, progress.score
    loss, accuracy, step = found.best_loss, found.best_accuracy, found.best_step
    if step < 0:
        loss, accuracy = (None, None) if last is None else (last.loss, last.accuracy)
        step = progress.step
    return {
        "validation_loss": loss,
        "validation_accuracy": accuracy,
        "selected_by": job.spec.best_by,
        "selected_step": step,
        "out_of_patience": found.is_out_of_patience,
    }


def _summary(
    job: Job, progress: Progress, measured: Measured | None, scaling: Efficiency
) -> dict[str, Any]:
    spec, score = job.spec, progress.test_score
    return {
        "network": job.network.name,
        "parameters": job.network.num_parameters,
        "data": spec.data,
        "data_description": job.dataset.description,
        "backend": spec.backend,
        "precision": spec.precision,
        "strategy": spec.strategy,
        "ranks": spec.ranks,
        "threads": job.plan.setting.threads,
        "batch_size": spec.batch_size,
        "seed": spec.seed,
        "digest": job.spans.until(progress.step).digest or job.run_spec.digest,
        "steps": progress.step,
        "stopped": progress.stopped,
        "train_loss": None if measured is None else progress.last_train_loss,
        "test_loss": None if score is None else score.loss,
        "test_accuracy": None if score is None else score.accuracy,
        **progress.test_results,
        **_selected(job, progress),
        **_spans(job, progress),
        "time_to_accuracy": _time_to_accuracy(job, progress),
        "samples_per_s": progress.samples_per_s,
        "first_step_s": progress.first_step_s,
        "evaluation_s": job.recorder.totals_ns[EVALUATION] / 1e9,
        "checkpoint_s": job.recorder.totals_ns[CHECKPOINT] / 1e9,
        "other_cores": scaling.other_cores,
        "scaling": _scaling(scaling),
        "memory": job.memory_bytes,
        **_times(job, measured),
    }


def _spans(job: Job, progress: Progress) -> dict[str, Any]:
    """Return the spans of the run, and the steps whose times this process measured."""
    kept = progress.selection.best_step
    kept = kept if kept > 0 else progress.step
    timed = [job.first_step + 1, progress.step] if progress.step > job.first_step else None
    return {**job.spans.to_summary(progress.step, kept), "timed_steps": timed}


def _time_to_accuracy(job: Job, progress: Progress) -> dict[str, Any] | None:
    """Return when the requested accuracy was reached; None if none was requested."""
    wanted, reached = job.spec.until_accuracy, progress.selection.reached
    if not wanted:
        return None
    if reached is None:
        nothing = ("accuracy", "epochs", "steps", "samples", "time_s")
        return {"requested": wanted, "reached": False, **dict.fromkeys(nothing)}
    return {
        "requested": wanted,
        "reached": True,
        "accuracy": reached.accuracy,
        "epochs": reached.epochs,
        "steps": reached.steps,
        "samples": samples_between(job, 0, reached.steps),
        # A resumed run does not know how long the steps before took.
        "time_s": None if job.first_step else reached.time_s,
    }


def _scaling(scaling: Efficiency) -> dict[str, Any]:
    weak, strong, baseline = scaling.weak, scaling.strong, scaling.baseline
    return {
        "weak": None if weak is None else weak.value,
        "strong": None if strong is None else strong.value,
        "possible": scaling.possible,
        "weak_interval": _interval(weak),
        "strong_interval": _interval(strong),
        "blocks": len(baseline.pairs),
        "steps_alone": baseline.steps_alone,
        "steps_together": baseline.steps_together,
        "cost": baseline.cost,
        "why": baseline.why or None,
        "note": scaling.note or None,
    }


def _interval(found: Estimate | None) -> list[float] | None:
    if found is None or math.isinf(found.high):
        return None
    return [found.low, found.high]


def _times(job: Job, measured: Measured | None) -> dict[str, Any]:
    """Return the times of a step as a profile has them; None if no step was measured."""
    none: dict[str, Any] = {
        "step_ms": None,
        "parts": None,
        "step_parts": None,
        "hidden_ms": None,
        "stages": [],
        "pop": None,
    }
    if measured is None:
        return none
    step_ms = asdict(spread(measured.step_times))
    if not measured.by_stage:
        return {**none, "step_ms": step_ms}
    stages = stage_profiles(job.plan, measured, job.replica.notes)
    pop = profile_efficiencies(job.plan, measured)
    return {
        "step_ms": step_ms,
        "parts": asdict(measured.parts),
        "step_parts": asdict(measured.step_parts),
        "hidden_ms": float(measured.column(HIDDEN).mean()),
        "stages": [asdict(stage) for stage in stages],
        "pop": None if pop is None else asdict(pop),
    }
