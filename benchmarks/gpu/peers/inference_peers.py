"""Inference by PyTorch and ONNX Runtime on a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.clock import Build, Built, Program, Start, torch_timer
from benchmarks.gpu.peers.theirs import GPUMode, capture, modes_for, set_arithmetic
from benchmarks.programs.torch_programs import Mode
from dptrain.network import Network

RUNTIME_PROVIDERS = {"TensorRT": "TensorrtExecutionProvider", "ONNX Runtime":
                     "CUDAExecutionProvider"}  # fmt: skip
"""Providers of ONNX Runtime by the library that computes."""


def peer_builds(
    network: Network, x: NDArray[Any], precision: str, *, compiled: bool
) -> dict[str, Build]:
    """Return the functions that build the programs of a precision, by name."""
    builds: dict[str, Build] = {}
    for mode in modes_for(network, precision, compiled=compiled):
        name = f"{precision} PyTorch {mode.name.partition(' ')[2]}"
        builds[name] = partial(torch_inference, network, x, mode)
    for library, provider in RUNTIME_PROVIDERS.items():
        if precision != "bf16" and has_provider(provider):
            name = f"{precision} {library}"
            builds[name] = partial(runtime_inference, network, x, precision, provider)
    return builds


def torch_inference(network: Network, x: NDArray[Any], mode: GPUMode) -> Built:
    """Return PyTorch's pass. With bf16, weights and inputs are stored as bfloat16."""
    torch.backends.cudnn.benchmark = True
    set_arithmetic(mode.precision)
    modules = mode.network(network).eval().cuda()
    inputs = mode.layout(torch.from_numpy(x)).cuda()
    if mode.precision == "bf16":
        modules, inputs = modules.bfloat16(), inputs.bfloat16()
    compute = Mode.function(mode, modules, frozen=True)
    found: list[Tensor] = []

    def run() -> None:
        with torch.inference_mode():
            found[:] = [compute(inputs)]

    run()
    start: Start = capture(run) if mode.graph else run

    def timer(each: Start, steps: int) -> float:
        set_arithmetic(mode.precision)
        return torch_timer(each, steps)

    def output() -> NDArray[Any]:
        start()
        torch.cuda.synchronize()
        values: NDArray[Any] = found[0].double().cpu().numpy().reshape(len(x), -1)
        return values

    return Built(Program(start, timer), wait=torch.cuda.synchronize, output=output)


def has_provider(provider: str) -> bool:
    """Return whether ONNX Runtime is installed with a provider."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return False
    import onnxruntime

    return provider in onnxruntime.get_available_providers()


def runtime_inference(network: Network, x: NDArray[Any], precision: str, provider: str) -> Built:
    """Return ONNX Runtime's pass as a CUDA graph, on a batch in GPU memory."""
    import onnxruntime

    from benchmarks.programs.onnx_programs import onnx_file

    stream = torch.cuda.Stream()
    tensorrt = provider.startswith("Tensorrt")
    options = {
        "user_compute_stream": str(stream.cuda_stream),
        "trt_cuda_graph_enable" if tensorrt else "enable_cuda_graph": "1",
        **({} if tensorrt else {"use_tf32": str(int(precision != "fp32"))}),
    }
    with onnx_file(network, len(x)) as path:
        session = onnxruntime.InferenceSession(os.fspath(path), providers=[(provider, options)])
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"{provider} was not loaded; {session.get_providers()[0]} was")
    value = onnxruntime.OrtValue
    (result,) = session.get_outputs()
    output_value = value.ortvalue_from_shape_and_type(list(result.shape), "float32", "cuda", 0)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value.ortvalue_from_numpy(x, "cuda", 0))
    binding.bind_ortvalue_output(result.name, output_value)
    asynchronous = onnxruntime.RunOptions()
    asynchronous.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def start() -> None:
        session.run_with_iobinding(binding, asynchronous)

    for _ in range(3):  # The capture happens in one of the first passes.
        start()

    def output() -> NDArray[Any]:
        start()
        stream.synchronize()
        values: NDArray[Any] = output_value.numpy().reshape(len(x), -1)
        return values

    return Built(Program(start, _timer_of(stream)), wait=stream.synchronize, output=output)


def _timer_of(stream: Any) -> Callable[[Start, int], float]:
    def timer(start: Start, steps: int) -> float:
        with torch.cuda.stream(stream):
            return torch_timer(start, steps)

    return timer
