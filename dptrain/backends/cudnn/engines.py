"""Which of cuDNN's engines computes a convolution: by its heuristics, measured once, kept on disk.

cuDNN has dozens of kernels ("engines", with "knobs") for the same convolution, and ranks them by a
model of the GPU. The first few that may be used are timed where they will run; the name of the
fastest is kept, so that the next run takes the same one and gives the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dptrain.backends.cache import load, store, writable_folder
from dptrain.backends.cuda.device import Array, Device
from dptrain.backends.cudnn.graphs import BACKWARD_WEIGHT, Problem, describe
from dptrain.backends.cudnn.library import Library
from dptrain.errors import UserError

MOST_WORKSPACE = 256 << 20
"""Bytes; an engine that wants more is not used."""

MOST_MEASURED = 12
"""Engines that are timed; cuDNN's favourites come first."""

UNWANTED = (
    "NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)  # fmt: skip
"""The same step is to give the same bits, and sums are to be float32's, in every precision."""

FULL_PRECISION = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")
"""What fp32 leaves out besides: tensor cores round float32 to TF32, and cuDNN would not ask."""


@dataclass(frozen=True)
class Plan:
    """An engine that is ready to compute one convolution on its arrays.

    Attributes:
        graph: has the engine built, and runs it.
        index, name: of the plan, as the graph knows it.
        beside: whether it runs beside other convolutions.
        addresses: of the arrays, by tensor.
        workspace_bytes: that it wants.
    """

    graph: Any
    index: int
    name: str
    beside: bool
    addresses: dict[Any, int]
    workspace_bytes: int


class Engines:
    """Chooses engines, and runs what was chosen.

    Args:
        library: cuDNN.
        device: where arrays lie.

    Attributes:
        workspaces: scratch memory that plans share which run one after the other. Gradients of
            weights are computed beside the rest, so they have their own.
    """

    def __init__(self, library: Library, device: Device) -> None:
        self.library, self.device = library, device
        self.workspaces = {beside: device.zeros((1,), "uint8") for beside in (False, True)}
        self._outgrown: list[Array] = []  # A captured step may use them still.

    @property
    def workspace_bytes(self) -> int:
        """Of all scratch memory."""
        return sum(int(array.nbytes) for array in (*self.workspaces.values(), *self._outgrown))

    def choose(self, problem: Problem, arrays: Sequence[Array], *, measure: bool) -> Plan:
        """A plan for a convolution.

        Args:
            problem: the convolution.
            arrays: as `describe` orders tensors; measuring overwrites the last.
            measure: choose by time, not by cuDNN's model.

        Raises:
            UserError: no engine may be used.
        """
        name = self._remembered(problem) if measure else None
        if measure and name is None:
            name = self._fastest(problem, arrays)
        plan = next(self._plans(problem, arrays, name), None)
        plan = plan or next(self._plans(problem, arrays), None)
        if plan is None:
            raise UserError(
                f"cuDNN {self.library.version} has no engine for {problem.kind} of a convolution "
                f"{problem.x} to {problem.y} in {problem.precision}; --backend cuda computes it"
            )
        workspace = self.workspaces[plan.beside]
        if plan.workspace_bytes > workspace.nbytes:
            self._outgrown.append(workspace)
            self.workspaces[plan.beside] = self.device.zeros((plan.workspace_bytes,), "uint8")
        return plan

    def run(self, plan: Plan, workspace: Array | None = None) -> None:
        """Enqueue a plan; nothing is allocated."""
        library = self.library
        scratch = self.workspaces[plan.beside] if workspace is None else workspace
        library.module.set_stream(handle=library.handle, stream=self.device.stream_address)
        plan.graph.execute(plan.addresses, self.device.address(scratch), library.handle)

    def note(self, problem: Problem, plan: Plan) -> str:
        """What users see of a choice: engine, workspace, and the numbers it multiplies in."""
        engine = plan.graph.get_engine_and_knobs_at_index(plan.index)[0]
        megabytes = plan.workspace_bytes / 1e6
        return f"engine {engine}, {megabytes:.1f} MB, {self._mode(problem, plan)}"

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        """What building or running an engine raises that cannot do it."""
        return self.library.module.cudnnGraphNotSupportedError, RuntimeError

    def _planned(self, problem: Problem, notes: Sequence[str]) -> tuple[Any, tuple[Any, ...]]:
        """A graph with its ranked plans, not built yet, those with a note of `notes` barred."""
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
        """Plans that may be used, cuDNN's favourites first, or the one of that name alone."""
        notes = (*UNWANTED, *(FULL_PRECISION if problem.precision == "fp32" else ()))
        try:
            graph, tensors = self._planned(problem, notes)
        except self._refusals:
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
            except self._refusals:
                continue
            size = int(graph.get_workspace_size_plan_at_index(index))
            if size <= MOST_WORKSPACE:
                plan_name = graph.get_plan_name_at_index(index)
                beside = problem.kind == BACKWARD_WEIGHT
                yield Plan(graph, index, plan_name, beside, addresses, size)

    def _mode(self, problem: Problem, plan: Plan) -> str:
        """In what numbers a plan multiplies; cuDNN tells it only by what notes bar."""
        if problem.precision != "tf32":
            return problem.precision.upper()
        strict = dataclasses.replace(problem, precision="fp32")
        same = self._plans(strict, [], plan.name)
        return "TF32" if next(same, None) is None else "FP32"

    def _fastest(self, problem: Problem, arrays: Sequence[Array]) -> str | None:
        """Name of the plan that takes the least time here, which is remembered."""
        times: dict[str, float] = {}
        for plan in self._plans(problem, arrays):
            scratch = self.device.zeros((max(plan.workspace_bytes, 1),), "uint8")
            try:
                times[plan.name] = min(self.device.times_ms(partial(self.run, plan, scratch)))
            except self._refusals:
                continue
            if len(times) == MOST_MEASURED:
                break
        if not times:
            return None
        fastest = min(times, key=times.__getitem__)
        if path := self._path(problem):
            store(path, fastest.encode())
        return fastest

    def _remembered(self, problem: Problem) -> str | None:
        """What `_fastest` found in an earlier run; None if there was none, or it is damaged."""
        path = self._path(problem)
        data = None if path is None else load(path)
        return None if data is None else data.decode()

    def _path(self, problem: Problem) -> Path | None:
        """Named by all that the choice depends on."""
        folder = writable_folder("cudnn-engines")
        limits = MOST_WORKSPACE, MOST_MEASURED, UNWANTED, FULL_PRECISION
        facts = self.device.name, self.library.version, astuple(problem), limits
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        return None if folder is None else folder / f"{problem.kind}-{digest}"
