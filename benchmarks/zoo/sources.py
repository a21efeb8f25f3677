"""Classifiers of torchvision and timm with random weights, as modules and as ONNX files."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 4
"""Samples of the minibatch with which the networks are compared."""


def import_torchvision() -> ModuleType:
    """Import torchvision, whose compiled operators need not fit PyTorch: classifiers use none."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        from torch.library import Library

        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        declared = Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torchvision = importlib.import_module("torchvision")
        # The library is deleted with its last reference.
        vars(torchvision)["_declared"] = declared
        return torchvision


def make_module(library: str, name: str, size: int) -> Any:
    """Return a classifier for inference, with random weights, biases and statistics.

    Args:
        library: ``"torchvision"`` or ``"timm"``.
        name: of the classifier there.
        size: height and width of the images.
    """
    import torch

    torch.manual_seed(1)
    import_torchvision()
    module: Any
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if library == "timm":
            import timm

            module = timm.create_model(name, pretrained=False)
        else:
            from torchvision import models

            module = models.get_model(name, weights=None)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim <= 1 or parameter.numel() == max(parameter.shape):
                # Initial values that are all 1 or 0 would hide an exchange of channels.
                parameter.add_(0.2 * torch.rand_like(parameter) - 0.1)
    return module.eval()


EXPORTERS = ("torchscript", "training", "dynamo")
"""Files of PyTorch: of the older exporter, for inference with all layers, and for training; and of
the newer exporter for training."""


def export(module: Any, path: Path, size: int, exporter: str) -> None:
    """Write a module to an ONNX file.

    Args:
        module: of PyTorch, for inference.
        path: of the file.
        size: height and width of the images.
        exporter: one of `EXPORTERS`.
    """
    import torch

    x = torch.zeros(2, 3, size, size)
    options: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
    if exporter == "dynamo":
        options |= {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim("N")},)}
        # Otherwise batch normalisations become parts of convolutions.
        options |= {"verbose": False, "optimize": False}
    else:
        # Likewise.
        kept = torch.onnx.TrainingMode.PRESERVE
        options |= {"dynamo": False, "dynamic_axes": {"x": {0: "N"}}, "training": kept}
        # Without it, weights are computed from constants.
        options |= {"do_constant_folding": exporter == "torchscript"}
    module.train(exporter != "torchscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), str(path), **options)
    module.eval()


def minibatch(
    size: int, classes: int, seed: int = 3
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return random images (N, 3, H, W) and classes (N,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((SAMPLES, 3, size, size)).astype(np.float32)
    return x, rng.integers(0, classes, SAMPLES).astype(np.int32)
