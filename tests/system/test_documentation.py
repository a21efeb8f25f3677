"""Pages whose programs and commands run as they are written, each page in an empty folder.

Blocks of Python begin with a comment that names their file, which a block with ", continued"
continues. Blocks of the language `sh` are run; those of the language `bash` need a cluster, a GPU
or a network, and are not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.launch import ROOT, environment
from tests.tiers import tiered

PAGES = {
    "tutorials/research.md": (
        "samples.png", "results/confusion.svg", "runs/first/report.html", "runs/sweep/sweep.svg",
        "model.onnx", "predictions.csv", "python-model.onnx", "python_model.py",
    ),
    "tutorials/fine-tuning.md": ("runs/head/summary.json", "runs/tuned/summary.json"),
    "tutorials/first-run.md": ("runs/first/report.html", "runs/fast/summary.json"),
    "tutorials/own-images.md": ("photos.png", "predictions.csv", "model.onnx"),
    "tutorials/run-report.md": ("comparison/report.html",),
    "tutorials/report.md": ("study/report.html", "study/launches/weak-r2-t1-1/report.html"),
    "explanation/mpi.md": (),
    "explanation/backpropagation.md": (),
    "explanation/micro-shards.md": ("runs/three/summary.json",),
    "how-to/python.md": ("lines",),
    "how-to/citing.md": ("runs/cited/summary.json",),
    "comparison.md": (),
}  # fmt: skip
"""Pages, and files that exist after their commands."""

QUICK = ("how-to/citing.md", "explanation/mpi.md", "explanation/backpropagation.md")
"""Pages whose commands take seconds."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", tiered(PAGES, QUICK))
def test_examples(page: str, tmp_path: Path) -> None:
    outputs = run_page(page, tmp_path)
    for name in PAGES[page]:
        assert (tmp_path / name).stat().st_size > 0, name
    if page == "tutorials/research.md":
        printed = "\n".join(outputs.values())
        for phrase in ("no problem found", "Settings that differ", "Points of the sweep"):
            assert phrase in printed
        assert float(outputs["python elsewhere.py\n"]) < 1e-5
    if page == "comparison.md":
        (printed,) = outputs.values()
        (theirs,) = re.findall(r"test accuracy (0\.\d+)", printed)
        (ours,) = re.findall(r"test accuracy (\d+\.\d+)%", printed)
        assert min(float(theirs), float(ours) / 100) > 0.95


def run_page(page: str, folder: Path) -> dict[str, str]:
    """Write the programs of a page, and run its commands; the outputs by commands."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    outputs = {}
    for language, block in re.findall(r"```(python|sh)\n(.*?)```", text, re.DOTALL):
        if language == "python":
            first_line = block.partition("\n")[0]
            name = first_line.split()[1].rstrip(":,")
            assert name.endswith(".py")
            with (folder / name).open("a" if "continued" in first_line else "w") as file:
                file.write(block)
        else:
            outputs[block] = run(block, folder)
    assert outputs
    return outputs


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
