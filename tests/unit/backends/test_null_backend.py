"""The null backend binds no kernel of another backend."""

from __future__ import annotations

from pathlib import Path

from dptrain.backends.null.backend import NullBackend
from dptrain.backends.numba.backend import NumbaBackend
from dptrain.cli.main import run


def test_every_kernel_is_replaced() -> None:
    bound = {name for name in vars(NumbaBackend) if name.startswith("bind")}
    assert bound <= set(vars(NullBackend))


def test_clipping_and_sums_of_gradients_run(tmp_path: Path) -> None:
    """Of a network with branches, whose gradients are added."""
    network = tmp_path / "net.toml"
    network.write_text(
        'input = [3, 32, 32]\n[[layer]]\ntype = "conv"\nfilters = 3\n[[layer]]\ntype = "relu"\n'
        'inputs = ["conv1"]\n[[layer]]\ntype = "add"\ninputs = ["relu1", "conv1"]\n'
        '[[layer]]\ntype = "flatten"\n[[layer]]\ntype = "dense"\nunits = 10\n',
        encoding="utf-8",
    )
    arguments = f"train --backend null --network {network} --data shapes?samples=64 --steps 2"
    arguments += f" --batch-size 16 --clip-norm 1 --baseline-steps 0 --run-dir {tmp_path / 'run'}"
    assert run(arguments.split(), is_rank_zero=True) == 0
