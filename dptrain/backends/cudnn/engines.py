"""Select cuDNN's engine for a convolution: rank by heuristics, time the best, cache the fastest.

cuDNN has dozens of kernels ("engines", configured by "knobs") for a convolution and ranks them with
a performance model. The first allowed engines are timed on the GPU. The name of the fastest is
cached on disk, so that the next run uses the same engine and computes the same bits.
"""

from __future__ import annotations

import dataclasses
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

MAX_WORKSPACE_BYTES = 256 << 20
"""Engines that need a larger workspace are not used."""

MAX_TIMED = 12
"""Engines that are timed, in cuDNN's order."""

EXCLUDED_NOTES = (
    "NONDETERMINISTIC",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
"""Numeric notes of excluded engines: results are reproducible and sums are float32."""

FP32_EXCLUDED_NOTES = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
"""Notes that fp32 excludes in addition: tensor cores would round float32 to TF32."""


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

    Attributes:
        workspaces: scratch memory, shared by plans that run one after the other. Weight gradients
            run concurrently with them and have a workspace of their own (key True).
    """

    def __init__(self, library: Library, device: Device) -> None:
        self.library, self.device = library, device
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
        self, problem: Problem, arrays: Sequence[Array], name: str | None = None
    ) -> Iterator[Plan]:
        """Yield the allowed plans in cuDNN's order, or only the plan called `name`."""
        notes = (*EXCLUDED_NOTES, *(FP32_EXCLUDED_NOTES if problem.precision == "fp32" else ()))
        try:
            graph, tensors = self._ranked_graph(problem, notes)
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
            if size <= MAX_WORKSPACE_BYTES:
                plan_name = graph.get_plan_name_at_index(index)
                concurrent = problem.kind == BACKWARD_WEIGHT
                yield Plan(graph, index, plan_name, concurrent, addresses, size)

    def _mode(self, problem: Problem, plan: Plan) -> str:
        """Return the precision of a plan's products, derived from whether fp32 allows the plan."""
        if problem.precision != "tf32":
            return problem.precision.upper()
        strict = dataclasses.replace(problem, precision="fp32")
        same = self._plans(strict, [], plan.name)
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
            if len(times) == MAX_TIMED:
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
        limits = MAX_WORKSPACE_BYTES, MAX_TIMED, EXCLUDED_NOTES, FP32_EXCLUDED_NOTES
        facts = self.device.name, self.library.version, astuple(problem), limits
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        return None if folder is None else folder / f"{problem.kind}-{digest}"
