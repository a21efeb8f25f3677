"""A training step as a list of stages over planned memory.

Names are imported when they are first used, so that settings can be declared next to the update
rules without loading NumPy, which help texts do not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptrain.plan.buckets import Bucket, make_buckets
    from dptrain.plan.flat import SUMS, FlatLayout, Slot
    from dptrain.plan.lowering import (
        Access,
        BufferSpec,
        Group,
        GroupNeeds,
        Phase,
        Setting,
        Storage,
    )
    from dptrain.plan.optimizers import LAMB, LARS, SGD, Adam, AdamW, Optimizer, RMSProp
    from dptrain.plan.plan import Plan, Stage, make_plan
    from dptrain.plan.shards import MicroShards

_MODULES = {
    **dict.fromkeys(("Bucket", "make_buckets"), "buckets"),
    **dict.fromkeys(("SUMS", "FlatLayout", "Slot"), "flat"),
    **dict.fromkeys(
        ("Access", "BufferSpec", "Group", "GroupNeeds", "Phase", "Setting", "Storage"), "lowering"
    ),
    **dict.fromkeys(("LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSProp"), "optimizers"),
    **dict.fromkeys(("Plan", "Stage", "make_plan"), "plan"),
    "MicroShards": "shards",
}

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "SUMS",
    "Access",
    "Adam",
    "AdamW",
    "Bucket",
    "BufferSpec",
    "FlatLayout",
    "Group",
    "GroupNeeds",
    "MicroShards",
    "Optimizer",
    "Phase",
    "Plan",
    "RMSProp",
    "Setting",
    "Slot",
    "Stage",
    "Storage",
    "make_buckets",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dptrain.plan' has no attribute '{name}'")
    return getattr(importlib.import_module(f"dptrain.plan.{_MODULES[name]}"), name)
