"""Networks of ImageNet for other images and classes, and a step of each on two backends."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.errors import UserError
from dptrain.network import Network, get_network
from dptrain.network.adaptation import output_layer
from dptrain.network.zoo import NETWORKS, recipe
from dptrain.network.zoo.recipes import IMAGENET_SIZE

NAMES = tuple(name for name, entry in NETWORKS.items() if entry.outputs == IMAGENET_SIZE[1])

SMALLEST = {"inception-v3": 75, "alexnet": 63}
"""Smallest height and width, if not 32."""

FLATTENED = ("vgg11-bn", "vgg16-bn", "alexnet")
"""Networks whose first dense layer reads all pixels, so that its size is that of the maps."""

STEPPED = (
    "squeezenet1-1", "shufflenet-v2-x1", "mobilenet-v2", "mobilenet-v3-small",
    "mobilenet-v3-large", "mnasnet1-0", "efficientnet-b0", "regnet-x-400mf", "regnet-y-400mf",
    "densenet121", "googlenet",
)  # fmt: skip
"""Networks of at most ten million parameters."""


@given(
    name=st.sampled_from(NAMES), channels=st.sampled_from([1, 3, 4]), outputs=st.integers(2, 20),
    more=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)  # fmt: skip
def test_networks_follow_images_and_classes(
    name: str, channels: int, outputs: int, more: tuple[int, int]
) -> None:
    least, published = SMALLEST.get(name, 32), get_network(name)
    shape = (channels, least + more[0], least + more[1])
    network = get_network(name, input_shape=shape, outputs=outputs)
    assert (network.input_shape, network.output_shape) == (shape, (outputs,))
    assert [each.name for each in network.nodes] == [each.name for each in published.nodes]
    # The first convolution depends on the channels, and the output layer on the classes.
    first = next(node.name for node in network.nodes if node.parameters)
    changed = {f"{first}.weight", *(f"{output_layer(network)}.{x}" for x in ("weight", "bias"))}
    if name in FLATTENED:
        changed.add(next(p.name for p in network.parameters if len(p.shape) == 2))
    pairs = zip(network.parameters, published.parameters, strict=True)
    for own, other in pairs:
        assert own.shape == other.shape or own.name in changed, own.name


@given(
    name=st.sampled_from(NAMES), height=st.integers(1, 31), width=st.integers(1, 31),
    outputs=st.integers(1, 3),
)  # fmt: skip
def test_refusals_state_the_input_and_the_outputs(
    name: str, height: int, width: int, outputs: int
) -> None:
    expected = rf"no network for an input of 2×{height}×{width} and {outputs} outputs?: \w"
    found, message = None, ""
    try:
        found = get_network(name, input_shape=(2, height, width), outputs=outputs).output_shape
    except UserError as error:
        message = str(error)
    assert found == (outputs,) or re.match(expected, message)


@pytest.mark.parametrize("outputs", [0, -3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_an_output(name: str, outputs: int) -> None:
    with pytest.raises(UserError, match=f"the number of outputs is {outputs}; expected at least 1"):
        get_network(name, outputs=outputs)


@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_makes_small_steps_of_sgd(name: str) -> None:
    found = recipe(get_network(name), begins_with_weights=True)
    assert (found.optimizer, found.learning_rate, found.momentum) == ("sgd", 0.01, 0.9)
    assert (found.weight_decay or 0.0) <= 2e-4


PUBLISHED = {
    "vgg11-bn": (0.1, 256), "vgg16-bn": (0.1, 256), "alexnet": (0.01, 256), "resnet50": (0.1, 256),
    "resnext50-32x4d": (0.1, 256), "regnet-x-400mf": (0.8, 1024), "regnet-y-400mf": (0.4, 1024),
    "mobilenet-v2": (0.045, 256), "convnext-tiny": (0.001, 1024),  # torchvision's references
    "densenet121": (0.1, 256), "shufflenet-v2-x1": (0.5, 1024), "squeezenet1-1": (0.04, 512),
}  # fmt: skip
"""Published learning rates and batch sizes; the last three are those of the authors."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_learning_rates_are_published_ones_in_proportion_to_the_batch(name: str) -> None:
    (rate, batch_size), found = PUBLISHED[name], NETWORKS[name].recipe
    assert found.batch_size is not None
    assert found.learning_rate == pytest.approx(rate * found.batch_size / batch_size)


def _gradients(
    network: Network,
    backend: str,
    precision: str | None,
    x: NDArray[np.float64],
    y: NDArray[np.int32],
) -> NDArray[np.float64]:
    replica = make_replica(network, backend, len(x), precision=precision)
    replica.forward_backward(x.astype(replica.gradients[next(iter(replica.gradients))].dtype), y)
    arrays = [replica.gradients[each.name] for each in network.parameters]
    return np.concatenate([each.ravel().astype(np.float64) for each in arrays])


@pytest.mark.more
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_on_numba_equals_the_reference(name: str) -> None:
    """The error of float32 is up to 30 times that of the reference in float32.

    Rounding may move a number across a kink, such as 0 of ReLU, in one of them alone. That does not
    happen in each of three minibatches.
    """
    network = get_network(name, input_shape=(3, 32, 32), outputs=10)
    ratios = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, y = rng.standard_normal((8, 3, 32, 32)), rng.integers(0, 10, 8).astype(np.int32)
        exact = _gradients(network, "reference", "fp64", x, y)
        variants = (("numba", None), ("reference", "fp32"))
        own, other = (np.linalg.norm(_gradients(network, *each, x, y) - exact) for each in variants)
        ratios.append(own / other)
        if ratios[-1] < 30.0:
            assert other < 0.2 * np.linalg.norm(exact)
            return
    pytest.fail(f"errors relative to those of the reference: {ratios}")
