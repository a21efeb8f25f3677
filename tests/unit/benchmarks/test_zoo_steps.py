"""Steps of a published classifier are timed next to those of its module."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.zoo import steps
from tests.lazy import LazyModule

torch = LazyModule("torch")


def small_module(bias: float) -> Any:
    """Return a module with a batch normalisation and 1,000 classes."""
    nn = torch.nn
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(), nn.Linear(4, 1000),
    )  # fmt: skip
    module[1].bias.data.fill_(bias)
    return module.eval()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"library": "torchvision", "name": "small", "size": "8", "read": "yes"}
    monkeypatch.setattr(steps, "read_rows", lambda: [row])
    monkeypatch.setattr(steps, "make_module", lambda *_: small_module(0.5))


def run(path: Path) -> Any:
    options = ["--rounds", "2", "--block-s", "0.001", "--output", str(path), "small"]
    return CliRunner().invoke(steps.main, options)


@pytest.mark.usefixtures("rows")
def test_rows_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for count in (1, 2):
        result = run(path)
        assert result.exit_code == 0, result.output
        with path.open(newline="") as file:
            found = list(csv.DictReader(file))
        assert len(found) == count
    assert {row["network"] for row in found} == {"small"}
    assert float(found[0]["low"]) <= float(found[0]["ratio"]) <= float(found[0]["high"])


@pytest.mark.usefixtures("rows")
def test_another_loss_of_the_peer_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = steps.torch_steps

    def of_another_module(module: Any, *args: Any) -> Any:
        return original(small_module(3.0), *args)

    monkeypatch.setattr(steps, "torch_steps", of_another_module)
    result = run(tmp_path / "steps.csv")
    assert result.exit_code == 1
    assert "ArithmeticError: the loss is" in result.output
    assert not (tmp_path / "steps.csv").exists()
