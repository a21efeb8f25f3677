"""A training job with all of its parts: data, plan, replica, engine, schedule, run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain import __version__
from dptrain.backends.base import Backend
from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.comm import make_gradient_sum, make_statistics_sum
from dptrain.comm.agreement import agree
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import AgreedError, World
from dptrain.data import Dataset, open_data
from dptrain.data.base import Samples
from dptrain.data.decoding import keep_decoded
from dptrain.data.fingerprint import data_fingerprint
from dptrain.data.loading.augment_function import with_changed_samples
from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.sharding import Sampler, steps_per_epoch
from dptrain.data.loading.workers import with_workers
from dptrain.data.stored import CachedSamples, JoinedImages, StoredSamples
from dptrain.data.validation import with_validation
from dptrain.data.weights import sample_weights, sampled_labels
from dptrain.errors import UserError
from dptrain.measure.input_times import InputTimes
from dptrain.measure.machine.energy import EnergyMeter
from dptrain.measure.recorder import StepRecorder
from dptrain.network.adaptation import resize, with_normalization
from dptrain.network.files import network_to_dict
from dptrain.network.network import Network
from dptrain.plan.buckets import Bucket, make_buckets
from dptrain.plan.freezing import rate_factors
from dptrain.plan.plan import Plan, make_plan
from dptrain.plan.shards import MicroShards
from dptrain.plan.shares import Counts, alone
from dptrain.runs.spans import Spans
from dptrain.training.balance import (
    Shares,
    first_shares,
    has_idle_ranks,
    stored_shares,
    with_counts,
)
from dptrain.training.compilation_stop import compile_unless_stopped
from dptrain.training.data_settings import BALANCED
from dptrain.training.digests.replay import Replay, open_replay
from dptrain.training.engines import Engine, make_engine
from dptrain.training.engines.alone import make_alone_engine
from dptrain.training.evaluation.evaluation import images_for
from dptrain.training.history import Record
from dptrain.training.parallelism import MEASURED, OFF
from dptrain.training.persistence.best_state import BestState
from dptrain.training.persistence.checkpoints import Checkpoint, CheckpointFacts
from dptrain.training.persistence.persistence import (
    begin_span,
    checkpoint_facts,
    find_best,
    open_run,
    restore_run,
    schedule_start,
    set_rate,
    start_run,
    starts_from_weights,
)
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.persistence.snapshots import (
    Recovered,
    SnapshotPlan,
    plan_snapshots,
    recover,
)
from dptrain.training.persistence.weights import (
    WeightsSize,
    check_fitting_weights,
    load_fitting_weights,
    size_of_weights,
)
from dptrain.training.resources import (
    COMPILING,
    bucket_bytes,
    check_memory,
    choose_digest_every,
    choose_prefetch,
    choose_replay_every,
    compile_kernels,
    compute_threads,
    describe_ranks,
    find_transport,
    notice_if_slow,
    open_backend,
    open_shared_arrays,
    share_state,
)
from dptrain.training.schedules import Schedule
from dptrain.training.selection import Selection
from dptrain.training.settings import Settings
from dptrain.training.spec import JobSpec, RunSpec, digest, job_settings, resolve_job
from dptrain.training.tuning import select_kernels
from dptrain.training.workers import are_mixed, check_mixed

DECODING = "decoding images, which then stay in memory"


@dataclass
class Job:
    """Everything that a training loop needs.

    Attributes:
        settings: what the user chose, with the recipe of the network filled in.
        spec: the resolved settings.
        run_spec: the whole specification, with data, preprocessing and ranks.
        buckets: parts of the gradient that are summed one after the other.
        streams_pixels: True if minibatches reach the replica as 8-bit images with crop windows.
        cached_samples: training samples whose images the replica keeps; None if minibatches are
            copied to it.
        validation_at: number of the first validation image among those that the replica keeps; None
            if it keeps none of them.
        keeps_run: True if rank 0 has a run directory.
        run: the run directory; None on other ranks than 0 and if there is none.
        first_step: number of the first step; above 0 after a resume.
        selection: the best evaluation before a resume.
        best: its state, on ranks that keep it.
        shares: of the ranks in a minibatch.
        is_mixed: True if ranks have different backends or precisions.
        warning: one line if damaged checkpoints were skipped on resume.
        weights: on rank 0, one line about the weights with which the run begins; "" without.
        spans: on rank 0 with a run directory, which settings made which steps of the run.
        sample_weights: (training samples,), in the loss; None if all are equal.
        labels: (training samples,), the classes for balanced sampling; None without it.
        input_times: of the training loop's loaders.
        meter: energy of this rank's part of the training loop.
        snapshots: where nodes keep snapshots; None without the setting.
        run_path: on every rank, the path of the run directory; None if there is none.
        replay: computes micro-shards again; None if no step of the job does.
    """

    settings: Settings
    spec: JobSpec
    run_spec: RunSpec
    world: World
    network: Network
    dataset: Dataset
    backend: Backend
    plan: Plan
    replica: Replica
    buckets: tuple[Bucket, ...]
    recorder: StepRecorder
    engine: Engine
    schedule: Schedule
    augmentation: Augmentation | None
    cached_samples: CachedSamples | None
    validation_at: int | None
    streams_pixels: bool
    keeps_run: bool
    run: RunDirectory | None
    first_step: int
    selection: Selection = field(default_factory=Selection)
    best: BestState = field(default_factory=BestState)
    shares: Shares = field(default_factory=Shares)
    is_mixed: bool = False
    warning: str | None = None
    weights: str = ""
    spans: Spans = field(default_factory=Spans)
    sample_weights: NDArray[np.float64] | None = None
    labels: NDArray[np.int64] | None = None
    input_times: InputTimes = field(default_factory=InputTimes)
    meter: EnergyMeter = field(default_factory=lambda: EnergyMeter(()))
    snapshots: SnapshotPlan | None = None
    run_path: Path | None = None
    replay: Replay | None = None

    @property
    def is_alone(self) -> bool:
        """True if one rank has all samples, and the others do not update their replicas."""
        return has_idle_ranks(self.spec) and alone(self.shares.counts) is not None

    @property
    def keeps_best(self) -> bool:
        """True if this rank keeps the best state: rank 0, and ranks that write snapshots."""
        writes = self.snapshots is not None and self.snapshots.folder is not None
        return self.world.is_rank_zero or writes

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Memory of this rank in bytes, by purpose."""
        statistics_sum = self.engine.statistics_sum
        buffers = self.engine.gradient_sum.memory_bytes
        buffers += statistics_sum.memory_bytes if statistics_sum is not None else 0
        found = {"sums": buffers, "best epoch": self.best.memory_bytes}
        found["replays"] = 0 if self.replay is None else self.replay.memory_bytes
        return {**self.replica.memory_bytes, **{name: size for name, size in found.items() if size}}

    @property
    def local_batch(self) -> int:
        """Largest shard of a minibatch that a rank processes, in all passes of a step."""
        count = self.spec.batch_size
        return max(self.sampler(count, rank).shard_size(count) for rank in range(self.world.size))

    def sampler(self, num_samples: int, rank: int | None = None) -> Sampler:
        """Return how a whole minibatch of all ranks is divided; by default, the part of this rank.

        Args:
            num_samples: of the minibatch.
            rank: the rank; the micro-shards are always those of this one.
        """
        world, counts = self.world, self.shares.counts
        rank = world.rank if rank is None else rank
        passes = self.passes
        shards = passes["micro_shards"]
        if shards is not None and counts:
            passes["micro_shards"] = MicroShards.of_rank(
                shards.total, rank, world.size, counts=counts, batch_size=shards.batch_size
            )
            counts = ()
        return Sampler(
            num_samples, num_samples, self.spec.seed, rank, world.size, **passes, counts=counts
        )

    def checkpoint_facts(self) -> CheckpointFacts:
        """Return the facts that a checkpoint of the present state stores."""
        return checkpoint_facts(
            self.run_spec, self.replica.updates, self.shares.to_dict(), self.schedule.fixed or 0.0
        )

    @property
    def passes(self) -> dict[str, Any]:
        """How the shard of this rank is divided: arguments of `Sampler` and `open_loader`."""
        return {"micro_shards": self.plan.micro_shards, "passes": self.plan.passes}

    def extend(self, step: int, epochs: int) -> bool:
        """End the run `epochs` epochs after step number `step`; all ranks call this between steps.

        Schedules that depend on the length begin anew, unless the length does not change.

        Returns:
            True if the length has changed.

        Raises:
            UserError: the schedule needs more steps.
        """
        spec = self.spec
        steps = step + epochs * spec.epoch_steps
        if steps == spec.steps:
            return False
        self.schedule = replace(self.schedule, total_steps=steps, start=step, fixed=None)
        passes = 0 if steps % spec.epoch_steps or not spec.epochs else steps // spec.epoch_steps
        name, other = ("epochs", "steps") if passes else ("steps", "epochs")
        origins = {**self.settings.origins, name: "Trainer.fit"}
        origins.pop(other, None)
        total = None if passes else steps
        self.settings = replace(self.settings, epochs=passes, steps=total, origins=origins)
        job = replace(spec, steps=steps, epochs=passes, schedule_start=step)
        self.run_spec, self.spec = replace(self.run_spec, job=job, origins=origins), job
        run = self.run
        if run is not None:
            self.spans = begin_span(
                run, self.settings, self.run_spec, self.network, self.world, step
            )
        return True

    def divide(self, shares: Shares) -> None:
        """Change the shares of the ranks; all ranks call this after the engine was closed."""
        self.shares = shares
        self.recorder.complete_stages()  # They refer to the present replica.
        self.replica = with_counts(self.settings, self.world, self.replica, shares.counts)
        self.plan = self.replica.plan
        self.buckets = make_buckets(self.plan, self.spec.bucket_kib * 1024)
        self.replay = None
        self.reopen_engine()

    def reopen_engine(self) -> None:
        """Replace the engine after it was closed; all ranks call this."""
        if self.replay is None:
            self.replay = open_replay(self.replica, self.world, self.run_spec)
            compile_kernels(self.world, self.backend, quiet=True)
        self.engine = _engine(
            self.spec,
            self.world,
            self.replica,
            self.buckets,
            self.recorder,
            self.shares,
            self.replay,
            mixed=self.is_mixed,
        )


@dataclass(frozen=True)
class _Inputs:
    """What a job computes on, agreed by all ranks, before anything large is allocated.

    Attributes:
        fingerprint: of the data, see `data_fingerprint`.
        shares: with which the job begins.
        is_mixed: True if ranks have different backends or precisions.
        epoch_steps: updates per epoch.
        sample_weights, labels: see `Job`.
    """

    backend: Backend
    network: Network
    dataset: Dataset
    fingerprint: dict[str, Any]
    plan: Plan
    augmentation: Augmentation | None
    schedule: Schedule
    shares: Shares
    is_mixed: bool
    epoch_steps: int
    sample_weights: NDArray[np.float64] | None
    labels: NDArray[np.int64] | None


def assemble(
    chosen: Settings,
    world: World,
    *,
    network: Network | None = None,
    dataset: Dataset | None = None,
    keeps_run: bool = True,
    recorded_steps: int = 2048,
    quiet: bool = False,
    allows_balance: bool = False,
    function: Callable[[float], float] | None = None,
) -> Job:
    """Agree on the job, open the data and the run directory, plan, compile and share parameters.

    Args:
        chosen: settings with the recipe of the network filled in.
        world: the ranks; every rank calls this function.
        network: the network; loaded from the settings if it is None.
        dataset: the data set; opened from the settings if it is None.
        keeps_run: True if there is a run directory to write or to continue.
        recorded_steps: number of steps whose times are kept, the last ones.
        quiet: True prints nothing if the compilation of kernels takes long.
        allows_balance: True if ranks may have unequal shares, and different backends.
        function: of the progress, for schedule ``function``.

    Raises:
        UserError: a mistake of the user, or a difference between the ranks; on every rank.
    """
    agree(world, job_settings(chosen))
    if chosen.balance != OFF and not allows_balance:
        raise AgreedError(
            f"balance is {chosen.balance}, but this command has equal shares for all ranks; "
            "remove it, or use dptrain train"
        )
    inputs = _open_inputs(chosen, world, network, dataset, function, quiet=quiet)
    run = None
    if keeps_run:
        run = call_on_rank_zero(world, lambda: open_run(chosen, inputs.network, inputs.dataset))
    recovered = Recovered()
    if chosen.resume is not None:
        recovered = recover(world, run, keeps=chosen.snapshots)
    plan, kernels = select_kernels(chosen, world, inputs.backend, inputs.plan, run, quiet=quiet)
    inputs = replace(inputs, plan=plan)
    replica = _make_replica(chosen, world, inputs, quiet=quiet)
    cached, validation_at = _cache_images(replica, inputs, world, chosen)
    streams = cached is None and _streams_pixels(replica, inputs, world)
    run_spec = _specify(chosen, world, inputs, replica, is_cached=cached is not None)
    run_spec = replace(run_spec, kernels=kernels)

    loaded: list[str] = []

    def restore() -> Checkpoint | None:
        if starts_from_weights(chosen):
            loaded.append(load_fitting_weights(replica, Path(chosen.weights)))
        return restore_run(chosen, run_spec, run, replica)

    restored = call_on_rank_zero(world, restore)
    first_step, start, rate, stored = world.broadcast_json(
        _restored_progress(restored, run_spec.job)
    )
    run_spec = run_spec.with_schedule_start(start)
    spec = run_spec.job
    schedule = call_on_all_ranks(world, lambda: replace(inputs.schedule, start=start, fixed=rate))
    _check_stop_after(chosen, first_step)
    share_state(world, replica, mixed=inputs.is_mixed)
    shares = Shares.from_dict(stored) if stored else inputs.shares
    if shares.counts != inputs.shares.counts:
        replica = with_counts(chosen, world, replica, shares.counts)
    snapshots = plan_snapshots(world, chosen, replica, run, recovered, first_step)
    plan = replica.plan
    buckets = make_buckets(plan, spec.bucket_kib * 1024)
    recorder = StepRecorder(plan.stages, recorded_steps)
    replay = open_replay(replica, world, run_spec)
    engine = _engine(spec, world, replica, buckets, recorder, shares, replay, mixed=inputs.is_mixed)
    # A signal that ends the compilation leaves the run directory without files that are not hidden.
    path = None if run is None else run.path
    compile_unless_stopped(world, inputs.backend, path, quiet=quiet)
    evaluations, best, spans = list[Record](), None, Spans()

    def begin() -> tuple[list[Record], Spans]:
        if run is None:
            return [], Spans()
        return start_run(run, chosen, run_spec, inputs.network, world, first_step)

    started = call_on_rank_zero(world, begin)
    if started is not None and run is not None:
        evaluations, spans = started
        best = find_best(run, Selection.of(spec, evaluations, first_step))
    evaluations, has_best = world.broadcast_json((evaluations, best is not None))
    selection = Selection.of(spec, evaluations, first_step)
    if not has_best:
        selection.forget_best()
    schedule = replace(schedule, reductions=selection.reductions)
    return Job(
        settings=chosen, spec=spec, run_spec=run_spec, world=world, network=inputs.network,
        dataset=inputs.dataset, backend=inputs.backend, plan=plan, replica=replica,
        buckets=buckets, recorder=recorder, engine=engine, schedule=schedule,
        augmentation=inputs.augmentation, cached_samples=cached, validation_at=validation_at,
        streams_pixels=streams, keeps_run=keeps_run, run=run, first_step=first_step,
        selection=selection, best=BestState(best), shares=shares,
        is_mixed=inputs.is_mixed, sample_weights=inputs.sample_weights, labels=inputs.labels,
        warning=None if restored is None else restored.warning, spans=spans,
        weights="".join(loaded), snapshots=snapshots, replay=replay,
        run_path=_path_of(world, run),
    )  # fmt: skip


def _path_of(world: World, run: RunDirectory | None) -> Path | None:
    """Return the path of the run directory on every rank."""
    path = world.broadcast_json(None if run is None else str(run.path))
    return None if path is None else Path(path)


def _make_replica(chosen: Settings, world: World, inputs: _Inputs, *, quiet: bool) -> Replica:
    """Return the replica of this rank; backends on devices compile their kernels here."""
    plan = inputs.plan
    notice = "" if quiet or not world.is_rank_zero else COMPILING
    with notice_if_slow(notice, inputs.backend.compilation_progress):
        arrays = open_shared_arrays(chosen, world, inputs.backend, plan, mixed=inputs.is_mixed)
        if arrays is not None:
            plan = plan.with_update_share(world.local_size)
        return inputs.backend.make_replica(plan, seed=chosen.seed, arrays=arrays, compiles=False)


def _open_inputs(
    chosen: Settings,
    world: World,
    network: Network | None,
    dataset: Dataset | None,
    function: Callable[[float], float] | None,
    *,
    quiet: bool,
) -> _Inputs:
    """Open network and data, agree on them, and plan."""
    backend = open_backend(chosen, world)
    if chosen.tune:
        call_on_all_ranks(world, backend.require_tuning)
    graph = network or call_on_all_ranks(world, chosen.load_network)
    graph = with_size_of_weights(chosen, graph, world)
    call_on_all_ranks(world, partial(chosen.check_until_accuracy, graph))
    data = dataset or _open_data(chosen, graph, world)
    graph = call_on_all_ranks(world, partial(resize, graph, data.input_shape, data.num_outputs))
    graph = _with_normalization(chosen, graph, data, world)
    is_mixed = are_mixed(chosen, world, backend)
    if is_mixed:
        check_mixed(chosen, graph)
    call_on_rank_zero(world, lambda: _check_weights(chosen, graph))
    data = _with_validation(chosen, data, world)
    fingerprint = call_on_all_ranks(world, lambda: data_fingerprint(data))
    named = {f"data {name}": value for name, value in fingerprint.items()}
    weights = call_on_all_ranks(world, partial(sample_weights, chosen.class_weights, data))
    labels = None
    if chosen.sampling == BALANCED:
        labels = call_on_all_ranks(world, partial(sampled_labels, data))
    agree(world, {"network": digest(network_to_dict(graph)), **named})
    if _reads_again(chosen, len(data.train)):
        with notice_if_slow("" if quiet or not world.is_rank_zero else DECODING):
            data = call_on_all_ranks(world, partial(keep_decoded, data, world.local_size))
    data = with_workers(with_changed_samples(data, chosen.seed), chosen.workers)
    threads = compute_threads(chosen, world)
    world.count_threads(threads)
    shares = call_on_all_ranks(world, lambda: first_shares(chosen, world.size))
    shards = call_on_all_ranks(world, lambda: _micro_shards(chosen, world, graph, shares.counts))

    def make(cuts: Sequence[int] | None) -> Plan:
        return make_plan(
            graph,
            backend,
            _local_batch(chosen, world, shards, shares.counts),
            precision=chosen.precision,
            optimizer=chosen.update_rule(),
            threads=threads,
            micro_shards=shards,
            recompute=chosen.recompute,
            cuts=cuts,
            label_smoothing=chosen.label_smoothing,
            weighted=weights is not None,
            passes=chosen.accumulate,
        )

    plan = _make_plan_with_common_stages(world, make)
    call_on_all_ranks(world, lambda: check_memory(backend, plan, len(data.train), world))
    augmentation = call_on_all_ranks(world, lambda: chosen.make_augmentation(graph.input_shape))
    epoch_steps = steps_per_epoch(len(data.train), chosen.batch_size)
    steps = chosen.total_steps(epoch_steps)
    schedule = call_on_all_ranks(
        world, lambda: chosen.make_schedule(chosen.batch_size, steps, function)
    )
    if function is not None:
        agree(world, {"the schedule function": schedule.sample()})
    return _Inputs(
        backend,
        graph,
        data,
        fingerprint,
        plan,
        augmentation,
        schedule,
        shares,
        is_mixed,
        epoch_steps,
        weights,
        labels,
    )


def with_size_of_weights(chosen: Settings, network: Network, world: World) -> Network:
    """Return the network with the inputs and outputs of the weights with which the run begins.

    The data may replace the outputs (`dptrain.data.adaptation.adapt_request`). A network that
    begins with random weights, or of the user's own, is returned as it is. All ranks
    call this function after they agreed on the settings.
    """
    size = _size_of_weights(chosen, network, world)
    if size is None:
        return network
    return resize(network, size.input_shape, size.outputs).read_from(chosen.weights, "weights")


def _size_of_weights(chosen: Settings, network: Network, world: World) -> WeightsSize | None:
    """Return what the weights decide about a network of the zoo; None if they decide nothing."""

    def size_on_rank_zero() -> WeightsSize | None:
        if not starts_from_weights(chosen):
            return None
        return size_of_weights(network, Path(chosen.weights))

    if not chosen.weights or network.family is None:
        return None
    found = world.broadcast_json(call_on_rank_zero(world, size_on_rank_zero))
    return None if found is None else WeightsSize(tuple(found[0]), *found[1:])


def _with_normalization(chosen: Settings, network: Network, data: Dataset, world: World) -> Network:
    """Return the network with the normalisation that the weights expect of pixels."""
    size = _size_of_weights(chosen, network, world)
    if size is None or not (size.is_normalised and data.preprocessing.has_pixels):
        return network
    return with_normalization(network)


def _check_weights(chosen: Settings, network: Network) -> None:
    """Refuse a file of weights that does not fit the network, before anything is compiled."""
    if starts_from_weights(chosen):
        factors = rate_factors(network, chosen.update_rule())
        frozen = [name for name, factor in factors.items() if not factor]
        check_fitting_weights(network, Path(chosen.weights), frozen)


def _make_plan_with_common_stages(
    world: World, make: Callable[[Sequence[int] | None], Plan]
) -> Plan:
    """Return the plan of this rank, with the same stages as the plans of the other ranks.

    The segments of a recomputation that need the least memory depend on the numbers of samples and
    threads, in which ranks can differ; all ranks use those of rank 0.

    Args:
        world: the ranks.
        make: returns the plan of this rank, with the `cuts` of another plan unless it is None.
    """
    plan = call_on_all_ranks(world, lambda: make(None))
    cuts = tuple(world.broadcast_json(plan.cuts))
    return call_on_all_ranks(world, lambda: plan if plan.cuts == cuts else make(cuts))


def _with_validation(chosen: Settings, dataset: Dataset, world: World) -> Dataset:
    """Set validation data aside, and refuse settings that need it if there is none."""

    def split() -> Dataset:
        found = with_validation(dataset, chosen.validation, chosen.seed)
        chosen.check_validation(found.name, has_validation=found.validation is not None)
        return found

    return call_on_all_ranks(world, split)


def _reads_again(chosen: Settings, count: int) -> bool:
    """Return True if a run reads some of `count` training samples more than once."""
    epoch_steps = steps_per_epoch(count, chosen.batch_size)
    return chosen.total_steps(epoch_steps) > epoch_steps


def _micro_shards(
    chosen: Settings, world: World, network: Network, counts: Counts
) -> MicroShards | None:
    """Return the micro-shards of this rank in the first pass of a step; None if there are none."""
    passes = chosen.accumulate
    if passes > 1 and passes * world.size > chosen.batch_size:
        raise UserError(
            f"--accumulate is {passes}, but {world.size} ranks share {chosen.batch_size} samples "
            f"of a minibatch; use at most {max(chosen.batch_size // world.size, 1)}, so that "
            "each rank has a sample in each pass"
        )
    if not chosen.shards:
        return None
    if chosen.shards < world.size:
        raise UserError(
            f"--shards is {chosen.shards}, but there are {world.size} ranks, and each needs a "
            f"micro-shard; use --shards {world.size} or more, or fewer ranks"
        )
    if passes > 1 and network.statistics:
        raise UserError(
            f"--accumulate {passes} normalises the samples of each pass by their own statistics, "
            "and with --shards these samples depend on the number of ranks; remove one of the two, "
            "or use a network without batch normalisation"
        )
    return MicroShards.of_rank(
        chosen.shards, world.rank, world.size, passes, counts, chosen.batch_size
    )


def _local_batch(chosen: Settings, world: World, shards: MicroShards | None, counts: Counts) -> int:
    """Return the largest number of samples that this rank can have in a pass."""
    if shards is None and counts:
        # Any rank may get all samples but a few.
        samples = chosen.batch_size if chosen.balance == MEASURED else counts[world.rank]
        return max(samples, 1)
    if shards is None:
        return max(math.ceil(chosen.batch_size / (world.size * chosen.accumulate)), 1)
    return shards.num_samples(chosen.batch_size)


def _specify(
    chosen: Settings, world: World, inputs: _Inputs, replica: Replica, *, is_cached: bool
) -> RunSpec:
    """Resolve what is still open, and agree on the specification."""
    plan = inputs.plan
    transport = "host" if inputs.is_mixed else find_transport(chosen, world, replica)
    bucket = 0
    if not inputs.is_mixed:
        bucket = bucket_bytes(chosen, world, transport, on_gpu=replica.memory.on_gpu)
    prefetch = 0
    if not is_cached:
        prefetch = choose_prefetch(chosen, inputs.dataset.train, world, plan.setting.threads)
    spec = resolve_job(
        chosen,
        ranks=world.size,
        epoch_steps=inputs.epoch_steps,
        best_by=chosen.best_epoch_by(
            inputs.network, has_validation=inputs.dataset.validation is not None
        ),
        backend=world.broadcast_json(chosen.backend),
        precision=world.broadcast_json(plan.precision),
        prefetch=prefetch,
        transport=transport,
        bucket_kib=bucket // 1024,
        digest_every=world.broadcast_json(choose_digest_every(chosen, replica)),
        replay_every=call_on_all_ranks(
            world, lambda: choose_replay_every(chosen, replica, mixed=inputs.is_mixed)
        ),
    )
    run_spec = RunSpec(
        version=__version__,
        job=spec,
        network=network_to_dict(inputs.network),
        data=inputs.fingerprint,
        preprocessing=inputs.dataset.preprocessing.to_dict(),
        ranks=describe_ranks(world, replica, plan),
        origins=dict(chosen.origins),
    )
    agree(world, {"specification": run_spec.digest})
    return run_spec


def _restored_progress(
    restored: Checkpoint | None, spec: JobSpec
) -> tuple[int, int, float | None, dict[str, Any]]:
    """Return what rank 0 continues with: nothing is restored at first.

    Returns:
        The step, `JobSpec.schedule_start`, `Schedule.fixed`, and the shares.
    """
    if restored is None:
        return 0, 0, None, {}
    shares = stored_shares(restored.run_facts.shares, spec).to_dict()
    return restored.step, schedule_start(restored, spec), set_rate(restored, spec), shares


def _check_stop_after(chosen: Settings, first_step: int) -> None:
    """Refuse to stop after a step that the run has made; all ranks call this with equal values."""
    if 0 < chosen.stop_after <= first_step:
        raise AgreedError(
            f"--stop-after is {chosen.stop_after}, but the run has made {first_step} steps; use a "
            "larger number, or remove it"
        )


def _open_data(chosen: Settings, network: Network, world: World) -> Dataset:
    return call_on_all_ranks(
        world,
        lambda: open_data(chosen.data, network, seed=chosen.seed, ranks_per_node=world.local_size),
    )


def open_network(chosen: Settings, ranks_per_node: int = 1) -> Network:
    """Return the network that the settings train: one of the zoo has the size of the data.

    Args:
        chosen: settings with the recipe of the network filled in.
        ranks_per_node: ranks on this node that call this function at the same time.

    Raises:
        UserError: the network or the data does not exist, or they do not fit.
    """
    network = chosen.load_network()
    if network.family is None:
        return network
    data = open_data(chosen.data, network, seed=chosen.seed, ranks_per_node=ranks_per_node)
    return resize(network, data.input_shape, data.num_outputs)


def _engine(
    spec: JobSpec,
    world: World,
    replica: Replica,
    buckets: tuple[Bucket, ...],
    recorder: StepRecorder,
    shares: Shares,
    replay: Replay | None,
    *,
    mixed: bool,
) -> Engine:
    leader = alone(shares.counts) if has_idle_ranks(spec) else None
    if leader is not None:
        return make_alone_engine(world, replica, buckets, recorder, leader, mixed=mixed)
    gradient_sum = call_on_all_ranks(
        world,
        lambda: make_gradient_sum(
            spec.strategy, world, replica, buckets, spec.transport, mixed=mixed
        ),
    )
    statistics_sum = None
    if spec.batch_norm == "global":
        statistics_sum = make_statistics_sum(world, replica, gradient_sum.transport)
    return make_engine(
        replica, gradient_sum, buckets, recorder, statistics_sum,
        guards_state=spec.digest_every > 0, replay=replay,
    )  # fmt: skip


def _cache_images(
    replica: Replica, inputs: _Inputs, world: World, chosen: Settings
) -> tuple[CachedSamples | None, int | None]:
    """Let every rank's replica keep the training images in their stored type.

    A device also keeps images that are not in the host's memory, and then those of the validation
    data if there is memory for both.

    Returns:
        The training samples, and the number of the first validation image. None for the samples if
        the host has no memory for the images, a device has too little, or the backend cannot keep
        images; None for the number if only the training images are kept.
    """
    free, data = replica.backend.free_bytes(), inputs.dataset
    # Ranks that share a GPU may read its free memory at the same moment.
    users = world.local_size if chosen.share_gpus else 1
    most = math.inf if free is None else chosen.device_cache * free / users
    train = _cacheable(replica, data.train, on_device=free is not None)
    fits = _changes_images(replica, inputs.augmentation) and train is not None
    if train is not None and free is not None:
        fits = fits and 0 < train.x.nbytes <= most
    if not all(world.all_gather_json(bool(fits))):
        return None, None
    assert isinstance(replica, CropWindowReplica)
    assert train is not None
    images, pixels, validation_at = train.x, train.pixels, None
    if free is not None and data.validation is not None:
        more = _cacheable(replica, data.validation, on_device=True)
        alike = more is not None and (more.readable_shape, more.pixels) == (
            train.readable_shape,
            pixels,
        )
        if more is not None and alike and images.nbytes + more.x.nbytes <= most:
            images, validation_at = JoinedImages((images, more.x)), len(images)
    if not all(world.all_gather_json(validation_at is not None)):
        images, validation_at = train.x, None
    call_on_all_ranks(world, lambda: replica.cache_images(images, pixels))
    return train, validation_at


def _cacheable(replica: Replica, samples: Samples, *, on_device: bool) -> CachedSamples | None:
    """Return samples with the images that a replica can keep; None if they are not in memory."""
    found = images_for(replica, samples)
    if on_device and isinstance(found, StoredSamples):
        return found.cached_on_device()
    return found if isinstance(found, CachedSamples) else None


def _changes_images(replica: Replica, augmentation: Augmentation | None) -> bool:
    """Return True if a replica can make inputs from stored images; otherwise the host does."""
    mixes = augmentation is not None and augmentation.mixes
    return isinstance(replica, CropWindowReplica) and (replica.mixes_images or not mixes)


def _streams_pixels(replica: Replica, inputs: _Inputs, world: World) -> bool:
    """Let replicas prepare for minibatches of 8-bit images; return whether they can."""
    samples = images_for(replica, inputs.dataset.train)
    can = _changes_images(replica, inputs.augmentation) and samples.pixels.dtype == "uint8"
    if not all(world.all_gather_json(can)):
        return False
    assert isinstance(replica, CropWindowReplica)
    assert samples.readable_shape is not None
    return replica.prepare_images(samples.readable_shape, samples.pixels)
