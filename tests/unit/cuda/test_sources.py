"""Kernel sources are found by name, wherever they are in the folders of the backends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dptrain.backends.cuda.device.sources import (
    KERNELS,
    include_folders,
    kernel_files,
    source_path,
)


def test_every_included_header_is_in_a_folder_that_the_compiler_searches() -> None:
    for path in kernel_files().values():
        for name in re.findall(r'^\s*#\s*include\s+"(.+)"', path.read_text(), re.MULTILINE):
            assert source_path(name).parent in include_folders(), f"{path.name} includes {name}"


def test_every_file_of_the_backends_that_a_module_names_exists() -> None:
    for path in KERNELS.rglob("*.py"):
        for name in re.findall(r'"(\w+\.cuh?)"', path.read_text()):
            assert source_path(name).is_file(), f"{path.name} names {name}"


def test_two_files_cannot_have_one_name(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "copy.cu").touch()
    with pytest.raises(ValueError, match=r"same name: .*/one/copy.cu and .*/other/copy.cu"):
        kernel_files(tmp_path)


def test_a_source_outside_the_backends_is_named_by_its_path(tmp_path: Path) -> None:
    assert source_path(str(tmp_path / "own.cu")) == tmp_path / "own.cu"
