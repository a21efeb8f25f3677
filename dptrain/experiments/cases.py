"""Which cases a bench has: networks × batch sizes × backends × precisions × threads, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.network.files import get_network
from dptrain.network.network import Network
from dptrain.network.zoo import NETWORKS

TRAINING, INFERENCE = "training", "inference"
"""Tasks: how long a training step takes, and how long it takes until an answer is there."""
LARGEST = "largest "
"""Before either of them: the largest batch that fits, and whether it does."""

PERCEPTRONS = "perceptrons"
"""Stands for all perceptrons of the zoo."""

BATCH_SIZES = (32, 64, 128, 256, 512)
STUDIED = {"mlp": (100, 500, 1000), "solar": (2, 8, 32, 64, 128, 256, 512, 1024)}
"""Batch sizes where the user names none, by the first word of the network's name."""
SAMPLES = (2, 64, 512, 1024)


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        network: as the user named it.
        task: `TRAINING` or `INFERENCE`, perhaps behind `LARGEST`.
        samples: of a training step, or that are answered at once; 0 where they are looked for.
    """

    network: str
    task: str
    samples: int
    backend: str
    precision: str
    threads: int

    @property
    def key(self) -> str:
        """Tells it from all other cases."""
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def trains(self) -> bool:
        """Whether it makes training steps."""
        return self.task.endswith(TRAINING)

    @property
    def searches(self) -> bool:
        """Whether it looks for the largest batch."""
        return self.task.startswith(LARGEST)

    @property
    def means(self) -> tuple[str, str, int]:
        """What it is computed with: backend, precision and threads."""
        return self.backend, self.precision, self.threads


@dataclass(frozen=True)
class Question:
    """What a bench is to find out; what is left out follows the network, backend or machine.

    Attributes:
        networks: names, files ending in .toml, and `PERCEPTRONS`.
        batch_sizes: of training; None for those that suit the network.
        samples: answered at once, in inference.
        backends, precisions, threads: combined, but for precisions that a backend does not have.
        largest: look for the largest batch that fits, too.
        seconds_per_case: budget.
        memory: bytes that may be used at most.
    """

    networks: tuple[str, ...]
    batch_sizes: tuple[int, ...] | None = None
    samples: tuple[int, ...] = SAMPLES
    backends: tuple[str, ...] = ("numba",)
    precisions: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1,)
    largest: bool = False
    seconds_per_case: float = 3.0
    memory: int | None = None

    def values(self) -> dict[str, Any]:
        """For a ledger."""
        return asdict(self)


def named_networks(names: Sequence[str]) -> tuple[str, ...]:
    """Names of networks, `PERCEPTRONS` spelt out, each once."""
    found: list[str] = []
    for name in names:
        group = name == PERCEPTRONS
        found += [n for n in NETWORKS if n.startswith("mlp-")] if group else [name]
    return tuple(dict.fromkeys(found))


def list_cases(question: Question) -> tuple[list[Case], dict[str, Network]]:
    """Every case, what answers soonest first, and the networks by name.

    Raises:
        UserError: there is no such network, backend or precision, or a number is below 1.
    """
    networks = {name: get_network(name) for name in named_networks(question.networks)}
    means = _means(question)
    cases = []
    for name in networks:
        sizes = question.batch_sizes
        if sizes is None:
            sizes = STUDIED.get(name.split("-")[0], BATCH_SIZES)
        tasks = [(TRAINING, n) for n in sizes] + [(INFERENCE, n) for n in question.samples]
        if any(n < 1 for _, n in tasks):
            raise UserError(f"a batch of {min(n for _, n in tasks)} samples; expected at least 1")
        if question.largest:
            tasks += [(LARGEST + task, 0) for task in dict(tasks)]
        cases += [Case(name, task, n, *mean) for task, n in tasks for mean in means]
    if not cases:
        raise UserError("there is nothing to measure; name a batch size or a number of samples")
    # A search confirms what it finds by a step of its own, whose time the others foretell.
    order = {case: (case.searches, flops(networks[case.network], case)) for case in cases}
    return sorted(order, key=order.__getitem__), networks


def _means(question: Question) -> list[tuple[str, str, int]]:
    found = []
    for name in question.backends:
        backend = load_backend(name)
        own = list(backend.precisions)
        words = [p for p in question.precisions if p in own] if question.precisions else own[:1]
        threads = question.threads if backend.threaded else (1,)
        found += [(name, word, count) for word in words for count in threads]
    known = {word for name in question.backends for word in load_backend(name).precisions}
    for word in question.precisions:
        if word not in known:
            raise UserError(
                f"no precision '{word}' with {', '.join(question.backends)}; "
                f"expected {', '.join(sorted(known))}"
            )
    if any(count < 1 for count in question.threads):
        raise UserError(f"threads is {min(question.threads)}; expected at least 1")
    return list(dict.fromkeys(found))


def flops(network: Network, case: Case) -> float:
    """Operations of one run, about."""
    forward = sum(node.flops.forward for node in network.nodes)
    if not case.trains:
        return float(forward * case.samples)
    backward = sum(n.flops.backward_input + n.flops.backward_weight for n in network.nodes)
    # The update touches every parameter, whatever the batch: some ten operations with Adam.
    return float((forward + backward) * case.samples + 10 * network.num_parameters)
