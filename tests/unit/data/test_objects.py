"""Data sets from Python objects, and fingerprints of data sets."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dptrain.data import open_data, stored
from dptrain.data.fingerprint import data_fingerprint, sampled_indices
from dptrain.data.preprocessing.scale import MOST_DECODED
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError

RNG = np.random.default_rng(5)
X = RNG.integers(0, 256, (20, 6, 5, 3)).astype(np.uint8)
Y = np.arange(20) % 4


class Pairs:
    """Samples by index; counts reads."""

    def __init__(self, x=X, y=Y):
        self.x, self.y, self.reads = x, y, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index], self.y[index]


def whole(read, data):
    return [array for split in ("train", "test") for array in read(data, split)]


FORMS = {
    "tuple": (X, Y),
    "mapping": {"x": X, "y": Y},
    "channels first": (X.transpose(0, 3, 1, 2), Y),
    "list": list(zip(X, Y, strict=True)),
    "images": [(Image.fromarray(x), int(y)) for x, y in zip(X, Y, strict=True)],
    "object": Pairs(),
    "train only": SimpleNamespace(train=Pairs()),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_have_the_samples_of_an_npz_file(net, read, tmp_path, form):
    network = net((3, 6, 5), 4)
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    expected = open_data(f"npz:{tmp_path / 'a.npz'}", network)
    data = dataset_from(FORMS[form], network)
    assert not data.has_split
    assert data.preprocessing == expected.preprocessing
    for ours, theirs in zip(whole(read, data), whole(read, expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


SPLITS = {
    "four": (X[:15], Y[:15], X[15:], Y[15:]),
    "pairs": ((X[:15], Y[:15]), (X[15:], Y[15:])),
    "mapping": {"x_train": X[:15], "y_train": Y[:15], "x_test": X[15:], "y_test": Y[15:]},
    "objects": SimpleNamespace(train=Pairs(X[:15], Y[:15]), test=Pairs(X[15:], Y[15:])),
    "arrays": SimpleNamespace(train=(X[:15], Y[:15]), test=(X[15:], Y[15:])),
}


@pytest.mark.parametrize("form", SPLITS)
def test_a_split_is_kept(net, read, form):
    data = dataset_from(SPLITS[form], net((3, 6, 5), 4))
    assert data.has_split
    np.testing.assert_array_equal(read(data, "test")[1], Y[15:])
    expected = X[15:].transpose(0, 3, 1, 2).astype(np.float32) * np.float32(2 / 255) - 1
    np.testing.assert_allclose(read(data, "test")[0], expected, atol=1e-6)


def test_samples_are_read_once_if_they_fit_and_when_needed_else(net, read, monkeypatch):
    network, pairs = net((3, 6, 5), 4), Pairs()
    cached = dataset_from(pairs, network)
    assert pairs.reads == 21
    expected = whole(read, cached)
    assert pairs.reads == 21
    monkeypatch.setattr(stored, "free_memory", lambda: 0)
    lazy = dataset_from(pairs, network)
    for ours, theirs in zip(whole(read, lazy), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    pairs.targets, pairs.reads = Y, 0
    data = dataset_from(pairs, network)
    assert pairs.reads == 1 + MOST_DECODED
    np.testing.assert_array_equal(whole(read, data)[1], expected[1])


def test_float_images_are_taken_as_they_are_in_the_networks_order(net, read):
    # Both orders are possible by the number of channels; the network's input decides.
    x = RNG.random((10, 3, 4, 3))
    data = dataset_from((x, np.arange(10) % 2), net((3, 3, 4), 2), split=False)
    np.testing.assert_array_equal(read(data, "test")[0], x.transpose(0, 3, 1, 2).astype(np.float32))


def test_specs_and_data_sets(net):
    network = net((1, 8, 8))
    data = dataset_from("digits", network)
    assert len(data.train) == 1437
    assert dataset_from(data, network) is data
    with pytest.raises(UserError, match=r"opened for a network .* open it for this network"):
        dataset_from(data, net((3, 8, 8)))


class Broken(Pairs):
    def __getitem__(self, index):
        return super().__getitem__(index) if index < 7 else (self.x[index, :2], 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "of type int"),
        (X, "of type ndarray"),
        ({"x": X}, "has the keys x"),
        ((X,), "tuple of 1"),
        ((X, Y[:3]), r"\(20, 6, 5, 3\) and \(3,\)"),
        ((X, [1j] * 20), "y is of type complex128"),
        ([], "no samples"),
        ([1, 2], "sample 0 of the data is int; expected a pair"),
        (Broken(), r"sample 7 of the data has shape \(2, 5, 3\)"),
        ((X, np.arange(20)), "labels from 0 to 19"),
        ([("text", 1), ("text", 2)], "input of sample 0"),
    ],
)
def test_what_is_no_data_is_refused(net, data, words):
    with pytest.raises(UserError, match=words):
        dataset_from(data, net((3, 6, 5), 4))


def test_data_sets_have_a_short_repr(net):
    data = dataset_from((X, Y), net((3, 6, 5), 4))
    assert repr(data) == "<Dataset arrays: 16 training and 4 test samples of 3×6×5>"
    assert repr(data.train) == "<CachedSamples: 16 samples>"


# Fingerprints.


def test_equal_data_has_an_equal_fingerprint(net, images, tmp_path):
    network = net((3, 6, 5), 4)
    first = data_fingerprint(dataset_from((X, Y), network))
    assert first == data_fingerprint(dataset_from((X.copy(), Y), network))
    assert first["kind"] == "arrays"
    assert first["shape"] == [3, 6, 5]
    assert (first["train_samples"], first["test_samples"]) == (16, 4)
    other = X.copy()
    other[0, 0, 0, 0] ^= 1
    assert data_fingerprint(dataset_from((other, Y), network))["content"] != first["content"]
    labels = np.roll(Y, 1)
    assert data_fingerprint(dataset_from((X, labels), network))["content"] != first["content"]
    spec, network = f"folder:{images}", net((3, 8, 8), 2)
    folder = data_fingerprint(open_data(spec, network))
    assert folder == data_fingerprint(open_data(spec, network))
    path = images / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert folder["content"] != data_fingerprint(open_data(spec, network))["content"]


def test_fingerprints_are_cheap(net, read, monkeypatch):
    # Of 1.2 GB of samples that are not cached, and without reading most of them.
    monkeypatch.setattr(stored, "free_memory", lambda: 0)
    samples = np.broadcast_to(np.zeros((), np.float32), (2000, 3, 224, 224))
    pairs = Pairs(samples, np.zeros(2000, int))
    pairs.targets = pairs.y
    data = dataset_from(pairs, net((3, 224, 224), 2))
    pairs.reads = 0
    data_fingerprint(data)
    assert pairs.reads < 20


def test_the_fingerprint_of_data_in_memory_covers_every_sample(net):
    x, y = np.zeros((1000, 5)), np.arange(1000) % 3
    found = [data_fingerprint(dataset_from((x, y, x, y), net((5,), 3)))]
    for row in (1, 501, 998):
        other = x.copy()
        other[row, 2] = 1e-3
        found.append(data_fingerprint(dataset_from((other, y, x, y), net((5,), 3))))
    other_labels = np.where(np.arange(1000) == 7, 2, y)
    found.append(data_fingerprint(dataset_from((x, other_labels, x, y), net((5,), 3))))
    assert len({values["content"] for values in found}) == 5


def test_sampled_indices():
    np.testing.assert_array_equal(sampled_indices(3, 100), [0, 1, 2])
    np.testing.assert_array_equal(sampled_indices(0, 100), [])
    many = sampled_indices(10**6, 100)
    assert (len(many), many[0], many[-1]) == (65, 0, 10**6 - 1)
    assert list(sampled_indices(100, 10**9)) == [0, 99]
