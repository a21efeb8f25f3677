"""Sources of kernels: each is next to the Python module that binds it, and is found by its name.

Headers that several operations include are in ``cuda/headers``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

KERNELS = Path(__file__).parents[2]
"""Folder of the backends, which contains all sources and headers of kernels in its subfolders."""


@functools.cache
def kernel_files(folder: Path = KERNELS) -> Mapping[str, Path]:
    """Return the path of each source and header in a folder and its subfolders, by file name.

    Raises:
        ValueError: two files have the same name.
    """
    files: dict[str, Path] = {}
    for path in (*sorted(folder.rglob("*.cu")), *sorted(folder.rglob("*.cuh"))):
        if files.setdefault(path.name, path) != path:
            raise ValueError(f"two kernel files have the same name: {files[path.name]} and {path}")
    return files


def source_path(file: str, folder: Path = KERNELS) -> Path:
    """Return the path of a source or header of kernels.

    Args:
        file: its name, or an absolute path to a source that is not part of the backends.
        folder: folder whose subfolders contain it.
    """
    path = Path(file)
    return path if path.is_absolute() else kernel_files(folder)[file]


@functools.cache
def include_folders(folder: Path = KERNELS) -> tuple[Path, ...]:
    """Return the folders that contain headers."""
    headers = (path for path in kernel_files(folder).values() if path.suffix == ".cuh")
    return tuple(sorted({path.parent for path in headers}))
