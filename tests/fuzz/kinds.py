"""The kinds of input, and the function that makes a trial of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tests.fuzz.outcome import COMPARED, Outcome, WrongResultError
from tests.fuzz.workers import Trial


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        module: in this package, with a function `trial`.
        summary: what varies, and with what results are compared.
    """

    module: str
    summary: str


KINDS = {
    "images": Kind("images", "folders of images of all formats, against the pixels as written"),
    "tables": Kind("tables", "CSV files, against float64 computations by hand"),
    "arrays": Kind("arrays", ".npz and .npy files, against NumPy"),
    "networks": Kind("networks", "random graphs of layers, against PyTorch in float64"),
    "network-files": Kind("network_files", "TOML networks, against counts of parameters"),
    "onnx": Kind("onnx_models", "ONNX models, against ONNX Runtime"),
    "flags": Kind("flags", "commands, flags and variables, against the documented exit codes"),
    "runs": Kind("run_directories", "damaged run directories, against the undamaged ones"),
}


def find_trial(kind: str, backend: str = "reference", precision: str | None = None) -> Trial:
    """Return the function that makes trials of a kind.

    Args:
        kind: a key of `KINDS`.
        backend, precision: with which networks are computed.
    """
    module = importlib.import_module(f"tests.fuzz.{KINDS[kind].module}")
    if kind == "networks":
        return partial(_network_trial, module.trial, backend, precision)
    trial: Trial = module.trial
    return trial


def _network_trial(
    trial: Callable[[int, str, str | None], str | None],
    backend: str,
    precision: str | None,
    random: np.random.Generator,
    folder: Path,
) -> Outcome:
    """Compare a random network; the function returns the reason of a failure."""
    found = trial(int(random.integers(2**62)), backend, precision)
    if found is not None:
        raise WrongResultError(found)
    return COMPARED
