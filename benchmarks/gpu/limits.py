"""What a GPU can do: copy its memory, and multiply large matrices."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.clock import Program, stream_timer, take_turns, torch_timer

COPY_BYTES = 2**31
"""Far beyond any cache."""
MATRIX = 8192
BLOCKS = 5


@dataclass(frozen=True)
class Limits:
    """Measured, and the best of a few looks.

    Attributes:
        copy: bytes/s, read and written, of a large copy.
        gemm: FLOP/s of a large matrix product by precision; what is missing was not measured.
    """

    copy: float
    gemm: dict[str, float]

    def seconds(self, flops: int, bytes_moved: int, precision: str) -> float:
        """The least that the roofline model allows: bound by arithmetic or by memory."""
        arithmetic = flops / self.gemm[precision] if precision in self.gemm else 0.0
        return max(arithmetic, bytes_moved / self.copy)


def measure_limits(precisions: tuple[str, ...], *, with_torch: bool) -> Limits:
    """Copy by CUDA itself, products by PyTorch."""
    rates = {p: gemm_rate(p) for p in precisions} if with_torch else {}
    return Limits(copy_rate(), rates)


def copy_rate() -> float:
    """Bytes/s, read and written, from one place of the GPU's memory to another."""
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
    """FLOP/s of PyTorch's product of square matrices of random numbers."""
    import torch

    from benchmarks.gpu.theirs import set_arithmetic

    set_arithmetic(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    program = Program(lambda: torch.mm(a, b, out=c), torch_timer)
    laps = take_turns({precision: program}, BLOCKS)[precision]
    return 2.0 * MATRIX**3 / (1e-6 * float(laps.us.min()))
