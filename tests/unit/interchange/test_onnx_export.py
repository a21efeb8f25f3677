"""ONNX files compute what `TrainedModel.predict` returns, from the same raw samples.

They are imported as the network that was exported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import dptrain
from dptrain import make_replica
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError
from dptrain.interchange.onnx_import import read_onnx
from dptrain.interchange.onnx_layers import OPERATORS
from dptrain.network import (
    LAYERS,
    BatchNorm2d,
    ChannelSlice,
    Conv2d,
    Dense,
    Flatten,
    LocalResponseNorm,
    MeanSquaredError,
    Multiply,
    Network,
    NodeSpec,
    ReLU,
    Reshape,
    SigmoidBinaryCrossEntropy,
    StochasticDepth,
)
from dptrain.training.evaluation.model import TrainedModel
from dptrain.training.persistence.weights import load_weights
from tests.fuzz.networks import random_network
from tests.unit.backends.cases import Case
from tests.unit.interchange.models import (
    assert_agree,
    every_case,
    model_of,
    plain,
    raw_samples,
    run_onnx,
    seeds,
    tolerance_of_sigmoids,
)


def compare(network: Network, preprocessing: Preprocessing, folder: Path, count: int = 3) -> None:
    """Export a network, compare predictions for any number of samples, and import the file."""
    model = model_of(network, preprocessing, batch_size=count)
    (path,) = model.export(folder / "model.onnx")
    raw = raw_samples(preprocessing, count)
    absolute = tolerance_of_sigmoids(network)
    assert_agree(run_onnx(path, raw), model.predict(raw), absolute=absolute)
    assert_agree(run_onnx(path, raw[:1]), model.predict(raw[:1]), absolute=absolute)
    assert_imported(path, model, raw)


def assert_imported(path: Path, model: TrainedModel, raw: NDArray[Any]) -> None:
    """Import the file of a model; layers, names, arrays and outputs stay the same."""
    found, network = read_onnx(path), model.network
    # Products are read as the function that they are: x · x as a square, x · sigmoid(x) as SiLU.
    if not any(isinstance(node.layer, Multiply) for node in network.nodes):
        assert described(found.network) == described(network)
    assert (found.network.loss, found.network.name) == (network.loss, network.name)
    assert found.network.input_shape == network.input_shape
    again = make_replica(found.network, "reference", len(raw), training=False)
    load_weights(again, path)
    for name, values in {**model.parameters, **model.statistics}.items():
        np.testing.assert_array_equal(found.arrays[name], values.astype(np.float32))
    # The preprocessing is no part of the network.
    x = model.preprocessing.apply(raw)
    expected = model.replica.forward(x)
    np.testing.assert_allclose(again.forward(x), expected, 1e-5, 1e-6 * np.abs(expected).max())


def described(network: Network) -> dict[str, tuple[object, tuple[str, ...]]]:
    """Return layers and inputs; files have pads as numbers, and round α of response norms.

    They contain neither stochastic depth nor layers that change nothing.
    """
    omitted: dict[str, str] = {}
    found: dict[str, tuple[object, tuple[str, ...]]] = {}
    for node in network.nodes:
        inputs = tuple(omitted.get(name, name) for name in node.inputs)
        is_same = node.input_shape == node.output_shape
        if isinstance(node.layer, StochasticDepth) or (
            is_same and isinstance(node.layer, ChannelSlice | Reshape)
        ):
            omitted[node.name] = inputs[0]
            continue
        rounded = hasattr(node.layer, "pads") or isinstance(node.layer, LocalResponseNorm)
        found[node.name] = (type(node.layer) if rounded else node.layer, inputs)
    return found


def test_every_layer_has_operators() -> None:
    found = {next(base for base in cls.__mro__ if base in OPERATORS) for cls in LAYERS.values()}
    assert found == set(OPERATORS)


@every_case
def test_every_layer_computes_the_same(case: Case, tmp_path: Path) -> None:
    compare(case.network, plain(case.network), tmp_path)


def test_small_probabilities_keep_their_precision(tmp_path: Path) -> None:
    """The operator Sigmoid of ONNX Runtime is 0 below −17."""
    network = Network((1,), [Dense(1)], SigmoidBinaryCrossEntropy(), name="rare")
    model = model_of(network, plain(network))
    model.replica.parameters["dense1.weight"] = np.ones((1, 1))
    model.replica.parameters["dense1.bias"] = np.zeros(1)
    (path,) = model.export(tmp_path / "model.onnx")
    z = np.random.default_rng(3).uniform(-80.0, 40.0, (256, 1)).astype(np.float32)
    exact = 1.0 / (1.0 + np.exp(-z.astype(np.float64)))
    np.testing.assert_allclose(run_onnx(path, z), exact, 1e-5)
    np.testing.assert_allclose(model.predict(z), exact, 1e-6)


def test_a_sigmoid_at_the_end_is_recognised_without_metadata(tmp_path: Path) -> None:
    network = Network((4,), [Dense(2)], SigmoidBinaryCrossEntropy(), name="pair")
    (path,) = model_of(network, plain(network)).export(tmp_path / "model.onnx")
    file = onnx.load(path)
    del file.metadata_props[:]
    file.producer_name = "another program"
    onnx.save(file, path)
    found = read_onnx(path).network
    assert found.loss == SigmoidBinaryCrossEntropy()
    assert [type(node.layer) for node in found.nodes] == [Dense]


def test_batch_normalisations_keep_their_settings(tmp_path: Path) -> None:
    layer = BatchNorm2d(momentum=0.3, epsilon=0.01)
    network = Network((3, 4, 5), [layer, Flatten(), Dense(2)], name="settings")
    (path,) = model_of(network, plain(network)).export(tmp_path / "model.onnx")
    assert read_onnx(path).network.nodes[0].layer == layer


def random_case(seed: int) -> tuple[Network, Preprocessing]:
    """A random network; every second one predicts values in a unit of their own."""
    network = random_network(seed)
    if seed % 2 == 0:
        return network, plain(network)
    nodes = [NodeSpec(node.layer, node.name, node.inputs) for node in network.nodes]
    network = Network.from_nodes(network.input_shape, nodes, MeanSquaredError())
    return network, plain(network, target_scale=3.5, target_offset=-40.0)


@pytest.mark.parametrize("seed", seeds(quick=range(10)))
def test_random_networks_compute_the_same(seed: int, tmp_path: Path) -> None:
    compare(*random_case(seed), tmp_path)


MAPS = Network((3, 6, 5), [Conv2d(4), ReLU(), Flatten(), Dense(3)], name="maps")
GREY = Network((1, 6, 5), [Conv2d(4), ReLU(), Flatten(), Dense(3)], name="grey")
VECTOR = Network((12,), [Dense(3)], MeanSquaredError(), "vector")
ROWS = Network((12,), [Dense(6), ReLU(), Dense(1)], MeanSquaredError(), "rows")
IMAGE: dict[str, Any] = {"kind": "image", "stored_dtype": "uint8"}


def preprocessings() -> dict[str, tuple[Network, Preprocessing]]:
    """Networks and what each preprocessing does."""
    maps, grey, rows = (n.input_shape for n in (MAPS, GREY, ROWS))
    columns = tuple(f"c{i}" for i in range(12))
    mean = tuple(1000.0 * i for i in range(12))
    table = {"columns": columns, "mean": mean, "deviation": (0.5,) * 12, "stored_shape": (12,)}
    windows = {
        shape: (
            Network(shape, [*[Flatten()] * (len(shape) == 3), Dense(2)], MeanSquaredError()),
            Preprocessing(
                "table", shape, (1, 4, 3), "float64", columns=("a", "b", "c"),
                mean=(1.0, -2.0, 300.0), deviation=(1.0, 0.5, 40.0), lags=(3, 2, 1, 0),
                positions=(0.0, 0.0, 2.0, 0.0, 1.0, 3.0) if shape[0] == 4 else (),
            ),
        )
        for shape in ((12,), (1, 4, 3), (3, 1, 4), (4, 6, 5))
    }  # fmt: skip
    return {
        "rows as features": windows[12,],
        "rows as a map": windows[1, 4, 3],
        "columns as channels": windows[3, 1, 4],
        "maps of sensors": windows[4, 6, 5],
        "8-bit": (MAPS, Preprocessing(input_shape=maps, stored_shape=maps, **IMAGE)),
        "white 16": (MAPS, Preprocessing(input_shape=maps, stored_shape=maps, white=16, **IMAGE)),
        "smaller": (MAPS, Preprocessing(input_shape=maps, stored_shape=(3, 17, 19), **IMAGE)),
        "larger": (MAPS, Preprocessing(input_shape=maps, stored_shape=(3, 4, 3), **IMAGE)),
        "one axis": (MAPS, Preprocessing(input_shape=maps, stored_shape=(3, 6, 8), **IMAGE)),
        "crop": (
            MAPS, Preprocessing(input_shape=maps, stored_shape=(3, 9, 6), fit="crop", **IMAGE)
        ),
        "repeated": (MAPS, Preprocessing(input_shape=maps, stored_shape=(1, 8, 8), **IMAGE)),
        "grey": (GREY, Preprocessing(input_shape=grey, stored_shape=(3, 6, 5), **IMAGE)),
        "grey, resized": (GREY, Preprocessing(input_shape=grey, stored_shape=(3, 9, 9), **IMAGE)),
        "any size": (MAPS, Preprocessing(input_shape=maps, **IMAGE)),
        "any size, grey": (GREY, Preprocessing(input_shape=grey, **IMAGE)),
        "any size, crop": (MAPS, Preprocessing(input_shape=maps, fit="crop", **IMAGE)),
        "float64": (MAPS, plain(MAPS, stored_dtype="float64")),
        "big endian": (MAPS, plain(MAPS, stored_dtype=">f4")),
        "int16, scaled": (MAPS, plain(MAPS, stored_dtype="int16", scale=0.25, offset=3.0)),
        "bool": (MAPS, plain(MAPS, stored_dtype="bool")),
        "float16": (MAPS, plain(MAPS, stored_dtype="float16")),
        "flattened": (
            ROWS, Preprocessing("vector", rows, (3, 2, 2), "uint8", target_scale=2.0)
        ),
        "vectors": (ROWS, plain(ROWS, target_scale=0.1, target_offset=7.0)),
        "units": (
            VECTOR, plain(VECTOR, target_scale=(2.0, 0.5, 9.0), target_offset=(1.0, -3.0, 0.0))
        ),
        "table": (
            ROWS, Preprocessing("table", rows, stored_dtype="float64", target_scale=9.0, **table)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", preprocessings())
def test_every_preprocessing_is_in_the_file(name: str, tmp_path: Path) -> None:
    compare(*preprocessings()[name], tmp_path)


@pytest.mark.parametrize("size", [(6, 5), (5, 21), (40, 4), (33, 64), (1, 1)])
def test_images_of_any_size_are_resized(size: tuple[int, int], tmp_path: Path) -> None:
    network, preprocessing = preprocessings()["any size"]
    model = model_of(network, preprocessing)
    (path,) = model.export(tmp_path / "model.onnx")
    raw = raw_samples(preprocessing, 2, size)
    assert_agree(run_onnx(path, raw), model.predict(raw))


def test_the_file_describes_the_model(tmp_path: Path) -> None:
    network, preprocessing = preprocessings()["any size"]
    named = replace(preprocessing, classes=("cat", "dog", "bird"))
    (path,) = model_of(network, named).export(tmp_path / "model.onnx")
    model = onnx.load(path)
    facts = {item.key: item.value for item in model.metadata_props}
    assert json.loads(facts["dptrain.outputs"]) == ["cat", "dog", "bird"]
    assert facts["dptrain.version"] == model.producer_version == dptrain.__version__
    assert len(facts["dptrain.digest"]) == 64
    sizes = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["N", 3, "H", "W"]
    assert model.graph.output[0].name == "probabilities"
    assert {c.name for c in model.graph.initializer} >= {p.name for p in network.parameters}


def test_two_classes_with_one_output(tmp_path: Path) -> None:
    network = Network((5,), [Dense(1)], SigmoidBinaryCrossEntropy())
    compare(network, plain(network), tmp_path)


def test_without_the_library_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"need the library onnx; install it with: pip install"):
        model_of(ROWS, plain(ROWS)).export(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_files_beyond_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.interchange.onnx_export.LIMIT_BYTES", 100)
    with pytest.raises(UserError, match="an ONNX file has at most 2 GiB"):
        model_of(ROWS, plain(ROWS)).export(tmp_path / "model.onnx")
