"""Profiles of inference: forward stages alone, fused or layer by layer, with every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends import load_backend
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.cli.main import run
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.profile.profile import Profile, Roofs
from dptrain.measure.profile.profile_files import TRACE
from dptrain.network import get_network
from dptrain.network.random_batch import random_batch
from dptrain.plan.plan import make_plan
from dptrain.training.engines import FIRST_TIMED
from dptrain.training.profiling.inference import profile_inference
from dptrain.training.profiling.profiling import ProfileOptions
from dptrain.training.settings import load_settings
from tests.unit.measure.test_trace import check_trace


def measure(backend: str, options: ProfileOptions, *, fused: bool = True) -> Profile:
    flags = {"network": "model-small", "batch_size": 5, "backend": backend, "threads": 1}
    if backend != "numba":
        flags |= {"network": "mlp-5", "batch_size": 100}
    settings = load_settings({**flags, "steps": 1}, {})
    found = profile_inference(settings, World.single(), options, fused=fused, quiet=True)
    assert found is not None
    return found


@pytest.mark.parametrize("backend", ["numba", "reference", "cuda"])
def test_only_forward_stages_are_timed(backend: str, tmp_path: Path) -> None:
    options = ProfileOptions(steps=4, skip=1, roofs=False, output=tmp_path / "p", trace=True)
    found = measure(backend, options)
    assert found.job["task"] == "inference"
    assert found.steps == len(found.step_times_ms) == 4
    assert {stage.phase for stage in found.stages} == {"load", "forward"}
    assert all(stage.time_ms.mean > 0 for stage in found.stages)
    parts = found.parts
    assert parts.total == pytest.approx(found.ranks[0].step_ms, rel=1e-9)
    assert parts.transfer == parts.imbalance == 0
    assert found.pop is None
    assert "gradients" not in found.memory
    trace = json.loads((tmp_path / "p" / TRACE).read_text())
    events = check_trace(trace)[0, 0]
    # On a GPU the passes are made again to be timed by stage, and two more, which are captured.
    timed, all_passes = (6, 10) if backend == "cuda" else (4, 4)
    assert sum(event["name"] == "step" for event in events) == all_passes
    for stage in found.stages:
        assert sum(event["name"] == stage.name for event in events) == timed
    assert Profile.read(tmp_path / "p" / "profile.json") == found


@pytest.mark.parametrize("backend", ["cuda", "cudnn"])
@pytest.mark.parametrize("fused", [True, False])
def test_stages_on_a_gpu_are_timed_by_kernels(
    backend: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time stamps order the beginning, the load and the stages; the host's clock has no part."""
    written = dict[int, int]()

    def record_time(self: CudaReplica, index: int) -> None:
        assert index not in written, "a time stamp is written twice in a pass"
        written[index] = 1000 * (len(written) + 1) ** 2

    def recorded_times(self: CudaReplica) -> NDArray[np.int64]:
        times = np.zeros(2 * len(self.plan.stages) + 2, np.int64)
        for index, time in written.items():
            times[index] = time
        written.clear()
        return times

    monkeypatch.setattr(CudaReplica, "record_time", record_time)
    monkeypatch.setattr(CudaReplica, "recorded_times", recorded_times)
    found = measure(backend, ProfileOptions(steps=3, skip=0, roofs=False), fused=fused)
    assert len(found.stages) >= 3
    for position, stage in enumerate(found.stages):
        assert stage.time_ms.median == pytest.approx(1e-3 * (2 * position + 3))
        assert stage.time_ms.n == 3


def test_passes_that_are_timed_by_stage_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, original = list[NDArray[Any]](), CudaReplica.output

    def output(self: CudaReplica) -> NDArray[Any]:
        outputs.append(original(self))
        return outputs[-1]

    monkeypatch.setattr(CudaReplica, "output", output)
    flags = {"network": "mlp-5", "batch_size": 100, "backend": "cuda", "steps": 1}
    settings = load_settings({**flags, "data": "synthetic?samples=100"}, {})
    options = ProfileOptions(steps=2, skip=0, roofs=False)
    profile_inference(settings, World.single(), options, quiet=True)
    order = [np.lexsort(rows.T) for rows in outputs]  # Each epoch has an order of its own.
    assert len(outputs) == FIRST_TIMED + 2 + 2 + 2
    for rows, by in zip(outputs, order, strict=True):
        np.testing.assert_array_equal(rows[by], outputs[0][order[0]])


def test_unfused_layers_are_kinds_of_their_own() -> None:
    options = ProfileOptions(steps=2, skip=0, roofs=False)
    fused = {kind.kind for kind in measure("numba", options).kinds}
    unfused = {kind.kind for kind in measure("numba", options, fused=False).kinds}
    assert "conv+relu+pool" in fused
    assert unfused == {"input", "conv", "bias_add", "relu", "pool", "dense"}


@pytest.mark.parametrize("backend", ["reference", "cuda", "cudnn", "null"])
def test_every_backend_has_a_row_for_the_addition_of_biases(backend: str) -> None:
    options = ProfileOptions(steps=2, skip=0, roofs=False)
    kinds = {kind.kind: kind for kind in measure(backend, options, fused=False).kinds}
    assert set(kinds) >= {"input", "dense", "bias_add"}
    assert kinds["bias_add"].calls == kinds["dense"].calls
    assert kinds["bias_add"].time_ms.mean > 0


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("training", [True, False])
def test_unfused_plans_compute_the_same(backend: str, training: bool) -> None:
    network, chosen = get_network("model-small"), load_backend(backend)
    x, y = random_batch(network, 4)
    outputs = []
    for fused in (True, False):
        plan = make_plan(network, chosen, 4, precision="fp32", training=training, fused=fused)
        assert fused or all(len(group.nodes) == 1 for group in plan.groups)
        replica = chosen.make_replica(plan, seed=1)
        if training:
            replica.forward_backward(x, y)
            outputs.append([replica.gradients[p.name] for p in network.parameters])
        else:
            outputs.append([replica.forward(x)])
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_marks_are_refused() -> None:
    with pytest.raises(UserError, match="neither --nvtx nor --tensorboard"):
        measure("numba", ProfileOptions(nvtx=True))


@pytest.mark.parametrize("flags", [("--inference",), ("--inference", "--unfused"), ("--unfused",)])
def test_layers_are_timed_alone(
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roofs = Roofs(100.0, 10.0, "assumed")
    monkeypatch.setattr("dptrain.measure.layers.measure_roofs", lambda *_: roofs)
    command = ["layers", "model-small", "--batch-size", "2", "--threads", "1", "--json"]
    assert run([*command, *flags], is_rank_zero=True) == 0
    rows = json.loads(capsys.readouterr().out)
    layers = {row["layers"] for row in rows}
    assert ("conv1" in layers) == ("--unfused" in flags)
    assert ("conv1_bias" in layers) == (flags == ("--inference", "--unfused"))
    assert ({row["direction"] for row in rows} == {"forward"}) == ("--inference" in flags)


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "--unfused"],
        ["layers", "model-small", "--inference", "--explain"],
        ["profile", "--losses", "--inference"],
    ],
)
def test_flags_that_contradict_are_refused(arguments: list[str]) -> None:
    assert run(arguments, is_rank_zero=False) == 2
