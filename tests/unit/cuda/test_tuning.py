"""The measured selection of kernels, with times that the tests make up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.outside import find_network
from dptrain import Trainer
from dptrain.backends import load_backend
from dptrain.backends.cuda import tuning
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.hardware import DEVICES
from dptrain.backends.cuda.tuning import Candidate, Tuning, load_or_tune, tune, tuning_facts
from dptrain.backends.replica import Kernel, Replica
from dptrain.errors import UserError
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.network.zoo import build_network
from dptrain.plan.lowering import Phase, stage_name
from dptrain.plan.plan import Plan, make_plan, with_selection
from dptrain.plan.selection import MAX_CANDIDATES, KernelSelection, RankedSelection
from tests.devices.planned import PlannedDevice
from tests.emulator.emulator import Emulator
from tests.tiers import tiered

SMALL = Network(
    (32, 8, 8), [Conv2d(32), ReLU(), MaxPool2d(2), Flatten(), Dense(24), ReLU(), Dense(4)],
    name="small",
)  # fmt: skip


def planned(
    network: str = "cifar", device: str = "H100", batch_size: int = 32
) -> tuple[CudaBackend, Plan]:
    backend = CudaBackend(PlannedDevice(DEVICES[device]))
    return backend, make_plan(build_network(network), backend, batch_size, precision="bf16")


def made_up(times: Callable[[int], float]) -> Callable[[Replica, Kernel], Sequence[float]]:
    """Return a `time_kernel` whose times depend on the rank of the measured candidates."""

    def time_kernel(replica: Replica, kernel: Kernel) -> Sequence[float]:
        selection = replica.plan.setting.selection
        assert isinstance(selection, RankedSelection)
        return [9.0, times(selection.rank), 0.0]

    return time_kernel


def test_the_fastest_candidate_of_each_stage_is_selected() -> None:
    backend, plan = planned()
    found = tune(
        backend, plan, budget_s=1e9, time_kernel=made_up(lambda rank: 1.0 - 0.1 * (rank == 1))
    )
    assert found.complete
    several = {stage: all_ for stage, all_ in found.stages.items() if len(all_) > 1}
    assert len(several) >= 10
    assert dict(found.selection.names) == {stage: all_[1].name for stage, all_ in several.items()}
    for candidates in found.stages.values():
        assert len(candidates) <= MAX_CANDIDATES
        assert candidates[0].estimate == 1.0
        assert max(each.estimate for each in candidates) <= 1.3
        assert len({each.name for each in candidates}) == len(candidates)
    tuned = with_selection(plan, backend, found.selection)
    again = RankedSelection(rank=1)
    assert tuned.buffers == with_selection(plan, backend, again).buffers
    assert tuned.stages != plan.stages


@pytest.mark.parametrize("precision", tiered(["tf32", "bf16"], ["bf16"]))
@pytest.mark.parametrize("network", tiered(["resnet18-cifar", "resnet20", "strided"], ["strided"]))
def test_all_candidates_of_a_stage_can_compute_it(network: str, precision: str) -> None:
    """A plan uses the candidate that is selected, of whichever kernel."""
    backend = CudaBackend(PlannedDevice(DEVICES["H100"]))
    plan = make_plan(find_network(network), backend, 64, precision=precision)
    found: dict[str, list[tuple[float, Any]]] = {}
    compared, used = 0, 0
    for rank in range(MAX_CANDIDATES):
        ranked = with_selection(plan, backend, RankedSelection(rank=rank, found=found))
        for group in ranked.groups:
            if not isinstance(group.head.layer, Conv2d):
                continue
            for phase, explanation in backend.explain(group, ranked.setting).items():
                pairs = found.get(stage_name(group.name, phase), [])
                if rank < len(pairs) and len(pairs) > 1:
                    compared += 1
                    used += explanation.tile.startswith(str(pairs[rank][1]))
    assert used == compared > 0


@pytest.mark.more
def test_statistics_count_for_the_kernel_that_sums_for_them() -> None:
    """A kernel that also sums takes twice as long, and saves five times as much."""
    backend = CudaBackend(PlannedDevice(DEVICES["H100"]))
    plan = make_plan(find_network("resnet18-cifar"), backend, 128, precision="tf32")

    def time_kernel(replica: Replica, kernel: Kernel) -> Sequence[float]:
        (stage,) = (stage for stage, each in replica.stages if each is kernel)
        (group,) = (group for group in replica.plan.groups if group.name == stage.group)
        if stage.phase is Phase.BACKWARD_STATISTICS:
            return [1.0 if group.gradient_sums_of else 6.0]
        return [2.0 if stage.phase is Phase.BACKWARD_INPUT and group.normalization else 1.0]

    found = tune(backend, plan, budget_s=1e9, time_kernel=time_kernel)
    selected, compared = dict(found.selection.names), 0
    for stage, candidates in found.stages.items():
        times = {each.name: each.time_ms for each in candidates}
        if {3.0, 7.0} <= set(times.values()):
            compared += 1
            assert times[selected.get(stage, candidates[0].name)] == 3.0
    assert compared > 0


def test_compiling_the_first_kernels_takes_no_part_of_the_time() -> None:
    backend, plan = planned()
    now, make = 0.0, backend.make_replica

    def slowly(plan: Plan, *, seed: int = 0) -> Replica:
        nonlocal now
        now += 8.0 if isinstance(plan.setting.selection, RankedSelection) else 0.0
        return make(plan, seed=seed)

    backend.make_replica = slowly  # type: ignore[method-assign]
    found = tune(
        backend, plan, budget_s=9.0, clock=lambda: now,
        time_kernel=made_up(lambda rank: 1.0 - 0.1 * (rank == 1)),
    )  # fmt: skip
    assert found.selection != KernelSelection()


def test_small_gains_do_not_change_the_selection() -> None:
    backend, plan = planned()
    found = tune(
        backend, plan, budget_s=1e9, time_kernel=made_up(lambda rank: 1.0 - 0.02 * (rank == 1))
    )
    assert found.selection == KernelSelection()


def test_measuring_ends_when_the_time_is_over() -> None:
    backend, plan = planned()
    now = 0.0

    def time_kernel(replica: Replica, kernel: Kernel) -> Sequence[float]:
        nonlocal now
        now += 0.1
        return made_up(lambda rank: 1.0 / (1 + rank))(replica, kernel)

    first = tune(backend, plan, budget_s=0.35, time_kernel=time_kernel, clock=lambda: now)
    assert not first.complete
    assert first.selection == KernelSelection()
    measured = [each for all_ in first.stages.values() for each in all_ if each.time_ms]
    assert len(measured) == 4
    now = 0.0
    second = tune(backend, plan, budget_s=4.0, time_kernel=time_kernel, clock=lambda: now)
    assert not second.complete
    assert second.selection != KernelSelection()


@pytest.mark.more
def test_measurements_are_cached_for_gpu_network_precision_and_batch_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path))
    notes: list[str] = []
    calls: list[str] = []

    def time_kernel(replica: Replica, kernel: Kernel) -> Sequence[float]:
        calls.append(replica.plan.network.name)
        return made_up(lambda rank: 1.0 / (1 + rank))(replica, kernel)

    def selection(**other: Any) -> KernelSelection:
        backend, plan = planned(**other)
        calls.clear()
        options = {"time_kernel": time_kernel, "budget_s": 1e9}
        return load_or_tune(backend, plan, notes.append, **options).selection

    first = selection()
    assert calls
    assert selection() == first
    assert not calls
    for other in ({"device": "A100"}, {"network": "model0"}, {"batch_size": 64}):
        selection(**other)
        assert calls
    assert len(list(tmp_path.glob("cuda-kernels/tuning-*.json"))) == 4
    assert not notes


def test_damaged_files_are_ignored_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path))
    backend, plan = planned("model0")
    options = {"time_kernel": made_up(lambda rank: 1.0 / (1 + rank)), "budget_s": 1e9}
    notes: list[str] = []
    first = load_or_tune(backend, plan, notes.append, **options)
    [path] = tmp_path.glob("cuda-kernels/tuning-*.json")
    assert json.loads(path.read_text())["facts"] == tuning_facts(plan)
    for text in ("", '{"facts": 1, "stages": {}}', "[" * 100_000):
        path.write_text(text)
        notes.clear()
        assert load_or_tune(backend, plan, notes.append, **options) == first
        [note] = notes
        assert str(path) in note
        assert "\n" not in note
        assert Tuning.from_dict(json.loads(path.read_text())["stages"]) == first


@pytest.mark.more
def test_candidates_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    backend = CudaBackend(emulator)
    plan = make_plan(SMALL, backend, 3, precision="bf16")
    x = np.random.default_rng(1).standard_normal((3, 32, 8, 8), np.float32)
    y = np.array([0, 3, 1])
    gradients = []
    for rank in range(2):
        replica = backend.make_replica(with_selection(plan, backend, RankedSelection(rank=rank)))
        replica.forward_backward(x, y)
        gradients.append(replica.memory.download(replica.flat_gradients))
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=0, atol=2e-3)
    assert np.abs(gradients[0]).max() > 0.01


def test_other_backends_refuse_to_measure() -> None:
    with pytest.raises(UserError, match="backend numba selects kernels without measurements"):
        load_backend("numba").require_tuning()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Use a GPU that computes nothing, on which candidate 1 is the fastest; return the calls."""
    calls: list[int] = []

    def times_ms(replica: Replica, kernel: Kernel) -> Sequence[float]:
        calls.append(1)
        return made_up(lambda rank: 1.0 - 0.1 * (rank == 1))(replica, kernel)

    device = PlannedDevice(DEVICES["H100"])
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: device)
    monkeypatch.setattr(tuning, "_times_ms", times_ms)
    monkeypatch.setattr(tuning, "BUDGET_S", 1e9)
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    return calls


def trainer(run: Path, **settings: Any) -> Trainer:
    return Trainer(
        "model0", "synthetic?samples=64", backend="cuda", precision="tf32", steps=2, run_dir=run,
        progress=False, baseline_steps=0, **settings,
    )  # fmt: skip


@pytest.mark.more
def test_a_resumed_run_uses_the_kernels_of_its_checkpoint(
    measured: list[int], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = trainer(run, tune=True)
    first.fit()
    selection = first.job.plan.setting.selection
    assert selection.names
    assert measured
    for path in tmp_path.glob("cache/cuda-kernels/tuning-*.json"):
        path.unlink()
    measured.clear()
    again = Trainer.resume(run, progress=False)
    assert again.job.plan.setting.selection == selection
    assert not measured
    longer: dict[str, Any] = {"steps": 3, "schedule": "constant"}
    without = Trainer.resume(run, progress=False, tune=False, **longer)
    assert without.job.plan.setting.selection == KernelSelection()
    assert not measured


def test_estimates_decide_by_default(measured: list[int], tmp_path: Path) -> None:
    job = trainer(tmp_path / "run").job
    assert job.plan.setting.selection == KernelSelection()
    assert job.run_spec.kernels == {}
    assert not measured


@pytest.mark.more
def test_a_rank_with_another_gpu_uses_the_lowest_estimates(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = {"conditions": {"device": "another"}, "selected": {"conv1+relu1+pool1.forward": "a"}}
    monkeypatch.setattr("dptrain.training.tuning._measure", lambda *_: other)
    job = trainer(tmp_path / "run", tune=True).job
    assert job.plan.setting.selection == KernelSelection()
    assert job.run_spec.kernels == other


def test_a_candidate_without_a_time_is_not_selected() -> None:
    stages = {"conv1.forward": (Candidate("a", 1.0, 2.0), Candidate("b", 1.1))}
    assert Tuning(stages, complete=False).fastest("conv1.forward").name == "a"
