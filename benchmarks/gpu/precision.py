"""Measure the error of fp32 layer by layer against float64, next to PyTorch's fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.ours import Step
from dptrain.network import Conv2d, Dense, Flatten, Layer, MeanSquaredError, Network

if TYPE_CHECKING:
    # Needs PyTorch.
    from benchmarks.check import Expected

PRECISION = "fp32"

Arrays = Mapping[str, NDArray[Any]]


def layer_networks(network: Network) -> Iterator[tuple[str, Network]]:
    """Yield the name of each layer with weights, and a network that consists of that layer."""
    for node in network.nodes:
        if isinstance(node.layer, Conv2d | Dense):
            layers: list[Layer] = [node.layer]
            if isinstance(node.layer, Conv2d):
                layers.append(Flatten())
            name = f"{network.name} {node.name}"
            yield node.name, Network(node.input_shape, layers, MeanSquaredError(), name)


def our_results(layer: Network, backend: str, batch_size: int) -> Arrays:
    """Return output and gradients of a step in fp32."""
    step = Step(layer, backend, PRECISION, batch_size)
    for _ in range(2):
        step.start()
    return step.results()


def torch_results(layer: Network, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
    """Return output and gradients of PyTorch's fp32 with the algorithms that it finds fastest."""
    from benchmarks.gpu.peers.inference_peers import torch_inference
    from benchmarks.gpu.peers.theirs import GPUMode, TorchProgram

    mode = GPUMode(f"{PRECISION} eager", precision=PRECISION, graph=False)
    output = torch_inference(layer, x, mode).output
    assert output is not None
    return {**TorchProgram(layer, x, y, mode).results(), "output": output()}


def errors(expected: Expected, found: Mapping[str, Arrays]) -> Iterator[dict[str, Any]]:
    """Yield rows with the errors of output and weight gradient, relative to their norms.

    Args:
        expected: the exact results.
        found: results by program.
    """
    weight = next(name for name in expected.exact if name.endswith(".weight"))
    for quantity, name in (("output", "output"), ("weight gradient", weight)):
        for program, arrays in found.items():
            error = relative_error(arrays[name], expected.exact[name])
            yield {"quantity": quantity, "program": program, "error": error}


def relative_error(array: NDArray[Any], exact: NDArray[np.float64]) -> float:
    """Return ‖array − exact‖ / ‖exact‖."""
    difference = array.reshape(exact.shape).astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))
