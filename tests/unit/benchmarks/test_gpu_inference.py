"""The comparison of inference on GPUs, as far as it needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.batch import random_batch
from benchmarks.gpu import cases, sections
from benchmarks.gpu.__main__ import sections_of
from benchmarks.gpu.cases import measure_latencies
from benchmarks.gpu.clock import Built, Program, host_timer
from benchmarks.gpu.inference import our_inference, without_dropout
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.peers import inference_peers
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.session import Cases, Session, Settings, run_sections
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU

pytestmark = pytest.mark.more

NETWORK = Network(
    (3, 8, 6),
    [Conv2d(4), ReLU(), MaxPool2d(2), Dropout(0.5), Flatten(), Dense(6), ReLU(), Dense(3)],
    name="small",
)


def output_of(built: Built) -> Any:
    assert built.output is not None
    return built.output()


@pytest.fixture
def host_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(run: Any) -> Any:
        run()
        return run

    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(inference_peers, "capture", run_once)
    monkeypatch.setattr(inference_peers, "torch_timer", host_timer)


@pytest.mark.usefixtures("host_for_gpu")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dptrain_and_pytorch_compute_the_same_outputs(precision: str) -> None:
    x, _ = random_batch(NETWORK, 3)
    expected = output_of(our_inference(NETWORK, "reference", "fp64", x))
    ours = our_inference(NETWORK, "numba", "fp32", x)
    np.testing.assert_allclose(output_of(ours), expected, 1e-4, 1e-5)
    builds = inference_peers.peer_builds(NETWORK, x, precision, compiled=False)
    assert f"{precision} PyTorch eager" in builds
    for name, build in builds.items():
        program = build()
        tolerance = 0.05 if name.startswith("bf16") else 1e-4
        np.testing.assert_allclose(output_of(program), expected, tolerance, tolerance)
        assert program.program.time(2) > 0.0


def test_each_precision_has_the_modes_of_its_own() -> None:
    x, _ = random_batch(NETWORK, 2)
    names = set(inference_peers.peer_builds(NETWORK, x, "bf16", compiled=True))
    assert {"bf16 PyTorch graph", "bf16 PyTorch compile + graph"} <= names
    assert all(name.startswith("bf16 ") for name in names)
    names = set(inference_peers.peer_builds(NETWORK, x, "fp32", compiled=False))
    assert not any("compile" in name for name in names)


def test_dropout_is_left_out_and_parameters_keep_their_names() -> None:
    other = without_dropout(NETWORK)
    assert [p.name for p in other.parameters] == [p.name for p in NETWORK.parameters]
    assert not any(isinstance(node.layer, Dropout) for node in other.nodes)


SMALL = Cases(("model-small", "lenet5"), (1, 2))


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Report]:
    """Return a function that runs the section."""
    monkeypatch.setattr(sections, "CASES", {**sections.CASES, "inference": SMALL})

    def run() -> Report:
        session = Session(Settings(("inference",), rounds=2), Progress())
        machine = Machine(("numba",), 0, "cpu", ())
        return run_sections(session, sections_of(machine, ("inference",)))

    return run


def test_a_run_of_the_section_without_a_gpu(report: Callable[[], Report]) -> None:
    found = report()
    assert not found.wrong
    assert not found.failed
    assert len(found.rows["inference"]) == len(found.checks) == 4


def test_a_wrong_output_is_not_timed(
    report: Callable[[], Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> Built:
        found = our_inference(*arguments)
        assert found.output is not None
        output = found.output
        return replace(found, output=lambda: output() + 0.1)

    monkeypatch.setattr(cases, "our_inference", wrong)
    found = report()
    assert len(found.wrong) == 4
    assert not found.rows


def test_single_passes_have_percentiles() -> None:
    passes = Built(Program(lambda: None, host_timer), wait=lambda: None)
    step = Built(Program(lambda: None, host_timer))
    found = measure_latencies({"pass": passes, "step": step}, {"pass": 1.0, "step": 1.0}, 2)
    assert list(found) == ["pass"]
    p50, p95, p99 = found["pass"]["latencies_us"]
    assert 0.0 < p50 <= p95 <= p99
    assert found["pass"]["passes"] == 20
