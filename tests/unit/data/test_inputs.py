"""New samples are preprocessed exactly like the data that the network was trained on."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dptrain.data import Preprocessing, open_data
from dptrain.data.inputs import open_inputs
from dptrain.data.sources.irradiance import WINDOW, simulate
from dptrain.errors import UserError

RNG = np.random.default_rng(7)


def digits():
    path = Path(__file__).parents[3] / "dptrain" / "data" / "sources" / "digits.npz"
    with np.load(path) as file:
        return file["images"], file["labels"]


def saved(network, trained_on, seed=0):
    """Preprocessing of a network that was trained on such data, as it comes from a checkpoint."""
    preprocessing = open_data(str(trained_on), network, seed=seed).preprocessing
    return Preprocessing.from_dict(json.loads(json.dumps(preprocessing.to_dict())))


def inputs_of(source, network, trained_on):
    return open_inputs(source, saved(network, trained_on))


def read_all(inputs, shape):
    n = len(inputs.samples)
    x = np.full((n, *shape), np.nan, np.float32)
    y = np.full(n, 77, np.int32)
    inputs.samples.read(np.arange(n), x, y)
    assert (y == 77).all(), "read touched y"
    assert len(inputs.names) == n
    return x


@pytest.fixture
def refuse():
    """Opening, or reading, these inputs fails with one line that has these words."""

    def check(source, network, trained_on, *words):
        with pytest.raises(UserError) as error:
            read_all(inputs_of(source, network, trained_on), network.input_shape)
        message = str(error.value)
        assert "\n" not in message
        missing = [word for word in words if str(word) not in message]
        assert not missing, f"{missing} not in: {message}"

    return check


def save(path, array):
    np.save(path, array)
    return path


# Equal samples become equal inputs, from arrays, archives and image files.


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (64,)])
def test_digits(net, read, tmp_path, shape):
    network = net(shape)
    images, labels = digits()
    data = open_data("digits", network)
    expected = np.concatenate([read(data, split)[0] for split in ("train", "test")])
    inputs = inputs_of(save(tmp_path / "x.npy", images), network, "digits")
    x = read_all(inputs, shape)
    assert sorted(row.tobytes() for row in x) == sorted(row.tobytes() for row in expected)
    _, y = read(data, "test")
    order = {row.tobytes(): label for row, label in zip(x, labels, strict=True)}
    assert [order[row.tobytes()] for row in read(data, "test")[0]] == list(y)
    assert inputs.names[:2] == ("0", "1")


@pytest.mark.parametrize(
    ("tail", "shape"),
    [("", (3, 32, 32)), ("", (1, 24, 20)), ("?fit=crop", (3, 24, 24)), ("", (3072,))],
)
def test_cifar10(net, read, tmp_path, cifar, tail, shape):
    folder, images, _ = cifar
    spec, network = f"cifar10:{folder}{tail}", net(shape)
    expected, _ = read(open_data(spec, network))
    for name, stored in (("a", images), ("b", images.transpose(0, 2, 3, 1))):
        inputs = inputs_of(save(tmp_path / f"{name}.npy", stored), network, spec)
        # One sum of a few terms below 1 may be taken in another order in the other layout.
        np.testing.assert_allclose(read_all(inputs, shape), expected, atol=1e-6)
        if name == "a":
            np.testing.assert_array_equal(read_all(inputs, shape), expected)
    assert saved(network, spec).classes[:2] == ("airplane", "automobile")
    for i, image in enumerate(images):
        (tmp_path / "png").mkdir(exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / "png" / f"{i:02}.png")
    inputs = inputs_of(tmp_path / "png", network, spec)
    np.testing.assert_array_equal(read_all(inputs, shape), expected)


def test_mnist_as_array_and_as_grey_or_colour_files(net, read, tmp_path, mnist):
    folder, images, _ = mnist()
    spec, network = f"mnist:{folder}", net((3, 32, 32))
    expected, _ = read(open_data(spec, network))
    inputs = inputs_of(save(tmp_path / "x.npy", images), network, spec)
    np.testing.assert_array_equal(read_all(inputs, (3, 32, 32)), expected)
    for i, image in enumerate(images):
        Image.fromarray(image).convert("RGB" if i % 2 else "L").save(tmp_path / f"{i}.png")
    (tmp_path / "x.npy").unlink()
    images = tmp_path / "images"
    images.mkdir()
    for path in tmp_path.glob("*.png"):
        path.rename(images / path.name)
    inputs = inputs_of(images, network, spec)
    np.testing.assert_array_equal(read_all(inputs, (3, 32, 32)), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.int16])
def test_npz_and_npy(net, read, tmp_path, dtype):
    stored = RNG.integers(0, 200, (20, 9, 7, 3)).astype(dtype)
    labels = np.arange(20) % 10
    for split in ("train", "test"):
        np.savez(
            tmp_path / f"{split}.npz",
            x_train=stored, y_train=labels, x_test=stored[:2], y_test=labels[:2],
        )  # fmt: skip
    np.save(tmp_path / "y.npy", labels)
    save(tmp_path / "x.npy", stored)
    network = net((3, 8, 8))
    expected, _ = read(open_data(f"npz:{tmp_path / 'train.npz'}", network))
    for spec in (
        f"npz:{tmp_path / 'train.npz'}",
        f"npy:{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}",
    ):
        inputs = inputs_of(tmp_path / "x.npy", network, spec)
        np.testing.assert_array_equal(read_all(inputs, (3, 8, 8)), expected)


def test_arrays_of_an_npz(net, refuse, tmp_path):
    network, path = net((4,)), tmp_path / "a.npz"
    x, other = RNG.random((3, 4)), np.arange(3)
    for arrays in ({"x": x, "y": other}, {"x_test": x, "y_test": other}, {"what": x}):
        np.savez(path, **arrays)
        inputs = inputs_of(path, network, "synthetic")
        np.testing.assert_array_equal(read_all(inputs, (4,)), x.astype(np.float32))
    np.savez(path, a=x, b=x)
    refuse(path, network, "synthetic", path, "a, b", "x or x_test")
    np.savez(path)
    refuse(path, network, "synthetic", path, "nothing")


def test_folder(net, read, images, tmp_path):
    spec, network = f"folder:{images}", net((3, 8, 6), 2)
    data = open_data(spec, network)
    expected = np.concatenate([read(data, split)[0] for split in ("train", "test")])
    paths = [str(p.relative_to(images)) for s in (data.train, data.test) for p in s.paths]
    (images / ".hidden").mkdir()
    for hidden in (images / ".hidden" / "a.png", images / "cat" / "._0.png"):
        hidden.write_bytes(b"no image")
    inputs = inputs_of(images, network, spec)
    assert list(inputs.names) == sorted(paths)
    order = [paths.index(name) for name in inputs.names]
    np.testing.assert_array_equal(read_all(inputs, (3, 8, 6)), expected[order])
    one = inputs_of(images / "dog" / "1.jpg", network, spec)
    assert one.names == ("1.jpg",)
    np.testing.assert_array_equal(read_all(one, (3, 8, 6))[0], expected[paths.index("dog/1.jpg")])


def test_training_data_that_changes_or_disappears_makes_no_difference(net, images, tmp_path):
    network, new = net((3, 8, 8), 2), tmp_path / "new.png"
    shutil.copy(images / "cat" / "0.png", new)
    preprocessing = saved(network, f"folder:{images}")
    expected = read_all(open_inputs(new, preprocessing), (3, 8, 8))
    shutil.copytree(images / "cat", images / "bird")
    np.testing.assert_array_equal(read_all(open_inputs(new, preprocessing), (3, 8, 8)), expected)
    shutil.rmtree(images)
    np.testing.assert_array_equal(read_all(open_inputs(new, preprocessing), (3, 8, 8)), expected)
    assert preprocessing.output_names(network) == ("cat", "dog")


@pytest.mark.parametrize("shape", [(50,), (1, 50, 50)])
def test_irradiance(net, read, tmp_path, shape):
    network = net(shape, 1, "values")
    spec = "irradiance?samples=5"
    expected, _ = read(open_data(spec, network, seed=4))
    # The simulation depends on its length; the same length results in the same table.
    table = simulate((5 + WINDOW - 1 + 10) + 1 + WINDOW - 1 + 10, 4)
    rows = [table[i + WINDOW - 1] if shape == (50,) else table[i : i + WINDOW] for i in range(5)]
    inputs = inputs_of(save(tmp_path / "x.npy", np.stack(rows)), network, spec)
    np.testing.assert_array_equal(read_all(inputs, shape), expected)


@pytest.fixture
def table(tmp_path):
    """Fifteen rows of four columns and a spec that predicts one of them."""
    numbers = RNG.normal(5.0, 3.0, (15, 4))
    path = tmp_path / "field.csv"
    write_csv(path, ["a", "b", "roof", "c"], numbers)
    return numbers, path, f"csv:{path}?target=roof&horizon=2"


def write_csv(path, header, numbers):
    lines = [",".join(header), *(",".join(map(repr, row)) for row in numbers.tolist())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_csv(net, read, tmp_path, table):
    numbers, path, spec = table
    network = net((3,), 1, "values")
    data = open_data(spec, network)
    expected = np.concatenate([read(data, split)[0] for split in ("train", "test")])
    # Every row is a sample: neither the horizon nor the gap before the test leaves rows out.
    inputs = inputs_of(path, network, spec)
    x = read_all(inputs, (3,))
    assert inputs.names == tuple(map(str, range(15)))
    np.testing.assert_array_equal(x[[*range(10), 12]], expected)
    # Other columns, another order, no target.
    mixed = write_csv(tmp_path / "m.csv", ["c", "more", "b", "a"], numbers[:, [3, 2, 1, 0]])
    np.testing.assert_array_equal(read_all(inputs_of(mixed, network, spec), (3,)), x)
    # An array has the inputs in the order of the table.
    array = save(tmp_path / "x.npy", numbers[:, [0, 1, 3]])
    np.testing.assert_array_equal(read_all(inputs_of(array, network, spec), (3,)), x)
    one = write_csv(tmp_path / "1.csv", ["c", "b", "a"], numbers[:1, [3, 1, 0]])
    np.testing.assert_array_equal(read_all(inputs_of(one, network, spec), (3,)), x[:1])


def test_csv_with_chosen_columns(net, read, table):
    _, path, spec = table
    spec += "&columns=c,roof"
    network = net((2,), 1, "values")
    expected, _ = read(open_data(spec, network))
    x = read_all(inputs_of(path, network, spec), (2,))
    np.testing.assert_array_equal(x[:10], expected)


def test_arrays_are_mapped(net, tmp_path):
    inputs = inputs_of(save(tmp_path / "x.npy", RNG.random((3, 4))), net((4,)), "synthetic")
    assert isinstance(inputs.samples.inputs, np.memmap)


# What a user gets wrong.


@given(
    kind=st.sampled_from(["table", "vector", "pixels", "floats"]),
    width=st.integers(1, 9),
    channels=st.integers(1, 5),
    has_classes=st.booleans(),
)
def test_data_of_another_kind_is_refused_with_what_the_model_expects(
    images, table, net, kind, width, channels, has_classes
):
    """Evaluation and prediction say what to pass: a table, rows, arrays or files of images."""
    classes = ("cat", "dog") if has_classes else None
    shape = (channels, width, width) if kind in ("pixels", "floats") else (width,)
    number = (0.0,) * (width if kind == "table" else 0)
    scale = {"stored_dtype": "uint8", "scale": 2 / 255, "offset": -1.0} if kind == "pixels" else {}
    preprocessing = Preprocessing(
        "image" if len(shape) == 3 else kind, shape, shape, classes=classes,
        columns=tuple(f"c{i}" for i in range(len(number))), mean=number,
        deviation=tuple(1.0 for _ in number), **scale,
    )  # fmt: skip
    network = net(shape, 2 if has_classes else 1, "classes" if has_classes else "values")
    takes_files = kind == "pixels" and channels in (1, 3)
    wrong = {images: f"folder:{images}"} if not takes_files else {}
    wrong |= {table[1]: table[2]} if kind != "table" else {}
    for path, spec in wrong.items():
        with pytest.raises(UserError) as of_prediction:
            open_inputs(path, preprocessing)
        with pytest.raises(UserError) as of_evaluation:
            open_data(spec, network, preprocessing=preprocessing, split=False)
        for error in (of_prediction, of_evaluation):
            assert str(error.value).endswith(f"expected {preprocessing.expected}")
    words = {"table": ".csv file", "vector": f"rows of {width} numbers", "floats": "file of images"}
    expected = "a folder of images" if takes_files else words.get(kind, "file of images")
    assert expected in preprocessing.expected


def test_tables_that_do_not_fit(net, refuse, tmp_path, table):
    numbers, _, spec = table
    network = net((3,), 1, "values")
    lacks = write_csv(tmp_path / "l.csv", ["a", "bb", "c"], numbers[:, :3])
    refuse(lacks, network, spec, lacks, "no column 'b'", "did you mean 'bb'")
    refuse(lacks, net((64,)), "digits", lacks, "named columns", "digits", "a folder of images")
    (tmp_path / "t.csv").write_text("a,b,c\n1,2,3\n1,x,3\n")
    refuse(tmp_path / "t.csv", network, spec, "line 3", "column b", "'x'")
    (tmp_path / "t.csv").write_text("a,b,c\n")
    refuse(tmp_path / "t.csv", network, spec, "t.csv", "no rows")
    refuse(save(tmp_path / "x.npy", numbers), network, spec, "x.npy", "(4,)", "3 columns: a, b, c")


def test_files_that_are_none(net, refuse, tmp_path, images):
    network = net((3, 8, 8))
    refuse(tmp_path / "nowhere", network, "digits", "nowhere", "does not exist", ".npy")
    for name in ("text.txt", "noname"):
        (tmp_path / name).write_text("hello")
        refuse(tmp_path / name, network, "digits", name, "a folder of images")
    for name in ("a.npy", "a.npz", "a.png"):
        for content in (b"", b"no such thing", b"PK\x03\x04"):
            (tmp_path / name).write_bytes(content)
            refuse(tmp_path / name, network, "digits", tmp_path / name, "cannot be read")
    np.save(tmp_path / "one.npy", np.zeros((2, 4)))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    refuse(tmp_path / "one.npz", network, "digits", "one.npz", "single array")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", network, "digits", tmp_path / "empty", "no images", ".png")
    (images / "dog" / "3.png").write_bytes(b"no image")
    refuse(images, network, "digits", "3.png", "replace or remove")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((0, 8, 8), np.uint8), ["(0, 8, 8)", "at least one"]),
        (np.zeros(8, np.uint8), ["(8,)", "(n, H, W)"]),
        (np.zeros((1, 1, 8, 8, 1)), ["(1, 1, 8, 8, 1)"]),
        (np.array(["a"]), ["<U1", "numbers"]),
        (np.zeros((2, 3), complex), ["complex128"]),
        (np.array([{}]), ["cannot be read"]),
        (np.zeros((2, 50), np.uint8), ["(50,)", "(3, 8, 8)"]),
        (np.zeros((2, 8, 8, 4), np.uint8), ["(4, 8, 8)", "opacity", "on white"]),
        (np.zeros((2, 8, 8, 3), np.uint8), ["colours", "grey"]),
        (np.full((2, 8, 8), 17, np.uint8), ["sample 0", "0 to 16", "-1 to 1"]),
        (np.full((2, 8, 8), 7.0), ["sample 0", "0 to 16"]),
        (np.array([0, np.nan] * 32).reshape(1, 8, 8), ["sample 0", "not finite"]),
    ],
)
def test_arrays_that_do_not_fit_digits(net, refuse, tmp_path, array, words):
    path = tmp_path / "x.npy"
    np.save(path, array)
    refuse(path, net((3, 8, 8)), "digits", path, *words)


def test_the_sample_that_does_not_fit_is_named(net, tmp_path):
    array = np.zeros((9, 4), np.float32)
    array[6, 1] = np.inf
    inputs = inputs_of(save(tmp_path / "x.npy", array), net((4,)), "synthetic")
    x = np.zeros((2, 4), np.float32)
    inputs.samples.read(np.array([1, 3]), x, np.zeros(2))
    with pytest.raises(UserError, match="sample 6 "):
        inputs.samples.read(np.array([3, 6]), x, np.zeros(2))


def test_pixels_for_a_network_that_was_trained_on_other_numbers(net, refuse, tmp_path, images):
    np.savez(tmp_path / "t.npz", x=RNG.random((9, 3, 8, 8)), y=np.arange(9))
    spec, network = f"npz:{tmp_path / 't.npz'}", net((3, 8, 8))
    pixels = save(tmp_path / "p.npy", np.zeros((1, 3, 8, 8), np.uint8))
    refuse(pixels, network, spec, pixels, "8-bit", "numbers of", spec)
    refuse(images, network, spec, images, "numbers of", spec)
    values = net((1, 50, 50), 1, "values")
    refuse(images, values, "irradiance", images, "irradiance")


def test_images_for_a_network_that_takes_none(net, refuse, images, table):
    refuse(images, net((3,), 1, "values"), table[2], images, "numbers of csv")
    refuse(images, net((50,)), "synthetic", images, "numbers of synthetic")


def test_images_too_small_to_crop(net, refuse, cifar, images):
    refuse(images, net((3, 24, 24)), f"cifar10:{cifar[0]}?fit=crop", "cat/0.png", "larger")


def test_names_that_are_no_text(net, images):
    odd = images / "cat" / "ü \udcff,\n.png"
    (images / "cat" / "0.png").rename(odd)
    inputs = inputs_of(images / "cat", net((3, 8, 8)), "digits")
    assert "ü ?,\n.png" in inputs.names
    "".join(inputs.names).encode("utf-8")
