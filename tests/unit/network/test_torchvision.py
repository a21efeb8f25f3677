"""Networks of ImageNet next to those of torchvision: layers, weights by name, initial values.

Tests of this module run if torchvision is installed, which the extra `zoo` contains.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.zoo.sources import export, import_torchvision, make_module
from dptrain.api import make_replica
from dptrain.interchange.onnx_import import read_onnx
from dptrain.interchange.weight_names import network_of_weights
from dptrain.network import Add, Conv2d, Multiply, Network, StochasticDepth, get_network
from dptrain.network.initial import initial_parameters
from dptrain.network.layers import Dropout, Pool2d
from dptrain.network.network import INPUT
from dptrain.training.persistence.weights import load_weights
from tests.lazy import LazyModule

torch = LazyModule("torch")

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
    ),
]

SOURCES = {
    "resnext50-32x4d": "resnext50_32x4d",
    "wide-resnet50-2": "wide_resnet50_2",
    "regnet-x-400mf": "regnet_x_400mf",
    "regnet-y-400mf": "regnet_y_400mf",
    "densenet121": "densenet121",
    "convnext-tiny": "convnext_tiny",
    "googlenet": "googlenet",
    "inception-v3": "inception_v3",
    "squeezenet1-1": "squeezenet1_1",
    "shufflenet-v2-x1": "shufflenet_v2_x1_0",
    "mobilenet-v2": "mobilenet_v2",
    "mobilenet-v3-small": "mobilenet_v3_small",
    "mobilenet-v3-large": "mobilenet_v3_large",
    "mnasnet1-0": "mnasnet1_0",
    "efficientnet-b0": "efficientnet_b0",
}
"""Names of torchvision by name in the zoo."""

OLDER = {
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "resnet50": "resnet50",
    "vgg11-bn": "vgg11_bn",
    "vgg16-bn": "vgg16_bn",
    "alexnet": "alexnet",
}
"""Names of those whose modules other tests compare."""

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "networks.md").read_text("utf-8")

SIZES = {"inception-v3": 96}
"""Height and width of images, if not 64."""

BOTH = pytest.mark.parametrize(("name", "source"), SOURCES.items(), ids=SOURCES)

UNCOMPARED = ("weight_init", "bias_init", "weight_decay", "momentum", "padding", "rounding")
"""Fields that training alone has, or that have several forms with the same windows."""


def small(name: str) -> Network:
    size = SIZES.get(name, 64)
    return get_network(name, input_shape=(3, size, size))


def signature(network: Network) -> set[Any]:
    """Return what each node computes: its layer and the computation of each input, without names.

    Layers that do nothing in inference are left out.
    """
    found: dict[str, int] = {INPUT: 0}
    keys = set()
    for node in network.nodes:
        read, layer = [found[name] for name in node.inputs], node.layer
        if isinstance(layer, Dropout | StochasticDepth):
            (found[node.name],) = read
            continue
        if isinstance(layer, Add | Multiply):
            read.sort()
        compared = [each.name for each in fields(layer) if each.name not in UNCOMPARED]  # type: ignore[arg-type]
        pads = layer.pads(node.input_shape) if isinstance(layer, Conv2d | Pool2d) else None
        values = str([getattr(layer, each) for each in compared])
        key = (layer.kind, values, pads, node.output_shape, tuple(read))
        found[node.name] = hash(key)
        keys.add(key)
    return keys


@BOTH
def test_layers_are_those_of_the_exported_network(name: str, source: str, tmp_path: Path) -> None:
    network, path = small(name), tmp_path / "source.onnx"
    size = network.input_shape[-1]
    export(make_module("torchvision", source, size), path, size, "torchscript")
    assert signature(read_onnx(path).network) == signature(network)


@BOTH
def test_weights_are_found_by_name_and_give_the_same_outputs(
    name: str, source: str, tmp_path: Path
) -> None:
    network, path = small(name), tmp_path / "weights.safetensors"
    module = make_module("torchvision", source, network.input_shape[-1]).double()
    x = np.random.default_rng(0).standard_normal((4, *network.input_shape))
    with torch.no_grad():
        _estimate_statistics(module, x)
        expected = torch.softmax(module(torch.from_numpy(x)), 1).numpy()
    save_file({key: values.numpy() for key, values in module.state_dict().items()}, path)
    assert network_of_weights(path) == name
    replica = make_replica(network, "reference", 4, precision="fp64", training=False)
    load_weights(replica, path)
    np.testing.assert_allclose(replica.predict(x), expected, rtol=1e-9, atol=1e-12)


def _estimate_statistics(module: Any, x: Any) -> None:
    """Set running means and variances to those of a minibatch, so that outputs are not tiny."""
    norms = [part for part in module.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    module(torch.from_numpy(x))
    module.eval()


BY_FAN_IN = ("resnext50-32x4d", "wide-resnet50-2")
"""Networks that begin as the paper of residual networks has it, torchvision's by the fan-out."""


@pytest.mark.parametrize("name", SOURCES.keys() - BY_FAN_IN)
def test_initial_weights_are_spread_as_those_of_torchvision(name: str) -> None:
    own, theirs = initial_parameters(get_network(name), 0), parameters_of(SOURCES[name])
    for key, values in own.items():
        if values.ndim > 1 and values.size >= 1000 and np.ptp(values) > 0.0:
            # Ten standard errors of the quotient of two sample deviations.
            limit = 10 / np.sqrt(values.size)
            assert float(theirs[key].detach().std()) == pytest.approx(values.std(), rel=limit), key


@pytest.mark.parametrize(("name", "source"), {**SOURCES, **OLDER}.items(), ids={**SOURCES, **OLDER})
def test_the_page_states_the_accuracy_of_torchvision(name: str, source: str) -> None:
    import_torchvision()
    from torchvision import models

    meta: Mapping[str, Any] = models.get_model_weights(source).IMAGENET1K_V1.meta
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` | 3×"))
    parameters, multiplications, accuracy = (cell.strip() for cell in row.split("|")[3:6])
    assert accuracy == f"{meta['_metrics']['ImageNet-1K']['acc@1']:.1f}%"
    stated = float(multiplications.split()[0]) * {"M": 1e-3, "G": 1.0}[multiplications.split()[1]]
    assert stated == pytest.approx(meta["_ops"], rel=0.01)
    # That of Inception v3 has its auxiliary classifier there.
    assert parameters == f"{meta['num_params'] - {'inception-v3': 3_326_696}.get(name, 0):,}"


def parameters_of(source: str) -> Mapping[str, Any]:
    """Return the initial parameters of a classifier of torchvision by name."""
    import_torchvision()
    from torchvision import models

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(models.get_model(source, weights=None).named_parameters())
