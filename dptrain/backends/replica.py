"""A network in memory, ready to train or predict: what all backends have in common.

A replica owns the memory of a plan and the stages that a backend has bound to it.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.attributes import Sealed
from dptrain.backends.accumulation import Accumulation
from dptrain.backends.clipping import Clipping, clip_factor
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.layer_scaling import LayerScaling, layer_ratios, slot_ranges
from dptrain.backends.memory import HOST, Memory, as_numbers
from dptrain.backends.named_arrays import NamedArrays
from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.backends.sample_losses import sample_losses
from dptrain.backends.targets import channels_last_targets, checked_targets
from dptrain.batch import Batch
from dptrain.errors import UserError
from dptrain.network.initializers import Constant
from dptrain.network.layers import Shape
from dptrain.network.outputs import sigmoid, softmax
from dptrain.plan.flat import ALIGNMENT, CORRECT, LOSS, STOP, SUMS
from dptrain.plan.lowering import FORWARD_PHASES, Group, Phase, group_needs
from dptrain.plan.plan import INPUT, TARGET, Plan, Stage
from dptrain.plan.shards import add_in_order

if TYPE_CHECKING:
    from dptrain.backends.base import Backend


UNKNOWN_VERSION = -1
"""`Context.parameters_version` after the parameters were handed out as a writable array."""


@dataclass
class Context:
    """What changes from step to step; every kernel receives it.

    Attributes:
        seed: of the run; part of the key of the dropout masks.
        n: samples in use, from 0 to the plan's batch size.
        training: False turns dropout off, and the loss writes no gradients.
        step: number of the training step; part of the key of the dropout masks.
        samples: int64 (n,), identity of each sample; part of the key of the dropout masks.
        scale: 1 / number of samples of the global minibatch.
        learning_rate: of the next update.
        stop: True if this rank requests a stop.
        parameters_version: changes whenever parameters are written outside of updates;
            `UNKNOWN_VERSION` if they may be written at any time.
        num_writes: number of writes to the state other than by updates.
        part: number of the pass, of those that an update has.
        bounds: int64; micro-shard i consists of samples bounds[i] … bounds[i + 1] of this batch.
            Without micro-shards, (0, n). The array stays the same; its content changes.
    """

    seed: int
    n: int = 0
    training: bool = True
    step: int = 0
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    scale: float = 1.0
    learning_rate: float = 0.0
    stop: bool = False
    parameters_version: int = 0
    num_writes: int = 0
    part: int = 0
    bounds: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, dtype=np.int64))


Kernel = Callable[[Context], None]
"""A stage bound to memory: computes for the first `Context.n` samples."""


class Arrays(Protocol):
    """Arrays of one group by local name: ``x``, ``y``, ``dx``, ``dy``, its own buffers, and for
    each parameter ``weight``, ``bias`` and their gradients ``dweight``, ``dbias``, in storage
    layout. If several layers of a group have parameters, the names carry the layer:
    ``dense2.weight``.

    Backends with micro-shards also receive ``bounds`` (`Context.bounds`), ``merges``
    (`Plan.merges`), ``gradient_slots`` (`Replica.gradient_slots`), and ``dweight_slots`` and
    ``dbias_slots``: one dimension, in which the gradient of slot s starts at element
    s · ``gradient_slots.shape[1]``.

    Arrays can be looked up, but neither listed nor searched: what a group computes follows from the
    plan, not from the arrays that exist.
    """

    def __getitem__(self, name: str, /) -> NDArray[Any]:
        """Return the array with a local name."""


class ReplacedArrays:
    """Arrays of which some are replaced.

    Args:
        arrays: all arrays.
        replaced: those used instead, by local name.
    """

    def __init__(self, arrays: Arrays, replaced: Mapping[str, NDArray[Any]]) -> None:
        self._arrays, self._replaced = arrays, replaced

    def __getitem__(self, name: str, /) -> NDArray[Any]:
        return self._replaced[name] if name in self._replaced else self._arrays[name]


SumStatistics = Callable[[NDArray[np.float64], NDArray[np.float64]], None]
"""Adds numbers over all micro-shards of all ranks, during the forward or the backward pass.

The first argument has a row for each micro-shard of this rank (one row without micro-shards), the
second receives the sum. All ranks call it for the same stages, also those without samples."""


def sum_of_one_rank(plan: Plan) -> SumStatistics:
    """Return the sum over the micro-shards of this rank alone, in the order of `plan.merges`."""
    merges = plan.merges

    def add(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> None:
        totals[:] = np.sum(add_in_order(list(parts.copy()), merges), axis=0)

    return add


class GradientAddition(NamedTuple):
    """One of the contributions that a stage adds to gradients.

    Attributes:
        target, source: arrays as stored, batch first.
        copies: True overwrites the target.
    """

    target: NDArray[Any]
    source: NDArray[Any]
    copies: bool


Listener = Callable[[int], None]
"""Called with a stage's index after that stage has run (on a GPU: has been enqueued)."""


Method = TypeVar("Method", bound=Callable[..., Any])


def one_thread_at_a_time(method: Method) -> Method:
    """Let calls from several threads wait for each other, because they share all buffers."""

    @wraps(method)
    def call(self: Replica, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast("Method", call)


class Replica(Sealed):
    """A network in memory, ready to train or predict. `dptrain.make_replica` makes one.

    A training step is `forward_backward` followed by `update`. Several threads may call
    `predict`, `forward` and `evaluate`; one call waits for the other. Attributes are read-only but
    for `updates` and `sum_statistics`.

    Attributes:
        plan: buffers and stages.
        context: what the stages read in the next step.
        parameters, gradients: arrays by name in canonical layout; reading returns read-only copies.
            Frozen parameters have no gradient and no state.
        state: optimizer state by name ("momentum", …), each like `parameters`.
        statistics: arrays by name that forward passes of training update, such as running means;
            each process has its own.
        sum_statistics: adds statistics of a minibatch over the ranks, see `SumStatistics`.
        arrays: the flat arrays that hold them.
        flat_parameters, flat_gradients, flat_state: the same arrays; of the gradients, slot 0. A
            replica for inference whose `flat_parameters` or `arrays` were read computes everything
            that depends on the parameters in each pass; `parameters.write_flat` avoids this.
        owns_parameters: True if this process sets the parameters: `FlatArrays.is_owner`.
        sample_weights: (N,), factors of the losses of the loaded samples in training; None unless
            the plan is weighted.
        gradient_slots: (`Plan.gradient_slots`, `FlatLayout.gradient_pitch`), the gradients that
            this rank contributes to the sum over ranks; `flat_gradients` is the begin of the first,
            `FlatLayout.gradient_size`, and receives the sum.
        slot_sums: (`Plan.gradient_slots`, `SUMS`), the loss sums in `gradient_slots`.
        memory: where the arrays are allocated.
        accumulation: adds the gradients of several passes; None if an update has one pass.
        stages: every stage except load and update, with its kernel, in order.
        updates: number of updates made; the bias correction of Adam reads it.
        notes: which algorithm computes each stage, by stage name, if the backend reports it.

    Examples:
        >>> import numpy as np
        >>> from dptrain import make_replica
        >>> from dptrain.network import Dense, Network
        >>> replica = make_replica(Network((4,), [Dense(3)]), batch_size=2)
        >>> x, y = np.ones((2, 4), np.float32), np.array([0, 2])
        >>> losses = []
        >>> for _ in range(3):
        ...     losses.append(replica.forward_backward(x, y))
        ...     replica.update(learning_rate=0.1)
        >>> losses[0] > losses[1] > losses[2]
        True
    """

    _instead_of_pickle = "make another with make_replica, and assign its parameters"

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        *,
        seed: int,
        memory: Memory = HOST,
        arrays: FlatArrays | None = None,
    ) -> None:
        self._turn = threading.RLock()
        self.backend, self.plan, self.memory = backend, plan, memory
        shards = plan.setting.shards
        self.context = Context(seed=seed, bounds=np.zeros(max(shards, 1) + 1, np.int64))
        self._merges = plan.merges
        self.updates = 0
        self.sum_statistics: SumStatistics = sum_of_one_rank(plan)
        self.notes: dict[str, str] = {}
        layout, slots = plan.trained, plan.gradient_slots
        if arrays is not None:
            self.context.parameters_version = UNKNOWN_VERSION
        self._arrays = arrays = FlatArrays.allocate(plan, memory) if arrays is None else arrays
        self.flat_state, self.owns_parameters = arrays.state, arrays.is_owner
        self.gradient_slots = arrays.gradients
        self.flat_gradients = arrays.gradients[0][: layout.gradient_size]
        self.parameters = NamedArrays(plan.layout, arrays.parameters, memory, self._count_write)
        self.gradients = NamedArrays(layout, self.flat_gradients, memory)
        self.state = {
            name: NamedArrays(layout, flat, memory, self._count_write)
            for name, flat in self.flat_state.items()
        }
        self._flat_statistics = memory.zeros((max(plan.statistics.size, 1),), plan.dtype)
        self.statistics = NamedArrays(
            plan.statistics, self._flat_statistics, memory, self._count_write
        )
        for slot in plan.statistics.slots:
            assert isinstance(slot.parameter.init, Constant)
            values = np.full(slot.parameter.shape, slot.parameter.init.value, plan.dtype)
            self.statistics[slot.name] = values
        if plan.training:
            self.slot_sums = self.gradient_slots[:, layout.size : layout.size + len(SUMS)]
            self._loss_sums = self.flat_gradients[layout.size : layout.size + len(SUMS)]
        else:
            sums = memory.zeros((slots * len(SUMS),), plan.dtype)
            self._loss_sums, self.slot_sums = sums[: len(SUMS)], sums.reshape(slots, len(SUMS))
        self._arena = memory.zeros((max(plan.arena_bytes, 1),), "uint8")
        self._views = {name: self._view(name) for name in plan.buffers}
        # `load` looks up as little as possible: after a step that has filled the caches, a reshape
        # of a few numbers takes 15 µs instead of 1.
        self._order = np.arange(plan.batch_size, dtype=np.int64)
        self._input_shape = tuple(plan.network.input_shape)
        self._input_view, self._target = self._views[plan.resolve(INPUT)], self._views[TARGET]
        maps = plan.network.nodes[-1].output_maps[1:] != (1, 1)
        self._reorders_targets = backend.channels_last and maps
        self._sample_weights = self._new_sample_weights()
        self._update_kernels: dict[tuple[int, int], Kernel] = {}
        self._clippings: dict[tuple[int, int], Clipping] = {}
        self._scalings: dict[tuple[int, int], LayerScaling] = {}
        self.stages = self._bind()
        self.accumulation = Accumulation(self) if plan.passes > 1 else None
        if plan.training:
            self.update_kernel()
        if arrays.squares is not None:
            everything = slice(0, layout.size)
            if plan.optimizer.clip_norm is not None:
                self._clipping(everything)
            if plan.optimizer.scales_layers:
                self._scaling(everything)

    _is_closed = False

    def _new_sample_weights(self) -> NDArray[Any] | None:
        """Return memory for the weights of a minibatch."""
        plan = self.plan
        return self.memory.zeros((plan.batch_size,), plan.dtype) if plan.setting.weighted else None

    _READ_ONLY: ClassVar[frozenset[str]] = frozenset({
        "arrays", "backend", "flat_gradients", "flat_parameters", "flat_state", "gradient_slots",
        "gradients", "memory", "notes", "owns_parameters", "parameters", "plan", "slot_sums",
        "state", "statistics", "thread_pool",
    })  # fmt: skip
    """Attributes that nothing may set after the replica was made."""

    def _may_set(self, name: str) -> bool:
        known = name.startswith("_") or hasattr(self, name)
        return known and name not in self._READ_ONLY

    def _advice(self, name: str, value: Any) -> str | None:
        if name in ("parameters", "statistics", "state", "gradients"):
            return f"assign single arrays: replica.{name}['NAME'] = array"
        if name in ("learning_rate", "lr"):
            return "the learning rate is an argument: replica.update(learning_rate=0.1)"
        return None

    @property
    def sample_weights(self) -> NDArray[Any] | None:
        return self._sample_weights

    @property
    def arrays(self) -> FlatArrays:
        self.context.parameters_version = UNKNOWN_VERSION
        return self._arrays

    @property
    def flat_parameters(self) -> NDArray[Any]:
        self.context.parameters_version = UNKNOWN_VERSION
        return self._arrays.parameters

    def _count_write(self) -> None:
        self.context.num_writes += 1
        if self.context.parameters_version != UNKNOWN_VERSION:
            self.context.parameters_version += 1

    def _view(self, name: str) -> NDArray[Any]:
        buffer = self.plan.buffers[name]
        shape = buffer.shape
        if self.backend.channels_last and len(shape) == 4:
            shape = (shape[0], shape[2], shape[3], shape[1])
        span = slice(buffer.offset, buffer.offset + buffer.nbytes)
        return self._arena[span].view(buffer.dtype).reshape(shape)

    def _tensor_view(self, tensor: str, buffer: str) -> NDArray[Any]:
        """Return the memory of a tensor in its shape: `Reshape` changes that of its input."""
        view, spec = self._views[buffer], self.plan.shapes.get(tensor)
        if spec is None:
            return view
        if self.backend.channels_last:
            spec = spec[1], spec[2], spec[0]
        return view if view.shape[1:] == spec else view.reshape((len(view), *spec))

    def _group_arrays(self, group: Group, *, backward: bool = False) -> dict[str, NDArray[Any]]:
        """Return the arrays of a group; those of its backward pass differ with recomputation."""
        needs = group_needs(self.backend, group, self.plan.setting)
        locals_ = {*group.tensors, *needs.buffers}
        arrays: dict[str, NDArray[Any]] = {}
        if self.backend.supports_shards and self.plan.training:
            arrays["bounds"], arrays["merges"] = self.context.bounds, self._merges
            arrays["gradient_slots"] = self.gradient_slots
        name_of = self.plan.backward_tensor_name if backward else self.plan.tensor_name
        for local in sorted(locals_):
            name = name_of(group, local)
            if name in self._views:
                arrays[local] = self._tensor_view(group.tensors.get(local, name), name)
        arrays.update(self._statistics_arrays(group))
        if group.normalization is not None:
            for parameter in group.normalization.parameters:
                short = parameter.name.rpartition(".")[2]
                arrays[f"normalized_{short}"] = self._parameter(parameter.name)
        single = sum(1 for node in group.nodes if node.parameters) == 1
        for parameter in group.parameters:
            layout = self.plan.layout
            slot = layout[parameter.name]
            owner, _, short = parameter.name.rpartition(".")
            prefix = "" if single else f"{owner}."
            arrays[f"{prefix}{short}"] = self._parameter(parameter.name)
            if self.plan.training and layout.has_gradient(slot):
                start, flat = layout.gradient_start(slot), self.gradient_slots.reshape(-1)
                gradient = flat[start : start + parameter.size].reshape(slot.storage.shape)
                arrays[f"{prefix}d{short}"] = gradient
                if self.backend.supports_shards:
                    arrays[f"{prefix}d{short}_slots"] = flat[start:]
        return arrays

    def _parameter(self, name: str) -> NDArray[Any]:
        """Return a parameter as stored."""
        slot = self.plan.layout[name]
        found: NDArray[Any] = self._arrays.parameters[slot.start : slot.stop]
        return found.reshape(slot.storage.shape)

    def _statistics_arrays(self, group: Group) -> dict[str, NDArray[Any]]:
        """Return the arrays that training updates without gradients, by local name."""
        nodes = [node for node in group.nodes if node.statistics]
        arrays = {}
        for node in nodes:
            for statistic in node.statistics:
                slot = self.plan.statistics[statistic.name]
                owner, _, short = statistic.name.rpartition(".")
                local = short if len(nodes) == 1 else f"{owner}.{short}"
                arrays[local] = self._flat_statistics[slot.start : slot.stop]
        return arrays

    def _bind(self) -> list[tuple[Stage, Kernel]]:
        """Return every stage except load and update with its kernel, in order."""
        plan = self.plan
        kernels: dict[tuple[str, Phase], Kernel] = {}
        for group in plan.groups:
            bound = self._bind_group(group)
            kernels.update({(group.name, phase): kernel for phase, kernel in bound.items()})
        for name, additions in plan.additions.items():
            kernels[name, Phase.BACKWARD_ADD] = self.backend.bind_additions(
                self,
                [
                    GradientAddition(
                        self._tensor_view(a.target, plan.resolve(a.target)),
                        self._tensor_view(a.source, plan.resolve(a.source)),
                        a.copies,
                    )
                    for a in additions
                ],
            )
        last = plan.groups[-1].tail.name
        rows = (plan.batch_size, plan.network.num_outputs)
        gradient = self._views[plan.resolve(f"d{last}")].reshape(rows) if plan.training else None
        kernels["loss", Phase.LOSS] = self.backend.bind_loss(
            self,
            self._views[plan.resolve(last)].reshape(rows),
            self._views[TARGET],
            gradient,
            self._loss_sums,
        )
        outside = (Phase.LOAD, Phase.UPDATE)
        return [(s, kernels[s.group, s.phase]) for s in plan.stages if s.phase not in outside]

    def _bind_group(self, group: Group) -> Mapping[Phase, Kernel]:
        """Return the kernel of each stage that the plan has for a group, but for additions."""
        phases = [stage.phase for stage in self.plan.stages if stage.group == group.name]
        phases = [phase for phase in phases if phase is not Phase.BACKWARD_ADD]
        if not self.plan.recomputed:
            return self._bind_phases(group, phases)
        # The backward pass reads recomputed buffers.
        backward = [phase for phase in phases if phase not in FORWARD_PHASES]
        bound = dict(self._bind_phases(group, [each for each in phases if each not in backward]))
        again = Phase.BACKWARD_RECOMPUTE
        replaced = [Phase.FORWARD if phase is again else phase for phase in backward]
        for phase, kernel in self._bind_phases(group, replaced, backward=True).items():
            bound[again if phase is Phase.FORWARD else phase] = kernel
        return bound

    def _bind_phases(
        self, group: Group, phases: Collection[Phase], *, backward: bool = False
    ) -> Mapping[Phase, Kernel]:
        """Return the kernels of phases of a group, bound to the arrays of one direction."""
        if not phases:
            return {}
        arrays = self._group_arrays(group, backward=backward)
        return self.backend.bind(group, phases, arrays, self)

    def close(self) -> None:
        """End the threads and free the memory; a closed replica cannot be used.

        Arrays that the caller has received remain. The garbage collector does the same for a
        replica that nothing refers to, but later: a replica and its kernels refer to each other.
        """
        with self._turn:
            if not self._is_closed:
                self.memory.synchronize()
                turn = self._turn
                vars(self).clear()
                self._turn, self._is_closed = turn, True
                gc.collect()  # Kernels of a stage refer to each other.

    def __getattr__(self, name: str) -> Any:
        if vars(self).get("_is_closed"):
            raise UserError(
                f"this replica was closed, so that it has no '{name}'; make another one"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    def __repr__(self) -> str:
        if self._is_closed:
            return "<Replica, closed>"
        plan = self.plan
        purpose = "training" if plan.training else "inference"
        return (
            f"<Replica of {plan.network.name}: {self.backend.name} {plan.precision}, {purpose}, "
            f"batches of up to {plan.batch_size} samples, {self.updates} updates>"
        )

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Allocated bytes by purpose: those of the plan and further ones of the backend."""
        return dict(self.plan.memory)

    # A training step.

    def load(self, batch: Batch, *, training: bool = True, stop: bool = False) -> None:
        """Copy a minibatch in, and set the context of the next step.

        Args:
            batch: at most the plan's batch size.
            training: False turns dropout off, and no gradients are computed.
            stop: True if this rank requests a stop.

        Raises:
            UserError: wrong shapes, or more samples than the plan's batch size.
        """
        y = self._set_context(batch, training=training, stop=stop)
        if training:
            self._loss_sums[STOP] = stop
        if y is not None:
            self._target[: len(y)] = y
        if self._sample_weights is not None:
            self._sample_weights[: self.context.n] = weights_of(batch)
        if batch.crop_windows is None:
            assert batch.x is not None
            self._load_input(batch.x)
        else:
            self._load_crop_windows(batch)

    def _set_context(self, batch: Batch, *, training: bool, stop: bool) -> NDArray[Any] | None:
        """Check a minibatch, set the context, and return the targets as they are stored."""
        # Few calls: after a step that has filled the caches, each takes microseconds.
        x, y = batch.x, batch.y
        if batch.crop_windows is not None:
            n, x = batch.size, None
        else:
            assert x is not None
            n = len(x)
        if n > len(self._order):
            raise UserError(
                f"the batch has {n} samples; this replica was made for at most {len(self._order)}"
            )
        if x is not None and x.shape[1:] != self._input_shape:
            expected = str(self._input_shape)[1:-1]
            raise UserError(f"x has shape {x.shape}; this network expects ({n}, {expected})")
        if y is not None and len(y) != n:
            raise UserError(f"x has {n} samples, but y has targets for {len(y)}")
        if batch.weights is not None:
            self._check_weights(batch.weights, n)
        context = self.context
        context.n, context.training, context.stop = n, training, stop
        context.step, context.samples = batch.step, batch.samples
        context.scale = 1.0 / max(batch.global_count, 1)
        self._set_bounds(n, batch.global_count, training)
        if y is not None:
            shape = (n, *self._target.shape[1:])
            y = y if y.shape == shape else y.reshape(shape)
            if self._reorders_targets:
                y = channels_last_targets(self.plan.network, y)
        return y

    def _check_weights(self, weights: NDArray[Any], n: int) -> None:
        if self.sample_weights is None:
            raise UserError("this replica was made without weighted=True and weighs no samples")
        if weights.shape != (n,):
            raise UserError(f"weights have shape {weights.shape}; expected one per sample, ({n},)")

    def _set_bounds(self, n: int, global_count: int, training: bool) -> None:
        """Set the bounds of micro-shards; outside training all samples are in the first one."""
        bounds, micro_shards = self.context.bounds, self.plan.micro_shards
        if micro_shards is None or not training:
            if bounds[-1] != n or len(bounds) > 2:  # A comparison takes less time.
                bounds[0], bounds[1:] = 0, n
            return
        micro_shards = micro_shards.of_pass(self.context.part)
        offsets = micro_shards.offsets(global_count)
        if offsets[-1] != n:
            raise UserError(
                f"the batch has {n} samples; micro-shards {micro_shards.start} to "
                f"{micro_shards.stop - 1} of {micro_shards.total} have {offsets[-1]} of a "
                f"minibatch of {global_count}"
            )
        bounds[:] = offsets

    def _load_crop_windows(self, batch: Batch) -> None:
        """Copy parts of images in, by default of the cached ones, see `CropWindowReplica`."""
        raise NotImplementedError

    def _load_input(self, x: NDArray[Any]) -> None:
        target, n = self._input_view, len(x)
        if not self.backend.channels_last:
            target[:n] = x.reshape((n, *target.shape[1:]))
        elif x.ndim == 4:
            target[:n] = x.transpose(0, 2, 3, 1)
        else:
            target[:n, 0, 0] = x

    def run(self, listener: Listener | None = None) -> None:
        """Run forward, loss and backward for the loaded minibatch.

        Args:
            listener: called after each stage.
        """
        context = self.context
        for stage, kernel in self.stages:
            kernel(context)
            if listener is not None:
                listener(stage.index)

    def run_timed(self) -> Callable[[], list[int]]:
        """Run forward, loss and backward for the loaded minibatch.

        Returns:
            A function that returns the times at which the stages ended, in nanoseconds of
            `time.perf_counter_ns`. It may be called after later steps.
        """
        context, ends = self.context, []
        for _, kernel in self.stages:
            kernel(context)
            ends.append(perf_counter_ns())
        return lambda: ends

    def run_forward(self, *, loss: bool) -> None:
        """Run the forward stages and, if `loss`, the loss; gradients remain unchanged."""
        context = self.context
        for stage, kernel in self.stages:
            if stage.phase is Phase.FORWARD or (loss and stage.phase is Phase.LOSS):
                kernel(context)

    @one_thread_at_a_time
    def forward_backward(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        samples: NDArray[np.int64] | None = None,
        global_count: int | None = None,
        step: int | None = None,
        stop: bool = False,
        weights: ArrayLike | None = None,
    ) -> float:
        """Compute the loss and the gradients of a minibatch.

        Args:
            x: (n, C, H, W) or (n, F), n at most the plan's batch size.
            y: targets: class indices (n,), one-hot rows, or values (n, F).
            samples: int64 (n,), identity of each sample, which selects its dropout mask;
                0 … n − 1 by default.
            global_count: samples of the global minibatch, if this is a shard of one: loss and
                gradients are divided by it; n by default.
            step: number of the step, which selects the dropout masks. The default is the number
                of updates made, so that a loop of `forward_backward` and `update` uses steps
                0, 1, 2, ….
            stop: True if this rank requests a stop; summed over ranks with the loss.
            weights: (n,), factors of the losses of the samples, for a replica that was made with
                `weighted`; 1 by default. Loss and gradients are divided by `global_count`, not by
                the sum of the weights.

        Returns:
            The sum of the losses of this minibatch over `global_count`: its mean by default.

        Raises:
            UserError: wrong shapes, invalid targets, or a replica made without training.
        """
        if not self.plan.training:
            raise UserError("this replica was made with training=False and has no gradients")
        array = np.asarray(x)
        whole = self._whole_batch(array, checked_targets(self.plan.network, y))
        batch = Batch(
            whole.step if step is None else step,
            whole.epoch,
            array,
            whole.y,
            whole.samples if samples is None else samples,
            whole.global_count if global_count is None else global_count,
            weights=None if weights is None else np.asarray(weights, np.float32),
        )
        self.load(batch, stop=stop)
        self.run()
        return self.loss_sums()[0]

    def _whole_batch(self, x: NDArray[Any], y: NDArray[Any] | None = None) -> Batch:
        """Return the minibatch of the next update, whose samples are 0 … n − 1."""
        n = len(x)
        return Batch(self.updates, 0, x, y, self._order[:n], n)

    def loss_sums(self) -> list[float]:
        """Return the loss, the number of correct predictions and the stop request of the step.

        They are this rank's until a gradient sum has summed them over the ranks.
        """
        sums: list[float] = self.memory.download(self._loss_sums).tolist()
        return sums

    @one_thread_at_a_time
    def update(self, learning_rate: float) -> None:
        """Apply the update rule to all parameters.

        Args:
            learning_rate: of this update.
        """
        everything = slice(0, self.plan.trained.size)
        number = self.updates + 1
        if self._arrays.squares is not None:
            self.apply_norms([everything], number=number)
        self.update_slice(everything, learning_rate, number=number)

    def apply_norms(
        self, slices: Sequence[slice], *, number: int, share: Callable[[], None] = lambda: None
    ) -> None:
        """Clip the gradient by its norm, and scale layers by theirs, as the update rule requires.

        Args:
            slices: elements that this replica updates.
            number: of the update, from 1.
            share: waits until all ranks that share the update have called it.
        """
        squares, rule = self._arrays.squares, self.plan.optimizer
        assert squares is not None, "the rule uses no norm, or a device computes it"
        if rule.clip_norm is not None:
            for elements in slices:
                self._clipping(elements).add_squares()
            share()
            factor = clip_factor(squares[0], rule.clip_norm)
            if factor != 1.0:  # Also if it is NaN.
                for elements in slices:
                    self._clipping(elements).scale(factor)
        if rule.scales_layers:
            for elements in slices:
                self._scaling(elements).measure(number)
            share()
            ratios = layer_ratios(self.plan, squares[-2:])
            for elements in slices:
                self._scaling(elements).scale(ratios)

    def _scaling(self, elements: slice) -> LayerScaling:
        """Return the kernels that scale `elements` of the flat gradient by norms of layers."""
        key = elements.start, elements.stop
        if key not in self._scalings:
            squares = self._arrays.squares
            assert squares is not None
            rows = slice(elements.start // ALIGNMENT, elements.stop // ALIGNMENT)
            self._scalings[key] = self.backend.bind_scaling(
                self, elements, [row[rows] for row in squares[-2:]]
            )
        return self._scalings[key]

    def _clipping(self, elements: slice) -> Clipping:
        """Return the kernels that clip `elements` of the flat gradient."""
        key = elements.start, elements.stop
        if key not in self._clippings:
            squares = self._arrays.squares
            assert squares is not None, "the plan clips no gradients, or a device does"
            rows = slice(elements.start // ALIGNMENT, elements.stop // ALIGNMENT)
            self._clippings[key] = self.backend.bind_clipping(
                self, self.flat_gradients[elements], squares[0, rows]
            )
        return self._clippings[key]

    def update_slice(self, elements: slice, learning_rate: float, *, number: int) -> None:
        """Apply the update rule to some elements of the flat arrays.

        Args:
            elements: of the flat arrays; start and stop are multiples of 16.
            learning_rate: of this update.
            number: number of the update, from 1; the same for all slices of a step.
        """
        self.updates = number
        self.context.learning_rate = learning_rate
        self.update_kernel(elements)(self.context)

    def update_kernel(self, elements: slice | None = None) -> Kernel:
        """Return the kernel that applies the update rule to `elements`, by default to all."""
        if not self.plan.training:
            raise UserError("this replica was made with training=False and cannot be updated")
        key = (0, self.plan.trained.size) if elements is None else (elements.start, elements.stop)
        kernel = self._update_kernels.get(key)
        if kernel is None:
            kernel = self.backend.bind_update(self, slice(*key))
            if self.plan.optimizer.average_decay is not None:
                kernel = _sequence(kernel, self.backend.bind_average(self, slice(*key)))
            self._update_kernels[key] = kernel
        return kernel

    # Inference.

    def output(self) -> NDArray[Any]:
        """Return the output (n, F) for the loaded minibatch, before softmax or sigmoid."""
        tail = self.plan.groups[-1].tail
        view = self._views[self.plan.resolve(tail.name)]
        n = self.context.n
        rows = as_numbers(self.memory.download(view[:n]))
        if self.backend.channels_last:
            rows = rows.transpose(0, 3, 1, 2)
        return np.array(rows).reshape((n, *tail.output_shape))

    @one_thread_at_a_time
    def forward(self, x: ArrayLike) -> NDArray[Any]:
        """Compute outputs before softmax or sigmoid, without dropout.

        Args:
            x: (N, C, H, W) or (N, F), any number of samples.

        Returns:
            (N, F).
        """
        array = np.asarray(x)
        chunks = []
        for start in range(0, len(array), self.plan.batch_size):
            chunk = array[start : start + self.plan.batch_size]
            self.load(self._whole_batch(chunk), training=False)
            self.run_forward(loss=False)
            chunks.append(self.output())
        if not chunks:
            return np.zeros((0, *self.plan.network.output_shape), self.plan.dtype)
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def predict(self, x: ArrayLike) -> NDArray[Any]:
        """Compute predictions: probabilities after softmax or sigmoid, or values.

        Args:
            x: (N, C, H, W) or (N, F), any number of samples.

        Returns:
            (N, F).
        """
        z = self.forward(x)
        kind = self.plan.network.loss.targets
        if kind == "classes":
            return softmax(z)
        return sigmoid(z) if kind == "binary" else z

    @one_thread_at_a_time
    def evaluate(
        self, x: ArrayLike, y: ArrayLike, *, crop_windows: NDArray[np.int64] | None = None
    ) -> tuple[float, int]:
        """Compute the sum of the losses and the number of correct predictions.

        Args:
            x: (N, C, H, W) or (N, F), any number of samples; with `crop_windows`, images of which
                the inputs are parts, at most the plan's batch size.
            y: targets, as for `forward_backward`.
            crop_windows: int64 (N, 4), see `CropWindowReplica`.

        Returns:
            (loss sum, correct predictions).
        """
        array, targets = np.asarray(x), checked_targets(self.plan.network, y)
        spans = [
            slice(start, start + self.plan.batch_size)
            for start in range(0, len(array), self.plan.batch_size)
        ]
        return self.score(
            lambda: (
                self._whole_batch(array[span], targets[span])._replace(crop_windows=crop_windows)
                for span in spans
            )
        )

    @one_thread_at_a_time
    def score(
        self,
        batches: Callable[[], Iterable[Batch]],
        collect: Callable[[Batch], None] | None = None,
        *,
        key: Hashable = None,
    ) -> tuple[float, int]:
        """Compute what `evaluate` does for minibatches.

        Args:
            batches: returns them; `global_count` is ignored. Their arrays may be reused for the
                next minibatch.
            collect: called after each minibatch, for example to read `output`.
            key: identifies minibatches of images that the replica keeps and that are scored again:
                they are the same for the same key. None for others.

        Returns:
            (loss sum, correct predictions).
        """
        saved = np.array(self.memory.download(self._loss_sums))
        loss, correct = 0.0, 0
        for batch in batches():
            self.load(batch._replace(global_count=1), training=False)
            self.run_forward(loss=True)
            sums = self.loss_sums()
            loss += sums[LOSS]
            correct += round(sums[CORRECT])
            if collect is not None:
                collect(batch)
        self.memory.upload(self._loss_sums, saved)
        return loss, correct

    @one_thread_at_a_time
    def evaluate_samples(
        self, x: ArrayLike, y: ArrayLike
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Compute the loss of each sample in float64, and whether its prediction is correct.

        Args:
            x: (N, C, H, W) or (N, F), any number of samples.
            y: targets, as for `forward_backward`.

        Returns:
            float64 (N,) and bool (N,).
        """
        network = self.plan.network
        return sample_losses(network.loss, self.forward(x), checked_targets(network, y))

    def first_non_finite(self) -> str | None:
        """Run forward again and name the first value that is not finite.

        Returns:
            The input, a parameter or the output of a group, as text; None if all are finite.
        """
        n = self.context.n

        def finite(name: str) -> bool:
            values = self.memory.download(self._views[self.plan.resolve(name)][:n])
            return bool(np.isfinite(as_numbers(values)).all())

        if not finite(INPUT):
            return "the input"
        # Scratch buffers, which a stage writes as well, may hold any bytes.
        outputs = {g.name: g.tail.name for g in self.plan.groups}
        for stage, kernel in self.stages:
            if stage.phase is not Phase.FORWARD:
                continue
            bad = [p for p in stage.parameters if not np.isfinite(self.parameters[p]).all()]
            if bad:
                return f"parameter {bad[0]}"
            kernel(self.context)
            if not finite(outputs[stage.group]):
                return f"the output of {stage.group}"
        return None


def weights_of(batch: Batch) -> Any:
    """Return the weights of a minibatch, or their common value."""
    return 1.0 if batch.weights is None else batch.weights


def _sequence(first: Kernel, second: Kernel) -> Kernel:
    """Return the kernel that runs two kernels one after the other."""

    def run(context: Context) -> None:
        first(context)
        second(context)

    return run


class Segment(NamedTuple):
    """Elements start … stop, which are updated alike.

    Attributes:
        start, stop: the elements.
        decay: their weight decay.
        rate_factor: the learning rate is multiplied by it.
    """

    start: int
    stop: int
    decay: float
    rate_factor: float


def segments(plan: Plan, elements: slice) -> Sequence[Segment]:
    """Return runs of elements that share a weight decay and a factor of the learning rate.

    Args:
        plan: has the slots of the flat arrays.
        elements: of the flat arrays; start and stop are multiples of 16.

    Returns:
        The runs; start and stop count from `elements.start`.
    """
    runs: list[Segment] = []
    for _, start, stop, own, factor in slot_ranges(plan, elements):
        # Rules that scale layers have added it to the gradient.
        decay = 0.0 if plan.optimizer.scales_layers else own
        if runs and runs[-1][2:] == (decay, factor):
            start = runs.pop().start
        runs.append(Segment(start, stop, decay, factor))
    return runs


class CropWindowReplica(Replica, ABC):
    """A replica that keeps the images of a data set, and loads parts of them as minibatches.

    A part is described by a crop window, int64 (4,): index of the image, first row and first column
    (outside of the image are zeros), and 1 if it is mirrored; and by a recolouring, float32 (2,):
    factor of the distances from the mean of each channel, and the number that is added afterwards.
    Crop windows may have four more numbers: first row, first column, and the row and the column
    after the last ones of a part of the input that becomes 0 in the end. Then eight more may
    describe an affine map (`dptrain.data.loading.geometry.fixed_point`), which replaces the first
    row, the first column and the mirror. Recolourings may have nine more numbers, rows of a matrix
    that is multiplied by the three channels of each pixel at last. After these changes, parts may
    be mixed in pairs (`Batch.mixings`).

    Class attributes:
        resizes_images: True if `PixelFormat.size` is supported. Rows and columns of crop windows
            are then those of the resized image.
        mixes_images: True if `Batch.mixings` is supported.
    """

    resizes_images: ClassVar[bool] = False
    mixes_images: ClassVar[bool] = False

    @abstractmethod
    def cache_images(self, images: Any, pixels: PixelFormat = INPUTS) -> None:
        """Keep a data set, so that minibatches need crop windows only.

        Args:
            images: (M, C, H', W'), or (M, F), of the type of `pixels`: an array, which a backend on
                the host keeps, or for a device anything with ``shape`` and slices like an array's.
            pixels: conversion to inputs. Pixels outside of an image are zero after it.
        """

    def prepare_images(self, shape: Shape, pixels: PixelFormat) -> bool:
        """Prepare for minibatches that consist of images and crop windows.

        Args:
            shape: (C, H', W') or (F,) of an image.
            pixels: their type.

        Returns:
            False if images of this size do not fit where minibatches are staged.
        """
        self.cache_images(np.zeros((0, *shape), pixels.dtype), pixels)
        return True

    @property
    @abstractmethod
    def image_format(self) -> tuple[Shape, PixelFormat] | None:
        """Shape and type of the images that can be loaded; None if nothing was prepared."""

    def accepts_images(self, shape: Shape, pixels: PixelFormat) -> bool:
        """Return True if minibatches can consist of such images and crop windows.

        Args:
            shape, pixels: as for `prepare_images`, which is called if nothing was prepared.
        """
        if self.image_format is None:
            return self.prepare_images(shape, pixels)
        return self.image_format == (shape, pixels)

    @abstractmethod
    def share_cached_images(self, other: Replica) -> None:
        """Use the images that `other`, a replica on the same device, has cached."""


def group_outputs(replica: Replica, x: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Compute outputs without dropout, and yield those of each group of layers.

    Args:
        replica: computes them; its buffers change.
        x: (n, C, H, W) or (n, F), n at most the plan's batch size.

    Yields:
        The name of a group and its output, (n, …) in the order of the backend's memory.
    """
    replica.load(Batch.of(x), training=False)
    plan = replica.plan
    outputs = {group.name: group.tail.name for group in plan.groups}
    for stage, kernel in replica.stages:
        if stage.phase is Phase.FORWARD:
            kernel(replica.context)
            view = replica._views[plan.resolve(outputs[stage.group])][: len(x)]
            yield stage.group, as_numbers(replica.memory.download(view))
