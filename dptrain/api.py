"""The few functions that the command line and Python users share."""

from __future__ import annotations

from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.network.network import Network
from dptrain.plan.optimizers import Optimizer
from dptrain.plan.plan import make_plan


def compile(
    network: Network,
    backend: str = "numba",
    batch_size: int = 32,
    threads: int = 1,
    seed: int = 0,
    *,
    precision: str | None = None,
    optimizer: Optimizer | None = None,
    training: bool = True,
) -> Replica:
    """Plan a network, allocate its memory, draw its parameters.

    Args:
        network: what to compute; see `dptrain.network`.
        backend: one of `dptrain.backends.BACKENDS`.
        batch_size: largest number of samples in a step.
        threads: compute threads.
        seed: of the initial parameters and the dropout masks.
        precision: a word of the backend's; its default where left out.
        optimizer: update rule; plain SGD where left out.
        training: False leaves out gradients and their memory.

    Raises:
        UserError: an unknown backend or precision, or a batch size below 1.
    """
    chosen = load_backend(backend)
    plan = make_plan(
        network,
        chosen,
        batch_size,
        precision=next(iter(chosen.precisions)) if precision is None else precision,
        optimizer=optimizer,
        training=training,
        threads=threads,
    )
    return chosen.make_replica(plan, seed=seed)
