"""Every source, from small files in its real format."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dptrain.data import DATA_HELP, SOURCES, open_data
from dptrain.data.image_files.decoder import decode_file


def scaled(images, white=255):
    return images.astype(np.float32) * np.float32(2 / white) - np.float32(1)


def digest(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_help_shows_every_source_with_an_example_that_parses():
    for name, source in SOURCES.items():
        assert source.form(name) in DATA_HELP
        assert source.summary in DATA_HELP
        assert source.example in DATA_HELP
        assert source.example.partition(":")[0].partition("?")[0] == name


def test_readers_keep_8_bit_pixels_unless_they_compute_new_ones(net, cifar, mnist, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 3), np.uint8)
    np.savez(tmp_path / "bytes.npz", x=x, y=np.arange(20) % 10)
    np.savez(tmp_path / "floats.npz", x=x / 255.0, y=np.arange(20) % 10)
    for spec, shape, dtype in (
        (f"cifar10:{cifar[0]}", (3, 32, 32), "uint8"),
        (f"cifar10:{cifar[0]}?fit=crop", (3, 24, 24), "uint8"),
        (f"cifar10:{cifar[0]}", (3, 24, 24), "float32"),  # resized
        (f"cifar10:{cifar[0]}", (1, 32, 32), "float32"),  # grey
        (f"mnist:{mnist()[0]}", (1, 28, 28), "uint8"),
        ("digits", (3, 8, 8), "uint8"),
        (f"npz:{tmp_path / 'bytes.npz'}", (3, 6, 5), "uint8"),
        (f"npz:{tmp_path / 'floats.npz'}", (3, 6, 5), "float32"),
    ):
        data = open_data(spec, net(shape))
        assert data.train.pixels.dtype == data.train.x.dtype == data.test.x.dtype == dtype, spec


# digits


@pytest.mark.more
def test_digits_are_scikit_learns(net, read):
    from sklearn.datasets import load_digits

    theirs = load_digits()
    data = open_data("digits", net((1, 8, 8)))
    ours = [read(data, split) for split in ("train", "test")]
    x = np.concatenate([images for images, _ in ours]).reshape(-1, 64)
    y = np.concatenate([labels for _, labels in ours])
    expected = np.column_stack([theirs.data, theirs.target])
    found = np.column_stack([np.round((x + 1) * 8), y])
    order = np.lexsort(expected.T), np.lexsort(found.T)
    np.testing.assert_array_equal(found[order[1]], expected[order[0]])


def test_digits_split_is_stratified_and_does_not_follow_the_seed(net, read):
    data = [open_data("digits", net((1, 8, 8)), seed=seed) for seed in (0, 1)]
    assert (len(data[0].train), len(data[0].test)) == (1437, 360)
    assert data[0].classes == tuple("0123456789")
    (x, y), (other, _) = (read(d, "test") for d in data)
    np.testing.assert_array_equal(x, other)
    whole = np.bincount(np.concatenate([y, read(data[0])[1]]))
    np.testing.assert_allclose(np.bincount(y), whole / 5, atol=1)


def test_digits_for_colour_networks_are_resized_and_repeated(net, read):
    data = open_data("digits", net((3, 32, 32)))
    x, y = read(data, "test")
    small, labels = read(open_data("digits", net((1, 8, 8))), "test")
    np.testing.assert_array_equal(y, labels)
    assert y.dtype == np.int32
    np.testing.assert_array_equal(x[:, 0], x[:, 2])
    # Enlarging four times keeps an image's mean but for its border pixels' weight.
    np.testing.assert_allclose(x[:, 0].mean(axis=(1, 2)), small.mean(axis=(1, 2, 3)), atol=0.02)
    assert x.min() >= -1.0
    assert x.max() <= 1.0
    assert "8×8 to 32×32" in data.description


# cifar10


def test_cifar10_returns_the_pixels_and_labels_of_its_files(net, read, cifar):
    folder, images, labels = cifar
    before = digest(folder)
    data = open_data(f"cifar10:{folder}", net((3, 32, 32)))
    assert (len(data.train), len(data.test)) == (20, 7)
    assert data.classes[3] == "cat"
    order = np.random.default_rng(0).permutation(20)
    x, y = read(data, indices=order)
    np.testing.assert_allclose(x, scaled(images[order]), atol=1e-6)
    np.testing.assert_array_equal(y, labels[order])
    assert digest(folder) == before


def test_cifar10_is_found_in_the_folder_that_its_archive_makes(net, cifar, tmp_path):
    outer = tmp_path / "outer"
    outer.mkdir()
    cifar[0].rename(outer / "cifar-10-batches-bin")
    assert len(open_data(f"cifar10:{outer}", net((3, 32, 32))).train) == 20


def test_cifar10_records_are_mapped(net, cifar):
    from dptrain.data.sources.cifar10 import Records

    records = Records([cifar[0] / "test_batch.bin"])
    assert all(isinstance(m, np.memmap) for m in records.maps)


def test_cropping_cuts_out_the_centre_and_keeps_the_rest_within_reach(net, read, cifar):
    folder, images, _ = cifar
    data = open_data(f"cifar10:{folder}?fit=crop", net((3, 24, 24)))
    x, _ = read(data)
    np.testing.assert_allclose(x, scaled(images[..., 4:28, 4:28]), atol=1e-6)
    assert data.train.readable_shape == (3, 32, 32)
    x, _ = read(data, shape=(3, 32, 32))
    np.testing.assert_allclose(x, scaled(images), atol=1e-6)
    assert "central crop" in data.description


def test_lazy_samples_equal_cached_ones(net, read, cifar, monkeypatch):
    from dptrain.data import stored

    for spec, shape in ((f"cifar10:{cifar[0]}", (3, 40, 40)), ("digits", (3, 32, 32))):
        kept = open_data(spec, net(shape))
        assert isinstance(kept.train, stored.CachedSamples)
        monkeypatch.setattr(stored, "free_memory", lambda: 0)
        lazy = open_data(spec, net(shape))
        assert isinstance(lazy.train, stored.StoredSamples)
        for ours, theirs in zip(read(kept), read(lazy), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        monkeypatch.undo()


@pytest.mark.parametrize(("ranks_per_node", "spare", "cached"), [(1, 0, True), (1, -1, False),
                         (2, 0, False)])  # fmt: skip
def test_data_is_cached_up_to_a_quarter_of_the_available_memory_of_the_node(
    net, monkeypatch, ranks_per_node, spare, cached
):
    from dptrain.data import stored

    size = 1797 * 64  # 8-bit pixels.
    monkeypatch.setattr(stored, "free_memory", lambda: 4 * (size + spare))
    data = open_data("digits", net((1, 8, 8)), ranks_per_node=ranks_per_node)
    assert isinstance(data.train, stored.CachedSamples) == cached


# mnist


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_in_all_its_usual_names(net, read, mnist, mark, packed):
    folder, images, labels = mnist(mark, packed)
    before = digest(folder)
    data = open_data(f"mnist:{folder}", net((1, 28, 28)))
    x, y = read(data)
    np.testing.assert_allclose(x[:, 0], scaled(images), atol=1e-6)
    np.testing.assert_array_equal(y, labels)
    assert len(data.test) == 4
    assert digest(folder) == before


# npz and npy


def test_npz_with_a_split_of_its_own(net, read, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.random((6, 1, 5, 5)), "y_train": rng.integers(0, 3, 6),
        "x_test": rng.random((2, 1, 5, 5)), "y_test": rng.integers(0, 3, 2),
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **arrays)
    data = open_data(f"npz:{tmp_path / 'a.npz'}", net((1, 5, 5), 3))
    for split in ("train", "test"):
        x, y = read(data, split)
        np.testing.assert_array_equal(x, arrays[f"x_{split}"].astype(np.float32))
        np.testing.assert_array_equal(y, arrays[f"y_{split}"])


def test_npz_without_one_is_split_the_same_for_every_seed(net, read, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(50.0).reshape(25, 2), y=np.arange(25) % 5)
    spec = f"npz:{tmp_path / 'a.npz'}"
    first, other = (open_data(spec, net((2,), 5), seed=seed) for seed in (0, 1))
    assert (len(first.train), len(first.test)) == (20, 5)
    rows = [read(first, split)[0][:, 0] / 2 for split in ("train", "test")]
    assert sorted(np.concatenate(rows)) == list(range(25))
    np.testing.assert_array_equal(rows[1], read(other, "test")[0][:, 0] / 2)
    assert sorted(read(first, "test")[1]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(10, 4, 4), (10, 4, 4, 1), (10, 1, 4, 4)])
def test_images_in_arrays_may_have_any_usual_order_of_axes(net, read, tmp_path, shape):
    x = np.arange(160, dtype=np.float32) / 8
    np.savez(tmp_path / "a.npz", x=x.reshape(shape), y=np.arange(10))
    data = open_data(f"npz:{tmp_path / 'a.npz'}", net((1, 4, 4)))
    images, labels = read(data)
    np.testing.assert_array_equal(images, x.reshape(10, 1, 4, 4)[labels])


def test_npy_is_mapped_and_reads_only_rows(net, read, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(20) % 4)
    before = digest(tmp_path)
    data = open_data(f"npy:{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}", net((3, 8, 8), 4))
    assert isinstance(data.train.inputs, np.memmap)
    assert (len(data.train), len(data.test)) == (16, 4)
    images, labels = read(data)
    rows = data.train.rows
    np.testing.assert_allclose(images, scaled(x[rows].transpose(0, 3, 1, 2)), atol=1e-6)
    np.testing.assert_array_equal(labels, rows % 4)
    assert digest(tmp_path) == before


@pytest.mark.parametrize(
    ("targets", "outputs", "y"),
    [
        ("classes", 3, np.arange(10) % 3),
        ("classes", 3, np.arange(10)[:, None] % 3),
        ("classes", 3, np.eye(3)[np.arange(10) % 3]),
        ("classes", 2, np.arange(10) % 2 == 1),
        ("binary", 1, np.arange(10) % 2),
        ("binary", 1, (np.arange(10) % 2).astype(bool)),
        ("binary", 2, np.stack([np.arange(10) % 2, np.arange(10) > 4], 1)),
        ("values", 1, np.arange(10) * 0.5),
        ("values", 2, np.arange(20).reshape(10, 2)),
    ],
)
def test_targets_have_the_type_of_the_loss(net, read, tmp_path, targets, outputs, y):
    x = np.arange(10.0)[:, None]
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = open_data(f"npz:{tmp_path / 'a.npz'}", net((1,), outputs, targets))
    found = read(data)[1]
    if targets == "classes":
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, np.arange(10) % outputs)
        assert data.classes == tuple(str(i) for i in range(outputs))
    else:
        assert found.dtype == np.float32
        assert data.target_shape == (outputs,)
        np.testing.assert_allclose(found, np.reshape(y, (10, outputs)), atol=1e-6)
    if targets == "values":
        known = data.train.known_targets()
        np.testing.assert_allclose(known.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(known.std(axis=0), 1, atol=1e-6)


# folder


@pytest.mark.parametrize("channels", [1, 3])
def test_folders_are_classes(net, read, images, channels):
    before = digest(images)
    data = open_data(f"folder:{images}", net((channels, 10, 10), 2))
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (8, 2)
    for split in ("train", "test"):
        x, y = read(data, split)
        for i, path in enumerate(getattr(data, split).paths):
            assert data.classes[y[i]] == path.parent.name
            with Image.open(path) as file:
                image = file.convert("L" if channels == 1 else "RGB")
            theirs = np.atleast_3d(np.asarray(image.resize((10, 10), Image.Resampling.BILINEAR)))
            # Pillow rounds to a whole number after each of its two passes: 1 / 127.5 at the most.
            np.testing.assert_allclose(x[i], scaled(theirs.transpose(2, 0, 1)), atol=0.0081)
    assert digest(images) == before


def test_train_and_test_folders_are_the_split(net, images, tmp_path):
    root = tmp_path / "root"
    for split in ("train", "test"):
        for name, label in (("cat", "cat"), ("dog", "dog")):
            (root / split / name).mkdir(parents=True)
            for path in list((images / label).glob("*.png"))[: 1 if split == "test" else None]:
                (root / split / name / path.name).write_bytes(path.read_bytes())
    data = open_data(f"folder:{root}", net((3, 8, 8), 2))
    assert (len(data.train), len(data.test)) == (6, 2)


def test_photographs_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert decode_file(tmp_path / "a.jpg", grey=False).pixels.shape == (1, 3, 6, 4)


# csv


def table(path: Path, rows: int = 20) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = np.column_stack([rng.normal(5, 3, (rows, 2)), np.arange(rows)])
    lines = [f"12:00:{i:02},{a!r},{b!r},{c!r}" for i, (a, b, c) in enumerate(values.tolist())]
    path.write_text("\n".join(["time,a,b,sun", *lines, ""]))
    return values


def test_csv_predicts_ahead_from_standardised_columns(net, read, tmp_path):
    values = table(tmp_path / "t.csv")
    spec = f"csv:{tmp_path / 't.csv'}?target=sun&horizon=3"
    data = open_data(spec, net((2,), 1, "values"))
    x, y = read(data)
    # Rows 0 … 15 are for training; the last that can be predicted from them is row 15.
    np.testing.assert_allclose(y[:, 0], np.arange(3, 16), rtol=1e-6)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-6)
    later, ahead = read(data, "test")
    np.testing.assert_allclose(ahead[:, 0], [19], rtol=1e-6)
    seen = values[:13, :2]
    expected = (values[16, :2] - seen.mean(axis=0)) / seen.std(axis=0)
    np.testing.assert_allclose(later[0], expected, rtol=1e-5)


def test_csv_columns_can_be_chosen(net, read, tmp_path):
    table(tmp_path / "t.csv")
    spec = f"csv:{tmp_path / 't.csv'}?target=sun&horizon=1&columns="
    assert open_data(spec + "b", net((1,), 1, "values")).input_shape == (1,)
    everything = open_data(spec + "*", net((3,), 1, "values"))
    chosen = open_data(spec + "a,b,sun", net((3,), 1, "values"))
    np.testing.assert_array_equal(read(everything)[0], read(chosen)[0])


def test_csv_columns_that_never_change_are_harmless(net, read, tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n" + "7,1\n" * 20)
    data = open_data(f"csv:{tmp_path / 't.csv'}?target=b", net((1,), 1, "values"))
    np.testing.assert_array_equal(read(data)[0], 0)


# synthetic


@pytest.mark.parametrize("shape", [(7,), (2, 5, 3)])
@pytest.mark.parametrize(("targets", "outputs"), [("classes", 4), ("binary", 2), ("values", 3)])
def test_synthetic_fits_any_network(net, read, shape, targets, outputs):
    network = net(shape, outputs, targets)
    data = open_data("synthetic?samples=600", network, seed=1)
    assert (len(data.train), len(data.test)) == (600, 150)
    x, y = read(data)
    assert np.isfinite(x).all()
    again = read(open_data("synthetic?samples=600", network, seed=1))
    np.testing.assert_array_equal(x, again[0])
    np.testing.assert_array_equal(y, again[1])
    assert (read(open_data("synthetic", network, seed=2), indices=[0])[0] != x[:1]).all()
    if targets == "classes":
        assert set(y) == set(range(4))


def test_a_column_that_is_constant_in_training_is_only_centred(net, read, tmp_path):
    """The deviation of 17 times 0.1 is 1e-17, by which nothing should be divided."""
    lines = [f"{0.1 if i < 17 else 0.6},{i}" for i in range(21)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *lines]))
    data = open_data(f"csv:{tmp_path / 't.csv'}?target=y", net((1,), 1, "values"))
    np.testing.assert_allclose(read(data)[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(read(data, "test")[0], 0.5, rtol=1e-6)


def test_the_home_directory_and_spaces_between_columns(net, read, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.csv").write_text("a,b,y\n" + "1,2,3\n4,5,6\n" * 5)
    data = open_data("csv:~/t.csv?target=y&columns=b, a", net((2,), 1, "values"))
    assert read(data)[0].shape == (8, 2)
    np.save(tmp_path / "x.npy", np.ones((5, 2)))
    np.save(tmp_path / "y.npy", np.zeros(5))
    assert len(open_data("npy:~/x.npy,~/y.npy", net((2,))).train) == 4
