"""Measuring the cases of a bench, one after another, each in memory of its own."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend
from dptrain.backends.replica import Replica
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data.loader import Batch
from dptrain.describe import plan_for
from dptrain.errors import UserError
from dptrain.experiments.cases import Case, flops
from dptrain.experiments.room import CROWDED, Largest, Room, largest_batch, room_of
from dptrain.experiments.timing import Timing, time_runs
from dptrain.measure.profile import Spread
from dptrain.measure.recorder import StepRecorder
from dptrain.network.network import Network
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import Plan
from dptrain.training.engines import make_engine

POOL = 256
"""Different samples in a batch; a larger one repeats them."""

LONGEST_STEP_S = 60.0
"""The largest batch is tried out unless its step should take longer than this."""


@dataclass(frozen=True)
class Result:
    """What was found of a case.

    Attributes:
        network, task, samples, backend, precision, threads: as in `Case`; `samples` of a search
            are those that it found.
        parameters: of the network.
        fits: whether it fitted, by plan and, where it was tried, indeed.
        why: what a reader should know: why it was not measured, or not as asked for.
        need_bytes, room_bytes: memory by plan, and at hand.
        taken_bytes: what the replica took, all told; 0 where there was none.
        device: kind of GPU; empty where the processor computes.
        batch_size: of the plan; below `samples` where inference goes piece by piece.
        setup_s: of planning, compiling, allocating, and drawing parameters.
        timing: None where nothing was timed. Of a search: of its only step.
        samples_per_s: samples over the median time.
        gflops: operations by plan over the median time, 10⁹ a second.
        largest: what a search found by plan.
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
    need_bytes: int
    room_bytes: int
    batch_size: int
    taken_bytes: int = 0
    device: str = ""
    setup_s: float = 0.0
    timing: Timing | None = None
    samples_per_s: float = 0.0
    gflops: float = 0.0
    largest: Largest | None = None

    @property
    def case(self) -> Case:
        """What it is of; of a search, with the batch that was found."""
        return Case(
            self.network, self.task, self.samples, self.backend, self.precision, self.threads
        )

    @property
    def median_ms(self) -> float:
        """Median time; only of what was timed."""
        assert self.timing is not None
        return self.timing.time_ms.median

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Result:
        """Bring back what `asdict` has taken apart."""
        values = {name: record[name] for name in cls.__dataclass_fields__}
        timing, largest = values["timing"], values["largest"]
        if timing is not None:
            values["timing"] = Timing(**{**timing, "time_ms": Spread(**timing["time_ms"])})
        return cls(**{**values, "largest": None if largest is None else Largest(**largest)})


class Pace:
    """How long cases should take, from how long those before took.

    Args:
        networks: by name.
        seconds_per_case: budget of the timing.
    """

    START_RATE = 2e10
    """Operations a second and thread, before anything is known."""
    TELLING = 1e8
    """Operations; the time of less is that of starting them."""
    SETUP_S = 0.5
    DRAWN_PER_S = 3e7
    """Parameters a second."""

    def __init__(self, networks: Mapping[str, Network], seconds_per_case: float) -> None:
        self._networks, self._budget_s = networks, seconds_per_case
        self._rates: dict[tuple[Any, ...], float] = {}

    def learn(self, result: Result) -> None:
        """Cases grow, so the last of a kind says most of the next; very small ones say nothing."""
        work = flops(self._networks[result.network], result.case)
        if result.timing is not None and work >= self.TELLING and not result.case.searches:
            self._rates[self._kind(result.case)] = work / result.median_ms * 1e3

    def run_s(self, case: Case) -> float:
        """Seconds of one run."""
        start = self.START_RATE * case.threads
        rate = self._rates.get(self._kind(case), start)
        return flops(self._networks[case.network], case) / rate

    def case_s(self, case: Case) -> float:
        """Seconds of the whole case, about, and rather too many."""
        setup = self.SETUP_S + self._networks[case.network].num_parameters / self.DRAWN_PER_S
        return setup + max(self._budget_s, 2 * self.run_s(case))

    @staticmethod
    def _kind(case: Case) -> tuple[Any, ...]:
        return (*case.means, case.trains)


def measure(
    case: Case,
    network: Network,
    backend: Backend,
    pace: Pace,
    *,
    budget_s: float,
    memory: int | None,
) -> Result:
    """Measure a case, or say why it cannot be.

    Args:
        case: what to measure.
        network, backend: that it names.
        pace: says whether a step at the largest batch is worth its time.
        budget_s: seconds of timing.
        memory: bytes that may be used at most; None for what is free.
    """
    gc.collect()  # A replica and its stages know each other: the last one's memory is still taken.
    room = room_of(backend, memory)
    make = partial(_plan, case, network)
    empty = Result(**asdict(case), parameters=network.num_parameters, fits=False, why="",
                   need_bytes=0, room_bytes=room.nbytes, batch_size=0)  # fmt: skip
    try:
        if case.searches:
            return _search(empty, backend, make, room, pace)
        # An answer may be computed piece by piece; a step of training may not.
        plan = make(case.samples) if case.trains else make_fitting(make, case.samples, room)
    except UserError as error:
        return replace(empty, why=str(error))
    found = replace(empty, need_bytes=room.need(plan), batch_size=plan.batch_size)
    if room.crowds_host(plan):
        return replace(found, why=CROWDED)
    if not room.holds(plan):
        needs = f"needs {size_words(found.need_bytes)} of {size_words(room.nbytes)}"
        return replace(found, why=needs)
    if plan.batch_size < case.samples:
        found = replace(found, why=f"in pieces of {plan.batch_size:,}")
    return _timed(found, backend, plan, case.samples, budget_s)


def make_fitting(make: Callable[[int], Plan], samples: int, room: Room) -> Plan:
    """The plan for so many samples, or for as many of them as fit; one at least."""
    try:
        plan = make(samples)
    except UserError:
        # More than kernels can count, unless a single sample is refused as well.
        return make(largest_batch(make, room).batch_size or 1)
    return plan if room.holds(plan) else make(largest_batch(make, room).batch_size or 1)


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
        timing = time_runs(run, budget_s)
    except MemoryError:
        return replace(result, why="fits by plan, but could not be allocated")
    seconds = timing.time_ms.median / 1e3
    work = sum(stage.flops for stage in plan.stages) * samples / plan.batch_size
    return replace(
        result,
        fits=True,
        taken_bytes=sum(replica.memory_bytes.values()),
        device=replica.memory.name,
        setup_s=setup_s,
        timing=timing,
        samples_per_s=samples / seconds,
        gflops=work / seconds / 1e9,
    )


def _search(
    result: Result, backend: Backend, make: Callable[[int], Plan], room: Room, pace: Pace
) -> Result:
    """Find the largest batch by plan, then try one step of it."""
    largest = largest_batch(make, room)
    n = largest.batch_size
    result = replace(
        result, samples=n, batch_size=n, need_bytes=largest.need_bytes, largest=largest
    )
    if not n:
        return replace(result, why=f"needs {size_words(largest.need_bytes)} of "
                                   f"{size_words(room.nbytes)} for one sample")  # fmt: skip
    expected_s = pace.run_s(result.case)
    if expected_s > LONGEST_STEP_S:
        return replace(result, fits=True, why=f"by plan alone: a step takes some {expected_s:.0f} "
                                              "s; try less with --memory")  # fmt: skip
    # No budget: one run to warm up, one that is timed.
    return _timed(result, backend, make(n), n, 0.0)


def training_run(replica: Replica, samples: int) -> Callable[[], float]:
    """Steps of training, by the very code that trains; the parameters stay what they are.

    Returns:
        What makes a step and gives its milliseconds.
    """
    plan = replica.plan
    x, y = random_batch(plan.network, samples)
    batch = Batch(0, 0, x, y, np.arange(samples, dtype=np.int64), samples)
    recorder, buckets = StepRecorder(plan.stages, capacity=1), make_buckets(plan, None)
    alone = make_gradient_sum("mirrored", World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, recorder)
    if replica.memory.asynchronous:
        # A step that is timed stage by stage takes longer than others there.
        engine.time_stages(None)
    batches = itertools.repeat(batch)

    def run() -> float:
        start = time.perf_counter_ns()
        engine.step(batches, 0.0)
        engine.results()
        return (time.perf_counter_ns() - start) / 1e6

    return run


def inference_run(replica: Replica, samples: int) -> Callable[[], float]:
    """Answers to `samples` samples that lie in the host's memory, as arrays in the host's memory.

    Returns:
        What computes them and gives its milliseconds.
    """
    x, _ = random_batch(replica.plan.network, samples)

    def run() -> float:
        start = time.perf_counter_ns()
        replica.forward(x)
        return (time.perf_counter_ns() - start) / 1e6

    return run


def random_batch(network: Network, n: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Inputs of unit variance and targets that suit the loss, at most `POOL` different ones."""
    random, pool, width = np.random.default_rng(0), min(n, POOL), network.num_outputs
    x = random.standard_normal((pool, *network.input_shape), np.float32)
    y: NDArray[Any]
    if network.loss.targets == "classes":
        y = random.integers(0, width, pool).astype(np.int32)
    else:
        y = random.integers(0, 2, (pool, width)).astype(np.float32)
    order = np.arange(n) % pool
    return x[order], y[order]


def size_words(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:.0f} B"
