"""Networks that are planned for many GPUs."""

from benchmarks.outside import OUTSIDE
from dptrain.network.network import Network
from dptrain.network.zoo import NETWORKS, build_network

PERCEPTRONS = ("mlp-5", "mlp-2048-2048")
"""A small and a large one, in place of all perceptrons of the zoo."""


def planned_networks() -> dict[str, Network]:
    """Return the networks of the zoo and those outside the benchmark set, by name."""
    zoo = [name for name in NETWORKS if not name.startswith("mlp")]
    return {name: build_network(name) for name in (*zoo, *PERCEPTRONS)} | dict(OUTSIDE)
