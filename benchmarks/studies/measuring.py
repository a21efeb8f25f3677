"""Measurements by name, and the machines on which each is made."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.backends import load_backend
from dptrain.machine import available_cores

EXACT, CPU, GPU = "exact", "cpu", "gpu"
"""What a measurement needs: nothing in particular, the processor, or a GPU."""
MANY_CORES = 8
"""Smallest number of cores of a machine on which scaling over cores is measured."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """The machine, and the options of the user.

    Attributes:
        cores: numbers of the cores that may be used.
        gpus: number of GPUs.
        gpu_name: name of the first GPU; empty without one.
        cifar10: folder of CIFAR-10's binary files; None if the user has none.
        quick: fewer repeats, for tests.
        on_gpu: True for a measurement on a GPU.
        say: prints a line of progress.
        keep: stores the values that are known so far.
    """

    cores: tuple[int, ...]
    gpus: int = 0
    gpu_name: str = ""
    cifar10: Path | None = None
    quick: bool = False
    on_gpu: bool = False
    say: Callable[[str], None] = print
    keep: Callable[[Values], None] = lambda values: None

    @property
    def threads(self) -> int:
        """Number of compute threads that use all cores; 1 on a GPU."""
        return 1 if self.on_gpu else len(self.cores)

    @property
    def backend(self) -> str:
        """The backend with our own kernels."""
        return "cuda" if self.on_gpu else "numba"

    @property
    def precision(self) -> str:
        """The precision of the backend."""
        return next(iter(load_backend(self.backend).precisions))

    @property
    def counts(self) -> list[int]:
        """Numbers of threads and ranks: powers of 2 up to the number of cores, at most 16."""
        return [n for n in (1, 2, 4, 8, 16) if n <= len(self.cores)]

    def kind(self, needs: str) -> str:
        """Return the kind of machine under which results are stored."""
        if needs == GPU:
            return f"gpu-{gpu_kind(self.gpu_name)}"
        return f"cpu-{len(self.cores)}" if needs == CPU else EXACT


def gpu_kind(name: str) -> str:
    """Return a short name of a GPU: ``h100`` for ``NVIDIA H100 80GB HBM3``."""
    model = re.search(r"\b[A-Z]{1,3}\d{2,4}\w*\b", name)
    return (model[0] if model else name.replace(" ", "-")).lower()


def find_context(**options: Any) -> Context:
    """Return the context of this process."""
    if hasattr(os, "sched_getaffinity"):
        cores = tuple(sorted(os.sched_getaffinity(0)))[: available_cores()]
    else:
        cores = tuple(range(available_cores()))
    gpus, name = _find_gpus()
    return Context(cores, gpus, name, **options)


def _find_gpus() -> tuple[int, str]:
    """Return the number of GPUs and the name of the first; 0 if CuPy is missing or fails."""
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
        return count, cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except Exception:
        return 0, ""


@dataclass(frozen=True)
class Measurement:
    """A function that measures what one or more results need.

    Attributes:
        name: name under which its result is stored.
        needs: `EXACT`, `CPU` or `GPU`.
        many_cores: True if it is worth repeating on a machine with many cores.
        measure: returns values for JSON.
        package: module that must be installed; empty if none.
    """

    name: str
    needs: str
    many_cores: bool
    measure: Callable[[Context], Values] = field(repr=False)
    package: str = ""


MEASUREMENTS: dict[str, Measurement] = {}
"""All measurements by name, in the order of their definition."""


def measurement(
    name: str, needs: str, *, many_cores: bool = False, package: str = "", also_gpu: bool = False
) -> Callable[[Callable[[Context], Values]], Callable[[Context], Values]]:
    """Register a function as a measurement; with `also_gpu`, on a GPU too, as ``name-gpu``."""

    def register(function: Callable[[Context], Values]) -> Callable[[Context], Values]:
        def on_gpu(context: Context) -> Values:
            return function(replace(context, on_gpu=True))

        first = on_gpu if needs == GPU else function
        MEASUREMENTS[name] = Measurement(name, needs, many_cores, first, package)
        if also_gpu:
            other = f"{name}-gpu"
            MEASUREMENTS[other] = Measurement(other, GPU, False, on_gpu, package)
        return function

    return register


def load_measurements() -> Mapping[str, Measurement]:
    """Import the modules that define measurements, and return all of them."""
    from benchmarks.studies import (  # noqa: F401
        agreement,
        cudnn,
        exact,
        inference,
        keras_peer,
        ladder,
        perceptrons,
        profiles,
        scaling,
        solar,
        step_parts,
        strategies_gpu,
        training,
        unlike,
        variants,
    )

    return MEASUREMENTS


def summary(values: Sequence[float]) -> Values:
    """Return median, quartiles, minimum and number of repeated measurements."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {
        "median": float(middle), "q1": float(low), "q3": float(high), "min": float(min(values)),
        "n": len(values),
    }  # fmt: skip
