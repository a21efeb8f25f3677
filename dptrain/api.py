"""Functions for Python users that connect the packages below."""

from __future__ import annotations

from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.network.network import Network
from dptrain.plan.optimizers import Optimizer
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import MicroShards


def make_replica(
    network: Network,
    backend: str = "numba",
    batch_size: int = 32,
    threads: int = 1,
    seed: int = 0,
    *,
    precision: str | None = None,
    optimizer: Optimizer | None = None,
    training: bool = True,
    micro_shards: MicroShards | None = None,
    recompute: bool = False,
    label_smoothing: float = 0.0,
    weighted: bool = False,
) -> Replica:
    """Return a replica of a network: its buffers, its kernels and its initial parameters.

    A replica computes on one device in this process. It does not communicate with other ranks.

    Args:
        network: a `Network`, for example from `dptrain.get_network`.
        backend: ``"numba"`` (CPU), ``"cuda"`` or ``"cudnn"`` (NVIDIA GPU), or ``"reference"``
            (NumPy, slow).
        batch_size: largest number of samples that one call computes.
        threads: number of compute threads.
        seed: of the initial parameters and of the dropout masks.
        precision: arithmetic of the backend, for example ``"fp32"`` or ``"tf32"``; None selects
            the backend's default.
        optimizer: `SGD`, `Adam`, `AdamW`, `RMSProp`, `LARS` or `LAMB`; None selects `SGD` without
            momentum.
        training: False allocates no gradients and no optimizer state; the replica then only
            predicts.
        micro_shards: the parts of a minibatch that are summed in a fixed order, so that gradients
            do not depend on `threads`; None selects the fastest order.
        recompute: True computes activations again in the backward pass if this needs less memory;
            results are the same.
        label_smoothing: s; in training, the target of a sample is (1 − s) onehot + s / classes.
        weighted: True lets `forward_backward` weigh the samples of a minibatch.

    Returns:
        A `Replica`. `forward_backward`, `update`, `predict`, `evaluate`, `parameters` and
        `gradients` are its main members.

    Raises:
        UserError: the backend is unknown or not available here, it does not support the precision
            or a layer, or another argument is out of range.

    Examples:
        >>> import numpy as np
        >>> import dptrain
        >>> network = dptrain.get_network("model-small")
        >>> replica = dptrain.make_replica(network, backend="reference", batch_size=4)
        >>> x = np.random.default_rng(0).standard_normal((4, 3, 16, 16))  # (N, C, H, W)
        >>> y = np.array([1, 2, 3, 4])  # class labels, (N,)
        >>> before = replica.forward_backward(x, y)  # mean loss over the 4 samples
        >>> replica.update(learning_rate=0.01)
        >>> replica.forward_backward(x, y) < before
        True
        >>> replica.predict(x).shape  # probabilities, (N, classes)
        (4, 10)
    """
    chosen = load_backend(backend)
    chosen.choose_device(0)
    plan = make_plan(
        network,
        chosen,
        batch_size,
        precision=precision,
        optimizer=optimizer,
        training=training,
        threads=threads,
        micro_shards=micro_shards,
        recompute=recompute,
        label_smoothing=label_smoothing,
        weighted=weighted,
    )
    replica = chosen.make_replica(plan, seed=seed)
    replica.seal()
    return replica
