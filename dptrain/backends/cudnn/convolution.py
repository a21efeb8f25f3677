"""Convolutions by cuDNN, and the bias gradient, epilogues and conversions around them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dptrain.backends.cuda.dense.gemm_tiles import SplitK, ceil_div, split_terms
from dptrain.backends.cuda.device.device import Array
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.device.launching import launch, launch_reduction
from dptrain.backends.cuda.epilogues import epilogue_of
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.backends.cudnn.activation import relu_backward
from dptrain.backends.cudnn.engines import Plan
from dptrain.backends.cudnn.graphs import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Problem,
    problem_of,
)
from dptrain.backends.cudnn.replica import CudnnReplica
from dptrain.backends.replica import Context, Kernel
from dptrain.network.activations import ReLU
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

BIAS_THREADS = 256
"""Threads of a block, ``THREADS`` of ``backward_bias.cu``."""

MAX_CHANNEL_VECTORS = 32
"""Largest number of threads of a block along the channels, ``CHANNEL_VECTORS`` of
``backward_bias.cu``."""

BF16_PARAMETERS = {"bf16_weight": "weight", "bf16_bias": "bias"}
"""Buffers of the parameters in bfloat16, and the parameters that they are copies of."""


class CudnnConvolution(Operation[Conv2d]):
    """Conv2d by cuDNN, optionally with ReLU, optionally with ReLU and an epilogue.

    Epilogues (`cuda.epilogues`) are kernels of the cuda backend. With bf16 activations, cuDNN also
    requires bfloat16 weights and returns bfloat16 weight gradients; kernels convert them from and
    to float32.
    """

    replica: CudnnReplica
    reads_bias = False

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        epilogue, parameters = epilogue_of(group), group.head.parameters
        maps = BufferSpec((setting.batch_size, *group.head.output_maps), setting.activations)
        buffers = {"maps": maps, **epilogue.buffers(group, setting)} if epilogue else {}
        converts = _converts(setting)
        if converts:
            for name, parameter in zip(BF16_PARAMETERS, parameters, strict=False):
                buffers[name] = BufferSpec((parameter.size,), setting.activations)
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        dz = "dmaps" if epilogue else "dy"
        if epilogue:
            buffers["dmaps"] = maps
            phases[Phase.BACKWARD] = Access(("dy", *epilogue.reads), ("dmaps",))
        elif ReLU in group.kinds:
            phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
        scratch = {}
        if converts:
            scratch["bf16_dweight"] = BufferSpec((parameters[0].size,), setting.activations)
        split_k = _bias_split(group, setting)
        if len(parameters) > 1 and split_k.count > 1:
            scratch["partial"] = BufferSpec((split_k.count, parameters[1].size), "float32")
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", dz), tuple(scratch))
        weights = ("bf16_weight",) if converts else ()
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access((dz, *weights), ("dx",))
        return GroupNeeds(phases, {**buffers, **scratch})

    def backward(self) -> Kernel:
        """Return the stage that writes the gradient before ReLU and epilogue."""
        epilogue = epilogue_of(self.group)
        return epilogue(self).backward() if epilogue else self._relu_backward()

    def backward_input(self) -> Kernel:
        """Return the stage that writes dx."""
        a, converts = self.arrays, _converts(self.setting)
        arrays = self._dz, a["bf16_weight" if converts else "weight"], a["dx"]
        return self._by_cudnn(Phase.BACKWARD_INPUT, BACKWARD_INPUT, arrays)

    @property
    def _dz(self) -> Array:
        """The gradient of the convolution's output."""
        return self.arrays["dmaps" if epilogue_of(self.group) else "dy"]

    def forward(self) -> Kernel:
        """Return the stage that writes y."""
        a, epilogue, kernels = self.arrays, epilogue_of(self.group), list[Kernel]()
        names = ["weight", "bias"] if self.layer.bias else ["weight"]
        if _converts(self.setting):
            copies = {copy: name for copy, name in BF16_PARAMETERS.items() if name in names}
            kernels = [
                self._convert("float_to_bfloat16", a[name], a[copy])
                for copy, name in copies.items()
            ]
            names = list(copies)
        arrays = a["x"], *(a[name] for name in names), a["maps" if epilogue else "y"]
        kernels.append(self._by_cudnn(Phase.FORWARD, FORWARD, arrays))
        if epilogue:
            kernels.append(epilogue(self).forward())
        return _sequence(*kernels)

    def _relu_backward(self) -> Kernel:
        if self.setting.activations in self.replica.engines.library.primitives.dtypes:
            return relu_backward(self.replica, self.arrays["dy"], self.arrays["y"])
        return self.relu_backward(1.0)

    def backward_weight(self) -> Kernel:
        """Return the stage that writes the gradients of the parameters."""
        a, clear = self.arrays, self._clear()
        converts = _converts(self.setting)
        result = a["bf16_dweight" if converts else "dweight"]
        arrays = a["x"], self._dz, result
        kernels = [self._by_cudnn(Phase.BACKWARD_WEIGHT, BACKWARD_WEIGHT, arrays)]
        if converts:
            kernels.append(self._convert("bfloat16_to_float", result, a["dweight"]))
        if self.layer.bias:
            kernels.append(self._backward_bias())
        whole = _sequence(*kernels)
        return lambda context: (whole if context.n else clear)(context)

    def _by_cudnn(self, phase: Phase, kind: str, arrays: Sequence[Array]) -> Kernel:
        """Return the stage of a cuDNN graph. Engines for full batches are selected by timing."""
        engines, full, node = self.replica.engines, self.batch_size, self.group.head
        relu, precision = ReLU in self.group.kinds, self.replica.plan.precision
        measure, plans = self.device.specializes, dict[int, Plan]()

        def problem(n: int) -> Problem:
            return problem_of(node, kind, n, relu=relu, precision=precision)

        def plan(n: int) -> Plan:
            if n not in plans:
                plans[n] = engines.select(problem(n), arrays, measure=measure and n == full)
            return plans[n]

        # Run once before the first step: cuDNN loads code lazily, which a capture forbids.
        engines.run(plan(full))
        note = engines.note(problem(full), plan(full))
        self.replica.notes[f"{self.group.name}.{phase.value}"] = note

        def run(context: Context) -> None:
            if context.n:
                engines.run(plan(context.n))

        return run

    def _convert(self, name: str, source: Array, target: Array) -> Kernel:
        """Return a stage that converts an array between float32 and bfloat16."""
        source, target = source.reshape(-1), target.reshape(-1)
        width = 4 if source.size % 4 == 0 else 1
        function = self.device.function("cast.cu", name, VECTOR=width)
        arguments = source, target, np.int32(source.size)
        return lambda context: launch(function, source.size // width, *arguments)

    def _backward_bias(self) -> Kernel:
        """Return the stage that writes dbias: dz summed over pixels, in a fixed order."""
        filters, *sides = self.group.head.output_maps
        pixels, setting = math.prod(sides), self.setting
        split_k, width = _bias_split(self.group, setting), self.vector_width(filters)
        vectors = _channel_vectors(filters, width)
        add_pixels = self.function(
            "backward_bias.cu", "backward_bias", VECTOR=width, CHANNEL_VECTORS=vectors
        )
        reduce = self.device.function("split_k_reduce.cu", "split_k_reduce")
        db, dz = self.arrays["dbias"], self._dz.reshape(-1)
        partial = self.arrays["partial"].reshape(-1) if split_k.count > 1 else db
        columns, terms = ceil_div(filters, vectors * width), np.int32(split_k.terms)

        def run(context: Context) -> None:
            count = context.n * pixels
            parts = split_k.used(count)
            add_pixels(
                (parts, columns, 1),
                (BIAS_THREADS, 1, 1),
                [dz, partial, np.int32(count), np.int32(filters), terms],
            )
            if split_k.count > 1:
                sizes = np.int32(filters), np.int32(0)
                launch_reduction(
                    reduce, filters, partial, np.int32(parts), db, sizes[0], db, sizes[1]
                )

        return run

    def _clear(self) -> Kernel:
        """Return the stage that writes the gradients of an empty batch, which are 0."""
        dw = self.arrays["dweight"].reshape(-1)
        db = self.arrays["dbias"] if self.layer.bias else dw
        bias_size = db.size if self.layer.bias else 0
        function = self.device.function("split_k_reduce.cu", "split_k_reduce")
        arguments = dw, np.int32(0), dw, np.int32(dw.size), db, np.int32(bias_size)
        return lambda context: launch_reduction(function, dw.size + bias_size, *arguments)


def _converts(setting: Setting) -> bool:
    """Return whether weights and their gradients are converted from and to activations' type."""
    return setting.activations != setting.dtype


def _sequence(*kernels: Kernel) -> Kernel:
    """Return a stage that runs kernels one after the other."""

    def run(context: Context) -> None:
        for kernel in kernels:
            kernel(context)

    return run


def _channel_vectors(filters: int, width: int) -> int:
    """Return how many threads of a block process the channels of a pixel: a power of two."""
    return min(1 << (ceil_div(filters, width) - 1).bit_length(), MAX_CHANNEL_VECTORS)


def _bias_split(group: Group, setting: Setting) -> SplitK:
    """Return the split-K of the bias gradient, the sum over the pixels of a batch."""
    filters, height, width = group.head.output_maps
    step = vector_width(filters, np.dtype(setting.activations).itemsize)
    blocks = ceil_div(filters, _channel_vectors(filters, step) * step)
    terms, threads = setting.batch_size * height * width, blocks * BIAS_THREADS
    return split_terms(terms, threads, limits_of(setting))
