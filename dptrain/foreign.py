"""Recognition of files of other programs, so that an error states what to do with them."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from dptrain.errors import UserError

PYTORCH = (
    "is a file of PyTorch, which contains Python objects; save the state_dict of its model with "
    "safetensors.torch.save_file, and pass that file with --weights"
)
KERAS = (
    "is a file of Keras; convert it to ONNX, for example with tf2onnx, and pass that file with "
    "--network"
)
TENSORFLOW = KERAS.replace("Keras", "TensorFlow")
SAFETENSORS = "is a safetensors file, which contains parameters only; pass it with --weights"
ONNX = "is an ONNX file, which contains no run; dptrain train --network trains it further"

_SUFFIXES = {
    ".pt": PYTORCH, ".pth": PYTORCH, ".ckpt": PYTORCH, ".keras": KERAS, ".h5": KERAS,
    ".hdf5": KERAS, ".pb": TENSORFLOW, ".tflite": TENSORFLOW, ".safetensors": SAFETENSORS,
    ".onnx": ONNX,
}  # fmt: skip
_STARTS = {b"\x89HDF\r\n\x1a\n": KERAS, b"\x80\x02": PYTORCH}
_MEMBERS = {"data.pkl": PYTORCH, "model.weights.h5": KERAS}


def foreign_kind(path: Path) -> str | None:
    """Return what a file of another program is, and what to do with it; None if unknown.

    The content decides if it is known, else the suffix.

    Returns:
        One of the texts of this module, such as `PYTORCH`, that continue a sentence.
    """
    try:
        if (path / "saved_model.pb").is_file():
            return TENSORFLOW
        if not path.is_file():
            return None
        return _by_content(path) or _SUFFIXES.get(path.suffix.lower())
    except Exception:
        # zipfile has many classes of errors. The reader of the file reports what the system
        # refuses, and damage.
        return None


def is_onnx(path: Path) -> bool:
    """Return True if the suffix of a path is that of ONNX files."""
    return path.suffix == ".onnx"


def refuse_foreign(path: Path, *accepted: str) -> None:
    """Raise a `UserError` if the path is an existing file or folder of another program.

    Args:
        path: the path that a user passed.
        accepted: the kinds that the caller reads.
    """
    found = foreign_kind(path)
    if found is not None and found not in accepted:
        raise UserError(f"{path} {found}")


def _by_content(path: Path) -> str | None:
    with path.open("rb") as file:
        start = file.read(9)
        size = file.seek(0, os.SEEK_END)
    # The length of the header comes first, whose bytes may be those of another format.
    has_header = start[8:] == b"{" and int.from_bytes(start[:8], "little") + 8 <= size
    if has_header and path.suffix != ".json":
        return SAFETENSORS
    for magic, kind in _STARTS.items():
        if start.startswith(magic):
            return kind
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name.rsplit("/", 1)[-1] for name in archive.namelist()]
        return next((kind for member, kind in _MEMBERS.items() if member in names), None)
    return None
