"""Convolutions on a GPU: buffers and stages, whose kernels `algorithms` selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from dptrain.backends.cuda.convolution import algorithms
from dptrain.backends.cuda.convolution.algorithms import (
    Product,
    case_of,
    choose,
)
from dptrain.backends.cuda.convolution.bound_convolution import BoundConvolution, Case, Extra
from dptrain.backends.cuda.dense.gemm_tiles import GemmConfig, SplitK
from dptrain.backends.cuda.epilogues import epilogue_of
from dptrain.backends.cuda.weighted import RELU, RELU_POOL, fused_epilogue, separate_epilogue
from dptrain.backends.replica import Context, Kernel
from dptrain.network.layers import Conv2d
from dptrain.plan.lowering import (
    Access,
    BufferSpec,
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Setting,
)
from dptrain.plan.selection import Choice


class Convolution(BoundConvolution):
    """Conv2d, optionally with ReLU, optionally with ReLU and an epilogue (`epilogues`).

    If pooling is fused, the output before pooling is never written, and its gradient only if that
    is faster (`algorithms.unpools_separately`).
    """

    @classmethod
    def adds_gradient(cls, group: Group, local: str) -> bool:
        return local == "dx"

    @classmethod
    def choices(cls, group: Group, setting: Setting) -> dict[Phase, tuple[Case, Choice[Case]]]:
        """Return the cases of the products of a plan, and the algorithms that compute them."""
        phases = [Phase.FORWARD]
        if setting.training:
            phases.append(Phase.BACKWARD_WEIGHT)
        if group.gradients:
            phases.append(Phase.BACKWARD_INPUT)
        cases = {phase: case_of(group, setting, phase) for phase in phases}
        return {phase: (case, choose(case)) for phase, case in cases.items()}

    @classmethod
    def explain(cls, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        return {
            phase: Explanation.of(
                choice, algorithms.candidates(case), setting.selection, group.stage(phase),
                tile=str(_config(case, choice)), note=algorithms.note(case, choice),
                per_ms=1e3,
            )
            for phase, (case, choice) in cls.choices(group, setting).items()
        }  # fmt: skip

    @classmethod
    def wgrad_split(cls, group: Group, setting: Setting) -> SplitK:
        case = case_of(group, setting, Phase.BACKWARD_WEIGHT)
        return _config(case, choose(case)).split_k

    @classmethod
    def joins_shards(cls, group: Group, setting: Setting) -> bool:
        case = case_of(group, setting, Phase.BACKWARD_WEIGHT)
        joins = _product_of(choose(case)).joins_shards(case)
        return joins and super().joins_shards(group, setting)

    @classmethod
    def sum_rows(cls, group: Group, setting: Setting) -> int:
        return _sum_rows(group, setting, Phase.FORWARD) if group.kinds == (Conv2d,) else 0

    @classmethod
    def gradient_sum_rows(cls, group: Group, setting: Setting) -> int:
        return _sum_rows(group, setting, Phase.BACKWARD_INPUT)

    @classmethod
    def needs(cls, group: Group, setting: Setting) -> GroupNeeds:
        n, fused, separate = setting.batch_size, fused_epilogue(group), separate_epilogue(group)
        buffers: dict[str, BufferSpec] = {}
        maps = BufferSpec((n, *group.head.output_maps), setting.activations)
        dz: tuple[str, ...] = ("dy", "y") if fused == RELU else ("dy",)
        if separate is not None:
            dz, buffers = ("dmaps",), {"maps": maps, **separate.buffers(group, setting)}
        elif fused == RELU_POOL:
            dz = ("dmaps",) if algorithms.unpools_separately(group, setting) else ("dy", "argmax")
            buffers["argmax"] = BufferSpec((n, *group.tail.output_maps), "uint8")
        phases = {Phase.FORWARD: Access(("x",), ("y", *buffers))}
        if setting.training:
            cls._add_backward(group, setting, dz, phases, buffers)
        if group.sums:
            shape = cls.sum_rows(group, setting), 4, group.head.output_maps[0]
            buffers["sums"] = BufferSpec(shape, "float32")
            forward = phases[Phase.FORWARD]
            phases[Phase.FORWARD] = replace(forward, writes=(*forward.writes, "sums"))
        for phase, (case, choice) in cls.choices(group, setting).items():
            _with_extra(phase, _extra(case, choice), phases, buffers)
        return GroupNeeds(phases, buffers)

    @classmethod
    def _add_backward(
        cls, group: Group, setting: Setting, dz: tuple[str, ...], phases: dict[Phase, Access],
        buffers: dict[str, BufferSpec],
    ) -> None:  # fmt: skip
        """Add the phases of the gradients, which read `dz`, and their buffers."""
        separate = separate_epilogue(group)
        if algorithms.writes_dz(group, setting):
            maps = setting.batch_size, *group.head.output_maps
            buffers["dmaps"] = BufferSpec(maps, setting.activations)
            reads = ("argmax",) if separate is None else separate.reads
            phases[Phase.BACKWARD] = Access(("dy", *reads), ("dmaps",))
        cls.add_partial_buffer(group, setting, buffers)
        partial = ("partial",) if "partial" in buffers else ()
        phases[Phase.BACKWARD_WEIGHT] = Access(("x", *dz), partial)
        if group.gradients:
            phases[Phase.BACKWARD_INPUT] = Access(dz, ("dx",))

    @cached_property
    def _bound(self) -> dict[Phase, tuple[Case, Choice[Case]]]:
        return self.choices(self.group, self.setting)

    @cached_property
    def reads_dmaps(self) -> bool:
        return algorithms.writes_dz(self.group, self.setting)

    def forward(self) -> Kernel:
        epilogue = separate_epilogue(self.group)
        kernels = [*self._preparations(), self._product(Phase.FORWARD)]
        if epilogue is not None:
            kernels.append(epilogue(self).forward())

        def run(context: Context) -> None:
            for kernel in kernels:
                kernel(context)

        return run

    def _preparations(self) -> list[Kernel]:
        """Return the kernels that write the operands of both products with weights."""
        found = []
        # In this order the weights of halo tiles are packed last, as in all measurements so far.
        for algorithm in reversed(algorithms.CONVOLUTION):
            configurations = {
                phase: choice.configuration
                for phase, (case, choice) in self._bound.items()
                if choice.algorithm is algorithm and _extra(case, choice).prepared
            }
            if configurations and algorithm.prepare is not None:
                found.append(algorithm.prepare(self, configurations))
        return found

    def _product(self, phase: Phase) -> Kernel:
        _, choice = self._bound[phase]
        kernel: Kernel = choice.algorithm.bind(self, phase, choice.configuration)
        return kernel

    def backward(self) -> Kernel:
        """Return the stage that writes `dmaps`."""
        epilogue = epilogue_of(self.group)
        assert epilogue is not None
        return epilogue(self).backward()

    def backward_weight(self) -> Kernel:
        return self._product(Phase.BACKWARD_WEIGHT)

    def backward_input(self) -> Kernel:
        return self._product(Phase.BACKWARD_INPUT)


def _product_of(choice: Choice[Case]) -> Product:
    assert isinstance(choice.algorithm, Product)
    return choice.algorithm


def _config(case: Case, choice: Choice[Case]) -> GemmConfig:
    return _product_of(choice).config(case, choice.configuration)


def _extra(case: Case, choice: Choice[Case]) -> Extra:
    return _product_of(choice).buffers(case, choice.configuration)


def _sum_rows(group: Group, setting: Setting, phase: Phase) -> int:
    case = case_of(group, setting, phase)
    choice = choose(case)
    return _product_of(choice).sum_rows(case, choice.configuration)


def _with_extra(
    phase: Phase, extra: Extra, phases: dict[Phase, Access], buffers: dict[str, BufferSpec]
) -> None:
    """Add the buffers of an algorithm, and the accesses of the stages to them."""
    buffers |= {**extra.prepared, **extra.written}
    forward = phases[Phase.FORWARD]
    new = tuple(name for name in extra.prepared if name not in forward.writes)
    phases[Phase.FORWARD] = replace(forward, writes=(*forward.writes, *new))
    own = phases[phase]
    prepared = tuple(extra.prepared) if phase is not Phase.FORWARD else ()
    phases[phase] = Access((*own.reads, *extra.reads, *prepared), (*own.writes, *extra.written))
