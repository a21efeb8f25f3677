"""The interface of a backend.

A backend is small: how it groups layers and stores parameters (`dptrain.plan.lowering.Lowering`),
one operation for each type of layer, the losses and the update rules. `Replica` has what all
backends have in common.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.clipping import Clipping, numpy_clipping
from dptrain.backends.digests import DigestKernel, numpy_digests
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.layer_scaling import LayerScaling, numpy_scaling
from dptrain.backends.replica import Arrays, Context, GradientAddition, Kernel, Replica
from dptrain.errors import UserError
from dptrain.memory import require_memory
from dptrain.network.initial import draw
from dptrain.network.layers import Layer, Parameter, Shape
from dptrain.network.network import Network, Node
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.lowering import (
    Explanation,
    Group,
    GroupNeeds,
    Phase,
    Precision,
    Setting,
    Storage,
    canonical_storage,
)
from dptrain.plan.optimizers import AVERAGE
from dptrain.plan.plan import Plan
from dptrain.plan.selection import KernelSelection

Bandwidths = tuple[tuple[int, float], ...]
"""Pairs (bytes, GB/s) as `dptrain.measure.profile.profile.Roofs.copies`."""


class Backend(ABC):
    """Binds the stages of a plan to kernels; `create` in each backend's package makes one.

    Class attributes:
        name: the name that users pass.
        precisions: supported precisions by name, the default first.
        fusions: sequences of layer classes that are computed as one group, tried longest first.
        inference_fusions: further ones of plans without training.
        channels_last: True stores activations as (N, H, W, C) instead of (N, C, H, W).
        concurrent_weight_gradients: True if stages of `BACKWARD_WEIGHT` may overlap with those that
            follow.
        most_elements: largest number of elements of a buffer that kernels can count; None for any.
        threaded: True if the backend computes with several threads.
        supports_shards: True if plans may have micro-shards, see `dptrain.plan.shards`.
        measures_kernels: True if `measured_selection` may be called.
        double_buffers_input: True if a minibatch is loaded to one of two buffers during the step
            before.
    """

    name: ClassVar[str]
    precisions: ClassVar[Mapping[str, Precision]]
    fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]] = ()
    inference_fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]] = ()
    channels_last: ClassVar[bool] = False
    concurrent_weight_gradients: ClassVar[bool] = False
    max_elements: ClassVar[int | None] = None
    threaded: ClassVar[bool] = False
    supports_shards: ClassVar[bool] = False
    measures_kernels: ClassVar[bool] = False
    double_buffers_input: ClassVar[bool] = False

    @property
    def limits(self) -> DeviceLimits | None:
        """Limits of the GPU; None if there is none, or it has not been opened."""
        return None

    def precision(self, name: str) -> Precision:
        """Return the data types of the precision called `name`."""
        if name not in self.precisions:
            raise UserError(
                f"backend {self.name} has no precision '{name}'; "
                f"expected one of {', '.join(self.precisions)}"
            )
        return self.precisions[name]

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        """Return whether these layers, which match one of `fusions`, are computed as one group."""
        return True

    def adds_gradient(self, group: Group, local: str, setting: Setting) -> bool:
        """Return whether the group can add to the input gradient with a local name."""
        return False

    def sums_output(self, group: Group, reader: Group, setting: Setting) -> bool:
        """Return whether the forward stage of `group` can sum its output for `reader`."""
        return False

    def sums_gradient(self, group: Group, normalization: Group, setting: Setting) -> bool:
        """Return whether the input gradient of `group` can be summed for `normalization`."""
        return False

    def staging_shape(self, network: Network, setting: Setting) -> Shape:
        """Return (staging slots, bytes of each) on the device; () if there are none."""
        return ()

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """Return how a parameter is stored; the default is the canonical layout."""
        return canonical_storage(parameter)

    @abstractmethod
    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        """Return the phases, buffers, FLOPs and bytes of computing `group`."""

    def explain(self, group: Group, setting: Setting) -> Mapping[Phase, Explanation]:
        """Return how each phase of `group` is computed, as far as it is known without a device."""
        return {}

    def estimated_roofs(self, setting: Setting) -> tuple[float, Bandwidths] | None:
        """Return the limits of the machine for which `Explanation.estimated_ms` is estimated.

        They are the peak rate of products in GFLOP/s and the bandwidths; None if they are not
        known.
        """
        return None

    def require_tuning(self) -> None:
        """Raise a `UserError` unless `measured_selection` may be called."""
        if not self.measures_kernels:
            raise UserError(
                f"backend {self.name} selects kernels without measurements; remove --tune, or use "
                "--backend cuda"
            )

    def measured_selection(
        self,
        plan: Plan,
        say: Callable[[str], None],
        report: Callable[[int, int], None] = lambda done, count: None,
    ) -> KernelSelection:
        """Return the fastest kernels of the stages of `plan`, by measurements on the device.

        Args:
            plan: selects the kernels with the lowest estimates.
            say: receives one line about a cached measurement that cannot be used.
            report: called with the number of measured candidates, and the number of all.

        """
        raise NotImplementedError(f"backend {self.name} does not measure kernels")

    @abstractmethod
    def bind(
        self, group: Group, phases: Collection[Phase], arrays: Arrays, replica: Replica
    ) -> Mapping[Phase, Kernel]:
        """Return a kernel for each of `phases`, bound to `arrays`.

        Args:
            group: the layers.
            phases: those of the stages that the plan has for the group; they alone decide what is
                bound. `BACKWARD_RECOMPUTE` is `FORWARD` with other arrays.
            arrays: have every array that these stages access.
            replica: has the memory.
        """

    def bind_additions(self, replica: Replica, additions: Sequence[GradientAddition]) -> Kernel:
        """Return the kernel that adds contributions to gradients, one after another.

        Args:
            replica: has the memory.
            additions: what is added, for the samples of a minibatch.
        """
        raise UserError(
            f"backend {self.name} cannot train networks in which several layers read a tensor"
        )

    @abstractmethod
    def bind_loss(
        self,
        replica: Replica,
        output: NDArray[Any],
        target: NDArray[Any],
        gradient: NDArray[Any] | None,
        sums: NDArray[Any],
    ) -> Kernel:
        """Return the kernel that computes the loss and its gradient.

        Args:
            replica: its network has the loss.
            output: (N, F), the network's output.
            target: int32 (N,) or (N, F), see `Loss.targets`.
            gradient: (N, F), or None in a plan without training.
            sums: the kernel writes loss · (samples / global samples) and the number of correct
                predictions to its first two elements. A prediction is correct if the arg-max (the
                first of equal ones) is the label; for ``binary``, if every output is on the right
                side of ½; for ``values`` the number is 0. A backend with micro-shards sums each of
                them first, and writes a row of `Replica.slot_sums` for each gradient slot.
        """

    @abstractmethod
    def bind_update(self, replica: Replica, elements: slice) -> Kernel:
        """Return the kernel of the update rule. `Replica.updates` includes the present update.

        Args:
            replica: has the parameters.
            elements: of the flat arrays; start and stop are multiples of 16.
        """

    def bind_average(self, replica: Replica, elements: slice) -> Kernel:
        """Return the kernel that updates the moving average of the parameters after an update.

        Args:
            replica, elements: see `bind_update`.
        """
        w, average = replica.flat_parameters[elements], replica.flat_state[AVERAGE][elements]
        rule = replica.plan.optimizer

        def run(context: Context) -> None:
            average[:] += w.dtype.type(rule.average_weight(replica.updates)) * (w - average)

        return run

    def bind_clipping(
        self, replica: Replica, gradient: NDArray[Any], squares: NDArray[np.float64]
    ) -> Clipping:
        """Return the kernels that clip a slice of the gradient in host memory.

        Args:
            replica: has the threads.
            gradient, squares: see `numpy_clipping`.
        """
        return numpy_clipping(gradient, squares)

    def bind_scaling(
        self, replica: Replica, elements: slice, squares: Sequence[NDArray[np.float64]]
    ) -> LayerScaling:
        """Return the kernels that scale a slice of the gradient by norms of layers, in host memory.

        Args:
            replica, elements, squares: see `numpy_scaling`.
        """
        return numpy_scaling(replica, elements, squares)

    def bind_addition(
        self, replica: Replica, target: NDArray[Any], source: NDArray[Any], *, copies: bool = False
    ) -> Callable[[], None]:
        """Return the kernel that adds `source` to `target`, parts of flat arrays.

        Args:
            replica: has the threads or the device.
            target, source: (n,); n is a multiple of 16.
            copies: True overwrites the target.
        """
        if copies:
            return partial(np.copyto, target, source)
        return partial(np.add, target, source, out=target)

    def bind_digests(
        self, replica: Replica, flat: NDArray[Any], bounds: NDArray[np.int64], first: int
    ) -> DigestKernel:
        """Return the kernel that computes the digests of parts of a flat array.

        Args:
            replica: has the threads or the device.
            flat, bounds, first: see `numpy_digests`.
        """
        return numpy_digests(flat, bounds, first)

    def choose_device(self, local_rank: int) -> str:
        """Choose the device of this rank, number `local_rank` on its node.

        Returns:
            The identity of the device on its node; empty if ranks may share it.
        """
        return ""

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device; None if replicas use host memory."""
        return None

    def allocate(self, plan: Plan, *, seed: int, arrays: FlatArrays | None = None) -> Replica:
        """Allocate memory for `plan` and bind its stages to it; parameters are 0.

        Args:
            plan: buffers and stages.
            seed: of the dropout masks.
            arrays: flat arrays to use, for backends that use host memory; None allocates them.
        """
        return Replica(self, plan, seed=seed, arrays=arrays)

    def compilation_progress(self) -> tuple[int, int]:
        """Return the number of compiled kernels, and of all; (0, 0) if they are not counted."""
        return 0, 0

    def compile_kernels(self, processes: int = 1) -> None:
        """Compile the kernels that were bound, unless binding compiles them.

        Processes of a machine that call this at the same time divide the work.

        Args:
            processes: largest number of processes that compile for this one, including itself.
        """

    def make_replica(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        arrays: FlatArrays | None = None,
        compiles: bool = True,
    ) -> Replica:
        """Allocate memory for `plan`, bind its stages, and draw the initial parameters.

        Args:
            plan: buffers and stages.
            seed: of the initial parameters and the dropout masks.
            arrays: flat arrays to use, see `allocate`. Only their owner draws parameters.
            compiles: False leaves it to the caller to call `compile_kernels`.
        """
        keeps_activations = plan.training and not plan.setting.recompute
        others = ", or --recompute" if keeps_activations else ""
        size_bytes, available_bytes = sum(plan.memory.values()), self.free_bytes()
        if available_bytes is not None and size_bytes > available_bytes:
            # Replicas that are no longer used are parts of cycles, which still hold memory.
            gc.collect()
            available_bytes = self.free_bytes()
        require_memory(
            size_bytes,
            f"{plan.network.label} with batch size {plan.batch_size:,}",
            f"use a smaller batch size or network{others}",
            available_bytes=available_bytes,
        )
        replica = self.allocate(plan, seed=seed, arrays=arrays)
        for parameter in plan.network.parameters if replica.owns_parameters else ():
            replica.parameters.fill(parameter.name, partial(draw, parameter, seed))
        if compiles:
            self.compile_kernels()
        return replica
