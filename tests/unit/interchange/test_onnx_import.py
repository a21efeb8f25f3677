"""Networks that are read from ONNX files of other programs compute what the files compute.

Files of dptrain are in `test_onnx_export`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dptrain import Trainer, make_replica
from dptrain.cli.main import run
from dptrain.errors import UserError
from dptrain.interchange.onnx_import import read_onnx
from dptrain.network import (
    GELU,
    Affine,
    AveragePool2d,
    ChannelShuffle,
    ChannelSlice,
    Conv2d,
    Dense,
    Flatten,
    GlobalMaxPool2d,
    GroupNorm,
    Layer,
    LayerNorm,
    MaxPool2d,
    MeanSquaredError,
    Multiply,
    Network,
    Pad2d,
    ReLU,
    Resize2d,
    SigmoidBinaryCrossEntropy,
    SiLU,
    SoftmaxCrossEntropy,
    SumPool2d,
    get_network,
)
from dptrain.training.persistence.weights import load_weights
from dptrain.training.settings import GivenSettings
from tests.lazy import LazyModule
from tests.unit.interchange.models import load_module, model_of, plain

onnxruntime = LazyModule("onnxruntime")

Arrays = dict[str, NDArray[Any]]


# Files of other programs.


def file_of(
    folder: Path,
    nodes: list[onnx.NodeProto],
    constants: Arrays | None = None,
    shape: tuple[Any, ...] = ("N", 3, 8, 6),
    opset: int = 20,
    output: str = "y",
) -> Path:
    """Write an ONNX file whose input is x."""
    given = [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        given,
    )
    opsets = [helper.make_opsetid("", opset)]
    path = folder / "foreign.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def outputs(path: Path, x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what ONNX Runtime and the imported network predict."""
    found = read_onnx(path)
    replica = make_replica(found.network, "reference", len(x), training=False)
    load_weights(replica, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ends_in_loss = onnx.load(path).graph.node[-1].op_type in ("Softmax", "Sigmoid")
    mine = replica.predict(x) if ends_in_loss else replica.forward(x)
    return session.run(None, {session.get_inputs()[0].name: x})[0], mine


def check(path: Path, shape: tuple[int, ...] = (3, 8, 6)) -> Network:
    """Compare the outputs of a file with those of its network, and return the network."""
    x = np.random.default_rng(1).standard_normal((2, *shape)).astype(np.float32)
    expected, found = outputs(path, x)
    np.testing.assert_allclose(
        found, expected.reshape(found.shape), 1e-5, 1e-6 * np.abs(expected).max()
    )
    return read_onnx(path).network


def chain(*steps: tuple[str, list[str], dict[str, Any]]) -> list[onnx.NodeProto]:
    """Return nodes that read the one before, and constants; the last computes y."""
    nodes, tensor = [], "x"
    for number, (operator, constants, settings) in enumerate(steps, 1):
        output = "y" if number == len(steps) else f"t{number}"
        nodes.append(helper.make_node(operator, [tensor, *constants], [output], **settings))
        tensor = output
    return nodes


RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)
ENDING: list[tuple[str, list[str], dict[str, Any]]] = [("Flatten", [], {})]

OPERATORS: dict[str, tuple[list[tuple[str, list[str], dict[str, Any]]], Arrays, type[Layer]]] = {
    "same upper": (
        [("Conv", ["w"], {"auto_pad": "SAME_UPPER", "strides": [2, 2]})], {"w": WEIGHT}, Conv2d
    ),
    "valid": ([("Conv", ["w"], {"auto_pad": "VALID"})], {"w": WEIGHT}, Conv2d),
    "full": ([("Conv", ["w"], {"pads": [2, 2, 2, 2]})], {"w": WEIGHT}, Conv2d),
    "floor": (
        [("Conv", ["w"], {"pads": [1, 1, 1, 1], "strides": [2, 2]})], {"w": WEIGHT}, Conv2d
    ),
    "ceil_mode without effect": (
        [("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1})], {},
        MaxPool2d,
    ),
    "global maximum": ([("GlobalMaxPool", [], {})], {}, GlobalMaxPool2d),
    "maximum of pixels": (
        [("ReduceMax", ["axes"], {})], {"axes": np.array([3, 2])}, GlobalMaxPool2d
    ),
    "gelu": ([("Gelu", [], {})], {}, GELU),
    "mean": ([("ReduceMean", ["axes"], {"keepdims": 0})], {"axes": np.array([-2, -1])}, Flatten),
    "mean, squeezed": (
        [("ReduceMean", ["axes"], {}), ("Squeeze", ["axes"], {})], {"axes": np.array([2, 3])},
        Flatten,
    ),
    "reshape": ([("Reshape", ["to"], {})], {"to": np.array([0, -1])}, Flatten),
    "instance norm": (
        [("InstanceNormalization", ["s", "b"], {})],
        {"s": WEIGHT[0, :, 0, 0], "b": WEIGHT[1, :, 0, 0]}, GroupNorm,
    ),
    "layer norm without bias": (
        [
            ("Transpose", [], {"perm": [0, 2, 3, 1]}), ("LayerNormalization", ["s"], {}),
            ("Transpose", [], {"perm": [0, 3, 1, 2]}),
        ],
        {"s": WEIGHT[0, :, 0, 0]}, LayerNorm,
    ),
    "matrix product": (
        [("Flatten", [], {}), ("MatMul", ["m"], {})],
        {"m": RNG.standard_normal((144, 5)).astype(np.float32)}, Dense,
    ),
    "matrix product and sum": (
        [("Flatten", [], {}), ("MatMul", ["m"], {}), ("Add", ["b"], {})],
        {"m": RNG.standard_normal((144, 5)).astype(np.float32), "b": WEIGHT.ravel()[:5]}, Dense,
    ),
    "gemm, not transposed": (
        [("Flatten", [], {}), ("Gemm", ["m"], {})],
        {"m": RNG.standard_normal((144, 5)).astype(np.float32)}, Dense,
    ),
    "identity and dropout": (
        [("Identity", [], {}), ("Dropout", [], {}), ("Relu", [], {})], {}, ReLU
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_other_programs(name: str, tmp_path: Path) -> None:
    steps, constants, kind = OPERATORS[name]
    is_vector = kind in (Flatten, Dense)
    path = file_of(tmp_path, chain(*steps, *([] if is_vector else ENDING)), constants)
    network = check(path)
    assert isinstance(network.nodes[-1 if is_vector else -2].layer, kind)


def test_patterns_of_activations(tmp_path: Path) -> None:
    """GELU with a quotient, as PyTorch exports it, and SiLU with the sigmoid first."""
    nodes = [
        helper.make_node("Div", ["x", "root"], ["a"]), helper.make_node("Erf", ["a"], ["b"]),
        helper.make_node("Add", ["one", "b"], ["c"]), helper.make_node("Mul", ["x", "c"], ["d"]),
        helper.make_node("Mul", ["d", "half"], ["g"]), helper.make_node("Sigmoid", ["g"], ["h"]),
        helper.make_node("Mul", ["h", "g"], ["i"]), helper.make_node("Flatten", ["i"], ["y"]),
    ]  # fmt: skip
    constants = {"root": np.sqrt(2), "one": 1.0, "half": 0.5}
    path = file_of(tmp_path, nodes, {k: np.array(v, np.float32) for k, v in constants.items()})
    assert [type(n.layer) for n in check(path).nodes] == [GELU, SiLU, Flatten]


@pytest.mark.parametrize(
    ("operator", "units", "loss"),
    [
        ("Softmax", 5, SoftmaxCrossEntropy),
        ("Sigmoid", 5, SigmoidBinaryCrossEntropy),
        (None, 5, SoftmaxCrossEntropy),
        (None, 1, MeanSquaredError),
    ],
)
def test_the_end_determines_the_loss(
    operator: str | None, units: int, loss: type, tmp_path: Path
) -> None:
    steps = [("Gemm", ["m"], {}), *([(operator, [], {})] if operator else [])]
    constants = {"m": RNG.standard_normal((7, units)).astype(np.float32)}
    path = file_of(tmp_path, chain(*steps), constants, ("N", 7))
    assert type(check(path, (7,)).loss) is loss


@pytest.mark.filterwarnings("ignore")
def test_files_of_pytorch(tmp_path: Path) -> None:
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4),
        nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), nn.GELU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3),
    ).eval()  # fmt: skip
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        model, torch.zeros(1, 3, 13, 9), str(path), dynamo=False, dynamic_axes={"x": {0: "N"}},
        input_names=["x"],
    )  # fmt: skip
    network = check(path, (3, 13, 9))
    assert network.num_parameters == sum(p.numel() for p in model.parameters()) - 16


@pytest.mark.filterwarnings("ignore")
def test_dilated_convolutions_of_pytorch(tmp_path: Path) -> None:
    import torch
    from torch import nn

    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(4, 6, (3, 2), padding=1, dilation=(1, 3), groups=2),
        nn.Conv2d(6, 6, 3, stride=2, padding=3, dilation=3, groups=6, bias=False),
        nn.Conv2d(6, 4, 3, padding=(2, 1), dilation=(2, 1)), nn.Flatten(),
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        model, torch.zeros(1, 3, 13, 12), str(path), dynamo=False, dynamic_axes={"x": {0: "N"}},
        input_names=["x"],
    )  # fmt: skip
    network = check(path, (3, 13, 12))
    dilations = [each.dilations for each in network.layers if isinstance(each, Conv2d)]
    assert dilations == [(2, 2), (1, 3), (3, 3), (2, 1)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("is_own", [True, False])
def test_blocks_with_channels_last(opset: int, is_own: bool, tmp_path: Path) -> None:
    """Layer normalisations and dense layers on the last axis, as in ConvNeXt; opset 13 has no
    LayerNormalization. The last one is over all elements of a vector.
    """
    import torch
    from torch import nn

    class ChannelNorm(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            if is_own:
                mean = x.mean(1, keepdim=True)
                x = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + self.eps)
                return self.weight[:, None, None] * x + self.bias[:, None, None]
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            y = self.second(nn.functional.gelu(self.first(y)))
            return x + y.permute(0, 3, 1, 2)

    torch.manual_seed(1)
    layers = (
        nn.Conv2d(3, 4, 2, 2),
        ChannelNorm(4, eps=1e-6),
        Block(),
        nn.Flatten(),
        nn.LayerNorm(48),
    )
    model, path = nn.Sequential(*layers, nn.Linear(48, 3)).eval(), tmp_path / "model.onnx"
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    torch.onnx.export(
        model, torch.zeros(1, 3, 8, 6), str(path), dynamo=False, opset_version=opset,
        dynamic_axes={"x": {0: "N"}}, input_names=["x"],
    )  # fmt: skip
    network = check(path)
    kinds = [type(node.layer) for node in network.nodes]
    assert kinds.count(LayerNorm) == 3
    assert kinds.count(Dense) == 1
    assert network.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([("Conv", ["w"], {})], "has the channels on the last axis; expected axis 1"),
        (
            [("LayerNormalization", ["s"], {"axis": 1})],
            "axis is 1; expected the channels, or the",
        ),
        (
            [("Transpose", [], {"perm": [0, 1, 3, 2]})],
            "is no layer of dptrain in this place",
        ),
    ],
)
def test_operators_that_mix_other_axes_are_refused(
    steps: list[tuple[str, list[str], dict[str, Any]]], message: str, tmp_path: Path
) -> None:
    last = ("Transpose", [], {"perm": [0, 2, 3, 1]})
    back = ("Transpose", [], {"perm": [0, 3, 1, 2]})
    constants = {"w": WEIGHT, "s": WEIGHT[0, :, 0, 0]}
    path = file_of(tmp_path, chain(last, *steps, back, *ENDING), constants)
    with pytest.raises(UserError, match=message):
        read_onnx(path)


@pytest.mark.filterwarnings("ignore")
def test_padding_and_resizing_of_pytorch(tmp_path: Path) -> None:
    import torch
    from torch import nn

    model, path = nn.Sequential(
        nn.ReflectionPad2d((2, 1, 0, 3)), nn.ReplicationPad2d(1), nn.ZeroPad2d((0, 1, 2, 0)),
        nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=(1.5, 0.5), mode="bilinear"),
        nn.Upsample(size=(9, 11)), nn.UpsamplingBilinear2d((6, 5)), nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
    ), tmp_path / "model.onnx"  # fmt: skip
    torch.onnx.export(
        model, torch.zeros(1, 3, 8, 6), str(path), dynamo=False, dynamic_axes={"x": {0: "N"}},
        input_names=["x"],
    )  # fmt: skip
    network = check(path)
    modes = [layer.mode for layer in network.layers if isinstance(layer, Pad2d | Resize2d)]
    assert modes[:3] == ["reflect", "replicate", "zeros"]
    assert modes[3:] == ["nearest", "bilinear", "nearest", "bilinear"]
    assert isinstance(network.layers[-2], GlobalMaxPool2d)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
        {"kernel_size": (4, 3), "stride": (2, 3), "padding": (1, 0), "groups": 3},
        {"kernel_size": 3, "bias": False},
        {"kernel_size": 1, "stride": 3, "output_padding": (2, 0)},
        {"kernel_size": (3, 2), "stride": 2, "dilation": (2, 3), "padding": (1, 2), "groups": 3},
    ],
)
def test_transposed_convolutions_of_pytorch(settings: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from torch import nn

    torch.manual_seed(2)
    up, path = nn.ConvTranspose2d(3, 6, **settings), tmp_path / "model.onnx"
    model = nn.Sequential(OrderedDict(up=up, end=nn.Flatten()))
    torch.onnx.export(
        model, torch.zeros(1, 3, 8, 6), str(path), dynamo=False, dynamic_axes={"x": {0: "N"}},
        input_names=["x"],
    )  # fmt: skip
    network = check(path)
    assert network.num_parameters == sum(p.numel() for p in model.parameters())
    assert next(node.name for node in network.nodes if isinstance(node.layer, Conv2d)) == "up"


SIDES = {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "c": np.array([0, 1, 1, 1, 0, 0, 1, 1])}
SCALES = {"s": np.array([1, 1, 2, 2], np.float32), "t": np.array([1, 1, 1.5, 2], np.float32)}


@pytest.mark.parametrize(
    ("operator", "constants", "settings", "message"),
    [
        ("Pad", ["p"], {"mode": "wrap"}, "its mode is wrap; expected constant, reflect, edge"),
        ("Pad", ["p", "one"], {}, "(Pad): it pads with 1; expected 0"),
        ("Pad", ["c"], {}, "expected those of rows and columns alone"),
        ("Resize", ["", "s"], {"mode": "cubic"}, "its mode is cubic; expected nearest or"),
        ("Resize", ["", "s"], {"mode": "linear", "antialias": 1}, "its antialias is 1; expected 0"),
        ("Resize", ["", "t"], {}, "its positions are half_pixel with round_prefer_floor; expected"),
        (
            "Resize", ["", "s"],
            {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
            "is asymmetric; expected half_pixel or align_corners",
        ),
        ("Resize", [], {}, "it has neither scales nor sizes; expected one of them"),
    ],
)  # fmt: skip
def test_other_paddings_and_positions_are_refused(
    operator: str, constants: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arrays = {**SIDES, **SCALES, "one": np.float32(1)}
    path = file_of(tmp_path, chain((operator, constants, settings), *ENDING), arrays)
    with pytest.raises(UserError, match=re.escape(message)):
        read_onnx(path)


LAST, FIRST = {"perm": [0, 2, 3, 1]}, {"perm": [0, 3, 1, 2]}
NEAREST = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
SAME = {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}


@pytest.mark.parametrize(
    "steps",
    [
        [("Transpose", [], LAST), ("Pad", ["rows"], {}), ("Transpose", [], FIRST), *ENDING],
        [("Transpose", [], LAST), ("Resize", ["", "s"], NEAREST), ("Transpose", [], FIRST),
         *ENDING],
        [("Resize", ["", "near"], {}), *ENDING],
        [("Resize", ["", "same"], NEAREST), *ENDING],
        [("Resize", ["", "batch"], NEAREST), *ENDING],
        [("Resize", ["", "", "sizes"], NEAREST), *ENDING],
        [("Pad", ["around", "low"], {}), ("MaxPool", [], SAME), *ENDING],
        [("Flatten", [], {}), ("Slice", ["first", "third", "last"], {})],
    ],
    ids=lambda steps: "-".join(f"{name}{inputs}" for name, inputs, _ in steps[:2]),
)  # fmt: skip
def test_axes_and_positions_are_those_of_the_runtime_or_refused(
    steps: list[tuple[str, list[str], dict[str, Any]]], tmp_path: Path
) -> None:
    """Rows, columns and samples of an operator are never read as other ones."""
    arrays = {
        "rows": np.array([0, 0, 1, 0, 0, 0, 2, 0]), "around": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "low": np.float32(-np.inf),
        "s": np.array([1, 2, 3, 1], np.float32), "near": np.array([1, 1, 2.1, 2.1], np.float32),
        "same": np.array([1, 1, 1.01, 1.01], np.float32),
        "batch": np.array([2, 1, 1, 2], np.float32), "sizes": np.array([7, 3, 8, 8]),
        "first": np.array([1]), "third": np.array([3]), "last": np.array([-1]),
    }  # fmt: skip
    path = file_of(tmp_path, chain(*steps), arrays)
    if steps[0][0] == "Transpose":
        check(path)
        return
    with pytest.raises(UserError, match=r"foreign\.onnx: node '"):
        read_onnx(path)


@pytest.mark.parametrize("scales", [(2, 3), (1.5, 2), (1, 2.5), (0.5, 2)])
def test_resizing_of_opset_10_has_scales_alone(scales: tuple[float, float], tmp_path: Path) -> None:
    constants = {"s": np.array([1, 1, *scales], np.float32)}
    path = file_of(tmp_path, chain(("Resize", ["s"], {}), *ENDING), constants, opset=10)
    if min(scales) >= 1:
        check(path)
        return
    with pytest.raises(UserError, match=r"its scales are \[1.0, 1.0, 0.5, 2.0\], and its opset 10"):
        read_onnx(path)


def test_linear_resizing_of_opset_10_is_refused_by_its_positions(tmp_path: Path) -> None:
    nodes = chain(("Resize", ["s"], {"mode": "linear"}), *ENDING)
    with pytest.raises(UserError, match="is asymmetric; expected half_pixel or align_corners"):
        read_onnx(file_of(tmp_path, nodes, SCALES, opset=10))


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_whole_factors_have_one_nearest_pixel(scale: int, tmp_path: Path) -> None:
    """The nearest pixel by half pixels is that of PyTorch."""
    constants = {"s": np.array([1, 1, scale, 5], np.float32)}
    check(file_of(tmp_path, chain(("Resize", ["", "s"], {}), *ENDING), constants))


@given(st.sampled_from([-1, 0, 1, 2, 4, 8, 24]), st.sampled_from([-1, 1, 4, 8, 12, 24, 48]),
       st.sampled_from(["N", 2]))  # fmt: skip
def test_a_new_shape_is_accepted_only_if_samples_stay_apart(
    batch: int, features: int, samples: str | int
) -> None:
    """The oracle: NumPy gives the same vectors for two and for four samples."""

    def vectors(count: int) -> NDArray[Any] | None:
        x = np.arange(count * 24).reshape(count, 2, 3, 4)
        size = count if batch == 0 else batch
        try:
            found = x.reshape(size, features)
        except ValueError:
            return None
        return found if np.array_equal(found, x.reshape(count, 24)) else None

    counts = (2, 4) if samples == "N" else (2,)
    is_right = all(vectors(count) is not None for count in counts)
    with tempfile.TemporaryDirectory() as folder:
        constants = {"to": np.array([batch, features])}
        nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
        path = file_of(Path(folder), nodes, constants, (samples, 2, 3, 4))
        if is_right:
            assert read_onnx(path).network.output_shape == (24,)
        else:
            with pytest.raises(UserError, match="expected a vector per sample"):
                read_onnx(path)


@pytest.mark.filterwarnings("ignore")
def test_sums_of_windows_survive_the_older_exporter_of_pytorch(tmp_path: Path) -> None:
    import torch

    network = Network(
        (2, 6, 6), [SumPool2d(3, 2, padding=1), SumPool2d((2, 1)), Flatten(), Dense(3)]
    )
    model = model_of(network, plain(network), batch_size=2)
    source, _ = model.export(tmp_path / "model.py")
    module, path = load_module(source).load(), tmp_path / "again.onnx"
    x = np.random.default_rng(2).standard_normal((2, 2, 6, 6)).astype(np.float32)
    torch.onnx.export(module, torch.tensor(x), str(path), dynamo=False)
    found = read_onnx(path)
    replica = make_replica(found.network, "reference", 2, training=False)
    load_weights(replica, path)
    np.testing.assert_allclose(replica.forward(x), model.replica.forward(x), 1e-4, 1e-5)


def changed(change: Callable[[onnx.ModelProto], None], folder: Path) -> Path:
    """Write the file of a small network after a change."""
    path = file_of(folder, chain(("Conv", ["w"], {}), ("Relu", [], {}), *ENDING), {"w": WEIGHT})
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)
    return path


def _set(node: int, **settings: Any) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        values = [helper.make_attribute(key, value) for key, value in settings.items()]
        model.graph.node[node].attribute.extend(values)

    return change


def _rename(node: int, operator: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[node].op_type = operator

    return change


def _cast(kind: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[1].op_type = "Cast"
        _set(1, to=kind)(model)

    return change


def _cycle(operator: str) -> Callable[[onnx.ModelProto], None]:
    """Let the output of a node be its own input, by way of another node."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node[1].op_type = operator
        model.graph.node[1].input[0] = "t3"
        model.graph.node.append(helper.make_node(operator, ["t2"], ["t3"]))

    return change


def _copies_in_a_cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[1] = "w2"
    for name, other in (("w2", "w3"), ("w3", "w2")):
        model.graph.node.append(helper.make_node("Identity", [other], [name]))


def _read_mask(model: onnx.ModelProto) -> None:
    node = model.graph.node[1]
    node.op_type = "Dropout"
    node.output.append("mask")
    model.graph.node[2].input[0] = "mask"


def _softmax_of_samples(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Softmax", ["y"], ["z"], axis=0))
    model.graph.output[0].name = "z"


def _vary_height(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(0, dilations=[0, 2]), "foreign.onnx: node 't1' (Conv): conv dilation is 0; expected"),
        (_set(0, dilations=[2**31, 2]), "(Conv): conv dilation is 2147483648; expected"),
        (
            _set(0, dilations=[9, 2]),
            "(Conv): conv height: extent of the dilated kernel 19 is larger",
        ),
        (_set(0, auto_pad="SAME_LOWER"), "(Conv): auto_pad is SAME_LOWER; expected"),
        (_set(0, pads=[0, 1, 0, 2]), "(Conv): pads are [0, 1, 0, 2]; expected equal numbers, or"),
        (_set(0, group=3), "(Conv): conv has 4 filters in 3 groups"),
        (
            _rename(1, "Exp"),
            "node 't2' (Exp) is no layer of dptrain in this place; expected Abs, Add",
        ),
        (_rename(1, "Mul"), "node 't2' (Mul) has 1 inputs; expected at least 2"),
        (_set(2, axis=2), "(Flatten): axis is 2; expected 1"),
        (_set(0, strides=[1]), "node 't1' (Conv) lacks an input or an attribute, or has one that"),
        (_set(0, pads=[1, 1]), "node 't1' (Conv) lacks an input or an attribute, or has one that"),
        (_cast(TensorProto.INT64), "(Cast): it converts to a type that is not floating-point"),
        (_read_mask, "'mask' is another input; expected a tensor that a layer computes"),
        (_cycle("Relu"), "the graph has a cycle through 't"),
        (_cycle("Identity"), "the graph has a cycle through 't"),
        (_copies_in_a_cycle, "the graph has a cycle through 'w"),
        (_softmax_of_samples, "node 'z' (Softmax): axis is 0; expected 1, the classes"),
        (_vary_height, "the input 'x' has shape (?, 3, ?, 6); expected (N, C, H, W) or (N, F)"),
    ],
)
def test_what_dptrain_does_not_have_is_one_line(
    change: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_onnx(changed(change, tmp_path))


def test_long_chains_of_copies_are_read(tmp_path: Path) -> None:
    """No function calls itself for each node."""
    copies = [helper.make_node("Identity", [f"w{i}"], [f"w{i + 1}"]) for i in range(3000)]
    path = file_of(tmp_path, [*copies, *chain(("Conv", ["w3000"], {}), *ENDING)], {"w0": WEIGHT})
    assert read_onnx(path).arrays["conv1.weight"].shape == WEIGHT.shape


@pytest.mark.parametrize("pads", [{"auto_pad": "SAME_UPPER"}, {"pads": [1, 1, 1, 1]}])
@pytest.mark.parametrize("counts_pads", [0, 1])
def test_means_with_and_without_pads(
    pads: dict[str, Any], counts_pads: int, tmp_path: Path
) -> None:
    """A mean that counts pads is a sum pooling times a constant, and no average pooling."""
    settings = {"kernel_shape": [3, 3], "count_include_pad": counts_pads, **pads}
    mean = ("AveragePool", [], settings)
    scaled = file_of(tmp_path, chain(mean, ("Mul", ["n"], {}), *ENDING), {"n": np.float32(9)})
    if counts_pads:
        assert isinstance(check(scaled).nodes[0].layer, SumPool2d)
    else:
        with pytest.raises(UserError, match="count_include_pad is 0; expected a mean with the pos"):
            read_onnx(scaled)
    found = check(file_of(tmp_path, chain(mean, *ENDING))).nodes[0].layer
    assert isinstance(found, AveragePool2d)
    assert found.count_padding == bool(counts_pads)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("window", "stride", "pad"), [(3, 2, 0), (2, 2, 0), (3, 2, 1), (2, 3, 1)])
@pytest.mark.parametrize("size", [(8, 6), (7, 9), (2, 5)])
def test_sizes_are_rounded_up(
    operator: str, window: int, stride: int, pad: int, size: tuple[int, int], tmp_path: Path
) -> None:
    settings = {
        "kernel_shape": [window] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "ceil_mode": 1,
    }  # fmt: skip
    steps = chain((operator, [], settings), *ENDING)
    check(file_of(tmp_path, steps, shape=("N", 2, *size)), (2, *size))


@pytest.mark.parametrize("size", [-1, 0, 144])
def test_only_a_whole_sample_becomes_a_vector(size: int, tmp_path: Path) -> None:
    to = {"to": np.array([-1 if size == 144 else 0, size])}
    if size:
        check(file_of(tmp_path, chain(("Reshape", ["to"], {})), to))
        return
    for sizes in ([0, 0], [-1, 72], [-1, 4]):
        path = file_of(tmp_path, chain(("Reshape", ["to"], {})), {"to": np.array(sizes)})
        with pytest.raises(UserError, match=r"the new shape is \(-?\d+, \d+\) for 144 numbers"):
            read_onnx(path)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (1,), (1, 1), (), (2, 1), (1, 1, 2), (3,)])
def test_a_bias_is_the_same_for_each_sample(shape: tuple[int, ...], tmp_path: Path) -> None:
    constants = {
        "w": RNG.standard_normal((144, 2)).astype(np.float32),
        "b": RNG.standard_normal(shape).astype(np.float32),
    }
    path = file_of(tmp_path, chain(("Flatten", [], {}), ("Gemm", ["w", "b"], {})), constants)
    if shape in ((2, 1), (1, 1, 2), (3,)):
        with pytest.raises(UserError, match=r"its bias has shape .*; expected \(2,\)"):
            read_onnx(path)
    else:
        check(path)


@pytest.mark.parametrize("axes", [[2, 3], [1]])
@pytest.mark.parametrize("is_first", [True, False])
def test_gates_of_channels_are_products(axes: list[int], is_first: bool, tmp_path: Path) -> None:
    """A gate of one channel follows a convolution with one filter."""
    before = (
        [helper.make_node("ReduceMean", ["x", "axes"], ["m"])]
        if axes == [2, 3]
        else [helper.make_node("Conv", ["x", "w"], ["m"])]
    )
    factors = ["gate", "x"] if is_first else ["x", "gate"]
    nodes = [
        *before, helper.make_node("Sigmoid", ["m"], ["gate"]),
        helper.make_node("Mul", factors, ["product"]),
        helper.make_node("Flatten", ["product"], ["y"]),
    ]  # fmt: skip
    constants = {"axes": np.array(axes), "w": WEIGHT[:1, :, :1, :1]}
    assert isinstance(check(file_of(tmp_path, nodes, constants)).nodes[2].layer, Multiply)


INT = np.int64


@pytest.mark.parametrize("sizes", [None, [1, 4, 3]])
@pytest.mark.parametrize("is_last", [True, False])
def test_parts_of_a_split_are_slices(
    sizes: list[int] | None, is_last: bool, tmp_path: Path
) -> None:
    """Without sizes, parts are equal, but for the last."""
    given = {} if sizes is None else {"sizes": np.array(sizes)}
    inputs = ["last" if is_last else "x", *given]
    axis, count = (-1 if is_last else 1), {} if sizes else {"num_outputs": 3}
    nodes = [
        helper.make_node("Split", inputs, ["a", "b", "c"], axis=axis, **count),
        helper.make_node("Concat", ["c", "a", "b"], ["all"], axis=axis),
    ]
    if is_last:
        nodes.insert(0, helper.make_node("Transpose", ["x"], ["last"], perm=[0, 2, 3, 1]))
        nodes.append(helper.make_node("Transpose", ["all"], ["maps"], perm=[0, 3, 1, 2]))
    nodes.append(helper.make_node("Flatten", ["maps" if is_last else "all"], ["y"]))
    network = check(file_of(tmp_path, nodes, given, ("N", 8, 2, 3)), (8, 2, 3))
    widths = [node.layer.stop - node.layer.start for node in network.nodes
              if isinstance(node.layer, ChannelSlice)]  # fmt: skip
    assert sorted(widths) == sorted(sizes or [3, 3, 2])


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 2**63 - 1), (-3, -1), (0, 9)])
def test_slices_of_channels(start: int, stop: int, tmp_path: Path) -> None:
    bounds = {"s": np.array([start]), "e": np.array([stop]), "a": np.array([1])}
    steps = chain(("Slice", ["s", "e", "a"], {}), *ENDING)
    network = check(file_of(tmp_path, steps, bounds, ("N", 6, 2, 3)), (6, 2, 3))
    assert [node.layer.kind for node in network.nodes] == ["slice", "flatten"][stop == 9 :]


def shuffle(groups: int, perm: list[int], *, computed: bool) -> tuple[list[Any], Arrays]:
    """Return nodes that shuffle the channels of x (N, 6, 2, 3), and their constants."""
    sizes: Arrays = {"g": np.array([0, groups, 6 // groups, 2, 3]), "m": np.array([0, 6, 2, 3])}
    nodes = []
    if computed:
        sizes = {"zero": np.array([0], INT), "rest": np.array([groups, 6 // groups, 2, 3]),
                 "tail": np.array([-1, 2, 3])}  # fmt: skip
        nodes = [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Gather", ["shape", "zero"], ["n"]),
            helper.make_node("Concat", ["n", "rest"], ["g"], axis=0),
            helper.make_node("Concat", ["n", "tail"], ["m"], axis=0),
        ]
    nodes += [
        helper.make_node("Reshape", ["x", "g"], ["groups"]),
        helper.make_node("Transpose", ["groups"], ["turned"], perm=perm),
        helper.make_node("Reshape", ["turned", "m"], ["maps"]),
        helper.make_node("Flatten", ["maps"], ["y"]),
    ]
    return nodes, sizes


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_shuffled_channels(groups: int, computed: bool, tmp_path: Path) -> None:
    nodes, sizes = shuffle(groups, [0, 2, 1, 3, 4], computed=computed)
    network = check(file_of(tmp_path, nodes, sizes, ("N", 6, 2, 3)), (6, 2, 3))
    assert network.nodes[0].layer == ChannelShuffle(groups)


def blocks(perm: list[int], size: int, joined: list[int]) -> tuple[list[Any], Arrays]:
    """Return nodes that make channels of blocks of pixels of x (N, 2, 6, 12), and constants."""
    parts = [-1, 2, 6 // size, size, 12 // size, size]
    nodes = chain(("Reshape", ["p"], {}), ("Transpose", [], {"perm": perm}),
                  ("Reshape", ["m"], {}), *ENDING)  # fmt: skip
    return nodes, {"p": np.array(parts), "m": np.array(joined)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("perm", [[0, 3, 5, 1, 2, 4], [0, 1, 3, 5, 2, 4]])
def test_blocks_of_pixels_become_channels(perm: list[int], size: int, tmp_path: Path) -> None:
    """As in TResNet, and as PixelUnshuffle."""
    joined = [-1, 2 * size * size, 6 // size, 12 // size]
    nodes, constants = blocks(perm, size, joined)
    shape = (2, 6, 12)
    network = check(file_of(tmp_path, nodes, constants, ("N", *shape)), shape)
    assert [node.layer.kind for node in network.nodes].count("crop") == size * size
    constants["m"] = np.array([-1, *joined[1:][::-1]])
    with pytest.raises(UserError, match=r"\(Reshape\): the new shapes are .*; expected blocks"):
        read_onnx(file_of(tmp_path, nodes, constants, ("N", *shape)))


def test_space_to_depth(tmp_path: Path) -> None:
    nodes = chain(("SpaceToDepth", [], {"blocksize": 2}), *ENDING)
    check(file_of(tmp_path, nodes, {}, ("N", 3, 4, 6)), (3, 4, 6))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_gate_per_channel_times_one_per_pixel(is_first: bool, tmp_path: Path) -> None:
    """As in FocalNet."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["channels"]),
        helper.make_node("Conv", ["x", "w"], ["pixels"]),
        helper.make_node("Mul", ["channels", "pixels"][:: 1 if is_first else -1], ["product"]),
        helper.make_node("Flatten", ["product"], ["y"]),
    ]
    network = check(file_of(tmp_path, nodes, {"w": WEIGHT[:1, :, :1, :1]}))
    assert [node.layer for node in network.nodes if node.layer.kind == "resize"] == [
        Resize2d(size=(8, 6))
    ]


ATTENTION = [
    helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
    helper.make_node("Reshape", ["mean", "row"], ["r"]),
    helper.make_node("Conv", ["r", "w"], ["c"], kernel_shape=[3], pads=[1, 1]),
    helper.make_node("Sigmoid", ["c"], ["s"]),
    helper.make_node("Reshape", ["s", "gate"], ["g"]),
    helper.make_node("Shape", ["x"], ["shape"]),
    helper.make_node("Expand", ["g", "shape"], ["e"]),
    helper.make_node("Mul", ["e", "x"], ["product"]),
    helper.make_node("Flatten", ["product"], ["y"]),
]
"""Efficient channel attention as PyTorch exports it, for x (N, 5, 4, 3)."""

ROWS: Arrays = {
    "axes": np.array([2, 3]), "row": np.array([0, 1, 5]), "gate": np.array([0, 5, 1, 1]),
    "w": RNG.standard_normal((1, 1, 3)).astype(np.float32),
}  # fmt: skip


def test_efficient_channel_attention(tmp_path: Path) -> None:
    network = check(file_of(tmp_path, ATTENTION, ROWS, ("N", 5, 4, 3)), (5, 4, 3))
    kinds = [node.layer.kind for node in network.nodes]
    assert [kinds.count(kind) for kind in ("reshape", "multiply", "resize")] == [2, 1, 0]


def test_rows_are_no_maps(tmp_path: Path) -> None:
    """Axis 2 of (N, C, W) is the width: operators with axes would read another axis."""
    ends = {"start": np.array([0]), "end": np.array([2]), "axis": np.array([2])}
    nodes = [
        *ATTENTION[:4],
        helper.make_node("Slice", ["s", "start", "end", "axis"], ["part"]),
        helper.make_node("Flatten", ["part"], ["y"]),
    ]
    with pytest.raises(UserError, match=r"its input is \(N, C, W\); expected maps"):
        read_onnx(file_of(tmp_path, nodes, {**ROWS, **ends}, ("N", 5, 4, 3)))


def test_a_gate_of_another_size_is_refused(tmp_path: Path) -> None:
    nodes = [*ATTENTION[:5], helper.make_node("Expand", ["g", "size"], ["e"]), *ATTENTION[7:]]
    sizes = {**ROWS, "size": np.array([1, 5, 4, 3])}
    check(file_of(tmp_path, nodes, sizes, ("N", 5, 4, 3)), (5, 4, 3))
    nodes[-2] = helper.make_node("Mul", ["e", "g"], ["product"])
    with pytest.raises(UserError, match=r"repeated to \[1, 5, 4, 3\]; expected the shape"):
        read_onnx(file_of(tmp_path, nodes, sizes, ("N", 5, 4, 3)))


def test_reshapes_that_mix_channels_and_pixels_are_refused(tmp_path: Path) -> None:
    nodes, sizes = shuffle(2, [0, 2, 1, 3, 4], computed=False)
    path = file_of(tmp_path, nodes, {**sizes, "m": np.array([0, 2, 6, 3])}, ("N", 6, 2, 3))
    with pytest.raises(
        UserError, match=r"'maps' \(Reshape\): the new shapes are .* channels again"
    ):
        read_onnx(path)
    nodes, sizes = shuffle(2, [0, 2, 1, 4, 3], computed=False)
    with pytest.raises(
        UserError, match=r"'turned' \(Transpose\) is no layer of dptrain in this place"
    ):
        read_onnx(file_of(tmp_path, nodes, sizes, ("N", 6, 2, 3)))


FACTORS = RNG.standard_normal((2, 3)).astype(np.float32)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("is_shifted", [True, False])
def test_factors_of_channels_are_convolutions(
    is_last: bool, is_shifted: bool, tmp_path: Path
) -> None:
    factors = FACTORS if is_last else FACTORS.reshape(2, 3, 1, 1)
    steps: Any = [("Mul", ["scale"], {}), *([("Add", ["shift"], {})] if is_shifted else [])]
    if is_last:
        to, back = ({"perm": perm} for perm in ([0, 2, 3, 1], [0, 3, 1, 2]))
        steps = [("Transpose", [], to), *steps, ("Transpose", [], back)]
    constants = {"scale": factors[0], "shift": factors[1]}
    layer = check(file_of(tmp_path, chain(*steps, *ENDING), constants)).nodes[0].layer
    assert layer == Conv2d(3, 1, groups=3, bias=is_shifted)


def test_a_block_with_the_channels_last(tmp_path: Path) -> None:
    """As in ConvNeXt: layer normalisation and dense layers of the channels of a pixel."""
    constants = {
        "s": FACTORS[0], "b": FACTORS[1], "m": WEIGHT[:3, :, 0, 0].copy(), "c": FACTORS[0],
        "m2": WEIGHT[:3, :, 1, 0].copy(), "axes": np.array([1, 2]),
    }  # fmt: skip
    steps: Any = [
        ("Transpose", [], {"perm": [0, 2, 3, 1]}), ("LayerNormalization", ["s", "b"], {}),
        ("MatMul", ["m"], {}), ("Add", ["c"], {}), ("Gelu", [], {}), ("MatMul", ["m2"], {}),
    ]  # fmt: skip
    back = ("Transpose", [], {"perm": [0, 3, 1, 2]})
    network = check(file_of(tmp_path, chain(*steps, back, *ENDING), constants))
    assert [node.layer.kind for node in network.nodes] == [
        "layernorm", "conv", "gelu", "conv", "flatten"
    ]  # fmt: skip
    mean = ("ReduceMean", ["axes"], {"keepdims": 0})
    check(file_of(tmp_path, chain(*steps, mean, *ENDING), constants))


@pytest.mark.parametrize("size", [1, 2])
def test_vectors_of_maps_with_the_channels_last(size: int, tmp_path: Path) -> None:
    """Their elements are in another order, except those of one pixel."""
    path = file_of(
        tmp_path, chain(("Transpose", [], {"perm": [0, 2, 3, 1]}), *ENDING), {}, ("N", 3, 1, size)
    )
    if size == 1:
        check(path, (3, 1, 1))
    else:
        with pytest.raises(UserError, match=r"\(Flatten\): its input has the channels on the last"):
            read_onnx(path)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([("Conv", ["w"], {})], "(Conv): its input has the channels on the last axis"),
        ([("Transpose", [], {"perm": [0, 2, 3, 1]})], "(Transpose) is no layer of dptrain in this"),
        ([("Mul", ["long"], {})], "(Mul): conv has 6 groups, but its input has 3"),
        ([("Concat", [], {"axis": 1})], "(Concat): axis is 1; expected 3, the channels"),
        ([("Add", ["x"], {})], "(Add): its inputs have the channels on different axes"),
        ([("LayerNormalization", ["long"], {"axis": 2})], "axis is 2; expected the channels"),
        (
            [("Slice", ["one", "two"], {})],
            "(Slice): it has the axes [0, 2] and steps [1, 1]; expected consecutive channels",
        ),
    ],
)
def test_other_operators_with_the_channels_last_are_refused(
    steps: Any, message: str, tmp_path: Path
) -> None:
    constants = {"w": WEIGHT, "long": np.ones(6, np.float32), "one": np.array([0, 1]),
                 "two": np.array([1, 2])}  # fmt: skip
    first, last = (("Transpose", [], {"perm": perm}) for perm in ([0, 2, 3, 1], [0, 3, 1, 2]))
    nodes = chain(first, *steps, last, *ENDING)
    with pytest.raises(UserError, match=re.escape(message)):
        read_onnx(file_of(tmp_path, nodes, constants))


@pytest.mark.parametrize(
    ("operator", "constants", "settings", "kind"),
    [
        ("Pad", {"pads": np.array([0, 0, 1, 2, 0, 0, 0, 3])}, {}, "pad"),
        ("Pad", {"pads": np.array([0, 0, 1, 2, 0, 0, 0, 3])}, {"mode": "reflect"}, "pad"),
        ("Pad", {"pads": np.array([0, 0, 1, 2, 0, 0, 0, 3])}, {"mode": "edge"}, "pad"),
        ("Pad", {"pads": np.array([0, 0, -1, 0, 0, 0, -2, -1])}, {}, "crop"),
        (
            "Resize", {"roi": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 3], np.float32)},
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, "resize",
        ),
        (
            "Resize", {"roi": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 1.5], np.float32)},
            {"coordinate_transformation_mode": "half_pixel", "mode": "linear"}, "resize",
        ),
        (
            "Resize", {"roi": np.zeros(0, np.float32), "s": np.array([1, 1, 0.5, 2], np.float32)},
            {"coordinate_transformation_mode": "align_corners", "mode": "linear"}, "resize",
        ),
        (
            "Slice", {"s": np.array([1, -5]), "e": np.array([8, 6]), "a": np.array([2, 3]),
                      "k": np.array([2, 1])}, {}, "crop",
        ),
        ("Sub", {"n": np.float32(0.5)}, {}, "affine"),
        ("Div", {"n": np.array([4.0], np.float32)}, {}, "affine"),
    ],
)  # fmt: skip
def test_pixels_and_numbers(
    operator: str, constants: Arrays, settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    steps = chain((operator, [*constants], settings), *ENDING)
    network = check(file_of(tmp_path, steps, constants))
    assert [node.layer.kind for node in network.nodes] == [kind, "flatten"]


def test_rows_are_removed_and_added(tmp_path: Path) -> None:
    pads = {"pads": np.array([0, 0, -1, -1, 0, 0, 1, 1])}
    network = check(file_of(tmp_path, chain(("Pad", ["pads"], {}), *ENDING), pads))
    assert [node.layer.kind for node in network.nodes] == ["crop", "pad", "flatten"]


@pytest.mark.parametrize("size", [(8, 6), (7, 9)])
def test_a_maximum_of_padded_maps(size: tuple[int, int], tmp_path: Path) -> None:
    """TensorFlow pads with −∞ before it takes a maximum."""
    below = [extent % 2 for extent in size]
    pads = {"p": np.array([0, 0, *below, 0, 0, 1, 1]), "v": np.float32(-np.inf)}
    pool = ("MaxPool", [], {"kernel_shape": [3, 3], "strides": [2, 2]})
    steps = chain(("Pad", ["p", "v"], {}), pool, *ENDING)
    network = check(file_of(tmp_path, steps, pads, ("N", 3, *size)), (3, *size))
    assert [node.layer.kind for node in network.nodes] == ["pool", "flatten"]


def test_numbers_in_a_row_are_one_layer(tmp_path: Path) -> None:
    numbers = {name: np.float32(value) for name, value in (("a", 3), ("b", -2), ("c", 0.5))}
    steps = chain(("Mul", ["a"], {}), ("Add", ["b"], {}), ("Div", ["c"], {}), *ENDING)
    assert check(file_of(tmp_path, steps, numbers)).nodes[0].layer == Affine(6.0, -4.0)
    steps = chain(("Add", ["zero"], {}), *ENDING)
    network = check(file_of(tmp_path, steps, {"zero": np.float32(0)}))
    assert [node.layer.kind for node in network.nodes] == ["flatten"]


def test_differences_of_tensors(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Sub", ["s", "x"], ["d"]),
        helper.make_node("Flatten", ["d"], ["y"]),
    ]  # fmt: skip
    check(file_of(tmp_path, nodes))


def test_vectors_are_normalised(tmp_path: Path) -> None:
    constants = {"axes": np.array([2, 3]), "s": FACTORS[0], "b": FACTORS[1]}
    mean = ("ReduceMean", ["axes"], {"keepdims": 0})
    check(file_of(tmp_path, chain(mean, ("LayerNormalization", ["s", "b"], {})), constants))
    norms = {"m": FACTORS[0], "v": np.abs(FACTORS[1])}
    steps = chain(mean, ("BatchNormalization", ["s", "b", "m", "v"], {}))
    check(file_of(tmp_path, steps, {**constants, **norms}))


@pytest.mark.parametrize(
    ("operator", "constants", "settings", "message"),
    [
        ("Mul", {"block.gain": np.float32(2)}, {}, "its number 'block.gain' is a parameter"),
    ],
)
def test_pixels_and_numbers_that_are_refused(
    operator: str, constants: Arrays, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, chain((operator, [*constants], settings), *ENDING), constants)
    with pytest.raises(UserError, match=rf"node 't1' \({operator}\): .*{message}"):
        read_onnx(path)


@pytest.mark.parametrize("operator", ["Add", "Conv", "Exp", "Gemm", "Neg", "Reciprocal", "Relu"])
def test_nodes_with_too_few_inputs_are_refused(operator: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, [helper.make_node(operator, [], ["y"])])
    with pytest.raises(UserError, match=rf"\({operator}\) has 0 inputs; expected at least [12]"):
        read_onnx(path)


def test_files_that_are_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.onnx").write_text("hello")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name, message in (
        ("text.onnx", "text.onnx cannot be read as an ONNX file"),
        ("empty.onnx", "empty.onnx: the graph has 0 inputs; expected one"),
        ("absent.onnx", "absent.onnx cannot be read: No such file or directory"),
    ):
        for command in (["describe"], ["train", "--network"], ["train", "--weights"]):
            assert run([*command, str(tmp_path / name)], is_rank_zero=True) == 2
            assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_the_library_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match="install it with: pip install"):
        get_network("model.onnx")


def test_tensors_that_another_program_renamed_are_found(tmp_path: Path) -> None:
    (path,) = model_of(SMALL, plain(SMALL)).export(tmp_path / "small.onnx")
    model = onnx.load(path)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"_{name}" if "/" in name else name for name in names]
    onnx.save(model, path)
    names = [node.name for node in read_onnx(path).network.nodes]
    assert names == ["conv1", "relu1", "flatten1", "dense1"]


# Training.


SMALL = Network((1, 6, 5), [Conv2d(4), ReLU(), Flatten(), Dense(3)], name="small")


def test_training_begins_with_the_parameters_of_the_file(tmp_path: Path) -> None:
    model = model_of(SMALL, plain(SMALL))
    (path,) = model.export(tmp_path / "small.onnx")
    assert GivenSettings(network=str(path), data="x").with_recipe().weights == str(path)
    x, y = RNG.standard_normal((12, 1, 6, 5)).astype(np.float32), np.arange(12) % 3
    trainer = Trainer(
        str(path), (x, y, x, y), run_dir=tmp_path / "run", steps=2, batch_size=6,
        backend="reference", schedule="constant", learning_rate=0.01, progress=False,
    )  # fmt: skip
    for name, values in model.parameters.items():
        found = trainer.job.replica.parameters[name]
        np.testing.assert_array_equal(found, values.astype(np.float32))
    trainer.fit()
    resumed = Trainer.resume(tmp_path / "run", (x, y, x, y), steps=3, progress=False)
    assert resumed.step == 2
    again = resumed.job.network
    assert [node.name for node in again.nodes] == [node.name for node in SMALL.nodes]


def test_other_weights_replace_those_of_the_file(tmp_path: Path) -> None:
    (path,) = model_of(SMALL, plain(SMALL)).export(tmp_path / "small.onnx")
    chosen = GivenSettings(network=str(path), data="x", weights=Path("w.safetensors"))
    assert chosen.with_recipe().weights == str(Path("w.safetensors").absolute())


@pytest.mark.parametrize("producer", ["dptrain", "another"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, producer: str) -> None:
    path = file_of(tmp_path, chain(("Flatten", [], {"name": "flatten1/Flatten"}),
                                   ("Gemm", ["dense1.weight"], {"name": "dense1/Gemm"})),
                   {"dense1.weight": np.ones((144, 2), np.float32)})  # fmt: skip
    model = onnx.load(path)
    model.producer_name = producer
    whole = model.SerializeToString()
    path.write_bytes(whole)
    assert read_onnx(path).network.output_shape == (2,)
    places = [found.start() + i for found in re.finditer(rb"[A-Za-z]{4,}[\w./]+", whole)
              for i in range(found.end() - found.start())]  # fmt: skip
    for place in np.random.default_rng(5).choice(places, 100):
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with suppress(UserError):
            read_onnx(path)
    path.write_bytes(whole.replace(b"Flatten", b"\xff" * 7))
    with pytest.raises(UserError, match=r"is no UTF-8; export the model again"):
        read_onnx(path)
