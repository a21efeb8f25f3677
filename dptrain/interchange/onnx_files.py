"""Reading and writing of ONNX files, with one line if the library onnx is missing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.errors import UserError

if TYPE_CHECKING:
    from dptrain.interchange.contents import ModelContents
    from dptrain.interchange.onnx_import import OnnxNetwork


def read_onnx_file(path: Path) -> OnnxNetwork:
    """Return the network and the parameters of a file; see `dptrain.interchange.onnx_import`.

    Raises:
        UserError: the library is missing, or as for `read_onnx`.
    """
    _require_library()
    from dptrain.interchange.onnx_import import read_onnx

    return read_onnx(path)


def write_onnx_file(contents: ModelContents, path: Path) -> tuple[Path, ...]:
    """Write a model to a file; see `dptrain.interchange.onnx_export`.

    Raises:
        UserError: the library is missing, or as for `write_onnx`.
    """
    _require_library()
    from dptrain.interchange.onnx_export import write_onnx

    return write_onnx(contents, path)


def _require_library() -> None:
    try:
        importlib.import_module("onnx")
    except ImportError:
        raise UserError(
            "ONNX files need the library onnx; install it with: pip install onnx"
        ) from None
