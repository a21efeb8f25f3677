"""Files of compiled kernels, which several processes write and which may be damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain import cache


def test_contents_come_back(tmp_path: Path) -> None:
    cache.store(tmp_path / "kernel", b"code")
    assert cache.load(tmp_path / "kernel") == b"code"
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"]


@pytest.mark.parametrize("damage", [0, 1, 20, 36], ids="{} bytes are left".format)
def test_a_file_that_ends_early_is_missing(tmp_path: Path, damage: int) -> None:
    path = tmp_path / "kernel"
    cache.store(path, b"code!")
    path.write_bytes(path.read_bytes()[:damage])
    assert cache.load(path) is None


def test_a_file_with_another_byte_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "kernel"
    cache.store(path, b"code")
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(bytes([*whole[:index], whole[index] ^ 1, *whole[index + 1 :]]))
        assert cache.load(path) is None
    assert cache.load(tmp_path / "absent") is None


def test_one_process_claims_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel"
    with cache.claim(path) as first, cache.claim(path) as second:
        assert (first, second) == (True, False)
    with cache.claim(path) as third:
        assert third
    assert not list(tmp_path.iterdir())


def test_the_first_folder_that_is_writable_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = tmp_path / "a file"
    nothing.touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(tmp_path / "own"))
    assert cache.writable_folder("numba") == tmp_path / "own" / "numba"
    monkeypatch.setenv("DPTRAIN_CACHE_DIR", str(nothing))
    assert cache.writable_folder("numba") == tmp_path / "xdg" / "dptrain" / "numba"
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing))
    assert cache.writable_folder("numba") == tmp_path / "home" / ".cache" / "dptrain" / "numba"
    monkeypatch.setenv("HOME", str(nothing))
    assert cache.writable_folder("numba") is None
