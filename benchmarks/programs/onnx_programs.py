"""Inference passes of ONNX Runtime and OpenVINO, from one ONNX file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.programs.own_programs import initial
from dptrain.network import Network

Inference = Callable[[], NDArray[Any]]


@contextmanager
def onnx_file(network: Network, batch_size: int) -> Iterator[Path]:
    """Write the network with dptrain's initial parameters to a temporary ONNX file."""
    from benchmarks.programs.onnx_network import write_onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        write_onnx(network, initial(network), batch_size, path)
        yield path


def onnxruntime_inference(network: Network, x: NDArray[np.float32], threads: int = 1) -> Inference:
    """Return an inference pass of ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with onnx_file(network, len(x)) as path:
        session = onnxruntime.InferenceSession(
            os.fspath(path), options, providers=["CPUExecutionProvider"]
        )
    feeds = {"x": x}

    def run() -> NDArray[Any]:
        output: NDArray[Any] = session.run(None, feeds)[0]
        return output

    return run


def openvino_inference(network: Network, x: NDArray[np.float32], threads: int = 1) -> Inference:
    """Return an inference pass of OpenVINO on the CPU, in float32.

    By default OpenVINO computes in bfloat16 on processors that have it.
    """
    # With this package, importing openvino starts a process that sends usage statistics.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    core = openvino.Core()
    with onnx_file(network, len(x)) as path:
        compiled = core.compile_model(
            core.read_model(os.fspath(path)),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": "f32",
                "PERFORMANCE_HINT": "LATENCY",
            },
        )
    request = compiled.create_infer_request()
    request.set_input_tensor(openvino.Tensor(x))

    def run() -> NDArray[Any]:
        request.infer()
        output: NDArray[Any] = request.get_output_tensor().data
        return output

    return run
