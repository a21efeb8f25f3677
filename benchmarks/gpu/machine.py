"""What the figures were measured on. No names of hosts or folders: results are published."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from benchmarks.gpu.limits import Limits, measure_limits
from dptrain.backends import load_backend
from dptrain.errors import UserError
from dptrain.measure.environment import environment


@dataclass(frozen=True)
class Machine:
    """What can be measured here.

    Attributes:
        backends: those of dptrain's that work.
        gpus: how many there are.
        torch: where PyTorch computes exact results, "cuda" or "cpu"; None where it is missing.
        missing: what is left out, and why.
    """

    backends: tuple[str, ...]
    gpus: int
    torch: str | None
    missing: tuple[str, ...]

    @property
    def timed_torch(self) -> bool:
        """Whether PyTorch is timed."""
        return self.torch == "cuda"

    def limits(self, precisions: tuple[str, ...]) -> Limits:
        """What the GPU can do at best."""
        return measure_limits(precisions, with_torch=self.timed_torch)


def find_machine(wanted: Sequence[str]) -> Machine:
    """Look for GPUs, the wanted backends and PyTorch.

    Raises:
        UserError: there is no GPU, or no CuPy.
    """
    from dptrain.backends.cuda.cupy_runtime import device_count, import_cupy

    gpus = device_count(import_cupy())
    backends, missing = [], []
    for name in wanted:
        # A backend's own libraries may fail to load in ways of their own.
        try:
            load_backend(name).place(0)
            backends.append(name)
        except UserError as error:
            missing.append(f"backend {name}: {error}")
        except Exception as error:
            missing.append(f"backend {name}: {type(error).__name__}: {error}")
    torch, why = find_torch()
    if why:
        missing.append(why)
    if gpus == 1:
        missing.append("there is one GPU: nothing is said of how several scale")
    return Machine(tuple(backends), gpus, torch, tuple(missing))


def find_torch() -> tuple[str | None, str]:
    """Where PyTorch computes, and what is missing."""
    if importlib.util.find_spec("torch") is None:
        return None, "PyTorch is missing: nothing is compared with it, and nothing checked"
    import torch

    if torch.cuda.is_available():
        return "cuda", ""
    return "cpu", "PyTorch sees no GPU: results are checked on the CPU, and nothing is compared"


def about(machine: Machine, **settings: Any) -> dict[str, Any]:
    """GPU, versions and date, followed by the run's own settings and what is missing."""
    here = environment()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        **(gpu_facts(machine) if machine.gpus else {}),
        "cpu": here["cpu"],
        "os": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "python": here["python"],
        "versions": versions(),
        **settings,
        "missing": "; ".join(machine.missing) or "nothing",
    }


def gpu_facts(machine: Machine) -> dict[str, Any]:
    """Names and versions of the hardware's side."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    facts = {
        "gpu": f"{machine.gpus} × {properties['name'].decode()}",
        "gpu memory": f"{properties['totalGlobalMem'] / 2**30:.0f} GiB",
        "driver": driver_version() or "unknown",
        "CUDA": f"driver {_dotted(runtime.driverGetVersion())}, "
        f"runtime {_dotted(runtime.runtimeGetVersion())}",
    }
    if machine.timed_torch:
        import torch

        facts["PyTorch's libraries"] = (
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        )
    return facts


def driver_version() -> str | None:
    """As nvidia-smi says; None where it is missing."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def _dotted(version: int) -> str:
    """13000 is 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


PACKAGES = (
    "cupy-cuda12x", "cupy-cuda13x", "mpi4py", "numpy", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch",
    "triton",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
