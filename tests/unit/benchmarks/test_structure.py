"""The command of all benchmarks, and the imports among its modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import SUBJECTS, main

ROOT = Path(__file__).resolve().parents[3]
EXCLUDED = "benchmarks.studies"
"""Its measurements register themselves."""


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_is_a_module(subject: str) -> None:
    module = f"benchmarks.{SUBJECTS[subject][0]}"
    spec = find_spec(module)
    assert spec is not None
    if spec.submodule_search_locations is not None:
        assert find_spec(f"{module}.__main__") is not None


def test_an_unknown_subject_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["cpus"])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("did you mean 'cpu'?\n")


def test_a_subject_receives_its_options() -> None:
    command = [sys.executable, "-m", "benchmarks", "gains", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--algorithm" in done.stdout


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere but for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If)
              and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]  # fmt: skip
    skipped = {id(node) for block in typing for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_modules_form_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(EXCLUDED):
            graph[name] = set(imports(path))
    TopologicalSorter({name: found & graph.keys() for name, found in graph.items()}).prepare()


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr("benchmarks.__main__.runpy.run_module", run)
    with pytest.raises(SystemExit, match="2"):
        main(["zoo"])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "'onnx'" in message
    assert ".[zoo]" in message
