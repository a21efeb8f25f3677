"""Networks of the zoo follow the data; a network of the user's own comes with the exact edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from dptrain.data.sources.objects import dataset_from
from dptrain.errors import UserError
from dptrain.network import Network, get_network, read_network, write_network
from dptrain.network.adaptation import (
    adapt,
    describe_adaptation,
    edit_input,
    edit_outputs,
    output_layer,
    resize,
)
from dptrain.network.files import network_from_dict, network_to_dict
from dptrain.network.zoo import NETWORKS
from dptrain.toml import read_toml
from tests.unit.plan.networks import networks

NAMES = [name for name in NETWORKS if not name.startswith("mlp-")]
SMALL = ("model0", "model-small", "cifar", "resnet20", "mlp-8", "mlp-50-25", "solar")


@pytest.mark.parametrize("name", NAMES)
def test_every_network_of_the_zoo_is_a_function_of_input_and_outputs(name: str) -> None:
    published = get_network(name)
    sizes = published.input_shape[1:]
    other = adapt(published, (1, 7, 9), 3)
    assert (other.input_shape, other.num_outputs) == ((1, *sizes), 3)
    assert other.name == name
    assert describe_adaptation(published) == ""
    assert f"layer {output_layer(other)} with 3 outputs" in describe_adaptation(other)
    same = adapt(other, published.input_shape, published.num_outputs)
    assert same == published


@given(
    name=st.sampled_from(SMALL),
    values=st.integers(2, 40).map(range)
    | st.lists(st.integers(0, 3000), min_size=2, max_size=12, unique=True),
    shape=st.tuples(st.integers(1, 5), st.integers(3, 9), st.integers(3, 9)),
    columns=st.integers(1, 70),
    form=st.sampled_from(["labels", "one-hot", "float"]),
)
def test_a_named_network_fits_any_data(name, values, shape, columns, form) -> None:
    network, classes = get_network(name), len(values)
    count = classes + 3
    if network.loss.targets == "values":
        shape = (columns,) if len(network.input_shape) == 1 else shape
        y, outputs = np.ones((count, classes), np.float32), classes
    else:
        index, outputs = np.arange(count) % classes, classes
        labels = np.array(values)[index]
        y = {"one-hot": np.eye(classes)[index], "float": labels.astype(float)}.get(form, labels)
    x = np.zeros((count, *shape), np.float32)
    dataset = dataset_from((x, y), network)
    if dataset.targets == "classes":
        named = [dataset.classes[i] for i in dataset.train.known_targets()]
        rows = y.argmax(axis=1) if form == "one-hot" else y.astype(int)
        assert set(named) <= {str(row) for row in rows}
    own = network.input_shape
    expected = shape if len(own) == 1 else (dataset.preprocessing.stored_shape[0], *own[1:])
    assert (dataset.input_shape, dataset.num_outputs) == (expected, outputs)
    adapted = resize(network, dataset.input_shape, dataset.num_outputs)
    assert network_from_dict(network_to_dict(adapted)) == adapted
    assert get_network(name, input_shape=expected, outputs=outputs) == adapted


@given(network=networks(), outputs=st.integers(2, 30))
def test_the_edit_of_a_file_is_exact(tmp_path_factory, network: Network, outputs: int) -> None:
    path = tmp_path_factory.mktemp("edit") / "mine.toml"
    write_network(network, path)
    edit = edit_outputs(read_network(path), outputs)
    found = re.fullmatch(
        rf'set (units|filters) = {outputs} in layer "(.+)" of {re.escape(str(path))}', edit
    )
    if found is None:
        assert edit == f"end it in a dense layer with {outputs} units of {path}"
        return
    values = read_toml(path)
    names = [node.name for node in network.nodes]
    values["layer"][names.index(found[2])][found[1]] = outputs
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    assert read_network(path).num_outputs == outputs


@given(
    network=networks(),
    outputs=st.integers(2, 30),
    kind=st.sampled_from(["toml", "onnx", "weights", "run"]),
    stem=st.sampled_from(["run", "a/b", "new.toml", "old.onnx", "x.safetensors"]),
    suffix=st.sampled_from(["", ".toml", ".onnx", ".ONNX", ".safetensors"]),
)
def test_what_a_file_is_decides_about_the_advice_not_its_name(
    network: Network, outputs: int, kind: Any, stem: str, suffix: str
) -> None:
    file = stem + suffix
    read = network.read_from(file, kind)
    shape = tuple(size + 1 for size in network.input_shape)
    texts = edit_outputs(read, outputs), edit_input(read, shape)
    assert "--weights" not in texts[0]  # The output layer follows the data.
    assert ("train without --weights" in texts[1]) == (kind == "weights")
    for text in texts:
        assert text.endswith(f" of {file}") == (kind == "toml")
    assert ("restore the data of the run" in texts[0]) == (kind == "run")
    assert ("export it again" in texts[0]) == (kind == "onnx" and "end it in" not in texts[0])


def test_a_network_of_the_user_is_not_changed_but_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_network(get_network("model-small"), path)
    data = np.zeros((50, 3, 16, 16), np.uint8), np.eye(5, dtype=int)[np.arange(50) % 5]
    with pytest.raises(UserError) as error:
        dataset_from(data, read_network(path))
    assert f'set units = 5 in layer "dense2" of {path}' in str(error.value)
    rows = np.zeros((50, 7), np.float32), np.arange(50) % 5
    with pytest.raises(UserError, match=re.escape(f"set input = [7] of {path}")):
        dataset_from(rows, read_network(path))
    with pytest.raises(UserError, match="change the sizes in the file"):
        get_network(path, outputs=5)


def test_a_changed_copy_belongs_to_the_user() -> None:
    from dataclasses import replace

    network = get_network("model-small")
    changed = replace(network, layers=network.layers)
    assert changed == network
    assert adapt(network, (1, 8, 8), 3) != network
    assert adapt(changed, (1, 8, 8), 3) is changed


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.zeros(300, int), "all labels are 0; a network distinguishes at least two"),
        (np.arange(300), "300 different labels for 300 samples"),
        (np.arange(300) % 3 - 1, "labels from -1 to 1; expected whole numbers from 0 on"),
    ],
)
def test_labels_that_number_no_classes(y: np.ndarray, words: str) -> None:
    with pytest.raises(UserError, match=words):
        dataset_from((np.zeros((300, 8, 8), np.uint8), y), get_network("model-small"))
