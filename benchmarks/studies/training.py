"""Claims about training: batch sizes, activations, poolings, vanishing gradients, shifts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.studies.measuring import CPU, Context, Values, measurement, summary
from dptrain import Trainer
from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Flatten,
    Layer,
    MaxPool2d,
    Network,
    ReLU,
    Sigmoid,
    SumPool2d,
    Tanh,
)

PLAIN: dict[str, Any] = {
    "schedule": "constant", "evaluate_every": 0, "baseline_steps": 0, "validation": 0.0,
    "progress": False, "threads": 1,
}  # fmt: skip
SEEDS = 3
EQUAL_STEPS = 24
"""Steps after which batch sizes are compared per step: 8 epochs of the largest."""


def _fit(network: Network | str, data: Any, **settings: Any) -> tuple[Trainer, float]:
    """Train and return the trainer with the seconds of `fit`."""
    trainer = Trainer(network, data, **{**PLAIN, **settings})
    begin = time.process_time()
    trainer.fit()
    return trainer, time.process_time() - begin


@measurement("minibatches", CPU)
def minibatches(context: Context) -> Values:
    """Train model0 on digits with different batch sizes: loss, time, and time to an accuracy."""
    rows = []
    epochs = 2 if context.quick else 8
    sizes = (8, 32, 128, 512)
    for batch in sizes[:2] if context.quick else sizes:
        fixed = {"batch_size": batch, "learning_rate": 0.02, "momentum": 0.0, "crop": 0}
        trainer, _ = _fit("model0", "digits", epochs=epochs, **fixed)
        losses = trainer.history["train_loss"]
        goal: dict[str, Any] = {**fixed, "validation": 0.2, "evaluate_every": 1}
        equal, _ = _fit("model0", "digits", steps=EQUAL_STEPS, **fixed)
        to_goal, goal_s = _fit("model0", "digits", epochs=4 * epochs, until_accuracy=0.9, **goal)
        rows.append({
            "batch": batch, "losses": losses, "steps": trainer.step,
            "equal_steps_loss": equal.evaluate()["loss"], "equal_steps": EQUAL_STEPS,
            "goal_reached": to_goal.step < to_goal.job.spec.steps, "goal_seconds": goal_s,
        })  # fmt: skip
        context.say(f"batch {batch}: {losses[-1]:.3f}, 90% after {goal_s:.2f} s")
    return {"epochs": epochs, "learning_rate": 0.02, "rows": rows}


ROWS = 20_000
BATCHES = (100, 500, 1000)
MAP_BATCHES = (8, 64, 512)


@measurement("precision-by-batch", CPU)
def precision_by_batch(context: Context) -> Values:
    """Train a perceptron and the solar network with different batch sizes."""
    found: dict[str, Any] = {"perceptron": {}, "maps": {}}
    data, seeds = f"irradiance?samples={ROWS}", range(1 if context.quick else SEEDS)
    steps = 40 if context.quick else 400
    for batch in BATCHES:
        settings = {"batch_size": batch, "learning_rate": 0.001, "optimizer": "adam"}
        for length in ({"epochs": 2}, {"steps": steps}):
            name = f"batch {batch}, {' '.join(f'{n} {unit}' for unit, n in length.items())}"
            losses = [
                _fit("mlp-50", data, seed=seed, **settings, **length)[0].evaluate()["loss"]
                for seed in seeds
            ]
            found["perceptron"][name] = summary(losses)
            context.say(f"{name}: {np.median(losses):.4f}")
    for batch in MAP_BATCHES[2:] if context.quick else MAP_BATCHES:
        count = 512 if context.quick else 2048
        losses = [
            _fit(
                "solar", f"irradiance?samples={count}", batch_size=batch, epochs=1, seed=seed,
                threads=context.threads,
            )[0].evaluate()["loss"]
            for seed in seeds
        ]  # fmt: skip
        found["maps"][f"batch {batch}"] = {**summary(losses), "losses": losses}
        context.say(f"maps, batch {batch}: {np.median(losses):.4f}")
    return found


Digits = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
SCALE = 4


def digits() -> Digits:
    """Return the digits as grey images of 32×32 pixels: training and test."""
    with (files("dptrain.data.sources") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images = np.asarray(arrays["images"], np.float32)[:, None] / 16.0
        labels = np.asarray(arrays["labels"])
    large = images.repeat(SCALE, axis=2).repeat(SCALE, axis=3) - 0.3
    return large[:1400], labels[:1400], large[1400:], labels[1400:]


def network_with(
    activation: Layer, pooling: Sequence[Layer], name: str, stride: int = 1
) -> Network:
    """Return a network of two convolutions for the digits."""
    layers = [
        Conv2d(8, stride=stride), activation, *pooling,
        Conv2d(16, stride=stride), activation, *pooling,
        Flatten(), Dense(50), activation, Dense(10),
    ]  # fmt: skip
    return Network((1, 8 * SCALE, 8 * SCALE), layers, name=name)


NETWORKS: Mapping[str, Network] = {
    "max pooling, ReLU": network_with(ReLU(), [MaxPool2d(2)], "max"),
    "average pooling, ReLU": network_with(ReLU(), [AveragePool2d(2)], "average"),
    "sum pooling, ReLU": network_with(ReLU(), [SumPool2d(2)], "sum"),
    "max pooling, tanh": network_with(Tanh(), [MaxPool2d(2)], "tanh"),
    "max pooling, sigmoid": network_with(Sigmoid(), [MaxPool2d(2)], "sigmoid"),
    "stride 2 instead of pooling, ReLU": network_with(ReLU(), [], "strided", 2),
}
SHIFTS = (0, 2)
RATES = (0.01, 0.05, 0.2)
"""Learning rates; a network is compared at its best for a seed that is not compared."""
LAYER_SEEDS = 6


@measurement("layers-by-accuracy", CPU)
def layers_by_accuracy(context: Context) -> Values:
    """Train small networks on digits with different poolings and activations."""
    x, y, u, v = digits()
    found: dict[str, Any] = {}
    epochs, seeds = (1, 1) if context.quick else (6, LAYER_SEEDS)
    for name, network in NETWORKS.items():
        rates = RATES[1:2] if context.quick else RATES
        data = x, y, u, v
        tried = {r: _shifted_accuracies(network, data, r, 0, epochs)[0] for r in rates}
        best = max(tried, key=lambda rate: tried[rate])
        scores = [_shifted_accuracies(network, data, best, 1 + s, epochs) for s in range(seeds)]
        by_shift = [list(values) for values in zip(*scores, strict=True)]
        found[name] = {
            "rate": best,
            "accuracies": by_shift[0],
            "accuracy_mean": float(np.mean(by_shift[0])),
            "by_shift": {str(s): values for s, values in zip(SHIFTS, by_shift, strict=True)},
            "by_rate": {str(rate): accuracy for rate, accuracy in tried.items()},
        }
        context.say(f"{name}: {found[name]['accuracy_mean']:.3f}")
    return {"epochs": epochs, "seeds": seeds, "networks": found}


def _shifted_accuracies(
    network: Network, data: Digits, rate: float, seed: int, epochs: int
) -> list[float]:
    """Return the test accuracies after a training, for images shifted by `SHIFTS` pixels."""
    u, v = data[2:]
    try:
        trainer, _ = _fit(
            network, data, epochs=epochs, batch_size=32, learning_rate=rate, momentum=0.9,
            optimizer="sgd", seed=seed, crop=0, flip=False,
        )  # fmt: skip
    except dptrain.UserError:
        return [0.1] * len(SHIFTS)  # Diverged: as good as guessing.
    return [
        float(np.mean(trainer.predict(np.roll(u, (s, s), (2, 3))).argmax(axis=1) == v))
        for s in SHIFTS
    ]


DEPTH, WIDTH = 10, 64


@measurement("gradients", CPU)
def gradients(context: Context) -> Values:
    """Compare gradient norms of the first and the last hidden layer, ReLU against sigmoid."""
    found = {}
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((256, WIDTH)), rng.integers(0, 10, 256)
    for name, activation in (("ReLU", ReLU()), ("sigmoid", Sigmoid())):
        layers: list[Layer] = []
        for _ in range(DEPTH):
            layers += [Dense(WIDTH), activation]
        network = Network((WIDTH,), [*layers, Dense(10)], name=name.lower())
        replica = dptrain.make_replica(network, "reference", 256, precision="fp64")
        replica.forward_backward(x, y)
        norms = [
            float(np.linalg.norm(replica.gradients[f"dense{i}.weight"]))
            for i in range(1, DEPTH + 1)
        ]
        found[name] = {"norms": norms, "first_over_last": norms[0] / norms[-1]}
        context.say(f"{name}: {found[name]['first_over_last']:.2e}")
    return {"depth": DEPTH, "width": WIDTH, "activations": found}
