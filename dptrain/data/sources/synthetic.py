"""Random samples of any shape, for timing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.assembly import preprocessing_for
from dptrain.data.base import Dataset
from dptrain.data.spec import Request
from dptrain.data.stored import CachedSamples
from dptrain.errors import UserError
from dptrain.machine import free_memory
from dptrain.memory import require_memory

_POOL = 256
_POOL_BYTES = 64 * 2**20
_STREAM = 0x73796E
_BYTES_PER_SAMPLE = 24
"""Memory for the order of an epoch: random numbers, their order, and a working array."""


def open_synthetic(request: Request) -> Dataset:
    """Open random samples: normal inputs; classes, zeros and ones, or normal values as targets.

    The samples repeat a small pool, so that reading takes little time.
    """
    network = request.network
    count = request.number("samples", 8192)
    need, free = _BYTES_PER_SAMPLE * count, free_memory()
    if need > free:
        raise UserError(
            f"synthetic: samples is {count:,}; the order of an epoch takes "
            f"{need / 1e9:,.0f} GB of memory, but {free / 1e9:,.0f} GB are available; use fewer"
        )
    shape, width, targets = network.input_shape, network.num_outputs, network.loss.targets
    pool = max(1, min(_POOL, count, _POOL_BYTES // (4 * math.prod(shape))))
    require_memory(4 * pool * (math.prod(shape) + width), f"{request.text}: {pool} samples")
    key = np.array([request.seed % 2**64, _STREAM], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    x = generator.standard_normal((pool, *shape), dtype=np.float32)
    y: NDArray[Any]
    if targets == "classes":
        y = generator.integers(width, size=pool, dtype=np.int32)
    elif targets == "binary":
        y = generator.integers(2, size=(pool, width)).astype(np.float32)
    else:
        y = generator.standard_normal((pool, width), dtype=np.float32)
    return Dataset(
        name=request.name,
        train=CachedSamples(x, y, count),
        test=CachedSamples(x, y, max(1, count // 4)),
        input_shape=shape,
        targets=targets,
        classes=tuple(str(label) for label in range(width)) if targets == "classes" else None,
        description=f"random numbers for timing; {count:,} training samples, {pool} different ones",
        num_outputs=width,
        preprocessing=preprocessing_for(request, shape, x.dtype),
    )
