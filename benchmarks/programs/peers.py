"""Libraries other than PyTorch that dptrain is compared with, if they are installed.

They run on one core: their threads, which they start when they are loaded, inherit the binding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch import dropout_factors
from benchmarks.coarse_check import require_agreement
from benchmarks.kinks import update_flips
from benchmarks.programs.own_programs import LEARNING_RATE, first_step
from benchmarks.timing import Program, one_core
from dptrain.network import Network

Arrays = Mapping[str, NDArray[Any]]
Programs = tuple[dict[str, Program], dict[str, str]]
"""Programs by name, and the reasons why others are missing."""


def training_peers(
    network: Network, x: NDArray[Any], y: NDArray[Any], ours: Arrays, case: str
) -> Programs:
    """Return checked training steps of JAX.

    Args:
        network: the network.
        x, y: the batch.
        ours: loss and updates of dptrain's first step.
        case: names network and batch size in an error message.

    Raises:
        WrongResultError: a program computes something else.
    """

    def jax() -> Program:
        from benchmarks.programs.jax_programs import jax_training

        checked = jax_training(network, x, y, dropout_factors(network, len(x)))
        require_agreement(f"{case}, JAX", ours, first_step(checked), "JAX",
                          partial(update_flips, network, len(x)))  # fmt: skip
        return partial(jax_training(network, x, y).step, LEARNING_RATE)

    return _build({"JAX": jax})


def inference_peers(network: Network, x: NDArray[Any], ours: Arrays, case: str) -> Programs:
    """Return checked inference passes of ONNX Runtime and OpenVINO.

    Args:
        network: the network.
        x: the batch.
        ours: dptrain's outputs.
        case: names network and batch size in an error message.

    Raises:
        WrongResultError: a program computes something else.
    """

    def build(name: str, function: str) -> Program:
        from benchmarks.programs import onnx_programs

        program: Program = getattr(onnx_programs, function)(network, x)
        found = {"output": np.array(program())}
        require_agreement(f"{case}, {name}", ours, found, name)
        return program

    names = {"ONNX Runtime": "onnxruntime_inference", "OpenVINO": "openvino_inference"}
    return _build({name: partial(build, name, function) for name, function in names.items()})


def _build(builders: Mapping[str, Callable[[], Program]]) -> Programs:
    programs, missing = dict[str, Program](), dict[str, str]()
    for name, build in builders.items():
        try:
            with one_core():
                programs[name] = build()
        except ImportError as error:
            missing[name] = str(error)
    return programs, missing
