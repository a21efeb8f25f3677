"""The replica of the cudnn backend."""

from __future__ import annotations

from dptrain.backends.base import Backend
from dptrain.backends.cuda.device.device import Device
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.cudnn.engines import EngineFilter, Engines
from dptrain.backends.cudnn.library import Library
from dptrain.backends.cudnn.primitives import PrimitiveCalls
from dptrain.plan.plan import Plan


class CudnnReplica(CudaReplica):
    """A replica whose convolutions, poolings, activations and softmax are computed by cuDNN.

    Attributes:
        engines: of the convolutions, with their shared workspace. Its size is unknown before the
            replica is bound, because only cuDNN on the GPU reports it.
    """

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        *,
        seed: int,
        device: Device,
        library: Library,
        allowed: EngineFilter,
    ) -> None:
        self.engines = Engines(library, device, allowed)
        super().__init__(backend, plan, seed=seed, device=device)

    @property
    def memory_bytes(self) -> dict[str, int]:
        return {**super().memory_bytes, "workspace": self.engines.workspace_bytes}


def primitive_calls(replica: CudnnReplica, kind: str) -> PrimitiveCalls:
    """Return what makes stages of a replica that call cuDNN's functions of a kind."""
    return PrimitiveCalls(replica.engines.library.primitives, replica.device, kind)
