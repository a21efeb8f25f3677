"""Agreement of implementations: the same training from the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.studies.compiling import BACKENDS
from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement
from benchmarks.studies.networks import find

AGREEMENT_STEPS = 20


def compare(backends: dict[str, dict[str, Any]], networks: tuple[str, ...]) -> Values:
    """Train with the same initial parameters and batches; return differences from float64.

    Args:
        backends: arguments of `dptrain.make_replica` by name.
        networks: names of networks.
    """
    found: dict[str, Any] = {}
    for name in networks:
        network = find(name)
        batches = [random_batch(network, 32, seed) for seed in range(4)]
        exact = _train(network, batches, backend="reference", precision="fp64")
        for title, settings in backends.items():
            losses, changes = _train(network, batches, **settings)
            found[f"{name}, {title}"] = {
                "loss_difference": float(np.max(np.abs(losses / exact[0] - 1.0))),
                "first_step_difference": _distance(changes[0], exact[1][0]),
                "parameter_difference": _distance(changes[1], exact[1][1]),
            }
    return {"steps": AGREEMENT_STEPS, "networks": found}


def _distance(found: Any, wanted: Any) -> float:
    """Return the difference relative to the norm."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _train(
    network: dptrain.Network, batches: Sequence[tuple[Any, Any]], **settings: Any
) -> tuple[Any, tuple[Any, Any]]:
    """Return the losses of some steps, and the change of all parameters by the first and by all."""
    replica = dptrain.make_replica(network, batch_size=32, **settings)

    def flat() -> Any:
        values = (np.array(value, np.float64) for value in dict(replica.parameters).values())
        return np.concatenate([value.ravel() for value in values])

    before, losses, first = flat(), [], None
    for step in range(AGREEMENT_STEPS):
        losses.append(replica.forward_backward(*batches[step % len(batches)]))
        replica.update(learning_rate=0.01)
        first = flat() - before if first is None else first
    return np.array(losses), (first, flat() - before)


@measurement("agreement", CPU)
def agreement(context: Context) -> Values:
    """Compare the implementations on the processor with float64."""
    backends: dict[str, dict[str, Any]] = {
        "reference": {"backend": "reference", "precision": "fp32"},
        "numba, 1 thread": {"backend": "numba"},
        f"numba, {context.threads} threads": {"backend": "numba", "threads": context.threads},
    }
    return compare(backends, ("smaller", "model0") if not context.quick else ("smaller",))


@measurement("agreement-gpu", GPU)
def agreement_on_gpu(context: Context) -> Values:
    """Compare the implementations on a GPU with float64."""
    return compare({name: {"backend": name} for name in BACKENDS}, ("smaller", "model0"))
