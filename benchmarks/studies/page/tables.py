"""The tables of details of the page, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks.studies.claims.verdicts import Results
from benchmarks.studies.page import tables_a, tables_b, tables_d

TABLES: Mapping[str, Callable[[Results], str]] = MappingProxyType({
    "implementations": tables_a.implementations,
    "implementations on GPUs": tables_a.gpu_implementations,
    "layers": tables_a.layers, "ladder": tables_a.ladder, "sizes": tables_a.sizes,
    "solar": tables_b.solar, "perceptrons": tables_b.perceptrons, "width": tables_b.width,
    "largest": tables_b.largest, "inference": tables_b.inference, "keras": tables_b.keras,
    "strategies": tables_b.strategies,
    "profile": tables_d.operations, "variants": tables_d.variants, "machines": tables_d.machines,
})  # fmt: skip
