"""Measurement of the cases of a benchmark, one after another, each with a new replica."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dptrain.backends.base import Backend
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.describe import plan_for
from dptrain.errors import UserError
from dptrain.experiments.cases import Case, flops
from dptrain.experiments.memory_budget import (
    HOST_TOO_SMALL,
    Largest,
    MemoryBudget,
    largest_batch,
    memory_budget,
)
from dptrain.experiments.timing import Timing, time_runs
from dptrain.measure.machine.energy import Energy, EnergyMeter, energy_of, meter_facts, open_meter
from dptrain.measure.recorder import StepRecorder
from dptrain.network.network import Network
from dptrain.network.random_batch import random_batch
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import Plan
from dptrain.training.engines import make_engine


@dataclass(frozen=True)
class Result:
    """Result of a case.

    Attributes:
        network, task, samples, backend, precision, threads: as in `Case`; `samples` of a search
            is the batch size that it found.
        parameters: number of parameters of the network.
        fits: True if it fits into memory according to the plan and, if it ran, in fact.
        why: the reason why it was not measured, or a remark; empty otherwise.
        needed_bytes, available_bytes: memory according to the plan, and memory budget.
        allocated_bytes: memory that the replica allocated; 0 without a replica.
        device: name of the GPU; empty on a CPU.
        batch_size: batch size of the plan; less than `samples` if inference runs in parts.
        setup_s: seconds for planning, compiling, allocating and drawing parameters.
        timing: times of the runs; None if nothing was timed. A search has one run.
        samples_per_s: samples divided by the median time.
        gflops: operations of the plan divided by the median time, in 10⁹ per second.
        largest: result of a search according to plans.
        energy: joules per sample of the runs; None if nothing was timed.
        other_cores: mean number of cores that other programs used meanwhile; None if it is unknown.
    """

    network: str
    task: str
    samples: int
    backend: str
    precision: str
    threads: int
    parameters: int
    fits: bool
    why: str
    needed_bytes: int
    available_bytes: int
    batch_size: int
    allocated_bytes: int = 0
    device: str = ""
    setup_s: float = 0.0
    timing: Timing | None = None
    samples_per_s: float = 0.0
    gflops: float = 0.0
    largest: Largest | None = None
    energy: Energy | None = None
    other_cores: float | None = None

    @property
    def case(self) -> Case:
        """The case; for a search, with the batch size that was found."""
        return Case(
            self.network, self.task, self.samples, self.backend, self.precision, self.threads
        )

    @property
    def median_ms(self) -> float:
        """Median time in ms; only valid if `timing` is not None."""
        assert self.timing is not None
        return self.timing.time_ms.median


class TimeEstimator:
    """Estimates the time of cases from the times of earlier ones.

    Args:
        networks: networks by name.
        seconds_per_case: time limit of the timed runs of a case.
    """

    START_RATE = 2e10
    """Assumed operations per second and thread before the first measurement."""
    MIN_OPERATIONS = 1e8
    """Cases with fewer operations are ignored, since overhead dominates their time."""
    SETUP_S, SEARCH_S = 0.5, 0.5
    DRAWN_PER_S = 3e7
    """Number of initial parameters drawn per second."""

    def __init__(self, networks: Mapping[str, Network], seconds_per_case: float) -> None:
        self._networks, self._budget_s = networks, seconds_per_case
        self._rates: dict[tuple[Any, ...], float] = {}

    def learn(self, result: Result) -> None:
        """Record the rate of a case for the following cases of its kind, which are larger."""
        work = flops(self._networks[result.network], result.case)
        if result.timing is not None and work >= self.MIN_OPERATIONS and not result.case.searches:
            self._rates[self._kind(result.case)] = work / result.median_ms * 1e3

    def run_s(self, case: Case) -> float:
        """Return the estimated seconds of one run."""
        start = self.START_RATE * case.threads
        rate = self._rates.get(self._kind(case), start)
        return flops(self._networks[case.network], case) / rate

    def case_s(self, case: Case) -> float:
        """Return the estimated seconds of a whole case, rather too many than too few."""
        if case.searches:
            return self.SEARCH_S
        setup = self.SETUP_S + self._networks[case.network].num_parameters / self.DRAWN_PER_S
        return setup + max(self._budget_s, 2 * self.run_s(case))

    @staticmethod
    def _kind(case: Case) -> tuple[Any, ...]:
        return (*case.configuration, case.trains)


def measure(
    case: Case,
    network: Network,
    backend: Backend,
    *,
    budget_s: float,
    memory: int | None,
) -> Result:
    """Measure a case; the result states the reason if that is not possible.

    Args:
        case: the case.
        network, backend: the network and the backend of the case.
        budget_s: time limit of the timed runs in seconds.
        memory: limit of memory in bytes; None for the free memory.
    """
    # A replica and its stages refer to each other, so only the collector frees the previous one.
    gc.collect()
    budget = memory_budget(backend, memory)
    make = partial(_plan, case, network)
    empty = Result(
        **asdict(case),
        parameters=network.num_parameters,
        fits=False,
        why="",
        needed_bytes=0,
        available_bytes=budget.nbytes,
        batch_size=0,
    )
    try:
        if case.searches:
            return _search(empty, make, budget)
        # Inference may run in parts; a training step may not.
        plan = make(case.samples) if case.trains else make_fitting(make, case.samples, budget)
    except UserError as error:
        return replace(empty, why=str(error))
    found = replace(empty, needed_bytes=budget.needed_bytes(plan), batch_size=plan.batch_size)
    if budget.exceeds_host(plan):
        return replace(found, why=HOST_TOO_SMALL)
    if not budget.fits(plan):
        needs = f"needs {size_text(found.needed_bytes)} of {size_text(budget.nbytes)}"
        return replace(found, why=needs)
    if plan.batch_size < case.samples:
        found = replace(found, why=f"in parts of {plan.batch_size:,} samples")
    return _timed(found, backend, plan, case.samples, budget_s)


def make_fitting(make: Callable[[int], Plan], samples: int, budget: MemoryBudget) -> Plan:
    """Return the plan for `samples` samples, or for the largest number that fits, at least one."""
    try:
        plan = make(samples)
    except UserError:
        # More elements than kernels can index, unless one sample is refused as well.
        return make(largest_batch(make, budget).batch_size or 1)
    return plan if budget.fits(plan) else make(largest_batch(make, budget).batch_size or 1)


def _plan(case: Case, network: Network, batch_size: int) -> Plan:
    return plan_for(
        network,
        backend=case.backend,
        batch_size=batch_size,
        precision=case.precision,
        threads=case.threads,
        training=case.trains,
    )


def _timed(result: Result, backend: Backend, plan: Plan, samples: int, budget_s: float) -> Result:
    try:
        start = time.perf_counter()
        replica = backend.make_replica(plan)
        run = (training_run if plan.training else inference_run)(replica, samples)
        setup_s = time.perf_counter() - start
        meter = open_meter(replica.memory.identity if replica.memory.on_gpu else "")
        timing = time_runs(metered(run, meter, samples), budget_s)
    except MemoryError:
        return replace(result, why="fits according to the plan, but the allocation failed")
    seconds = timing.time_ms.median / 1e3
    work = sum(stage.flops for stage in plan.stages) * samples / plan.batch_size
    return replace(
        result,
        fits=True,
        allocated_bytes=sum(replica.memory_bytes.values()),
        device=replica.memory.name,
        setup_s=setup_s,
        timing=timing,
        samples_per_s=samples / seconds,
        gflops=work / seconds / 1e9,
        energy=energy_of([meter_facts(meter)]),
    )


def metered(run: Callable[[], float], meter: EnergyMeter, samples: int) -> Callable[[], float]:
    """Return a function that calls `run`, and reads the energy after every few runs.

    Args:
        run: runs once and returns its time.
        meter: receives a reading after the first run, from which it counts.
        samples: number of samples of a run.
    """
    runs = 0

    def run_and_read() -> float:
        nonlocal runs
        elapsed = run()
        if meter.readings:
            runs += 1
            meter.read_if_due(runs * samples)
        else:
            meter.read(0)
        return elapsed

    return run_and_read


def _search(result: Result, make: Callable[[int], Plan], budget: MemoryBudget) -> Result:
    """Find the largest batch from plans; nothing is allocated."""
    largest = largest_batch(make, budget)
    n = largest.batch_size
    result = replace(
        result,
        samples=n,
        batch_size=n,
        needed_bytes=largest.needed_bytes,
        largest=largest,
        fits=n > 0,
    )
    if not n:
        return replace(
            result,
            why=f"needs {size_text(largest.needed_bytes)} of "
            f"{size_text(budget.nbytes)} for one sample",
        )
    return result


def training_run(replica: Replica, samples: int) -> Callable[[], float]:
    """Return a function that runs a training step and returns its time in milliseconds.

    The step runs in the engine that trains, with learning rate 0, so that parameters do not change.
    """
    plan = replica.plan
    x, y = random_batch(plan.network, samples)
    batch = Batch(0, 0, x, y, np.arange(samples, dtype=np.int64), samples)
    recorder, buckets = StepRecorder(plan.stages, capacity=1), make_buckets(plan)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, recorder)
    if replica.memory.asynchronous:
        # On a GPU a step whose stages are timed takes longer than other steps.
        engine.time_stages(None)
    batches = itertools.repeat(batch)

    def run() -> float:
        start = time.perf_counter_ns()
        engine.step(batches, 0.0)
        engine.results()
        return (time.perf_counter_ns() - start) / 1e6

    return run


def inference_run(replica: Replica, samples: int) -> Callable[[], float]:
    """Return a function that runs a forward pass and returns its time in milliseconds.

    Inputs and outputs are arrays in host memory, so the time contains the transfers to a GPU.
    """
    x, _ = random_batch(replica.plan.network, samples)

    def run() -> float:
        start = time.perf_counter_ns()
        replica.forward(x)
        return (time.perf_counter_ns() - start) / 1e6

    return run


def size_text(nbytes: float) -> str:
    """Return a size with a decimal unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:.0f} B"
