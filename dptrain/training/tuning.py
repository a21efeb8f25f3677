"""The kernels of a training job: selected by measurements on rank 0, or from the checkpoint.

Kernels differ in the order of their sums, so results differ in the last bits. A run that continues
on the same GPU, with the same precision and batch size, uses the kernels that its checkpoint
stores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dptrain.backends.base import Backend
from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.world import World
from dptrain.plan.plan import Plan, with_selection
from dptrain.plan.selection import MEASURED, KernelSelection
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.resources import NOTICE_AFTER_S, notice_if_slow
from dptrain.training.settings import Settings

TUNING = "tuning kernels for this GPU, network and batch size; later runs use the result"


def select_kernels(
    chosen: Settings,
    world: World,
    backend: Backend,
    plan: Plan,
    run: RunDirectory | None,
    *,
    quiet: bool = False,
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan with the fastest kernels, and what a checkpoint stores about them.

    Rank 0 measures. Ranks with another GPU, precision or batch size use the lowest estimates: all
    ranks have the same parameters in any case, because they apply the same sum of gradients.

    Args:
        chosen: the settings; without `tune`, the plan is returned as it is.
        world: the ranks; every rank calls this function.
        backend: has a device.
        plan: of this rank.
        run: the run directory, on rank 0.
        quiet: True prints nothing.
    """
    if not chosen.tune:
        return plan, {}
    found = world.broadcast_json(
        call_on_rank_zero(
            world, lambda: _stored(chosen, plan, run) or _measure(backend, plan, quiet)
        )
    )
    if found["conditions"] != _conditions(plan):
        return plan, found
    selection = KernelSelection(tuple(sorted(found["selected"].items())), MEASURED)
    return with_selection(plan, backend, selection), found


def _conditions(plan: Plan) -> dict[str, Any]:
    """Return on what a selection depends, in addition to the network."""
    setting = plan.setting
    limits = {} if setting.limits is None else asdict(setting.limits)
    return {"device": limits, "precision": plan.precision, "batch_size": plan.batch_size}


def _stored(chosen: Settings, plan: Plan, run: RunDirectory | None) -> dict[str, Any] | None:
    """Return the kernels in the newest checkpoint of a resumed run, if they are for this plan."""
    if chosen.resume is None or run is None or not run.has_checkpoint():
        return None
    stored = run.checkpoints.load().run_facts.spec.get("kernels")
    if not isinstance(stored, Mapping) or stored.get("conditions") != _conditions(plan):
        return None
    return dict(stored)


def _measure(backend: Backend, plan: Plan, quiet: bool) -> dict[str, Any]:
    """Measure on this rank, and print the progress if it takes long."""
    say = _ignore if quiet else _say
    with notice_if_slow("" if quiet else TUNING):
        selection = backend.measured_selection(plan, say, _progress(say))
    return {"conditions": _conditions(plan), "selected": dict(selection.names)}


def _progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return a function that reports measured candidates after two seconds."""
    start = time.monotonic()

    def report(done: int, count: int) -> None:
        if time.monotonic() - start > NOTICE_AFTER_S:
            say(f"tuning kernels: {done} of {count} candidates of each stage measured")

    return report


def _say(text: str) -> None:
    print(f"dptrain: {text}", file=sys.stderr)


def _ignore(text: str) -> None:
    pass
