"""Pages whose programs and commands run as they are written, each page in an empty folder.

Blocks of Python begin with a comment that names their file, which a block with ", continued"
continues. Blocks of the language `sh` are run; those of the language `bash` need a cluster, a GPU
or a network, and are not. Of the README, every command before the section about GPUs is run, except
the installation, with data of the names that it has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.launch import ROOT, environment
from tests.system.own_data import DATA_SETS
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
    "how-to/citing.md": ("runs/cited/summary.json", "results/values.tex"),
    "comparison.md": (),
}  # fmt: skip
"""Pages, and files that exist after their commands."""

QUICK = ("explanation/mpi.md", "explanation/backpropagation.md")
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


NEEDS_NO_RUN = {
    "tutorials/gpu-study.md": "needs GPUs",
    "tutorials/slurm-study.md": "needs Slurm; tests/slurm submits its scripts",
}
"""Tutorials that are not run, and why."""


def test_every_tutorial_is_run() -> None:
    tutorials = {f"tutorials/{path.name}" for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    assert tutorials == {page for page in PAGES if page.startswith("tutorials/")} | {*NEEDS_NO_RUN}


@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_readme_is_true(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## GPUs")[0]
    data = DATA_SETS["5 classes, mixed sizes"](tmp_path)
    (tmp_path / data.sample).rename(tmp_path / "photo.jpg")
    DATA_SETS["table, one value"](tmp_path)
    table = (tmp_path / "my table.csv").read_text().replace("yield 0", "price", 1)
    (tmp_path / "houses.csv").write_text(table)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line for line in lines if not line.startswith(("python3 -m venv", "pip install"))]
    assert len(commands) == len(lines) - 2
    run("\n".join(commands), tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "script.py").write_text(program)
    assert float(run("python script.py", tmp_path).splitlines()[-1]) > 0.9
    made = ("runs/first/report.html", "model.onnx", "runs/houses/summary.json", "digits-model")
    assert [name for name in made if not (tmp_path / name).exists()] == []


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
