"""Functions of single elements that a network file defines, in every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.launch import launch, succeed

pytestmark = pytest.mark.more

NETWORK = """
name = "mine"
input = [1, 8, 8]
function = [
    {name = "swish", expression = "x * sigmoid(beta * x)", parameters = {beta = 1.0}},
    {name = "logistic", expression = "1 / (1 + exp(-x))", derivative = "y * (1 - y)"},
]
layer = [
    {type = "conv", filters = 4}, {type = "swish", beta = 1.5}, {type = "flatten"},
    {type = "dense", units = 16}, {type = "logistic"}, {type = "dense", units = 10},
]
"""


def state(run_dir: Path) -> bytes:
    (last, *_) = sorted((run_dir / "checkpoints").glob("*/state.safetensors"), reverse=True)
    return last.read_bytes()


def test_commands_need_the_files_of_a_run_only(tmp_path: Path) -> None:
    """Micro-shards give the same bits on two ranks, and after a run that was resumed."""
    network = tmp_path / "mine.toml"
    network.write_text(NETWORK)
    options = ("train", "--network", network, "--data", "digits", "--steps", "6", "--shards", "4",
               "--batch-size", "16")  # fmt: skip
    succeed(*options, "--run-dir", tmp_path / "one")
    succeed(*options, "--run-dir", tmp_path / "two", ranks=2)
    stopped = launch(*options, "--run-dir", tmp_path / "parts", "--stop-after", "3", ranks=2)
    assert stopped.returncode == 75, stopped.stderr
    network.unlink()
    succeed("train", "--resume", tmp_path / "parts", "--stop-after", "none")
    assert state(tmp_path / "one") == state(tmp_path / "two") == state(tmp_path / "parts")
    assert "accuracy" in succeed("evaluate", tmp_path / "two")
    for name in ("model.onnx", "model.py"):
        succeed("export", tmp_path / "two", "--output", tmp_path / name)
    assert "torch.sigmoid((1.5 * x))" in (tmp_path / "model.py").read_text()
    assert "swish" in succeed("describe", tmp_path / "model.onnx", "--toml")


def test_a_file_that_calls_a_program_is_refused_in_one_line(tmp_path: Path) -> None:
    network = tmp_path / "mine.toml"
    network.write_text(NETWORK.replace("1 / (1 + exp(-x))", "__import__('os').system('ls')"))
    done = launch("describe", network)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "function 2" in done.stderr
