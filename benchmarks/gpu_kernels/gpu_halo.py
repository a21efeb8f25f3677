"""Compare halo tiles with gathering kernels for layers that do not fill halo tiles.

    python3 -m benchmarks.gpu_kernels.gpu_halo [--limit SECONDS] [NETWORK:BATCH:PRECISION ...]

Requires a GPU and CuPy. Every convolution runs once with the gathering kernels and once with halo
tiles wherever they exist, on the same random arrays. A line shows, for the stages that differ, the
measured µs of both and in brackets the estimates, which select one of them. Gathering can need a
separate pass that unpools dy; its time is part of the input gradient. Errors are
‖halo − gather‖ / ‖gather‖ of y, dw, db and dx.
The kernels of a case are compiled in parallel while earlier cases are measured. After `--limit`
seconds no further case starts.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_kernels.gpu_products import Planned, Unit, compile_unit
from benchmarks.outside import find_network
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.convolution import algorithms
from dptrain.backends.cuda.convolution.convolution import Convolution as Operation
from dptrain.backends.cuda.device.device import Array, Device, Function
from dptrain.backends.cuda.operation import Kernels
from dptrain.backends.replica import Replica
from dptrain.machine import available_cores
from dptrain.network.layers import Conv2d
from dptrain.plan import SGD
from dptrain.plan.lowering import Group, Phase
from dptrain.plan.plan import make_plan, with_selection
from dptrain.plan.selection import KernelSelection

CASES = (
    "model0:2048:bf16", "odd:512:tf32", "strided:512:bf16", "input113:256:bf16", "odd:32:bf16",
    "lenet5:512:bf16", "strided:32:tf32", "model0:32:bf16",
)  # fmt: skip
"""Networks whose convolutions do not fill halo tiles; the first needs the fewest kernels."""

CONVOLUTION_FILES = ("conv2d", "pack_weights", "split_k", "pooling")
"""Beginnings of the sources that convolutions use; no other source is compiled."""

GATHERING = (algorithms.GATHER.name,)
HALO_TILES = algorithms.HALO.name, algorithms.HALO_GRADIENT.name
"""Names of the algorithms of both variants."""

PHASES = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)


class Convolution(NamedTuple):
    """A convolution in one variant, bound to arrays of its own."""

    group: Group
    arrays: Mapping[str, Array]
    kernels: Kernels
    tiles: Mapping[Phase, Any]


Variant = tuple[Replica, dict[str, Convolution]]


def without_other_kernels(device: Device) -> None:
    """Replace kernels that convolutions do not use by functions that do nothing."""
    compile_function = device.function

    def function(file: str, name: str, **defines: int | str) -> Function:
        if file.startswith(CONVOLUTION_FILES):
            return compile_function(file, name, **defines)
        return lambda *_, **__: None

    device.function = function  # type: ignore[method-assign]


def variant(backend: CudaBackend, case: str, names: Sequence[str]) -> Variant:
    """Return a replica and its convolutions, computed by the algorithms with some names."""
    name, batch_size, precision = case.split(":")
    plan = make_plan(
        find_network(name), backend, int(batch_size), precision=precision, optimizer=SGD()
    )
    groups = [group for group in plan.groups if isinstance(group.head.layer, Conv2d)]
    wanted = tuple(
        (group.stage(phase), row.name)
        for group in groups for phase in PHASES for row in algorithms.CONVOLUTION
        if row.name in names and phase in row.phases
    )  # fmt: skip
    plan = with_selection(plan, backend, KernelSelection(wanted))
    replica = backend.make_replica(plan, seed=0)
    replica.context.n = plan.batch_size
    found = {}
    for group in groups:
        operation = backend.operation(group, plan.setting)
        assert issubclass(operation, Operation)
        arrays = replica._group_arrays(group)
        choices = operation.choices(group, plan.setting)
        phases = operation.needs(group, plan.setting).phases
        found[group.name] = Convolution(
            group, arrays,
            operation(group, arrays, replica).kernels(phases),  # type: ignore[arg-type]
            {phase: choice.configuration for phase, (_, choice) in choices.items()},
        )  # fmt: skip
    return replica, found


def upload(device: Device, targets: Sequence[Array], values: NDArray[np.float32]) -> None:
    """Store the same values in several arrays, as float32 or truncated to bfloat16."""
    truncated = (values.view(np.uint32) >> 16).astype(np.uint16)
    for target in targets:
        device.upload(target, truncated if target.dtype == np.uint16 else values)


def numbers(device: Device, array: Array) -> NDArray[np.float32]:
    """Return the values of an array of float32 or bfloat16."""
    stored = device.download(array)
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


def error(device: Device, ours: Array, theirs: Array) -> float:
    """Return ‖ours − theirs‖ / ‖theirs‖."""
    reference = numbers(device, theirs)
    return float(np.linalg.norm(numbers(device, ours) - reference) / np.linalg.norm(reference))


def run(replica: Replica, convolution: Convolution, phases: Sequence[Phase]) -> None:
    """Launch the kernels of some phases, if they exist."""
    for phase in phases:
        if phase in convolution.kernels:
            convolution.kernels[phase](replica.context)


def errors(
    device: Device, gather: tuple[Replica, Convolution], halo: tuple[Replica, Convolution]
) -> list[float]:
    """Run both variants on the same random arrays; return the errors of y, dw, db and dx."""
    rng = np.random.default_rng(1)
    theirs, ours = gather[1].arrays, halo[1].arrays
    fan_in = math.prod(theirs["weight"].shape[:-1])

    def fill(name: str, scale: float) -> None:
        values = rng.standard_normal(theirs[name].shape, np.float32) * np.float32(scale)
        upload(device, (theirs[name], ours[name]), values)

    for name, scale in (("x", 1.0), ("weight", fan_in**-0.5), ("bias", 0.1)):
        fill(name, scale)
    for replica, convolution in (gather, halo):
        run(replica, convolution, [Phase.FORWARD])
    found = [error(device, ours["y"], theirs["y"])]
    # Another order of summation can select another maximum, so both undo the same one.
    for name in {"y", "argmax"} & set(theirs):
        device.upload(ours[name], device.download(theirs[name]))
    # The memory of dy can have another use during the forward pass.
    fill("dy", 1.0)
    for replica, convolution in (gather, halo):
        run(replica, convolution, (Phase.BACKWARD, *PHASES[1:]))
    names = ["dweight", "dbias"] + ["dx"] * (Phase.BACKWARD_INPUT in gather[1].kernels)
    return found + [error(device, ours[name], theirs[name]) for name in names]


def measured_us(device: Device, variant: tuple[Replica, Convolution], phase: Phase) -> float:
    """Return the median time of a phase; the input gradient includes a separate unpooling pass."""
    phases = [Phase.BACKWARD, phase] if phase is Phase.BACKWARD_INPUT else [phase]
    return 1e3 * statistics.median(device.times_ms(lambda: run(*variant, phases)))


def estimates_us(replica: Replica, convolution: Convolution, phase: Phase) -> str:
    """Return the estimated µs of gathering and of the halo tile of a phase."""
    case = algorithms.case_of(convolution.group, replica.plan.setting, phase)
    times = {each.algorithm.name: each.estimate for each in algorithms.candidates(case)}
    halo = next((times[name] for name in HALO_TILES if name in times), math.nan)
    return f"({times[GATHERING[0]]:.0f} → {halo:.0f})"


def compare(device: Device, case: str, gather: Variant, halo: Variant) -> None:
    """Print the convolutions of a network."""
    print(case)
    totals = [0.0, 0.0]
    for name, theirs in gather[1].items():
        ours = halo[1][name]
        pair = (gather[0], theirs), (halo[0], ours)
        found, parts = errors(device, *pair), []
        for phase in PHASES:
            if phase not in theirs.kernels:
                continue
            times = [measured_us(device, each, phase) for each in pair]
            totals = [total + each for total, each in zip(totals, times, strict=True)]
            if theirs.tiles[phase] != ours.tiles[phase]:
                estimates = estimates_us(halo[0], ours, phase)
                short = phase.value.removeprefix("backward_")
                parts.append(f"{short} {times[0]:.1f} → {times[1]:.1f} {estimates}")
        worst = " ".join(f"{each:.0e}" for each in found)
        print(f"  {name.partition('+')[0]}: {', '.join(parts) or 'the same'}; errors {worst}")
    print(f"  all convolutions {totals[0]:.1f} → {totals[1]:.1f} µs", flush=True)


def kernels_of(case: str) -> list[Unit]:
    """Return the sources and macros of a case's kernels in both variants."""
    planned = Planned()
    for names in (GATHERING, HALO_TILES):
        variant(CudaBackend(planned), case, names)
    return sorted(unit for unit in planned.units if unit[0].startswith(CONVOLUTION_FILES))


def compare_all(pool: Executor, cases: Sequence[str], limit_s: float = math.inf) -> None:
    """Print the comparison of each case, until the time is over."""
    begin = time.perf_counter()
    compiled = [[pool.submit(compile_unit, unit) for unit in kernels_of(case)] for case in cases]

    from dptrain.backends.cuda.device.gpu import GPU

    device = GPU(0)
    without_other_kernels(device)
    backend = CudaBackend(device)
    for case, units in zip(cases, compiled, strict=True):
        wait(units)
        seconds = time.perf_counter() - begin
        if seconds > limit_s:
            print(f"{case} and later cases are left out after {limit_s:.0f} s")
            pool.shutdown(wait=False, cancel_futures=True)
            return
        print(f"after {seconds:.0f} s: ", end="")
        compare(device, case, variant(backend, case, GATHERING), variant(backend, case, HALO_TILES))


@click.command()
@click.option("--limit", "limit_s", default=50.0, show_default=True, help="Seconds.")
@click.argument("cases", nargs=-1)
def main(limit_s: float, cases: Sequence[str]) -> None:
    """Compare halo tiles with gathering kernels, stage by stage."""
    # The processes start before this one uses the GPU, whose context they could not share.
    with ProcessPoolExecutor(max(available_cores() - 1, 1)) as pool:
        compare_all(pool, cases or CASES, limit_s)


if __name__ == "__main__":
    sys.exit(main())
