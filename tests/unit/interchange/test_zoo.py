"""Exports of every network of the zoo compute what `TrainedModel.predict` returns.

The ONNX files are also read again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.interchange.onnx_import import read_onnx
from dptrain.network import StochasticDepth, get_network
from dptrain.network.zoo import NETWORKS
from dptrain.network.zoo.studies import PERCEPTRONS
from dptrain.training.evaluation.model import TrainedModel
from tests.tiers import tiered
from tests.unit.interchange.models import (
    assert_agree,
    model_of,
    plain,
    raw_samples,
    run_onnx,
    run_torch,
)

WIDE = tuple(f"mlp-{width}" for width in (6400, 12800, 25600))
"""Perceptrons with as many units in the first layer have up to 414 million parameters and the same
layers as the others, so they are left out."""

TESTED = tuple(name for name in NETWORKS if not name.startswith(WIDE))

COMPILED = ("model0", "cifar", "solar", "resnet20", "mlp-50-25")
"""Networks that the default backend computes too; compiling its kernels takes long."""


QUICK = (
    ("model0", "reference"), ("solar", "reference"), ("resnet20", "reference"), ("model0", "numba"),
)  # fmt: skip


def preprocessing_of(name: str) -> Preprocessing:
    """Return a preprocessing of 8-bit images, or of values for a perceptron."""
    network = get_network(name)
    if network.loss.targets == "values":
        return plain(network, target_scale=(250.0,), target_offset=(300.0,))
    shape = network.input_shape
    return Preprocessing("image", shape, (shape[0], 30, 40), "uint8")


def zoo_model(name: str, backend: str = "reference") -> TrainedModel:
    """Return a network of the zoo whose outputs are at most 3 for `raw_samples`.

    Errors of larger outputs would be invisible in probabilities of 0 and 1.
    """
    network = get_network(name)
    # In fp32, the largest networks need half of the memory.
    model = model_of(network, preprocessing_of(name), backend, 1, "fp32")
    if network.loss.targets == "classes":
        x = model.preprocessing.apply(raw_samples(model.preprocessing, 1))
        largest = float(np.abs(model.replica.forward(x)).max())
        for parameter in network.nodes[-1].parameters:
            smaller = model.parameters[parameter.name] * np.float32(3.0 / largest)
            model.replica.parameters[parameter.name] = smaller
    return model


def test_only_wide_perceptrons_are_left_out() -> None:
    assert set(NETWORKS) - set(TESTED) <= set(PERCEPTRONS)
    assert len(NETWORKS) - len(TESTED) == 9


@pytest.mark.parametrize(
    ("name", "backend"),
    tiered(
        [*((name, "reference") for name in TESTED), *((name, "numba") for name in COMPILED)], QUICK
    ),
)
def test_files_of_the_zoo_compute_the_same(name: str, backend: str, tmp_path: Path) -> None:
    model = zoo_model(name, backend)
    (path,) = model.export(tmp_path / "model.onnx")
    is_small = model.preprocessing.kind == "vector"
    raw = raw_samples(model.preprocessing, 8 if is_small else 1)
    assert_agree(run_onnx(path, raw), model.predict(raw))
    imported = read_onnx(path).network
    # Files do not contain stochastic depth, which inference does not have.
    kept = [n.name for n in model.network.nodes if not isinstance(n.layer, StochasticDepth)]
    assert [node.name for node in imported.nodes] == kept
    assert imported.num_parameters == model.network.num_parameters
    path.unlink()
    path, weights = model.export(tmp_path / "model.py")
    assert_agree(run_torch(path, raw), model.predict(raw))
    weights.unlink()
