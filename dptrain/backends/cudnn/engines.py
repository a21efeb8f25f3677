"""Select cuDNN's engine for a convolution: rank by heuristics, time the best, cache the fastest.

cuDNN has dozens of kernels ("engines", configured by "knobs") for a convolution and ranks them with
a performance model. The first allowed engines are timed on the GPU. The name of the fastest is
cached on disk, so that the next run uses the same engine and computes the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dptrain.backends.cuda.device.device import Array, Device
from dptrain.backends.cudnn.graphs import BACKWARD_WEIGHT, Problem, describe
from dptrain.backends.cudnn.library import Library
from dptrain.cache import load, store, writable_folder
from dptrain.errors import UserError


@dataclass(frozen=True)
class EngineFilter:
    """Which engines may compute a convolution, and how many of them are timed.

    Attributes:
        excluded: numeric notes of engines that are not used.
        fp32_excluded: notes that fp32 excludes in addition.
        workspace_bytes: engines that need a larger workspace are not used.
        timed: number of engines that are timed, in cuDNN's order.
    """

    excluded: tuple[str, ...]
    fp32_excluded: tuple[str, ...]
    workspace_bytes: int = 256 << 20
    timed: int = 12

    def notes(self, precision: str) -> tuple[str, ...]:
        """Return the numeric notes of the engines that a precision excludes."""
        return (*self.excluded, *(self.fp32_excluded if precision == "fp32" else ()))


TENSOR_CORE_NOTES = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
"""Notes of engines on tensor cores, which round float32 to TF32."""

REPRODUCIBLE = EngineFilter(
    excluded=(
        "NONDETERMINISTIC",
        "REDUCED_PRECISION_REDUCTION",
        "FFT",
        "WINOGRAD_TILE_6x6",
        "WINOGRAD_TILE_13x13",
    ),
    fp32_excluded=TENSOR_CORE_NOTES,
)
"""Engines of training: results are reproducible, sums are float32, and so are products of fp32."""


@dataclass(frozen=True)
class Plan:
    """A built engine, ready to compute one convolution on its arrays.

    Attributes:
        graph: cuDNN graph that contains the engine.
        index, name: of the plan within the graph.
        concurrent: whether the plan runs concurrently with other convolutions.
        addresses: device addresses of the arrays, by tensor.
        workspace_bytes: required workspace.
    """

    graph: Any
    index: int
    name: str
    concurrent: bool
    addresses: dict[Any, int]
    workspace_bytes: int


class Engines:
    """Select and run engines.

    Args:
        library: cuDNN.
        device: device of the arrays.
        allowed: which engines may be selected.

    Attributes:
        workspaces: scratch memory, shared by plans that run one after the other. Weight gradients
            run concurrently with them and have a workspace of their own (key True).
    """

    def __init__(
        self, library: Library, device: Device, allowed: EngineFilter = REPRODUCIBLE
    ) -> None:
        self.library, self.device, self.allowed = library, device, allowed
        self.workspaces = {concurrent: device.zeros((1,), "uint8") for concurrent in (False, True)}
        self._outgrown: list[Array] = []  # Captured graphs can still use them.

    @property
    def workspace_bytes(self) -> int:
        """Size of all workspaces."""
        return sum(int(array.nbytes) for array in (*self.workspaces.values(), *self._outgrown))

    def select(self, problem: Problem, arrays: Sequence[Array], *, measure: bool) -> Plan:
        """Return a plan for a convolution.

        Args:
            problem: the convolution.
            arrays: in the order of tensors of `describe`. Timing overwrites the last one.
            measure: select by time, not by cuDNN's model.

        Raises:
            UserError: no engine is allowed.
        """
        name = self._cached_name(problem) if measure else None
        if measure and name is None:
            name = self._time_plans(problem, arrays)
        plan = next(self._plans(problem, arrays, name), None)
        plan = plan or next(self._plans(problem, arrays), None)
        if plan is None:
            raise UserError(
                f"cuDNN {self.library.version} has no engine for the convolution ({problem.kind}) "
                f"of {problem.x} to {problem.y} in {problem.precision}; use --backend cuda"
            )
        workspace = self.workspaces[plan.concurrent]
        if plan.workspace_bytes > workspace.nbytes:
            self._outgrown.append(workspace)
            self.workspaces[plan.concurrent] = self.device.zeros((plan.workspace_bytes,), "uint8")
        return plan

    def run(self, plan: Plan, workspace: Array | None = None) -> None:
        """Enqueue a plan without allocating memory."""
        library = self.library
        scratch = self.workspaces[plan.concurrent] if workspace is None else workspace
        library.module.set_stream(handle=library.handle, stream=self.device.stream_address)
        plan.graph.execute(plan.addresses, self.device.address(scratch), library.handle)

    def note(self, problem: Problem, plan: Plan) -> str:
        """Return a description of a plan: engine, workspace and precision of the products."""
        engine = plan.graph.get_engine_and_knobs_at_index(plan.index)[0]
        megabytes = plan.workspace_bytes / 1e6
        return f"engine {engine}, {megabytes:.1f} MB, {self._mode(problem, plan)}"

    @property
    def _unsupported_errors(self) -> tuple[type[Exception], ...]:
        """Exceptions of building or running an engine that does not support a problem."""
        return self.library.module.cudnnGraphNotSupportedError, RuntimeError

    def _ranked_graph(self, problem: Problem, notes: Sequence[str]) -> tuple[Any, tuple[Any, ...]]:
        """Return a graph with its ranked, unbuilt plans, without those that have one of `notes`."""
        cudnn = self.library.module
        graph, tensors = describe(cudnn, problem, self.library.handle)
        graph.validate()
        graph.build_operation_graph()
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in notes])
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return graph, tensors

    def _plans(
        self,
        problem: Problem,
        arrays: Sequence[Array],
        name: str | None = None,
        notes: Sequence[str] = (),
    ) -> Iterator[Plan]:
        """Yield the allowed plans in cuDNN's order, or only the plan called `name`.

        `notes` exclude plans in addition.
        """
        excluded = *self.allowed.notes(problem.precision), *notes
        try:
            graph, tensors = self._ranked_graph(problem, excluded)
        except self._unsupported_errors:
            return
        addresses = {
            tensor: self.device.address(array)
            for tensor, array in zip(tensors, arrays, strict=bool(arrays))
        }
        for index in range(graph.get_execution_plan_count()):
            if name is not None and graph.get_plan_name_at_index(index) != name:
                continue
            try:
                graph.build_plan_at_index(index)
            except self._unsupported_errors:
                continue
            size = int(graph.get_workspace_size_plan_at_index(index))
            if size <= self.allowed.workspace_bytes:
                plan_name = graph.get_plan_name_at_index(index)
                concurrent = problem.kind == BACKWARD_WEIGHT
                yield Plan(graph, index, plan_name, concurrent, addresses, size)

    def _mode(self, problem: Problem, plan: Plan) -> str:
        """Return the precision of a plan's products, derived from its use of tensor cores."""
        excluded = self.allowed.notes(problem.precision)
        if problem.precision == "bf16" or set(TENSOR_CORE_NOTES) <= set(excluded):
            return problem.precision.upper()
        same = self._plans(problem, [], plan.name, TENSOR_CORE_NOTES)
        return "TF32" if next(same, None) is None else "FP32"

    def _time_plans(self, problem: Problem, arrays: Sequence[Array]) -> str | None:
        """Time the plans on this device, and return and cache the name of the fastest."""
        times: dict[str, float] = {}
        for plan in self._plans(problem, arrays):
            scratch = self.device.zeros((max(plan.workspace_bytes, 1),), "uint8")
            try:
                times[plan.name] = min(self.device.times_ms(partial(self.run, plan, scratch)))
            except self._unsupported_errors:
                continue
            if len(times) == self.allowed.timed:
                break
        if not times:
            return None
        fastest = min(times, key=times.__getitem__)
        if path := self._cache_path(problem):
            store(path, fastest.encode())
        return fastest

    def _cached_name(self, problem: Problem) -> str | None:
        """Return the name that an earlier run cached; None if there is none or it is damaged."""
        path = self._cache_path(problem)
        data = None if path is None else load(path)
        return None if data is None else data.decode()

    def _cache_path(self, problem: Problem) -> Path | None:
        """Return the cache file, whose name is a digest of everything the selection depends on."""
        folder = writable_folder("cudnn-engines")
        facts = self.device.name, self.library.version, astuple(problem), astuple(self.allowed)
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        return None if folder is None else folder / f"{problem.kind}-{digest}"
