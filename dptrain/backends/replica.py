"""A network in memory, ready to step, the same for every backend; and what its kernels are told.

Memory for a plan, stages that a backend has bound to it, and the calls that users and the training
loop make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.backends.memory import HOST, Memory, NamedArrays, as_numbers
from dptrain.backends.targets import channels_last_targets, checked_targets
from dptrain.errors import UserError
from dptrain.plan.flat import STOP, SUMS
from dptrain.plan.lowering import (
    Group,
    Phase,
)
from dptrain.plan.plan import INPUT, TARGET, Plan, Stage

if TYPE_CHECKING:
    from dptrain.backends.base import Backend


@dataclass
class Context:
    """What changes from step to step, read by every operation.

    Attributes:
        seed: of the run; key of the dropout masks.
        n: samples in use, at most the plan's batch size; may be 0.
        training: False turns dropout off and keeps the loss from writing gradients.
        step: number of the training step; key of the dropout masks.
        samples: int64 (n,), what identifies each sample in this step; key of the dropout masks.
        scale: 1 / number of samples of the global minibatch.
        learning_rate: of the coming update.
        stop: whether this rank wishes to stop.
    """

    seed: int
    n: int = 0
    training: bool = True
    step: int = 0
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    scale: float = 1.0
    learning_rate: float = 0.0
    stop: bool = False


Kernel = Callable[[Context], None]
"""A stage bound to memory: computes for the first `Context.n` samples."""

Arrays = Mapping[str, NDArray[Any]]
"""Memory of one group by local name: ``x``, ``y``, ``dx``, ``dy``, its own buffers, and for each
parameter ``weight``, ``bias`` and their gradients ``dweight``, ``dbias``, in storage layout. With
several layers that have parameters in one group the names carry the layer: ``dense2.weight``."""

Listener = Callable[[int], None]
"""Called with a stage's index when that stage has run (on a GPU: has been enqueued)."""


class Replica:
    """A network in memory, ready to step. Made by `dptrain.make_replica`.

    Attributes:
        plan: what was planned.
        context: what the next step reads.
        parameters, gradients: arrays by name in canonical layout.
        state: optimizer state by its name, each like `parameters`.
        flat_parameters, flat_gradients: the arrays behind them (`FlatLayout`).
        memory: where all arrays lie but the following two.
        host_gradients: the flat gradient as ranks sum it: `flat_gradients` itself where that lies
            in host memory, else a copy that `fetch_gradients` fills.
        sums: of the loss and the number of correct answers, and the wish to stop; the end of
            `host_gradients`.
        updates: number of updates made; Adam's bias correction reads it.
        ahead: steps that may be under way when the next one is begun; 0 where stages are done when
            they return.
        notes: what a backend has to say of how stages are computed, by their names.
    """

    def __init__(self, backend: Backend, plan: Plan, *, seed: int, memory: Memory = HOST) -> None:
        self.backend, self.plan, self.memory = backend, plan, memory
        self.context = Context(seed=seed)
        self.updates = 0
        self.ahead = int(memory.asynchronous)
        self.notes: dict[str, str] = {}
        layout, dtype = plan.layout, plan.dtype
        self.flat_parameters = memory.zeros((layout.size,), dtype)
        self.flat_gradients = memory.zeros((layout.gradient_size if plan.training else 0,), dtype)
        names = plan.optimizer.state if plan.training else ()
        self.flat_state = {name: memory.zeros((layout.size,), dtype) for name in names}
        self.parameters = NamedArrays(layout, self.flat_parameters, memory)
        self.gradients = NamedArrays(layout, self.flat_gradients, memory)
        self.state = {
            name: NamedArrays(layout, flat, memory) for name, flat in self.flat_state.items()
        }
        self.host_gradients = memory.host_copy(self.flat_gradients)
        shared = slice(layout.size, layout.size + len(SUMS))
        if plan.training:
            self._sums, self.sums = self.flat_gradients[shared], self.host_gradients[shared]
        else:
            self._sums = memory.zeros((len(SUMS),), dtype)
            self.sums = memory.download(self._sums)
        self._arena = memory.zeros((max(plan.arena_bytes, 1),), "uint8")
        self._views = {name: self._view(name) for name in plan.buffers}
        # `load` looks up little: behind a step that has filled the caches, code and objects come
        # from far away, and a reshape of a few numbers takes 15 µs instead of 1.
        self._order = np.arange(plan.batch_size, dtype=np.int64)
        self._input_shape = tuple(plan.network.input_shape)
        self._target = self._views[TARGET]
        maps = plan.network.nodes[-1].output_maps[1:] != (1, 1)
        self._reorders = backend.channels_last and maps
        self.stages = self._bind()
        everything = slice(0, layout.size)
        self._update = backend.bind_update(self, everything) if plan.training else None

    def _view(self, name: str) -> NDArray[Any]:
        buffer = self.plan.buffers[name]
        shape = buffer.shape
        if self.backend.channels_last and len(shape) == 4:
            shape = (shape[0], shape[2], shape[3], shape[1])
        span = slice(buffer.offset, buffer.offset + buffer.nbytes)
        return self._arena[span].view(buffer.dtype).reshape(shape)

    def _group_arrays(self, group: Group) -> dict[str, NDArray[Any]]:
        needs = self.backend.needs(group, self.plan.setting)
        locals_ = {"x", "y", "dx", "dy", *needs.buffers}
        arrays = {}
        for local in sorted(locals_):
            name = self.plan.tensor_name(group, local)
            if name in self._views:
                arrays[local] = self._views[name]
        single = sum(1 for node in group.nodes if node.parameters) == 1
        for parameter in group.parameters:
            slot = self.plan.layout[parameter.name]
            owner, _, short = parameter.name.rpartition(".")
            prefix = "" if single else f"{owner}."
            span = slice(slot.start, slot.stop)
            arrays[f"{prefix}{short}"] = self.flat_parameters[span].reshape(slot.storage.shape)
            if self.plan.training:
                gradient = self.flat_gradients[span].reshape(slot.storage.shape)
                arrays[f"{prefix}d{short}"] = gradient
        return arrays

    def _bind(self) -> list[tuple[Stage, Kernel]]:
        """Every stage but load and update with its kernel, in order."""
        plan = self.plan
        kernels: dict[tuple[str, Phase], Kernel] = {}
        for group in plan.groups:
            bound = self.backend.bind(group, self._group_arrays(group), self)
            kernels.update({(group.name, phase): kernel for phase, kernel in bound.items()})
        last = plan.groups[-1].tail.name
        rows = (plan.batch_size, plan.network.num_outputs)
        gradient = self._views[plan.resolve(f"d{last}")].reshape(rows) if plan.training else None
        kernels["loss", Phase.LOSS] = self.backend.bind_loss(
            self, self._views[plan.resolve(last)].reshape(rows), self._views[TARGET], gradient,
            self._sums,
        )  # fmt: skip
        outside = (Phase.LOAD, Phase.UPDATE)
        return [(s, kernels[s.group, s.phase]) for s in plan.stages if s.phase not in outside]

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes by purpose: those of the plan, and what no plan knows of."""
        return dict(self.plan.memory)

    # Steps.

    keeps_pictures: ClassVar[bool] = False
    """Whether `keep` can be called."""

    def keep(self, pictures: NDArray[np.float32]) -> None:
        """Hold all pictures that batches are made of, so that `load` need only be told places.

        Args:
            pictures: float32 (M, C, H', W'), or (M, F).
        """
        raise NotImplementedError

    def keep_same(self, other: Replica) -> None:
        """Use the pictures that `other`, a replica on the same device, keeps; nothing is copied."""
        raise NotImplementedError

    def load(
        self,
        x: NDArray[Any] | None,
        y: NDArray[Any] | None,
        *,
        places: NDArray[np.int64] | None = None,
        samples: NDArray[np.int64] | None = None,
        global_count: int | None = None,
        step: int = 0,
        training: bool = True,
        learning_rate: float | None = None,
        stop: bool = False,
        later: bool = False,
    ) -> None:
        """Copy a batch in and set the context of the coming step.

        Args:
            x: (n, C, H, W) or (n, F), n at most the plan's batch size; None with `places`.
            y: targets, (n,) class numbers or (n, F); None where no loss is wanted.
            places: int64 (n, 4), parts of the pictures that `keep` holds, each a picture, the row
                and the column where it begins, zeros lying outside, and whether it is mirrored.
            samples: int64 (n,), identities of the samples; 0 … n − 1 where left out.
            global_count: samples of the global minibatch; n where left out.
            step: number of the step.
            training: whether dropout is on and gradients are wanted.
            learning_rate: of the step's update, where `apply_update` makes it and nobody looks at
                the loss before: behind a loss that is not finite the batch is not taken then, so
                that the one before stays, to be looked at.
            stop: whether this rank wishes to stop.
            later: `take`, which a program may hold, is to bring the batch where stages read it.
        """
        batch = places if x is None else x
        assert batch is not None
        n, most = len(batch), len(self._order)
        if n > most:
            raise UserError(f"batch of {n} samples; this replica was compiled for at most {most}")
        if x is not None and x.shape[1:] != self._input_shape:
            expected = str(self._input_shape)[1:-1]
            raise UserError(f"x has shape {x.shape}; this network expects ({n}, {expected})")
        if y is not None and len(y) != n:
            raise UserError(f"x has {n} samples, but y has targets for {len(y)}")
        context = self.context
        context.n, context.step, context.training = n, step, training
        context.samples = self._order[:n] if samples is None else samples
        context.scale = 1.0 / max(n if global_count is None else global_count, 1)
        context.learning_rate, context.stop = learning_rate or 0.0, stop
        if y is not None:
            shape = (n, *self._target.shape[1:])
            y = y if y.shape == shape else y.reshape(shape)
            if self._reorders:
                y = channels_last_targets(self.plan.network, y)
        self._send(batch, y, always=learning_rate is None, kept=x is None)
        if not later:
            self.take()
            self.begun()

    @property
    def turn(self) -> int:
        """Which memory of several the batch came through; a program that takes it is for that."""
        return 0

    def take(self) -> None:
        """Bring the batch that was loaded, and what the context says, to where stages read it."""

    def tell(self) -> None:
        """Bring a copy of `sums` to the host; what waits for it is had from `begun`."""

    def begun(self) -> Callable[[float], list[float]]:
        """All that reads the batch is started, and so is `tell`, if it is.

        Returns:
            What waits for the sums, at most so many seconds (`TimeoutError`).
        """
        values: list[float] = self.sums.tolist()
        return lambda timeout: values

    def _send(self, x: NDArray[Any], y: NDArray[Any] | None, *, always: bool, kept: bool) -> None:
        """Bring a batch, and what the context says of the step, at least on its way.

        Args:
            kept: x are places in what is kept.
            always: also behind a loss that is not finite.
        """
        if self.context.training:
            self.sums[STOP] = self.context.stop
        if y is not None:
            self._target[: len(y)] = y
        self._load_input(x)

    def _load_input(self, x: NDArray[Any]) -> None:
        target = self._views[self.plan.resolve(INPUT)]
        n = len(x)
        if not self.backend.channels_last:
            target[:n] = x.reshape((n, *target.shape[1:]))
        elif x.ndim == 4:
            target[:n] = x.transpose(0, 2, 3, 1)
        else:
            target[:n, 0, 0] = x

    def run(
        self,
        listener: Listener | None = None,
        *,
        in_order: bool = False,
        updating: bool = False,
    ) -> None:
        """Run forward, loss and (in a training step) backward for the loaded batch.

        Args:
            listener: called behind each stage.
            in_order: no stage runs beside another.
            updating: parameters may be updated as soon as no stage needs them any more, this rank's
                gradients being the sum. `apply_update` of the rest then belongs to the step.
        """
        context = self.context
        for stage, kernel in self.stages:
            kernel(context)
            if listener is not None:
                listener(stage.index)

    def run_forward(self, *, loss: bool) -> None:
        """Run the forward stages and, if asked, the loss; gradients stay as they are."""
        context = self.context
        for stage, kernel in self.stages:
            if stage.phase is Phase.FORWARD or (loss and stage.phase is Phase.LOSS):
                kernel(context)

    def forward_backward(self, x: ArrayLike, y: ArrayLike, **context: Any) -> float:
        """Loss and gradients of a batch; the mean loss over the (global) batch is returned.

        Keyword arguments are those of `load`.
        """
        if not self.plan.training:
            raise UserError("this replica was compiled without training")
        self.load(np.asarray(x), checked_targets(self.plan.network, y), **context)
        self.run()
        self.fetch_sums()
        return float(self.sums[0])

    def fetch_sums(self) -> None:
        """Bring what lies behind the flat gradient to `sums`."""
        if self.sums is not self._sums:
            self.memory.download(self._sums, self.sums)

    def fetch_gradients(self, start: int, stop: int) -> None:
        """Bring elements [start, stop) of the flat gradient to `host_gradients`."""
        if self.host_gradients is self.flat_gradients:
            return
        inside = slice(start, min(stop, self.plan.layout.size))
        self.memory.download(self.flat_gradients[inside], self.host_gradients[inside])
        if stop > inside.stop:
            self.fetch_sums()

    def use_gradients(self) -> None:
        """Let the update see what `host_gradients` holds."""
        if self.host_gradients is not self.flat_gradients:
            inside = slice(0, self.plan.layout.size)
            self.memory.upload(self.flat_gradients[inside], self.host_gradients[inside])
            self.memory.upload(self._sums, self.sums)

    def update(self, learning_rate: float) -> None:
        """Apply the update rule to every parameter."""
        self.updates += 1
        self.context.learning_rate = learning_rate
        self.announce()
        self.apply_update()

    def apply_update(self, *, rest: bool = False) -> None:
        """`update` with the rate that the context has, already counted in `updates`.

        Args:
            rest: only of what `run` was free to update, and did not.
        """
        if self._update is None:
            raise UserError("this replica was compiled without training")
        self._update(self.context)

    def announce(self) -> None:
        """Bring what the context says of the coming update to where kernels read it."""

    def stamp(self, place: int) -> None:
        """Where stages return before they are done: note when what was started so far is."""
        raise NotImplementedError

    def stamps(self) -> NDArray[np.int64]:
        """Nanoseconds by place, as noted in steps whose result is known."""
        raise NotImplementedError

    def output(self) -> NDArray[Any]:
        """(n, F) what the network gave for the loaded batch, before softmax or sigmoid."""
        view = self._views[self.plan.resolve(self.plan.groups[-1].tail.name)]
        tail = self.plan.groups[-1].tail
        n = self.context.n
        rows = as_numbers(self.memory.download(view[:n]))
        if self.backend.channels_last:
            rows = rows.transpose(0, 3, 1, 2)
        return np.array(rows).reshape((n, *tail.output_shape))

    def forward(self, x: ArrayLike) -> NDArray[Any]:
        """Outputs (N, F) before softmax or sigmoid, for any number of samples, dropout off."""
        array = np.asarray(x)
        chunks = []
        for start in range(0, len(array), self.plan.batch_size):
            self.load(array[start : start + self.plan.batch_size], None, training=False)
            self.run_forward(loss=False)
            chunks.append(self.output())
        if not chunks:
            return np.zeros((0, *self.plan.network.output_shape), self.plan.dtype)
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def predict(self, x: ArrayLike) -> NDArray[Any]:
        """What a user wants to know: probabilities (softmax, sigmoid) or values, (N, F)."""
        z = self.forward(x)
        kind = self.plan.network.loss.targets
        if kind == "classes":
            e = np.exp(z - z.max(axis=1, keepdims=True))
            return np.asarray(e / e.sum(axis=1, keepdims=True))
        if kind == "binary":
            return np.asarray(0.5 * (1.0 + np.tanh(0.5 * z)))
        return z

    def evaluate(self, x: ArrayLike, y: ArrayLike) -> tuple[float, int]:
        """Sum of the losses and number of correct answers, for any number of samples."""
        array, targets = np.asarray(x), checked_targets(self.plan.network, y)
        self.fetch_sums()
        saved = self.sums.copy()
        loss, correct = 0.0, 0
        for start in range(0, len(array), self.plan.batch_size):
            span = slice(start, start + self.plan.batch_size)
            self.load(array[span], targets[span], global_count=1, training=False)
            self.run_forward(loss=True)
            self.fetch_sums()
            loss += float(self.sums[0])
            correct += round(float(self.sums[1]))
        self.sums[:] = saved
        if self.sums is not self._sums:
            self.memory.upload(self._sums, saved)
        return loss, correct

    def first_not_finite(self) -> str | None:
        """Name where values stop being finite: input, a parameter or a group's output."""
        n = self.context.n

        def finite(name: str) -> bool:
            values = self.memory.download(self._views[self.plan.resolve(name)][:n])
            return bool(np.isfinite(as_numbers(values)).all())

        if not finite(INPUT):
            return "the input"
        # Scratch memory, which a stage writes as well, may hold any bytes.
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


def segments(plan: Plan, elements: slice) -> Sequence[tuple[int, int, float]]:
    """(start, stop, weight decay) of runs that share a weight decay, from `elements.start` on.

    Args:
        plan: has the flat arrays' slots.
        elements: of the flat arrays, whole slots.
    """
    first, last = elements.start, elements.stop
    runs: list[tuple[int, int, float]] = []
    slots = [slot for slot in plan.layout.slots if first <= slot.start < last]
    for i, slot in enumerate(slots):
        stop = slots[i + 1].start if i + 1 < len(slots) else last
        if runs and runs[-1][2] == slot.parameter.weight_decay:
            runs[-1] = (runs[-1][0], stop - first, runs[-1][2])
        else:
            runs.append((slot.start - first, stop - first, slot.parameter.weight_decay))
    return runs
