"""The wheel as built from the tree: what is in it, and that it runs outside the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]

TRAIN_A_STEP = """
import numpy as np
import dptrain
from dptrain.api import make_replica
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU

network = Network((1, 5, 5), [Conv2d(2), ReLU(), Flatten(), Dense(3)])
replica = make_replica(network, backend="reference", batch_size=4)
x, y = np.ones((4, 1, 5, 5)), np.array([0, 1, 2, 0])
before = replica.forward_backward(x, y)
replica.update(0.01)
assert replica.forward_backward(x, y) < before
print(dptrain.__file__)
"""


def source_files() -> set[str]:
    """Everything in the package's folders but what Python leaves there."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "dptrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its traces in the tree that it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(
        ROOT / "dptrain", tree / "dptrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-digits.txt"):
        shutil.copy(ROOT / name, tree)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(tree)]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("dptrain-*.whl"))


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert names - metadata == source_files()
    for licence in ("LICENSE", "LICENSE-digits.txt"):
        assert any(name.endswith(f"licenses/{licence}") for name in metadata)
    assert "dptrain/py.typed" in names


def test_the_wheel_runs_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True, timeout=300)
    # PYTHONPATH comes before the tree that is installed here.
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRAIN_A_STEP],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)
    assert (site / "bin" / "dptrain").exists()
