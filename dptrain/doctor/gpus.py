"""What training on GPUs would find here: devices, libraries, and ways between GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dptrain.doctor.finding import NOTE, OK, PROBLEM, Finding, ask, version_of
from dptrain.errors import UserError

ACCESS, ATOMICS = 2, 3
"""Attributes of a pair of GPUs (``CUdevice_P2PAttribute``): one reads the other's memory; and adds
to it in one step, which NVLink does and PCIe does not."""


def gpu_findings() -> Iterator[Finding]:
    """GPUs of this node, and what the backends cuda and cudnn need besides."""
    program = shutil.which("nvidia-smi")
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    answer = ask(program, *query) if program else None
    gpus = (answer or "").strip().splitlines()
    if gpus:
        first, _, driver = gpus[0].rpartition(", ")
        yield Finding("gpus", OK, f"{len(gpus)} × {first}, driver {driver}")
    else:
        yield Finding("gpus", OK, "none found; the backends cuda and cudnn cannot run here")
    try:
        from dptrain.backends.cuda.cupy_runtime import import_cupy

        yield cupy_finding(import_cupy(), have_gpus=bool(gpus))
    except UserError as error:
        yield missing_finding("cupy", error, have_gpus=bool(gpus))
    try:
        from dptrain.backends.cuda.nvrtc import find_compiler

        compiler = find_compiler()
        version, newest = ".".join(map(str, compiler.version)), max(compiler.architectures)
        text = f"{version} at {compiler.library}, compiles for up to sm_{newest}"
        yield Finding("nvrtc", OK, text)
    except UserError as error:
        yield missing_finding("nvrtc", error, have_gpus=bool(gpus))
    try:
        from dptrain.backends.cudnn.library import format_version, import_frontend, load_library

        path, frontend = load_library(), import_frontend()
        text = f"{format_version(int(frontend.backend_version()))} at {path}, frontend "
        yield Finding("cudnn", OK, text + version_of("nvidia-cudnn-frontend"))
    except UserError as error:
        yield missing_finding("cudnn", error, have_gpus=bool(gpus))
    carrier = "the host's memory"
    try:
        from dptrain.comm.nccl import import_nccl

        yield Finding("nccl", OK, nccl_version(import_nccl().get_version()))
        carrier = "NCCL, one rank a GPU"
    except UserError as error:
        yield missing_finding("nccl", error, have_gpus=bool(gpus))
    if len(gpus) > 1:
        pairs = links(len(gpus))
        yield link_finding(pairs, len(gpus))
        if set(pairs) <= {"NVLink", "PCIe"}:
            carrier = (
                f"kernels that write into each other's memory; over several nodes by {carrier}"
            )
        yield Finding("transport", OK, f"gradients of GPUs would be summed by {carrier}")


def nccl_version(number: int) -> str:
    """As people write what NCCL calls 22809."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def links(count: int) -> Counter[str]:
    """What lies between the GPUs of this node, and between how many pairs."""
    return Counter(link(one, other) for one in range(count) for other in range(one))


def link_finding(pairs: Counter[str], count: int) -> Finding:
    """How `count` GPUs of this node are linked, and so how fast gradients travel."""
    text = ", ".join(
        f"all {count} by {kind}" if len(pairs) == 1 else f"{number} pairs by {kind}"
        for kind, number in pairs.most_common()
    )
    if set(pairs) <= {"NVLink", "PCIe"}:
        return Finding("gpu links", OK, text)
    advice = "GPUs that cannot reach each other's memory sum gradients through the host, slowly"
    return Finding("gpu links", NOTE, text, advice)


def link(one: int, other: int) -> str:
    """``NVLink``, ``PCIe`` or ``the host``, by what the driver says of a pair of GPUs."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "what the driver does not tell"
    driver.cuInit(0)
    answers = {}
    for attribute in (ACCESS, ATOMICS):
        answer = ctypes.c_int()
        status = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), attribute, one, other)
        answers[attribute] = status == 0 and answer.value == 1
    if not answers[ACCESS]:
        return "the host"
    return "NVLink" if answers[ATOMICS] else "PCIe"


def cupy_finding(cupy: Any, *, have_gpus: bool) -> Finding:
    """CuPy, its CUDA, and whether the driver runs that."""
    runtime = cupy.cuda.runtime
    own, driver = runtime.runtimeGetVersion(), 0
    with contextlib.suppress(RuntimeError):
        driver = runtime.driverGetVersion()
    text = f"{cupy.__version__} for CUDA {_cuda_version(own)}"
    if not driver:
        return Finding("cupy", NOTE if have_gpus else OK, f"{text}; no driver answers")
    text += f", the driver runs up to {_cuda_version(driver)}"
    if driver // 1000 >= own // 1000:
        return Finding("cupy", OK, text)
    advice = f"install a newer driver, or CuPy for CUDA {driver // 1000}"
    return Finding("cupy", PROBLEM, text, advice)


def missing_finding(subject: str, error: UserError, *, have_gpus: bool) -> Finding:
    """What backends for GPUs lack; worth knowing where there is a GPU for them."""
    if not have_gpus:
        return Finding(subject, OK, "none found; only backends for GPUs need it")
    text, _, advice = str(error).partition("; ")
    return Finding(subject, NOTE, text, advice)


def _cuda_version(number: int) -> str:
    """As people write what CUDA calls 12090."""
    return f"{number // 1000}.{number % 1000 // 10}"
