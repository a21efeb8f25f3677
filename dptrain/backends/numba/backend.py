"""Lowering, losses, updates and the replica of the numba backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.aligned import aligned_zeros
from dptrain.backends.base import Backend, Bandwidths
from dptrain.backends.clipping import Clipping
from dptrain.backends.digests import DigestKernel
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.folding import FOLDED, folded_needs, folds_batch_norm
from dptrain.backends.layer_scaling import LayerScaling, slot_ranges
from dptrain.backends.numba import (
    crop_windows,
    digests,
    elementwise,
    graph_operations,
    losses,
    operations,
    updates,
)
from dptrain.backends.numba.convolution import grouped_operation
from dptrain.backends.numba.convolution.operation import Convolution, fuses_convolution
from dptrain.backends.numba.convolution.planning import BANDWIDTHS, PEAK
from dptrain.backends.numba.dense.operation import FullyConnected
from dptrain.backends.numba.normalization import (
    batch_norm_operation,
    folding,
    sample_norm_operations,
)
from dptrain.backends.numba.operations import GRAIN, Operation, grain_of
from dptrain.backends.numba.programs import Program, StageKernel
from dptrain.backends.numba.reduction import GradientSlots, sum_partials
from dptrain.backends.pixels import INPUTS, PixelFormat
from dptrain.backends.replica import (
    Arrays,
    Context,
    CropWindowReplica,
    GradientAddition,
    Kernel,
    Listener,
    Replica,
    segments,
)
from dptrain.batch import Batch
from dptrain.native.clock import has_native_clock
from dptrain.native.compilation import compile_requested, progress
from dptrain.native.threads import Launch, ThreadPool
from dptrain.network.activations import ReLU
from dptrain.network.biases import BiasAdd
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    Multiply,
)
from dptrain.network.elementwise import Activation
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Parameter,
    Reshape,
    Shape,
    StochasticDepth,
    SumPool2d,
    entry_of,
)
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import Resampling
from dptrain.network.network import Node
from dptrain.network.normalization import BatchNorm2d, FrozenBatchNorm2d, GroupNorm, LayerNorm
from dptrain.plan.flat import ALIGNMENT
from dptrain.plan.lowering import (
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Precision,
    Setting,
    Storage,
    channels_last_storage,
)
from dptrain.plan.optimizers import AVERAGE, LAMB, Adam, AdamW, RMSProp, applied_rule
from dptrain.plan.plan import INPUT, Plan
from dptrain.plan.shards import addition_steps

OPERATIONS: Mapping[type[Layer], type[Operation[Any]]] = {
    Conv2d: Convolution,
    Dense: FullyConnected,
    MaxPool2d: operations.MaxPooling,
    AveragePool2d: operations.SumPooling,
    SumPool2d: operations.SumPooling,
    Flatten: operations.Alias,
    Reshape: operations.Alias,
    Activation: operations.ActivationOperation,
    Dropout: operations.Drop,
    StochasticDepth: operations.DropSamples,
    LocalResponseNorm: operations.ResponseNorm,
    BiasAdd: operations.BiasAddition,
    BatchNorm2d: batch_norm_operation.BatchNormalization,
    FrozenBatchNorm2d: batch_norm_operation.FrozenBatchNormalization,
    GroupNorm: sample_norm_operations.GroupNormalization,
    LayerNorm: sample_norm_operations.LayerNormalization,
    Add: graph_operations.Addition,
    Concatenate: graph_operations.Concatenation,
    Resampling: operations.Resampled,
    Multiply: graph_operations.Multiplication,
    ChannelSlice: graph_operations.ChannelSelection,
    ChannelShuffle: graph_operations.ChannelSelection,
    GlobalAveragePool2d: graph_operations.GlobalAverage,
    GlobalMaxPool2d: graph_operations.GlobalMaximum,
}
"""The operation of a group of layers, by the type of its first layer."""


def operation_of(group: Group) -> type[Operation[Any]]:
    """Return the operation of a group of layers."""
    layer = group.head.layer
    if isinstance(layer, Conv2d) and layer.groups > 1:
        return grouped_operation.GroupedConvolution
    operation = entry_of(OPERATIONS, layer)
    assert operation is not None, layer.kind
    return operation


class NumbaBackend(Backend):
    """Float32 on the CPU, activations (N, H, W, C)."""

    name = "numba"
    precisions: ClassVar[Mapping[str, Precision]] = {
        "fp32": Precision("float32", "float32"),
        operations.DIRECT: Precision("float32", "float32"),
    }
    """Float32 with all algorithms, and without the Winograd algorithms (see numerics.md)."""
    channels_last = True
    threaded = True
    supports_shards = True
    fusions = (
        (Conv2d, ReLU, MaxPool2d),
        (Conv2d, ReLU),
        (Dense, ReLU, Dropout),
        (Dense, ReLU),
        (BatchNorm2d, Add, ReLU),
        (BatchNorm2d, Add),
        (BatchNorm2d, ReLU),
        (FrozenBatchNorm2d, ReLU),
    )
    inference_fusions = (*FOLDED, (Add, ReLU))

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        if isinstance(nodes[0].layer, BatchNorm2d):
            return batch_norm_operation.fuses_batch_norm(nodes)
        return fuses_convolution(nodes)

    def adds_gradient(self, group: Group, local: str, setting: Setting) -> bool:
        if local != "dx":
            return False
        if isinstance(group.head.layer, Conv2d):
            return MaxPool2d not in group.kinds
        return isinstance(group.head.layer, BatchNorm2d | FrozenBatchNorm2d)

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        return channels_last_storage(node, parameter)

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        needs = operation_of(group).needs(group, setting)
        return folded_needs(needs, group, keeps=True) if folds_batch_norm(group) else needs

    def explain(self, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        needed = self.needs(group, setting).phases
        only = Explanation("vector loop", reason="the only algorithm")
        special = operation_of(group).explain(group, setting)
        return {phase: special.get(phase, only) for phase in needed}

    def estimated_roofs(self, setting: Setting) -> tuple[float, Bandwidths]:
        return 2.0 * PEAK, BANDWIDTHS

    def bind(
        self, group: Group, phases: Collection[Phase], arrays: Arrays, replica: Replica
    ) -> Mapping[Phase, Kernel]:
        assert isinstance(replica, NumbaReplica)
        operation = operation_of(group)
        pool = replica.thread_pool
        if folds_batch_norm(group):
            return folding.bind_folded(operation, group, arrays, pool, replica)
        return operation(group, arrays, pool, replica).kernels(phases)

    def bind_additions(self, replica: Replica, additions: Sequence[GradientAddition]) -> Kernel:
        assert isinstance(replica, NumbaReplica)
        return graph_operations.bind_additions(replica.thread_pool, additions)

    def bind_loss(
        self,
        replica: Replica,
        output: NDArray[Any],
        target: NDArray[Any],
        gradient: NDArray[Any] | None,
        sums: NDArray[Any],
    ) -> Kernel:
        assert isinstance(replica, NumbaReplica)
        kernel, pool = losses.kernel_of(replica.plan.network.loss), replica.thread_pool
        samples, outputs = output.shape
        dz = np.zeros((0, outputs), output.dtype) if gradient is None else gradient
        has_scratch = kernel is losses.softmax_cross_entropy
        scratch = (losses.softmax_scratch(outputs, pool.threads),) if has_scratch else ()
        found = np.zeros((samples, 2))
        bind = partial(pool.bind, grain=-(-losses.GRAIN // outputs))
        launch = bind(kernel, output, target, dz, found, *scratch, varying=(1.0, True))
        rows, is_sharded = len(replica.context.bounds) - 1, replica.plan.setting.shards > 0
        # Double precision is rounded before micro-shards are added: other ranks add float32.
        shard_sums = np.zeros((rows, 2), np.float32) if is_sharded else replica.slot_sums
        # One thread sums, because this takes less than a microsecond.
        alone = ThreadPool(1)
        total = alone.bind(
            losses.sum_losses, found, shard_sums, replica.context.bounds, varying=(1.0,)
        )
        add = (_bind_sum_of_shards(replica, shard_sums),) if is_sharded else ()
        smoothing, weights = replica.plan.setting.label_smoothing, replica.sample_weights
        smooth: tuple[Launch, ...] = ()
        if smoothing and gradient is not None:
            smooth = (
                bind(losses.smooth_labels, output, target, dz, found, smoothing, varying=(1.0,)),
            )
        weigh = () if weights is None else (bind(losses.weigh_losses, dz, found, weights),)

        def prepare(context: Context) -> None:
            launch.set(context.n, context.scale, context.training and gradient is not None)
            for each in smooth:
                each.set(context.n if context.training else 0, context.scale)
            for each in weigh:
                each.set(context.n if context.training else 0)
            total.set(rows, context.scale)

        return StageKernel((launch, *smooth, *weigh, total, *add), prepare)

    def bind_update(self, replica: Replica, elements: slice) -> Kernel:
        assert isinstance(replica, NumbaReplica)
        rule, bind = (
            applied_rule(replica.plan.optimizer),
            partial(replica.thread_pool.bind, grain=GRAIN),
        )
        state = {name: flat[elements] for name, flat in replica.flat_state.items()}
        w, g = replica.flat_parameters[elements], replica.flat_gradients[elements]
        runs = segments(replica.plan, elements)
        found = updates.Segments(
            np.array([0, *(each.stop for each in runs)], np.int64),
            np.array([each.decay for each in runs], np.float32),
            np.array([each.rate_factor for each in runs], np.float32),
        )
        if isinstance(rule, Adam):
            launch = bind(
                updates.adamw if isinstance(rule, AdamW) else updates.adam,
                w, g, (state["first_moment"], state["second_moment"]), found,
                (rule.beta1, rule.beta2, rule.epsilon), varying=(0.1, 1),
            )  # fmt: skip
            return lambda context: launch(w.size, context.learning_rate, replica.updates)
        if isinstance(rule, RMSProp):
            # Without momentum, the array is not used.
            arrays = state["second_moment"], state.get("momentum", state["second_moment"])
            launch = bind(
                updates.rmsprop, w, g, arrays, found, (rule.decay, rule.epsilon, rule.momentum),
                varying=(0.1,),
            )  # fmt: skip
        elif rule.momentum:
            launch = bind(
                updates.sgd_momentum,
                w, g, state["momentum"], found, rule.momentum, rule.nesterov,
                varying=(0.1,),
            )  # fmt: skip
        else:
            launch = bind(updates.sgd, w, g, found, varying=(0.1,))
        return lambda context: launch(w.size, context.learning_rate)

    def bind_average(self, replica: Replica, elements: slice) -> Kernel:
        assert isinstance(replica, NumbaReplica)
        w, average = replica.flat_parameters[elements], replica.flat_state[AVERAGE][elements]
        rule = replica.plan.optimizer
        launch = replica.thread_pool.bind(updates.average, average, w, varying=(0.1,), grain=GRAIN)
        return lambda context: launch(w.size, rule.average_weight(replica.updates))

    def bind_clipping(
        self, replica: Replica, gradient: NDArray[Any], squares: NDArray[np.float64]
    ) -> Clipping:
        assert isinstance(replica, NumbaReplica)
        bind = replica.thread_pool.bind
        add = bind(updates.add_squares, gradient, squares, grain=GRAIN // ALIGNMENT)
        scale = bind(updates.scale, gradient, varying=(0.1,), grain=GRAIN)
        return Clipping(lambda: add(squares.size), lambda factor: scale(gradient.size, factor))

    def bind_digests(
        self, replica: Replica, flat: NDArray[Any], bounds: NDArray[np.int64], first: int
    ) -> DigestKernel:
        assert isinstance(replica, NumbaReplica)
        words, pool = flat.view(np.uint32), replica.thread_pool
        sums = np.zeros((pool.threads, bounds.size - 1), np.uint64)
        start = np.array([first], np.uint64)
        launch = pool.bind(digests.add_digests, words, bounds, start, sums, grain=GRAIN)

        def compute() -> NDArray[np.uint64]:
            sums[:] = 0
            launch(words.size)
            return np.asarray(np.sum(sums, axis=0, dtype=np.uint64))

        return compute

    def bind_scaling(
        self, replica: Replica, elements: slice, squares: Sequence[NDArray[np.float64]]
    ) -> LayerScaling:
        assert isinstance(replica, NumbaReplica)
        rule, bind = replica.plan.optimizer, replica.thread_pool.bind
        state = {name: flat[elements] for name, flat in replica.flat_state.items()}
        w, g = replica.flat_parameters[elements], replica.flat_gradients[elements]
        ranges = list(slot_ranges(replica.plan, elements))
        indices = [each.slot for each in ranges]
        bounds = np.array([0, *(each.stop for each in ranges)], np.int64)
        decays = np.array([each.decay for each in ranges], np.float32)
        ratios = np.ones_like(decays)
        slots = updates.Segments(bounds, decays, ratios)
        adds = [
            bind(updates.add_squares, array, sums, grain=GRAIN // ALIGNMENT)
            for array, sums in zip((w, g), squares, strict=True)
        ]
        prepare, added = None, slots
        if isinstance(rule, LAMB):
            prepare = bind(
                updates.lamb_direction, w, g, (state["first_moment"], state["second_moment"]),
                slots, (rule.beta1, rule.beta2, rule.epsilon), varying=(1,), grain=GRAIN,
            )  # fmt: skip
            added = slots._replace(decays=np.zeros_like(decays))
        scale = bind(updates.scale_layers, w, g, added, grain=GRAIN)

        def measure(number: int) -> None:
            if prepare is not None:
                prepare(w.size, number)
            for add in adds:
                add(w.size // ALIGNMENT)

        def scale_by(of_slots: NDArray[np.float64]) -> None:
            ratios[:] = of_slots[indices]
            scale(w.size)

        return LayerScaling(measure, scale_by)

    def bind_addition(
        self, replica: Replica, target: NDArray[Any], source: NDArray[Any], *, copies: bool = False
    ) -> Callable[[], None]:
        assert isinstance(replica, NumbaReplica)
        kernel = updates.copy if copies else updates.add
        launch = replica.thread_pool.bind(kernel, target, source, grain=GRAIN)
        return lambda: launch(target.size)

    def allocate(self, plan: Plan, *, seed: int, arrays: FlatArrays | None = None) -> Replica:
        return NumbaReplica(self, plan, seed=seed, arrays=arrays)

    def compile_kernels(self, processes: int = 1) -> None:
        compile_requested(processes=processes)

    def compilation_progress(self) -> tuple[int, int]:
        return progress.counts()


def _bind_sum_of_shards(replica: Replica, shard_sums: NDArray[np.float32]) -> Launch:
    """Return the launch that adds the loss sums of micro-shards in the gradient slots."""
    plan, slots = replica.plan, replica.slot_sums.reshape(-1)
    pitch = replica.slot_sums.shape[1]
    if plan.training:
        slots = replica.gradient_slots.reshape(-1)[plan.trained.size :]
        pitch = plan.layout.gradient_pitch
    steps = addition_steps(plan.merges)
    size = shard_sums.shape[1]
    gradients = GradientSlots(slots, slots, size, pitch, len(replica.slot_sums))
    launch = ThreadPool(1).bind(sum_partials, shard_sums, *steps, gradients)
    launch.set(size)
    return launch


class NumbaReplica(CropWindowReplica):
    """A replica with a thread pool, and with kernels that load images.

    Attributes:
        thread_pool: the threads.
        programs: stages that run together, by purpose: ``step`` (without the update), ``forward``,
            ``evaluation`` and ``inference``.
    """

    def __init__(
        self, backend: Backend, plan: Plan, *, seed: int, arrays: FlatArrays | None = None
    ) -> None:
        self.thread_pool = ThreadPool(plan.setting.threads)
        self._image_format: tuple[Shape, PixelFormat] | None = None
        super().__init__(backend, plan, seed=seed, arrays=arrays)
        target = self._views[plan.resolve(INPUT)]
        n, height, width, channels = target.shape
        # The launch reads the user's array, of which only the address changes.
        staged = target.reshape(n, channels, height * width)
        self._transpose = self.thread_pool.bind(
            elementwise.channels_last, target.reshape(n, height * width, channels),
            varying=(staged,), grain=grain_of(channels * min(height * width, elementwise.BAND)),
        )  # fmt: skip
        self._input_bands = elementwise.num_bands(height * width)
        self.programs = {name: Program(kernels) for name, kernels in self._stage_kernels().items()}
        self._bound_stages = self.stages
        tail = plan.groups[-1].tail
        self._output_rows: NDArray[Any] | None = None
        if tail.output_maps[1:] == (1, 1) and len(tail.output_shape) == 1:
            self._output_rows = self._views[plan.resolve(tail.name)].reshape(n, -1)

    def close(self) -> None:
        if not self._is_closed:
            self.thread_pool.close()
        super().close()

    def _stage_kernels(self) -> Mapping[str, list[StageKernel]]:
        """Return the kernels of the stages that run together, by purpose."""
        phases = {"step": set(Phase), "forward": {Phase.FORWARD}}
        phases["evaluation"] = {Phase.FORWARD, Phase.LOSS}
        kernels: dict[str, list[StageKernel]] = {
            name: [kernel for stage, kernel in self.stages if stage.phase in chosen]  # type: ignore[misc]
            for name, chosen in phases.items()
        }
        bands, transpose = self._input_bands, self._transpose
        # `_load_input` sets the items of the same launch for other minibatches.
        load = StageKernel(
            (transpose,), lambda context: transpose.set_items(context.n * bands), every_step=True
        )
        return {**kernels, "inference": [load, *kernels["forward"]]}

    def _are_annotated(self) -> bool:
        """Return whether the stages were replaced by others, such as stages with NVTX ranges."""
        return self.stages is not self._bound_stages

    def run(self, listener: Listener | None = None) -> None:
        if listener is not None or self._are_annotated():
            super().run(listener)
        else:
            self.programs["step"].run(self.context)

    def run_timed(self) -> Callable[[], list[int]]:
        if self._are_annotated() or not has_native_clock():
            return super().run_timed()
        return self.programs["step"].run_timed(self.context)

    def run_forward(self, *, loss: bool) -> None:
        if self._are_annotated():
            super().run_forward(loss=loss)
        else:
            self.programs["evaluation" if loss else "forward"].run(self.context)

    def forward(self, x: ArrayLike) -> NDArray[Any]:
        """Compute `Replica.forward`.

        One native call loads the samples of a single batch and runs all stages. For one sample of
        model0, Python then takes 4 instead of 9 µs (Intel Xeon, AVX-512).
        """
        array = np.asarray(x)
        n, context = len(array), self.context
        is_single = 0 < n <= self.plan.batch_size
        if not is_single or self._are_annotated() or not self._reads_natively(array):
            return super().forward(array)
        with self._turn:
            if context.n != n or context.training or array.shape[1:] != self._input_shape:
                self._set_context(self._whole_batch(array), training=False, stop=False)
            self._transpose.point(array)
            self.programs["inference"].run(context)
            return self.output()

    def output(self) -> NDArray[Any]:
        if self._output_rows is None:
            return super().output()
        rows: NDArray[Any] = self._output_rows[: self.context.n].copy()
        return rows

    def _reads_natively(self, x: NDArray[Any]) -> bool:
        """Return whether the kernel that loads samples can read an array: it has one signature."""
        flags = x.flags
        return bool(x.dtype == self._input_view.dtype and flags.c_contiguous and flags.aligned)

    def cache_images(self, images: Any, pixels: PixelFormat = INPUTS) -> None:
        shape = images.shape if images.ndim == 4 else (*images.shape, 1, 1)
        conversion = np.array([pixels.scale, pixels.offset], np.float32)
        self._image_format = tuple(images.shape[1:]), pixels
        self._keep(images.reshape(shape), conversion)

    def share_cached_images(self, other: Replica) -> None:
        assert isinstance(other, NumbaReplica)
        self._keep(other._images, other._conversion)
        self._image_format = other._image_format

    @property
    def image_format(self) -> tuple[Shape, PixelFormat] | None:
        return self._image_format

    def _keep(self, images: NDArray[Any], conversion: NDArray[np.float32]) -> None:
        """Keep images, and bind the kernel that loads parts of them, which needs memory."""
        self._images, self._conversion = images, conversion
        target = self._views[self.plan.resolve(INPUT)]
        channels = target.shape[3]
        threads = self.plan.setting.threads
        shape = threads, channels, target[0].size // channels
        planes = aligned_zeros(threads * target[0].size, "float32").reshape(shape)
        cuts = planes if images.dtype == planes.dtype else np.zeros(shape, images.dtype)
        self._crop = self.thread_pool.bind(
            crop_windows.load_crop_windows, target, planes, cuts,
            varying=(images, conversion, np.zeros((0, 4), np.int64), np.zeros((0, 2), np.float32)),
            grain=grain_of(target[0].size),
        )  # fmt: skip

    def _load_crop_windows(self, batch: Batch) -> None:
        windows, recolourings, images = batch.crop_windows, batch.recolourings, batch.x
        assert windows is not None
        assert batch.mixings is None, "the host mixes minibatches of inputs"
        colours = np.zeros((0, 2), np.float32) if recolourings is None else recolourings
        source = self._images if images is None else images.reshape(-1, *self._images.shape[1:])
        self._crop(len(windows), source, self._conversion, windows, colours)

    def _load_input(self, x: NDArray[Any]) -> None:
        if self._reads_natively(x):
            self._transpose.point(x)
            self._transpose.set_items(len(x) * self._input_bands)
            self._transpose.run()
        else:
            super()._load_input(x)  # NumPy is slower.
