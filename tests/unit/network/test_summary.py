"""The table of a network: multiply-adds, parameters, and how notebooks show it."""

from __future__ import annotations

from dptrain import Conv2d, Dense, Flatten, Network, get_network
from dptrain.network.summary import num_macs


def test_multiply_adds_are_those_of_the_weights() -> None:
    network = Network((4, 6, 5), [Conv2d(8, 3, groups=2, stride=2), Flatten(), Dense(7)])
    pixels = network.nodes[0].output_shape[1] * network.nodes[0].output_shape[2]
    assert [num_macs(node) for node in network.nodes] == [8 * 2 * 9 * pixels, 0, 8 * pixels * 7]


def test_the_table_has_every_layer_and_the_sums() -> None:
    network = get_network("resnet20")
    lines = str(network).splitlines()
    assert str(network.summary()) == str(network)
    assert len(lines) == len(network.nodes) + 7
    assert "reads" in lines[2]
    assert f"{network.num_parameters:,}" in lines[-2]
    assert network._repr_html_().count("<tr>") == len(network.nodes) + 2
    assert repr(network).startswith("<Network resnet20: 73 layers, input 3×32×32, 10 outputs")
