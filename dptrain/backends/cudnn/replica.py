"""A replica whose convolutions are cuDNN's."""

from __future__ import annotations

from dptrain.backends.base import Backend
from dptrain.backends.cuda.device import Device
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.cudnn.engines import Engines
from dptrain.backends.cudnn.library import Library
from dptrain.plan.plan import Plan


class CudnnReplica(CudaReplica):
    """A replica on a GPU.

    Attributes:
        engines: of its convolutions, with the workspace that they share. Its size is known when
            the replica is bound, not before: only cuDNN on the GPU tells it.
    """

    def __init__(
        self, backend: Backend, plan: Plan, *, seed: int, device: Device, library: Library
    ) -> None:
        self.engines = Engines(library, device)
        super().__init__(backend, plan, seed=seed, device=device)

    @property
    def memory_bytes(self) -> dict[str, int]:
        return {**super().memory_bytes, "workspace": self.engines.workspace_bytes}
