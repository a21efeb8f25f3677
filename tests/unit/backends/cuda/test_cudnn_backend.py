"""The cudnn backend: which calls it makes, how it selects engines, and what it reports.

`test_operations` compares its results with PyTorch on a stand-in for cuDNN that computes what is
asked for; ``tests/gpu`` runs the same tests with cuDNN on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.gpu.ours import Step
from benchmarks.studies import cudnn as studies_cudnn
from benchmarks.studies.cudnn import SETTINGS as SETTINGS_OF_BENCHMARKS
from benchmarks.studies.cudnn import engines_of
from benchmarks.timing import Series
from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cudnn import library
from dptrain.backends.cudnn.backend import CudnnBackend
from dptrain.backends.cudnn.convolution import CudnnConvolution
from dptrain.backends.cudnn.engines import REPRODUCIBLE, EngineFilter, Engines
from dptrain.backends.cudnn.graphs import FORWARD, Problem, problem_of
from dptrain.backends.cudnn.library import Library
from dptrain.backends.cudnn.primitives import MAX_POOLING, CudnnError, Primitives
from dptrain.backends.cudnn.replica import CudnnReplica
from dptrain.backends.replica import Context
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.profile.analysis import Measured, stage_profiles
from dptrain.measure.profile.tables import notes_table
from dptrain.measure.step_record import SPANS
from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Flatten,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    Sigmoid,
    zoo,
)
from dptrain.plan import SGD, make_plan
from dptrain.plan.lowering import Group, Phase, Precision, Setting
from dptrain.training.resources import open_backend
from dptrain.training.settings import GivenSettings
from tests.emulator.emulator import Emulator
from tests.emulator.fake_cudnn import ENGINES, Engine, Module
from tests.emulator.fake_cudnn_functions import Functions, to_bfloat16
from tests.unit.backends.cuda.test_cuda_backend import (
    PLAIN,
    assert_close,
    every_network,
    rounding,
    step,
)

CONV = Conv2d(6, (3, 2), stride=(2, 1), padding=1)
NETWORK = Network((5, 9, 7), [CONV, ReLU(), MaxPool2d(2), Conv2d(4), Flatten()], MeanSquaredError())
SETTINGS = {
    "fp32": Setting(3, "fp32", "float32", "float32"),
    "tf32": Setting(3, "tf32", "float32", "float32"),
    "bf16": Setting(3, "bf16", "float32", "uint16"),
}
KINDS = "forward", "backward_input", "backward_weight"

every_precision = pytest.mark.parametrize("precision", SETTINGS)


def cudnn_replica(network: Network = NETWORK, batch_size: int = 3) -> CudnnReplica:
    replica = make_replica(network, "cudnn", batch_size)
    assert isinstance(replica, CudnnReplica)
    return replica


def module_of(replica: CudnnReplica) -> Module:
    module = replica.engines.library.module
    assert isinstance(module, Module)
    return module


# What is asked for.


def test_graphs_describe_the_layer() -> None:
    """Dimensions in the order N, C, H, W, strides of memory in which channels are innermost."""
    replica = cudnn_replica()
    first = module_of(replica).graphs[0]
    assert [operation.name for operation in first.operations] == ["conv_fprop", "bias", "relu"]
    x, w, b = first.tensors
    y = first.operations[-1].result
    assert (x.dim, x.stride) == ([3, 5, 9, 7], [315, 1, 35, 5])
    assert (w.dim, w.stride) == ([6, 5, 3, 2], [30, 1, 10, 5])
    assert (b.dim, b.stride) == ([1, 6, 1, 1], [6, 1, 6, 6])
    assert (y.dim, y.stride) == ([3, 6, 5, 8], [240, 1, 48, 6])
    assert first.operations[0].geometry == {
        "pre_padding": [1, 1], "post_padding": [1, 1], "stride": [2, 1], "dilation": [1, 1],
    }  # fmt: skip


def test_uneven_padding_is_left_to_kernels_of_our_own() -> None:
    uneven = Network((5, 8, 7), [Conv2d(6, 2), Conv2d(4), Flatten()], MeanSquaredError())
    replica = cudnn_replica(uneven)
    assert {name.partition(".")[0] for name in replica.notes} == {"conv2"}
    shapes = {slot.name: slot.storage.shape for slot in replica.plan.layout.slots}
    assert shapes["conv1.weight"] == (2, 2, 5, 6)
    assert shapes["conv2.weight"] == (4, 3, 3, 6)


def test_workspaces_count_as_memory() -> None:
    replica = cudnn_replica()
    before = replica.memory_bytes
    assert before == {**replica.plan.memory, "workspace": before["workspace"]}
    replica.engines.workspaces[True] = replica.device.zeros((1000,), "uint8")
    assert replica.memory_bytes["workspace"] == before["workspace"] + 999


def test_what_is_fused_and_what_is_left_out() -> None:
    """ReLU is in the graph; the gradient of the network's input is not computed."""
    module = module_of(cudnn_replica())
    names = [[operation.name for operation in graph.operations] for graph in module.graphs]
    assert sorted(names) == [
        ["conv_dgrad"], ["conv_fprop", "bias"], ["conv_fprop", "bias", "relu"],
        ["conv_wgrad"], ["conv_wgrad"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", list(zoo.studies.NETWORKS))
@every_precision
def test_every_network_is_planned(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights as (K, R, S, C); bfloat16 copies of them live from forward to backward_input."""
    precisions = {p: Precision(s.dtype, s.activations) for p, s in SETTINGS.items()}
    monkeypatch.setattr(CudnnBackend, "precisions", precisions)
    plan = make_plan(zoo.build_network(name), load_backend("cudnn"), 32, precision=precision)
    for slot in plan.layout.slots:
        if isinstance(slot.node.layer, Conv2d) and len(slot.parameter.shape) == 4:
            k, c, r, s = slot.parameter.shape
            assert slot.storage.shape == (k, r, s, c)
    narrow = {name for name in plan.buffers if ".bf16_" in name}
    convolutions = [group for group in plan.groups if isinstance(group.head.layer, Conv2d)]
    assert len(narrow) == (3 * len(convolutions) if precision == "bf16" else 0)
    for group in convolutions[1:]:
        stage = next(s for s in plan.stages if s.name == f"{group.name}.backward_input")
        assert (f"{group.name}.bf16_weight" in stage.reads) == (precision == "bf16")


def test_parameters_come_back_as_they_were_set() -> None:
    replica = cudnn_replica()
    for name, value in replica.parameters.items():
        numbers = np.arange(value.size, dtype=np.float32).reshape(value.shape)
        replica.parameters[name] = numbers
        np.testing.assert_array_equal(replica.parameters[name], numbers)
    slot = replica.plan.layout["conv1.weight"]
    stored = replica.device.download(replica.flat_parameters[slot.start : slot.stop])
    expected = np.arange(180.0).reshape(6, 5, 3, 2).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(stored, expected.reshape(-1))


# What comes out.


@every_network
def test_three_steps_follow_the_reference(network: Network) -> None:
    ours, reference = (
        make_replica(network, backend, 24, optimizer=SGD(momentum=0.9))
        for backend in ("cudnn", "reference")
    )
    for number, n in enumerate((24, 7, 1)):
        tolerance = (number + 1) * 2 * rounding(network, n)
        assert_close(step(ours, n, number), step(reference, n, number), tolerance)
        for name, value in reference.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


def bind(
    group: Group, precision: str, arrays: dict[str, NDArray[Any]]
) -> tuple[Emulator, dict[str, Any], Any, dict[str, str]]:
    """A convolution alone, on memory that holds `arrays`; what it needs besides is zero."""
    device = Emulator()
    setting = SETTINGS[precision]
    memory = {}
    for name, value in arrays.items():
        memory[name] = device.zeros(value.shape, value.dtype)
        device.upload(memory[name], value)
    for name, spec in CudnnConvolution.needs(group, setting).buffers.items():
        memory[name] = device.zeros(spec.shape, spec.dtype)
    plan = SimpleNamespace(batch_size=setting.batch_size, precision=precision, setting=setting)
    engines, notes = Engines(Library(), device), dict[str, str]()
    replica: Any = SimpleNamespace(device=device, plan=plan, engines=engines, notes=notes)
    phases = CudnnConvolution.needs(group, setting).phases
    return device, memory, CudnnConvolution(group, memory, replica).kernels(phases), notes


def widened(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@every_precision
@pytest.mark.parametrize("filters", [4, 5, 130])
def test_a_convolution_alone_in_every_precision(precision: str, filters: int) -> None:
    """1×1 filters are a matrix product, so what is expected is written in a line each.

    In bfloat16 operands are rounded first, sums are not, results are: to 2⁻⁸ of each.
    """
    setting = SETTINGS[precision]
    network = Network((3, 7, 5), [Conv2d(filters, 1), Flatten()])
    group = Group(network.nodes[:1])
    rng = np.random.default_rng(0)

    def drawn(*shape: int, dtype: str = setting.activations) -> NDArray[Any]:
        values = rng.standard_normal(shape, dtype=np.float32)
        return to_bfloat16(values) if dtype == "uint16" else values

    arrays = {
        "x": drawn(3, 7, 5, 3),
        "dy": drawn(3, 7, 5, filters),
        "y": np.zeros((3, 7, 5, filters), setting.activations),
        "dx": np.zeros((3, 7, 5, 3), setting.activations),
        "weight": drawn(filters, 1, 1, 3, dtype="float32"),
        "bias": drawn(filters, dtype="float32"),
        "dweight": drawn(filters, 1, 1, 3, dtype="float32"),
        "dbias": drawn(filters, dtype="float32"),
    }
    device, memory, kernels, notes = bind(group, precision, arrays)
    narrow = precision == "bf16"

    def numbers(value: NDArray[Any], *, rounded: bool = True) -> NDArray[np.float64]:
        if value.dtype == np.uint16:
            return widened(value).astype(np.float64)
        return np.float64(widened(to_bfloat16(value)) if narrow and rounded else value)

    def result(name: str) -> NDArray[np.float64]:
        return numbers(device.download(memory[name]), rounded=False)

    for n in (3, 2, 0):
        context = Context(seed=0, n=n)
        for phase in (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT):
            kernels[phase](context)
        x, dy = numbers(arrays["x"])[:n], numbers(arrays["dy"])[:n]
        w = numbers(arrays["weight"]).reshape(filters, 3)
        relative = 2.0**-8 if narrow else 1e-6
        close: dict[str, Any] = {"rtol": relative, "atol": relative * 1e-2}
        y = x @ w.T + numbers(arrays["bias"])
        np.testing.assert_allclose(result("y")[:n], y, **close)
        np.testing.assert_allclose(result("dx")[:n], dy @ w, **close)
        dw = np.einsum("nhwk,nhwc->kc", dy, x).reshape(filters, 1, 1, 3)
        np.testing.assert_allclose(result("dweight"), dw, **close)
        # Our own sum, in float32: 105 terms of size 1.
        np.testing.assert_allclose(result("dbias"), dy.sum((0, 1, 2)), 1e-5, 1e-4)
    engine = 3 if precision == "fp32" else 7
    assert notes == {
        f"conv1.{kind}": f"engine {engine}, 0.0 MB, {precision.upper()}" for kind in KINDS
    }


# Poolings and activations.

POOLED = Network(
    (3, 9, 8),
    [
        Conv2d(8), ReLU(), MaxPool2d(2), Conv2d(4, 1), Sigmoid(), AveragePool2d(3, 1),
        ReLU(), MaxPool2d(3, 2, "same"), Flatten(), Dense(5), ReLU(), Dense(3),
    ],
)  # fmt: skip


def functions_of(replica: CudnnReplica) -> Functions:
    functions = replica.engines.library.primitives._functions
    assert isinstance(functions, Functions)
    return functions


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_poolings_activations_and_softmax_are_computed_by_cudnn(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pooling has asymmetric padding, and fully connected layers fuse their ReLU.

    In bf16, softmax is computed by the kernel of the loss.
    """
    precisions = {p: Precision(s.dtype, s.activations) for p, s in SETTINGS.items()}
    monkeypatch.setattr(CudnnBackend, "precisions", precisions)
    replica = make_replica(POOLED, "cudnn", 4, precision=precision)
    assert isinstance(replica, CudnnReplica)
    names = [group.name for group in replica.plan.groups]
    assert names[:6] == ["conv1+relu1", "pool1", "conv2", "sigmoid1", "avgpool1", "relu2"]
    functions = functions_of(replica)
    functions.calls.clear()
    step(replica, 3, 0)
    forward = [name for name in functions.calls if name.endswith("Forward")]
    backward = [name for name in functions.calls if name.endswith("Backward")]
    pool, activation = "Pooling", "Activation"
    softmax = ["Softmax"] if precision == "fp32" else []
    kinds = [pool, activation, pool, activation, *softmax]
    assert forward == [f"{kind}Forward" for kind in kinds]
    kinds = [*softmax, activation, pool, activation, pool, activation]
    assert backward == [f"{kind}Backward" for kind in kinds]
    assert functions.errors == []


def test_poolings_and_activations_match_the_reference() -> None:
    ours, reference = (make_replica(POOLED, name, 4) for name in ("cudnn", "reference"))
    for number, n in enumerate((4, 3, 1)):
        tolerance = (number + 1) * 2 * rounding(POOLED, n)
        assert_close(step(ours, n, number), step(reference, n, number), tolerance)
        for name, value in reference.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


def test_types_that_cudnn_does_not_pool_are_computed_by_the_cuda_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_bfloat16 = Functions(dtypes=(9,))
    monkeypatch.setattr("dptrain.backends.cudnn.library.open_functions", lambda path: only_bfloat16)
    replica = make_replica(POOLED, "cudnn", 4)
    assert only_bfloat16.errors[:1] == ["PoolingForward: data type 0"]
    only_bfloat16.calls.clear()
    reference = make_replica(POOLED, "reference", 4)
    assert_close(step(replica, 4, 0), step(reference, 4, 0), 2 * rounding(POOLED, 4))
    assert only_bfloat16.calls == []


def test_a_failed_call_is_reported_with_its_status() -> None:
    primitives = Primitives(Functions())
    described = (primitives.pooling(MAX_POOLING, (2, 2), (0, 0), (2, 2)),)
    x, y = primitives.tensor((1, 1, 2, 2), "float32"), primitives.tensor((1, 1, 1, 1), "float32")
    with pytest.raises(CudnnError, match=r"cudnnPoolingForward failed: a status .* \(2000\)"):
        # No stream was set.
        primitives.forward("Pooling", described, (x, 0), (y, 0))


# Which engine.


class Clock(Emulator):
    """An emulator on which each engine takes the time that is said here."""

    def __init__(self, by_engine: dict[str, float | None]) -> None:
        super().__init__()
        self.specializes, self.name = True, "NVIDIA H200"
        self.by_engine, self.timed = by_engine, list[str]()
        self.module: Module | None = None

    def times_ms(self, start: Any) -> list[float]:
        assert self.module is not None
        start()
        name = self.module.executed[-1]
        self.timed.append(name)
        time = self.by_engine[name]
        if time is None:
            raise RuntimeError("cannot be captured")
        return [2 * time, time]


def chosen(
    clock: Clock,
    engines: Sequence[Engine] = ENGINES,
    allowed: EngineFilter = REPRODUCIBLE,
    **changes: Any,
) -> str:
    """Name of the engine for a small convolution."""
    clock.timed.clear()
    library = Library()
    library.module = clock.module = Module(engines)
    problem = problem_of(NETWORK.nodes[0], FORWARD, 2, relu=False, precision="tf32")
    problem = Problem(**{**vars(problem), **changes})
    shapes = problem.x, problem.w, (problem.w[0],), problem.y
    arrays = [clock.zeros(shape, "float32") for shape in shapes]
    return Engines(library, clock, allowed).select(problem, arrays, measure=True).name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cudnn-engines"


def test_the_fastest_engine_is_kept_on_disk(cache: Path) -> None:
    clock = Clock({"eng7_k2=1": 2.0, "eng3_k2=1": 1.0})
    assert chosen(clock) == "eng3_k2=1"
    assert sorted(clock.timed) == ["eng3_k2=1", "eng7_k2=1"]
    assert len(list(cache.iterdir())) == 1
    clock.by_engine["eng3_k2=1"] = 3.0
    assert chosen(clock) == "eng3_k2=1"
    assert clock.timed == []


@pytest.mark.parametrize(
    "change", [{"precision": "fp32"}, {"relu": True}, {"after": (3, 1), "y": (2, 6, 6, 8)}]
)
def test_what_is_kept_depends_on_the_problem(change: dict[str, Any], cache: Path) -> None:
    clock = Clock({"eng7_k2=1": 2.0, "eng3_k2=1": 1.0})
    chosen(clock)
    chosen(clock, **change)
    assert clock.timed
    assert len(list(cache.iterdir())) == 2


def test_what_is_kept_depends_on_gpu_and_version(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock({"eng7_k2=1": 2.0, "eng3_k2=1": 1.0})
    chosen(clock)
    clock.name = "NVIDIA A100"
    chosen(clock)
    assert clock.timed
    monkeypatch.setattr(Module, "backend_version", lambda self: 92000)
    chosen(clock)
    assert clock.timed
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"eng3_k2=1", bytes(60)])
def test_a_damaged_file_is_measured_again(damage: bytes, cache: Path) -> None:
    clock = Clock({"eng7_k2=1": 2.0, "eng3_k2=1": 1.0})
    chosen(clock)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert chosen(clock) == "eng3_k2=1"
    assert clock.timed
    assert file.read_bytes() == whole


def test_an_engine_that_is_gone_is_replaced(cache: Path) -> None:
    clock = Clock({"eng7_k2=1": 2.0, "eng3_k2=1": 1.0})
    chosen(clock)
    assert chosen(clock, ENGINES[:1]) == "eng7_k2=1"


def test_without_a_folder_engines_are_measured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DPTRAIN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "/proc/nowhere")
    clock = Clock({"eng7_k2=1": 2.0, "eng3_k2=1": 1.0})
    for _ in range(2):
        assert chosen(clock) == "eng3_k2=1"
        assert clock.timed


def test_an_engine_that_cannot_run_is_left_out(cache: Path) -> None:
    assert chosen(Clock({"eng7_k2=1": 2.0, "eng3_k2=1": None})) == "eng7_k2=1"


def test_an_engine_that_wants_too_much_memory_is_left_out(cache: Path) -> None:
    large = Engine(9, (), REPRODUCIBLE.workspace_bytes + 1)
    assert chosen(Clock({"eng3_k2=1": 1.0}), (large, ENGINES[1])) == "eng3_k2=1"


@pytest.mark.parametrize("engines", [(), ENGINES[:1]])
def test_a_missing_engine_is_reported_with_an_alternative(
    engines: Sequence[Engine], cache: Path
) -> None:
    """In fp32 the only one has tensor cores."""
    message = r"cuDNN 9.19.0 has no engine for the convolution .* fp32; use --backend cuda"
    with pytest.raises(UserError, match=message):
        chosen(Clock({"eng7_k2=1": 1.0}), engines, precision="fp32")


BENCHMARKED = {"cudnn": (3, "FP32"), "cudnn, all engines": (3, "FP32"), "cudnn, best": (7, "TF32")}


@pytest.mark.parametrize("setting", SETTINGS_OF_BENCHMARKS)
def test_only_benchmarks_use_other_engines(setting: str, cache: Path) -> None:
    """With all engines, fp32 may round to TF32, and the note says so; training is as before."""
    engine, products = BENCHMARKED[setting]
    before = cudnn_replica().notes
    with engines_of(setting):
        notes = cudnn_replica().notes
    assert before == cudnn_replica().notes
    assert {n.partition(",")[0] for n in before.values()} == {"engine 3"}
    assert {n.partition(",")[0] for n in notes.values()} == {f"engine {engine}"}
    assert {n.rpartition(" ")[2] for n in notes.values()} == {products}


@pytest.mark.more
def test_the_studies_store_times_and_engines_of_each_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock, PyTorch and its times are replaced; the kernels run on the emulator."""
    series = Series.of((2.0, 1.0, 4.0))
    monkeypatch.setattr(Step, "program", property(lambda self: self.start()))
    monkeypatch.setattr(studies_cudnn, "take_turns", lambda names: dict.fromkeys(names, series))
    monkeypatch.setattr(studies_cudnn, "_torch_programs", lambda *_: {"PyTorch fp32 graph": None})
    peers = SimpleNamespace(torch_layer_times=lambda *_: {("conv2", "forward"): 7000.0})
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.peers.torch_layers", peers)
    row = studies_cudnn._steps(NETWORK, 2)
    programs = ["cuda", *SETTINGS_OF_BENCHMARKS, "PyTorch fp32 graph"]
    assert [name for name in row if isinstance(row[name], dict)] == ["engines", *programs]
    assert row["cuda"] == {
        "median_us": 2.0,
        "quartiles_us": [1.5, 3.0],
        "blocks_us": [2.0, 1.0, 4.0],
    }
    assert {name: next(iter(notes.values()))[:8] for name, notes in row["engines"].items()} == {
        name: f"engine {engine}" for name, (engine, _) in BENCHMARKED.items()
    }
    alone = {(r["layer"], r["direction"]): r for r in studies_cudnn.time_alone(NETWORK, 2)}
    forward = alone["conv2", "forward"]
    assert set(forward) == {
        "layer",
        "direction",
        "flops",
        "cuda",
        *SETTINGS_OF_BENCHMARKS,
        "PyTorch",
    }
    assert forward["PyTorch"] == {"median": 7.0}


def test_the_kept_engine_depends_on_the_allowed_ones(cache: Path) -> None:
    clock = Clock({"eng7_k2=1": 1.0, "eng3_k2=1": 2.0})
    assert chosen(clock, precision="fp32") == "eng3_k2=1"
    found = chosen(clock, precision="fp32", allowed=EngineFilter((), ()))
    assert found == "eng7_k2=1"
    assert chosen(clock, precision="fp32") == "eng3_k2=1"


def test_a_smaller_batch_takes_a_graph_of_its_own(cache: Path) -> None:
    replica = cudnn_replica(PLAIN, 8)
    module = module_of(replica)
    before = len(module.graphs)
    for n in (5, 5, 8, 0):
        step(replica, n, 0)
    samples = {graph.tensors[0].dim[0] for graph in module.graphs[before:] if graph.tensors[0].dim}
    assert samples == {5}


def test_concurrent_plans_have_their_own_workspace() -> None:
    """Weight gradients are computed concurrently with input gradients."""
    network = Network((3, 6, 6), [Conv2d(4), Conv2d(4), Flatten()], MeanSquaredError())
    library = Library()
    library.module = Module((Engine(7, (), 4096),))
    backend = CudnnBackend()
    backend.__dict__["library"] = library
    replica = backend.make_replica(make_plan(network, backend, 2, precision="fp32"))
    assert isinstance(replica, CudnnReplica)
    first, second = replica.engines.workspaces.values()
    assert first.nbytes == second.nbytes == 4096
    address = replica.device.address
    assert abs(address(first) - address(second)) >= 4096


# What is shown.


def test_notes_are_a_table_where_there_are_any() -> None:
    for backend, shown in (("cudnn", True), ("cuda", False)):
        replica = make_replica(PLAIN, backend, 4)
        names = (*(stage.name for stage in replica.plan.stages), *SPANS)
        times = np.ones((1, 1, len(names)))
        measured = Measured(names, times, times, (4.0,))
        profiles = stage_profiles(replica.plan, measured, replica.notes)
        notes = {stage.name: stage.note for stage in profiles if stage.note}
        assert bool(notes) == shown
        table = notes_table(profiles)
        assert (table is not None) == shown
        if table is not None:
            assert notes["conv2+relu2.backward_input"] == "engine 3, 0.0 MB, FP32"
            stages, by, _ = (list(column) for column in zip(*table.texts, strict=True))
            assert dict(zip(stages, by, strict=True)) == notes


# What is missing.


def test_the_librarys_wheel_comes_before_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    wheel = tmp_path / "cudnn" / "lib" / "libcudnn.so.9"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    tried: list[str] = []

    def load(name: str, mode: int) -> None:
        assert mode == ctypes.RTLD_GLOBAL
        tried.append(name)
        raise OSError

    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(ctypes, "CDLL", load)
    message = r"libcudnn.so.9 was not found.*pip install '\.\[cuda13\]'"
    with pytest.raises(UserError, match=message) as error:
        library.load_library()
    assert "\n" not in str(error.value)
    assert tried == [str(wheel), "libcudnn.so.9"]


def test_the_missing_frontend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(UserError, match="pip install nvidia-cudnn-frontend --no-deps") as error:
        library.import_frontend()
    assert "\n" not in str(error.value)


def test_training_without_cudnn_is_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise UserError("backend cudnn finds no libcudnn.so.9; pip install it")

    monkeypatch.setattr("dptrain.backends.cudnn.library.load_library", fail)
    with pytest.raises(UserError, match=r"finds no libcudnn.so.9; pip install it"):
        open_backend(GivenSettings(backend="cudnn"), World.single())


def test_importing_and_planning_need_no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("cuDNN was asked for")

    monkeypatch.setattr("dptrain.backends.cudnn.library.load_library", fail)
    make_plan(PLAIN, load_backend("cudnn"), 4, precision="fp32")
