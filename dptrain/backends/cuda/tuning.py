"""Measured selection among the kernels with the lowest estimates.

Candidate number r of every stage is measured in the same replica, whose plan selects these
candidates, so that each kernel runs on the buffers of a plan. There are at most `MAX_CANDIDATES`
replicas, one after the other. The times are medians of `Device.times_ms`. What was measured is
stored in the cache of compiled kernels.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dptrain import __version__
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.device.sources import kernel_files
from dptrain.backends.replica import Kernel, Replica
from dptrain.batch import Batch
from dptrain.cache import writable_folder, write_atomically
from dptrain.network.files import network_to_dict
from dptrain.network.random_batch import random_batch
from dptrain.plan.lowering import STATISTICS_PHASES, Phase, stage_name
from dptrain.plan.plan import Plan, with_selection
from dptrain.plan.selection import (
    MEASURED,
    Candidates,
    KernelSelection,
    RankedSelection,
    worthwhile,
)

if TYPE_CHECKING:
    from dptrain.backends.base import Backend

BUDGET_S = 5.0
"""Seconds after which no further candidate is measured; the stages use what was found."""

MIN_GAIN = 0.03
"""Smallest relative gain for which a candidate replaces the one with the lowest estimate, so that
noise does not change the selection, and with it the last bits of the results."""

TimeKernel = Callable[[Replica, Kernel], Sequence[float]]
"""Returns the milliseconds of several repeats of a kernel."""


@dataclass(frozen=True)
class Candidate:
    """A kernel of a stage.

    Attributes:
        name: tile configuration.
        estimate: of its time, relative to the lowest estimate of the stage.
        time_ms: measured; None if the time ran out.
    """

    name: str
    estimate: float
    time_ms: float | None = None


@dataclass(frozen=True)
class Tuning:
    """What was measured for a plan.

    Attributes:
        stages: candidates by stage, that with the lowest estimate first.
        complete: whether all were measured.
    """

    stages: Mapping[str, tuple[Candidate, ...]]
    complete: bool

    def fastest(self, stage: str) -> Candidate:
        """Return the fastest candidate of a stage, or the first if the gain is too small."""
        first, *others = self.stages[stage]
        timed = [each for each in others if each.time_ms is not None]
        best = min(timed, key=lambda each: each.time_ms or 0.0, default=first)
        if first.time_ms is None or best.time_ms is None:
            return first
        return best if best.time_ms < (1 - MIN_GAIN) * first.time_ms else first

    @property
    def selection(self) -> KernelSelection:
        """The candidates that are faster than those with the lowest estimates."""
        found = [(stage, self.fastest(stage), all_[0]) for stage, all_ in self.stages.items()]
        return KernelSelection(
            tuple((stage, best.name) for stage, best, first in found if best is not first),
            MEASURED,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the candidates as plain JSON values."""
        return {stage: [asdict(each) for each in all_] for stage, all_ in self.stages.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tuning:
        """Return a complete tuning from the values of `to_dict`.

        Raises:
            TypeError, KeyError, ValueError, AttributeError: the values have another form.
        """
        stages = {
            stage: tuple(
                Candidate(
                    str(each["name"]),
                    float(each["estimate"]),
                    None if each["time_ms"] is None else float(each["time_ms"]),
                )
                for each in candidates
            )
            for stage, candidates in values.items()
        }
        if not all(stages.values()):
            raise ValueError("a stage has no candidates")
        return cls(stages, complete=True)


def load_or_tune(
    backend: Backend, plan: Plan, say: Callable[[str], None], **options: Any
) -> Tuning:
    """Return what was measured for a plan, from the cache if it was measured before.

    Args:
        backend, plan: see `tune`.
        say: receives one line if the file in the cache cannot be used.
        **options: further arguments of `tune`.
    """
    facts, folder = tuning_facts(plan), writable_folder("cuda-kernels")
    if folder is None:
        return tune(backend, plan, **options)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path = folder / f"tuning-{digest[:16]}.json"
    found = _load(path, facts, say)
    if found is None:
        found = tune(backend, plan, **options)
        if found.complete:
            text = json.dumps({"facts": facts, "stages": found.to_dict()}, indent=1)
            write_atomically(path, text.encode())
    return found


def _load(path: Path, facts: Mapping[str, Any], say: Callable[[str], None]) -> Tuning | None:
    """Return what a file contains; None if it is missing, damaged, or for something else."""
    try:
        values = json.loads(path.read_bytes())
        if values["facts"] != facts:
            raise ValueError("it is for another GPU or network")
        return Tuning.from_dict(values["stages"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        say(f"ignoring {path}, which has no valid measurements of kernels: {reason}")
        return None


def tune(
    backend: Backend,
    plan: Plan,
    *,
    budget_s: float | None = None,
    time_kernel: TimeKernel | None = None,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[int, int], None] = lambda done, count: None,
    candidates: Candidates = worthwhile,
) -> Tuning:
    """Measure the candidates of each stage.

    If one of them computes sums for the statistics of another stage, the time of that stage counts
    for all of them. A candidate rank begins only if the time that the previous one took is left.
    The kernels with the lowest estimates do not count: training compiles most of them in any case.

    Args:
        backend: has a device; memory for a replica of `plan` must be free.
        plan: the plan.
        budget_s: seconds after these were compiled; None for `BUDGET_S`.
        time_kernel: measures a kernel; None for `Device.times_ms`.
        clock: returns seconds.
        report: called with the number of ranks that are done, and the number of all.
        candidates: returns those that are measured, from all of a stage with their estimates.
    """
    measure = _times_ms if time_kernel is None else time_kernel
    end = math.inf
    found: dict[str, list[tuple[float, Any]]] = {}
    times: dict[tuple[str, int], float] = {}
    summed: dict[str, str] = {}
    ranks, complete = 1, True
    for rank in itertools.count():
        if rank >= ranks:
            break
        start = clock()
        selection = RankedSelection(rank=rank, found=found, candidates=candidates)
        replica = backend.make_replica(with_selection(plan, backend, selection))
        if rank == 0:
            ranks = max((len(pairs) for pairs in found.values()), default=1)
            start = clock()
            end = start + (BUDGET_S if budget_s is None else budget_s)
        # A selection that only decides about another one has no stage.
        existing = {stage.name for stage, _ in replica.stages}
        wanted = {stage for stage in existing if len(found.get(stage, ())) > max(rank, 1)}
        statistics = {s.name for s, _ in replica.stages if s.phase in STATISTICS_PHASES}
        also = statistics if wanted else set()
        timed = _time_stages(replica, wanted | also, measure, clock, end)
        times |= {(stage, rank): value for stage, value in timed.items()}
        summed |= _summed_stages(replica.plan)
        del replica
        gc.collect()  # A replica and its kernels refer to each other.
        report(rank + 1, ranks)
        complete = wanted <= timed.keys()
        now = clock()
        if not complete or (rank + 1 < ranks and now + (now - start) > end):
            complete = complete and rank + 1 >= ranks
            break
    stages = {
        stage: tuple(
            Candidate(str(candidate), cost / pairs[0][0], _time_of(stage, rank, times, summed))
            for rank, (cost, candidate) in enumerate(pairs)
        )
        for stage, pairs in found.items()
        if stage in existing
    }
    return Tuning(stages, complete)


def _summed_stages(plan: Plan) -> dict[str, str]:
    """Return the stages that compute sums for the statistics of another one, and its name."""
    found = {}
    for group in plan.groups:
        if group.sums_of:
            writer = stage_name(group.sums_of, Phase.FORWARD)
            found[writer] = stage_name(group.name, Phase.STATISTICS)
        if group.gradient_sums_of:
            writer = stage_name(group.gradient_sums_of, Phase.BACKWARD_INPUT)
            found[writer] = stage_name(group.name, Phase.BACKWARD_STATISTICS)
    return found


def _time_of(
    stage: str, rank: int, times: Mapping[tuple[str, int], float], summed: Mapping[str, str]
) -> float | None:
    """Return the time of a candidate, with that of the statistics that it may sum; None if unknown.

    Args:
        stage, rank: of the candidate.
        times: of stages by name and rank.
        summed: the stages of statistics, by name of the stage that may sum for them.
    """
    own = times.get((stage, rank))
    other = times.get((summed[stage], rank)) if stage in summed else 0.0
    return None if own is None or other is None else own + other


def _time_stages(
    replica: Replica, wanted: set[str], measure: TimeKernel, clock: Callable[[], float], end: float
) -> dict[str, float]:
    """Return median milliseconds of some stages, as many as the time until `end` allows."""
    x, y = random_batch(replica.plan.network, replica.plan.batch_size)
    times = {}
    replica.load(Batch.of(x, y))
    for stage, kernel in replica.stages:
        if clock() > end:
            break
        kernel(replica.context)
        if stage.name in wanted:
            # The stages so far have written what the kernel reads.
            times[stage.name] = median(measure(replica, kernel))
    replica.memory.synchronize()
    return times


def _times_ms(replica: Replica, kernel: Kernel) -> Sequence[float]:
    return replica.memory.times_ms(lambda: kernel(replica.context))


def tuning_facts(plan: Plan) -> dict[str, Any]:
    """Return what a measured selection is valid for, as plain JSON values."""
    kernels = hashlib.sha256()
    for name, path in sorted(kernel_files().items()):
        kernels.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    network = json.dumps(network_to_dict(plan.network), sort_keys=True)
    return {
        "version": __version__,
        "backend": plan.backend,
        "device": asdict(limits_of(plan.setting)),
        "network": hashlib.sha256(network.encode()).hexdigest()[:16],
        "precision": plan.precision,
        "batch_size": plan.batch_size,
        "training": plan.training,
        **({"freeze": plan.optimizer.freeze} if plan.optimizer.freeze else {}),
        "kernels": kernels.hexdigest()[:16],
    }
