"""Profile of inference: forward passes of each rank, timed stage by stage like training.

The ranks compute their shares of the minibatches of training, without gradients and without
waiting for each other.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.comm.clocks import clock_offset
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.machine.counters import StepCounter
from dptrain.measure.machine.energy import EnergyMeter
from dptrain.measure.machine.load import Clock, cores_of_other_jobs
from dptrain.measure.profile.gathering import gather_measured
from dptrain.measure.profile.profile import Profile
from dptrain.measure.profile.profile_files import claim
from dptrain.measure.recorder import StepRecorder
from dptrain.network.biases import separate_biases
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import Plan, make_plan
from dptrain.training.baseline import open_loader, whole_minibatches
from dptrain.training.engines import FIRST_TIMED
from dptrain.training.job import Job, assemble
from dptrain.training.profiling.energy import block_bounds, metered_gpu, open_job_meter
from dptrain.training.profiling.forward_passes import ForwardPasses
from dptrain.training.profiling.profiling import (
    ProfileOptions,
    gather_trace,
    measure_job_roofs,
    profile_record,
    rank_facts,
    write_results,
)
from dptrain.training.settings import Settings


def profile_inference(
    settings: Settings,
    world: World,
    options: ProfileOptions,
    *,
    fused: bool = True,
    quiet: bool = False,
) -> Profile | None:
    """Make forward passes of all ranks and measure them.

    Args:
        settings: settings of the job; those of training have no effect.
        world: the ranks; every rank calls this function.
        options: options of the profile.
        fused: False computes each layer, and the addition of biases, by stages of its own.
        quiet: print no message about compilation.

    Returns:
        The profile on rank 0; None on other ranks. `ProfileOptions.output` holds its files.

    Raises:
        UserError: a mistake of the user; on every rank.
    """
    if options.nvtx or settings.tensorboard:
        raise UserError("--inference supports neither --nvtx nor --tensorboard; remove them")
    output = options.output
    if output is not None:
        call_on_rank_zero(world, lambda: claim(output))
    chosen = replace(
        settings,
        steps=options.skip + options.steps,
        epochs=0,
        run_dir=None,
        resume=None,
        accumulate=1,
    )
    job = assemble(chosen, world, keeps_run=False, quiet=quiet)
    with ExitStack() as stack:
        stack.enter_context(job.engine)
        plan = _forward_plan(job, fused=fused)
        replica = call_on_all_ranks(world, lambda: _make_replica(job, plan))
        # The loss of the plan is for evaluations.
        stages = tuple(stage for stage in plan.stages if stage.phase is not Phase.LOSS)
        plan = replace(plan, stages=stages)
        asynchronous = replica.memory.asynchronous
        if asynchronous:
            options = replace(options, skip=max(options.skip, FIRST_TIMED))
        # On a device, the passes are made again with timing by stage.
        recorder = StepRecorder(stages, capacity=2 * (options.skip + options.steps))
        before = clock_offset(world)
        meter, counter = open_job_meter(job, metered_gpu(job)), StepCounter()
        passes = ForwardPasses.of(replica, recorder, timeout=world.timeout)
        load = Clock.now()
        _make_passes(job, passes, recorder, meter, counter, options)
        measured = gather_measured(
            world, recorder, ahead=int(asynchronous), skip=options.skip, most=options.steps
        )
        facts = rank_facts(job, meter, counter)  # Before the copies of the roofs need memory.
        roofs = measure_job_roofs(job) if options.roofs else None
        facts["other_cores"] = cores_of_other_jobs(job.world, load)
        record = None
        if measured is not None:
            record = profile_record(job, replica, plan, measured, (), roofs, facts)
        if output is not None:
            if options.trace:
                assert recorder.stamped is not None
                gather_trace(job, plan, (), recorder.stamped, before, output)
            call_on_rank_zero(world, lambda: write_results(record, output))
    return record


def _forward_plan(job: Job, *, fused: bool) -> Plan:
    """Return the plan of inference with the batch size of this rank."""
    return make_plan(
        job.network if fused else separate_biases(job.network),
        job.backend,
        job.local_batch,
        precision=job.plan.precision,
        training=False,
        threads=job.plan.setting.threads,
        fused=fused,
    )


def _make_replica(job: Job, plan: Plan) -> Replica:
    replica = job.backend.make_replica(plan, seed=job.spec.seed)
    if job.cached_samples is not None or job.streams_pixels:
        assert isinstance(replica, CropWindowReplica)
        replica.share_cached_images(job.replica)
    return replica


def _make_passes(
    job: Job,
    passes: ForwardPasses,
    recorder: StepRecorder,
    meter: EnergyMeter,
    counter: StepCounter,
    options: ProfileOptions,
) -> None:
    """Make forward passes, on a device first without timing by stage and then with it."""
    world, last = job.world, options.skip + options.steps
    timed = passes.warm_up + options.steps if passes.warm_up else 0
    with open_loader(
        job,
        range((last + timed) * 2),
        batch_size=job.spec.batch_size,
        **job.passes,
    ) as loader:
        whole = min(job.spec.batch_size, len(job.dataset.train))
        batches = whole_minibatches(loader, job)
        blocks = block_bounds(options.skip, last)
        world.barrier()
        for number in range(last):
            if number == options.skip:
                counter.start()
            if number in blocks:
                meter.read((number - options.skip) * whole)
            meter.poll()
            if number == options.skip and options.trace:
                recorder.stamped = []
            passes.make(batches, by_stage=False)
        counter.stop(options.steps, job.plan.setting.threads)
        if last in blocks:
            meter.read((last - options.skip) * whole)
        for _ in range(timed):
            passes.make(batches, by_stage=True)
