"""Both exporters of PyTorch, for inference and for training, in every opset that they write.

The module itself is the oracle: the imported network computes what it computes in inference.
"""

from __future__ import annotations

import contextlib
import io
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dptrain import make_replica
from dptrain.errors import UserError
from dptrain.interchange.onnx_constants import FREE_BATCH, Constants
from dptrain.interchange.onnx_import import OnnxNetwork, read_onnx
from dptrain.interchange.onnx_reading import describe
from dptrain.network import BatchNorm2d, Dropout, StochasticDepth
from dptrain.network.layers import RandomMask
from dptrain.training.persistence.weights import load_weights
from tests.lazy import LazyModule
from tests.tiers import tiered

torch = LazyModule("torch")

SHAPE, FEATURES = (3, 8, 8), 5


class Exporter:
    """How PyTorch writes a file.

    Attributes:
        is_dynamo: True for the newer exporter, which needs onnxscript.
        modes: EVAL, PRESERVE and TRAINING of `torch.onnx.TrainingMode`; the newer exporter writes
            the module in the mode that it is in.
        opsets: versions of ONNX that it writes.
    """

    def __init__(self, modes: tuple[str, ...], opsets: tuple[int, ...], *, is_dynamo: bool) -> None:
        self.modes, self.opsets, self.is_dynamo = modes, opsets, is_dynamo

    def write(self, module: Any, path: Path, mode: str, opset: int) -> None:
        x = torch.zeros(2, *SHAPE)
        settings: dict[str, Any] = {"input_names": ["x"], "opset_version": opset}
        module.train(mode == "TRAINING")
        if self.is_dynamo:
            # With optimisation, batch normalisations become parts of convolutions.
            settings |= {"dynamo": True, "optimize": False, "verbose": False}
            settings |= {"dynamic_shapes": ({0: torch.export.Dim("N")},)}
        else:
            kept = getattr(torch.onnx.TrainingMode, mode)
            settings |= {"dynamo": False, "training": kept, "dynamic_axes": {"x": {0: "N"}}}
            settings |= {"do_constant_folding": mode == "EVAL"}
        with contextlib.redirect_stdout(io.StringIO()):
            torch.onnx.export(module, (x,), str(path), **settings)


EXPORTERS = {
    "torchscript": Exporter(
        ("EVAL", "PRESERVE", "TRAINING"), (11, 13, 17, 18, 20), is_dynamo=False
    ),
    "dynamo": Exporter(("EVAL", "TRAINING"), (18, 20, 22), is_dynamo=True),
}


def as_module(function: Callable[[Any], Any], **parts: Any) -> Any:
    """Return a module that computes a function of itself and its input."""

    class Module(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x: Any) -> Any:
            return function(self, x)  # type: ignore[call-arg]

    return Module()


def drop_path(module: Any, x: Any) -> Any:
    """Compute stochastic depth as timm and torchvision do."""
    if not module.training:
        return x
    mask = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.8)
    return x * mask.div_(0.8)


def shuffle(module: Any, x: Any) -> Any:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def standardised(module: Any, x: Any) -> Any:
    """Convolve with weights whose mean and variance are those of each filter."""
    w = module.weight
    flat = torch.nn.functional.batch_norm(
        w.reshape(1, len(w), -1), None, None, module.gain, training=True, momentum=0.0
    )
    return torch.nn.functional.conv2d(x, flat.reshape_as(w), padding=1)


def modules() -> dict[str, Callable[[], Any]]:
    """Return functions that make the layers before the last two of a module."""
    nn, f = torch.nn, torch.nn.functional
    return {
        "convolutions": lambda: [
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8, momentum=0.3),
            nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(4, eps=1e-3),
        ],
        "poolings": lambda: [
            nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 2, ceil_mode=True),
            nn.AdaptiveAvgPool2d(1),
        ],
        "functions": lambda: [
            nn.SiLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.GELU(), nn.Mish(), nn.ELU(),
            nn.LeakyReLU(0.1), nn.Softplus(), nn.Sigmoid(), nn.Tanh(), nn.ReLU6(),
        ],
        "masks": lambda: [
            nn.Conv2d(3, 4, 1), nn.Dropout(0.3), as_module(drop_path), nn.Conv2d(4, 4, 3),
            as_module(lambda m, x: f.dropout(x, 0.1, m.training)),
        ],
        "channels": lambda: [
            nn.PixelUnshuffle(2), as_module(shuffle),
            as_module(lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1)),
            as_module(lambda m, x: torch.cat([x[:, 2:7], x.split([4, 8], 1)[0]], 1)),
            as_module(lambda m, x: x.flatten(2).view(x.shape)),
        ],
        "resampling": lambda: [
            nn.ReflectionPad2d(1), nn.ReplicationPad2d((1, 0, 0, 1)), nn.ZeroPad2d(1),
            as_module(lambda m, x: f.interpolate(x, scale_factor=2)),
            as_module(lambda m, x: f.interpolate(x, (9, 11), mode="bilinear")),
            as_module(lambda m, x: f.interpolate(x, x.shape[2:], mode="nearest")),
        ],
        "normalisations": lambda: [
            nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True),
            as_module(
                lambda m, x: m.dense(m.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
                norm=nn.LayerNorm(4), dense=nn.Linear(4, 6),
            ),
            as_module(lambda m, x: m.scale * x, scale=nn.Parameter(torch.randn(6, 1, 1))),
        ],
        "gates": lambda: [
            nn.Conv2d(3, 4, 1),
            as_module(lambda m, x: x * m.a(x.mean((2, 3), keepdim=True)).sigmoid(),
                      a=nn.Conv2d(4, 4, 1)),
            as_module(lambda m, x: x * m.a(x.mean((2, 3))[:, None]).sigmoid().view(
                x.shape[0], -1, 1, 1), a=nn.Conv1d(1, 1, 3, padding=1, bias=False)),
            as_module(lambda m, x: x.amax((2, 3), keepdim=True) * (1 - 0.5 * x)),
        ],
        "computed weights": lambda: [
            as_module(standardised, weight=nn.Parameter(torch.randn(4, 3, 3, 3)),
                      gain=nn.Parameter(torch.randn(4))),
            as_module(lambda m, x: f.conv2d(x, m.weight.transpose(0, 1), m.bias * 0.5),
                      weight=nn.Parameter(torch.randn(4, 6, 1, 1)),
                      bias=nn.Parameter(torch.randn(6))),
        ],
    }  # fmt: skip


NAMES = (
    "convolutions", "poolings", "functions", "masks", "channels", "resampling", "normalisations",
    "gates", "computed weights",
)  # fmt: skip


def make_module(name: str) -> Any:
    nn = torch.nn
    torch.manual_seed(1)
    module = nn.Sequential(*modules()[name](), nn.Flatten(), nn.LazyLinear(FEATURES))
    module(torch.rand(4, *SHAPE))
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            if each.is_floating_point():
                each.add_(0.2 * torch.rand_like(each))
    return module


def read(name: str, exporter: str, mode: str, opset: int, folder: Path) -> tuple[OnnxNetwork, Any]:
    """Export a module, read the file and compare both in inference."""
    module, path = make_module(name), folder / "model.onnx"
    EXPORTERS[exporter].write(module, path, mode, opset)
    version = next(each.version for each in onnx.load(path).opset_import if not each.domain)
    assert version == opset
    found = read_onnx(path)
    x = np.random.default_rng(2).standard_normal((3, *SHAPE)).astype(np.float32)
    replica = make_replica(found.network, "reference", len(x), training=False)
    load_weights(replica, path)
    expected = module.eval()(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(replica.forward(x), expected, 1e-4, 1e-5 * np.abs(expected).max())
    return found, module


OLDER = [
    (name, mode, opset)
    for name in NAMES
    for mode in EXPORTERS["torchscript"].modes
    for opset in EXPORTERS["torchscript"].opsets
]
QUICK = [
    (name, ("TRAINING", "PRESERVE")[index % 2], EXPORTERS["torchscript"].opsets[index % 5])
    for index, name in enumerate(NAMES)
]
NEWER = [
    (name, mode, opset)
    for name in NAMES
    for mode, opset in (("EVAL", 18), ("TRAINING", 20), ("TRAINING", 22))
]


def check_layers(name: str, mode: str, found: OnnxNetwork, module: Any) -> None:
    """Check that a file with all layers is read with all of them, and no others."""
    layers = [node.layer for node in found.network.nodes]
    if name != "computed weights":
        assert found.network.num_parameters == sum(p.numel() for p in module.parameters())
    if name == "convolutions":
        norms = [layer for layer in layers if isinstance(layer, BatchNorm2d)]
        assert [norm.momentum for norm in norms] == pytest.approx([0.1, 0.3, 0.1])
    if name == "masks" and mode == "TRAINING":
        masks = [layer for layer in layers if isinstance(layer, RandomMask)]
        assert [type(mask) for mask in masks] == [Dropout, StochasticDepth, Dropout]
        assert [mask.rate for mask in masks] == pytest.approx([0.3, 0.2, 0.1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode", "opset"), tiered(OLDER, QUICK))
def test_files_of_the_older_exporter(name: str, mode: str, opset: int, tmp_path: Path) -> None:
    found, module = read(name, "torchscript", mode, opset, tmp_path)
    if mode != "EVAL":  # There, batch normalisations are parts of convolutions.
        check_layers(name, mode, found, module)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode", "opset"), NEWER)
def test_files_of_the_newer_exporter(name: str, mode: str, opset: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the newer exporter of PyTorch needs onnxscript")
    found, module = read(name, "dynamo", mode, opset, tmp_path)
    check_layers(name, mode, found, module)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_in_training_is_that_of_the_module(tmp_path: Path) -> None:
    """Batch normalisations of a file for training use the moments of the minibatch."""
    found, module = read("convolutions", "torchscript", "TRAINING", 17, tmp_path)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((4, *SHAPE)).astype(np.float32)
    y = rng.integers(0, FEATURES, 4).astype(np.int32)
    replica = make_replica(found.network, "reference", len(x))
    for name, values in found.arrays.items():
        owner = replica.parameters if name in replica.parameters else replica.statistics
        owner[name] = values
    expected = torch.nn.functional.cross_entropy(
        module.train()(torch.tensor(x)), torch.tensor(y).long()
    )
    assert replica.forward_backward(x, y) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ((2, 3, 1, 1), 0.8, "(Mul): its random mask has shape (2, 3, 1, 1); expected a number for"),
        ((2, 1, 1, 1), 0.5, "(Mul): its random mask is 2 with probability 0.8; expected 1.25, 1 /"),
    ],
)
def test_other_masks_are_refused(
    shape: tuple[int, ...], scale: float, message: str, tmp_path: Path
) -> None:
    mask = as_module(lambda m, x: x * (torch.empty(shape).bernoulli_(0.8) / scale))
    module = torch.nn.Sequential(mask, torch.nn.Flatten())
    path = tmp_path / "model.onnx"
    EXPORTERS["torchscript"].write(module, path, "TRAINING", 17)
    with pytest.raises(UserError, match=re.escape(message)):
        read_onnx(path)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_refusals_of_the_newer_exporter_name_the_module(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the newer exporter of PyTorch needs onnxscript")
    head = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softmax2d())
    module, path = torch.nn.Sequential(head, torch.nn.Flatten()), tmp_path / "model.onnx"
    EXPORTERS["dynamo"].write(module, path, "EVAL", 20)
    message = "node 'node_softmax' (Softmax) of module '0.1' is no layer of dptrain"
    with pytest.raises(UserError, match=re.escape(message)):
        read_onnx(path)


@pytest.mark.parametrize("shape", [[2**31, 2**10], [FREE_BATCH, 1024]])
def test_a_small_file_takes_little_memory(shape: list[int]) -> None:
    """Files state shapes of any size, which are not computed."""
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
    ]
    values = {"shape": np.array(shape), "one": np.ones(1, np.float32)}
    given = [numpy_helper.from_array(value, name) for name, value in values.items()]
    opsets = [helper.make_opsetid("", 17)]
    graph = helper.make_graph(nodes, "graph", [], [], given)
    tracemalloc.start()
    try:
        constants = Constants(helper.make_model(graph, opset_imports=opsets))
        assert constants.value("ones") is None
        assert constants.shape("ones") == tuple(shape)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_modules_are_named() -> None:
    node = helper.make_node("Exp", ["x"], ["y"], "n1")
    assert describe(node) == "node 'n1' (Exp)"
    scopes = ": nn.Sequential/features.0: nn.Module/exp: aten.exp.default"
    node.metadata_props.add(key="namespace", value=scopes)
    assert describe(node) == "node 'n1' (Exp) of module 'features.0'"


def test_values_follow_from_constants_and_shapes() -> None:
    """Each form that normalised nodes have; the number of samples is free."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"], start=1),
        helper.make_node("Identity", ["w"], ["copy"]),
        helper.make_node("Transpose", ["copy"], ["turned"], perm=[1, 0]),
        helper.make_node("RandomUniformLike", ["w"], ["random"]),
        helper.make_node("Add", ["random", "w"], ["sum"]),
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("CastLike", ["half", "sizes"], ["whole"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 5, 7])
    w = np.arange(40 * 30, dtype=np.float32).reshape(40, 30)
    graph = helper.make_graph(nodes, "graph", [x], [], [numpy_helper.from_array(w, "w")])
    opsets = [helper.make_opsetid("", 17)]
    found = Constants(helper.make_model(graph, opset_imports=opsets))
    for name, expected in {"sizes": [3, 5, 7], "turned": w.T, "whole": 0}.items():
        np.testing.assert_array_equal(found.value(name), expected)
    assert found.value("random") is None
    assert found.value("sum") is None
    assert found.given == {"w"}
