"""Short valid commands, to which random flags are added, and the files that they read."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from dptrain.cli.main import cli
from tests.fuzz.conversion import write_linear_network
from tests.fuzz.outcome import call, expect

TRAINING = {"network": "net.toml", "data": "npz:data.npz", "backend": "reference",
            "batch_size": "6", "threads": "1"}  # fmt: skip
"""Values that make the steps of a command short; some are replaced by random ones."""

BASES: dict[str, dict[str, Any]] = {
    "train": {**TRAINING, "steps": "2", "stop_after": "2", "run_dir": "new", "launcher": "false"},
    "rehearse": {**TRAINING, "steps": "2", "run_dir": "new", "kill": "0@1", "launcher": "false"},
    "resize": {"run_dir": "missing", "ranks": "2"},
    "evaluate": {"run_dir": "run"},
    "predict": {"run_dir": "run", "inputs": "new.npz", "output": "predicted.csv"},
    "find-rate": {**TRAINING, "steps": "10"},
    "data list": {},
    "data describe": {"spec": "npz:data.npz"},
    "data check": {"spec": "npz:data.npz"},
    "data show": {"spec": "npz:data.npz", "output": "grid.png"},
    "data convert": {"spec": "npz:data.npz", "output": "converted"},
    "export": {"run_dir": "run", "output": "model.onnx"},
    "describe": {"name": "net.toml", "threads": "1"},
    "layers": {"network": "net.toml", "backends": "reference", "batch_size": "2", "threads": "1"},
    "profile": {**TRAINING, "steps": "2", "skip": "1", "roofs": "--no-roofs"},
    "report": {"folders": "run"},
    "runs list": {"folders": "."},
    "runs compare": {"folders": ["run", "run2"]},
    "runs label": {"folder": "run2", "add": "tried"},
    "runs cite": {"folder": "run"},
    "scale": {**TRAINING, "ranks": "1", "steps": "1", "launches": "1", "launcher": "false"},
    "bench": {"networks": "net.toml", "batch_sizes": "2", "samples": "2", "backends": "reference",
              "seconds_per_case": "0.001", "output": "bench"},
    "study variants": {**TRAINING, "steps": "1", "width": "2", "output": "variants"},
    "study sweep": {**TRAINING, "steps": "1", "sets": "learning_rate=0.01", "output": "sweep"},
    "": {}, "data": {}, "runs": {}, "study": {},
}  # fmt: skip
"""Values of the parameters of each command, by their names. `doctor` runs as a process."""

WEIGHTS = {"train": 6, "describe": 3, "find-rate": 2, "evaluate": 2, "predict": 2, "": 0.2,
           "data list": 0.3, "data": 0.2, "runs": 0.2, "study": 0.2,
           "study variants": 0.5, "report": 0.5, "bench": 0.7}  # fmt: skip
"""How often commands are tried, relative to 1."""

VALUES: dict[str, Any] = {
    "network": ["net.toml", "net.toml", "mlp-3", "model0"],
    "name": ["net.toml", "mlp-4-3", "model0", "cifar", "solar", "resnet20"],
    "data": ["npz:data.npz", "npz:data.npz", "digits", "csv:table.csv?target=c"],
    "spec": ["npz:data.npz", "digits", "csv:table.csv?target=c", "shapes?samples=20",
             "synthetic?samples=20", "irradiance?samples=20&horizon=2"],
    "file": ["config.toml", "small"],
    "weights": ["weights.safetensors"],
    "backend": ["reference", "null", "reference"],
    "backends": ["reference", "null", "null,reference"],
    "precision": ["fp32", "fp64"],
    "precisions": ["fp32", "fp64,fp32"],
    "run_dir": ["run", "new", "é猫"],
    "resume": ["run"],
    "folders": ["run", "run2", "."],
    "folder": ["run", "run2"],
    "inputs": ["new.npz", "table.csv"],
    "output": ["out", "out.csv", "out.png", "model.py", "model.safetensors", "model.onnx"],
    "checkpoint": ["1", "2", "3"],
    "step_at": ["1/2", "0.5,0.75"],
    "balance": ["off", "measured", "1"],
    "tags": ["a,b", "é"],
    "add": ["a", "b"], "remove": ["a"], "tag": ["a"], "note": ["a note"],
    "classes": ["cat,dog,cow", "a,b,c"],
    "where": ["steps=2", "backend=reference", "learning_rate<1"],
    "sort": ["steps", "started", "test_accuracy"],
    "columns": ["steps,seed", "backend"],
    "scaling": ["weak", "strong", "weak,strong"],
    "launcher": ["false", "absent-launcher", "mpirun"],
    "only": ["weak-r1-t1"],
    "part": ["1/1", "1/2", "2/2"],
    "collect": ["study"],
    "batch_sizes": ["2", "2,4", "none"],
    "samples": ["2", "1,2", "none"],
    "memory": ["1MB", "2GB"],
    "within": ["1s", "1ms"],
    "sets": ["batch_size=2,4", "seed=1,2", "momentum=0,0.5"],
    "width": ["1,2", "0.5"], "stride": ["1", "1,2"], "filters": ["2"], "kernel": ["3"],
    "pool": ["2", "3/2"], "first_pool": ["2"],
    "delay": ["1ms"],
    "ranks": ["1", "1,2"],
    "low": ["1e-4", "0.01"], "high": ["1", "0.1"],
    "seconds_per_case": ["0.001"],
    "workers": ["0", "1"], "threads": ["1", "2"],
    "steps": ["1", "2", "3"], "skip": ["0", "1"], "epochs": ["1", "2"],
    "seeds": ["1", "2"], "launches": ["1"], "most_launches": ["1", "2"],
    "crop": ["0", "1"], "cutout": ["0", "1", "3"],
}  # fmt: skip
"""Valid values by the name of the parameter; others are made from the declarations."""


SMALL = {
    "layers": {"name": ["net.toml", "mlp-4-3"]},
    "bench": {"networks": ["net.toml", "mlp-3"]},
    "find-rate": {"steps": ["10", "11"]},
}
"""Values for some commands, instead of those of `VALUES`."""


@cache
def commands() -> dict[str, click.Command]:
    """Return the commands by name; a group has its own name."""
    found: dict[str, click.Command] = {}

    def add(command: click.Command, path: tuple[str, ...]) -> None:
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                add(child, (*path, name))
        found[" ".join(path)] = command

    add(cli, ())
    return found


def arguments_of(name: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments of a command.

    Args:
        name: of the command.
        values: texts by the name of the parameter, or lists of texts; that of a flag without a
            value is the flag.
    """
    yield from name.split()
    positional = []
    for parameter in commands()[name].params:
        value = values.get(parameter.name or "")
        if value is None:
            continue
        texts = value if isinstance(value, list) else [value]
        if isinstance(parameter, click.Argument):
            positional += texts
            continue
        for text in texts:
            is_flag = isinstance(parameter, click.Option) and parameter.is_flag
            yield from [text] if is_flag else [parameter.opts[-1], text]
    yield from positional


def write_files(folder: Path) -> None:
    """Write the files that commands read: two runs, data, networks, and wrong files."""
    for path in _template().iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name, symlinks=True)
        else:
            shutil.copy(path, folder)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


@cache
def _template() -> Path:
    importlib.import_module("matplotlib.font_manager")  # Says if it builds its cache.
    folder = Path(tempfile.mkdtemp(prefix="dptrain-flags-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    random = np.random.default_rng(5)
    x, y = random.integers(0, 256, (40, 5, 4, 3), dtype=np.uint8), np.arange(40) % 3
    np.savez(folder / "data.npz", x=x[:30], y=y[:30])
    np.savez(folder / "new.npz", x=x[30:])
    table = "\n".join(",".join(map(str, row)) for row in random.standard_normal((30, 3)).round(4))
    texts = {
        "table.csv": f"a,b,c\n{table}\n",
        "config.toml": "seed = 3\nlearning_rate = 0.1\n",
        "broken.toml": "seed = [",
        "bomb.toml": "a" + ".a" * 20_000 + " = 1\n",
        "file.txt": "a\n",
        "empty": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "folder").mkdir()
    (folder / "broken.npz").write_bytes((folder / "data.npz").read_bytes()[:-40])
    write_linear_network(folder / "net.toml", (3, 5, 4), 3, "classes")
    shutil.copy(folder / "net.toml", folder / "é猫.toml")
    _train(folder)
    return folder


def _train(folder: Path) -> None:
    for name in ("run", "run2"):
        values = {
            **TRAINING, "network": str(folder / "net.toml"), "data": f"npz:{folder / 'data.npz'}",
            "steps": "2", "checkpoint_every": "1", "run_dir": str(folder / name),
        }  # fmt: skip
        result = call(*arguments_of("train", values))
        expect(result.code == 0, f"training fails: {result.errors}")
    result = call("export", folder / "run", "--output", folder / "weights.safetensors")
    expect(result.code == 0, f"the export fails: {result.errors}")
