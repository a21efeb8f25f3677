"""Networks in TOML files: round trips, and one line for every mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.network import (
    LAYERS,
    LOSSES,
    AveragePool2d,
    Constant,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    He,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    Normal,
    ReLU,
    Sigmoid,
    SumPool2d,
    Uniform,
)
from dptrain.network.files import get_network, read_network, write_network
from dptrain.network.layers import Elementwise
from dptrain.network.zoo import NETWORKS
from tests.unit.examples import fewer

HEAD = 'input = [3, 8, 8]\n[[layer]]\ntype = "flatten"\n'


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_of_the_zoo_survives_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    write_network(get_network(name), path)
    assert read_network(path) == get_network(name)
    assert get_network(str(path)) == get_network(name)


deviations = st.floats(1e-6, 1e3)
weights = st.one_of(
    st.just(He()),
    st.builds(Normal, deviations),
    st.builds(Uniform, deviations),
    st.builds(Constant, deviations),
)
biases = st.builds(Constant, st.floats(-10, 10))
pairs = st.one_of(st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))
pools = st.sampled_from([MaxPool2d, AveragePool2d, SumPool2d]).flatmap(
    lambda cls: st.builds(cls, pairs, st.none() | pairs, st.just("same"))
)
maps = st.one_of(
    st.builds(
        Conv2d, st.integers(1, 5), pairs, st.just(1), st.sampled_from(["same", "full", 2]),
        weights, biases, st.floats(0, 1),
    ),
    pools,
    st.builds(Dropout, st.floats(0, 0.99)),
    st.builds(LocalResponseNorm, st.integers(0, 5), deviations, deviations, deviations),
    st.sampled_from([ReLU(), Sigmoid()]),
)  # fmt: skip
vectors = st.builds(Dense, st.integers(2, 9), weights, biases, st.floats(0, 1))


@fewer()
@given(
    st.lists(maps, max_size=4), st.lists(vectors, min_size=1, max_size=3),
    st.sampled_from(sorted(LOSSES)),
)  # fmt: skip
def test_any_network_survives_a_file(
    tmp_path_factory: pytest.TempPathFactory, front: list[object], back: list[object], loss: str
) -> None:
    layers = [*front, Flatten(), *back]
    written = Network((2, 5, 7), layers, LOSSES[loss](), "any")  # type: ignore[arg-type]
    path = tmp_path_factory.mktemp("files") / "any.toml"
    write_network(written, path)
    assert read_network(path) == written


def test_short_and_long_forms_are_equivalent(tmp_path: Path) -> None:
    long = tmp_path / "long.toml"
    long.write_text(
        'input = [4]\nloss = {type = "mean_squared_error"}\n[[layer]]\ntype = "dense"\nunits = 1\n'
        'weight_init = {type = "he"}\nbias_init = {type = "constant", value = 0}\n'
    )
    short = tmp_path / "long2.toml"
    short.write_text(
        'name = "long"\ninput = [4]\nloss = "mean_squared_error"\n[[layer]]\ntype = "dense"\n'
        'units = 1\nweight_init = "he"\n'
    )
    assert read_network(long) == read_network(short)


def test_a_new_class_of_layer_needs_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Scale(Elementwise):
        kind: ClassVar[str] = "scale"
        factor: float = 1.0
        mode: Literal["all", "some"] = "all"
        start: Constant = Constant(0.0)

    monkeypatch.setitem(LAYERS, "scale", Scale)
    # The class is local to this function, so its annotations resolve through this module.
    for name, value in {"Literal": Literal, "ClassVar": ClassVar, "Constant": Constant}.items():
        monkeypatch.setitem(globals(), name, value)
    written = Network((4,), [Scale(2.0, "some", Constant(1.0)), Dense(2)])
    write_network(written, tmp_path / "scale.toml")
    assert read_network(tmp_path / "scale.toml") == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input = [3", "not TOML: "),
        ("", "key 'input' is missing"),
        ("input = [3]", "key 'layer' is missing"),
        ("inputs = [3]", "unknown key 'inputs'; expected name, input, loss, loss_function, "
                         "function, layer; did you mean 'input'?"),
        ('input = "3"\nlayer = []', "input is '3'; expected whole numbers, [C, H, W] or [F]"),
        ("input = [3]\nlayer = 3", "layer is not a list of tables; write [[layer]]"),
        ("input = [3]\nlayer = []", "has no layers"),
        ("input = [3, 4]\n[[layer]]\ntype = 'relu'", "input shape (3, 4); expected (C, H, W)"),
        ("name = 3\n" + HEAD, "name is 3; expected text"),
        ("loss = 'softmax'\n" + HEAD, "loss: unknown type 'softmax'; expected softmax_cross_ent"),
        (HEAD + "[[layer]]", "layer 2 has no type; expected one of conv, pool"),
        (HEAD + "[[layer]]\ntype = 'dens'", "layer 2: unknown type 'dens'; expected conv, pool"),
        (HEAD + "[[layer]]\ntype = 'dens'", "; did you mean 'dense'?"),
        (HEAD + "[[layer]]\ntype = ['a']", "layer 2: unknown type ['a']"),
        (HEAD + "[[layer]]\ntype = 'dense'", "layer 2 (dense): key 'units' is missing"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunit = 3", "layer 2 (dense): unknown key 'unit'; "
         "expected units, weight_init, bias_init, weight_decay, name, inputs; did you mean 'unit"),
        (HEAD + "[[layer]]\ntype = 'relu'\nrate = 3", "expected name, inputs"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = 2.5", "layer 2 (dense): units is 2.5; "
         "expected a whole number"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = true", "units is True; expected a whole"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = 0", "layer 2 (dense): dense units is 0"),
        (HEAD + "[[layer]]\ntype = 'conv'\nfilters = 2\npadding = 'sme'",
         "layer 2 (conv): padding is 'sme'; expected a whole number or same, valid, full"
         "; did you mean 'same'?"),
        (HEAD + "[[layer]]\ntype = 'conv'\nfilters = 2\nkernel = [1, 2, 3]",
         "kernel is [1, 2, 3]; expected a whole number or [a whole number, a whole number]"),
        (HEAD + "[[layer]]\ntype = 'pool'\nstride = 'a'",
         "stride is 'a'; expected a whole number or [a whole number, a whole number]"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = 2\nweight_init = 'hee'",
         "layer 2 (dense): weight_init: unknown type 'hee'; expected he, normal, uniform, constant"
         "; did you mean 'he'?"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = 2\nweight_init = 'normal'",
         "weight_init (normal): key 'std' is missing"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = 2\nbias_init = 'he'",
         "bias_init: unknown type 'he'; expected constant"),
        (HEAD + "[[layer]]\ntype = 'dense'\nunits = 2\nbias_init = 1",
         "bias_init is 1; expected a type or a table with a type"),
        (HEAD + "[[layer]]\ntype = 'relu'\nname = 3", "layer 2: name is 3; expected text"),
        (HEAD + "[[layer]]\ntype = 'relu'\ninputs = 'flatten1'",
         "layer 2: inputs is 'flatten1'; expected a list of names of layers"),
        (HEAD + "[[layer]]\ntype = 'relu'\ninputs = ['conv9']",
         "node relu1: input 'conv9' does not exist"),
        (HEAD + '[[layer]]\ntype = "relu"\nname = "a\\u001b[31m"',
         "a layer has the name 'a\\x1b[31m'; expected a letter"),
        ('name = "a\\u0007"\n' + HEAD, "printable characters"),
        (HEAD + "[[layer]]\ntype = 'conv'\nfilters = 2",
         "layer 2 (conv1): conv needs an input of shape (C, H, W), got (192,)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_position_and_value(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mistake.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_network(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.toml: no such file"):
        get_network(str(tmp_path / "absent.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UserError, match=r"folder\.toml: Is a directory"):
        read_network(tmp_path / "folder.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.toml: the file is not text"):
        read_network(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ('type = "add"\ninputs = ["a.b", "absent"]', "node add1: input 'absent' does not exist"),
        ('type = "add"\ninputs = ["a.b"]', "node add1 has 1 input; add expects 2"),
        ('type = "add"\nnum_inputs = 3\ninputs = ["a.b", "input"]', "has 2 inputs; add expects 3"),
        (
            'type = "add"\ninputs = ["a.b", "input"]',
            "layer 2 (add1): add: the inputs have",
        ),
        ('type = "add"\ninputs = "a.b"', "layer 2: inputs is 'a.b'; expected a list of names"),
        ('type = "relu"\ninputs = ["a.b", "a.b"]', "node relu1 has 2 inputs; relu expects 1"),
        ('type = "relu"\nname = "a.b"', "2 layers have the name 'a.b'; names must differ"),
        ('type = "relu"\nname = "a..b"', "a layer has the name 'a..b'; expected a letter"),
    ],
)
def test_mistakes_in_the_inputs_of_a_graph(layer: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.toml"
    first = 'input = [3, 8, 8]\n[[layer]]\ntype = "conv"\nfilters = 4\nname = "a.b"\n'
    path.write_text(f"{first}[[layer]]\n{layer}\n")
    with pytest.raises(UserError) as caught:
        read_network(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
