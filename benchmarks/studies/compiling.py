"""Compile the kernels of replicas on a GPU in several processes, before they are measured.

    python -m benchmarks.studies.compiling NETWORK:BACKEND:BATCH:PRECISION:OPTIMIZER:FORM …

A process that measures compiles one kernel after the other, in which the GPU is idle. FORM is
``step``, ``unfused`` (a step without fused layers), ``forward`` or ``layers`` (inference with each
layer alone).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.gpu.compiling import running
from benchmarks.studies.networks import STUDY_A, cifar_variants, find, perceptron_names
from dptrain.backends import load_backend
from dptrain.backends.replica import Replica
from dptrain.network import get_network
from dptrain.network.biases import separate_biases
from dptrain.plan.optimizers import make_optimizer
from dptrain.plan.plan import make_plan

STEP, UNFUSED, FORWARD, LAYERS = "step", "unfused", "forward", "layers"
BACKENDS = ("cuda", "cudnn")
PRECISION = "fp32"
BATCHES = (1, 32)
STACKS = ((12, 16), (24, 32), (56, 64), (112, 64), (28, 256), (224, 16))
"""Sizes and numbers of filters of the convolutions with which the two backends are compared."""


@dataclass(frozen=True)
class Request:
    """A replica that will be needed."""

    network: str
    backend: str = "cuda"
    batch: int = 32
    precision: str = "fp32"
    optimizer: str = "sgd"
    form: str = STEP

    def __str__(self) -> str:
        return (
            f"{self.network}:{self.backend}:{self.batch}:{self.precision}:{self.optimizer}:"
            f"{self.form}"
        )

    @classmethod
    def parse(cls, text: str) -> Request:
        """Return the request that `str` made `text` of."""
        network, backend, batch, precision, optimizer, form = text.rsplit(":", 5)
        return cls(network, backend, int(batch), precision, optimizer, form)


def make(request: Request, threads: int = 1) -> Replica:
    """Return the replica of a request."""
    backend = load_backend(request.backend)
    backend.choose_device(0)
    network = find(request.network)
    inference = request.form in (FORWARD, LAYERS)
    plan = make_plan(
        separate_biases(network) if request.form == LAYERS else network,
        backend,
        request.batch,
        precision=request.precision,
        optimizer=make_optimizer(request.optimizer, momentum=0.0),
        training=not inference,
        threads=threads,
        fused=request.form in (STEP, FORWARD),
    )
    return backend.make_replica(plan)


def requests() -> list[Request]:
    """Return the replicas of all measurements on a GPU, the slowest to compile first.

    There are none of the cudnn backend: it times engines when it makes a replica, and another
    process on the same GPU would disturb the selection, which is kept.
    """
    stacks = [f"stack-{size}-{filters}" for size, filters in STACKS]
    found = [
        Request(name, "cuda", batch, PRECISION, form=form)
        for names, form in ((STUDY_A, "step"), (("larger",), UNFUSED), (stacks, UNFUSED))
        for name in names
        for batch in BATCHES
    ]
    found += [Request("solar", "cuda", n, PRECISION, "adam") for n in (2, 32, 128, 512, 2048)]
    variants = [network.name for network in cifar_variants().values()]
    found += [Request(name, "cuda", 128, PRECISION, form=LAYERS) for name in variants]
    found += [Request(name, "cuda", 128, PRECISION) for name in variants]
    names = [n for n in perceptron_names() if get_network(n).num_parameters < 3e7]
    found += [Request(name, "cuda", 1000, PRECISION, "adam") for name in names]
    return found


def compile_all(requests: Sequence[Request], processes: int) -> None:
    """Compile the kernels of all requests in a number of processes that share the work."""
    words = [str(request) for request in requests]
    parts = [words[i::processes] for i in range(min(processes, len(words)))]
    with running("benchmarks.studies.compiling", parts):
        pass


def main(texts: Sequence[str]) -> None:
    """Make the replicas, which compiles what the cache lacks."""
    for text in texts:
        # What fails here fails again when it is measured, and is reported then.
        with suppress(Exception):
            make(Request.parse(text))


if __name__ == "__main__":
    main(sys.argv[1:])
