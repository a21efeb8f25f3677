"""A label is matched with a class by name or by value, never by position."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dptrain.data import Dataset, Preprocessing, absolute
from dptrain.data.inputs import _target_texts as target_texts
from dptrain.data.inputs import open_inputs
from dptrain.data.preprocessing.classes import Classes, Labels, labels_in, names_from
from dptrain.data.preprocessing.names import same_form
from dptrain.data.sources.objects import dataset_from
from dptrain.data.spec import escape, example_of_option, parse_names
from dptrain.errors import UserError
from dptrain.network import Dense, Flatten, Network, SigmoidBinaryCrossEntropy, get_network

TEXTS = st.text(st.characters(whitelist_categories=["L", "Nd", "Pd", "Zs"]), min_size=1).map(
    lambda text: f"class {text}"
)
FORMS = ("labels", "column", "float", "narrow", "one-hot")


@st.composite
def integer_names(draw: st.DrawFn) -> tuple[str, ...]:
    """Names that are different integers, in any order, perhaps with zeros before them."""
    largest = draw(st.sampled_from([3, 12, 30, 120]))
    values = draw(
        st.lists(st.integers(0, largest), min_size=2, max_size=largest + 1, unique=True)
        | st.permutations(range(largest))
    )
    width = draw(st.sampled_from([0, 0, 2, 3]))
    return tuple(f"{value:0{width}}" for value in values)


def trained(names: tuple[str, ...]) -> tuple[Network, Preprocessing]:
    """Return a network with these classes, in this order, and its preprocessing."""
    network = Network((2,), [Dense(len(names))], name="trained")
    preprocessing = Preprocessing("vector", (2,), (2,), "float32", classes=names)
    return network, preprocessing


def in_form(labels: np.ndarray, form: str, count: int) -> np.ndarray:
    if form == "one-hot":
        return np.eye(count, dtype=np.int8)[labels]
    if form == "column":
        return labels[:, None]
    return labels.astype({"float": np.float64, "narrow": np.int16}.get(form, np.int64))


def evaluated(network: Network, preprocessing: Preprocessing, y: Any, **more: Any) -> np.ndarray:
    """Return the classes that an evaluation compares with."""
    data = (np.zeros((len(y), 2), np.float32), y)
    dataset = dataset_from(data, network, preprocessing=preprocessing, split=False, **more)
    return targets(dataset)


def targets(dataset: Dataset) -> np.ndarray:
    known = dataset.test.known_targets()
    assert known is not None
    return known


def predicted(preprocessing: Preprocessing, y: np.ndarray, names: Any = None) -> Any:
    """Return the column target of `dptrain predict`."""
    return [text for (text,) in target_texts(y, preprocessing, names, "new.npz")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes")


@given(names=integer_names(), form=st.sampled_from(FORMS), data=st.data())
def test_integers_are_matched_by_value(names, form, data) -> None:
    values = [int(name) for name in names]
    labels = np.array(data.draw(st.lists(st.sampled_from(values), min_size=2, max_size=9)))
    network, preprocessing = trained(names)
    is_complete = set(values) == set(range(len(values)))
    y = in_form(labels, form, max(values) + 1)
    if form == "one-hot" and not is_complete:
        if y.shape[1] == 1:
            return
        with pytest.raises(UserError, match="columns"):
            evaluated(network, preprocessing, y)
        return
    found = evaluated(network, preprocessing, y)
    assert [int(names[index]) for index in found] == labels.tolist()
    assert predicted(preprocessing, y) == [names[index] for index in found]


@given(
    names=st.lists(TEXTS | st.sampled_from(["0", "1", "2"]), min_size=2, max_size=6, unique=True),
    form=st.sampled_from(FORMS),
    data=st.data(),
)
@example(names=["cat", "dog"], form="labels", data=None)
@example(names=["1", "01"], form="float", data=None)
def test_integers_are_never_matched_by_position(names, form, data) -> None:
    values = {int(name) for name in names if name.isdigit()}
    if len(values) == len(names):
        return
    labels = np.array([0, 1, 0])
    if data is not None:
        labels = np.array(
            data.draw(st.lists(st.integers(0, len(names) - 1), min_size=2, max_size=9))
        )
    network, preprocessing = trained(tuple(names))
    y = in_form(labels, form, len(names))
    with pytest.raises(UserError, match=r"classes=\['"):
        evaluated(network, preprocessing, y)
    with pytest.raises(UserError, match="--classes "):
        predicted(preprocessing, y)


@given(
    names=st.lists(
        TEXTS.map(str.strip).filter(str.isprintable), min_size=2, max_size=6, unique=True
    ),
    values=st.lists(st.integers(-4, 9), min_size=1, max_size=6, unique=True),
    form=st.sampled_from(["labels", "column", "float"]),
)
@example(names=["no", "yes"], values=[-1, 1], form="labels")
@example(names=["2:no", "1:yes"], values=[0, 1], form="labels")
def test_names_that_an_error_proposes_can_be_stated(names, values, form) -> None:
    """What an error about labels without names shows names each label once."""
    labels = np.array(sorted(values[: len(names)]) * 2)
    network, preprocessing = trained(tuple(names))
    y = in_form(labels, form, 0)
    with pytest.raises(UserError) as error:
        evaluated(network, preprocessing, y)
    stated = ast.literal_eval(str(error.value).rpartition("classes=")[2])
    found = [names[index] for index in evaluated(network, preprocessing, y, classes=stated)]
    with pytest.raises(UserError) as error:
        predicted(preprocessing, y)
    option = parse_names(str(error.value).rpartition("--classes ")[2], "--classes")
    assert predicted(preprocessing, y, option) == found
    assert len(set(found)) == len(set(values[: len(names)]))


@given(
    names=st.lists(TEXTS, min_size=2, max_size=7, unique=True),
    as_mapping=st.booleans(),
    data=st.data(),
)
def test_names_that_the_user_states_are_matched_by_name(names, as_mapping, data) -> None:
    order = data.draw(st.permutations(names))
    first = data.draw(st.integers(0, 3)) if as_mapping else 0
    stated = {first + i: name for i, name in enumerate(order)}
    labels = np.array(data.draw(st.lists(st.sampled_from(sorted(stated)), min_size=2, max_size=9)))
    network, preprocessing = trained(tuple(names))
    classes = stated if as_mapping else list(order)
    found = evaluated(network, preprocessing, labels, classes=classes)
    assert [names[index] for index in found] == [stated[label] for label in labels.tolist()]
    texts = predicted(preprocessing, labels, names_from(classes, "classes"))
    assert texts == [stated[label] for label in labels.tolist()]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat,dog", {0: "cat", 1: "dog"}),
        ("cat, dog", {0: "cat", 1: "dog"}),
        ("1:cat,2:dog", {1: "cat", 2: "dog"}),
        ("a:b,c", {0: "a:b", 1: "c"}),
        ("R%26D,50%,a%2cb", {0: "R&D", 1: "50%", 2: "a,b"}),
    ],
)
def test_names_in_an_option(text: str, names: dict[int, str]) -> None:
    assert parse_names(text, "classes") == names


def test_names_in_a_file_and_in_an_array(folder: Path) -> None:
    (folder / "names.txt").write_text("dog\ncat\n", encoding="utf-8")
    assert parse_names(str(folder / "names.txt"), "classes") == {0: "dog", 1: "cat"}
    arrays = {"x": np.zeros((4, 2), np.float32), "y": np.array([0, 1, 1, 0])}
    np.savez(folder / "named.npz", **arrays, classes=np.array(["dog", "cat"]))
    network, preprocessing = trained(("cat", "dog"))
    for spec in ("named.npz", f"named.npz?classes={folder / 'names.txt'}"):
        data = dataset_from(
            f"npz:{folder / spec}", network, preprocessing=preprocessing, split=False
        )
        assert targets(data).tolist() == [1, 0, 0, 1]
    texts = open_inputs(folder / "named.npz", preprocessing).targets
    assert texts == [("dog",), ("cat",), ("cat",), ("dog",)]
    # Other contents of an array of this name say nothing.
    for other in (np.array([0, 1]), np.array(["dog", 3], object)):
        np.savez(folder / "other.npz", **arrays, classes=other)
        with pytest.raises(UserError, match="that of label 0 first"):
            dataset_from(f"npz:{folder / 'other.npz'}", network, preprocessing=preprocessing)
        data = dataset_from(f"npz:{folder / 'other.npz'}", network)
        assert data.notes[0] == "arrays are left out: classes"


def test_classes_that_no_training_sample_has_are_named() -> None:
    x, y = np.zeros((20, 2), np.float32), np.arange(20) % 3
    network = Network((2,), [Dense(4)], name="four")
    test_labels = np.array([0, 1, 3, 3])
    data = dataset_from((x, y, x[:4], test_labels), network, classes=["a", "b", "c", "d"])
    assert data.notes == (
        "the test split has classes that no training sample has: d",
        "the test split has no samples of these classes: c",
    )
    assert dataset_from((x, y, x[:4], y[:4]), network).notes == ()


@given(
    parts=st.tuples(*[st.lists(st.integers(0, 4), min_size=3, max_size=8)] * 3),
    has_names=st.booleans(),
)
def test_a_note_names_exactly_the_classes_that_no_training_sample_has(parts, has_names) -> None:
    names = ["ant", "bee", "cat", "dog", "eel"]
    network = Network((2,), [Dense(5)], name="five")
    data = {}
    for ending, labels in zip(("train", "val", "test"), parts, strict=True):
        data[f"x_{ending}"] = np.ones((len(labels), 2), np.float32)
        data[f"y_{ending}"] = np.array(labels)
    assume(len(set(parts[0] + parts[1] + parts[2])) > 1)
    found = dataset_from(data, network, classes=names if has_names else None)
    expected = {}
    for split, labels in (("test", parts[2]), ("validation", parts[1])):
        unseen = sorted(set(labels) - set(parts[0]))
        if unseen:
            expected[split] = ", ".join(names[k] if has_names else str(k) for k in unseen)
    notes = [note for note in found.notes if "no training sample has" in note]
    assert notes == [
        f"the {split} split has classes that no training sample has: {text}"
        for split, text in expected.items()
    ]


@given(
    names=st.lists(
        st.text("aé漢 0", min_size=1, max_size=4).filter(str.strip).map(same_form),
        min_size=2, max_size=4, unique=True,
    ),
    form=st.sampled_from(["text", "bytes", "latin-1", "numbers", "objects", "two axes"]),
)  # fmt: skip
def test_an_array_called_classes_names_the_labels_or_is_mentioned(
    folder: Path, names: list[str], form: str
) -> None:
    """Any contents are names, a note or an error; they never pass without a word."""
    given_ = {
        "text": np.array(names),
        "bytes": np.array([name.encode() for name in names]),
        "latin-1": np.array([b"\xe9" + name.encode() for name in names]),
        "numbers": np.arange(len(names)),
        "objects": np.array([*names[1:], 3], object),
        "two axes": np.array([names]),
    }[form]
    count = len(names)
    arrays = {"x": np.ones((4 * count, 2), np.float32), "y": np.arange(4 * count) % count}
    np.savez(folder / "any.npz", **arrays, classes=given_)
    network = Network((2,), [Dense(count)], name="any")
    for data in (f"npz:{folder / 'any.npz'}", {**arrays, "classes": given_}):
        if form == "latin-1":
            with pytest.raises(UserError, match=r"cannot be read .*UTF-8"):
                dataset_from(data, network)
            continue
        found = dataset_from(data, network)
        are_names = form in ("text", "bytes")
        assert found.classes == (tuple(names) if are_names else tuple(map(str, range(count))))
        assert found.notes == (() if are_names else ("arrays are left out: classes",))
        inputs = open_inputs(folder / "any.npz", found.preprocessing)
        assert inputs.notes == found.notes
        assert [text for (text,) in inputs.targets or ()] == [found.classes[k] for k in arrays["y"]]


def test_names_may_be_bytes(folder: Path) -> None:
    arrays = {"x": np.zeros((4, 2), np.float32), "y": np.array([0, 1, 1, 0])}
    np.savez(folder / "bytes.npz", **arrays, classes=np.array(["é".encode(), b"dog"]))
    network, preprocessing = trained(("dog", "é"))
    data = dataset_from(
        f"npz:{folder / 'bytes.npz'}", network, preprocessing=preprocessing, split=False
    )
    assert targets(data).tolist() == [1, 0, 0, 1]
    assert data.notes == ()
    np.savez(folder / "bytes.npz", **arrays, classes=np.array([b"\xff", b"dog"]))
    with pytest.raises(UserError, match=r"classes of .*bytes.npz cannot be read .*UTF-8"):
        dataset_from(f"npz:{folder / 'bytes.npz'}", network)


@given(name=st.lists(st.sampled_from([*"?,%&=: é", "%2c", "%3F", "a"]), min_size=1).map("".join))
def test_any_file_of_names_and_any_name_can_be_written(folder: Path, name: str) -> None:
    (folder / f"x{name}.txt").write_text(f"x{name}\ndog\n", encoding="utf-8")
    value = escape(f"x{name}.txt", ampersands=True)
    spec = absolute(f"npz:f.npz?classes={value}&fit=crop", folder)
    _, _, options = spec.partition("?")
    classes, fit = options.split("&")
    assert fit == "fit=crop"
    expected = {0: same_form(f"x{name}"), 1: "dog"}
    assert parse_names(classes.removeprefix("classes="), "classes") == expected
    stated = {0: name.strip(), 1: "dog"}
    if stated[0]:
        assert parse_names(example_of_option(stated), "classes") == stated


def test_a_mapping_of_arrays_names_its_classes_in_training() -> None:
    data = {"x": np.zeros((20, 2), np.float32), "y": np.arange(20) % 2, "classes": ["no", "yes"]}
    network = Network((2,), [Dense(1)], SigmoidBinaryCrossEntropy(), name="question")
    dataset = dataset_from(data, network)
    assert dataset.classes == ("no", "yes")
    assert dataset.class_list == Classes(("no", "yes"))
    assert dataset.notes == ()
    other = dataset_from({**data, "classes": np.array([3, 7])}, network)
    assert other.notes == ("arrays are left out: classes",)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("cat,dog", "in this order"),
        (["cat", 3], "in this order"),
        (["cat", "cat"], "'cat' 2 times"),
        (["cat", ""], "different name"),
        (3, "in this order"),
        ({"cat": 0}, "in this order"),
    ],
)
def test_names_that_are_none(stated: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        names_from(stated, "classes")


def test_labels_without_a_class_are_named() -> None:
    classes = Classes(("0", "1", "2"))
    with pytest.raises(UserError, match="data: label 3 is no class; expected 0 to 2"):
        classes.indices(Labels(np.array([1, 3])), "data")
    assert classes.names_of(Labels(np.array([1, 3])), "data") == ["1", ""]
    with pytest.raises(UserError, match="missing: 2"):
        classes.indices(Labels(np.array([0]), {0: "0", 1: "1"}), "data")
    with pytest.raises(UserError, match="unknown: 3"):
        classes.indices(Labels(np.array([0]), dict(enumerate("0123"))), "data")


def test_a_name_is_the_same_name_in_both_forms_of_unicode() -> None:
    classes = Classes(("caf\u00e9", "tea"))
    stated = {0: "tea", 1: "cafe\u0301"}
    assert classes.indices(Labels(np.array([1, 0]), stated), "data").tolist() == [0, 1]


def test_targets_of_one_sigmoid_output_are_matched_too() -> None:
    network = Network((2,), [Dense(1)], SigmoidBinaryCrossEntropy(), name="question")
    for names, labels, expected in ((("2", "1"), [1, 2], [1, 0]), (None, [1, 0], [1, 0])):
        preprocessing = Preprocessing("vector", (2,), (2,), "float32", classes=names)
        found = evaluated(network, preprocessing, np.array(labels))
        assert found.ravel().tolist() == expected
    preprocessing = Preprocessing("vector", (2,), (2,), "float32", classes=("cat", "dog"))
    with pytest.raises(UserError, match="cat, dog; state the name"):
        evaluated(network, preprocessing, np.array([0, 1]))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_labels_in_any_form_give_the_same_split(form: str) -> None:
    labels = np.random.default_rng(3).integers(0, 4, 60)
    x = np.arange(120, dtype=np.float32).reshape(60, 2)
    network = Network((2,), [Dense(4)], name="small")
    first = dataset_from((x, labels), network)
    other = dataset_from((x, in_form(labels, form, 4)), network)
    for one, two in zip(first.splits, other.splits, strict=True):
        np.testing.assert_array_equal(one.known_targets(), two.known_targets())
    assert labels_in(in_form(labels, form, 4), "data").values.tolist() == labels.tolist()


def idx(array: np.ndarray) -> bytes:
    """Return an IDX file of bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def sources(folder: Path, labels: np.ndarray) -> dict[str, tuple[str, Network]]:
    """Write labels in every form that has no names; return specifications and networks."""
    count, rows = len(labels), Network((2,), [Dense(3)], name="trained")
    x = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    np.savez(folder / "whole.npz", x=x, y=labels)
    np.savez(folder / "split.npz", x_train=x, y_train=labels, x_test=x, y_test=labels)
    np.savez(folder / "onehot.npz", x=x, y=np.eye(3)[labels])
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", labels[:, None])
    lines = (f"{a},{b},{label}" for (a, b), label in zip(x, labels, strict=True))
    (folder / "table.csv").write_text("\n".join(["a,b,kind", *lines]), encoding="utf-8")
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(np.zeros((count, 4, 4))))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
    images = Network((1, 4, 4), [Flatten(), Dense(3)], name="trained")
    return {
        "npz": (f"npz:{folder / 'whole.npz'}", rows),
        "split": (f"npz:{folder / 'split.npz'}", rows),
        "onehot": (f"npz:{folder / 'onehot.npz'}", rows),
        "npy": (f"npy:{folder / 'x.npy'},{folder / 'y.npy'}", rows),
        "csv": (f"csv:{folder / 'table.csv'}?target=kind", rows),
        "mnist": (f"mnist:{folder}", images),
    }


@pytest.mark.parametrize("kind", ["npz", "split", "onehot", "npy", "csv", "mnist"])
def test_every_source_of_labels_without_names(tmp_path: Path, kind: str) -> None:
    labels = np.array([2, 0, 1, 1, 0, 2, 2, 1, 0, 2])
    spec, network = sources(tmp_path, labels)[kind]
    saved = dataset_from(spec, network).preprocessing

    def classes_of(spec: str, names: tuple[str, ...]) -> list[str]:
        preprocessing = replace(saved, classes=names)
        data = dataset_from(spec, network, preprocessing=preprocessing, split=False)
        return [names[index] for index in targets(data)]

    assert classes_of(spec, ("2", "0", "1")) == [str(label) for label in labels]
    with pytest.raises(UserError) as error:
        classes_of(spec, ("cat", "dog", "eel"))
    stated = f"{spec}{'&' if '?' in spec else '?'}classes=cat,dog,eel"
    assert str(error.value).endswith(f"that of label 0 first: {stated}")
    named = stated.replace("cat,dog,eel", "eel,cat,dog")
    assert classes_of(named, ("cat", "dog", "eel")) == [("eel", "cat", "dog")[i] for i in labels]
    # In training, the names are those of the classes.
    assert dataset_from(named, network).classes == ("eel", "cat", "dog")


def test_targets_of_a_table_are_named_in_predictions(tmp_path: Path) -> None:
    spec, network = sources(tmp_path, np.array([2, 0, 1, 1, 0, 2, 2, 1, 0, 2]))["csv"]
    preprocessing = dataset_from(f"{spec}&classes=eel,cat,dog", network).preprocessing
    (tmp_path / "new.csv").write_text("a,b,kind\n1,2,2\n1,3,\n2,2,0.0\n", encoding="utf-8")
    with pytest.raises(UserError, match="--classes eel,cat,dog"):
        open_inputs(tmp_path / "new.csv", preprocessing)
    names = parse_names("eel,cat,dog", "--classes")
    assert open_inputs(tmp_path / "new.csv", preprocessing, names).targets == [
        ("dog",), ("",), ("eel",)
    ]  # fmt: skip


TEXT_FORMS = ("text", "objects", "bytes", "column", "pairs", "npz", "csv")


def text_data(folder: Path, labels: list[str], form: str) -> Any:
    """Return data with labels that are text, in one of several forms."""
    x, y = np.arange(2.0 * len(labels)).reshape(-1, 2), np.array(labels)
    if form == "csv":
        rows = [f"{a},{b},{name}\n" for (a, b), name in zip(x.tolist(), labels, strict=True)]
        (folder / "t.csv").write_text(f"a,b,kind\n{''.join(rows)}", encoding="utf-8")
        return f"csv:{folder / 't.csv'}?target=kind"
    if form == "npz":
        np.savez(folder / "t.npz", x=x, y=y)
        return f"npz:{folder / 't.npz'}"
    if form == "pairs":
        return list(zip(x, labels, strict=True))
    forms = {"objects": y.astype(object), "bytes": y.astype("S"), "column": y[:, None]}
    return x, forms.get(form, y)


@given(st.lists(st.sampled_from(["eel", "cat", "dog", "x 1"]), min_size=8, max_size=20),
       st.sampled_from(TEXT_FORMS))  # fmt: skip
def test_labels_that_are_text_are_classes_in_alphabetical_order(
    folder: Path, labels: list[str], form: str
) -> None:
    names = sorted(set(labels))
    assume(len(names) > 1)
    data, network = text_data(folder, labels, form), Network((2,), [Dense(len(names))])
    dataset = dataset_from(data, network, split=False)
    assert dataset.classes == tuple(names)
    assert [names[i] for i in targets(dataset)] == labels
    # Other data may lack classes, and lists them in another order.
    fewer = text_data(folder, [names[-1]] * 3, form)
    known = dataset.preprocessing
    other = dataset_from(fewer, network, preprocessing=known, split=False)
    assert targets(other).tolist() == [len(names) - 1] * 3
    if form in ("csv", "npz"):
        found = open_inputs(folder / f"t.{form}", known).targets
        assert found == [(names[-1],)] * 3
    with pytest.raises(UserError, match=f"label 'cow' is no class; expected {names[0]}"):
        dataset_from(text_data(folder, ["cow"] * 3, form), network, preprocessing=known)


def test_text_that_is_no_label_is_refused(tmp_path: Path) -> None:
    network, x = Network((2,), [Dense(2)]), np.zeros((4, 2))
    with pytest.raises(UserError, match=r"targets of type <U1 and shape \(4, 2\)"):
        dataset_from((x, np.array([["a", "b"]] * 4)), network)
    with pytest.raises(UserError, match="has classes, but network mlp-8 predicts values; use clas"):
        dataset_from((x, np.array(["a", "b"] * 2)), get_network("mlp-8"))
    spec = text_data(tmp_path, ["a", "b"] * 5, "csv")
    with pytest.raises(UserError, match=r"kind is 'a'; .*; to predict classes, use classif"):
        dataset_from(spec, get_network("mlp-8"))
    with pytest.raises(UserError, match="column kind is text and cannot be an input"):
        dataset_from(f"{spec}&columns=*&horizon=1", network)
    found = dataset_from(f"{spec}&classes=b,a", get_network("classifier-8"))
    assert found.classes == ("b", "a")


def test_rows_in_an_array_are_standardised_as_those_of_a_table(tmp_path: Path) -> None:
    spec, network = text_data(tmp_path, ["a", "b"] * 5, "csv"), Network((2,), [Dense(2)])
    table = dataset_from(spec, network, split=False)
    rows = np.arange(20.0).reshape(-1, 2), np.array(["a", "b"] * 5)
    found = dataset_from(rows, network, preprocessing=table.preprocessing, split=False)
    x, y = np.zeros((2, 10, 2), np.float32), np.zeros((2, 10), np.int32)
    for i, dataset in enumerate((table, found)):
        dataset.test.read(np.arange(10), x[i], y[i])
    np.testing.assert_array_equal(*x)
    np.testing.assert_array_equal(*y)


def test_a_data_set_that_was_opened_with_other_classes_is_refused() -> None:
    labels = np.array([0, 1, 2, 0, 1, 2])
    data = np.zeros((6, 2), np.float32), labels
    network, preprocessing = trained(("2", "0", "1"))
    opened = dataset_from(data, network)
    assert dataset_from(opened, network) is opened
    with pytest.raises(UserError, match="opened with the classes 0, 1, 2; those of the network"):
        dataset_from(opened, network, preprocessing=preprocessing)
    same = replace(preprocessing, classes=("0", "1", "2"))
    assert dataset_from(opened, network, preprocessing=same) is opened
