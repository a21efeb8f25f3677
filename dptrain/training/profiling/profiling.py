"""Profile of a job: the steps of training, timed on every rank and analysed on rank 0."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from dptrain.backends.replica import Replica
from dptrain.comm.clocks import ClockOffset, clock_offset
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError
from dptrain.machine import cpu_model, peak_memory
from dptrain.measure.machine.counters import StepCounter, processor_of
from dptrain.measure.machine.energy import EnergyMeter, energy_of, meter_facts
from dptrain.measure.machine.environment import environment
from dptrain.measure.machine.frequency import FrequencyReader
from dptrain.measure.machine.load import Clock, cores_of_other_jobs
from dptrain.measure.nvtx import Ranges, annotate, load_ranges, waiting
from dptrain.measure.profile.analysis import (
    MS,
    Measured,
    kind_profiles,
    profile_efficiencies,
    rank_profiles,
    spread,
    stage_profiles,
    statistics_time,
)
from dptrain.measure.profile.explanations import algorithms
from dptrain.measure.profile.gathering import gather_measured
from dptrain.measure.profile.profile import Profile, Roofs, Spread, SumTime
from dptrain.measure.profile.profile_files import FLAG, TRACE, claim, write_profile
from dptrain.measure.profile.rooflines import highest_roofs, with_roofs
from dptrain.measure.recorder import timing_cost_ms
from dptrain.measure.roofs import measure_roofs
from dptrain.measure.step_record import DELAYS, StepRecord
from dptrain.measure.tensorboard import FOLDER, TensorBoard, import_tensorboard
from dptrain.measure.trace import RankClock, clock_facts, rank_events, write_trace
from dptrain.plan.buckets import Bucket
from dptrain.plan.plan import Plan
from dptrain.records import from_values
from dptrain.training.baseline import open_loader
from dptrain.training.divergence import StableRate, raise_not_finite
from dptrain.training.engines import FIRST_TIMED, DeviceEngine
from dptrain.training.job import Job, assemble
from dptrain.training.output.board import TIMES, layer_memory, layer_times
from dptrain.training.output.display import Display
from dptrain.training.output.progress import Progress
from dptrain.training.output.summary import introduce
from dptrain.training.profiling.energy import (
    block_bounds,
    metered_gpu,
    open_job_meter,
    samples_between,
)
from dptrain.training.profiling.known_losses import inject_known_losses
from dptrain.training.resources import node_facts, possible_efficiency, share_of_cores
from dptrain.training.settings import Settings

SUM_REPEATS, SUM_WARM_UP = 20, 3
"""Timed and untimed repetitions of a gradient sum outside a step."""

SWEEP, LARGEST_SWEPT, SWEEP_REPEATS = range(-6, 3), 2**26, 8
"""Powers of two of the swept sizes over that of the largest bucket, unless it is large; largest
size in bytes; timed repetitions."""
FP32_BYTES = 4

MOST_TRACE_BYTES = 2_000_000_000
"""No viewer opens a larger trace, and MPI counts bytes in 32 bits."""


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile.

    Attributes:
        steps: number of measured steps.
        skip: steps before them, on a GPU at least `FIRST_TIMED`.
        output: folder of the results; None writes nothing.
        roofs: measure the peak rates of the processor for the roofline.
        known_losses: inject known losses after the steps, in at most a third of the time so far.
        trace: write a trace of all measured steps to `output`.
        nvtx: mark stages for NVIDIA's tools. On a GPU steps are captured as graphs, which hold no
            marks; as many steps more are then made at the end, stage by stage, with marks and
            without measurement.
    """

    steps: int = 100
    skip: int = 5
    output: Path | None = None
    roofs: bool = True
    known_losses: bool = False
    trace: bool = False
    nvtx: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps is {self.steps}; expected at least 1")
        if self.skip < 0:
            raise UserError(f"--skip is {self.skip}; expected at least 0")
        if self.trace and self.output is None:
            raise UserError("--trace writes a file, so it needs a folder; try --output DIR")


def profile(
    settings: Settings, world: World, options: ProfileOptions, *, quiet: bool = False
) -> Profile | None:
    """Make steps of training and measure them.

    Args:
        settings: settings of the job. Its length and its run directory are ignored.
        world: the ranks; every rank calls this function.
        options: options of the profile.
        quiet: print no progress.

    Returns:
        The profile on rank 0; None on other ranks. `ProfileOptions.output` holds its files.

    Raises:
        UserError: a mistake of the user; on every rank.
    """
    if options.trace and settings.accumulate > 1:
        raise AgreedError(
            f"--trace shows steps of one pass, but --accumulate is {settings.accumulate}; remove "
            "one of the two"
        )
    output = options.output
    board = call_on_rank_zero(world, lambda: _claim(output, settings.tensorboard))
    ranges = call_on_all_ranks(world, load_ranges) if options.nvtx else None
    total = options.skip + options.steps
    chosen = replace(settings, steps=total, epochs=0, run_dir=None, resume=None)
    recorded = 4 * (total + FIRST_TIMED)
    job = assemble(chosen, world, keeps_run=False, recorded_steps=recorded, quiet=quiet)
    with ExitStack() as stack:
        stack.enter_context(job.engine)
        afterwards = ranges is not None and job.replica.memory.asynchronous
        during = None if afterwards else ranges
        if during is not None:
            annotate(job.replica, job.engine.gradient_sum, during)
        steps = _Steps.of(job, options)
        display = Display(world.is_rank_zero and not quiet, 0, steps.last, task="profiling")
        introduce(job, display, 0)
        before = clock_offset(world)
        record, measured = _measure(job, options, steps, display, during)
        if board is not None and measured is not None:
            _fill_board(board, job, measured)
        if output is not None:
            _write_files(job, record, before, output, trace=options.trace)
        if ranges is not None and afterwards:
            _mark_steps(job, steps.last, options.steps, ranges)
    return record


def _measure(
    job: Job, options: ProfileOptions, steps: _Steps, display: Display, ranges: Ranges | None
) -> tuple[Profile, Measured] | tuple[None, None]:
    """Make the steps and the measurements after them; return the profile and times on rank 0."""
    gpu, start_ns = metered_gpu(job), perf_counter_ns()
    meter, counter = open_job_meter(job, gpu), StepCounter()
    load, frequency = Clock.now(), FrequencyReader(gpu)
    if gpu or not job.replica.memory.on_gpu:
        meter.after_reading = frequency.read
    _make_steps(job, steps, display, meter, counter, trace=options.trace, ranges=ranges)
    frequencies = job.world.gather_json(frequency.facts())
    others = [cores_of_other_jobs(job.world, load)]
    measured = gather_measured(
        job.world,
        job.recorder,
        ahead=job.engine.max_steps_in_flight,
        skip=options.skip,
        most=options.steps,
    )
    sums, statistics_alone = _time_sums(job), _time_statistics_alone(job)
    facts = rank_facts(job, meter, counter)  # Before the copies of the roofs need memory.
    sweep = _time_sweep(job)
    roofs = measure_job_roofs(job) if options.roofs else None
    elapsed_s = max(job.world.all_gather_json((perf_counter_ns() - start_ns) / 1e9))
    known = inject_known_losses(job, elapsed_s / 3) if options.known_losses else ()
    others.append(cores_of_other_jobs(job.world, load))
    facts["other_cores"] = max((each for each in others if each is not None), default=None)
    if measured is None:
        return None, None
    record = profile_record(job, job.replica, job.plan, measured, sums, roofs, facts)
    statistics, statistics_sum = None, job.engine.statistics_sum
    if statistics_alone is not None and statistics_sum is not None:
        statistics = statistics_time(
            job.plan, measured, statistics_alone, separate_kernels=statistics_sum.kernel_ranks > 0
        )
    return (
        replace(
            record,
            sweep=sweep,
            batch_statistics=statistics,
            known=known,
            frequencies=tuple(frequencies or ()),
        ),
        measured,
    )


def _write_files(
    job: Job, record: Profile | None, before: ClockOffset, output: Path, *, trace: bool
) -> None:
    """Write the trace, if requested, and the profile.

    Args:
        job: the job; every rank calls this function.
        record: the profile on rank 0.
        before: offset of this rank's clock before the steps.
        output: folder of the files.
        trace: write a trace.
    """
    if trace:
        stamped, buckets = job.recorder.stamped, job.engine.gradient_sum.buckets
        assert stamped is not None
        gather_trace(job, job.plan, buckets, stamped, before, output)
    # The profile is the last file, so a folder that has it is complete.
    call_on_rank_zero(job.world, lambda: write_results(record, output))


def _claim(output: Path | None, tensorboard: bool) -> TensorBoard | None:
    """Check that the results can be written before anything is measured."""
    if output is None:
        if tensorboard:
            raise UserError("--tensorboard writes files, so it needs a folder; try --output DIR")
        return None
    board = None
    if tensorboard:
        import_tensorboard()
    claim(output)
    if tensorboard:
        board = TensorBoard(output / FOLDER, flag=FLAG)
    return board


def _fill_board(board: TensorBoard, job: Job, measured: Measured) -> None:
    """Write the network, the step time, and the mean time of each stage."""
    board.graph(job.network)
    for number, step_ms in enumerate(measured.step_times.tolist()):
        board.record({"step": number, "step_ms": step_ms})
    hidden = () if measured.knows_delays else DELAYS
    for number, means in enumerate(measured.timed.mean(axis=0).tolist()):
        times = {
            f"{TIMES}{name}": ms
            for name, ms in zip(measured.names, means, strict=True)
            if name not in hidden
        }
        board.record({"step": number, **times})
    means = measured.timed.mean(axis=(0, 1)).tolist()
    times = {f"{TIMES}{name}": ms for name, ms in zip(measured.names, means, strict=True)}
    board.layers(len(measured.step_times), layer_times(job.plan, times), layer_memory(job.plan))
    board.close()


def write_results(record: Profile | None, output: Path) -> None:
    """Write the files of a profile on rank 0."""
    assert record is not None
    write_profile(record, output)


def gather_trace(
    job: Job,
    plan: Plan,
    buckets: Sequence[Bucket],
    records: Sequence[StepRecord],
    before: ClockOffset,
    output: Path,
) -> None:
    """Collect the events of all ranks on the clock of rank 0, and write the trace.

    Args:
        job: the job; every rank calls this function.
        plan: plan of the steps.
        buckets: gradient buckets that were summed.
        records: of the steps of this rank, with time stamps.
        before: offset of this rank's clock before the steps.
        output: folder of the trace.
    """
    world = job.world
    clock = RankClock(before, clock_offset(world))
    # Some viewers ignore events before time 0.
    first = min(world.all_gather_json(clock.to_trace_ns(records[0].begin)))
    clock = replace(clock, zero_ns=first)
    events = rank_events(plan, buckets, records, clock, rank=world.rank, host=socket.gethostname())
    text = np.frombuffer(events.encode(), np.uint8)
    size = sum(world.all_gather_json(text.size))
    if size > MOST_TRACE_BYTES:
        raise AgreedError(
            f"the trace would have {size / 1e9:.1f} GB, and viewers open at most "
            f"{MOST_TRACE_BYTES / 1e9:.1f} GB; try fewer --steps"
        )
    texts = world.gather(text)
    clocks = world.gather_json(clock_facts(world.rank, clock))
    facts = {"network": job.network.name, "ranks": world.size}

    def write() -> None:
        assert texts is not None
        assert clocks is not None
        decoded = [found.tobytes().decode() for found in texts]
        write_trace(output / TRACE, decoded, clocks, facts, FLAG)

    call_on_rank_zero(world, write)


@dataclass(frozen=True)
class _Steps:
    """Ranges of steps, counted from 0.

    Attributes:
        skip: the first measured step.
        timed: the first step that is timed stage by stage; `last` if all are.
        last: the number of steps.
    """

    skip: int
    timed: int
    last: int

    @classmethod
    def of(cls, job: Job, options: ProfileOptions) -> _Steps:
        """Choose the ranges so that enough steps have a whole minibatch."""
        asynchronous = job.replica.memory.asynchronous
        skip = max(options.skip, FIRST_TIMED) if asynchronous else options.skip
        ordinary = _with_whole(job, 0, skip, options.steps)
        last = _with_whole(job, ordinary, 0, options.steps) if asynchronous else ordinary
        return cls(skip, ordinary, last)


def _with_whole(job: Job, first: int, skip: int, count: int) -> int:
    """Return the end of a range from `first` + `skip` that has `count` whole minibatches."""
    step = first + skip
    while count:
        count -= _is_whole(job, step)
        step += 1
    return step


def _is_whole(job: Job, step: int) -> bool:
    batch_size, size = job.spec.batch_size, len(job.dataset.train)
    return size < batch_size or size % batch_size == 0 or (step + 1) % job.spec.epoch_steps != 0


def _make_steps(
    job: Job,
    steps: _Steps,
    display: Display,
    meter: EnergyMeter,
    counter: StepCounter,
    *,
    trace: bool,
    ranges: Ranges | None,
) -> None:
    """Run the training loop without evaluation, checkpoints and records."""
    if job.replica.memory.asynchronous:
        job.engine.time_stages(steps.timed)
    progress = Progress(0, job.network.loss.targets != "values")
    batch_size, stable = job.spec.batch_size, StableRate()
    blocks = block_bounds(steps.skip, steps.timed)
    with (
        open_loader(
            job,
            range(steps.last),
            batch_size=batch_size,
            **job.passes,
        ) as loader,
        display,
    ):
        batches = loader if ranges is None else waiting(loader, ranges)
        for number in range(steps.last):
            if number == steps.skip and trace:
                job.recorder.stamped = []
            if number == steps.skip:
                counter.start()
            if number in blocks:
                meter.read(samples_between(job, steps.skip, number))
            meter.poll()
            job.engine.step(batches, job.schedule.rate(number))
            for result in job.engine.results(wait=number + 1 == steps.last):
                if not math.isfinite(result.loss):
                    raise_not_finite(job, result, stable)
                stable.add(result.loss, result.learning_rate)
                progress.add(result)
                display.step(progress)
        counter.stop(steps.last - steps.skip, job.plan.setting.threads)
        if steps.last in blocks:
            meter.read(samples_between(job, steps.skip, steps.last))


def _mark_steps(job: Job, first: int, count: int, ranges: Ranges) -> None:
    """Make steps stage by stage with marks around the stages; they are not measured."""
    engine = job.engine
    annotate(job.replica, engine.gradient_sum, ranges)
    if isinstance(engine, DeviceEngine):
        engine.steps.captures_timed = False
    engine.time_stages(0)
    last = first + count
    with open_loader(
        job,
        range(first, last),
        batch_size=job.spec.batch_size,
        **job.passes,
    ) as loader:
        batches = waiting(loader, ranges)
        for number in range(first, last):
            engine.step(batches, job.schedule.rate(number))
        engine.results(wait=True)


def _time_sums(job: Job) -> tuple[SumTime, ...]:
    """Time the sum of each size of bucket outside a step, on all ranks at once."""
    sums, replica = job.engine.gradient_sum, job.replica
    if job.world.size == 1:
        return ()
    # Repeated sums of gradients would overflow.
    zeros = np.zeros(replica.flat_gradients.shape, replica.flat_gradients.dtype)
    replica.memory.upload(replica.flat_gradients, zeros)
    sizes = [(bucket.stop - bucket.start) * job.plan.itemsize for bucket in sums.buckets]
    found = []
    for size, count in sorted(Counter(sizes).items()):
        number = sizes.index(size)
        repeats = range(SUM_WARM_UP + SUM_REPEATS)
        laps = [job.engine.time_sum_alone(number) for _ in repeats][SUM_WARM_UP:]
        slowest = np.max(job.world.all_gather_json(laps), axis=0)
        found.append(SumTime(size, count, spread(MS * slowest)))
    return tuple(found)


def _time_statistics_alone(job: Job) -> Spread | None:
    """Time the largest sum of batch statistics outside a step; None if there is none."""
    if job.engine.statistics_sum is None:
        return None
    repeats = range(SUM_WARM_UP + SUM_REPEATS)
    laps = [job.engine.time_statistics_sum_alone() for _ in repeats][SUM_WARM_UP:]
    return spread(MS * np.max(job.world.all_gather_json(laps), axis=0))


def _time_sweep(job: Job) -> tuple[SumTime, ...]:
    """Time all-reduces of nine sizes by MPI, which determine latency, bandwidth and algorithm."""
    world = job.world
    if world.size == 1 or job.replica.memory.asynchronous:
        return ()
    largest = max(bucket.stop - bucket.start for bucket in job.engine.gradient_sum.buckets)
    found = []
    for count in swept_counts(largest):
        array = np.zeros(count, np.float32)
        laps = []
        for _ in range(SUM_WARM_UP + SWEEP_REPEATS):
            world.barrier()
            # Ranks leave the barrier at different times, a small all-reduce almost at once.
            world.all_reduce(np.zeros(1, np.float32))
            begin = perf_counter_ns()
            world.all_reduce(array)
            laps.append(perf_counter_ns() - begin)
        slowest = np.max(world.all_gather_json(laps[SUM_WARM_UP:]), axis=0)
        found.append(SumTime(array.nbytes, 0, spread(MS * slowest)))
    return tuple(found)


def swept_counts(largest: int) -> list[int]:
    """Return the numbers of fp32 values that are swept, in ascending order.

    If the largest swept size would exceed `LARGEST_SWEPT`, all sizes are smaller by the same power
    of two, so that there are nine sizes for every network.

    Args:
        largest: values of the largest bucket; fewer than 64 have fewer sizes.
    """
    highest_bytes = FP32_BYTES * largest * 2.0 ** max(SWEEP)
    shift = max(math.ceil(math.log2(highest_bytes / LARGEST_SWEPT)), 0)
    return sorted({max(int(largest * 2.0 ** (power - shift)), 1) for power in SWEEP})


def measure_job_roofs(job: Job) -> Roofs:
    """Measure the limits of the roofline model on all ranks at the same time.

    Ranks share the memory and the last cache of a node, as in a step.
    """
    job.world.barrier()
    own = measure_roofs(job.backend, job.plan, job.replica.memory, job.world.local_size)
    return highest_roofs(
        [from_values(Roofs, values) for values in job.world.all_gather_json(asdict(own))]
    )


def rank_facts(
    job: Job, meter: EnergyMeter | None = None, counter: StepCounter | None = None
) -> dict[str, Any]:
    """Return facts about the job and about each rank, the same on every rank."""
    world = job.world
    mine = {
        "host": socket.gethostname(),
        "device": job.replica.memory.name or cpu_model(),
        "peak": peak_memory(),
        "cores": share_of_cores(world)[0],
        "first_on_node": world.first_on_node(),
        "energy": None if meter is None else meter_facts(meter),
        "counts": None if counter is None else counter.facts(),
    }
    ranks = world.all_gather_json(mine)
    possible = possible_efficiency(world, job.plan.setting.threads)
    size = node_facts(world, job.replica.memory.num_devices)
    return {"ranks": ranks, "possible": possible, "node": size}


def profile_record(
    job: Job,
    replica: Replica,
    plan: Plan,
    measured: Measured,
    sums: tuple[SumTime, ...],
    roofs: Roofs | None,
    facts: dict[str, Any],
) -> Profile:
    """Return the profile of the steps of a replica.

    Args:
        job: the job.
        replica: the replica of this rank that made the steps.
        plan: its plan.
        measured: times of all ranks.
        sums: times of gradient sums alone.
        roofs: limits of the roofline model; None if not measured.
        facts: of `rank_facts`, and ``other_cores`` during the measurement.
    """
    ranks = facts["ranks"]
    step_times = measured.step_times
    memory = job.memory_bytes if replica is job.replica else dict(replica.memory_bytes)
    memory["total"] = sum(memory.values())
    memory["peak"] = max(rank["peak"] for rank in ranks)
    samples = min(job.spec.batch_size, len(job.dataset.train))
    notes = {**algorithms(plan), **replica.notes}
    record = Profile(
        job={**describe_job(job, facts), "task": "training" if plan.training else "inference"},
        steps=measured.steps.shape[1],
        step_ms=spread(step_times),
        step_times_ms=tuple(step_times.tolist()),
        samples_per_s=samples / float(step_times.mean()) * 1e3,
        timing_ms=0.0
        if replica.memory.asynchronous
        else timing_cost_ms(
            plan.stages, sums=job.world.size > 1, step_ms=float(np.median(step_times))
        ),
        parts=measured.parts,
        step_parts=measured.step_parts,
        stages=stage_profiles(plan, measured, notes),
        kinds=kind_profiles(plan, measured, notes),
        ranks=rank_profiles(
            measured, [rank["host"] for rank in ranks], [rank["device"] for rank in ranks]
        ),
        sums=sums,
        roofs=None,
        memory=memory,
        environment=environment(job.world),
        pop=profile_efficiencies(plan, measured) if plan.training else None,
        energy=energy_of([rank["energy"] for rank in ranks]),
        processor=None
        if job.replica.memory.on_gpu
        else processor_of([rank["counts"] for rank in ranks]),
        other_cores=facts["other_cores"],
    )
    return with_roofs(record, roofs)


def describe_job(job: Job, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the job; `facts` are those of `rank_facts`."""
    spec, sums = job.spec, job.engine.gradient_sum
    return {
        "network": job.network.name,
        "data": spec.data,
        "backend": spec.backend,
        "precision": job.plan.precision,
        "strategy": spec.strategy,
        "transport": "none" if sums.is_identity else spec.transport,
        "ranks": job.world.size,
        "nodes": sum(rank["first_on_node"] for rank in facts["ranks"]),
        "threads": job.plan.setting.threads,
        "batch_size": spec.batch_size,
        "local_batch": job.local_batch,
        "optimizer": spec.optimizer,
        "parameters": job.network.num_parameters,
        "seed": spec.seed,
        "bucket_kib": spec.bucket_kib or None,
        "buckets": len(sums.buckets),
        "prefetch": spec.prefetch,
        "cores": min(rank["cores"] for rank in facts["ranks"]),
        "possible": facts["possible"],
        **facts["node"],
    }
