"""Plans for GPUs that are not here: every launch is within the limits of the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS, DEVICES
from dptrain.errors import UserError
from dptrain.network import get_network
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import MicroShards
from tests.devices.compile_kernels import Usage, compile_unit, kernel_usages, problems
from tests.devices.networks import planned_networks
from tests.devices.planned import Launch, PlannedDevice, step_launches
from tests.tiers import tiered

NETWORKS = planned_networks()
PRECISIONS = ("fp32", "tf32", "bf16")
SUPPORTED = [
    (device, precision)
    for device, limits in DEVICES.items()
    for precision in PRECISIONS
    if precision == "fp32" or limits.has_tensor_floats
]


@pytest.mark.parametrize(("device", "precision"), tiered(SUPPORTED, [("T4", "fp32")]))
def test_all_launches_of_a_step_are_within_the_limits(device: str, precision: str) -> None:
    for name, network in NETWORKS.items():
        for batch_size in (32, 256):
            launches = step_launches(network, DEVICES[device], batch_size, precision)
            assert len(launches) > len(network.nodes), name


SHARD_SUMS = ("split_k_reduce.cu", "micro_shards.cu")
"""Files whose kernels depend on how many micro-shards a rank has: they add them."""

SHARD_MACROS = {"MICRO_SHARDS", "OWN_SHARDS", "ALL_SHARDS", "FINISHES"}
"""Macros by which kernels sum several micro-shards, each as if it were the only one."""


def _kinds(launches: list[Launch]) -> set[tuple[Any, ...]]:
    """Return all that decides the bits of one micro-shard: kernels, tiles and threads."""
    return {
        (launch.file, launch.name, launch.block, launch.shared_bytes, *(
            pair for pair in launch.defines if pair[0] not in SHARD_MACROS
        ))
        for launch in launches
        if launch.file not in SHARD_SUMS
    }  # fmt: skip


@pytest.mark.parametrize(("device", "precision"), tiered(SUPPORTED, [("H200", "bf16")]))
def test_kernels_do_not_depend_on_the_division_of_micro_shards(device: str, precision: str) -> None:
    """Micro-shards of 9 and 8 samples, on one to four ranks, also in unequal shares."""
    divisions = (1, ()), (2, ()), (2, (3, 1)), (4, ())
    for name in ("model0", "resnet20"):
        found = [
            _kinds(
                step_launches(
                    get_network(name), DEVICES[device], 33, precision,
                    MicroShards.of_rank(4, rank, ranks, counts=counts, batch_size=33),
                )
            )
            for ranks, counts in divisions
            for rank in {0, ranks - 1}
        ]  # fmt: skip
        assert all(kinds == found[0] for kinds in found), name


@pytest.mark.parametrize("device", ["V100", "T4"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_precisions_without_tensor_cores_are_refused(device: str, precision: str) -> None:
    with pytest.raises(UserError, match=rf"{device} .* cannot multiply in {precision}; use"):
        make_plan(
            NETWORKS["model0"], CudaBackend(PlannedDevice(DEVICES[device])), 32, precision=precision
        )


def test_a_plan_for_another_gpu_is_refused() -> None:
    plan = make_plan(NETWORKS["model0"], CudaBackend(PlannedDevice(DEVICES["T4"])), 32)
    with pytest.raises(ValueError, match=r"the plan is for .*T4"):
        CudaBackend(PlannedDevice(DEVICES["A100"])).allocate(plan, seed=0)


def test_persistent_kernels_have_one_wave_of_blocks() -> None:
    """More multiprocessors have more blocks, each of which computes fewer tiles."""
    found = {}
    for device in ("RTX 3090", "A100", "B200"):
        limits = DEVICES[device]
        launches = step_launches(NETWORKS["solar"], limits, 256, "bf16")
        [persistent] = [
            launch for launch in launches
            if launch.name == "conv2d_forward_halo" and dict(launch.defines)["PERSISTENT"]
        ][:1]  # fmt: skip
        blocks = persistent.grid[0] * persistent.grid[1]
        resident = limits.multiprocessors * dict(persistent.defines)["MIN_BLOCKS"]
        assert resident - persistent.grid[1] < blocks <= resident
        found[device] = blocks
    assert found["RTX 3090"] < found["A100"] < found["B200"]


def test_occupancy_is_limited_by_threads_registers_and_shared_memory() -> None:
    h100 = DEFAULT_LIMITS
    assert h100.blocks_per_sm(threads=256, registers=32, shared_bytes=0) == 8
    assert h100.blocks_per_sm(threads=256, registers=65, shared_bytes=0) == 3
    assert h100.blocks_per_sm(threads=256, registers=32, shared_bytes=100_000) == 2
    assert h100.blocks_per_sm(threads=256, registers=32, shared_bytes=300_000) == 0
    assert replace(h100, max_threads=1024).blocks_per_sm(256, 32, 0) == 4
    assert replace(h100, capability=86).blocks_per_sm(32, 32, 0) == 16


LOG = """
ptxas info    : 25 bytes gmem
ptxas info    : Compiling entry function 'add' for 'sm_90a'
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 34 registers, used 1 barriers, 129 bytes smem
ptxas info    : Compiling entry function 'copy' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
"""


def test_registers_and_shared_memory_are_read_from_the_messages_of_the_compiler() -> None:
    assert kernel_usages(LOG) == {"add": Usage(34, 129, 12), "copy": Usage(10, 0, 0)}


def test_launches_that_exceed_registers_or_shared_memory_are_reported() -> None:
    launch = Launch("a.cu", "add", (), (1, 1, 1), (512, 2, 1), 64 << 10)
    assert list(problems(launch, Usage(64, 1, 0), DEVICES["T4"])) == [
        "65537 bytes of shared memory exceed 65536"
    ]
    assert list(problems(launch, Usage(65, 0, 0), DEVICES["H100"])) == [
        "73728 registers of a block exceed 65536"
    ]


def test_a_kernel_compiles_with_its_usage() -> None:
    usages = compile_unit(75, ("clock.cu", ()))
    assert isinstance(usages, dict)
    assert 0 < usages["record_time"].registers <= 255
    assert "error" in str(compile_unit(75, ("gemm.cuh", (("TILE_M", -1),))))
