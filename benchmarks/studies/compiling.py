"""The replicas of all measurements on a GPU, whose kernels several processes compile before.

python -m benchmarks.studies.compiling NETWORK:BACKEND:BATCH:PRECISION:OPTIMIZER:FORM …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.gpu import compiling
from benchmarks.gpu.compiling import LAYERS, UNFUSED, Request, running
from benchmarks.studies.networks import STUDY_A, cifar_variants, find, perceptron_names
from dptrain.backends.replica import Replica
from dptrain.network import get_network

BACKENDS = ("cuda", "cudnn")
PRECISION = "fp32"
BATCHES = (1, 32)
STACKS = ((12, 16), (24, 32), (56, 64), (112, 64), (28, 256), (224, 16))
"""Sizes and numbers of filters of the convolutions with which the two backends are compared."""


def make(request: Request, threads: int = 1) -> Replica:
    """Return the replica of a request."""
    return compiling.make(request, threads, find)


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


if __name__ == "__main__":
    compiling.main(sys.argv[1:], find)
