"""Study D's variants, trained: accuracy and time of a step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.compiling import Request
from benchmarks.studies.compiling import make
from benchmarks.studies.measuring import CPU, GPU, Context, Values, measurement, summary
from benchmarks.studies.networks import cifar_variants
from benchmarks.studies.step_parts import step_and_update
from dptrain import Trainer
from dptrain.data.sources.shapes import _TEST, _TRAIN, generate

BATCH = 128
RECIPE: dict[str, Any] = {
    "batch_size": BATCH, "optimizer": "sgd", "momentum": 0.0, "schedule": "constant", "crop": 4,
    "flip": True, "evaluate_every": 0, "baseline_steps": 0, "progress": False,
}  # fmt: skip
"""Study D's training, without its changes of colours, which `shapes` contains already."""

ROUNDS = 9
STEPS, SEEDS, RATE = 15_000, 2, 0.1

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def shapes_arrays(train: int, test: int) -> Arrays:
    """Return generated images with the shape of CIFAR-10, without their borders of 4 pixels."""
    x, y = generate(train, 0, _TRAIN)
    u, v = generate(test, 0, _TEST)
    return x[:, :, 4:28, 4:28].copy(), y, u[:, :, 4:28, 4:28].copy(), v


@measurement("variants-gpu", GPU)
def variants_on_gpu(context: Context) -> Values:
    """Train the variants for some thousand steps on a GPU, with two seeds."""
    data: Any = f"cifar10:{context.cifar10}" if context.cifar10 else shapes_arrays(20_000, 4_000)
    variants = cifar_variants()
    found: dict[str, Any] = {}
    for seed in range(SEEDS):
        for name, network in variants.items():
            if context.quick and name != "stride 5":
                continue
            trainer = Trainer(
                network, data, backend="cuda", threads=1, steps=STEPS, seed=seed,
                learning_rate=RATE, **RECIPE,
            )  # fmt: skip
            begin = time.perf_counter()
            trainer.fit()
            seconds = time.perf_counter() - begin
            scores = trainer.evaluate()
            assert trainer.summary is not None
            own = found.setdefault(name, {"accuracy": [], "loss": [], "step_ms": [], "fit_s": []})
            own["accuracy"].append(scores["accuracy"])
            own["loss"].append(scores["loss"])
            own["step_ms"].append(trainer.summary["step_ms"]["median"])
            own["fit_s"].append(seconds)
            context.say(
                f"seed {seed}, {name}: {scores['accuracy']:.3f}, {own['step_ms'][-1]:.2f} ms"
            )
    return {
        "data": "CIFAR-10" if context.cifar10 else "shapes", "steps": STEPS, "seeds": SEEDS,
        "batch": BATCH, "learning_rate": RATE, "threads": 1,
        "variants": {
            name: {
                **values,
                "accuracy_mean": float(np.mean(values["accuracy"])),
                "step": summary(values["step_ms"]),
            }
            for name, values in found.items()
        },
    }  # fmt: skip


@measurement("variant-steps", CPU)
def steps_on_cpu(context: Context) -> Values:
    """Time training steps of the variants: CPU time of one thread."""
    replicas = {
        name: make(Request(network.name, "numba", BATCH))
        for name, network in cifar_variants().items()
        if name == "stride 5" or not context.quick
    }
    times: dict[str, list[float]] = {name: [] for name in replicas}
    for _ in range(2 if context.quick else ROUNDS):
        for name, replica in replicas.items():
            times[name].append(step_and_update(replica, 3)[0])
    steps = {name: {**summary(own), "rounds_ms": own} for name, own in times.items()}
    context.say(", ".join(f"{name} {step['median']:.2f} ms" for name, step in steps.items()))
    return {"batch": BATCH, "variants": {name: {"step": step} for name, step in steps.items()}}
