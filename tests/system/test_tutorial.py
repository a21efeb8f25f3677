"""The tutorial, run as it is written: every program and every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.launch import ROOT, environment

TUTORIAL = (ROOT / "docs" / "tutorials" / "research.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", TUTORIAL, re.DOTALL)


FILES = (
    "samples.png", "results/confusion.svg", "runs/first/report.html", "runs/sweep/sweep.svg",
    "model.onnx", "predictions.csv", "python-model.onnx", "python_model.py",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_the_tutorial(tmp_path: Path) -> None:
    outputs = {}
    for language, text in BLOCKS:
        if language == "python":
            name = text.split()[1].rstrip(":")
            assert name.endswith(".py")
            (tmp_path / name).write_text(text, encoding="utf-8")
        else:
            outputs[text] = run(text, tmp_path)
    printed = "\n".join(outputs.values())
    for phrase in ("no problem found", "Settings that differ", "Points of the sweep"):
        assert phrase in printed
    for name in FILES:
        assert (tmp_path / name).stat().st_size > 0, name
    assert float(outputs["python elsewhere.py\n"]) < 1e-5


def run(commands: str, folder: Path) -> str:
    """Run commands in a shell whose programs are those of this environment."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder, env=environment(PATH=path), capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout
