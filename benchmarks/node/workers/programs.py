"""Programs by name, which worker processes build.

A specification is a dictionary of plain values. `session` belongs to the process and survives from
program to program; it holds what a process can start only once, such as MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.batch import dropout_factors, random_batch
from benchmarks.node.workers.running import Results, Runner
from benchmarks.outside import find_network
from benchmarks.programs.own_programs import (
    LEARNING_RATE,
    dptrain_inference,
    dptrain_training,
    first_step,
)

Spec = dict[str, Any]
Session = dict[str, Any]


def build(program: str, spec: Spec, session: Session) -> Runner:
    """Return the program called `program`.

    Raises:
        MissingError, ImportError, UserError: it cannot run here.
    """
    return PROGRAMS[program](spec, session)


def _dptrain_training(spec: Spec, session: Session) -> Runner:
    network = find_network(spec["network"])
    training = dptrain_training(network, *random_batch(network, spec["batch"]), spec["threads"])
    return Runner(lambda: training.step(LEARNING_RATE), lambda: first_step(training))


def _dptrain_inference(spec: Spec, session: Session) -> Runner:
    network = find_network(spec["network"])
    x, _ = random_batch(network, spec["batch"])
    run = dptrain_inference(network, x, spec["threads"])
    return Runner(run, lambda: {"output": np.array(run())})


def _torch_threads(spec: Spec) -> Any:
    import torch

    from benchmarks.machine import keep_freed_memory

    torch.set_num_threads(spec["threads"])
    if spec.get("keeps_memory", True):
        keep_freed_memory()
    return torch


def _torch_training(spec: Spec, session: Session) -> Runner:
    torch = _torch_threads(spec)
    from benchmarks.programs.torch_programs import MODES, torch_training

    network = find_network(spec["network"])
    x, y = random_batch(network, spec["batch"])
    mode = next(mode for mode in MODES if mode.name == spec["mode"])
    training = torch_training(network, x, y, mode)

    def check() -> Results:
        return first_step(torch_training(network, x, y, mode, dropout_factors(network, len(x))))

    return Runner(lambda: training.step(LEARNING_RATE), check, facts={"torch": torch.__version__})


def _torch_inference(spec: Spec, session: Session) -> Runner:
    torch = _torch_threads(spec)
    from benchmarks.programs.torch_programs import MODES, torch_inference

    network = find_network(spec["network"])
    x, _ = random_batch(network, spec["batch"])
    mode = next(mode for mode in MODES if mode.name == spec["mode"])
    run = torch_inference(network, x, mode)
    return Runner(run, lambda: {"output": run().numpy().copy()}, facts={"torch": torch.__version__})


def _jax_training(spec: Spec, session: Session) -> Runner:
    import jax

    from benchmarks.programs.jax_programs import jax_training

    network = find_network(spec["network"])
    x, y = random_batch(network, spec["batch"])
    training = jax_training(network, x, y)

    def check() -> Results:
        return first_step(jax_training(network, x, y, dropout_factors(network, len(x))))

    return Runner(lambda: training.step(LEARNING_RATE), check, facts={"jax": jax.__version__})


def _onnx_inference(library: str) -> Callable[[Spec, Session], Runner]:
    def make(spec: Spec, session: Session) -> Runner:
        import importlib

        from benchmarks.programs import onnx_programs

        version = importlib.import_module(library).__version__
        network = find_network(spec["network"])
        x, _ = random_batch(network, spec["batch"])
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
