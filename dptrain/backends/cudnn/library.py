"""Load cuDNN and its Python frontend.

Source: cuDNN frontend, https://docs.nvidia.com/deeplearning/cudnn/frontend/latest.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dptrain.backends.cudnn.primitives import Primitives
from dptrain.errors import UserError

LIBRARY = "libcudnn.so.9"

INSTALL = "pip install '.[cuda13]' (or '.[cuda12]' if nvidia-smi shows CUDA 12)"


class Library:
    """The loaded library, with a handle for the current GPU.

    Attributes:
        module: ``cudnn``, NVIDIA's Python frontend.
        version: such as ``9.19.0``.
        path: file or name of the shared library.
        primitives: functions without graphs.

    Raises:
        UserError: the library or the module is missing.
    """

    def __init__(self) -> None:
        self.path = load_library()
        self.module: Any = import_frontend()
        self.version = format_version(int(self.module.backend_version()))
        # Never destroyed: that would synchronize with the GPU, possibly during a graph capture.
        self.handle = self.module.create_handle()
        self.primitives = Primitives(open_functions(self.path))


def format_version(version: int) -> str:
    """Return cuDNN's version number, such as 91900, as text: ``9.19.0``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def load_library() -> str:
    """Load cuDNN before the frontend does, so that both use the same library.

    Returns:
        The file, or the name that the dynamic linker resolved.

    Raises:
        UserError: the library was not found.
    """
    for name in _candidates():
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    raise UserError(f"backend cudnn needs cuDNN 9, but {LIBRARY} was not found; {INSTALL}")


def open_functions(path: str) -> Any:
    """Return the C functions of the library that `load_library` has loaded."""
    return ctypes.CDLL(path)


def _candidates() -> Iterator[str]:
    """Yield the library of NVIDIA's wheels, then its name for the dynamic linker."""
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, "cudnn", "lib", LIBRARY)
        if path.is_file():
            yield str(path)
    yield LIBRARY


def import_frontend() -> Any:
    """Return the module ``cudnn``.

    Raises:
        UserError: it is not installed or cannot be imported.
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
