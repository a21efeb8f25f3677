"""How wide the vectors are, and how many rows of a product one register tile holds.

Both follow the processor that Numba compiles for, which is this one unless Numba is told otherwise
(``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES``). Numba keys its cache by the same two values, so
kernels of one width are never loaded for another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Registers:
    """The register tile that suits a processor.

    Attributes:
        width: float32 elements of a vector.
        rows: rows of a tile; two vectors of accumulators each must fit in the registers, with
            room for two vectors of B and one broadcast element of A.
    """

    width: int
    rows: int


AVX512 = Registers(width=16, rows=8)
AVX2 = Registers(width=8, rows=6)
PORTABLE = Registers(width=4, rows=6)
"""128-bit vectors, which every processor that Numba supports has."""


def registers(features: str) -> Registers:
    """Choose by the processor's features, as LLVM writes them (``+avx2,-avx512f,…``)."""
    present = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
    if "avx512f" in present:
        return AVX512
    if {"avx2", "fma"} <= present:
        return AVX2
    return PORTABLE


def compiled_registers() -> Registers:
    """The tile of the processor that Numba compiles for now."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return registers(features)
