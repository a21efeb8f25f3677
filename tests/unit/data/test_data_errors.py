"""Every mistake of a user leads to one line that names it and what was expected."""

import gzip
import shutil
import time
import warnings

import numpy as np
import pytest

from dptrain.data import open_data
from dptrain.data.image_files.decoder import decode_file
from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError


@pytest.fixture
def refuse():
    """Opening this spec fails with one line that has these words."""

    def check(spec, network, *words):
        with pytest.raises(UserError) as error:
            open_data(str(spec), network)
        message = str(error.value)
        assert "\n" not in message
        missing = [word for word in words if str(word) not in message]
        assert not missing, f"{missing} not in: {message}"

    return check


# The spec.


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("digts", ["'digts'", "did you mean 'digits'", "cifar10"]),
        ("", ["unknown data ''", "digits"]),
        ("digits:here", ["takes no path", "expected digits"]),
        ("digits:", ["takes no path"]),
        ("cifar10", ["needs DIR", "cifar10:DIR"]),
        ("cifar10:", ["needs DIR"]),
        ("synthetic?sample=3", ["no option 'sample'", "did you mean 'samples'"]),
        ("digits?fit=crop", ["no option 'fit'", "none"]),
        ("synthetic?samples", ["samples=N"]),
        ("synthetic?samples=", ["samples=N"]),
        ("synthetic?samples=1&samples=2", ["once"]),
        ("synthetic?", ["no option ''"]),
        ("synthetic?samples=0", ["'0'", "at least 1"]),
        ("synthetic?samples=many", ["'many'", "whole number"]),
    ],
)
def test_specs(net, refuse, spec, words):
    refuse(spec, net((3, 32, 32)), *words)


def test_an_existing_path_without_its_kind(net, refuse, tmp_path):
    for name, form in (
        ("a.npz", "npz:{}"), ("a.csv", "csv:{}?target=COLUMN"), ("a.h5", "hdf5:{}"),
        ("a.tar", "webdataset:{}"), ("folder", "folder:{}"),
    ):  # fmt: skip
        path = tmp_path / name
        path.mkdir() if name == "folder" else path.touch()
        refuse(str(path), net((3, 32, 32)), f"so use {form.format(path)}")
    refuse(str(tmp_path / "b.npz"), net((3, 32, 32)), "expected one of digits")


@pytest.mark.parametrize(("x", "y"), [("images", "labels"), ("data", "target"), ("x", "targets")])
@pytest.mark.parametrize("endings", [("",), ("_train", "_test"), ("_train", "_test", "_val")])
def test_arrays_have_their_usual_names(net, tmp_path, x, y, endings):
    arrays, usual = {}, {}
    for number, ending in enumerate(endings):
        images = np.full((10, 8, 8), number, np.uint8)
        arrays |= {f"x{ending}": images, f"y{ending}": np.arange(10) % 5}
        usual |= {f"{x}{ending}": images, f"{y}{ending}": np.arange(10) % 5}
    np.savez(tmp_path / "own.npz", **arrays)
    np.savez(tmp_path / "usual.npz", **usual, more=np.zeros(1))
    own, found = (
        open_data(f"npz:{tmp_path}/{name}.npz", net((1, 8, 8), 5)) for name in ("own", "usual")
    )
    assert found.notes == ("arrays are left out: more", *own.notes)
    for one, other in zip(own.splits, found.splits, strict=True):
        np.testing.assert_array_equal(one.known_targets(), other.known_targets())
        np.testing.assert_array_equal(one.x, other.x)


def test_masked_values_are_not_used(net):
    network = net((3,), 2)
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20) % 2
    data = dataset_from((np.ma.masked_array(x, False), y), network)
    for masked in ((np.ma.masked_greater(x, 50), y), (x, np.ma.masked_equal(y, 1))):
        with pytest.raises(UserError, match=r"masked array with 1?\d masked values"):
            dataset_from(masked, network)
    with pytest.raises(UserError, match="the input is a masked array with 9 masked values"):
        data.preprocessing.apply(np.ma.masked_greater(x, 50))


def test_a_mapping_has_its_usual_names(net, tmp_path):
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20) % 2
    own = dataset_from((x, y), net((3,), 2))
    np.savez(tmp_path / "a.npz", data=x, target=y, feature_names=np.array(["a", "b", "c"]))
    for data in ({"images": x, "labels": y}, np.load(tmp_path / "a.npz")):
        found = dataset_from(data, net((3,), 2))
        np.testing.assert_array_equal(found.train.x, own.train.x)
        np.testing.assert_array_equal(found.test.known_targets(), own.test.known_targets())
    assert found.notes[0] == "arrays are left out: feature_names"
    with pytest.raises(UserError, match="pass a text such as 'folder:"):
        dataset_from(tmp_path, net((3,), 2))


def test_an_unknown_word_for_an_option(net, refuse, cifar):
    refuse(f"cifar10:{cifar[0]}?fit=cut", net((3, 32, 32)), "'cut'", "resize or crop")


@pytest.mark.parametrize("name", ["cifar10", "mnist", "folder", "npz", "csv"])
def test_what_is_not_there(net, refuse, tmp_path, name):
    tail = "?target=a" if name == "csv" else ""
    path = tmp_path / "nowhere"
    refuse(f"{name}:{path}{tail}", net((3, 32, 32)), path, "does not exist")


@pytest.mark.parametrize("name", ["cifar10", "mnist", "folder"])
def test_a_file_in_place_of_a_directory(net, refuse, tmp_path, name):
    path = tmp_path / "file"
    path.write_text("")
    refuse(f"{name}:{path}", net((3, 32, 32)), path, "not a directory")


def test_a_directory_in_place_of_a_file(net, refuse, tmp_path):
    refuse(f"npz:{tmp_path}", net((2,)), tmp_path, "not a file")


def test_what_the_system_refuses_is_named(net, refuse, tmp_path, monkeypatch):
    from pathlib import Path

    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(Path, "open", denied)
    network = net((1,), 1, "values")
    refuse(f"csv:{tmp_path / 't.csv'}?target=a", network, "t.csv", "Permission denied")


# Networks that the data does not suit.


def test_more_classes_than_outputs(net, refuse, cifar, mnist):
    refuse("digits", net((1, 8, 8), 9), "digits", "0 to 9", "9 outputs")
    # The labels that files hold are what counts, and these are random.
    refuse(f"cifar10:{cifar[0]}", net((3, 32, 32), 2), cifar[0], "2 outputs")
    refuse(f"mnist:{mnist()[0]}", net((1, 28, 28), 2), "mnist", "2 outputs")


def test_classes_for_a_network_that_predicts_values(net, refuse, images):
    network = net((3, 8, 8), 1, "values")
    refuse("digits", network, "digits", "predicts values", "softmax_cross_entropy")
    refuse(f"folder:{images}", network, images, "predicts values")


def test_ten_classes_for_a_network_with_one_sigmoid(net, refuse):
    refuse("digits", net((1, 8, 8), 1, "binary"), "0 to 9", "0 and 1")


def test_two_classes_for_a_network_with_one_sigmoid(net, read, images):
    data = open_data(f"folder:{images}", net((3, 8, 8), 1, "binary"))
    _, y = read(data)
    assert y.shape == (8, 1)
    assert set(y.ravel()) == {0.0, 1.0}
    assert data.classes == ("cat", "dog")


def test_shapes_that_cannot_be_brought_together(net, refuse, cifar, images):
    refuse("digits", net((50,)), "digits", (1, 8, 8), (50,))
    refuse(f"cifar10:{cifar[0]}", net((4, 32, 32)), cifar[0], (3, 32, 32), (4, 32, 32))
    refuse(f"cifar10:{cifar[0]}?fit=crop", net((3, 40, 40)), (3, 40, 40), "fit=resize")
    refuse(f"folder:{images}", net((50,), 2), images, "(50,)", "(3, H, W)")
    refuse("irradiance", net((49,), 1, "values"), "irradiance", (50,), (49,))


def test_irradiance_is_one_value(net, refuse):
    refuse("irradiance", net((50,), 10), "one value", "10 × softmax_cross_entropy")
    refuse("irradiance", net((50,), 2, "values"), "one value")
    refuse("irradiance?horizon=0", net((50,), 1, "values"), "horizon", "at least 1")


# Damaged files.


def test_cifar10_files(net, refuse, cifar):
    folder, network = cifar[0], net((3, 32, 32))
    path = folder / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    refuse(f"cifar10:{folder}", network, path, len(content) - 1, "multiple of 3073")
    path.write_bytes(b"")
    refuse(f"cifar10:{folder}", network, path, "0 bytes")
    path.write_bytes(b"\x0a" + content[1:])
    refuse(f"cifar10:{folder}", network, path, "label 10", "0 to 9")
    path.unlink()
    refuse(f"cifar10:{folder}", network, path, "does not exist", "binary version")


def test_mnist_files(net, refuse, mnist):
    folder, network = mnist()[0], net((1, 28, 28))
    path = folder / "train-images-idx3-ubyte"
    content = path.read_bytes()
    spec = f"mnist:{folder}"
    path.write_bytes(content[:-5])
    refuse(spec, network, path, 9 * 784 - 5, 9 * 784)
    path.write_bytes(content + b"1")
    refuse(spec, network, path, f"more than {9 * 784} bytes")
    path.write_bytes(b"\0\0\x0d\x03" + content[4:])
    refuse(spec, network, path, "00000d03", "00000803")
    path.write_bytes(content[:7])
    refuse(spec, network, path, "IDX")
    path.write_bytes(content[:4] + (8).to_bytes(4, "big") + content[8 : 16 + 8 * 784])
    refuse(spec, network, path, "8 images", "9 labels")
    path.unlink()
    refuse(spec, network, path, "does not exist", "idx3-ubyte.gz")


def test_mnist_gzip(net, refuse, mnist):
    folder, network = mnist(packed=True)[0], net((1, 28, 28))
    path = folder / "t10k-labels-idx1-ubyte.gz"
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[-6] ^= 255
    for bad in (content[:-9], b"not gzip at all", bytes(damaged), b""):
        path.write_bytes(bad)
        refuse(f"mnist:{folder}", network, path)
    path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x09" + bytes(9)))
    refuse(f"mnist:{folder}", network, "4 images", "9 labels")


GOOD = {"x": np.zeros((10, 2)), "y": np.arange(10) % 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": None}, ["has x", "x_train", "x and y"]),
        ({"x": np.zeros(10)}, ["(10,)", "(n, F)"]),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, ["(0, 2)"]),
        ({"y": np.arange(9) % 3}, ["(10, 2) and (9,)"]),
        ({"x": np.full((10, 2), "a")}, ["<U1", "numbers"]),
        ({"y": np.full(10, "cat")}, ["only the class cat"]),
        ({"x": np.full((10, 2), np.inf)}, ["sample 0", "not finite"]),
        ({"x": np.array([[0, 0]] * 9 + [[0, np.nan]])}, ["sample 9", "not finite"]),
        ({"y": np.arange(10)}, ["0 to 9", "3 outputs", "units=10"]),
        ({"y": np.arange(10) % 3 - 1}, ["-1 to 1", "from 0 on", "classes="]),
        ({"y": np.arange(10) / 2}, ["whole numbers", "mean_squared_error"]),
        ({"y": np.full(10, np.nan)}, ["sample 0", "finite"]),
        ({"y": np.ones((10, 3))}, ["one-hot"]),
        ({"y": np.ones((10, 4))}, ["4 columns", "one-hot"]),
        ({"x": np.zeros((10, 3))}, ["(3,)", "(2,)"]),
        ({"x": np.zeros((10, 2, 2))}, ["(1, 2, 2)", "(2,)"]),
        ({"x": np.zeros((1, 2)), "y": np.zeros(1, int)}, ["1 samples", "at least 2"]),
        ({"x": np.array([None] * 10)}, ["Python objects", "would need pickle", "y.astype(str)"]),
    ],
)
def test_npz_arrays(net, refuse, tmp_path, change, words):
    arrays = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    refuse(f"npz:{tmp_path / 'a.npz'}", net((2,), 3), tmp_path / "a.npz", *words)


@pytest.mark.parametrize(
    ("targets", "y", "words"),
    [
        ("binary", np.arange(10) % 3, ["0 to 2", "0 and 1"]),
        ("binary", np.zeros((10, 2)), ["2 columns", "one-hot"]),
        ("values", np.zeros((10, 2)), ["(10, 2)", "units=2"]),
        ("values", np.array([0.0] * 9 + [np.nan]), ["sample 9"]),
    ],
)
def test_npz_targets(net, refuse, tmp_path, targets, y, words):
    np.savez(tmp_path / "a.npz", x=np.zeros((10, 2)), y=y)
    refuse(f"npz:{tmp_path / 'a.npz'}", net((2,), 1, targets), tmp_path / "a.npz", *words)


def test_npz_splits_of_unequal_shape(net, refuse, tmp_path):
    path = tmp_path / "a.npz"
    y = np.zeros(4, int)
    np.savez(path, x_train=np.zeros((4, 2)), y_train=y, x_test=np.zeros((4, 3)), y_test=y)
    refuse(f"npz:{path}", net((2,)), path, "(2,)", "(3,)")


def test_npz_files(net, refuse, tmp_path):
    path = tmp_path / "a.npz"
    rng = np.random.default_rng(0)
    np.savez_compressed(path, x=rng.random((100, 2)), y=np.zeros(100, int))
    content = path.read_bytes()
    middle = bytearray(content)
    middle[len(middle) // 2] ^= 255
    for bad in (b"", b"junk", content[: len(content) // 2], bytes(middle)):
        path.write_bytes(bad)
        refuse(f"npz:{path}", net((2,)), path, "cannot be read as npz", "x_train")
    np.save(tmp_path / "a.npy", np.zeros(3))
    refuse(f"npz:{tmp_path / 'a.npy'}", net((2,)), "a.npy", "cannot be read as npz")


def test_npy_files(net, refuse, tmp_path):
    x, y, network = tmp_path / "x.npy", tmp_path / "y.npy", net((2,))
    spec = f"npy:{x},{y}"
    refuse(f"npy:{x}", network, "1 files", "npy:X.npy,Y.npy")
    refuse(spec, network, x, "does not exist")
    np.save(x, np.zeros((10, 2)))
    np.save(y, np.zeros(9, int))
    refuse(spec, network, "(10, 2) and (9,)")
    np.save(y, np.zeros(10, int))
    content = x.read_bytes()
    for bad in (content[:-8], b"", b"junk"):
        x.write_bytes(bad)
        refuse(spec, network, x, "cannot be read as npy")
    np.save(x, np.array([{}] * 10), allow_pickle=True)
    refuse(spec, network, x, "cannot be read as npy", "numbers")
    with x.open("wb") as file:
        np.savez(file, x=np.zeros((10, 2)))
    refuse(spec, network, x, "several arrays")


def test_folders(net, refuse, images, tmp_path):
    network = net((3, 8, 8), 2)
    (images / "emu").mkdir()
    refuse(f"folder:{images}", network, images / "emu", "no images", ".png")
    (tmp_path / "empty").mkdir()
    refuse(f"folder:{tmp_path / 'empty'}", network, "no folders", "for each class")
    root = tmp_path / "root"
    for split, name in (("train", "cat"), ("test", "dog")):
        (root / split / name).mkdir(parents=True)
        (root / split / name / "a.png").write_bytes(b"")
    refuse(f"folder:{root}", network, root / "test", "dog", "cat")


def test_a_damaged_image_is_named_when_it_is_read(net, read, images):
    path = images / "cat" / "0.png"
    content = path.read_bytes()
    for bad in (content[: len(content) // 2], b"junk", b""):
        path.write_bytes(bad)
        data = open_data(f"folder:{images}", net((3, 8, 8), 2))
        with pytest.raises(UserError, match=r"cat.0\.png cannot be read as an image") as error:
            read(data, "train"), read(data, "test")
        assert "\n" not in str(error.value)


def test_an_image_of_16_bits_is_refused_rather_than_clipped(tmp_path):
    from PIL import Image

    path = tmp_path / "deep.png"
    Image.fromarray(np.full((4, 4), 3000, np.uint16)).save(path)
    with pytest.raises(UserError, match=r"deep\.png cannot be read .* 8 bits"):
        decode_file(path, grey=True)


@pytest.mark.parametrize(
    ("text", "tail", "words"),
    [
        ("", "target=a", ["no rows"]),
        ("a,b\n", "target=a", ["no rows"]),
        ("a,b\n" + "1,2\n" * 20, "target=c", ["no column 'c'", "a, b"]),
        ("a,bee\n" + "1,2\n" * 20, "target=bea", ["did you mean 'bee'"]),
        ("a,b,b\n" + "1,2,3\n" * 20, "target=a", ["more than one column 'b'"]),
        ("a,b\n" + "1,2\n" * 20, "target=a&columns=b,x", ["no column 'x'"]),
        ("a,b\n" + "1,2\n" * 20, "target=a&columns=b,b", ["'b' more than once"]),
        ("a\n" + "1\n" * 20, "target=a", ["no numeric column except a"]),
        ("a,b\n" + "1,2\n" * 20, "target=a&columns=a", ["own input", "horizon"]),
        ("a,b\n1,2\n\n3,nan\n" + "1,2\n" * 20, "target=a", ["line 4", "column b", "'nan'"]),
        ("a,b\n1,2\n3,\n" + "1,2\n" * 20, "target=a", ["line 3", "column b", "''"]),
        ("a,b\n1,2\ninf,3\n" + "1,2\n" * 20, "target=a", ["line 3", "column a", "'inf'"]),
        ("a,b\nx,2\n" + "1,2\n" * 20, "target=a", ["line 2", "column a", "'x'"]),
        ("a,b\n1,2\n1,2,3\n", "target=a", ["line 3", "3 fields", "expected 2"]),
        ("a,b\n" + "1,2\n" * 4, "target=a", ["4 rows", "at least 5"]),
        ("a,b\n" + "1,2\n" * 24, "target=a&horizon=4", ["24 rows", "at least 25"]),
        ("a,b,c\n" + "1,2,3\n" * 20, "target=a", ["2 input columns: b, c", "(2,)", "(1,)"]),
        ("a,b\n" + "1,2\n" * 20, "target=a&horizon=-1", ["'-1'", "at least 0"]),
    ],
)
def test_tables(net, refuse, tmp_path, text, tail, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    words = words if "horizon=-1" in tail else [path, *words]
    refuse(f"csv:{path}?{tail}", net((1,), 1, "values"), *words)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (b"b\xe9b\xe9\nchat\n", ["classes.txt", "UTF-8"]),
        (b"cat\ndog\ncat\n", ["classes.txt", "'cat' in lines 1 and 3"]),
        (None, ["classes.txt", "directory"]),
    ],
)
def test_names_of_classes_of_a_folder_of_arrays(net, refuse, tmp_path, classes, words):
    for split in ("train", "test"):
        np.save(tmp_path / f"x_{split}.npy", np.zeros((6, 2), np.float32))
        np.save(tmp_path / f"y_{split}.npy", np.arange(6) % 3)
    if classes is None:
        (tmp_path / "classes.txt").mkdir()
    else:
        (tmp_path / "classes.txt").write_bytes(classes)
    refuse(f"npy:{tmp_path}", net((2,), 3), *words)


def test_half_of_a_validation_split(net, refuse, tmp_path):
    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 3
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "a.npz", **arrays, x_val=x)
    refuse(f"npz:{tmp_path / 'a.npz'}", net((2,), 3), "a.npz has x_val but not y_val", "remove")
    with pytest.raises(UserError, match="the data has y_valid but not x_valid"):
        dataset_from({**arrays, "y_valid": y}, net((2,), 3))


def test_an_archive_that_is_none(net, refuse, tmp_path):
    (tmp_path / "a.npz").write_text("x,y\n1,2\n")
    refuse(f"npz:{tmp_path / 'a.npz'}", net((2,), 3), "a.npz cannot be read", "not a zip file")


def test_a_table_that_is_no_text(net, refuse, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b\n\xff\xfe\x00\n")
    refuse(f"csv:{path}?target=a", net((1,), 1, "values"), path, "UTF-8")


def test_the_smallest_tables_that_are_said_to_do(net, tmp_path):
    path = tmp_path / "t.csv"
    for rows, horizon in ((5, 0), (25, 4)):
        path.write_text("a,b\n" + "1,2\n" * rows)
        spec = f"csv:{path}?target=a&horizon={horizon}"
        assert len(open_data(spec, net((1,), 1, "values")).test) >= 1


# Odd numbers and odd files.


def test_numbers_too_large_for_float32(net, refuse, tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "1,2\n3,1e300\n" * 5)
    refuse(f"csv:{tmp_path / 't.csv'}?target=y", net((1,), 1, "values"), "1e+300", "float32")
    (tmp_path / "t.csv").write_text("x,y\n" + "1e308,2\n-1e308,1\n" * 5)
    refuse(f"csv:{tmp_path / 't.csv'}?target=y", net((1,), 1, "values"), "column x", "too large")
    np.savez(tmp_path / "a.npz", x=np.full((4, 2), 1e300), y=np.zeros(4))
    refuse(f"npz:{tmp_path / 'a.npz'}", net((2,)), "a.npz", "sample 0", "not finite")


def test_options_of_shapes(net, refuse):
    refuse("shapes?samples=9", net((3, 32, 32)), "samples", "at least 10")
    refuse("shapes?size=9", net((3, 32, 32)), "shapes has no option 'size'")
    refuse("shapes?samples=10", net((3, 32, 32), 7), "10 classes", "7 outputs")


def test_more_than_memory(net, refuse, monkeypatch):
    monkeypatch.setattr("dptrain.memory.free_memory", lambda: 2**30)
    network = net((50,), 1, "values")
    refuse("irradiance?samples=2000000000", network, "2,000,000,000", "memory")
    refuse("shapes?samples=2000000000", net((3, 32, 32)), "2,000,000,000", "memory")


def test_specs_that_are_no_text(net, refuse):
    refuse("folder:a\nb", net((3, 8, 8)), "a\\nb", "not UTF-8")
    refuse("folder:\udcff", net((3, 8, 8)), "udcff", "not UTF-8")


def test_files_with_damage_at_any_byte(net, tmp_path):
    """Whatever a byte is changed to, the file is read or refused in one line."""
    rng = np.random.default_rng(0)
    network = net((4,))
    np.savez_compressed(tmp_path / "a.npz", x=np.ones((9, 4)), y=np.arange(9))
    np.save(tmp_path / "x.npy", np.ones((9, 4)))
    np.save(tmp_path / "y.npy", np.arange(9))
    other = tmp_path / "damaged"
    for name, spec in (
        ("a.npz", f"npz:{other}"),
        ("x.npy", f"npy:{other},{tmp_path / 'y.npy'}"),
        ("y.npy", f"npy:{tmp_path / 'x.npy'},{other}"),
    ):
        content = (tmp_path / name).read_bytes()
        for _ in range(150):
            damaged = bytearray(content)
            damaged[rng.integers(len(content))] = rng.integers(256)
            other.write_bytes(damaged)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # NumPy lets Python parse the header.
                try:
                    open_data(spec, network)
                except UserError:
                    continue


# Files that are larger than they seem, and numbers that are none.


def test_no_more_of_a_compressed_file_is_read_than_its_header_states(
    net, refuse, mnist, monkeypatch
):
    from dptrain.data.sources import mnist as module

    folder, network = mnist(packed=True)[0], net((1, 28, 28))
    path = folder / "t10k-images-idx3-ubyte.gz"
    header = gzip.decompress(path.read_bytes())[:16]
    path.write_bytes(gzip.compress(header + bytes(200 << 20), 1))
    read, total = gzip.GzipFile.read, []

    def counted(self, size=-1):
        content = read(self, size)
        total.append(len(content))
        return content

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    refuse(f"mnist:{folder}", network, path, f"more than {4 * 784} bytes", "download it again")
    assert sum(total) < 20_000
    # A header that states 2^96 bytes reserves no memory.
    path.write_bytes(gzip.compress(header[:4] + b"\xff" * 12 + bytes(9)))
    refuse(f"mnist:{folder}", network, path, "has 9 bytes after its header")
    assert module._CHUNK_BYTES < 1 << 24


def test_images_with_too_many_pixels_are_refused_before_they_are_decoded(tmp_path, recwarn):
    from PIL import Image

    path = tmp_path / "huge.png"
    Image.new("1", (20_000, 8_850)).save(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(UserError, match="20000×8850 pixels, more than 64 million"):
        decode_file(path, grey=True)
    assert not recwarn.list


def test_values_that_are_not_finite_are_refused_in_lazy_data_too(net, read, tmp_path):
    x = np.zeros((10, 2), np.float32)
    x[7, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(10) % 2)
    data = open_data(f"npy:{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}", net((2,), 2))
    split = "test" if 7 in data.test.rows else "train"
    with pytest.raises(UserError, match=r"x\.npy: sample 7 has values that are not finite"):
        read(data, split)


def test_npz_splits_of_different_types(net, refuse, tmp_path):
    path, y = tmp_path / "a.npz", np.zeros(4, int)
    np.savez(path, x_train=np.zeros((4, 2), np.uint8), y_train=y, x_test=np.zeros((4, 2)), y_test=y)
    refuse(f"npz:{path}", net((2,), 2), path, "x_train is of type uint8", "x_test of float64")


def test_npy_files_that_are_longer_than_their_header_states(net, refuse, tmp_path):
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.zeros((10, 2)))
    np.save(y, np.zeros(10, int))
    x.write_bytes(x.read_bytes() + bytes(16))
    refuse(f"npy:{x},{y}", net((2,), 2), x, "has 304 bytes, its header states 288")


def test_numbers_with_underscores_are_no_numbers(net, refuse, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n1_0,3\n" + "1,2\n" * 20)
    refuse(f"csv:{path}?target=b", net((1,), 1, "values"), "line 3", "column a", "'1_0'")


def test_tables_with_many_columns_take_linear_time(net, tmp_path):
    """Processor time, the shortest of three; for 4 times as many columns, squares take 16 times."""
    path = tmp_path / "t.csv"

    def seconds(columns):
        header = ",".join(f"column{i}" for i in range(columns))
        path.write_text("\n".join([header, *[",".join(["1"] * columns)] * 10]) + "\n")
        network, times = net((columns - 1,), 1, "values"), []
        for _ in range(3):
            begin = time.process_time()
            data = open_data(f"csv:{path}?target=column7", network)
            times.append(time.process_time() - begin)
            assert len(data.preprocessing.columns) == columns - 1
        return min(times)

    assert seconds(20_000) < 10 * seconds(5_000)


def test_text_of_files_is_escaped_and_shortened_in_messages(net, refuse, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('a,b\n1,2\n"\x1b[31mred\n",3\n' + "1,2\n" * 20)
    refuse(f"csv:{path}?target=b", net((1,), 1, "values"), r"'\x1b[31mred\n'")
    path.write_text("a,b\n1,2\n" + "x" * 100_000 + ",3\n" + "1,2\n" * 20)
    with pytest.raises(UserError) as error:
        open_data(f"csv:{path}?target=b", net((1,), 1, "values"))
    assert len(str(error.value)) < 400


# Specs that lack something.


def test_a_table_without_a_target_lists_its_columns(net, refuse, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time,roof,wall\n1,2,3\n")
    refuse(f"csv:{path}", net((1,), 1, "values"), "?target=COLUMN", "one of time, roof, wall")
    path.write_text(",".join(f"c{i}" for i in range(50)) + "\n" + ",".join("1" * 50) + "\n")
    refuse(f"csv:{path}", net((1,), 1, "values"), "c0, c1", "c19 and 30 more columns")


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_names_of_the_folder_for_the_test(net, images, name):
    root = images.parent / "root"
    root.mkdir()
    images.rename(root / "train")
    shutil.copytree(root / "train", root / name)
    data = open_data(f"folder:{root}", net((3, 8, 8), 2))
    assert data.has_split
    assert (len(data.train), len(data.test)) == (10, 10)


def test_a_folder_for_training_alone_is_explained(net, refuse, images):
    root = images.parent / "root"
    root.mkdir()
    images.rename(root / "train")
    words = [root / "train", "no images", "one of test, val, valid, validation next to it"]
    refuse(f"folder:{root}", net((3, 8, 8), 2), *words)


def test_paths_of_specs_are_relative_to_a_directory(tmp_path):
    from dptrain.data import absolute

    assert absolute("npz:a.npz?fit=crop", tmp_path) == f"npz:{tmp_path / 'a.npz'}?fit=crop"
    assert absolute("npy:x.npy,y.npy", tmp_path) == f"npy:{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}"
    assert absolute("npz:/data/a.npz", tmp_path) == "npz:/data/a.npz"
    assert absolute("digits", tmp_path) == "digits"


def test_more_synthetic_samples_than_memory_can_order(net, refuse, monkeypatch):
    monkeypatch.setattr("dptrain.data.sources.synthetic.free_memory", lambda: 2 * 10**9)
    words = ["samples is 2,000,000,000", "48 GB", "2 GB are available", "use fewer"]
    refuse("synthetic?samples=2000000000", net((5,)), *words)


@pytest.mark.parametrize("name", ["irradiance", "shapes", "synthetic"])
def test_more_samples_than_a_whole_number_may_be(net, refuse, name):
    network = net((50,), 1, "values") if name == "irradiance" else net((3, 32, 32))
    refuse(f"{name}?samples=1000000000000", network, "'1000000000000'", "up to 2,147,483,647")
