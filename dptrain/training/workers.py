"""Ranks with different backends or precisions: whether there are any, and what they support."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dptrain.backends.base import Backend
from dptrain.comm.world import AgreedError, World

if TYPE_CHECKING:
    from dptrain.network.network import Network
    from dptrain.training.settings import Settings

SUMS_BY_HOST = ("auto", "host", "mpi")
"""Values of the setting `transport` with which MPI sums gradients in host memory."""


def are_mixed(chosen: Settings, world: World, backend: Backend) -> bool:
    """Return whether ranks have different backends or precisions; every rank calls this function.

    Raises:
        AgreedError: they compute parameters of different types.
    """
    precision = chosen.precision or next(iter(backend.precisions))
    known = backend.precisions.get(precision)
    # `make_plan` refuses a precision that the backend does not have.
    own = [backend.name, precision, "" if known is None else known.dtype]
    workers = world.all_gather_json(own)
    if all(worker == own for worker in workers):
        return False
    dtypes = [dtype for _, _, dtype in workers]
    if "" not in dtypes and len(set(dtypes)) > 1:
        other = next(rank for rank, dtype in enumerate(dtypes) if dtype != dtypes[0])
        raise AgreedError(
            f"rank 0 has {dtypes[0]} parameters ({_text(workers[0])}), but rank {other} has "
            f"{dtypes[other]} ({_text(workers[other])}); use precisions with the same type"
        )
    return True


def check_mixed(chosen: Settings, network: Network) -> None:
    """Refuse settings that need the same backend on all ranks.

    Raises:
        AgreedError: the same on every rank, because they have the same settings.
    """
    has_statistics = bool(network.statistics) and chosen.batch_norm == "global"
    refused = {
        f"--strategy {chosen.strategy}": (chosen.strategy == "central", "--strategy mirrored"),
        f"--shards {chosen.shards}": (chosen.shards > 0, "--shards 0"),
        f"--transport {chosen.transport}": (
            chosen.transport not in SUMS_BY_HOST,
            "--transport auto",
        ),
        "--recompute": (chosen.recompute, "no --recompute"),
        "--tune": (chosen.tune, "no --tune"),
        "--batch-norm global": (has_statistics, "--batch-norm rank"),
    }
    for flag, (is_set, instead) in refused.items():
        if is_set:
            raise AgreedError(
                f"{flag} needs the same backend and precision on all ranks, but they differ; use "
                f"{instead}, or one backend"
            )


def _text(worker: list[str]) -> str:
    return f"backend {worker[0]}, {worker[1]}"
