"""The public names of `dptrain`: they are imported when they are first used."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

import dptrain
from dptrain.network import ACTIVATIONS, Network

SOURCE = Path(dptrain.__file__)


def public_names() -> set[str]:
    """Names that type checkers see."""
    [block] = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    names = {
        str(alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name != "*"
    }
    return names | {cls.__name__ for cls in ACTIVATIONS.values()}


@pytest.mark.parametrize("name", sorted(public_names()))
def test_every_name_that_type_checkers_see_is_there(name: str) -> None:
    assert getattr(dptrain, name) is not None
    assert name in dir(dptrain)


def test_no_other_name_is_public() -> None:
    assert public_names() == set(dptrain.__all__)
    assert len(set(dptrain.__all__)) == len(dptrain.__all__)
    assert set(dptrain._MODULES) <= set(dptrain.__all__)
    with pytest.raises(AttributeError, match="'dptrain' has no attribute 'nothing'"):
        _ = dptrain.nothing  # type: ignore[attr-defined]


def run_program(code: str) -> str:
    """Run `code` in a new interpreter and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True, timeout=60, cwd=SOURCE.parents[1], capture_output=True, text=True,
    ).stdout  # fmt: skip


def test_import_star_imports_the_public_names() -> None:
    code = "from dptrain import *; print(Network.__name__, get_network('model0').num_parameters)"
    assert run_program(code) == "Network 210998\n"


def test_importing_the_package_imports_no_other_module() -> None:
    code = "import sys, dptrain; print(*[m for m in sys.modules if m.startswith('dptrain.')])"
    assert run_program(code) == "\n"


@pytest.mark.parametrize(
    "code",
    [
        "import dptrain; dptrain.Network; import dptrain.network",
        "import dptrain.network.layers, dptrain",
        "import dptrain; from dptrain import network; assert network is dptrain.network",
    ],
)
def test_network_is_the_subpackage(code: str) -> None:
    program = "; print(dptrain.network.__name__, dptrain.network.Conv2d is dptrain.Conv2d)"
    assert run_program(code + program) == "dptrain.network True\n"


def test_get_network_reads_names_and_files(tmp_path: Path) -> None:
    network = dptrain.get_network("model-small")
    path = tmp_path / "mine.toml"
    dptrain.write_network(network, path)
    assert dptrain.get_network(path) == dptrain.get_network(str(path)) == network
    with pytest.raises(
        dptrain.UserError, match=r"no network 'modle0'.*ends in \.toml or \.onnx; did you"
    ):
        dptrain.get_network("modle0")


def test_the_example_of_make_replica_runs() -> None:
    result = doctest.testmod(importlib.import_module("dptrain.api"))
    assert result.attempted > 5
    assert not result.failed


def test_a_replica_trains_and_predicts() -> None:
    network = dptrain.get_network("model-small")
    assert isinstance(network, Network)
    replica = dptrain.make_replica(network, backend="reference", batch_size=4, threads=1, seed=0)
    x = np.random.default_rng(0).standard_normal((4, 3, 16, 16))
    before = replica.forward_backward(x, [1, 2, 3, 4])
    replica.update(0.1)
    assert replica.forward_backward(x, [1, 2, 3, 4]) < before
    assert replica.predict(x).shape == (4, 10)
    assert replica.parameters["conv1.weight"].shape == (8, 3, 3, 3)
    assert replica.gradients["dense2.weight"].shape == (10, 50)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([1, 2, 3], "x has 4 samples, but y has targets for 3"),
        ([0.5, 1, 2, 3], "whole numbers"),
        ([0, 1, 2, float("nan")], "whole numbers"),
        ([0, 1, 2, 10], "labels from 0 to 10"),
        (np.full((4, 10), 0.1), "one-hot"),
    ],
)
def test_wrong_targets_are_one_line(y: ArrayLike, message: str) -> None:
    replica = dptrain.make_replica(
        dptrain.get_network("model-small"), backend="reference", batch_size=4
    )
    with pytest.raises(dptrain.UserError, match=message):
        replica.forward_backward(np.zeros((4, 3, 16, 16)), y)


def test_a_network_of_layer_objects() -> None:
    network = dptrain.Network((5,), [dptrain.Dense(3), dptrain.ReLU(), dptrain.Dense(2)])
    assert network.num_parameters == 18 + 8


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    readme = (SOURCE.parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parents[1])}
    subprocess.run(
        [sys.executable, program], check=True, timeout=280, env=environment, cwd=tmp_path
    )


def test_the_version_is_the_one_of_the_project_file() -> None:
    project = SOURCE.parents[1] / "pyproject.toml"
    assert f'\nversion = "{dptrain.__version__}"\n' in project.read_text()
