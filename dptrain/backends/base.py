"""What a backend supplies.

A backend is small: how it groups layers and stores parameters (`dptrain.plan.lowering.Lowering`),
one operation for each kind of layer, a loss, an update. What is the same for all is the replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from numpy.typing import NDArray

from dptrain.backends.replica import Arrays, Kernel, Replica
from dptrain.errors import UserError
from dptrain.memory import require_memory
from dptrain.network.initial import draw
from dptrain.network.layers import Layer, Parameter, Shape
from dptrain.network.network import Network, Node
from dptrain.plan.lowering import (
    Group,
    GroupNeeds,
    Phase,
    Precision,
    Setting,
    Storage,
    canonical_storage,
)
from dptrain.plan.plan import Plan


class Backend(ABC):
    """One way of computing. Subclasses are stateless; `create` in each backend's package makes one.

    Class attributes:
        name: the word users say.
        precisions: supported precisions by the user's word for them, the default first.
        fusions: runs of layer classes that are computed as one group, tried longest first.
        channels_last: activations lie as (N, H, W, C) instead of (N, C, H, W).
        concurrent_weight_gradients: stages of `BACKWARD_WEIGHT` may run beside those that follow.
        max_elements: largest number of elements of a buffer that kernels can count; None for any.
        threaded: more threads compute faster.
    """

    name: ClassVar[str]
    precisions: ClassVar[Mapping[str, Precision]]
    fusions: ClassVar[tuple[tuple[type[Layer], ...], ...]] = ()
    channels_last: ClassVar[bool] = False
    concurrent_weight_gradients: ClassVar[bool] = False
    max_elements: ClassVar[int | None] = None
    threaded: ClassVar[bool] = False

    def precision(self, name: str) -> Precision:
        """How numbers are kept under the precision called `name`."""
        if name not in self.precisions:
            raise UserError(
                f"backend {self.name} has no precision '{name}'; "
                f"it has {', '.join(self.precisions)}"
            )
        return self.precisions[name]

    def fuses(self, nodes: tuple[Node, ...]) -> bool:
        """Whether these layers, which match one of `fusions`, are computed as one group."""
        return True

    def staging_shape(self, network: Network, setting: Setting) -> Shape:
        """Messages to steps that may be under way, and bytes of each; () where steps get none."""
        return ()

    def storage(self, node: Node, parameter: Parameter) -> Storage:
        """How a parameter is stored; canonical unless a backend says otherwise."""
        return canonical_storage(parameter)

    @abstractmethod
    def needs(self, group: Group, setting: Setting) -> GroupNeeds:
        """What computing `group` takes."""

    @abstractmethod
    def bind(self, group: Group, arrays: Arrays, replica: Replica) -> Mapping[Phase, Kernel]:
        """Kernels for every phase in this group's needs, bound to `arrays`."""

    @abstractmethod
    def bind_loss(
        self,
        replica: Replica,
        output: NDArray[Any],
        target: NDArray[Any],
        gradient: NDArray[Any] | None,
        sums: NDArray[Any],
    ) -> Kernel:
        """Kernel that writes the gradient of the loss and adds to ``sums[:2]``.

        Args:
            replica: its network names the loss.
            output: (N, F) what the network gave.
            target: int32 (N,) or (N, F), see `Loss.targets`.
            gradient: (N, F), or None in a plan without training.
            sums: loss · (samples / global samples) and number of correct answers are written to
                its first two elements. Correct: arg-max (first, among equals) equals the label;
                for ``binary``, samples whose every output is on the right side of ½; for
                ``values``, 0.
        """

    @abstractmethod
    def bind_update(self, replica: Replica, elements: slice) -> Kernel:
        """Update rule; `Replica.updates` counts the coming update already.

        Args:
            replica: whose parameters.
            elements: of the flat arrays, whole slots.
        """

    def place(self, local_rank: int) -> str:
        """Choose the device of this rank, the `local_rank`-th of its node.

        Returns:
            What tells the device from others of the node; empty where ranks may share it.
        """
        return ""

    def free_bytes(self) -> int | None:
        """Bytes that replicas may still take on the device; None where they lie in host memory."""
        return None

    def allocate(self, plan: Plan, *, seed: int) -> Replica:
        """Memory for `plan`, with its stages bound to it; parameters are 0."""
        return Replica(self, plan, seed=seed)

    def prepare(self, plan: Plan) -> None:
        """Have ready on disk what binding `plan` needs, such as compiled kernels.

        Where several processes are about to compile the same plan on one machine, one of them
        calls this first, so that the others find the work done.
        """

    def make_replica(self, plan: Plan, *, seed: int = 0) -> Replica:
        """Allocate memory for `plan`, bind its stages, draw the initial parameters."""
        require_memory(
            sum(plan.memory.values()),
            f"network {plan.network.name} with batch size {plan.batch_size:,}",
            "use a smaller batch size or network",
            available_bytes=self.free_bytes(),
        )
        replica = self.allocate(plan, seed=seed)
        for parameter in plan.network.parameters:
            replica.parameters.fill(parameter.name, partial(draw, parameter, seed))
        return replica
