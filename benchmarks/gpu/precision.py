"""Measure the error of fp32 layer by layer against float64, next to PyTorch's fp32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import targets
from benchmarks.gpu.ours import Step
from benchmarks.tables import make_table
from dptrain.network import Conv2d, Dense, Flatten, Layer, MeanSquaredError, Network
from dptrain.tables import Table

if TYPE_CHECKING:
    # Needs PyTorch.
    from benchmarks.check import Expected

PRECISION = "fp32"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class LayerError:
    """Errors of one result of a layer, relative to its norm.

    Attributes:
        network, batch_size, layer: the case.
        quantity: ``output`` or ``weight gradient``.
        ours: errors by backend.
        theirs: error of PyTorch; None if it was not measured.
    """

    network: str
    batch_size: int
    layer: str
    quantity: str
    ours: dict[str, float]
    theirs: float | None

    def ratio(self, backend: str) -> float | None:
        """Return the error divided by that of PyTorch."""
        return self.ours[backend] / self.theirs if self.theirs else None


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
    output = torch_inference(layer, x, mode).output()
    return {**TorchProgram(layer, x, y, mode).results(), "output": output}


def layer_errors(
    network: str,
    batch_size: int,
    layer: str,
    expected: Expected,
    ours: Mapping[str, Arrays],
    theirs: Arrays | None,
) -> list[LayerError]:
    """Return the errors of output and weight gradient; `ours` has the results by backend."""
    errors = []
    weight = next(name for name in expected.exact if name.endswith(".weight"))
    for quantity, name in (("output", "output"), ("weight gradient", weight)):
        exact = expected.exact[name]
        mine = {backend: relative_error(arrays[name], exact) for backend, arrays in ours.items()}
        peer = None if theirs is None else relative_error(theirs[name], exact)
        errors.append(LayerError(network, batch_size, layer, quantity, mine, peer))
    return errors


def relative_error(array: NDArray[Any], exact: NDArray[np.float64]) -> float:
    """Return ‖array − exact‖ / ‖exact‖."""
    difference = array.reshape(exact.shape).astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def precision_table(errors: Sequence[LayerError]) -> Table:
    """List the errors of all layers."""
    rows = []
    for e in errors:
        for backend, error in e.ours.items():
            times = e.ratio(backend)
            rows.append((
                e.network, str(e.batch_size), e.layer, e.quantity, backend, f"{error:.2e}",
                "" if e.theirs is None else f"{e.theirs:.2e}",
                "" if times is None else f"{times:.2f}",
                "" if times is None else targets.FP32_ERROR.verdict(times),
            ))  # fmt: skip
    columns = (
        "network", "batch", "layer", "result", "backend", "dptrain", "PyTorch", "ratio", "",
    )  # fmt: skip
    return make_table("Errors of fp32 against float64, each layer alone", columns, rows)


def precision_headline(errors: Iterable[LayerError]) -> list[str]:
    """Return a line for each backend with the number of layers that reach the target."""
    errors = list(errors)
    lines = []
    for backend in dict.fromkeys(backend for e in errors for backend in e.ours):
        ratios = [e.ratio(backend) for e in errors if backend in e.ours]
        found = [times for times in ratios if times is not None]
        if found:
            reached = sum(targets.FP32_ERROR.share(times) >= 1.0 for times in found)
            lines.append(
                f"{backend}: {reached} of {len(found)} errors of fp32 are at most PyTorch's; the "
                f"largest is {max(found):.2f} times as large"
            )
    return lines
