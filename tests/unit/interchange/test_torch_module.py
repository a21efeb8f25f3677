"""Generated PyTorch modules compute what `TrainedModel.predict` returns, from raw samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.errors import UserError
from dptrain.interchange.torch_layers import CODE
from dptrain.interchange.torch_module import RESERVED
from dptrain.network import (
    LAYERS,
    Add,
    Conv2d,
    Dense,
    Flatten,
    Network,
    NodeSpec,
    ReLU,
    get_network,
)
from tests.lazy import LazyModule
from tests.unit.backends.cases import Case
from tests.unit.interchange.models import (
    assert_agree,
    every_case,
    load_module,
    model_of,
    plain,
    raw_samples,
    run_torch,
    seeds,
)
from tests.unit.interchange.test_onnx_export import preprocessings, random_case
from tests.unit.interchange.test_zoo import preprocessing_of

torch = LazyModule("torch")
nn = LazyModule("torch.nn")


def compare(network: Network, preprocessing: Preprocessing, folder: Path, count: int = 3) -> None:
    """Export a network and compare predictions and names."""
    model = model_of(network, preprocessing, batch_size=count)
    files = model.export(folder / "model.py")
    assert files == (folder / "model.py", folder / "model.safetensors")
    text = files[0].read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 140
    loaded = load_module(files[0]).load()
    raw = raw_samples(preprocessing, count)
    assert_agree(run_torch(files[0], raw), model.predict(raw))
    names = {name for name in loaded.state_dict() if not name.endswith("num_batches_tracked")}
    assert names == {*model.parameters, *model.statistics}


def test_every_layer_has_code() -> None:
    found = {next(base for base in cls.__mro__ if base in CODE) for cls in LAYERS.values()}
    assert found == set(CODE)


@every_case
def test_every_layer_computes_the_same(case: Case, tmp_path: Path) -> None:
    compare(case.network, plain(case.network), tmp_path)


@pytest.mark.parametrize("seed", seeds(quick=range(10, 20)))
def test_random_networks_compute_the_same(seed: int, tmp_path: Path) -> None:
    compare(*random_case(seed), tmp_path)


@pytest.mark.parametrize("name", preprocessings())
def test_every_preprocessing_is_in_the_module(name: str, tmp_path: Path) -> None:
    compare(*preprocessings()[name], tmp_path)


@pytest.mark.more
def test_the_module_needs_nothing_of_dptrain(tmp_path: Path) -> None:
    network = get_network("resnet20")
    model = model_of(network, preprocessing_of("resnet20"), batch_size=2)
    model.export(tmp_path / "exported.py")
    raw = raw_samples(model.preprocessing, 2)
    np.save(tmp_path / "raw.npy", raw)
    program = (
        "import sys, json, numpy\n"
        "from exported import OUTPUTS, load\n"
        "values = load().predict(numpy.load('raw.npy'))\n"
        "assert not [name for name in sys.modules if name.startswith('dptrain')]\n"
        "print(json.dumps([len(OUTPUTS), values.tolist()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PATH": ""}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    count, values = json.loads(done.stdout)
    assert count == 10
    assert_agree(np.array(values, np.float32), model.predict(raw))


def test_samples_can_be_tensors_or_arrays_that_cannot_be_written(tmp_path: Path) -> None:
    network, preprocessing = preprocessings()["8-bit"]
    path, _ = model_of(network, preprocessing).export(tmp_path / "model.py")
    model, raw = load_module(path).load(), raw_samples(preprocessing, 2)
    expected = model.predict(torch.from_numpy(raw.copy()))
    raw.flags.writeable = False
    assert torch.equal(model.predict(raw), expected)


def test_a_loaded_module_trains(tmp_path: Path) -> None:
    network = get_network("resnet20")
    path, _ = model_of(network, preprocessing_of("resnet20")).export(tmp_path / "model.py")
    model = load_module(path).load().train()
    loss = nn.functional.cross_entropy(model(torch.zeros(2, 3, 32, 32)), torch.tensor([1, 2]))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_missing_parameters_are_named(tmp_path: Path) -> None:
    network = Network((4,), [Dense(3)])
    model = model_of(network, plain(network))
    path, weights = model.export(tmp_path / "model.py")
    torch_names = {"dense1.weight": torch.zeros(3, 4)}
    from safetensors.torch import save_file

    save_file(torch_names, weights)
    with pytest.raises(ValueError, match=r"lacks \['dense1.bias'\]"):
        load_module(path).load()


def named(*names: str) -> Network:
    """Return a network of dense layers with these names."""
    return Network.from_nodes((4,), [NodeSpec(Dense(4), name) for name in names])


@pytest.mark.parametrize("name", ["my net", "1-class", "lambda", "Scope", "é", "---", 'a"""\\'])
def test_any_name_of_a_network_makes_a_class(name: str, tmp_path: Path) -> None:
    network = Network((4,), [Dense(3)], name=name)
    compare(network, plain(network, classes=("a", 'b"', "c\\")), tmp_path)


@pytest.mark.parametrize(
    "names",
    [("a.b.c", "a.b.d"), ("block-1.x", "block-2.x"), ("lambda", "torch"), ("self", "x", "nn")],
)
def test_names_of_layers_are_kept(names: tuple[str, ...], tmp_path: Path) -> None:
    network = named(*names)
    compare(network, plain(network), tmp_path)


def test_variables_have_unused_names(tmp_path: Path) -> None:
    nodes = [
        NodeSpec(Conv2d(2), "a-b"), NodeSpec(Conv2d(2), "a_b", ("a-b",)),
        NodeSpec(ReLU(), "torch", ("a-b",)), NodeSpec(ReLU(), "F", ("input",)),
        NodeSpec(Conv2d(2), "class", ("F",)),
        NodeSpec(Add(4), None, ("a-b", "a_b", "torch", "class")), NodeSpec(Flatten()),
    ]  # fmt: skip
    network = Network.from_nodes((2, 3, 3), nodes)
    compare(network, plain(network), tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train",), "layer train cannot be exported to PyTorch, whose modules have an attribute"),
        (("a.half",), "'half' of their own; rename the layer, or export to .onnx"),
        (("a._modules",), "'_modules' of their own"),
        (("a", "a.b"), "layers a and a.b cannot be exported to PyTorch, because the first has the"),
    ],
)
def test_names_that_pytorch_refuses(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    network = named(*names)
    with pytest.raises(UserError, match=message):
        model_of(network, plain(network)).export(tmp_path / "model.py")
    assert not list(tmp_path.iterdir())


def test_attributes_of_modules_are_reserved() -> None:
    assert {name for name in dir(nn.Module()) if not name.startswith("_")} <= RESERVED


def test_neither_file_is_overwritten(tmp_path: Path) -> None:
    network = Network((4,), [Dense(3)])
    model = model_of(network, plain(network))
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(UserError, match=r"model\.safetensors exists already"):
        model.export(tmp_path / "model.py")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert len(model.export(tmp_path / "model.py", replace=True)) == 2
