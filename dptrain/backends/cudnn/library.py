"""cuDNN's library, found by name, and NVIDIA's Python module that describes graphs to it.

Source: cuDNN frontend, https://docs.nvidia.com/deeplearning/cudnn/frontend/latest.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dptrain.errors import UserError

LIBRARY = "libcudnn.so.9"

INSTALL = "pip install 'dptrain[cuda13]', or 'dptrain[cuda12]' where nvidia-smi shows CUDA 12"


class Library:
    """cuDNN, loaded, with a handle on the GPU that is current.

    Attributes:
        module: ``cudnn``, NVIDIA's frontend.
        version: such as ``9.19.0``.
        path: file or name of the library.

    Raises:
        UserError: the library or the module is missing.
    """

    def __init__(self) -> None:
        self.path = load_library()
        self.module: Any = import_frontend()
        self.version = spelled(int(self.module.backend_version()))
        # Never destroyed: that would wait for the GPU, perhaps while a step is being captured.
        self.handle = self.module.create_handle()


def spelled(version: int) -> str:
    """As people write what cuDNN calls 91900."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def load_library() -> str:
    """Load cuDNN so that the frontend finds the same one.

    Returns:
        Its file, or the name that the system knew it by.

    Raises:
        UserError: there is none.
    """
    for name in _candidates():
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    raise UserError(f"backend cudnn finds no {LIBRARY}, NVIDIA's cuDNN 9; {INSTALL}")


def _candidates() -> Iterator[str]:
    """Of NVIDIA's wheels, else where the system looks, ``LD_LIBRARY_PATH`` included."""
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, "cudnn", "lib", LIBRARY)
        if path.is_file():
            yield str(path)
    yield LIBRARY


def import_frontend() -> Any:
    """The module ``cudnn``.

    Raises:
        UserError: it is not installed, or does not load.
    """
    try:
        import cudnn
    except ImportError as error:
        lines = str(error).splitlines()
        cause = "" if isinstance(error, ModuleNotFoundError) else f" ({lines[0] if lines else ''})"
        raise UserError(
            f"backend cudnn needs the Python module cudnn, which cannot be imported{cause}; "
            "pip install nvidia-cudnn-frontend --no-deps"
        ) from None
    return cudnn
