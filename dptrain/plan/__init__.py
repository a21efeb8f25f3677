"""A training step as a list of stages over planned memory."""

from dptrain.plan.buckets import Bucket, make_buckets
from dptrain.plan.flat import SUMS, FlatLayout, Slot
from dptrain.plan.lowering import Access, BufferSpec, Group, GroupNeeds, Phase, Setting, Storage
from dptrain.plan.optimizers import SGD, Adam, AdamW, Optimizer
from dptrain.plan.plan import Plan, Stage, make_plan
from dptrain.plan.shards import MicroShards

__all__ = [
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
    "Setting",
    "Slot",
    "Stage",
    "Storage",
    "make_buckets",
    "make_plan",
]
