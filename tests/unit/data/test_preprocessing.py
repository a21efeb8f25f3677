"""Preprocessing that is saved with a model: conversion, JSON, and data that does not match."""

import json

import numpy as np
import pytest
from PIL import Image

from dptrain.data import Preprocessing, open_data
from dptrain.errors import UserError


def table(path, header, rows):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


@pytest.fixture
def field(tmp_path):
    rows = np.random.default_rng(0).normal(5.0, 3.0, (15, 3)).round(3)
    return f"csv:{table(tmp_path / 'field.csv', 'a,b,roof', rows)}?target=roof&horizon=2"


@pytest.mark.parametrize("kind", ["digits", "irradiance", "csv", "folder", "cifar10", "synthetic"])
def test_from_dict_restores_what_to_dict_returned_through_json(net, kind, field, images, cifar):
    spec, network = {
        "digits": ("digits", net((3, 16, 16))),
        "irradiance": ("irradiance?samples=9", net((50,), 1, "values")),
        "csv": (field, net((2,), 1, "values")),
        "folder": (f"folder:{images}", net((1, 8, 8), 2)),
        "cifar10": (f"cifar10:{cifar[0]}?fit=crop", net((3, 24, 24))),
        "synthetic": ("synthetic?samples=9", net((5,), 3)),
    }[kind]
    saved = open_data(spec, network).preprocessing
    restored = Preprocessing.from_dict(json.loads(json.dumps(saved.to_dict())))
    assert restored == saved
    assert restored.digest() == saved.digest()
    assert restored.source == spec.partition("?")[0]
    assert "\n" not in str(saved)


def test_one_line_for_people(net, field):
    assert str(open_data("digits", net((3, 16, 16))).preprocessing) == (
        "samples 1×8×8 of uint8; 0 to 16 become -1 to 1; resized to 3×16×16; 10 classes: 0, 1, 2, …"
    )
    assert str(open_data(field, net((2,), 1, "values")).preprocessing) == (
        "2 columns, standardised: a, b; target roof, 2 rows ahead"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "sound"}, ["kind", "sound", "image or vector or table"]),
        ({"fit": None}, ["fit"]),
        ({"input_shape": [1, 8]}, ["input_shape"]),
        ({"input_shape": [1, 8, True]}, ["input_shape"]),
        ({"stored_shape": "1"}, ["stored_shape"]),
        ({"scale": float("nan")}, ["scale"]),
        ({"white": 0}, ["white"]),
        ({"horizon": -1}, ["horizon"]),
        ({"classes": [1]}, ["classes"]),
        ({"columns": ["a"]}, ["1 columns", "0 means"]),
        ({"deviation": [0.0]}, ["deviation"]),
        ({"more": 1}, ["more", "expected kind"]),
    ],
)
def test_damaged_values_are_refused(net, change, words):
    values = open_data("digits", net((1, 8, 8))).preprocessing.to_dict()
    with pytest.raises(UserError) as error:
        Preprocessing.from_dict({**values, **change}, "manifest.json")
    for word in ["manifest.json", *words]:
        assert word in str(error.value)
    with pytest.raises(UserError, match="has the keys None"):
        Preprocessing.from_dict(None)


# apply


def test_apply_converts_images_as_training_does(net, read, cifar):
    folder, stored, _ = cifar
    for tail, shape in (("", (3, 32, 32)), ("", (1, 20, 24)), ("?fit=crop", (3, 24, 24))):
        data = open_data(f"cifar10:{folder}{tail}", net(shape))
        expected, _ = read(data)
        apply = data.preprocessing.apply
        np.testing.assert_array_equal(apply(stored), expected)
        np.testing.assert_allclose(apply(stored.transpose(0, 2, 3, 1)), expected, atol=1e-6)
        np.testing.assert_array_equal(apply(stored[0]), expected[:1])
        files = [Image.fromarray(image.transpose(1, 2, 0)) for image in stored[:3]]
        np.testing.assert_allclose(apply(files), expected[:3], atol=1e-6)


def test_apply_takes_images_of_different_sizes_and_without_channels(net):
    apply = open_data("digits", net((3, 16, 16))).preprocessing.apply
    whole = np.full((8, 8), 16, np.uint8)
    for raw in (whole, whole[None], whole[None, None], [whole], [whole, np.full((9, 7), 16, "u1")]):
        x = apply(raw)
        assert x.shape[1:] == (3, 16, 16)
        np.testing.assert_allclose(x, 1.0, atol=1e-6)


def test_apply_takes_rows_and_named_columns(net, read, field):
    data = open_data(field, net((2,), 1, "values"))
    rows = np.loadtxt(field[4:].partition("?")[0], delimiter=",", skiprows=1)
    expected, _ = read(data)
    apply = data.preprocessing.apply
    np.testing.assert_array_equal(apply(rows[:, :2])[: len(expected)], expected)
    columns = {"b": rows[:, 1], "other": rows[:, 2], "a": rows[:, 0].tolist()}
    np.testing.assert_array_equal(apply(columns)[: len(expected)], expected)
    np.testing.assert_array_equal(apply(rows[0, :2].tolist()), expected[:1])
    with pytest.raises(UserError, match="has no column 'b'; did you mean 'bb'"):
        apply({"a": [1.0], "bb": [2.0]})
    with pytest.raises(UserError, match=r"\(3,\).*2 columns: a, b"):
        apply(rows)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (np.zeros((2, 8, 8, 3), np.uint8), "has colours.*grey images of digits"),
        (
            np.full((2, 8, 8), 17, np.uint8),
            "sample 0 has a converted pixel of magnitude 1.125; .*0 to 16",
        ),
        (np.full((2, 8, 8), np.nan), "sample 0 has values that are not finite"),
        (np.zeros((2, 5)), "shape .5,."),
        ([], "at least one"),
        (["a"], "expected numbers"),
    ],
)
def test_apply_refuses_what_does_not_match(net, raw, words):
    with pytest.raises(UserError, match=words):
        open_data("digits", net((1, 8, 8))).preprocessing.apply(raw)


# Evaluation data.


def test_classes_are_matched_by_name(net, read, images, tmp_path):
    network = net((3, 8, 8), 2)
    saved = open_data(f"folder:{images}", network).preprocessing
    # The same images under names whose alphabetical order is the other one.
    swapped = Preprocessing.from_dict({**saved.to_dict(), "classes": ["dog", "cat"]})
    for model in (saved, swapped):
        data = open_data(f"folder:{images}", network, preprocessing=model, split=False)
        _, y = read(data, "test")
        assert len(data.test) == 10
        for path, label in zip(data.test.paths, y, strict=True):
            assert path.parent.name == model.classes[label]


def test_missing_and_unknown_classes_are_listed(net, images):
    network = net((3, 8, 8), 2)
    saved = open_data(f"folder:{images}", network).preprocessing
    (images / "dog").rename(images / "wolf")
    words = "classes cat, wolf; .* cat, dog; missing: dog; unknown: wolf"
    with pytest.raises(UserError, match=words):
        open_data(f"folder:{images}", network, preprocessing=saved)


def test_other_tables_are_standardised_as_the_model_was(net, read, field, tmp_path):
    network = net((2,), 1, "values")
    model = open_data(field, network).preprocessing
    rows = np.random.default_rng(1).normal(50.0, 1.0, (7, 3)).round(3)
    other = table(tmp_path / "other.csv", "roof,b,a", rows[:, [2, 1, 0]])
    data = open_data(f"csv:{other}", network, preprocessing=model, split=False)
    x, y = read(data, "test")
    np.testing.assert_array_equal(x, model.apply(rows[:5, :2]))
    np.testing.assert_allclose(y[:, 0], rows[2:, 2], rtol=1e-6)
    for tail, words in (("target=a", "trained to predict 'roof'"), ("horizon=3", "trained with 2")):
        with pytest.raises(UserError, match=words):
            open_data(f"csv:{other}?{tail}", network, preprocessing=model)
    lacks = table(tmp_path / "lacks.csv", "roof,a", rows[:, :2])
    with pytest.raises(UserError, match="has no column 'b'"):
        open_data(f"csv:{lacks}", network, preprocessing=model, split=False)


@pytest.mark.parametrize(
    ("trained_on", "spec", "words"),
    [
        ("digits", "npz", "has colours"),
        ("digits", "csv", "named columns.*digits"),
        ("digits", "cifar10?fit=crop", "trained with fit=resize"),
        ("synthetic", "cifar10", "8-bit pixels.*float32 numbers of synthetic"),
        ("synthetic", "folder", "contains images"),
    ],
)
def test_data_of_another_kind_is_refused(
    net, trained_on, spec, words, tmp_path, cifar, images, field
):
    network = net((3, 8, 8))
    saved = open_data(trained_on, network).preprocessing
    x = np.zeros((9, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(9))
    paths = {"npz": tmp_path / "a.npz", "csv": field[4:], "cifar10": cifar[0], "folder": images}
    name, _, tail = spec.partition("?")
    with pytest.raises(UserError, match=words):
        open_data(f"{name}:{paths[name]}{'?' if tail else ''}{tail}", network, preprocessing=saved)


def test_data_without_a_split_is_used_as_a_whole(net, read, tmp_path):
    network = net((2,), 5)
    np.savez(tmp_path / "a.npz", x=np.arange(50.0).reshape(25, 2), y=np.arange(25) % 5)
    spec = f"npz:{tmp_path / 'a.npz'}"
    saved = open_data(spec, network).preprocessing
    whole = open_data(spec, network, preprocessing=saved, split=False)
    assert not whole.has_split
    np.testing.assert_array_equal(read(whole, "test")[1], np.arange(25) % 5)
    digits = open_data("digits", net((1, 8, 8)), split=False)
    assert digits.has_split
    assert len(digits.test) == 360


# Classes and outputs.


def test_a_network_needs_one_output_for_each_named_class(net, images):
    with pytest.raises(UserError, match=r"has 2 classes \(cat, dog\).*small has 10 outputs"):
        open_data(f"folder:{images}", net((3, 8, 8)))
    assert open_data("digits", net((1, 8, 8), 12)).classes == tuple(map(str, range(12)))
