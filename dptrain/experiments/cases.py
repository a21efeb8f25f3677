"""The cases of a benchmark: networks × batch sizes × backends × precisions × threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dptrain.backends import load_backend
from dptrain.describe import network_for
from dptrain.errors import UserError
from dptrain.network.network import Network
from dptrain.network.zoo import NETWORKS

TRAINING, INFERENCE = "training", "inference"
"""Tasks: time of a training step, and time of a forward pass from host memory to host memory."""
LARGEST = "largest "
"""Prefix of a task that finds the largest batch which fits, from plans, without a run."""

PERCEPTRONS = "perceptrons"
"""Name for all perceptrons of the zoo."""

BATCH_SIZES = (32, 64, 128, 256, 512)
STUDIED = {"mlp": (100, 500, 1000), "solar": (2, 8, 32, 64, 128, 256, 512, 1024)}
"""Default batch sizes by the first part of the network's name, as published studies used them."""
SAMPLES = (2, 64, 512, 1024)


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        network: name or path of the network.
        task: `TRAINING` or `INFERENCE`, or one of them after the prefix `LARGEST`.
        samples: number of samples in a step or a forward pass; 0 if the largest is searched.
        backend, precision, threads: how it is computed.
    """

    network: str
    task: str
    samples: int
    backend: str
    precision: str
    threads: int

    @property
    def key(self) -> str:
        """Text that identifies the case."""
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def trains(self) -> bool:
        """True if the case runs training steps."""
        return self.task.endswith(TRAINING)

    @property
    def searches(self) -> bool:
        """True if the case searches the largest batch."""
        return self.task.startswith(LARGEST)

    @property
    def configuration(self) -> tuple[str, str, int]:
        """Backend, precision and number of threads."""
        return self.backend, self.precision, self.threads


@dataclass(frozen=True)
class BenchSettings:
    """What a benchmark measures.

    Attributes:
        networks: names, paths of .toml files, and `PERCEPTRONS`.
        data: specification of the data to which networks of the zoo are adapted.
        batch_sizes: batch sizes of training; None for the default of each network.
        samples: batch sizes of inference.
        backends, precisions, threads: all combinations that the backends support are measured; no
            precisions means the default of each backend.
        largest: True to find the largest batch that fits as well, of both tasks if there are no
            other cases.
        seconds_per_case: time limit of a case.
        memory: limit of memory in bytes; None for the free memory.
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
    data: str | None = None

    def values(self) -> dict[str, Any]:
        """Return the settings as values for JSON."""
        values = asdict(self)
        if self.data is None:  # Earlier versions had no such setting.
            del values["data"]
        return values


def named_networks(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of networks, each once, with `PERCEPTRONS` expanded."""
    found: list[str] = []
    for name in names:
        group = name == PERCEPTRONS
        found += [n for n in NETWORKS if n.startswith("mlp-")] if group else [name]
    return tuple(dict.fromkeys(found))


def list_cases(settings: BenchSettings) -> tuple[list[Case], dict[str, Network]]:
    """Return all cases, the cheapest first, and the networks by name.

    Raises:
        UserError: a network, backend or precision does not exist, or a number is less than 1.
    """
    names = named_networks(settings.networks)
    networks = {name: network_for(name, settings.data) for name in names}
    configurations = _configurations(settings)
    cases = []
    for name in networks:
        sizes = settings.batch_sizes
        if sizes is None:
            sizes = STUDIED.get(name.split("-")[0], BATCH_SIZES)
        tasks = [(TRAINING, n) for n in sizes] + [(INFERENCE, n) for n in settings.samples]
        if any(n < 1 for _, n in tasks):
            raise UserError(f"batch size is {min(n for _, n in tasks)}; expected at least 1")
        if settings.largest:
            tasks += [(LARGEST + task, 0) for task in dict(tasks) or (TRAINING, INFERENCE)]
        cases += [Case(name, task, n, *c) for task, n in tasks for c in configurations]
    if not cases:
        raise UserError("nothing to measure; pass --batch-sizes or --samples")
    order = {case: (case.searches, flops(networks[case.network], case)) for case in cases}
    return sorted(order, key=order.__getitem__), networks


def _configurations(settings: BenchSettings) -> list[tuple[str, str, int]]:
    found = []
    for name in settings.backends:
        backend = load_backend(name)
        own = list(backend.precisions)
        names = [p for p in settings.precisions if p in own] if settings.precisions else own[:1]
        threads = settings.threads if backend.threaded else (1,)
        found += [(name, precision, count) for precision in names for count in threads]
    known = {p for name in settings.backends for p in load_backend(name).precisions}
    for precision in settings.precisions:
        if precision not in known:
            raise UserError(
                f"no precision '{precision}' with {', '.join(settings.backends)}; "
                f"expected {', '.join(sorted(known))}"
            )
    if any(count < 1 for count in settings.threads):
        raise UserError(f"threads is {min(settings.threads)}; expected at least 1")
    return list(dict.fromkeys(found))


def flops(network: Network, case: Case) -> float:
    """Return the approximate number of operations of one run."""
    forward = sum(node.flops.forward for node in network.nodes)
    if not case.trains:
        return float(forward * case.samples)
    backward = sum(n.flops.backward_input + n.flops.backward_weight for n in network.nodes)
    # The update needs about ten operations for each parameter with Adam.
    return float((forward + backward) * case.samples + 10 * network.num_parameters)
