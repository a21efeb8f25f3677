"""Files of arrays by name, in the format of safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dptrain.files import replacing


def write_arrays(
    arrays: Mapping[str, NDArray[Any]],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    flag: str = "--run-dir",
) -> None:
    """Write arrays to a safetensors file; an old file is replaced when the new one is complete.

    Args:
        arrays: contiguous arrays by name.
        path: file to write.
        metadata: text that the file contains in addition.
        flag: the flag that selects another location, for the error message.

    Raises:
        UserError: the file cannot be written.
    """
    with replacing(path, flag) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(dict(arrays), partial, None if metadata is None else dict(metadata))
            if metadata is not None:
                _sort_metadata(partial)
        except SafetensorError as error:
            raise system_error(error) from error
        # safetensors creates files that only their owner can read.
        partial.chmod(mode)


def _sort_metadata(path: Path) -> None:
    """Write the metadata in the order of their keys, so that equal files have equal bytes.

    safetensors writes them in a random order, in which the header has the same size.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        values = json.loads(file.read(size))
        metadata = values.pop("__metadata__")
        header = {"__metadata__": dict(sorted(metadata.items())), **values}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def system_error(error: SafetensorError) -> OSError:
    """Return the error of the operating system that safetensors reports as text.

    Examples:
        >>> system_error(SafetensorError("I/O error: No space left on device (os error 28)"))
        OSError(28, 'No space left on device')
    """
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))
