"""Times of stages with 1 … all threads, and of independent copies that share the minibatch.

They show where threads lose time. From the copies follows how much waiting would cost without any
other loss: if all copies waited for the slowest one after each stage, as threads do, or only after
each step.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.node.rounds import Entry, measure, quartiles
from benchmarks.node.session import Session
from benchmarks.node.threads import CASES, COPIES, OURS
from benchmarks.node.workers.processes import Processes, Team
from benchmarks.node.workers.running import Runner
from benchmarks.outside import find_network
from benchmarks.programs.own_programs import LEARNING_RATE
from dptrain.batch import Batch

SECTION = "stages"
PROGRAM = "dptrain timed stages"
STEP = "step"
"""Name of the row with the sum over the stages."""
RECORDED = 100
"""Steps whose times are kept between two requests."""


def stages_runner(spec: dict[str, Any]) -> Runner:
    """Return training steps whose stages are timed."""
    network = find_network(spec["network"])
    x, y = random_batch(network, spec["batch"])
    replica = dptrain.make_replica(network, batch_size=len(x), threads=spec["threads"])
    names = ["load", *(stage.name for stage, _ in replica.stages), "update"]
    steps: deque[list[int]] = deque(maxlen=RECORDED)
    clock = time.perf_counter_ns

    def step() -> None:
        begin = clock()
        replica.load(Batch.of(x, y))
        loaded = clock()
        ends = replica.run_timed()
        replica.update(LEARNING_RATE)
        steps.append([begin, loaded, *ends(), clock()])

    def details() -> dict[str, Any]:
        found = {"stages": names, "ns": np.diff(np.array(steps), axis=1).tolist()}
        steps.clear()
        return found

    return Runner(step, details=details)


def measure_stages(session: Session) -> None:
    """Measure the stages of each network with every number of threads and of copies."""
    session.begin(SECTION)
    cores = session.settings.cores
    counts = [count for count in session.settings.counts if count <= len(cores)]
    with Processes(cores) as processes:
        teams = {count: processes.single(count) for count in counts}
        copies = processes.copies(max(counts))
        for network in session.networks(tuple(CASES)):
            if session.in_time(f"stages of {network}"):
                session.progress.step(f"{SECTION}: {network}")
                entries = _build(teams, copies, network, CASES[network])
                _measure_network(session, entries, network, CASES[network])


def _build(
    teams: dict[int, Team], copies: Team, network: str, batch: int
) -> dict[tuple[str, int], Entry]:
    """Build threads and copies, by program and number."""
    entries = {}
    for count, team in teams.items():
        spec = {"network": network, "batch": batch, "threads": count}
        team.build(network, PROGRAM, spec)
        entries[OURS, count] = Entry(team, network)
        group, key = Team(copies.workers[:count]), f"{network}/{count}"
        group.build(key, PROGRAM, {**spec, "batch": batch // count, "threads": 1})
        entries[COPIES, count] = Entry(group, key)
    return entries


def _measure_network(
    session: Session, entries: dict[tuple[str, int], Entry], network: str, batch: int
) -> None:
    """Measure in rounds, and store the times of each stage and of the step."""
    found: dict[tuple[str, int, str, str], list[float]] = {}
    for number in range(session.settings.rounds):
        if number >= 2 and time.monotonic() > session.deadline:
            break
        named = {f"{program}/{count}": entry for (program, count), entry in entries.items()}
        measure(named, rounds=1, block_s=session.settings.block_s)
        for (program, count), entry in entries.items():
            details = entry.team.details(entry.key)
            times_ns = _common_steps([np.array(each["ns"]) for each in details])
            names = [*details[0]["stages"], STEP]
            for kind, values in stage_times(times_ns).items():
                for name, value in zip(names[-len(values) :], values.tolist(), strict=True):
                    found.setdefault((program, count, name, kind), []).append(value / 1e6)
    for (program, count, name, kind), times_ms in found.items():
        session.rows[SECTION].append({
            "network": network, "batch": batch, "program": program, "threads": count,
            "stage": name, "kind": kind, "median_ms": float(np.median(times_ms)),
            "quartiles_ms": quartiles(times_ms), "rounds_ms": times_ms,
        })  # fmt: skip
    for entry in entries.values():
        entry.team.drop(entry.key)


def _common_steps(times: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return (processes, steps, stages) with the last steps that all processes have."""
    steps = min(map(len, times))
    return np.array([each[-steps:] for each in times])


def stage_times(times_ns: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the times of each stage, and last of the step.

    Args:
        times_ns: (processes, steps, stages).

    Returns:
        ``mean`` over the processes; ``slowest``: the time if all processes waited for the slowest
        one after each stage, whose sum is that of the step; ``slowest step``: the time of the step
        if they waited after each step. Medians over the steps, in ns.

    Example:
        >>> import numpy as np
        >>> two = np.array([[[1, 5]], [[3, 1]]])  # two processes, one step, two stages
        >>> {kind: times.tolist() for kind, times in stage_times(two).items()}
        {'mean': [2.0, 3.0, 5.0], 'slowest': [3.0, 5.0, 8.0], 'slowest step': [6.0]}
    """
    stages = {"mean": times_ns.mean(axis=0), "slowest": times_ns.max(axis=0)}
    found = {
        kind: np.median(np.column_stack([times, times.sum(axis=1)]), axis=0)
        for kind, times in stages.items()
    }
    slowest_steps = times_ns.sum(axis=2).max(axis=0)
    return {**found, "slowest step": np.median(slowest_steps, keepdims=True)}
