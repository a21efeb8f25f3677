"""The cuda backend: the operation of each group of layers, losses and optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.base import Backend, Bandwidths
from dptrain.backends.cuda.combining import (
    AddOperation,
    ChannelSelectionOperation,
    ConcatenateOperation,
    GlobalAveragePoolOperation,
    GlobalMaxPoolOperation,
    MultiplyOperation,
    bind_additions,
)
from dptrain.backends.cuda.convolution.convolution import Convolution
from dptrain.backends.cuda.convolution.grouped_convolution import (
    grouped_operation,
    is_grouped,
)
from dptrain.backends.cuda.dense.algorithms import explain as explain_dense
from dptrain.backends.cuda.dense.algorithms import operation_of as dense_operation
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Array, Device, Function, Macro
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.device.launching import THREADS, launch
from dptrain.backends.cuda.device.message import Message
from dptrain.backends.cuda.elementwise.activations import ActivationOperation, statements
from dptrain.backends.cuda.elementwise.dropout import DropoutOperation, DropSamplesOperation
from dptrain.backends.cuda.epilogues import EPILOGUES
from dptrain.backends.cuda.normalization.batch_norm import (
    BatchNormOperation,
    FrozenBatchNormOperation,
)
from dptrain.backends.cuda.normalization.folding import bind_folded
from dptrain.backends.cuda.normalization.group_norm import GroupNormOperation
from dptrain.backends.cuda.normalization.normalization import NormalizationOperation
from dptrain.backends.cuda.normalization.sharded_batch_norm import ShardedBatchNorm
from dptrain.backends.cuda.operation import (
    BiasAddOperation,
    FlattenOperation,
    Operation,
    vector_width,
)
from dptrain.backends.cuda.pooling import (
    MaxPoolOperation,
    SumPoolOperation,
)
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.cuda.resampling import ResamplingOperation
from dptrain.backends.cuda.shards import (
    ShardedWeightGradient,
    shard_arguments,
    shard_macros,
    sharded_needs,
)
from dptrain.backends.cuda.tuning import load_or_tune
from dptrain.backends.digests import DigestKernel
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.folding import FOLDED, folded_needs, folds_batch_norm
from dptrain.backends.layer_scaling import ratio_sources, slot_ranges
from dptrain.backends.replica import (
    Arrays,
    Context,
    GradientAddition,
    Kernel,
    Replica,
    segments,
)
from dptrain.errors import UserError
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
from dptrain.network.losses import ElementwiseLoss, Loss
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import Resampling
from dptrain.network.network import Network, Node
from dptrain.network.normalization import BatchNorm2d, FrozenBatchNorm2d, GroupNorm, LayerNorm
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import (
    BufferSpec,
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Precision,
    Setting,
    Storage,
    channels_last_storage,
)
from dptrain.plan.optimizers import AVERAGE, LAMB, LARS, Adam, Optimizer, RMSProp, applied_rule
from dptrain.plan.plan import Plan
from dptrain.plan.selection import KernelSelection

PEAKS_CAPABILITY = 90
PEAK_GFLOPS = {"fp32": 66.9e3, "tf32": 494.7e3, "bf16": 989.4e3}
"""Peak rates of products by precision, and the compute capability that has them."""
BANDWIDTHS = ((0, 4.8e3),)
"""Bandwidth of memory in GB/s, of data of any size."""

OPERATIONS: Mapping[type[Layer], type[Operation[Any]]] = {
    Conv2d: Convolution,
    MaxPool2d: MaxPoolOperation,
    AveragePool2d: SumPoolOperation,
    SumPool2d: SumPoolOperation,
    Flatten: FlattenOperation,
    Reshape: FlattenOperation,
    Activation: ActivationOperation,
    Dropout: DropoutOperation,
    StochasticDepth: DropSamplesOperation,
    LocalResponseNorm: NormalizationOperation,
    BatchNorm2d: BatchNormOperation,
    FrozenBatchNorm2d: FrozenBatchNormOperation,
    GroupNorm: GroupNormOperation,
    LayerNorm: GroupNormOperation,
    Add: AddOperation,
    Concatenate: ConcatenateOperation,
    Multiply: MultiplyOperation,
    Resampling: ResamplingOperation,
    ChannelSlice: ChannelSelectionOperation,
    ChannelShuffle: ChannelSelectionOperation,
    GlobalAveragePool2d: GlobalAveragePoolOperation,
    GlobalMaxPool2d: GlobalMaxPoolOperation,
    BiasAdd: BiasAddOperation,
}
"""Operations by the first layer of a group, except dense layers and grouped convolutions."""

CONVOLUTIONS: Sequence[tuple[type[Layer], ...]] = [
    (Conv2d, ReLU, *epilogue) for epilogue in EPILOGUES
]
"""Groups of a convolution, its ReLU and an epilogue."""

NORMALIZATIONS: Sequence[tuple[type[Layer], ...]] = [
    (BatchNorm2d, *rest) for rest in ((Add, ReLU), (Add,), (Activation,))
]
"""Groups of a batch normalisation and what follows it."""

LOSS_THREADS = 512
"""Threads of a block, ``THREADS`` of ``losses.cu``."""

MAX_CLIPPING_BLOCKS = 512
"""Most blocks of the kernels of ``clipping.cu``: each adds the partial sums of all."""

LAYER_BLOCKS = 16
"""Blocks of each layer in the kernels for norms of layers, and for digests."""

MAX_LOSS_BLOCKS = 512
"""With more blocks, threads process several samples: the last block adds the sums of all blocks."""


def sample_lanes(outputs: int) -> int:
    """Return the threads that share a sample, a power of two."""
    return min(1 << (outputs - 1).bit_length(), 32)


def loss_kernel(loss: Loss) -> tuple[str, dict[str, Macro]]:
    """Return the name of the kernel in ``losses.cu``, and the macros that make it."""
    if not isinstance(loss, ElementwiseLoss):
        return loss.kind, {}
    name = f"{loss.kind}_loss"
    return name, {
        "LOSS_NAME": name,
        "LOSS_VALUE": statements(loss.value),
        "LOSS_SLOPE": statements(loss.slope),
        "BINARY_TARGETS": int(loss.targets == "binary"),
    }


def loss_blocks(threads: int) -> int:
    """Return the blocks of a kernel of ``losses.cu`` for a number of threads."""
    return max(min(ceil_div(threads, LOSS_THREADS), MAX_LOSS_BLOCKS), 1)


def loss_options(replica: Replica) -> tuple[dict[str, int], list[Any]]:
    """Return the macros of ``losses.cu``, and the last arguments of its kernels."""
    smoothing, weights = replica.plan.setting.label_smoothing, replica.sample_weights
    defines, arguments = dict[str, int](), list[Any]()
    if smoothing:
        defines["SMOOTHED"] = 1
        arguments.append(np.float32(smoothing))
    if weights is not None:
        defines["WEIGHTED"] = 1
        arguments.append(weights)
    return defines, arguments


def open_device(index: int) -> Device:
    """Return the GPU of a rank.

    Args:
        index: rank within the node. GPUs are assigned in turn if there are more ranks than GPUs.

    Raises:
        UserError: no GPU was found, or CuPy is missing.
    """
    from dptrain.backends.cuda.device.cupy_runtime import device_count, import_cupy, start_context

    context = start_context(index)
    cupy = import_cupy()
    from dptrain.backends.cuda.device.gpu import GPU

    context.join()
    return GPU(index % device_count(cupy))


class CudaBackend(Backend):
    """Training on an NVIDIA GPU with the project's own kernels.

    Activations are (N, H, W, C), in float32 or, with bf16, bfloat16 (stored as uint16). Parameters,
    gradients and optimizer state are float32.

    Args:
        device: the device; None for a GPU of this node.
    """

    name = "cuda"
    precisions: ClassVar[Mapping[str, Precision]] = {
        "fp32": Precision("float32", "float32"),
        "tf32": Precision("float32", "float32"),
        "bf16": Precision("float32", "uint16"),
    }
    channels_last = True
    concurrent_weight_gradients = True
    measures_kernels = True
    supports_shards = True
    double_buffers_input = True
    # Kernels use 32-bit indices, and the last tiles of a buffer extend beyond its end.
    max_elements: ClassVar[int | None] = 2**31 - 2**24
    fusions = (
        *CONVOLUTIONS,
        *NORMALIZATIONS,
        (FrozenBatchNorm2d, Activation),
        (Conv2d, ReLU),
        (Dense, ReLU, Dropout),
        (Dense, ReLU),
    )
    inference_fusions = (*FOLDED, (Add, ReLU))

    def __init__(self, device: Device | None = None) -> None:
        self._local_rank = 0
        self._device = device

    @property
    def device(self) -> Device:
        """The GPU. It is opened on first use, so plans can be made without one."""
        if self._device is None:
            self._device = open_device(self._local_rank)
        return self._device

    @property
    def limits(self) -> DeviceLimits | None:
        return None if self._device is None else self._device.limits

    def precision(self, name: str) -> Precision:
        found, limits = super().precision(name), self.limits
        if limits is not None and not limits.has_tensor_floats and name != "fp32":
            major, minor = divmod(limits.capability, 10)
            raise UserError(
                f"{limits.name} (compute capability {major}.{minor}) cannot multiply in {name}; "
                "use --precision fp32, or a GPU of compute capability 8.0 or higher"
            )
        return found

    def choose_device(self, local_rank: int) -> str:
        self._local_rank = local_rank
        return self.device.identity

    def free_bytes(self) -> int | None:
        return self.device.free_bytes

    def compilation_progress(self) -> tuple[int, int]:
        return self.device.compilation_progress

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        if isinstance(nodes[0].layer, BatchNorm2d):
            return all(len(node.inputs) <= 2 for node in nodes)
        if is_grouped(nodes[0]):
            return not any(isinstance(node.layer, ReLU) for node in nodes)
        epilogue = EPILOGUES.get(tuple(type(node.layer) for node in nodes[2:]))
        return epilogue is None or epilogue.supports(nodes[2:])

    def adds_gradient(self, group: Group, local: str, setting: Setting) -> bool:
        return self.operation(group, setting).adds_gradient(group, local)

    def sums_output(self, group: Group, reader: Group, setting: Setting) -> bool:
        # With micro-shards, the sums of a block belong to several of them.
        sums = isinstance(reader.head.layer, BatchNorm2d) and not setting.shards
        return sums and self.operation(group, setting).sum_rows(group, setting) > 0

    def sums_gradient(self, group: Group, normalization: Group, setting: Setting) -> bool:
        if setting.shards or not isinstance(normalization.head.layer, BatchNorm2d):
            return False
        summing = replace(group, normalization=normalization)
        return self.operation(group, setting).gradient_sum_rows(summing, setting) > 0

    def staging_shape(self, network: Network, setting: Setting) -> Shape:
        message = Message.of(network, setting)
        return message.slots, message.nbytes

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        return channels_last_storage(node, parameter)

    def operation(self, group: Group, setting: Setting) -> type[Operation[Any]]:
        """Return the class that computes a group."""
        layer = group.head.layer
        if isinstance(layer, Dense):
            return dense_operation(group, setting)
        if is_grouped(group.head):
            return grouped_operation(group, setting)
        found = entry_of(OPERATIONS, layer)
        assert found is not None, layer.kind
        return ShardedBatchNorm if setting.shards and found is BatchNormOperation else found

    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        operation, layer = self.operation(group, setting), group.head.layer
        needs = operation.needs(group, setting)
        if _launches_shards(operation, group, setting):
            needs = sharded_needs(needs, group, setting.shards)
        if folds_batch_norm(group):
            return folded_needs(needs, group, keeps=False)
        if isinstance(layer, Conv2d) and not layer.bias and operation.reads_bias:
            return _with_unused_bias(needs, group.head.output_maps[0])
        return needs

    def explain(self, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        operation = self.operation(group, setting)
        direct = Explanation("direct", reason="the only kernel")
        phases = dict.fromkeys(operation.needs(group, setting).phases, direct)
        if isinstance(group.head.layer, Dense):
            return {**phases, **explain_dense(group, setting)}
        return {**phases, **operation.explain(group, setting)}

    def estimated_roofs(self, setting: Setting) -> tuple[float, Bandwidths] | None:
        """Return the limits of an H200; None for models of another compute capability.

        Sources: NVIDIA H100 Tensor Core GPU Architecture, 2022, peak rates without sparsity; NVIDIA
        H200 Tensor Core GPU, data sheet, 2024, bandwidth of memory.
        """
        is_known = limits_of(setting).capability == PEAKS_CAPABILITY
        gflops = PEAK_GFLOPS.get(setting.precision)
        return (gflops, BANDWIDTHS) if is_known and gflops else None

    def measured_selection(
        self,
        plan: Plan,
        say: Callable[[str], None],
        report: Callable[[int, int], None] = lambda done, count: None,
    ) -> KernelSelection:
        return load_or_tune(self, plan, say, report=report).selection

    def bind(
        self, group: Group, phases: Collection[Phase], arrays: Arrays, replica: Replica
    ) -> Mapping[Phase, Kernel]:
        assert isinstance(replica, CudaReplica)
        setting = replica.plan.setting.of(group)
        operation = self.operation(group, setting)
        if folds_batch_norm(group):
            return bind_folded(operation, group, arrays, replica)
        weight = Phase.BACKWARD_WEIGHT
        if weight not in phases or not _launches_shards(operation, group, setting):
            return operation(group, arrays, replica).kernels(phases)
        others = [phase for phase in phases if phase is not weight]
        access = self.needs(group, setting).phases[weight]
        bind = partial(operation, group, replica=replica)
        sharded = ShardedWeightGradient(bind, group, access, arrays, replica)
        return {**bind(arrays).kernels(others), weight: sharded}

    def bind_additions(self, replica: Replica, additions: Sequence[GradientAddition]) -> Kernel:
        assert isinstance(replica, CudaReplica)
        return bind_additions(replica, additions)

    def bind_loss(
        self,
        replica: Replica,
        output: Array,
        target: Array,
        gradient: Array | None,
        sums: Array,
    ) -> Kernel:
        assert isinstance(replica, CudaReplica)
        outputs, device = output.shape[1], replica.device
        lanes = sample_lanes(outputs)
        name, macros = loss_kernel(replica.plan.network.loss)
        precision = 2 if output.dtype == np.uint16 else 0
        defines, options = loss_options(replica)
        compiled = partial(
            device.function, "losses.cu", name, SAMPLE_LANES=lanes, PRECISION=precision,
            **defines, **macros,
        )  # fmt: skip
        function = compiled()
        block_sums = device.zeros((1 + loss_blocks(replica.plan.batch_size * lanes),), "uint64")
        dz = output if gradient is None else gradient

        def enqueue(
            kernel: Function, context: Context, blocks: tuple[int, int],
            results: tuple[Array, Array], *last: np.generic,
        ) -> None:  # fmt: skip
            backward = np.int32(context.training and gradient is not None)
            sizes = np.int32(context.n), np.int32(outputs), np.float32(context.scale)
            arrays = output, target, dz, results[0], replica.numbers, results[1]
            grid = blocks[0], 1, blocks[1]
            kernel(grid, (LOSS_THREADS, 1, 1), [*arrays, *sizes, backward, *options, *last])

        def run(context: Context) -> None:
            blocks = loss_blocks(context.n * lanes), 1
            enqueue(function, context, blocks, (sums, block_sums))

        shards = replica.plan.micro_shards
        if shards is None or gradient is None:
            return run
        sharded = partial(enqueue, compiled(**shard_macros(shards), MICRO_SHARDS=1))
        run_shards = _sharded_loss(replica, lanes, sharded)
        return lambda context: (run_shards if context.training else run)(context)

    def bind_update(self, replica: Replica, elements: slice) -> Kernel:
        assert isinstance(replica, CudaReplica)
        rule, device = applied_rule(replica.plan.optimizer), replica.device
        state = [replica.flat_state[name][elements] for name in rule.state if name != AVERAGE]
        w, g = replica.flat_parameters[elements], replica.flat_gradients[elements]
        runs = segments(replica.plan, elements)
        bounds = device.uploaded(np.array([each.stop for each in runs], np.int32))
        rates = [(each.decay, each.rate_factor) for each in runs]
        values = device.uploaded(np.array(rates, np.float32).reshape(-1))
        sums = replica.flat_gradients[replica.plan.trained.size :]
        arrays = [w, g, *state, sums, replica.numbers]
        common = [*arrays, bounds, values, np.int32(len(runs)), np.int32(w.size)]
        name, constants = _update_kernel(rule)
        # Parameters are padded to whole cache lines, so segments start and end at vectors.
        width = vector_width(w.size, w.dtype.itemsize)
        function = device.function("optimizers.cu", name, VECTOR=width)
        clip, scale = _bind_clipping(device, replica, g), _bind_scaling(device, replica, width)

        def update(context: Context) -> None:
            clip()
            scale()
            launch(function, w.size // width, *common, *constants)

        return update

    def bind_average(self, replica: Replica, elements: slice) -> Kernel:
        assert isinstance(replica, CudaReplica)
        w, average = replica.flat_parameters[elements], replica.flat_state[AVERAGE][elements]
        sums = replica.flat_gradients[replica.plan.trained.size :]
        width = vector_width(w.size, w.dtype.itemsize)
        function = replica.device.function("optimizers.cu", "average_parameters", VECTOR=width)
        arguments = average, w, sums, replica.numbers, np.int32(w.size)
        return lambda context: launch(function, w.size // width, *arguments)

    def bind_addition(
        self, replica: Replica, target: NDArray[Any], source: NDArray[Any], *, copies: bool = False
    ) -> Callable[[], None]:
        assert isinstance(replica, CudaReplica)
        width = vector_width(target.size, target.dtype.itemsize)
        file, name = ("elementwise.cu", "copy") if copies else ("combining.cu", "add")
        function = replica.device.function(file, name, PRECISION=0, VECTOR=width)
        arrays = (source, target) if copies else (target, source, target)
        return lambda: launch(function, target.size // width, *arrays, np.int32(target.size))

    def bind_digests(
        self, replica: Replica, flat: NDArray[Any], bounds: NDArray[np.int64], first: int
    ) -> DigestKernel:
        assert isinstance(replica, CudaReplica)
        device, parts = replica.device, bounds.size - 1
        words, starts = flat.view("uint32"), device.uploaded(bounds)
        partials = device.zeros((parts * LAYER_BLOCKS,), "uint64")
        grid, block = (LAYER_BLOCKS, parts, 1), (THREADS, 1, 1)
        function = device.function("digests.cu", "digest_parts")

        def compute() -> NDArray[np.uint64]:
            function(grid, block, [words, starts, partials, np.uint32(first & 0xFFFFFFFF)])
            rows = device.download(partials).reshape(parts, LAYER_BLOCKS)
            return np.asarray(np.sum(rows, axis=1, dtype=np.uint64))

        return compute

    def allocate(self, plan: Plan, *, seed: int, arrays: FlatArrays | None = None) -> Replica:
        assert arrays is None, "arrays in host memory"
        self._require_limits(plan)
        return CudaReplica(self, plan, seed=seed, device=self.device)

    def _require_limits(self, plan: Plan) -> None:
        """Check that the plan fits the device.

        Raises:
            ValueError: the plan was made for another device.
        """
        planned, limits = limits_of(plan.setting), self.device.limits
        if replace(planned, name=limits.name) != limits:
            raise ValueError(
                f"the plan is for {planned}, but the GPU is {limits}; call choose_device first"
            )


def _launches_shards(operation: type[Operation[Any]], group: Group, setting: Setting) -> bool:
    """Return whether each micro-shard has a launch of its own for the weight gradient."""
    return setting.shards > 1 and not operation.joins_shards(group, setting)


def _with_unused_bias(needs: GroupNeeds, filters: int) -> GroupNeeds:
    """Return the needs of a convolution without bias, whose kernels add one.

    They read a bias of zeros, which nothing writes, and write a gradient that nothing reads.
    """
    phases, spec = dict(needs.phases), BufferSpec((filters,), "float32")
    buffers = {**needs.buffers, "bias": spec}
    forward = phases[Phase.FORWARD]
    phases[Phase.FORWARD] = replace(forward, reads=(*forward.reads, "bias"))
    if Phase.BACKWARD_WEIGHT in phases:
        backward = phases[Phase.BACKWARD_WEIGHT]
        phases[Phase.BACKWARD_WEIGHT] = replace(backward, writes=(*backward.writes, "dbias"))
        buffers["dbias"] = spec
    return replace(needs, phases=phases, buffers=buffers, kept=(*needs.kept, "bias"))


def _sharded_loss(
    replica: CudaReplica, lanes: int, enqueue: Callable[..., None]
) -> Callable[[Context], None]:
    """Return the stage of the loss that sums each micro-shard.

    Args:
        replica: its plan has micro-shards.
        lanes: threads that share a sample.
        enqueue: enqueues the kernel, for a context, with its blocks and those of micro-shards, the
            arrays that receive the loss sums and the sums of blocks, and the last arguments.
    """
    shards, pitch = replica.plan.setting.shards, np.int32(replica.gradient_slots.shape[1])
    blocks = loss_blocks(replica.plan.setting.shard_size * lanes)
    slots = replica.gradient_slots.reshape(-1)[replica.plan.trained.size :]
    scratch = replica.device.zeros((shards * (1 + blocks) + 1 + shards,), "uint64")

    def run(context: Context) -> None:
        last = *shard_arguments(context), pitch
        enqueue(context, (blocks, shards), (slots, scratch), *last)

    return run


def _update_kernel(rule: Optimizer) -> tuple[str, list[np.generic]]:
    """Return the kernel of an update rule, and its constants."""
    if isinstance(rule, Adam):
        betas = rule.beta1, rule.beta2, rule.epsilon, 1.0 - rule.beta1, 1.0 - rule.beta2
        return rule.kind, [np.float32(value) for value in betas]
    name = f"{rule.kind}_momentum" if rule.momentum else rule.kind
    momentum = [np.float32(rule.momentum)] if rule.momentum else []
    if isinstance(rule, RMSProp):
        values = rule.decay, 1.0 - rule.decay, rule.epsilon
        return name, [*map(np.float32, values), *momentum]
    return name, [*momentum, np.int32(rule.nesterov)] if momentum else []


def _bind_clipping(device: Device, replica: Replica, gradient: Array) -> Callable[[], None]:
    """Return a function that clips the gradient by its norm, if the update rule has a limit."""
    clip_norm = replica.plan.optimizer.clip_norm
    if clip_norm is None:
        return lambda: None
    assert gradient.size == replica.plan.trained.size, "the norm is that of the whole gradient"
    blocks = min(ceil_div(gradient.size, THREADS), MAX_CLIPPING_BLOCKS)
    grid, block = (blocks, 1, 1), (THREADS, 1, 1)
    add_squares = device.function("clipping.cu", "add_squares")
    clip_gradient = device.function("clipping.cu", "clip_gradient")
    partials, count = device.zeros((blocks,), "float64"), np.int32(gradient.size)

    def clip() -> None:
        add_squares(grid, block, [gradient, partials, count])
        clip_gradient(
            grid, block, [gradient, partials, np.int32(blocks), np.float32(clip_norm), count]
        )

    return clip


def _bind_scaling(device: Device, replica: CudaReplica, width: int) -> Callable[[], None]:
    """Return a function that scales the gradient by norms of layers, if the update rule does."""
    plan, rule = replica.plan, replica.plan.optimizer
    if not isinstance(rule, LARS | LAMB):
        return lambda: None
    size, ranges = plan.trained.size, list(slot_ranges(plan, slice(0, plan.trained.size)))
    w, g = replica.flat_parameters, replica.flat_gradients[:size]
    bounds = np.array([0, *(each.stop for each in ranges)], np.int32)
    starts, ends = device.uploaded(bounds), device.uploaded(bounds[1:])
    sources = device.uploaded(np.array(ratio_sources(plan), np.int32))
    decays = device.uploaded(np.array([each.decay for each in ranges], np.float32))
    rates = np.array([(each.decay, each.rate_factor) for each in ranges], np.float32)
    none = device.zeros((len(ranges),), "float32")
    partials = device.zeros((len(ranges), LAYER_BLOCKS, 2), "float64")
    grid, block = (LAYER_BLOCKS, len(ranges), 1), (THREADS, 1, 1)
    add_squares = device.function("clipping.cu", "add_layer_squares")
    scale_layers = device.function("clipping.cu", "scale_layers")
    direction, trust, added = None, np.float32(1.0), none
    if isinstance(rule, LAMB):
        direction = device.function("optimizers.cu", "lamb_direction", VECTOR=width)
        moments = replica.flat_state["first_moment"], replica.flat_state["second_moment"]
        sums = replica.flat_gradients[size:]
        values = device.uploaded(rates.reshape(-1))
        arguments = [w, g, *moments, sums, replica.numbers, ends, values]
        arguments += [np.int32(len(ranges)), np.int32(size), *_update_kernel(rule)[1]]
    else:
        trust, added = np.float32(rule.trust), decays

    def scale() -> None:
        if direction is not None:
            launch(direction, size // width, *arguments)
        add_squares(grid, block, [w, g, starts, partials])
        scale_layers(grid, block, [w, g, starts, sources, added, added, partials, trust])

    return scale
