"""The conditions of a result: hardware, versions, date and load, without names of machines."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.gpu.machine import driver_version
from benchmarks.gpu.machine import versions as gpu_versions
from benchmarks.machine import about as cpu_about
from benchmarks.studies.measuring import GPU, Context


def describe(context: Context, needs: str, seconds: float) -> dict[str, Any]:
    """Return the conditions of a measurement that has just ended.

    Args:
        context: the machine.
        needs: what the measurement needs.
        seconds: how long it took.
    """
    about = cpu_about()
    about["cores"] = len(context.cores)
    load = about.pop("load at the start")
    facts = {**about, "load": load, "niceness": os.getpriority(os.PRIO_PROCESS, 0),
             "seconds": round(seconds, 1)}  # fmt: skip
    if needs == GPU:
        facts["gpu"] = context.gpu_name
        facts["gpus"] = context.gpus
        facts["driver"] = driver_version() or "unknown"
        facts["versions"] = {**facts["versions"], **gpu_versions()}
    return facts
