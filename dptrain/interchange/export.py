"""Write a trained network to a file for other programs; the file's suffix selects the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dptrain.errors import UserError, shown, suggest
from dptrain.interchange.contents import ModelContents

if TYPE_CHECKING:
    from dptrain.training.evaluation.model import TrainedModel


def export_model(
    model: TrainedModel, path: str | os.PathLike[str], *, replace: bool = False
) -> tuple[Path, ...]:
    """Write a trained network to a file.

    Args:
        model: the trained network.
        path: a path that ends in one of `FORMATS`.
        replace: overwrite existing files.

    Returns:
        The files that were written, `path` first.

    Raises:
        UserError: the suffix is another one, a file exists already or cannot be written, or the
            format cannot represent the network.
    """
    path = Path(path)
    write = FORMATS.get(path.suffix.lower())
    if write is None:
        raise UserError(
            f"output {shown(path)} has the type '{shown(path.suffix) or 'none'}'; expected "
            f"{', '.join(FORMATS)}{suggest(path.suffix, FORMATS)}"
        )
    if not replace:
        refuse_existing(path)
    return write(ModelContents.of(model), path, replace)


def refuse_existing(path: Path) -> None:
    """Raise a `UserError` if the file exists."""
    if path.exists():
        raise UserError(
            f"{path} exists already; choose another --output, or overwrite it with --replace"
        )


def _write_safetensors(contents: ModelContents, path: Path, replace: bool) -> tuple[Path, ...]:
    from dptrain.interchange.safetensors_files import write_arrays

    write_arrays(contents.arrays, path, {"format": "pt", **contents.metadata()}, flag="--output")
    return (path,)


def _write_onnx(contents: ModelContents, path: Path, replace: bool) -> tuple[Path, ...]:
    from dptrain.interchange.onnx_files import write_onnx_file

    return write_onnx_file(contents, path)


def _write_module(contents: ModelContents, path: Path, replace: bool) -> tuple[Path, ...]:
    from dptrain.interchange.torch_module import weights_path, write_module

    if not replace:
        refuse_existing(weights_path(path))
    return write_module(contents, path)


Writer = Callable[[ModelContents, Path, bool], tuple[Path, ...]]
"""Writes a model to a path and returns the files; the flag allows to overwrite files."""

FORMATS: Mapping[str, Writer] = {
    ".onnx": _write_onnx,
    ".py": _write_module,
    ".safetensors": _write_safetensors,
}
"""Functions that write a file, by the file's suffix."""
