"""Both exporters of PyTorch, for inference and for training, in every opset that they write.

The module itself is the oracle: the imported network computes what it computes in inference.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dptrain import make_replica
from dptrain.interchange.onnx_import import OnnxNetwork, read_onnx
from dptrain.network import BatchNorm2d, Dropout, StochasticDepth
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


CASES = [
    (name, key, mode, opset)
    for name in NAMES
    for key, exporter in EXPORTERS.items()
    for mode in exporter.modes
    for opset in exporter.opsets
]
if __name__=="__main__":
    import sys,resource,tempfile,warnings,logging
    resource.setrlimit(resource.RLIMIT_AS,(8_000_000_000,)*2); warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
    for c in CASES:
        if c[1]!=sys.argv[1] or (len(sys.argv)>2 and c[0] not in sys.argv[2:]): continue
        with tempfile.TemporaryDirectory() as t:
            try: found,m=read(*c,Path(t)); n=sum(p.numel() for p in m.parameters()); r="ok" if found.network.num_parameters==n else f"params {found.network.num_parameters} {n}"
            except Exception as e: r=type(e).__name__+" "+" ".join(str(e).split())[:230]
        if r!="ok": print(*c,r,flush=True)
