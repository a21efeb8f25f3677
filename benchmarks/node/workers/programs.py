"""Programs by name, which worker processes build.

A specification is a dictionary of plain values. `session` belongs to the process and survives from
program to program; it holds what a process can start only once, such as MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch import dropout_factors, random_batch
from benchmarks.node.workers.running import Results, Runner
from benchmarks.outside import find_network
from benchmarks.programs.own_programs import (
    LEARNING_RATE,
    dptrain_inference,
    dptrain_training,
    first_step,
)
from dptrain.network import Network

Spec = dict[str, Any]
Session = dict[str, Any]


def build(program: str, spec: Spec, session: Session) -> Runner:
    """Return the program called `program`.

    Raises:
        MissingError, ImportError, UserError: it cannot run here.
    """
    return PROGRAMS[program](spec, session)


def _case(spec: Spec) -> tuple[Network, NDArray[np.float32], NDArray[Any]]:
    """Return the network and the batch of a specification."""
    network = find_network(spec["network"])
    return network, *random_batch(network, spec["batch"])


def _dptrain_training(spec: Spec, session: Session) -> Runner:
    training = dptrain_training(*_case(spec), spec["threads"])
    return Runner(lambda: training.step(LEARNING_RATE), lambda: first_step(training))


def _dptrain_inference(spec: Spec, session: Session) -> Runner:
    network, x, _ = _case(spec)
    run = dptrain_inference(network, x, spec["threads"])
    return Runner(run, lambda: {"output": np.array(run())})


def _torch_mode(spec: Spec) -> tuple[Any, Any]:
    """Return PyTorch with the threads of a specification, and its mode."""
    import torch

    from benchmarks.machine import keep_freed_memory
    from benchmarks.programs.torch_programs import MODES

    torch.set_num_threads(spec["threads"])
    keep_freed_memory()
    return torch, next(mode for mode in MODES if mode.name == spec["mode"])


def _torch_training(spec: Spec, session: Session) -> Runner:
    torch, mode = _torch_mode(spec)
    from benchmarks.programs.torch_programs import torch_training

    network, x, y = _case(spec)
    training = torch_training(network, x, y, mode)

    def check() -> Results:
        return first_step(torch_training(network, x, y, mode, dropout_factors(network, len(x))))

    return Runner(lambda: training.step(LEARNING_RATE), check, facts={"torch": torch.__version__})


def _torch_inference(spec: Spec, session: Session) -> Runner:
    torch, mode = _torch_mode(spec)
    from benchmarks.programs.torch_programs import torch_inference

    network, x, _ = _case(spec)
    run = torch_inference(network, x, mode)
    return Runner(run, lambda: {"output": run().numpy().copy()}, facts={"torch": torch.__version__})


def _jax_training(spec: Spec, session: Session) -> Runner:
    import jax

    from benchmarks.programs.jax_programs import jax_training

    network, x, y = _case(spec)
    training = jax_training(network, x, y)

    def check() -> Results:
        return first_step(jax_training(network, x, y, dropout_factors(network, len(x))))

    return Runner(lambda: training.step(LEARNING_RATE), check, facts={"jax": jax.__version__})


def _onnx_inference(library: str) -> Callable[[Spec, Session], Runner]:
    def make(spec: Spec, session: Session) -> Runner:
        import importlib

        from benchmarks.programs import onnx_programs

        version = importlib.import_module(library).__version__
        network, x, _ = _case(spec)
        run = getattr(onnx_programs, f"{library}_inference")(network, x, spec["threads"])
        return Runner(run, lambda: {"output": np.array(run())}, facts={library: version})

    return make


def _rank_program(name: str) -> Callable[[Spec, Session], Runner]:
    def make(spec: Spec, session: Session) -> Runner:
        from benchmarks.node.workers import rank_programs

        runner: Runner = getattr(rank_programs, name)(spec, session)
        return runner

    return make


PROGRAMS: dict[str, Callable[[Spec, Session], Runner]] = {
    "dptrain training": _dptrain_training,
    "dptrain inference": _dptrain_inference,
    "dptrain engine": _rank_program("engine"),
    "dptrain copy": _rank_program("meeting_copy"),
    "dptrain sum": _rank_program("gradient_sum"),
    "MPI all-reduce": _rank_program("all_reduce"),
    "PyTorch training": _torch_training,
    "PyTorch inference": _torch_inference,
    "PyTorch DDP": _rank_program("ddp_training"),
    "PyTorch all-reduce": _rank_program("gloo_all_reduce"),
    "JAX training": _jax_training,
    "ONNX Runtime inference": _onnx_inference("onnxruntime"),
    "OpenVINO inference": _onnx_inference("openvino"),
}
