"""The networks of the studies; those that dptrain does not know by name are defined here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dptrain.experiments.network_changes import change_layers
from dptrain.network import (
    Conv2d,
    Dense,
    Flatten,
    GlobalAveragePool2d,
    MaxPool2d,
    Network,
    get_network,
)

DEFINITIONS = Path(__file__).parent / "definitions"
"""Folder of network files."""
STUDY_A = ("smaller", "model0", "model1", "model2", "larger")
"""Study A's networks, from the smallest input to the largest."""
NAMES = MappingProxyType({"smaller": "study-a-smaller", "larger": "study-a-larger"})
"""Names by which dptrain knows networks whose names in the study are ambiguous."""
LOG = "log-network"
"""The network of study A's development log, whose time was taken for 1 to 8 threads."""


def network_name(name: str) -> str:
    """Return the name or the path by which `get_network` finds a network of study A."""
    path = DEFINITIONS / f"{name}.toml"
    return str(path) if path.exists() else NAMES.get(name, name)


def study_a_networks() -> dict[str, Network]:
    """Return study A's networks by name."""
    return {name: get_network(network_name(name)) for name in STUDY_A}


CIFAR_CHANGES: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "base": {},
    "stride 2": {"stride": "2"},
    "stride 3": {"stride": "3"},
    "stride 5": {"stride": "5"},
    "32 filters": {"filters": "32"},
    "larger pooling": {},
    "stride 2, 32 filters": {"stride": "2", "filters": "32"},
    "stride 3, 32 filters": {"stride": "3", "filters": "32"},
    "stride 5, 32 filters": {"stride": "5", "filters": "32"},
})  # fmt: skip
"""Changes of `cifar` by name of the variant. The last three were proposed by study D, not made."""


def cifar_variants() -> dict[str, Network]:
    """Return study D's network and its variants by name."""
    base = get_network("cifar")
    found = {}
    for name, changes in CIFAR_CHANGES.items():
        network = change_layers(base, changes)
        if name == "larger pooling":
            network = _with_larger_pooling(network)
        found[name] = replace(network, name="cifar-" + name.replace(", ", "-").replace(" ", "-"))
    return found


def _with_larger_pooling(network: Network) -> Network:
    """Return the network with a first pooling of 4×4 windows and without padding, 24×24 to 11×11.

    The text of the study does not contain the window; its byte counts prove 11×11.
    """
    layers = list(network.layers)
    first = next(i for i, layer in enumerate(layers) if isinstance(layer, MaxPool2d))
    layers[first] = MaxPool2d(4, 2, "valid")
    return replace(network, layers=layers)


def perceptron_names() -> list[str]:
    """Return study B's thirty perceptrons, the smallest first."""
    names = []
    for depth in (1, 2, 3):
        for i in range(10):
            names.append("-".join(["mlp", *(str(w * 2**i) for w in (50, 25, 13)[:depth])]))
    return sorted(names, key=lambda name: get_network(name).num_parameters)


def stack(size: int, filters: int) -> Network:
    """Return two convolutions 3×3 of the same width; the second one has an input gradient."""
    layers = [Conv2d(filters, padding=1), Conv2d(filters, padding=1), GlobalAveragePool2d()]
    return Network((filters, size, size), [*layers, Flatten(), Dense(10)],
                   name=f"stack-{size}-{filters}")  # fmt: skip


def find(name: str) -> Network:
    """Return a network of the studies by its name: of a file, of a variant, or of dptrain."""
    if name.startswith("stack-"):
        size, filters = name.split("-")[1:]
        return stack(int(size), int(filters))
    if name.startswith("cifar-"):
        return {network.name: network for network in cifar_variants().values()}[name]
    return get_network(network_name(name))
