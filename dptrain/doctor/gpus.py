"""Checks for training on GPUs: devices, libraries, and links between the GPUs of a node."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dptrain.doctor.finding import NOTE, OK, PROBLEM, Finding, run_program, version_of
from dptrain.errors import UserError

ACCESS, ATOMICS = 2, 3
"""Attributes of a pair of GPUs (``CUdevice_P2PAttribute``): access to the memory of the other GPU;
atomic operations on it, which NVLink supports and PCIe does not."""

PEER_LINKS = {"NVLink", "PCIe"}
"""Links that allow peer-to-peer memory access."""


def gpu_findings() -> Iterator[Finding]:
    """Yield findings about the GPUs of this node and the libraries of cuda and cudnn."""
    program = shutil.which("nvidia-smi")
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    output = run_program(program, *query) if program else None
    gpus = (output or "").strip().splitlines()
    if gpus:
        first, _, driver = gpus[0].rpartition(", ")
        yield Finding("gpus", OK, f"{len(gpus)} × {first}, driver {driver}")
    else:
        yield Finding("gpus", OK, "none found; the backends cuda and cudnn cannot run here")
    yield from compiler_findings(have_gpus=bool(gpus))
    yield from library_findings(have_gpus=bool(gpus))
    if len(gpus) > 1:
        pairs = links(len(gpus))
        yield link_finding(pairs, len(gpus))
        yield transport_finding(set(pairs) <= PEER_LINKS, has_nccl=_has_nccl())


def compiler_findings(*, have_gpus: bool) -> Iterator[Finding]:
    """Yield findings about CuPy and NVRTC, which compiles the kernels."""
    try:
        from dptrain.backends.cuda.device.cupy_runtime import import_cupy

        yield cupy_finding(import_cupy(), have_gpus=have_gpus)
    except UserError as error:
        yield missing_finding("cupy", error, have_gpus=have_gpus)
    try:
        from dptrain.backends.cuda.device.nvrtc import find_compiler

        compiler = find_compiler()
        version, newest = ".".join(map(str, compiler.version)), max(compiler.architectures)
        text = f"{version} at {compiler.library}, compiles for up to sm_{newest}"
        yield Finding("nvrtc", OK, text)
    except UserError as error:
        yield missing_finding("nvrtc", error, have_gpus=have_gpus)


def library_findings(*, have_gpus: bool) -> Iterator[Finding]:
    """Yield findings about cuDNN and NCCL."""
    try:
        from dptrain.backends.cudnn.library import format_version, import_frontend, load_library

        path, frontend = load_library(), import_frontend()
        text = f"{format_version(int(frontend.backend_version()))} at {path}, frontend "
        yield Finding("cudnn", OK, text + version_of("nvidia-cudnn-frontend"))
    except UserError as error:
        yield missing_finding("cudnn", error, have_gpus=have_gpus)
    try:
        from dptrain.comm.sums.nccl import import_nccl

        yield Finding("nccl", OK, nccl_version(import_nccl().get_version()))
    except UserError as error:
        yield missing_finding("nccl", error, have_gpus=have_gpus)


def _has_nccl() -> bool:
    from dptrain.comm.sums.nccl import import_nccl

    try:
        import_nccl()
    except UserError:
        return False
    return True


def nccl_version(number: int) -> str:
    """Return a version of NCCL as text: 22809 is ``2.28.9``."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def links(count: int) -> Counter[str]:
    """Return the number of pairs of GPUs of this node by kind of link."""
    return Counter(link(one, other) for one in range(count) for other in range(one))


def link_finding(pairs: Counter[str], count: int) -> Finding:
    """Return how the `count` GPUs of this node are connected."""
    text = ", ".join(
        f"all {count} by {kind}" if len(pairs) == 1 else f"{_pairs(number)} by {kind}"
        for kind, number in pairs.most_common()
    )
    if set(pairs) <= PEER_LINKS:
        return Finding("gpu links", OK, text)
    advice = "without peer-to-peer access, gradients are staged through host memory, which is slow"
    return Finding("gpu links", NOTE, text, advice)


def transport_finding(has_peer_access: bool, *, has_nccl: bool) -> Finding:
    """Return how gradients are transferred between the GPUs of this node and between nodes."""
    other = "NCCL" if has_nccl else "host memory"
    if has_peer_access:
        text = f"peer-to-peer memory within this node, {other} across nodes"
    else:
        text = f"{other}, within this node and across nodes"
    return Finding("transport", OK, f"gradients are transferred through {text}")


def link(one: int, other: int) -> str:
    """Return the link between two GPUs: ``NVLink``, ``PCIe``, ``host memory`` or ``unknown``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "unknown"
    driver.cuInit(0)
    supports = {}
    for attribute in (ACCESS, ATOMICS):
        value = ctypes.c_int()
        status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, one, other)
        supports[attribute] = status == 0 and value.value == 1
    if not supports[ACCESS]:
        return "host memory"
    return "NVLink" if supports[ATOMICS] else "PCIe"


def cupy_finding(cupy: Any, *, have_gpus: bool) -> Finding:
    """Return the version of CuPy and of its CUDA, and whether the driver supports it."""
    runtime = cupy.cuda.runtime
    own, driver = runtime.runtimeGetVersion(), 0
    with contextlib.suppress(RuntimeError):
        driver = runtime.driverGetVersion()
    text = f"{cupy.__version__} for CUDA {_cuda_version(own)}"
    if not driver:
        return Finding("cupy", NOTE if have_gpus else OK, f"{text}; there is no driver")
    text += f"; the driver supports up to CUDA {_cuda_version(driver)}"
    if driver // 1000 >= own // 1000:
        return Finding("cupy", OK, text)
    advice = f"install a newer driver, or CuPy for CUDA {driver // 1000}"
    return Finding("cupy", PROBLEM, text, advice)


def missing_finding(subject: str, error: UserError, *, have_gpus: bool) -> Finding:
    """Return that a library is missing, which matters only if there are GPUs."""
    if not have_gpus:
        return Finding(subject, OK, "none found; only backends for GPUs need it")
    text, _, advice = str(error).partition("; ")
    return Finding(subject, NOTE, text, advice)


def _cuda_version(number: int) -> str:
    """Return a version of CUDA as text: 12090 is ``12.9``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _pairs(number: int) -> str:
    return f"{number} pair" if number == 1 else f"{number} pairs"
