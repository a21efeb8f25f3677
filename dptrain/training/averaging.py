"""The moving average of the parameters: where it replaces them, and where it does not.

The average is an array of the optimizer state, so it is updated, shared by the ranks, stored and
restored like momentum. Training uses the parameters themselves. Running statistics of batch
normalisations are those of training; there is no average of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from dptrain.backends.replica import Replica
from dptrain.comm.world import AgreedError, World
from dptrain.plan.optimizers import AVERAGE
from dptrain.plan.plan import make_plan
from dptrain.training.resources import broadcast_flat


def has_average(replica: Replica) -> bool:
    """Return True if there is an average of the parameters; there is none before an update."""
    return AVERAGE in replica.flat_state and replica.updates > 0


@contextmanager
def averaged_parameters(world: World, replica: Replica, strategy: str) -> Iterator[None]:
    """Let the parameters be their average in this context, if there is one.

    Args:
        world: the ranks; every rank calls this, between two steps.
        replica: of this rank.
        strategy: how the ranks share an update. With ``central``, only rank 0 has the average.
    """
    if not has_average(replica):
        yield
        return
    if strategy == "central":
        broadcast_flat(world, replica, replica.flat_state[AVERAGE])
    _exchange(world, replica)
    try:
        yield
    except BaseException as error:
        # A rank that fails alone ends the job; it cannot wait for the others.
        if world.size == 1 or isinstance(error, AgreedError):
            _exchange(world, replica)
        raise
    _exchange(world, replica)


def _exchange(world: World, replica: Replica) -> None:
    """Exchange the parameters and their average; one of the ranks that share them does so."""
    world.node_barrier()
    if replica.owns_parameters:
        memory, average = replica.memory, replica.flat_state[AVERAGE]
        parameters = memory.zeros(average.shape, average.dtype.name)
        with replica.parameters.write_flat() as flat:
            trained = flat[: average.size]  # Frozen parameters have no average.
            memory.copy(parameters, trained)
            memory.copy(trained, average)
            memory.copy(average, parameters)
    world.node_barrier()


def averaged_replica(replica: Replica, copy: Replica | None = None) -> Replica:
    """Return a replica for inference with the averaged parameters; no other rank takes part.

    Args:
        replica: has the average.
        copy: the result of an earlier call for the same network, which is used again.
    """
    plan, backend = replica.plan, replica.backend
    if copy is None:
        copy = backend.make_replica(
            make_plan(
                plan.network,
                backend,
                plan.batch_size,
                precision=plan.precision,
                training=False,
                threads=plan.setting.threads,
            )
        )
    for name, values in {**replica.parameters, **replica.state[AVERAGE]}.items():
        copy.parameters[name] = values
    for name, values in replica.statistics.items():
        copy.statistics[name] = values
    return copy


def averaged_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a checkpoint with the averages, if it has any, as its parameters."""
    prefix = f"{AVERAGE}/"
    averages = {
        f"parameters/{name.removeprefix(prefix)}": values
        for name, values in arrays.items()
        if name.startswith(prefix)
    }
    return {**arrays, **averages}
