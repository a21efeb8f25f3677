"""Where the threads of a step spend their time, stage by stage.

    python -m benchmarks.step.chunks --network model0 --batch-size 256 --threads 16

A step is a training step; with `--inference` it is the forward pass of a batch.
The threads log when they compute each chunk. The time of a stage, from the end of the previous one
to its own end, is then divided, on average over the threads, into

- *start*: until a thread begins its first chunk. Threads that compute no chunk start at the end.
- *computing*: chunks.
- *between*: from the end of a chunk to the begin of the next, such as claims.
- *end*: from a thread's last chunk to the end of the stage, where it waits for the slowest thread.

*One thread* is the time of the stage on one thread, divided by the number of threads. Computing
takes longer than that if data comes from the caches of other cores, if cores become slower when all
of them compute, or if the operating system interrupts threads. Medians over the steps, in µs; the
number of chunks that threads took from the ranges of others is a mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.flags import flags
from benchmarks.outside import find_network
from benchmarks.programs.own_programs import LEARNING_RATE
from benchmarks.tables import Table
from dptrain.backends.numba.backend import NumbaReplica
from dptrain.batch import Batch
from dptrain.plan.lowering import Phase

WARM_UP = 20
CHUNKS_PER_LAUNCH = 8
"""Chunks of a thread's range are at most as many."""


class Parts(NamedTuple):
    """The time of a launch in ns, and its parts on average over the threads."""

    time: float
    start: float
    computing: float
    between: float
    end: float
    taken: float

    @classmethod
    def of(cls, chunks: NDArray[np.int64], begin: int, end: int, threads: int) -> Parts:
        """Divide the time of a launch.

        Args:
            chunks: (chunks, 4), those of the launch, as in `ThreadPool.log_chunks`.
            begin: end of the previous launch.
            end: of this launch.
            threads: of the pool.

        Example:
            >>> import numpy as np
            >>> log = np.array([
            ...     [0, 0, 10, 30], [0, 1 << 16 | 1, 14, 20], [0, 1 << 16 | 0, 32, 40]
            ... ])
            >>> Parts.of(log, 0, 50, 2)
            Parts(time=50, start=12.0, computing=17.0, between=1.0, end=20.0, taken=1)
        """
        who, taken = chunks[:, 1] & 0xFFFF, chunks[:, 1] >> 16
        start = stop = computing = 0
        for thread in range(threads):
            own = chunks[who == thread]
            start += int(own[:, 2].min() if len(own) else end) - begin
            stop += end - int(own[:, 3].max() if len(own) else end)
            computing += int((own[:, 3] - own[:, 2]).sum())
        rest = threads * (end - begin) - start - stop - computing
        return cls(
            end - begin, start / threads, computing / threads, rest / threads, stop / threads,
            int((who != taken).sum()),
        )  # fmt: skip


def measure(
    name: str, batch_size: int, threads: int, steps: int, *, training: bool = True
) -> dict[str, NDArray[Any]]:
    """Return the parts of every stage, (steps, 6), by the name of the stage."""
    network = find_network(name)
    x, y = random_batch(network, batch_size)
    replica = dptrain.make_replica(
        network, batch_size=batch_size, threads=threads, training=training
    )
    assert isinstance(replica, NumbaReplica)
    program = replica.programs["step" if training else "forward"]
    stages: list[tuple[Any, Any]] = list(replica.stages)
    launches = [
        (stage.name, launch)
        for stage, kernel in stages
        if training or stage.phase is Phase.FORWARD
        for launch in kernel.launches
    ]
    addresses = [launch.record.address for _, launch in launches]
    capacity = CHUNKS_PER_LAUNCH * threads * (len(addresses) + 4)
    found: list[list[Parts]] = []
    if not training:
        replica.forward(x)
    for number in range(WARM_UP + steps):
        with replica.thread_pool.log_chunks(capacity) as log:
            if training:
                replica.load(Batch.of(x, y))
                replica.run_timed()
                replica.update(LEARNING_RATE)
            else:
                program.run_timed(replica.context)
        chunks, times = log[1 : 1 + log[0, 0]], program.times.tolist()
        if number < WARM_UP:
            continue
        found.append(
            [
                Parts.of(chunks[chunks[:, 0] == address], begin, end, threads)
                for address, begin, end in zip(addresses, times[:-1], times[1:], strict=True)
            ]
        )
    parts: dict[str, NDArray[Any]] = {}
    for i, (stage, _) in enumerate(launches):
        parts[stage] = parts.get(stage, 0) + np.array([step[i] for step in found])
    return parts


@click.command()
@flags(
    network="model0", batch_size=256, threads=2, steps=100,
    inference=(False, "Measure forward passes, not training steps."),
)  # fmt: skip
def main(network: str, batch_size: int, threads: int, steps: int, inference: bool) -> None:
    """Print where the threads of a step spend their time, stage by stage."""
    alone = measure(network, batch_size, 1, steps, training=not inference)
    several = measure(network, batch_size, threads, steps, training=not inference)
    rows = [_row(stage, alone[stage], parts, threads) for stage, parts in several.items()]
    rows.append(_row("step", sum(alone.values()), sum(several.values()), threads))
    head = ("stage", "time", "one thread", "start", "computing", "between", "end", "taken")
    title = f"{network}, batch size {batch_size}, {threads} threads: median times in µs"
    click.echo(Table(title, head, tuple(rows)).markdown())


def _row(stage: str, alone: Any, parts: Any, threads: int) -> tuple[str, ...]:
    time, start, computing, between, end, _ = (np.median(parts, axis=0) / 1e3).tolist()
    times = time, float(np.median(alone[:, 0])) / 1e3 / threads, start, computing, between, end
    return stage, *(f"{value:.1f}" for value in times), f"{parts[:, 5].mean():.1f}"


if __name__ == "__main__":
    main()
