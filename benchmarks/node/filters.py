"""Convolutions with any number of filters: time per multiply-add, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import dptrain
from benchmarks.batch import random_batch
from benchmarks.node.rounds import Entry, measure, quartiles
from benchmarks.node.session import Session
from benchmarks.node.workers.processes import Processes, load_results
from benchmarks.node.workers.running import Results, Runner
from dptrain.batch import Batch
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from dptrain.plan.lowering import Phase

SECTION = "filters"
COUNTS = (8, 12, 16, 20, 24, 32, 40, 48)
BATCH = 32
LAYERS: dict[str, tuple[str, Callable[[int], Network]]] = {
    "3×3, 3 channels, 32×32": ("conv1", lambda filters: _first(filters)),
    "3×3, 32 channels, 16×16": ("conv2", lambda filters: _second(filters, 3)),
    "5×5, 32 channels, 16×16": ("conv2", lambda filters: _second(filters, 5)),
}
"""The measured layer of each network, and the network by its number of filters."""
PHASES = (Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT)


def _first(filters: int) -> Network:
    layers = [Conv2d(filters, 3), ReLU(), MaxPool2d(2), Flatten(), Dense(10)]
    return Network((3, 32, 32), layers, name=f"first-{filters}")


def _second(filters: int, kernel: int) -> Network:
    layers = [
        Conv2d(32, 3), ReLU(), Conv2d(filters, kernel), ReLU(), MaxPool2d(2), Flatten(), Dense(10)
    ]  # fmt: skip
    return Network((3, 16, 16), layers, name=f"second-{kernel}-{filters}")


def next_multiple(filters: int) -> int:
    """Return the next multiple of 16."""
    return -(-filters // 16) * 16


def stage_runner(spec: dict[str, Any]) -> Runner:
    """Return training steps whose stages are timed."""
    layer, make = LAYERS[spec["layer"]]
    network = make(spec["filters"])
    x, y = random_batch(network, spec["batch"])
    replica = dptrain.make_replica(network, batch_size=len(x), threads=spec["threads"])
    stages = {
        stage.index: stage.phase.value
        for stage in replica.plan.stages
        if layer in stage.group.split("+") and stage.phase in PHASES
    }
    flops = {stages[s.index]: s.flops for s in replica.plan.stages if s.index in stages}
    times: dict[str, list[int]] = {phase: [] for phase in stages.values()}
    clock = time.monotonic_ns

    def step() -> None:
        replica.load(Batch.of(x, y))
        last = clock()

        def note(index: int) -> None:
            nonlocal last
            now = clock()
            if index in stages:
                times[stages[index]].append(now - last)
            last = now

        replica.run(note)

    def details() -> dict[str, Any]:
        medians = {phase: float(np.median(values)) for phase, values in times.items() if values}
        for values in times.values():
            values.clear()
        return {"ns": medians, "flops": flops}

    def check() -> dict[str, Any]:
        loss = replica.forward_backward(x, y)
        gradients = {name: np.array(value) for name, value in replica.gradients.items()}
        return {"loss": np.array(loss), **gradients}

    return Runner(step, check, details=details)


def torch_gradients(spec: dict[str, Any]) -> Runner:
    """Return PyTorch's loss and gradients of the same network; it is not timed."""
    import torch

    from benchmarks.programs.own_programs import initial
    from benchmarks.programs.torch_network import LOSSES, parameter_names, torch_network

    _, make = LAYERS[spec["layer"]]
    network = make(spec["filters"])
    x, y = random_batch(network, spec["batch"])
    modules = torch_network(network, initial(network))

    def check() -> dict[str, Any]:
        loss = LOSSES[network.loss.targets](modules(torch.from_numpy(x)), torch.from_numpy(y))
        gradients = torch.autograd.grad(loss, list(modules.parameters()))
        named = zip(parameter_names(network), gradients, strict=True)
        return {"loss": loss.detach().numpy(), **{n: g.numpy() for n, g in named}}

    return Runner(check, check, facts={"torch": torch.__version__})


def _flips(layer: str, filters: int) -> list[Results] | None:
    from benchmarks.kinks import gradient_flips

    _, make = LAYERS[layer]
    return gradient_flips(make(filters), BATCH)


def measure_filters(session: Session) -> None:
    """Measure each layer with every number of filters, all in the same rounds."""
    session.begin(SECTION)
    counts = COUNTS if not session.settings.quick else (12, 16)
    with Processes(session.settings.cores[:1]) as processes:
        for layer in LAYERS:
            if not session.in_time(f"filters of {layer}"):
                continue
            session.progress.step(f"filters: building {layer}")
            # A process each, so that the memory of one program does not depend on the others.
            teams = {filters: processes.single(1) for filters in counts}
            torch = processes.single(1)
            entries = {}
            for filters, team in teams.items():
                spec = {"layer": layer, "filters": filters, "batch": BATCH, "threads": 1}
                ours, theirs = (processes.temporary_file(".npz") for _ in range(2))
                team.build(str(filters), "dptrain stages", spec, ours)
                if session.build(torch, str(filters), "PyTorch gradients", spec, theirs):
                    case = f"gradients of {layer}, {filters} filters"
                    if not session.compare(
                        case, load_results(ours), theirs, "PyTorch",
                        partial(_flips, layer, filters),
                    ):  # fmt: skip
                        continue
                entries[str(filters)] = Entry(team, str(filters))
            session.progress.step(f"filters: measuring {layer}")
            _measure_layer(session, layer, entries)
            for team in (*teams.values(), torch):
                processes.stop(team)


def _measure_layer(session: Session, layer: str, entries: dict[str, Entry]) -> None:
    """Measure in rounds, and store the time per multiply-add of each phase."""
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(session.settings.rounds):
        # One round each, because the stages' times are collected after each.
        measure(entries, rounds=1, block_s=session.settings.block_s / 2)
        for name, entry in entries.items():
            [details] = entry.team.details(entry.key)
            for phase, time_ns in details["ns"].items():
                per_product = time_ns / (details["flops"][phase] / 2)
                found.setdefault((int(name), phase), []).append(per_product)
    for (filters, phase), values in found.items():
        session.rows[SECTION].append({
            "layer": layer, "filters": filters, "phase": phase, "batch": BATCH,
            "ns_per_product": float(np.median(values)), "quartiles": quartiles(values),
            "rounds_ns": values,
        })  # fmt: skip
