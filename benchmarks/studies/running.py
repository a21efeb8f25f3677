"""Make measurements and store each result as soon as it is known."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.studies.claims.reader import all_rows
from benchmarks.studies.compiling import compile_all, requests
from benchmarks.studies.machine import describe
from benchmarks.studies.measuring import (
    CPU,
    GPU,
    MANY_CORES,
    MEASUREMENTS,
    Context,
    Measurement,
    Values,
)
from benchmarks.studies.store import PARTIAL, Store
from dptrain.errors import UserError

CORES = "cores"
"""Measurements of the processor that are worth repeating on many cores."""
PARTS = ("exact", CPU, CORES, GPU)
WORTH_COMPILING = 3
"""Number of measurements on a GPU for which kernels are compiled in parallel processes first."""


def choose(results: Sequence[str], parts: Sequence[str]) -> list[Measurement]:
    """Return the measurements that some results need.

    Args:
        results: identifiers such as ``A1`` or ``Q7``, or names of measurements; empty for all.
        parts: of `PARTS`; empty for all.

    Raises:
        UserError: nothing has such a name.
    """
    rows = {row.id: row for row in all_rows()}
    for name in results:
        if name not in rows and name not in MEASUREMENTS:
            raise UserError(
                f"there is no result '{name}'; expected an identifier such as A1, B5, D2 or Q7, "
                f"or one of {', '.join(MEASUREMENTS)}"
            )
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--only has the value '{part}'; expected {', '.join(PARTS)}")
    wanted = {each for name in results
              for each in (rows[name].measurements if name in rows else (name,))}  # fmt: skip
    return [
        m
        for m in MEASUREMENTS.values()
        if (not wanted or m.name in wanted)
        and (not parts or m.needs in parts or (CORES in parts and m.many_cores))
    ]


def obstacle(context: Context, measurement: Measurement, parts: Sequence[str]) -> str:
    """Return why a measurement cannot be made on this machine; empty if it can."""
    if measurement.needs == GPU and not context.gpus:
        return "it needs a GPU and CuPy"
    if measurement.package and importlib.util.find_spec(measurement.package) is None:
        return f"it needs the package {measurement.package}"
    cores_only = measurement.needs == CPU and CORES in parts and CPU not in parts
    if cores_only and len(context.cores) < MANY_CORES:
        return f"it needs at least {MANY_CORES} cores; this machine has {len(context.cores)}"
    return ""


def is_complete(record: Mapping[str, Any] | None) -> bool:
    """Return whether a stored record is that of a measurement that came to its end."""
    return record is not None and not record["values"].get(PARTIAL)


def pending(
    chosen: Sequence[Measurement], context: Context, store: Store, parts: Sequence[str]
) -> tuple[list[Measurement], list[str]]:
    """Return the measurements to make, and for each of the others why it is not made."""
    left, others = [], []
    for measurement in chosen:
        kind = context.kind(measurement.needs)
        reason = obstacle(context, measurement, parts)
        if reason:
            others.append(f"{measurement.name}: not measured: {reason}")
        elif is_complete(store.read(kind).get(measurement.name)):
            others.append(f"{measurement.name}: stored already for {kind}")
        else:
            left.append(measurement)
    return left, others


def run(
    chosen: Sequence[Measurement],
    context: Context,
    store: Store,
    parts: Sequence[str] = (),
    *,
    again: bool = False,
    compiled: bool = False,
) -> list[str]:
    """Make measurements that are not stored yet, and return the reasons of those that failed.

    Args:
        chosen: the measurements.
        context: the machine.
        store: receives the results.
        parts: as for `choose`.
        again: measure also what is stored.
        compiled: True if the kernels of the GPU are compiled already.
    """
    left, others = pending(chosen, context, Store(Path(os.devnull)) if again else store, parts)
    print("\n".join(others))
    if not compiled and sum(m.needs == GPU for m in left) >= WORTH_COMPILING:
        compile_all(requests(), 2 * context.threads)
    failed = []
    begin = time.monotonic()
    for measurement in left:

        def say(text: str, name: str = measurement.name) -> None:
            print(f"{time.monotonic() - begin:5.0f} s  {name}: {text}", flush=True)

        kind, start = context.kind(measurement.needs), time.monotonic()

        def keep(
            values: Values, each: Measurement = measurement, kind: str = kind, start: float = start
        ) -> None:
            about = describe(context, each.needs, time.monotonic() - start)
            store.add(kind, each.name, about, values)

        say(f"measuring ({kind})")
        try:
            keep(measurement.measure(replace(context, say=say, keep=keep)))
        except Exception as error:
            # Libraries of GPUs raise exceptions of many types; the other results do not depend on
            # this one.
            traceback.print_exc()
            failed.append(f"{measurement.name}: {type(error).__name__}: {error}")
            say(failed[-1])
            continue
        say(f"stored after {time.monotonic() - start:.0f} s")
        # A replica and its stages refer to each other, so only the collector frees their memory.
        gc.collect()
    return failed
