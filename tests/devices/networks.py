"""Networks that are planned for many GPUs."""

from benchmarks.outside import OUTSIDE, find_network
from dptrain.network.network import Network
from dptrain.network.zoo import build_network, studies

PERCEPTRONS = ("mlp-5", "mlp-2048-2048")
"""A small and a large one, in place of all perceptrons of studies."""


def planned_networks() -> dict[str, Network]:
    """Return the networks of studies and those outside the benchmark set, by name."""
    names = (*studies.NETWORKS, *PERCEPTRONS)
    return {name: build_network(name) for name in names} | {
        name: find_network(name) for name in OUTSIDE
    }
