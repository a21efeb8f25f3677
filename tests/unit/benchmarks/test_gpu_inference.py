"""The comparison of inference on GPUs, as far as it needs none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.batch import random_batch
from benchmarks.gpu import suite
from benchmarks.gpu.clock import Laps, host_timer
from benchmarks.gpu.inference import InferenceCase, Passes, our_inference, without_dropout
from benchmarks.gpu.inference_report import inference_headline, inference_json, inference_tables
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.peers import inference_peers
from benchmarks.gpu.report import as_markdown
from benchmarks.progress import Progress
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU

pytestmark = pytest.mark.more

NETWORK = Network(
    (3, 8, 6),
    [Conv2d(4), ReLU(), MaxPool2d(2), Dropout(0.5), Flatten(), Dense(6), ReLU(), Dense(3)],
    name="small",
)


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
    expected = our_inference(NETWORK, "reference", "fp64", x).output()
    ours = our_inference(NETWORK, "numba", "fp32", x)
    np.testing.assert_allclose(ours.output(), expected, 1e-4, 1e-5)
    builds = inference_peers.peer_builds(NETWORK, x, precision, compiled=False)
    assert f"{precision} eager" in builds
    for name, build in builds.items():
        program = build()
        tolerance = 0.05 if name.startswith("bf16") else 1e-4
        np.testing.assert_allclose(program.output(), expected, tolerance, tolerance)
        assert program.program.time(2) > 0.0


def test_bf16_competes_with_graphs_of_every_precision() -> None:
    x, _ = random_batch(NETWORK, 2)
    names = set(inference_peers.peer_builds(NETWORK, x, "bf16", compiled=True))
    assert {"fp32 graph", "tf32 graph", "bf16 eager", "bf16 compile + graph"} <= names
    assert not {"fp32 eager", "tf32 compile + graph"} & names
    names = set(inference_peers.peer_builds(NETWORK, x, "fp32", compiled=False))
    assert not any(name.startswith(("tf32", "bf16")) for name in names)


def test_dropout_is_left_out_and_parameters_keep_their_names() -> None:
    other = without_dropout(NETWORK)
    assert [p.name for p in other.parameters] == [p.name for p in NETWORK.parameters]
    assert not any(isinstance(node.layer, Dropout) for node in other.nodes)


SETTINGS = suite.Settings(
    sections=("inference",), blocks=2, precisions=("fp32",),
    inference=suite.Cases(("model-small", "lenet5"), (1, 2), ("fp32",), ()),
)  # fmt: skip


def test_a_run_of_the_section_without_a_gpu() -> None:
    machine = Machine(("numba",), 0, "cpu", ())
    results = suite.run(SETTINGS, machine, Progress(), lambda results: None)
    assert results.right
    assert results.complete
    assert len(results.inference) == len(results.checks) == 4
    assert "### Inference: µs per pass" in as_markdown(results)


def test_a_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        found = our_inference(*arguments)
        return type(found)(found.program, found.wait, lambda: found.output() + 0.1)

    monkeypatch.setattr("benchmarks.gpu.inference.our_inference", wrong)
    results = suite.run(
        SETTINGS, Machine(("numba",), 0, "cpu", ()), Progress(), lambda results: None
    )
    assert not results.right
    assert not results.complete
    assert all(not case.ours for case in results.inference)


def passes(us: float, *latencies: float) -> Passes:
    return Passes(Laps(np.full(4, us), 10), np.array(latencies))


def test_the_best_peer_counts_for_throughput_and_the_quickest_for_latency() -> None:
    case = InferenceCase(
        "vgg", 32, "tf32", {"cuda": passes(10.0, 12.0, 14.0, 16.0)},
        {"tf32 graph": passes(30.0, 35.0), "fp32 graph": passes(25.0, 40.0)},
    )  # fmt: skip
    assert (case.best, case.quickest) == ("fp32 graph", "tf32 graph")
    times = case.throughput_ratio("cuda")
    assert times is not None
    assert times.value == pytest.approx(2.5)
    assert case.latency_ratio("cuda") == pytest.approx(2.5)
    assert case.ours["cuda"].percentiles_us == pytest.approx((14.0, 15.8, 15.96))
    table, peers = inference_tables([case])
    row = dict(zip(table.heads, table.texts[0], strict=True))
    assert row["speedup"] == "2.50 (2.50–2.50)"
    assert row["samples/s"] == "3,200,000"
    assert row[""] == "reached"
    assert len(peers.rows) == 2
    assert inference_headline([case]) == [
        "cuda: 1 of 1 inference targets reached; 2.50 to 2.50 times the throughput of the best peer"
    ]
    assert len(inference_json([case])) == 3


def test_without_peers_dptrain_is_timed_alone() -> None:
    case = InferenceCase("vgg", 32, "tf32", {"cuda": passes(10.0, 12.0)}, {})
    (row,) = inference_tables([case])[0].texts
    assert len(row) == len(inference_tables([case])[0].columns)
    assert inference_headline([case]) == []
