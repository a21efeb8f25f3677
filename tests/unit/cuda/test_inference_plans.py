"""Plans for inference, which have no gradients, with every algorithm of a forward product."""

from __future__ import annotations

import pytest

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution.algorithms import CONVOLUTION
from dptrain.backends.cuda.device.hardware import DEVICES
from dptrain.network import BatchNorm2d, Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.network.layers import Layer
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan
from dptrain.plan.selection import KernelSelection
from tests.devices.planned import PlannedDevice
from tests.tiers import tiered

FORWARD = [row.name for row in CONVOLUTION if Phase.FORWARD in row.phases]
ENDS: dict[str, list[Layer]] = {
    "plain": [],
    "normalised": [BatchNorm2d(), ReLU()],
    "pooled": [ReLU(), MaxPool2d(2), Dropout(0.5)],
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("precision", tiered(["fp32", "tf32", "bf16"], ["tf32"]))
def test_every_forward_algorithm_serves_inference(name: str, precision: str) -> None:
    backend, bound = CudaBackend(PlannedDevice(DEVICES["H100"])), 0
    for channels in (3, 64):
        for layers in ENDS.values():
            network = Network((channels, 16, 16), [Conv2d(64), *layers, Flatten(), Dense(10)])
            stage = (
                f"{next(group.name for group in make_plan(network, backend, 64).groups)}.forward"
            )
            plan = make_plan(
                network, backend, 64, precision=precision, training=False,
                selection=KernelSelection(((stage, name),)),
            )  # fmt: skip
            (group, *_) = plan.groups
            found = backend.explain(group, plan.setting)[Phase.FORWARD].algorithm
            backend.make_replica(plan)
            bound += found == name
    exists = precision != "fp32" or name in ("general GEMM", "halo-tile implicit GEMM")
    assert bool(bound) == exists, f"{name} was bound {bound} times"
