"""Compile every kernel that the networks need on a GPU, and check registers and shared memory.

    python -m tests.devices.compile_kernels                  all GPUs of `hardware.DEVICES`
    python -m tests.devices.compile_kernels T4 "RTX 4090"    only these

Each kernel is compiled once for each architecture, by one NVRTC per core. This takes 10 to 20
minutes of one core for each architecture, so it is no part of `make test`. What a kernel needs is
stored in the cache of compiled kernels, so that a check that was interrupted continues, and only
sources that have changed are compiled again. The exit code is 1 if a kernel does not compile, or a
launch needs more registers or shared memory than the GPU has.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from dptrain.backends.cuda.device.hardware import DEVICES
from dptrain.backends.cuda.device.nvrtc import CompileError, Compiler, find_compiler, source_digest
from dptrain.backends.cuda.device.sources import source_path
from dptrain.cache import writable_folder, write_atomically
from dptrain.machine import available_cores
from dptrain.plan.limits import REGISTERS, DeviceLimits
from tests.devices.networks import planned_networks
from tests.devices.planned import Launch, step_launches

BATCH_SIZES = (1, 32, 256)
PRECISIONS = ("fp32", "tf32", "bf16")

Unit = tuple[str, tuple[tuple[str, int], ...]]
"""A source and its macros."""

USAGE = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Usage(NamedTuple):
    """What a compiled kernel needs: registers of a thread, static shared memory and spilled
    registers in bytes.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int


def kernel_usages(log: str) -> dict[str, Usage]:
    """Return the usage of each kernel from the compiler's messages."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        used, spilled = USAGE.search(part), SPILLS.search(part)
        if used is not None and spilled is not None:
            registers, shared = int(used[1]), int(used[2] or 0)
            found[part.partition("'")[0]] = Usage(
                registers, shared, sum(map(int, spilled.groups()))
            )
    return found


@cache
def _compiler() -> Compiler:
    return find_compiler([12])  # CUDA 13 does not compile for the V100.


def compile_unit(capability: int, unit: Unit) -> dict[str, Usage] | str:
    """Return the usage of the kernels of a source, or the error of the compiler."""
    folder, (file, defines) = writable_folder("kernel-usages"), unit
    if folder is None:
        return _compile(capability, unit)
    digest = source_digest(_compiler(), file, capability, dict(defines))
    path = folder / f"{Path(file).stem}-{digest}.json"
    if path.exists():
        stored = json.loads(path.read_bytes())
        return {name: Usage(*values) for name, values in stored.items()}
    found = _compile(capability, unit)
    if not isinstance(found, str):
        write_atomically(path, json.dumps(found).encode())
    return found


def _compile(capability: int, unit: Unit) -> dict[str, Usage] | str:
    file, defines = unit
    try:
        _compiler().compile(source_path(file), capability, dict(defines), ["--ptxas-options=-v"])
    except CompileError as error:
        return str(error)
    return kernel_usages(_compiler().log)


def launches_on(limits: DeviceLimits) -> set[Launch]:
    """Return the launches of training steps of all networks, batch sizes and precisions."""
    return {
        launch
        for network in planned_networks().values()
        for precision in PRECISIONS
        if precision == "fp32" or limits.has_tensor_floats
        for batch_size in BATCH_SIZES
        for launch in step_launches(network, limits, batch_size, precision)
    }


def problems(launch: Launch, usage: Usage, limits: DeviceLimits) -> Iterator[str]:
    """Yield the limits that a launch exceeds."""
    width, height, depth = launch.block
    registers = width * height * depth * -(-usage.registers // 8) * 8
    if registers > REGISTERS:
        yield f"{registers} registers of a block exceed {REGISTERS}"
    shared = usage.shared_bytes + launch.shared_bytes
    if shared > limits.shared_bytes:
        yield f"{shared} bytes of shared memory exceed {limits.shared_bytes}"


def check_device(name: str, pool: ProcessPoolExecutor) -> bool:
    """Compile the kernels for a GPU and print a line about it; return whether all is well."""
    limits = DEVICES[name]
    launches = launches_on(limits)
    units = sorted({(launch.file, launch.defines) for launch in launches})
    compiled = pool.map(partial(compile_unit, limits.capability), units, chunksize=4)
    usages = dict(zip(units, compiled, strict=True))
    errors, spilling, most = set(), set(), 0
    for launch in launches:
        usage = usages[launch.file, launch.defines]
        if isinstance(usage, str):
            errors.add(f"{launch.file} {dict(launch.defines)}: {usage}")
            continue
        own = usage[launch.name]
        errors |= {f"{launch}: {problem}" for problem in problems(launch, own, limits)}
        most = max(most, own.registers)
        if own.spilled_bytes:
            spilling.add((launch.name, launch.defines, own.spilled_bytes))
    print(f"{name}: {len(units)} sources, {len(launches)} launches, at most {most} registers, "
          f"{len(spilling)} kernels spill, {len(errors)} errors", flush=True)  # fmt: skip
    for error in sorted(errors):
        print(f"  {error}")
    for kernel, defines, nbytes in sorted(spilling, key=lambda each: -each[2])[:5]:
        print(f"  {kernel} spills {nbytes} bytes: {dict(defines)}")
    return not errors


def main(names: Sequence[str]) -> int:
    """Check the GPUs called `names`; return the exit code."""
    unknown = [name for name in names if name not in DEVICES]
    if unknown:
        print(f"unknown GPU {unknown[0]}; expected one of {', '.join(DEVICES)}", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(available_cores()) as pool:
        passed = [check_device(name, pool) for name in names or DEVICES]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
