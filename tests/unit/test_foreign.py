"""Files of other programs are recognised, and every command refuses them in one line."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dptrain.cli.main import run
from dptrain.foreign import KERAS, PYTORCH, SAFETENSORS, TENSORFLOW, foreign_kind
from tests.lazy import LazyModule

torch = LazyModule("torch")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Paths of files of other programs, by what they are."""
    paths = {kind: tmp_path / kind for kind in ("zip", "old", "hdf5", "keras", "arrays", "text")}
    torch.save({"a": torch.zeros(2)}, paths["zip"])
    torch.save({"a": torch.zeros(2)}, paths["old"], _use_new_zipfile_serialization=False)
    paths["hdf5"].write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(20))
    with zipfile.ZipFile(paths["keras"], "w") as archive:
        archive.writestr("model.weights.h5", b"")
    save_file({"a": np.zeros(2, np.float32)}, paths["arrays"])
    paths["text"].write_text("hello")
    return paths


def test_files_are_recognised_by_their_content(files: dict[str, Path], tmp_path: Path) -> None:
    found = {name: foreign_kind(path) for name, path in files.items()}
    assert found == {
        "zip": PYTORCH, "old": PYTORCH, "hdf5": KERAS, "keras": KERAS, "arrays": SAFETENSORS,
        "text": None,
    }  # fmt: skip
    by_suffix = files["text"].rename(tmp_path / "x.pth")
    assert foreign_kind(by_suffix) == PYTORCH
    assert foreign_kind(tmp_path / "absent.pt") is None
    (tmp_path / "saved_model.pb").touch()
    assert foreign_kind(tmp_path) == TENSORFLOW
    np.savez(tmp_path / "data.npz", x=np.zeros(2))
    assert foreign_kind(tmp_path / "data.npz") is None


@pytest.mark.parametrize("length", [0x0280, 0x10280])
def test_a_header_may_be_as_long_as_a_pickle_begins(length: int, tmp_path: Path) -> None:
    """The first bytes of a safetensors file are the length of its header."""
    path, array = tmp_path / "w.safetensors", {"a": np.zeros(2, np.float32)}
    save_file(array, path, {"note": ""})
    missing = length - int.from_bytes(path.read_bytes()[:8], "little")
    save_file(array, path, {"note": "x" * missing})
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert foreign_kind(path) == SAFETENSORS


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["evaluate", "{}"], "zip"),
        (["train", "--resume", "{}"], "zip"),
        (["train", "--weights", "{}"], "zip"),
        (["train", "--weights", "{}"], "hdf5"),
        (["train", "--network", "{}"], "keras"),
        (["describe", "{}"], "arrays"),
        (["export", "{}", "-o", "x.safetensors"], "arrays"),
        (["predict", "{}", "-i", "x.npy", "-o", "x.csv"], "old"),
    ],
)
def test_commands_refuse_them(
    command: list[str],
    kind: str,
    files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [text.format(files[kind]) for text in command]
    assert run(arguments, is_rank_zero=True) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"dptrain: {files[kind]} {foreign_kind(files[kind])}"
    )


def test_damaged_archives_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever zipfile raises: the directory of an archive is at its end."""
    np.savez(tmp_path / "whole.npz", x=np.zeros(2), y=np.zeros(2))
    whole, random = (tmp_path / "whole.npz").read_bytes(), np.random.default_rng(0)
    path = tmp_path / "damaged"
    for _ in range(200):
        damaged = bytearray(whole)
        for at in random.integers(len(whole) - 200, len(whole), size=3):
            damaged[at] = random.integers(256)
        path.write_bytes(damaged)
        assert foreign_kind(path) in (None, PYTORCH)
        assert run(["evaluate", str(path)], is_rank_zero=True) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("dptrain: ")
