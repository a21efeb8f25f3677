"""Runs the experiments of `dptrain.measure.profile.losses` in one launch, in interleaved blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from dptrain.batch import Batch
from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.node.activity import Wait
from dptrain.comm.sums.base import GradientSum
from dptrain.comm.sums.experimental import LateSum, OneNumberSum, WithoutSum
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError
from dptrain.files import writing
from dptrain.measure.machine.counters import NO_CYCLES, Counts, HardwareCounters, open_counters
from dptrain.measure.machine.environment import environment
from dptrain.measure.machine.load import Clock, cores_of_other_jobs
from dptrain.measure.profile import losses as measure
from dptrain.measure.profile.analysis import MS, Measured
from dptrain.measure.profile.losses import Losses
from dptrain.measure.profile.profile_files import FLAG, LOSSES
from dptrain.measure.recorder import StepRecorder
from dptrain.training.baseline import open_loader, whole_minibatches
from dptrain.training.engines import FIRST_TIMED, Engine, make_engine
from dptrain.training.job import Job, assemble
from dptrain.training.profiling.known_losses import inject_known_losses
from dptrain.training.profiling.profiling import describe_job, rank_facts
from dptrain.training.settings import Settings

ROUNDS = 10
"""Number of rounds; the intervals have one degree of freedom less."""
WARM_UP = 3
"""Untimed steps at the start of each block, in which caches fill and ranks meet."""
LEAST_DELAY_NS = 5_000_000
"""Shorter delays are hardly longer than what other programs take from a step."""
LATENCY_SUMS = 50
"""Sums of one number per round, of which the mean is the latency."""
BY_STAGE = " by stage"
"""Ending of the names of experiments whose steps a device times stage by stage."""
WITHOUT_STATISTICS_SUMS = (measure.ALONE, measure.UNSUMMED, measure.ONE_NUMBER)
"""Experiments in which each rank uses batch statistics of its own."""
LAST_STEP = 1 << 40
"""More steps than the experiments need: without sums the ranks make different numbers of them."""


@dataclass(frozen=True)
class LossOptions:
    """Options of the experiments.

    Attributes:
        steps: number of timed steps of each experiment.
        known_losses: also inject known losses, see `dptrain.measure.profile.known`.
        delay_s: injected delay in seconds; None for one step, at least `LEAST_DELAY_NS`.
        output: folder of ``losses.json``; None writes nothing.
    """

    steps: int = 100
    delay_s: float | None = None
    output: Path | None = None
    known_losses: bool = True

    def __post_init__(self) -> None:
        if self.steps < ROUNDS:
            raise UserError(
                f"--steps is {self.steps}; expected at least {ROUNDS} with --losses, one for each "
                "round"
            )

    @property
    def block(self) -> int:
        """Number of timed steps in a block."""
        return self.steps // ROUNDS


def measure_losses(
    settings: Settings, world: World, options: LossOptions, *, quiet: bool = False
) -> Losses | None:
    """Measure what each loss of efficiency costs.

    Args:
        settings: settings of the job. Its length and its run directory are ignored.
        world: the ranks; every rank calls this function.
        options: options of the experiments.
        quiet: print no message about compilation.

    Returns:
        The losses on rank 0; None on other ranks.

    Raises:
        UserError: one rank, GPUs whose gradients the host sums, or another mistake of the user; on
            every rank.
    """
    if world.size == 1:
        raise AgreedError("--losses compares ranks; start several, such as mpirun -n 2")
    if settings.accumulate > 1:
        raise AgreedError(
            f"--losses measures steps of one pass, but --accumulate is {settings.accumulate}; "
            "remove --accumulate, or use a smaller --batch-size"
        )
    output = options.output
    call_on_rank_zero(world, lambda: _claim(output))
    chosen = replace(settings, epochs=0, steps=options.steps, run_dir=None, resume=None)
    job = assemble(chosen, world, keeps_run=False, quiet=quiet)
    load = Clock.now()
    with job.engine:
        if job.replica.memory.asynchronous and not job.engine.gradient_sum.enqueues:
            raise AgreedError(
                f"--losses needs GPUs that sum gradients themselves, but transport "
                f"{job.spec.transport} copies them to the host in every experiment; use "
                "--transport peer or nccl"
            )
        with open_loader(
            job,
            range(LAST_STEP),
            batch_size=job.spec.batch_size,
            **job.passes,
        ) as loader:
            experiments = _Experiments(job, whole_minibatches(loader, job), options)
            load = Clock.now()
            experiments.run()
            others = cores_of_other_jobs(world, load)
        known = inject_known_losses(job) if options.known_losses else ()
        found = experiments.result()
        facts = rank_facts(job)
        record = None
        if found is not None:
            times, tables = found
            missing = experiments.counters_missing or _missing_cycles(times)
            record = _record(job, times, tables, options, experiments.delay_ns * MS, facts, missing)
            record = replace(record, known=known, other_cores=others)
        experiments.close()
        if output is not None:
            call_on_rank_zero(world, lambda: _write(record, output))
    return record


def _missing_cycles(times: measure.Times) -> str:
    """Return the reason if a counter of cycles did not run in a block, else ""."""
    alone, unsummed = (times[f"{measure.CYCLES} {n}"] for n in (measure.ALONE, measure.UNSUMMED))
    return "" if alone[:, 0].all() and unsummed.all() else NO_CYCLES


def _claim(output: Path | None) -> None:
    if output is None:
        return
    if (output / LOSSES).exists():
        raise UserError(
            f"{output} contains {LOSSES}, which is never overwritten; choose another {FLAG}"
        )
    with writing(output, FLAG):
        output.mkdir(parents=True, exist_ok=True)


def _write(record: Losses | None, output: Path) -> None:
    assert record is not None
    record.write(output / LOSSES)


class _Experiments:
    """Runs blocks of steps, and keeps their times.

    On GPUs, steps are captured as graphs and several are in flight, as in training. Busy times and
    delays need steps that are timed stage by stage, so these have blocks of their own, in which the
    host waits for each step.

    Attributes:
        delay_ns: the injected delay, the same on every rank.
    """

    def __init__(self, job: Job, batches: Iterator[Batch], options: LossOptions) -> None:
        self._job, self._batches, self._options = job, batches, options
        self._on_device = job.replica.memory.asynchronous
        original = job.engine.gradient_sum
        self._one_number = _one_number_sum(original)
        self._sums: dict[str, GradientSum] = {
            measure.ALONE: WithoutSum(original),
            measure.UNSUMMED: WithoutSum(original),
            measure.ONE_NUMBER: self._one_number,
            measure.AFTER: LateSum(original),
            measure.DURING: original,
            measure.DELAYED_RANK: original,
            measure.DELAYED_IN_TURN: original,
        }
        self._statistics_sum = job.engine.statistics_sum
        if self._statistics_sum is not None:
            self._sums[measure.STATISTICS_SUMS] = self._one_number
        if not original.overlaps:
            # The job itself sums after the backward pass.
            del self._sums[measure.AFTER]
        # In the same order on every rank, because steps are gathered by experiment.
        self._by_stage = list(self._sums)
        if self._on_device:
            self._by_stage = [measure.DELAYED_RANK, measure.DELAYED_IN_TURN]
            for name in (measure.AFTER, measure.DURING):
                self._by_stage.append(f"{name}{BY_STAGE}")
                self._sums[f"{name}{BY_STAGE}"] = self._sums[name]
        self._engines: dict[str, Engine] = {}
        self._times: dict[str, list[float]] = {name: [] for name in self._sums}
        self._times[measure.LATENCY] = []
        self._rows: dict[str, list[NDArray[np.int64]]] = {name: [] for name in self._by_stage}
        self._counters: HardwareCounters | None = None
        self.counters_missing = ""
        self.delay_ns = 0

    def run(self) -> None:
        """Run an untimed block of the job, then all rounds."""
        job, options = self._job, self._options
        for name in (measure.ALONE, measure.ONE_NUMBER, measure.DURING):
            step_ns = self._block(name)
        if options.delay_s is None:
            mean_ns = float(np.mean(job.world.all_gather_json(step_ns)))
            self.delay_ns = max(round(mean_ns), LEAST_DELAY_NS)
        else:
            self.delay_ns = round(1e9 * options.delay_s)
        self._open_counters()
        try:
            self._run_rounds()
        finally:
            self._close_counters()

    def _run_rounds(self) -> None:
        job = self._job
        order = np.random.default_rng(job.spec.seed)
        for _ in range(ROUNDS):
            for name in order.permutation(list(self._sums)).tolist():
                self._times[name].append(self._block(name, keeps=True))
            self._times[measure.LATENCY].append(self._latency_ns())

    def _open_counters(self) -> None:
        """Open hardware counters if every rank has them."""
        if self._on_device:
            self.counters_missing = "the ranks compute on GPUs"
            return
        self._counters, missing = open_counters()
        reasons = [reason for reason in self._job.world.all_gather_json(missing) if reason]
        if not reasons:
            for name in (measure.ALONE, measure.UNSUMMED):
                for what in (measure.INSTRUCTIONS, measure.CYCLES):
                    self._times[f"{what} {name}"] = []
            return
        self.counters_missing = reasons[0]
        self._close_counters()

    def _close_counters(self) -> None:
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def _count(self, name: str, before: Counts | None) -> None:
        """Record the instructions and cycles of the steps of a block."""
        for what in (measure.INSTRUCTIONS, measure.CYCLES):
            times = self._times.get(f"{what} {name}")
            if times is not None:
                count = 0.0
                if before is not None and self._counters is not None:
                    count = float(getattr(self._counters.read().since(before), what))
                times.append(count / self._options.block)

    def result(self) -> tuple[measure.Times, dict[str, Measured]] | None:
        """Return the times in ms and the steps of all ranks on rank 0; None on other ranks."""
        world = self._job.world
        times = world.gather_json(self._times)
        names = StepRecorder(self._job.plan.stages).names
        tables = {}
        for name, rows in self._rows.items():
            gathered = world.gather(np.concatenate(rows))
            if gathered is not None and name != measure.ALONE:
                table = MS * np.stack(gathered)
                tables[name] = Measured(names, table, table, (0.0,) * world.size)
        if times is None:
            return None
        # Counts have the factor of the times, too: only their ratios are used.
        by_name = {name: MS * np.array([own[name] for own in times]).T for name in self._times}
        by_name.setdefault(measure.AFTER, by_name[measure.DURING])
        for name in (measure.DURING, measure.AFTER):
            by_stage = tables.pop(f"{name}{BY_STAGE}", None)
            tables.setdefault(name, by_stage or tables[measure.DURING])
        return by_name, tables

    def close(self) -> None:
        """Release what the experiments captured on a device; every rank calls this."""
        for engine in self._engines.values():
            engine.release_programs()
        if self._on_device:
            self._one_number.close()

    def _engine(self, name: str) -> tuple[Engine, int]:
        """Return the engine of an experiment, and how many untimed steps it needs.

        A device captures steps, so it keeps its engines. On a CPU an engine is made for each block:
        the last one made receives the reports of the sum.
        """
        if name in self._engines:
            return self._engines[name], WARM_UP
        job = self._job
        recorder = StepRecorder(job.plan.stages, capacity=self._options.block)
        statistics_sum = None if name in WITHOUT_STATISTICS_SUMS else self._statistics_sum
        engine = make_engine(job.replica, self._sums[name], job.buckets, recorder, statistics_sum)
        if not self._on_device:
            return engine, WARM_UP
        engine.time_stages(0 if name in self._by_stage else None)
        self._engines[name] = engine
        return engine, FIRST_TIMED + WARM_UP

    def _block(self, name: str, *, keeps: bool = False) -> float:
        """Run a block; return the mean time of its timed steps in ns."""
        job, steps = self._job, self._options.block
        engine, warm_up = self._engine(name)
        batches = self._delayed(name)
        self._meet()
        step_ns, before = 0.0, None
        if name != measure.ALONE or job.world.is_rank_zero:
            _make_steps(engine, batches, warm_up)
            before = self._counters.read() if self._counters is not None else None
            begin = perf_counter_ns()
            _make_steps(engine, batches, steps)
            step_ns = (perf_counter_ns() - begin) / steps
        if keeps:
            self._count(name, before)
            if name in self._by_stage:
                self._rows[name].append(engine.recorder.rows())
        if name == measure.UNSUMMED:
            # A rank that has finished keeps working, so that the others do not become faster.
            self._work_until_all_arrive(engine, batches)
        job.world.barrier()
        return step_ns

    def _meet(self) -> None:
        """Let all ranks start together: they leave a sum at about the same time."""
        self._job.world.barrier()
        self._job.engine.gradient_sum.synchronize()

    def _work_until_all_arrive(self, engine: Engine, batches: Iterator[Batch]) -> None:
        world = self._job.world
        assert world.comm is not None
        request, wait = world.comm.Ibarrier(), Wait(world, "the ranks in steps without sums")
        while not request.Test():
            wait.check()
            _make_steps(engine, batches, 1)
        wait.end()

    def _latency_ns(self) -> float:
        """Return the mean time of the sum of one number."""
        last = len(self._job.buckets) - 1
        self._meet()
        begin = perf_counter_ns()
        for _ in range(LATENCY_SUMS):
            if self._on_device:
                self._one_number.sum_alone(last)
            else:
                self._job.engine.gradient_sum.synchronize()
        self._job.replica.memory.synchronize()
        return (perf_counter_ns() - begin) / LATENCY_SUMS

    def _delayed(self, name: str) -> Iterator[Batch]:
        """Yield minibatches, some of them late by the delay."""
        world = self._job.world
        if name == measure.DELAYED_RANK:
            return _late(self._batches, self.delay_ns, lambda _: world.rank == world.size - 1)
        if name == measure.DELAYED_IN_TURN:
            # Blocks may be shorter than a turn of all ranks, so the turn continues between blocks.
            first = len(self._times[name]) * self._options.block
            own = (world.rank - first) % world.size
            return _late(self._batches, self.delay_ns, lambda i: i % world.size == own)
        return self._batches


def _one_number_sum(original: GradientSum) -> GradientSum:
    """Return the sum of one number instead of the gradients; every rank calls this."""
    if not original.enqueues or original.is_identity:
        return OneNumberSum(original)
    from dptrain.comm.sums.enqueued import EnqueuedOneNumberSum, EnqueuedSum

    assert isinstance(original, EnqueuedSum)
    return EnqueuedOneNumberSum(original)


def _make_steps(engine: Engine, batches: Iterator[Batch], count: int) -> None:
    for number in range(count):
        # A learning rate of 0 keeps the parameters of all ranks equal without sums.
        engine.step(batches, 0.0)
        engine.results(wait=number + 1 == count)


def _late(
    batches: Iterator[Batch], delay_ns: int, is_late: Callable[[int], bool]
) -> Iterator[Batch]:
    """Yield batches, those with a number for which `is_late` is true after a delay.

    The rank computes during the delay, so that no other rank can use its core.
    """
    for number, batch in enumerate(batches):
        if is_late(number):
            end = perf_counter_ns() + delay_ns
            while perf_counter_ns() < end:
                pass
        yield batch


def _record(
    job: Job,
    times: measure.Times,
    tables: dict[str, Measured],
    options: LossOptions,
    delay_ms: float,
    facts: dict[str, object],
    counters_missing: str,
) -> Losses:
    delayed = (measure.DELAYED_RANK, measure.DELAYED_IN_TURN)
    by_stage = times.get(f"{measure.DURING}{BY_STAGE}", times[measure.DURING])
    without_delay = {**times, measure.DURING: by_stage}
    return Losses(
        job=describe_job(job, facts),
        rounds=ROUNDS,
        steps=options.block,
        step_ms=measure.mean_steps(times),
        losses=measure.find_losses(times),
        computation_scaling=measure.computation_scaling(times),
        computation_factors={} if counters_missing else measure.computation_factors(times),
        counters_missing=counters_missing,
        efficiencies=measure.compare_efficiencies(times, tables[measure.AFTER]),
        delays=tuple(
            measure.find_delay(name, delay_ms, without_delay, tables[name], tables[measure.DURING])
            for name in delayed
        ),
        overlaps=job.engine.gradient_sum.overlaps,
        environment=environment(job.world),
    )
