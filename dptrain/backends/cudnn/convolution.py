"""Convolutions bound to arrays, and what cuDNN leaves to kernels of our own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dptrain.backends.cuda.device import Array
from dptrain.backends.cuda.epilogues import epilogue_of
from dptrain.backends.cuda.gemm_tiles import SplitK, ceil_div, split_terms
from dptrain.backends.cuda.launching import launch, launch_reduction
from dptrain.backends.cuda.operations import Kernels, Operation, vector
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
from dptrain.network.layers import ReLU
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting

SUM_THREADS = 256
"""Of a block, `THREADS` of ``backward_bias.cu``."""

MOST_LANES = 32
"""Threads of a block side by side along the channels, `CHANNEL_VECTORS` of ``backward_bias.cu``."""

NARROW = "narrow_weight", "narrow_bias"


class Convolution(Operation):
    """Conv2d, perhaps with ReLU, perhaps with ReLU and a tail (`cuda.tails`), by cuDNN.

    What follows the rectifier, and backward through it, are kernels of the backend cuda. Where
    activations are bfloat16 cuDNN wants the weights so too and gives their gradients so: kernels
    convert.
    """

    replica: CudnnReplica

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        tail, (weight, bias) = epilogue_of(group), group.head.parameters
        maps = BufferSpec((setting.batch_size, *group.head.output_maps), setting.activations)
        buffers = {"maps": maps, **tail.buffers(group, setting)} if tail else {}
        narrow = setting.activations != setting.dtype
        if narrow:
            for name, parameter in zip(NARROW, (weight, bias), strict=True):
                buffers[name] = BufferSpec((parameter.size,), setting.activations)
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if not setting.training:
            return GroupNeeds(phases, buffers)
        dz = "dmaps" if tail else "dy"
        if tail:
            buffers["dmaps"] = maps
            phases[Phase.BACKWARD] = Access(("dy", *tail.reads), ("dmaps",))
        elif ReLU in group.kinds:
            phases[Phase.BACKWARD] = Access(("dy", "y"), ("dy",))
        scratch = {}
        if narrow:
            scratch["narrow_dweight"] = BufferSpec((weight.size,), setting.activations)
        parts = _bias_parts(group, setting)
        if parts.count > 1:
            scratch["partial"] = BufferSpec((parts.count, bias.size), "float32")
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", dz), tuple(scratch))
        phases[Phase.BACKWARD_INPUT] = Access((dz, *NARROW[:narrow]), ("dx",))
        return GroupNeeds(phases, {**buffers, **scratch})

    def kernels(self) -> Kernels:
        a, kernels = self.arrays, {Phase.FORWARD: self._forward()}
        if "dy" not in a:
            return kernels
        if tail := epilogue_of(self.group):
            kernels[Phase.BACKWARD] = tail(self).backward()
        elif ReLU in self.group.kinds:
            kernels[Phase.BACKWARD] = self.relu_mask(1.0)
        kernels[Phase.BACKWARD_WEIGHT] = self._backward_weight()
        if "dx" in a:
            arrays = self._dz, a.get("narrow_weight", a["weight"]), a["dx"]
            kernels[Phase.BACKWARD_INPUT] = self._by_cudnn(
                Phase.BACKWARD_INPUT, BACKWARD_INPUT, arrays
            )
        return kernels

    @property
    def _dz(self) -> Array:
        """Gradient by what the convolution gave."""
        return self.arrays["dmaps" if epilogue_of(self.group) else "dy"]

    def _forward(self) -> Kernel:
        a, tail, parts = self.arrays, epilogue_of(self.group), list[Kernel]()
        weight, bias = a["weight"], a["bias"]
        if NARROW[0] in a:
            parts = [self._convert("float_to_bfloat16", a[name[7:]], a[name]) for name in NARROW]
            weight, bias = (a[name] for name in NARROW)
        arrays = a["x"], weight, bias, a["maps" if tail else "y"]
        parts.append(self._by_cudnn(Phase.FORWARD, FORWARD, arrays))
        if tail:
            parts.append(tail(self).forward())
        return _in_order(*parts)

    def _backward_weight(self) -> Kernel:
        a, clear = self.arrays, self._clear()
        narrow = a.get("narrow_dweight")
        result = a["dweight"] if narrow is None else narrow
        arrays = a["x"], self._dz, result
        parts = [self._by_cudnn(Phase.BACKWARD_WEIGHT, BACKWARD_WEIGHT, arrays)]
        if narrow is not None:
            parts.append(self._convert("bfloat16_to_float", narrow, a["dweight"]))
        whole = _in_order(*parts, self._sum_channels())
        return lambda context: (whole if context.n else clear)(context)

    def _by_cudnn(self, phase: Phase, kind: str, arrays: Sequence[Array]) -> Kernel:
        """Stage of one graph; the engine for full batches is measured, if that is worth it."""
        engines, full, node = self.replica.engines, self.batch_size, self.group.head
        relu, precision = ReLU in self.group.kinds, self.replica.plan.precision
        measure, plans = self.device.specializes, dict[int, Plan]()

        def problem(n: int) -> Problem:
            return problem_of(node, kind, n, relu=relu, precision=precision)

        def plan(n: int) -> Plan:
            if n not in plans:
                plans[n] = engines.choose(problem(n), arrays, measure=measure and n == full)
            return plans[n]

        # Once before any step, so that what is loaded late is there when a step is captured.
        engines.run(plan(full))
        note = engines.note(problem(full), plan(full))
        self.replica.notes[f"{self.group.name}.{phase.value}"] = note

        def run(context: Context) -> None:
            if context.n:
                engines.run(plan(context.n))

        return run

    def _convert(self, name: str, source: Array, target: Array) -> Kernel:
        """Stage that copies an array, between float32 and bfloat16."""
        source, target = source.reshape(-1), target.reshape(-1)
        width = 4 if source.size % 4 == 0 else 1
        function = self.device.function("cast.cu", name, VECTOR=width)
        arguments = source, target, np.int32(source.size)
        return lambda context: launch(function, source.size // width, *arguments)

    def _sum_channels(self) -> Kernel:
        """Stage that writes dbias: dz summed over pixels, in parts and in an order of its own."""
        filters, *sides = self.group.head.output_maps
        pixels, setting = math.prod(sides), self.replica.plan.setting
        parts, width = _bias_parts(self.group, setting), self.vector(filters)
        lanes = _lanes(filters, width)
        first = self.function(
            "backward_bias.cu", "backward_bias", VECTOR=width, CHANNEL_VECTORS=lanes
        )
        second = self.device.function("split_k_reduce.cu", "split_k_reduce")
        db, dz = self.arrays["dbias"], self._dz.reshape(-1)
        partial = self.arrays["partial"].reshape(-1) if parts.count > 1 else db
        columns, terms = ceil_div(filters, lanes * width), np.int32(parts.terms)

        def run(context: Context) -> None:
            count = context.n * pixels
            used = parts.used(count)
            first(
                (used, columns, 1), (SUM_THREADS, 1, 1),
                [dz, partial, np.int32(count), np.int32(filters), terms],
            )  # fmt: skip
            if parts.count > 1:
                sizes = np.int32(filters), np.int32(0)
                launch_reduction(
                    second, filters, partial, np.int32(used), db, sizes[0], db, sizes[1]
                )

        return run

    def _clear(self) -> Kernel:
        """Stage that writes the gradients of no samples: a sum of no parts."""
        dw, db = self.arrays["dweight"].reshape(-1), self.arrays["dbias"]
        function = self.device.function("split_k_reduce.cu", "split_k_reduce")
        arguments = dw, np.int32(0), dw, np.int32(dw.size), db, np.int32(db.size)
        return lambda context: launch_reduction(function, dw.size + db.size, *arguments)


def _in_order(*kernels: Kernel) -> Kernel:
    def run(context: Context) -> None:
        for kernel in kernels:
            kernel(context)

    return run


def _lanes(filters: int, width: int) -> int:
    """The power of 2 of threads that reach over all channels, or as far as a block does."""
    return min(1 << (ceil_div(filters, width) - 1).bit_length(), MOST_LANES)


def _bias_parts(group: Group, setting: Setting) -> SplitK:
    """How the sum over the pixels of a batch is cut."""
    filters, height, width = group.head.output_maps
    step = vector(filters, np.dtype(setting.activations).itemsize)
    blocks = ceil_div(filters, _lanes(filters, step) * step)
    return split_terms(setting.batch_size * height * width, blocks * SUM_THREADS)
