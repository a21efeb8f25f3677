"""A network as a table for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dptrain.tables import Table

if TYPE_CHECKING:
    from dptrain.network.network import Network, Node


class Summary:
    """The layers of a network; ``print`` and notebooks show it as a table.

    Args:
        network: the network.
    """

    def __init__(self, network: Network) -> None:
        reads = () if network.is_chain else ("reads",)
        heads = ("layer", "kind", *reads, "output", "parameters", "MACs")
        rows: list[tuple[str, ...]] = []
        total = 0
        for node in network.nodes:
            macs, parameters = num_macs(node), sum(p.size for p in node.parameters)
            total += macs
            reads = () if network.is_chain else (", ".join(node.inputs),)
            shape, counts = _shape(node.output_shape), (f"{parameters:,}", f"{macs:,}")
            rows.append((node.name, type(node.layer).__name__, *reads, shape, *counts))
        blank = [""] * (len(heads) - 3)
        rows += [(), ("all", *blank, f"{network.num_parameters:,}", f"{total:,}")]
        self._table = Table.of_rows(
            f"{network.label}: input {_shape(network.input_shape)}, {network.num_outputs} outputs, "
            f"loss {network.loss.kind}",
            heads,
            rows,
            text=("layer", "kind", "reads"),
            note="MACs: multiply-adds of convolutions and dense layers for one sample",
        )

    def __repr__(self) -> str:
        return "\n".join(self._table.lines()).rstrip()

    def _repr_html_(self) -> str:
        return self._table.to_html()


def num_macs(node: Node) -> int:
    """Return the multiply-adds of a layer's weights for one sample."""
    pixels = math.prod(node.output_shape[1:])
    return sum(p.size * pixels for p in node.parameters if len(p.shape) > 1)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
