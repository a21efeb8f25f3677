"""Injects the known losses of `dptrain.measure.profile.known` into a job, and measures them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from dptrain.batch import Batch
from dptrain.measure.machine.scheduling import RunDelays, run_delay_ns
from dptrain.measure.profile.analysis import MS, Measured
from dptrain.measure.profile.known import DELAY, INJECTED, LOST_CORE, MESSAGE, KnownLoss, slowed
from dptrain.measure.recorder import StepRecorder
from dptrain.native.occupation import OccupiedCore
from dptrain.training.baseline import open_loader, whole_minibatches
from dptrain.training.engines import FIRST_TIMED, make_engine
from dptrain.training.job import Job

NORMAL = "normal"
ROUNDS = 10
"""Largest number of rounds of a launch."""
BLOCK, BLOCK_MS, MOST_STEPS = 2, 40.0, 40
"""Steps of a block, at least so many and as many as take so long; and the largest number. A thread
keeps a core for some milliseconds before another one gets it."""
LEAST_MS, STEP_SHARE = 5.0, 0.25
"""A delay is this share of a step, so that rounds are short, but at least so many ms: shorter ones
are hardly longer than what other programs take from a step."""
WARM_UP = 1
"""Untimed steps at the start of a block."""
PIECE_BYTES, MOST_PIECES = 1 << 16, 1000
"""Bytes of a piece of the message, and the largest number of pieces. All are the same memory: a
message as large as a cache would also slow down the step after it."""
LAST_STEP = 1 << 40


def inject_known_losses(job: Job, budget_s: float = math.inf) -> tuple[KnownLoss, ...]:
    """Inject known losses into steps of a job, whose parameters do not change.

    Every rank calls this function.

    Args:
        job: the job; its engine makes no steps afterwards.
        budget_s: longest duration in seconds; fewer rounds are made if they would take longer.

    Returns:
        One entry for each of `INJECTED` on rank 0, and nothing on other ranks. A loss that cannot
        be injected here has the reason.
    """
    if job.world.size == 1:
        reason = "one rank loses nothing to others"
        return tuple(KnownLoss(name, reason=reason) for name in INJECTED)
    with (
        open_loader(job, range(LAST_STEP), batch_size=job.spec.batch_size, **job.passes) as loader,
        _Injections(job, whole_minibatches(loader, job)) as injections,
    ):
        injections.run(budget_s)
        return injections.result()


class _Injections:
    """Blocks of steps with and without injected losses.

    Args:
        job: the job.
        batches: its minibatches.
    """

    def __init__(self, job: Job, batches: Iterator[Batch]) -> None:
        self._job, self._batches, self._stack = job, batches, ExitStack()
        self._on_device = job.replica.memory.asynchronous
        self._recorder = StepRecorder(job.plan.stages, capacity=MOST_STEPS)
        self._engine = make_engine(
            job.replica, job.engine.gradient_sum, job.buckets, self._recorder,
            job.engine.statistics_sum,
        )  # fmt: skip
        if self._on_device:
            self._engine.time_stages(0)
        self._run_delays = RunDelays()
        self._run_delays.follow_caller()
        self._reasons = {LOST_CORE: self._find_core()}
        self._steps, self._delay_ns, self._slowest, self._core = BLOCK, 0, 0, -1
        self._piece, self._pieces = np.zeros(PIECE_BYTES // 4, np.float32), 1
        self._times: dict[str, list[float]] = {name: [] for name in (NORMAL, *INJECTED)}
        self._alone: list[float] = []
        self._busy: list[NDArray[np.float64]] = []
        self._delays: dict[str, list[list[float]]] = {NORMAL: [], LOST_CORE: []}

    def __enter__(self) -> _Injections:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if self._on_device:
            self._engine.release_programs()

    def run(self, budget_s: float) -> None:
        """Choose the sizes of the losses, then run as many rounds as the budget allows."""
        world, start_ns = self._job.world, perf_counter_ns()
        warm_up = FIRST_TIMED if self._on_device else 0
        for _ in range(warm_up + WARM_UP):
            self._step(None)
        step_ms = self._agreed(self._block(NORMAL))
        busy = world.all_gather_json(float(self._measured_busy().mean()))
        self._slowest = int(np.argmax(busy))
        self._steps = min(max(BLOCK, math.ceil(BLOCK_MS / step_ms)), MOST_STEPS)
        delay_ms = max(STEP_SHARE * step_ms, LEAST_MS)
        self._delay_ns = round(delay_ms / MS)
        # The fastest sum, because other programs interrupt some of them.
        fastest_ms = self._agreed(min(self._message_times()))
        self._pieces = min(math.ceil(delay_ms / max(fastest_ms, 1e-3)), MOST_PIECES)
        self._stack.enter_context(self._bound())
        names = [name for name in (NORMAL, *INJECTED) if not self._reasons.get(name)]
        order = np.random.default_rng(self._job.spec.seed)
        longest_s = 0.0
        for _ in range(ROUNDS):
            begin = perf_counter_ns()
            # Of the first round, the duration is estimated: all blocks but one add a delay.
            round_s = longest_s or (self._steps + WARM_UP) * len(names) * (step_ms + delay_ms) / 1e3
            if max(world.all_gather_json((begin - start_ns) / 1e9 + round_s)) > budget_s:
                break
            for name in order.permutation(names).tolist():
                self._times[name].append(self._block(name))
                if name == NORMAL:
                    self._busy.append(self._measured_busy())
            self._alone.append(float(np.mean(self._message_times())))
            longest_s = max(longest_s, (perf_counter_ns() - begin) / 1e9)
        if not self._alone:
            reason = "the launch is too short: a round would lengthen it by more than a third"
            self._reasons = {name: self._reasons.get(name) or reason for name in INJECTED}

    def result(self) -> tuple[KnownLoss, ...]:
        """Return what was injected and recovered on rank 0."""
        world = self._job.world
        busy = world.gather_json([rows.tolist() for rows in self._busy])
        times, alone = world.gather_json(self._times), world.gather_json(self._alone)
        delays = world.gather_json(self._delays)
        if busy is None or times is None or alone is None or delays is None:
            return ()
        rounds, own = len(self._alone), delays[self._slowest]
        injected: dict[str, list[float]] = {name: [] for name in INJECTED}
        for number in range(rounds):
            table = np.array([rows[number] for rows in busy])
            delay = np.array([MS * self._delay_ns])
            injected[DELAY].append(slowed(table, self._slowest, delay))
            if not self._reasons[LOST_CORE]:
                usual = float(np.mean(own[NORMAL][number]))
                lost = np.maximum(np.array(own[LOST_CORE][number]) - usual, 0.0)
                injected[LOST_CORE].append(slowed(table, self._slowest, lost))
            injected[MESSAGE].append(float(np.mean([of_rank[number] for of_rank in alone])))
        means = {n: np.mean([of_rank[n] for of_rank in times], axis=0) for n in self._times}
        return tuple(
            KnownLoss(name, reason=reason)
            if (reason := self._reasons.get(name, ""))
            else KnownLoss(
                name, tuple(injected[name]), tuple((means[name] - means[NORMAL]).tolist())
            )
            for name in INJECTED
        )

    def _agreed(self, value: float) -> float:
        return float(np.mean(self._job.world.all_gather_json(value)))

    def _measured_busy(self) -> NDArray[np.float64]:
        """Return the busy times of the steps of the last block on this rank."""
        rows = self._recorder.rows()[-self._steps :]
        table: NDArray[np.float64] = np.multiply(MS, rows, dtype=np.float64)[None]
        busy: NDArray[np.float64] = Measured(self._recorder.names, table, table, (0.0,)).busy[0]
        return busy

    def _find_core(self) -> str:
        """Return why no core can be lost, on every rank; "" if one can."""
        job, world = self._job, self._job.world
        reason = ""
        if self._on_device:
            reason = "the ranks compute on GPUs"
        elif job.plan.setting.threads > 1:
            reason = "the threads of a rank share its work"
        elif world.is_crowded or world.local_cores < world.local_size:
            reason = "ranks share cores"
        elif self._run_delay_ns() is None or not hasattr(os, "sched_setaffinity"):
            reason = "the system does not report how long a thread waits for a core"
        return next((found for found in world.all_gather_json(reason) if found), "")

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """Bind the slowest rank to a core, and keep the others of its node from this core."""
        if self._reasons[LOST_CORE]:
            yield
            return
        world, before = self._job.world, os.sched_getaffinity(0)
        on_node = world.node_all_gather_json([world.rank, sorted(before)])
        core = next((min(cores) for rank, cores in on_node if rank == self._slowest), -1)
        own = {core} if world.rank == self._slowest else before - {core}
        self._core = core
        if not all(world.all_gather_json(bool(own))):
            self._reasons[LOST_CORE] = "the ranks are bound to one core"
            yield
            return
        os.sched_setaffinity(0, own)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def _block(self, name: str) -> float:
        """Run a block; return the mean time of a step in ms."""
        self._job.world.barrier()
        self._job.engine.gradient_sum.synchronize()
        is_slowest = self._job.world.rank == self._slowest
        action = self._action(name) if is_slowest or name == MESSAGE else None
        delays = self._delays.get(name)
        occupied: AbstractContextManager[object] = nullcontext()
        if name == LOST_CORE and is_slowest:
            occupied = OccupiedCore(self._core)
        readings = []
        with occupied:
            for _ in range(WARM_UP):
                self._step(action)
            begin = perf_counter_ns()
            for _ in range(self._steps):
                readings.append(self._run_delay_ns() or 0)
                self._step(action)
            readings.append(self._run_delay_ns() or 0)
            step_ms = MS * (perf_counter_ns() - begin) / self._steps
        if delays is not None:
            delays.append((MS * np.diff(readings)).tolist())
        return step_ms

    def _action(self, name: str) -> Callable[[], None] | None:
        if name == DELAY:
            return self._wait
        if name == MESSAGE:
            return self._send
        return None

    def _wait(self) -> None:
        """Compute nothing for the delay, on the core of this rank, so that no other gets it."""
        end = perf_counter_ns() + self._delay_ns
        while perf_counter_ns() < end:
            pass

    def _step(self, action: Callable[[], None] | None) -> None:
        if action is not None:
            action()
        # A learning rate of 0 keeps the parameters.
        self._engine.step(self._batches, 0.0)
        self._engine.results(wait=True)

    def _send(self) -> None:
        """Sum the message over the ranks, piece by piece."""
        for _ in range(self._pieces):
            self._job.world.all_reduce(self._piece)

    def _message_times(self) -> list[float]:
        """Return times of the message alone in ms, each after all ranks met, as after a step."""
        times = []
        for _ in range(self._steps):
            self._job.engine.gradient_sum.synchronize()
            begin = perf_counter_ns()
            self._send()
            times.append(MS * (perf_counter_ns() - begin))
        return times

    def _run_delay_ns(self) -> int | None:
        """Return for how long this thread has waited for a core so far; None if it is unknown."""
        return run_delay_ns(self._run_delays.read())
