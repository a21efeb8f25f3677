"""The comparison on GPUs, as far as it needs none."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.check import Check, expect, judge
from benchmarks.gpu import cases, ranks, sections
from benchmarks.gpu.__main__ import conditions, main, make_settings, sections_of
from benchmarks.gpu.cases import Exact, GpuRun, measure_case, require_similar
from benchmarks.gpu.check import OPERAND, check_step, update_error
from benchmarks.gpu.clock import host_timer
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.ours import Step
from benchmarks.gpu.peers import theirs, torch_layers
from benchmarks.gpu.peers.inference_peers import torch_inference
from benchmarks.gpu.peers.theirs import GPUMode, TorchProgram, modes_for
from benchmarks.programs.own_programs import initial
from benchmarks.programs.torch_network import LOSSES, TorchNetwork, parameter_names
from benchmarks.progress import Progress
from benchmarks.report import Report, Rows, comparisons
from benchmarks.session import Cases, Session, Settings, run_sections
from benchmarks.tables import new_files, write
from dptrain.errors import UserError
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU

pytestmark = pytest.mark.more

NETWORK = Network((2, 9, 8), [Conv2d(4, 3, weight_decay=0.1), ReLU(), MaxPool2d(2), Flatten(),
                              Dense(5)], name="small")  # fmt: skip
N = 3


# PyTorch's modes.


def test_modes_are_named_after_their_precision_and_differ() -> None:
    for precision in ("fp32", "tf32", "bf16"):
        modes = modes_for(NETWORK, precision, compiled=True)
        assert len({mode.name for mode in modes}) == len(modes) == 4
        assert all(mode.name.split()[0] == mode.precision == precision for mode in modes)
        assert not any(mode.compiled for mode in modes_for(NETWORK, precision, compiled=False))
    assert not any(m.channels_last for m in modes_for(Network((6,), [Dense(3)]), "tf32",
                                                      compiled=True))  # fmt: skip


# Right before fast.


def expected(network: Network, precision: str) -> Any:
    x, y = random_batch(network, N)
    parameters = {k: np.asarray(v, np.float64) for k, v in initial(network).items()}
    return expect(network, parameters, x.astype(np.float64), y, operand=OPERAND[precision])


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_a_right_step_passes(backend: str) -> None:
    drops = Network((2, 6, 6), [Conv2d(4, 3), ReLU(), Dropout(0.3), Flatten(), Dense(5)],
                    name="drops")  # fmt: skip
    for network in (NETWORK, drops):
        step = Step(network, backend, "fp32", N)
        found = check_step(network, step, expected(network, "fp32"))
        assert [check.passed for check in found] == [True, True]


def test_a_step_that_updates_otherwise_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(NETWORK, "numba", "fp32", N)
    set_rate = step.set_rate
    monkeypatch.setattr(step, "set_rate", lambda rate: set_rate(1.001 * rate))
    found = check_step(NETWORK, step, expected(NETWORK, "fp32"))
    assert [check.passed for check in found] == [True, False]
    assert found[1].quantity.startswith("update of")


def test_an_update_without_decay_is_seen() -> None:
    before, gradient = np.full(4, 2.0, np.float32), np.full(4, 0.5, np.float32)
    right = before - np.float32(0.1) * (gradient + np.float32(0.25) * before)
    assert update_error(before, gradient, right, 0.25) < 1e-7
    assert update_error(before, gradient, right, 0.0) > 1e-3


def in_bfloat16(network: Network) -> dict[str, NDArray[Any]]:
    """What PyTorch computes from the same numbers in bfloat16."""
    modules = TorchNetwork(network, initial(network))
    x, y = (torch.from_numpy(array) for array in random_batch(network, N))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = modules(x)
        loss = LOSSES["classes"](z, y)
    gradients = torch.autograd.grad(loss, list(modules.parameters()))
    named = zip(parameter_names(network), gradients, strict=True)
    return {"loss": loss.detach().numpy(), "output": z.detach().float().numpy(),
            **{name: gradient.numpy() for name, gradient in named}}  # fmt: skip


def test_rounding_to_bfloat16_passes_as_bfloat16_alone() -> None:
    results = in_bfloat16(NETWORK)
    assert judge("small", N, results, expected(NETWORK, "bf16")).passed
    assert not judge("small", N, results, expected(NETWORK, "fp32")).passed
    # TF32 keeps 3 bits more.
    allowed = {p: expected(NETWORK, p).allowed["output"] for p in ("tf32", "bf16")}
    assert allowed["bf16"] / allowed["tf32"] == pytest.approx(8.0, rel=0.5)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", ["output", "conv1.weight", "dense1.bias"])
def test_wrong_signs_do_not_pass_in_any_precision(name: str, precision: str) -> None:
    results = in_bfloat16(NETWORK)
    results[name] = -results[name]
    found = judge("small", N, results, expected(NETWORK, precision))
    assert not found.passed
    assert found.quantity == name


# PyTorch's programs, with the host for a GPU.


@pytest.fixture
def host_for_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def run_once(run: Any, *arguments: Any, **options: Any) -> Any:
        run()
        return run

    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    for module in (theirs, torch_layers):
        monkeypatch.setattr(module, "capture", run_once)
        monkeypatch.setattr(module, "torch_timer", host_timer)
    # Threads that wait for each other are slow on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("host_for_gpu")
def test_pytorchs_modes_compute_the_network() -> None:
    x, y = random_batch(NETWORK, N)
    for mode in modes_for(NETWORK, "fp32", compiled=False):
        program = TorchProgram(NETWORK, x, y, mode)
        assert judge("small", N, program.results(), expected(NETWORK, "fp32")).passed
        assert program.program.time(2) > 0


class RecordingGraph:
    """Stands for a graph that, like CUDA's, has no reference to the tensors that it reads."""

    def __init__(self) -> None:
        self.launches = 0

    def replay(self) -> None:
        self.launches += 1


def test_a_captured_program_keeps_the_tensors_that_it_reads(
    monkeypatch: pytest.MonkeyPatch, host_for_gpu: None
) -> None:
    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordingGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    weights = []
    make = GPUMode.network

    def remember(mode: GPUMode, network: Network) -> torch.nn.Module:
        modules = make(mode, network)
        weights.extend(weakref.ref(parameter) for parameter in modules.parameters())
        return modules

    monkeypatch.setattr(GPUMode, "network", remember)
    x, _ = random_batch(NETWORK, N)
    program = torch_inference(NETWORK, x, GPUMode("fp32 graph", precision="fp32")).program
    gc.collect()
    assert weights
    assert all(weight() is not None for weight in weights)
    program.start()
    del program
    gc.collect()
    assert all(weight() is None for weight in weights)


@pytest.mark.usefixtures("host_for_gpu")
def test_pytorchs_layers_are_convolutions_and_poolings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_layers, "_number", lambda *shape, **options: torch.randn(shape))
    monkeypatch.setattr(torch_layers, "TIMES", 1)
    network = dptrain.get_network("model-small")
    found = torch_layers.torch_layer_times(network, 2, "fp32")
    layers = ("conv1", "pool1", "conv2", "pool2")
    assert set(found) == {(layer, way) for layer in layers for way in ("forward", "backward")}


# Ranks.


def test_launches_are_gathered_and_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(network: str, *arguments: Any) -> dict[str, Any]:
        if network == "cifar":
            raise RuntimeError("no memory")
        return {"step_ms": {"median": 0.05}, "scaling": {"weak": 0.9}}

    def launch_torch(cases: Any, *arguments: Any) -> list[dict[str, float]]:
        return [{"PyTorch graph": 150.0, "PyTorch DDP": 2000.0} for _ in cases]

    monkeypatch.setattr(ranks, "train", train)
    monkeypatch.setattr(ranks, "launch_torch", launch_torch)
    monkeypatch.setattr(ranks, "launch_steps", lambda cases, *_: [40.0 for _ in cases])
    session = Session(Settings(("ranks",)), Progress())
    ranks.measure_ranks(
        session, [("model0", 32), ("cifar", 32)], 2, "tf32", launches=3, with_torch=True
    )
    rows = Rows(session.report.rows["ranks"])
    medians = {row["program"]: row["medians_ms"] for row in rows.where(network="model0")}
    assert medians == {
        "dptrain": [0.04] * 3, "PyTorch graph": [0.15] * 3, "PyTorch DDP": [2.0] * 3,
        "dptrain train": [0.05] * 3,
    }  # fmt: skip
    assert [row.get("weak") for row in rows.where(network="model0")] == [None, None, None, 0.9]
    assert rows.one(network="cifar", program="dptrain train") is None
    case = "cifar, 32 samples on each of 2 GPUs"
    assert session.report.missing == {case: "RuntimeError: no memory"}
    assert session.report.failed == [case]


def test_ranks_have_a_gpu_each() -> None:
    assert ranks.counts(1) == (1,)
    assert ranks.counts(6) == (1, 2, 4)


def test_the_command_trains_with_the_samples_of_all_gpus(tmp_path: Path) -> None:
    words = ranks.command("model0", 32, 4, "tf32", tmp_path)
    assert words[words.index("-n") + 1] == "4"
    assert words[words.index("--batch-size") + 1] == "128"
    # Epochs of many steps, or of some where steps are long.
    assert words[words.index("--data") + 1] == "synthetic?samples=16384"
    words = ranks.command("model0", 1024, 4, "tf32", tmp_path)
    assert words[words.index("--data") + 1] == "synthetic?samples=32768"


def test_ranks_inherit_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert ranks.environment(RANK="1")["NCCL_NVLS_ENABLE"] == "0"
    assert ranks.environment(RANK="1")["RANK"] == "1"


# The whole.


MACHINE = Machine(("numba",), 0, "cpu", ("backend cudnn: no library",))
SETTINGS = Settings(("training", "fp32", "precision", "inference"), rounds=2)
SMALL = Cases(("model-small",), (2,))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "CASES", dict.fromkeys(sections.CASES, SMALL))


def run(settings: Settings, machine: Machine = MACHINE, folder: Path | None = None) -> Report:
    paths = None if folder is None else new_files(folder, "gpu", "2026-01-02")

    def save(report: Report) -> None:
        if paths is not None:
            write(report, paths)

    session = Session(settings, Progress(), Report(conditions(machine, settings)), save)
    return run_sections(session, sections_of(machine, settings.sections))


@pytest.mark.usefixtures("small")
def test_a_whole_run_without_a_gpu(tmp_path: Path) -> None:
    report = run(SETTINGS, folder=tmp_path)
    assert not report.wrong
    assert not report.failed
    assert {row["layer"] for row in report.rows["precision"]} == {
        "conv1", "conv2", "dense1", "dense2",
    }  # fmt: skip
    assert all(0.0 < row["error"] < 1e-5 for row in report.rows["precision"])
    read = Report.read(tmp_path / "gpu-2026-01-02.json")
    (row,) = read.rows["training"]
    assert row["program"] == "dptrain numba"
    assert min(row["median_ms"], row["memory_bytes"]) > 0
    (row,) = read.rows["inference"]
    assert len(row["latencies_us"]) == 3
    # A step and an update of training, twice, and outputs of inference.
    assert all(share <= 1.0 for share in read.checks.values())
    text = (tmp_path / "gpu-2026-01-02.md").read_text()
    for part in ("missing: backend cudnn: no library", "### Training step (training)",
                 "### Errors of fp32", "### Inference pass", "results were checked"):  # fmt: skip
        assert part in text


@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    results_of = Step.results

    def spoiled(step: Step) -> dict[str, NDArray[Any]]:
        found = results_of(step)
        return {**found, "conv1.weight": 1.01 * found["conv1.weight"]}

    monkeypatch.setattr(Step, "results", spoiled)
    report = run(replace(SETTINGS, sections=("training",)))
    assert "the relative error of conv1.weight is" in report.wrong[0]
    assert not report.rows


def test_a_program_that_fails_is_reported_and_the_others_are_timed() -> None:
    def broken() -> Any:
        raise RuntimeError("no memory\nand more")

    session = Session(Settings(("training",), rounds=2), Progress())
    gpu = GpuRun(session, MACHINE, None)
    builds = gpu.training_builds(NETWORK, N, ("fp32", "fp8"), compiled=False)
    measure_case(session, "training", NETWORK, N, {**builds, "tf32 PyTorch graph": broken})
    report = session.report
    assert [row["precision"] for row in report.rows["training"]] == ["fp32"]
    case = "training: small, batch 3, tf32 PyTorch graph"
    assert report.missing[case] == "RuntimeError: no memory"
    assert report.failed == ["training: small, batch 3, fp8 dptrain numba"]


def test_own_kernels_are_checked_and_timed() -> None:
    """The emulator runs them."""
    session = Session(Settings(("training",), rounds=4), Progress())
    gpu = GpuRun(session, Machine(("cuda",), 0, "cpu", ()), Exact("cpu", Progress()))
    for section, builds in (
        ("training", gpu.training_builds(NETWORK, N, ("tf32",), compiled=False)),
        ("inference", gpu.inference_builds(NETWORK, N, ("tf32",), compiled=False)),
    ):
        measure_case(session, section, NETWORK, N, builds)
    report = session.report
    assert not report.missing
    assert not report.wrong
    assert [row["program"] for rows in report.rows.values() for row in rows] == ["dptrain cuda"] * 2
    (row,) = report.rows["inference"]
    assert len(row["latencies_us"]) == 3
    assert row["passes"] >= cases.MIN_PASSES * session.settings.rounds
    # Gradients of a step, its update, and outputs of inference.
    assert len(report.checks) == 3


@pytest.mark.usefixtures("host_for_gpu")
def test_dptrain_is_compared_with_the_fastest_of_pytorchs_modes() -> None:
    session = Session(Settings(("training",), rounds=2), Progress())
    machine = Machine(("numba",), 0, "cuda", ())
    gpu = GpuRun(session, machine, Exact("cpu", Progress()))
    builds = gpu.training_builds(NETWORK, N, ("fp32",), compiled=False)
    measure_case(session, "training", NETWORK, N, builds)
    report = session.report
    assert not report.missing
    rows = Rows(report.rows["training"])
    assert [(row["precision"], row["program"]) for row in rows] == [
        ("fp32", "dptrain numba"), ("fp32", "PyTorch eager"), ("fp32", "PyTorch graph"),
        ("fp32", "PyTorch graph + channels_last"),
    ]  # fmt: skip
    (found,) = comparisons(rows)
    assert found.best is not None
    assert found.best["median_ms"] == min(row["median_ms"] for row in list(rows)[1:])


def test_modes_of_a_peer_that_compute_something_else_are_excluded() -> None:
    require_similar(Check("small", 2, "loss", 7.9e-3, 1e-3))
    for error in (8.1e-3, float("nan")):
        with pytest.raises(ArithmeticError, match="the relative error of loss"):
            require_similar(Check("small", 2, "loss", error, 1e-3))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from benchmarks.gpu import sections
from benchmarks.gpu.__main__ import conditions, sections_of
from benchmarks.gpu.machine import Machine
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.session import Cases, Session, Settings, run_sections
from benchmarks.tables import document, headline, tables_of
sections.CASES = dict.fromkeys(sections.CASES, Cases(("model-small",), (2,)))
machine = Machine(("numba",), 0, None, ("no PyTorch",))
settings = Settings(("training", "precision", "inference"), rounds=2)
session = Session(settings, Progress(), Report(conditions(machine, settings)))
report = run_sections(session, sections_of(machine, settings.sections))
print(document("GPUs", report.about, headline(report), tables_of(report)))
"""


def test_without_pytorch_dptrain_is_timed_and_the_report_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "missing: no PyTorch" in done.stdout
    assert "### Training step" in done.stdout
    assert "results were checked" not in done.stdout


# Flags.


OPTIONS: dict[str, Any] = {
    "sections": None, "networks": None, "batches": None, "precisions": None, "compiled": None,
    "rounds": None, "launches": 3,
}  # fmt: skip


def test_flags_choose_what_is_measured() -> None:
    given = {"networks": "cifar,solar", "sections": "training", "batches": "32,64",
             "precisions": "fp32", "compiled": "none", "launches": 2}  # fmt: skip
    chosen = make_settings(quick=True, **{**OPTIONS, **given})
    run_ = GpuRun(Session(chosen, Progress()), MACHINE, None)
    assert sections.cases_of(run_, "training") == Cases(("cifar", "solar"), (32, 64), ("fp32",), ())
    assert (chosen.sections, chosen.launches) == (("training",), 2)
    run_ = GpuRun(Session(make_settings(**OPTIONS), Progress()), MACHINE, None)
    assert all(sections.cases_of(run_, name) == each for name, each in sections.CASES.items())


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("sections", "trainin", "training"), ("batches", "0", "batch size is '0'"),
     ("precisions", "tf3", "tf32"), ("networks", "model9", "model9")],
)  # fmt: skip
def test_wrong_flags_are_named(option: str, value: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_settings(**{**OPTIONS, option: value})


def test_without_a_gpu_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise UserError("backend cuda needs CuPy")

    monkeypatch.setattr("dptrain.backends.cuda.device.cupy_runtime.import_cupy", missing)
    done = CliRunner().invoke(main, ["--quick"])
    assert done.exit_code == 2
    assert done.output == "benchmarks: backend cuda needs CuPy\n"
