"""HDF5 files: the samples are those of arrays, and a file that is no data set is one line."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import UserError
from dptrain.data import network_for, open_data
from dptrain.network import Network

Net = Callable[..., Network]


def write(path: Path, datasets: dict[str, Any], **options: Any) -> str:
    """Write datasets and return the specification of the file."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file.create_dataset(name, data=values, **(options if np.ndim(values) > 1 else {}))
    return f"hdf5:{path}"


@pytest.mark.parametrize(
    ("names", "query", "options"),
    [
        (("x{0}", "y{0}"), "", {}),
        (("{0}/images", "{0}/labels"), "", {"chunks": (7, 4, 5, 3), "compression": "gzip"}),
        (("raw/pixels{0}", "raw/kind{0}"), "?x=raw/pixels&y=raw/kind", {}),
    ],
)
def test_samples_are_those_of_arrays(
    tmp_path: Path, net: Net, read: Any, names: tuple[str, str], query: str, options: dict[str, Any]
) -> None:
    random = np.random.default_rng(3)
    arrays = {}
    for ending, count in (("_train", 30), ("_val", 9), ("_test", 8)):
        arrays[f"x{ending}"] = random.integers(0, 256, (count, 4, 5, 3), np.uint8)
        arrays[f"y{ending}"] = np.array(["cat", "dog"])[random.integers(0, 2, count)]
    stored = {}
    for name, values in arrays.items():
        ending = f"_{name[2:]}" if "/" not in names[0] or query else name[2:]
        stored[names[name[0] == "y"].format(ending)] = (
            values if name[0] == "x" else [str(value) for value in values]
        )
    np.savez(tmp_path / "a.npz", **arrays)
    network = net((3, 4, 5), 2)
    found = open_data(write(tmp_path / "a.h5", stored, **options) + query, network)
    expected = open_data(f"npz:{tmp_path / 'a.npz'}", network)
    assert found.classes == expected.classes == ("cat", "dog")
    assert found.preprocessing.input_shape == expected.preprocessing.input_shape
    for split in ("train", "validation", "test"):
        order = random.integers(0, len(getattr(found, split)), 20)  # Some are repeated.
        for ours, theirs in zip(
            read(found, split, order), read(expected, split, order), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    # Workers receive the samples without the open file.
    copy = pickle.loads(pickle.dumps(found.train))
    assert copy.decodes == bool(options)
    assert copy.known_targets().tolist() == found.train.known_targets().tolist()


def test_a_network_of_the_zoo_follows_the_file(tmp_path: Path) -> None:
    x, y = np.zeros((10, 6, 7)), np.arange(10) % 3
    spec = write(tmp_path / "a.h5", {"data": x, "targets": y, "other": y})
    found = network_for(spec)
    assert found is not None
    assert found.input_shape == (1, 6, 7)
    dataset = open_data(spec, found)
    assert dataset.num_outputs == 3
    assert dataset.notes[0] == "arrays are left out: other"


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"pictures": np.zeros((4, 2))}, "datasets pictures; expected x or images or data and y"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, "expected as many targets as inputs"),
        ({"x": [b"a", b"b"], "y": [0, 1]}, "x of .*: inputs are of type .*; expected numbers"),
        (b"no file of HDF5", "cannot be read as HDF5 .*; replace it"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, net: Net, datasets: Any, message: str) -> None:
    path = tmp_path / "a.h5"
    if isinstance(datasets, bytes):
        path.write_bytes(datasets)
    else:
        write(path, datasets)
    with pytest.raises(UserError, match=message):
        open_data(f"hdf5:{path}", net((2,), 2))


def test_a_damaged_chunk_names_the_file(tmp_path: Path, net: Net, read: Any) -> None:
    import h5py

    x = np.random.default_rng(0).integers(0, 9, (40, 64), np.uint8)
    spec = write(
        tmp_path / "a.h5", {"x": x, "y": np.arange(40) % 2}, chunks=(40, 64), compression="gzip"
    )
    with h5py.File(tmp_path / "a.h5") as file:
        chunk = file["x"].id.get_chunk_info(0)
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + 100] = bytes(100)
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.h5 cannot be read as HDF5"):
        read(open_data(spec, net((64,), 2)))


def test_the_extra_is_named(tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write(tmp_path / "a.h5", {"x": np.zeros((4, 2)), "y": np.arange(4) % 2})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"needs the package h5py.*\.\[hdf5\]"):
        open_data(spec, net((2,), 2))
