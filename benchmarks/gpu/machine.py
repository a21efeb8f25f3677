"""Describe the machine, without host or folder names because results are published."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import about as machine_facts
from benchmarks.machine import versions as installed
from dptrain.backends import load_backend
from dptrain.errors import UserError


@dataclass(frozen=True)
class Machine:
    """What can be measured on this machine.

    Attributes:
        backends: available backends of dptrain.
        gpus: number of GPUs.
        torch: device of PyTorch's reference results, "cuda" or "cpu"; None without PyTorch.
        missing: what is not measured, with the reason.
    """

    backends: tuple[str, ...]
    gpus: int
    torch: str | None
    missing: tuple[str, ...]

    @property
    def timed_torch(self) -> bool:
        """Whether PyTorch is timed."""
        return self.torch == "cuda"


def find_machine(wanted: Sequence[str]) -> Machine:
    """Find GPUs, the requested backends and PyTorch.

    Raises:
        UserError: no GPU was found, or CuPy is missing.
    """
    from dptrain.backends.cuda.device.cupy_runtime import device_count, import_cupy

    gpus = device_count(import_cupy())
    backends, missing = [], []
    for name in wanted:
        # The libraries of a backend can fail to load with any exception.
        try:
            load_backend(name).choose_device(0)
            backends.append(name)
        except UserError as error:
            missing.append(f"backend {name}: {error}")
        except Exception as error:
            missing.append(f"backend {name}: {type(error).__name__}: {error}")
    torch, why = find_torch()
    if why:
        missing.append(why)
    if gpus == 1:
        missing.append("scaling over several GPUs: this machine has one")
    return Machine(tuple(backends), gpus, torch, tuple(missing))


def find_torch() -> tuple[str | None, str]:
    """Return PyTorch's device and what is missing."""
    if importlib.util.find_spec("torch") is None:
        return None, "comparison and checks: PyTorch is not installed"
    import torch

    if torch.cuda.is_available():
        return "cuda", ""
    return "cpu", "comparison: PyTorch finds no GPU, so it only checks results on the CPU"


def about(machine: Machine, **settings: Any) -> dict[str, Any]:
    """Return GPU, processor, versions and date, then the settings of the run, what is missing."""
    facts = machine_facts()
    return {
        "date": facts.pop("date"),
        **(gpu_facts(machine) if machine.gpus else {}),
        **facts,
        "versions": {**facts["versions"], **versions()},
        **settings,
        "missing": "; ".join(machine.missing) or "nothing",
    }


def gpu_facts(machine: Machine) -> dict[str, Any]:
    """Return the GPU, its memory, and the versions of driver and CUDA."""
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
    """Return the driver version that nvidia-smi reports; None without nvidia-smi."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def _dotted(version: int) -> str:
    """Format CUDA's version number: 13000 is 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


PACKAGES = (
    "cupy-cuda12x", "cupy-cuda13x", "mpi4py", "numpy", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch",
    "triton",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    return installed(*PACKAGES)
