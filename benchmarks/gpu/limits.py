"""Roofs of the roofline model: memory bandwidth and the rate of large matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.clock import Program, stream_timer, take_turns, torch_timer

COPY_BYTES = 2**31
"""Bytes of a copy, far larger than any cache."""
MATRIX = 8192
BLOCKS = 5


@dataclass(frozen=True)
class Limits:
    """Measured limits: the best of several blocks.

    Attributes:
        copy: bytes/s of a large copy, reads and writes together.
        gemm: FLOP/s of a large matrix product, by the precisions that were measured.
    """

    copy: float
    gemm: dict[str, float]

    def seconds(self, flops: int, bytes_moved: int, precision: str) -> float:
        """Return the shortest time that the roofline model allows, in seconds."""
        arithmetic = flops / self.gemm[precision] if precision in self.gemm else 0.0
        return max(arithmetic, bytes_moved / self.copy)


def measure_limits(precisions: tuple[str, ...], *, with_torch: bool) -> Limits:
    """Measure copies by CUDA and, if available, products by PyTorch."""
    rates = {p: gemm_rate(p) for p in precisions} if with_torch else {}
    return Limits(copy_rate(), rates)


def copy_rate() -> float:
    """Return the bytes/s, read and written, of a copy within the GPU's memory."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source, target = (cupy.zeros(COPY_BYTES, cupy.uint8) for _ in range(2))
    runtime = cupy.cuda.runtime

    def start() -> None:
        runtime.memcpyAsync(
            target.data.ptr, source.data.ptr, COPY_BYTES,
            runtime.memcpyDeviceToDevice, stream.ptr,
        )  # fmt: skip

    laps = take_turns({"copy": Program(start, stream_timer(stream))}, BLOCKS)["copy"]
    cupy.get_default_memory_pool().free_all_blocks()
    return 2.0 * COPY_BYTES / (1e-6 * float(laps.us.min()))


def gemm_rate(precision: str) -> float:
    """Return the FLOP/s of PyTorch's product of random square matrices."""
    import torch

    from benchmarks.gpu.peers.theirs import set_arithmetic

    set_arithmetic(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    program = Program(lambda: torch.mm(a, b, out=c), torch_timer)
    laps = take_turns({precision: program}, BLOCKS)[precision]
    return 2.0 * MATRIX**3 / (1e-6 * float(laps.us.min()))
