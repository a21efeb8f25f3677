"""Training steps of JAX, compiled by XLA as one function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.programs.jax_network import (
    canonical,
    jax_factors,
    jax_forward,
    jax_input,
    jax_loss,
    jax_parameters,
    random_factors,
)
from benchmarks.programs.own_programs import Training, initial
from dptrain.network import Network


def jax_training(
    network: Network,
    x: NDArray[Any],
    y: NDArray[Any],
    factors: dict[str, NDArray[Any]] | None = None,
) -> Training:
    """Return a step on a prepared batch: forward, loss, backward, update.

    The old parameters are donated, so that XLA updates them in place. Random bits come from XLA's
    own generator, which is faster than JAX's default.

    Args:
        network: the network.
        x, y: the batch.
        factors: of the dropout layers; None draws them in every step.
    """
    forward, loss_function = jax_forward(network), jax_loss(network)
    decays = {p.name: p.weight_decay for p in network.parameters if p.weight_decay}
    inputs, targets = jax_input(x), jnp.array(y)
    fixed = None if factors is None else jax_factors(factors)

    def loss(parameters: Any, key: Any) -> Any:
        drawn = random_factors(network, len(x), key) if fixed is None else fixed
        return loss_function(forward(parameters, inputs, drawn), targets)

    def update(parameters: Any, rate: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        value, gradients = jax.value_and_grad(loss)(parameters, own)
        updated = {
            name: w - rate * (gradients[name] + decays.get(name, 0.0) * w)
            for name, w in parameters.items()
        }
        return updated, value, key

    compiled = jax.jit(update, donate_argnums=0)
    state: dict[str, Any] = {
        "parameters": jax_parameters(network, initial(network)),
        "key": jax.random.key(0, impl="rbg"),
    }

    def step(learning_rate: float) -> float:
        state["parameters"], loss_value, state["key"] = compiled(
            state["parameters"], np.float32(learning_rate), state["key"]
        )
        for value in state["parameters"].values():
            value.block_until_ready()
        return float(loss_value)

    return Training(step, lambda: canonical(state["parameters"]))
