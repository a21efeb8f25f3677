"""Trained networks of any shape, without training, and runs of their files."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain import make_replica
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.network import Network, Sigmoid, SiLU
from dptrain.training.evaluation.model import TrainedModel
from dptrain.training.persistence.checkpoints import CheckpointFacts
from tests.lazy import LazyModule
from tests.unit.backends.cases import Case
from tests.unit.backends.selection import CASES, cover, marked

onnxruntime = LazyModule("onnxruntime")

FACTS = CheckpointFacts(
    updates=7, network="test", batch_size=4, seed=3, data="npz:x", ranks=1, total_steps=7,
    schedule="constant", spec={}, preprocessing={},
)  # fmt: skip


def _settings(case: Case) -> Iterator[tuple[Any, ...]]:
    """Yield what an export may have to write: layers, and each setting that has another value.

    Numbers are written alike, whatever they are.
    """
    yield (type(case.network.loss),)
    for node in case.network.nodes:
        layer = node.layer
        yield (type(layer),)
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if value != field.default:
                yield type(layer), field.name, value if isinstance(value, str) else type(value)
        if hasattr(layer, "pads"):
            yield type(layer), any(a != b for a, b in layer.pads(node.input_shape))


QUICK = {case.name for case in cover(CASES, _settings)}

every_case = pytest.mark.parametrize(
    "case", [marked(case, name=case.name, is_quick=case.name in QUICK) for case in CASES]
)


def seeds(quick: range) -> list[Any]:
    """Return seeds of random networks."""
    return [marked(seed, name=str(seed), is_quick=seed in quick) for seed in range(50)]


def tolerance_of_sigmoids(network: Network) -> float:
    """Return the absolute error that the sigmoid of ONNX Runtime explains.

    It is an approximation with an absolute error of 4e-8, even if the result is smaller.
    """
    has_sigmoid = any(isinstance(layer, Sigmoid | SiLU) for layer in network.layers)
    return 5e-7 if has_sigmoid else 0.0


def plain(network: Network, **settings: Any) -> Preprocessing:
    """Return the preprocessing of float32 samples that are the network's inputs."""
    shape = network.input_shape
    kind = "image" if len(shape) == 3 else "vector"
    values = {"stored_shape": shape, **settings}
    return Preprocessing(kind, shape, **values)


def model_of(
    network: Network,
    preprocessing: Preprocessing,
    backend: str = "reference",
    batch_size: int = 4,
    precision: str | None = None,
) -> TrainedModel:
    """Return a network with random parameters and statistics as if it were trained."""
    replica = make_replica(network, backend, batch_size, precision=precision, training=False)
    rng = np.random.default_rng(2)
    for parameter in network.parameters:
        shift = 0.2 * rng.standard_normal(parameter.shape).astype(np.float32)
        if parameter.shape == parameter.shape[:1]:
            replica.parameters[parameter.name] = replica.parameters[parameter.name] + shift
    for statistic in network.statistics:
        noise = rng.standard_normal(statistic.shape).astype(np.float32)
        is_mean = statistic.name.endswith("mean")
        replica.statistics[statistic.name] = noise if is_mean else 0.5 + np.abs(noise)
    return TrainedModel(network, preprocessing, replica, FACTS, step=7)


def raw_samples(preprocessing: Preprocessing, count: int, size: Any = (9, 7)) -> NDArray[Any]:
    """Return random raw samples; `size` is that of images of any size."""
    rng = np.random.default_rng(8)
    channels = 1 if preprocessing.is_grey else 3
    shape = (count, *(preprocessing.stored_shape or (channels, *size)))
    if preprocessing.stored_dtype == "uint8":
        return rng.integers(0, preprocessing.white + 1, shape).astype(np.uint8)
    if preprocessing.kind == "table":
        columns = rng.standard_normal(shape)
        return columns * preprocessing.deviation + preprocessing.mean
    return (3 * rng.standard_normal(shape)).astype(preprocessing.stored_dtype)


def run_onnx(path: Path, raw: NDArray[Any]) -> NDArray[Any]:
    """Return what ONNX Runtime computes from raw samples."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    native = raw.astype(raw.dtype.newbyteorder("="))
    output: NDArray[Any] = session.run(None, {"input": native})[0]
    return output


def load_module(path: Path) -> ModuleType:
    """Import a generated PyTorch module."""
    spec = importlib.util.spec_from_file_location("generated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_torch(path: Path, raw: NDArray[Any]) -> NDArray[Any]:
    """Return what a generated PyTorch module predicts for raw samples."""
    native = raw.astype(raw.dtype.newbyteorder("="))
    output: NDArray[Any] = load_module(path).load().predict(native).numpy()
    return output


def assert_agree(
    found: NDArray[Any], expected: NDArray[Any], relative: float = 1e-5, absolute: float = 0.0
) -> None:
    """Compare predictions; errors are relative to the largest output.

    A single value can be the small difference of large sums, whose rounding errors it has.
    """
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    assert np.isfinite(expected).all()
    scale = np.abs(expected).max()
    assert (np.abs(found - expected) <= relative * scale + absolute).all()
