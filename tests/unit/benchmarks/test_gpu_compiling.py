"""Kernels compile in processes of their own, and references are computed once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import check
from benchmarks.gpu import compiling
from benchmarks.gpu.cases import Exact
from benchmarks.gpu.compiling import Request, known_networks, main
from benchmarks.outside import find_network
from benchmarks.progress import Progress
from dptrain.network import Dense, Flatten, Network

pytestmark = pytest.mark.more

CASES = [
    Request("model-small", "cuda", 2, "tf32"),
    Request("model-small", "cuda", 4, "tf32"),
    Request("model-small", "cuda", 2, "bf16"),
    Request("model-small", "numba", 2, "fp32"),
    Request("model-small", "cudnn", 2, "tf32"),
]


def test_each_precision_of_the_cuda_backend_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Sequence[str]]()
    processes = list[subprocess.Popen[bytes]]()

    def start(module: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        assert module == "benchmarks.gpu.compiling"
        started.append(words)
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return processes[-1]

    monkeypatch.setattr(compiling, "_start", start)
    with pytest.raises(ZeroDivisionError), compiling.compiling(CASES):
        raise ZeroDivisionError
    assert started == [
        [f"model-small:cuda:{n}:tf32:sgd:step" for n in (2, 4)],
        ["model-small:cuda:2:bf16:sgd:step"],
    ]  # fmt: skip
    assert all(process.returncode is not None for process in processes)


def test_a_context_waits_for_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import pathlib, sys; pathlib.Path(sys.argv[1], sys.argv[2]).touch()"
    (tmp_path / "written.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with compiling.running("written", [[str(tmp_path), "a"], [str(tmp_path), "b"]]):
        pass
    assert {"a", "b"} <= {path.name for path in tmp_path.iterdir()}


def test_a_step_that_cannot_be_built_does_not_keep_others_from_it() -> None:
    main([f"{name}:numba:2:fp32:sgd:step" for name in ("nothing", "model-small")])


def test_only_networks_with_a_name_are_compiled_elsewhere() -> None:
    other = Network((1, 5, 5), [Flatten(), Dense(3)], name="model-small")
    assert known_networks([find_network("vgg"), other]) == {"vgg"}


def test_the_reference_is_computed_once_for_all_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    noises, original = list[object](), check.compute

    def compute(*args: object) -> object:
        noises.append(args[5] if len(args) > 5 else None)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "compute", compute)
    exact, network = Exact("cpu", Progress()), find_network("model-small")
    found = [exact.of(network, 2, precision) for precision in ("fp32", "tf32", "bf16", "tf32")]
    assert len(noises) == 1 + 3 * check.DRAWS
    assert all(expected.exact is found[0].exact for expected in found)
    assert found[0].allowed["output"] < found[1].allowed["output"] < found[2].allowed["output"]
