"""What training and its steps consist of: epochs, steps, the update."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.gpu.compiling import STEP, Request
from benchmarks.studies.compiling import make
from benchmarks.studies.measuring import CPU, Context, Values, measurement, summary
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.comm.world import World
from dptrain.measure.step_record import DATA_WAIT
from dptrain.network.random_batch import random_batch
from dptrain.training.baseline import open_loader
from dptrain.training.job import assemble
from dptrain.training.settings import GivenSettings

EPOCH_STEPS, GPU_EPOCH_STEPS = 136, 1366
"""Steps of an epoch on a CPU, and on a GPU as in study B."""
ADDITIVE = (("mlp-50", 1000), ("mlp-400-200", 1000), ("model0", 32))
"""Networks and batch sizes whose time is added up."""


class _Training:
    """Training steps as `dptrain train` makes them, without evaluations and checkpoints.

    The recorder keeps the steps of two epochs.
    """

    def __init__(self, network: str, backend: str, batch: int, steps: int) -> None:
        chosen = GivenSettings(
            network=network, backend=backend, crop=0, batch_size=batch, threads=1,
            data=f"synthetic?samples={batch * steps}", steps=1_000_000,
        ).with_recipe()  # fmt: skip
        self.job = assemble(
            chosen, World.single(), keeps_run=False, recorded_steps=2 * steps, quiet=True
        )
        self.steps, self.batch, self.next = steps, batch, 0

    def epochs(self, count: int) -> tuple[float, dict[str, float]]:
        """Train for one or two epochs; return all seconds, and parts of them."""
        job, recorder = self.job, self.job.recorder
        total = count * self.steps
        begin, cpu_begin = time.perf_counter(), time.process_time()
        recorder.restart()
        steps = range(self.next, self.next + total)
        with open_loader(job, steps, batch_size=self.batch) as loader:
            for number in range(total):
                job.engine.step(loader, 1e-8)
                job.engine.results(wait=number == total - 1)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        self.next += total
        rows = recorder.rows()[-total:] / 1e9
        waits = rows[:, recorder.names.index(DATA_WAIT)]
        step_s = rows[:, recorder.names.index("step")]
        return seconds, {
            # On a busy machine, the CPU time of one thread leaves out other programs.
            "own_s": seconds if job.replica.memory.on_gpu else cpu_s,
            "steps_s": float(step_s.sum()), "data_wait_s": float(waits.sum()),
            "median_step_s": float(np.median(step_s)),
        }  # fmt: skip


@measurement("additivity", CPU, also_gpu=True)
def additivity(context: Context) -> Values:
    """Compare the time of two epochs with one, and with the time inside of steps."""
    steps = GPU_EPOCH_STEPS if context.on_gpu else EPOCH_STEPS
    steps = 8 if context.quick else steps
    repeats = 1 if context.quick else 5
    found = {}
    for network, batch in ADDITIVE[:1] if context.quick else ADDITIVE:
        training = _Training(network, context.backend, batch, steps)
        with training.job.engine:
            training.epochs(1)
            ratios, shares, products = [], [], []
            for _ in range(repeats):
                _, first = training.epochs(1)
                two, parts = training.epochs(2)
                ratios.append(parts["own_s"] / first["own_s"])
                shares.append(parts["steps_s"] / two)
                products.append(2 * steps * parts["median_step_s"] / two)
        found[f"{network}, batch {batch}"] = {
            "two_epochs_over_one": summary(ratios),
            "inside_steps_share": summary(shares),
            "steps_times_median_over_total": summary(products),
            "steps": steps,
        }  # fmt: skip
        context.say(f"{network}: {np.median(ratios):.3f}, {np.median(shares):.4f}")
    return {"networks": found}


UPDATED = ("mlp-50", "mlp-1600-800-416")
UPDATE_BATCHES = (100, 500, 1000)


@measurement("update-share", CPU, also_gpu=True)
def update_share(context: Context) -> Values:
    """Return the share of Adam's update in a step, by batch size, on one core or a GPU."""
    found = {}
    for network in UPDATED:
        for batch in UPDATE_BATCHES:
            request = Request(network, context.backend, batch, context.precision, "adam", STEP)
            replica = make(request)
            times = [step_and_update(replica, 5 if context.quick else 12) for _ in range(5)]
            shares = summary([update_ms / step_ms for step_ms, update_ms in times])
            found[f"{network}, batch {batch}"] = {**shares, "share": shares["median"]}
    return {"shares": found}


def step_and_update(replica: Replica, steps: int) -> tuple[float, float]:
    """Return the median times of a step and of its update in ms."""
    x, y = random_batch(replica.plan.network, replica.plan.batch_size)
    replica.load(Batch.of(x, y), training=True)
    kernels: list[Callable[[], None]] = [
        partial(kernel, replica.context) for _, kernel in replica.stages
    ]
    update: Callable[[], None] = partial(replica.update_kernel(), replica.context)
    replica.context.learning_rate = 1e-12
    if replica.memory.on_gpu:
        kernels.append(update)
        alone = [float(np.median(replica.memory.times_ms(kernel))) for kernel in kernels]
        return sum(alone), alone[-1]
    clock = time.process_time_ns
    times = list[tuple[int, int]]()
    for _ in range(steps):
        begin = clock()
        for kernel in kernels:
            kernel()
        middle = clock()
        update()
        end = clock()
        times.append((end - begin, end - middle))
    step, part = np.median(times[2:], axis=0) / 1e6
    return float(step), float(part)
