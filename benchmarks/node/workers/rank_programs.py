"""Programs of several processes: training steps and gradient sums."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch import random_batch
from benchmarks.node.workers.running import MissingError, Results, Runner
from benchmarks.outside import find_network

Spec = dict[str, Any]
Session = dict[str, Any]

STEPS = 1_000_000
"""Steps that a job is planned for: more than a measurement makes."""
RECORDED = 256
SUM_RATE = 2.0**-10
"""Learning rate of the updates after a gradient sum."""
CHECKED_STEPS = 2


def _world(spec: Spec, session: Session) -> Any:
    """Return the ranks of this launch, or a single process without MPI."""
    from dptrain.comm.world import World

    if spec.get("ranks", 1) == 1 and not spec.get("launched"):
        return World.single()
    if "world" not in session:
        session["world"] = World.connect()
    return session["world"]


def _job(spec: Spec, session: Session, **settings: Any) -> Any:
    """Assemble a training job as `dptrain train` does, on synthetic data."""
    from dptrain.training.job import assemble
    from dptrain.training.settings import GivenSettings

    known = {field.name for field in fields(GivenSettings)}
    if spec.get("shards") is not None:
        settings["shards"] = spec["shards"]
    if unknown := sorted(settings.keys() - known):
        raise MissingError(f"this version of dptrain has no setting '{unknown[0]}'")
    world = _world(spec, session)
    chosen = GivenSettings(
        network=spec["network"], data="synthetic", crop=0, batch_size=spec["batch"],
        threads=spec["threads"], steps=STEPS, strategy=spec.get("strategy", "mirrored"),
        transport=spec.get("transport", "auto"), backend=spec.get("backend", "numba"), **settings,
    ).with_recipe()  # fmt: skip
    return assemble(chosen, world, keeps_run=False, recorded_steps=RECORDED, quiet=True)


def engine(spec: Spec, session: Session) -> Runner:
    """Return training steps with the calls of `dptrain train`: loader, engine, results."""
    from dptrain.training.baseline import open_loader

    job = _job(spec, session)
    world = job.world
    loader = open_loader(job, range(STEPS), batch_size=spec["batch"])

    def step() -> float:
        job.engine.step(loader, 1e-8)
        return float(job.engine.results(wait=True)[-1].loss)

    def check() -> Results:
        losses = np.array([step() for _ in range(CHECKED_STEPS)])
        world.check_equal(job.replica.flat_parameters, "parameters")
        return {"losses": losses}

    def close() -> None:
        loader.close()
        job.engine.gradient_sum.close()

    facts = {"transport": job.spec.transport, "strategy": job.spec.strategy}
    return Runner(step, check, facts=facts, close=close)


def meeting_copy(spec: Spec, session: Session) -> Runner:
    """Return training steps of an independent copy that waits for the other copies after each step.

    Nothing is summed. The wait shows how much the slowest core of each step costs.
    """
    from dptrain.comm.node.gates import OVERSUBSCRIBED_SPINS, SLEEP_NS, SPINS
    from dptrain.comm.node.segment import map_segment
    from dptrain.native import gates
    from dptrain.native.entries import address_of

    world = _world({**spec, "launched": True}, session)
    spins = OVERSUBSCRIBED_SPINS if world.is_crowded else SPINS
    share = spec["batch"] // spec["ranks"]
    copy = engine({**spec, "ranks": 1, "batch": share, "launched": False}, session)
    own = [(0, gates.GATE_BYTES)] if world.first_on_node() else []
    gate = np.frombuffer(map_segment(world, gates.GATE_BYTES, own), np.int32)
    arrive, pass_gate = gates.request_arrive().result, gates.request_pass().result

    def step() -> None:
        copy.step()
        number = arrive(address_of(gate), spec["ranks"])
        while not pass_gate(address_of(gate), number, spins, SLEEP_NS):
            pass

    return Runner(step, close=copy.close)


def gradient_sum(spec: Spec, session: Session) -> Runner:
    """Return the sum of freshly written gradients over the ranks and the update of parameters."""
    job = _job(spec, session, optimizer="sgd", momentum=0.0, learning_rate=0.01)
    world, replica, summed = job.world, job.replica, job.engine.gradient_sum
    gradients, size = replica.flat_gradients, replica.plan.layout.size
    value = float(world.rank + 1)

    clock, updated = time.monotonic_ns, 0
    stamps: list[tuple[int, int, int, int]] = []

    def update(elements: slice, learning_rate: float) -> None:
        nonlocal updated
        replica.update_slice(elements, learning_rate, number=1)
        updated = clock()

    def prepare() -> None:
        gradients.fill(value)

    def step() -> None:
        start = clock()
        for bucket in range(len(job.buckets)):
            summed.start(bucket)
        arrived = clock()
        summed.finish_and_update(update, SUM_RATE)
        stamps.append((start, arrived, updated, clock()))

    def details() -> dict[str, Any]:
        """Return the times that `sum_parts.parts_of_sum` divides."""
        found = stamps.copy()
        stamps.clear()
        return {"stamps": found}

    def check() -> Results:
        """Return the sum that the update has subtracted from each parameter."""
        written = np.array([pattern(size, rank) for rank in range(world.size)])
        gradients.fill(0.0)
        gradients.reshape(-1)[:size] = written[world.rank]
        before = np.array(replica.flat_parameters[:size], np.float64)
        world.barrier()
        step()
        world.barrier()
        change = (before - replica.flat_parameters[:size]) / SUM_RATE
        used = np.zeros(size, bool)
        for slot in replica.plan.layout.slots:
            used[slot.start : slot.stop] = True
        # Weight decay and the rounding of the parameters change a sum by less than 0.02.
        error = np.abs(change - written.sum(axis=0))[used]
        return {"wrong": np.array(int((error > 0.02).sum()) + int(not np.isfinite(change).all()))}

    facts = {"bytes": 4 * size, "transport": job.spec.transport, "strategy": job.spec.strategy}
    return Runner(step, check, prepare, facts, details, summed.close)


def pattern(size: int, rank: int) -> NDArray[np.float32]:
    """Return whole numbers, whose sums over ranks are exact in float32."""
    return (np.arange(size) % 61 + rank).astype(np.float32)


def all_reduce(spec: Spec, session: Session) -> Runner:
    """Return MPI's all-reduce of freshly written float32 numbers, without an update."""
    world = _world(spec, session)
    from mpi4py import MPI

    size = spec["elements"]
    array = np.zeros(size, np.float32)

    def step() -> None:
        world.comm.Allreduce(MPI.IN_PLACE, array)

    def check() -> Results:
        array[:] = pattern(size, world.rank)
        step()
        return {"wrong": np.array(_wrong(array, world.size))}

    version = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
    facts = {"bytes": array.nbytes, MPI.get_vendor()[0]: " ".join(version.split())}
    return Runner(step, check, lambda: array.fill(world.rank + 1.0), facts)


def _wrong(total: NDArray[np.float32], ranks: int) -> int:
    expected = sum(pattern(total.size, rank).astype(np.float64) for rank in range(ranks))
    return int((total != expected).sum())


def _group(spec: Spec, session: Session) -> Any:
    """Return `torch.distributed` with a group of all ranks over gloo on the loopback device."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(spec["threads"])
    if "group" not in session:
        dist.init_process_group(
            "gloo", init_method=f"file://{spec['rendezvous']}", rank=spec["rank"],
            world_size=spec["ranks"],
        )  # fmt: skip
        session["group"] = True
    return dist


def ddp_training(spec: Spec, session: Session) -> Runner:
    """Return training steps of PyTorch's DistributedDataParallel, each rank with its own batch."""
    import torch

    from benchmarks.machine import keep_freed_memory
    from benchmarks.programs.torch_network import LOSSES
    from benchmarks.programs.torch_programs import MODES

    _group(spec, session)
    keep_freed_memory()
    network = find_network(spec["network"])
    share = spec["batch"] // spec["ranks"]
    x, y = random_batch(network, share, seed=spec["rank"])
    mode = next(mode for mode in MODES if mode.name == spec["mode"])
    modules = torch.nn.parallel.DistributedDataParallel(
        mode.network(network).train(), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(modules.parameters(), lr=1e-8, momentum=0.9)
    inputs, targets = mode.layout(torch.from_numpy(x)), torch.from_numpy(y)
    loss_function = LOSSES[network.loss.targets]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_function(modules(inputs), targets).backward()
        optimizer.step()

    return Runner(step, facts={"torch": torch.__version__})


def gloo_all_reduce(spec: Spec, session: Session) -> Runner:
    """Return gloo's all-reduce of freshly written float32 numbers."""
    import torch

    dist = _group(spec, session)
    tensor = torch.zeros(spec["elements"])
    array = tensor.numpy()

    def step() -> None:
        dist.all_reduce(tensor)

    def check() -> Results:
        array[:] = pattern(array.size, spec["rank"])
        step()
        return {"wrong": np.array(_wrong(array, spec["ranks"]))}

    facts = {"bytes": array.nbytes, "torch": torch.__version__}
    return Runner(step, check, lambda: array.fill(spec["rank"] + 1.0), facts)
