"""Test accuracy on public photographs, over several seeds, next to published accuracies.

    python -m benchmarks.public fashion-mnist --networks model0 --epochs 6
    python -m benchmarks.public cifar10 --data cifar10:DIR --networks resnet20 --backend cuda

Debian's package ``dataset-fashion-mnist`` contains the images of Fashion-MNIST, and its README the
published accuracies, which others submitted and its authors did not test. The binary version of
CIFAR-10 must be downloaded from https://www.cs.toronto.edu/~kriz/cifar.html.

The recipes are SGD with momentum 0.9, batches of 128 images and a cosine schedule. They were not
tuned: no setting was chosen by an accuracy. The accuracy is that of the last epoch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.accuracy import Score
from benchmarks.machine import about
from benchmarks.progress import Progress
from benchmarks.tables import document, make_table, new_files
from dptrain.errors import UserError
from dptrain.experiments.sweep import mean_over_seeds
from dptrain.network import Network
from dptrain.network.files import get_network
from dptrain.network.layers import Shape
from dptrain.network.zoo.resnet import small_resnet
from dptrain.training.trainer import Trainer

CLASSES = 10


@dataclass(frozen=True)
class Recipe:
    """How a network is trained on a public data set.

    Attributes:
        epochs: number of epochs; the learning rate falls along a cosine.
        learning_rate: of SGD with momentum 0.9 and batches of 128 images.
        crop: largest random shift of training images in pixels. It is 0 for Fashion-MNIST: shifts
            insert zeros, which are grey in pixels from -1 to 1, and the background is black.
        published: accuracy of a similar network in percent, with its source.
    """

    epochs: int
    learning_rate: float
    crop: int
    published: str


@dataclass(frozen=True)
class PublicSet:
    """A public data set.

    Attributes:
        data: data specification of an installed package; None if no package contains the images.
        advice: how to get the images.
        shape: (C, H, W) of the images.
        recipes: by network.
    """

    data: str | None
    advice: str
    shape: Shape
    recipes: dict[str, Recipe]


_CONVOLUTIONS = "87.6–93.9: 10 networks with two convolutions"
_RESIDUAL = "94.9: ResNet-18"
SETS = {
    "fashion-mnist": PublicSet(
        "mnist:/usr/share/datasets/fashion-mnist",
        "install Debian's package dataset-fashion-mnist, or state --data mnist:DIR", (1, 28, 28),
        {
            "model0": Recipe(20, 0.05, 0, _CONVOLUTIONS),
            "resnet8": Recipe(30, 0.1, 0, _RESIDUAL),
            "resnet20": Recipe(30, 0.1, 0, _RESIDUAL),
        },
    ),
    "cifar10": PublicSet(
        None,
        "download the binary version from https://www.cs.toronto.edu/~kriz/cifar.html, and state "
        "--data cifar10:DIR", (3, 32, 32),
        {
            "cifar": Recipe(100, 0.02, 0, "86: study D of docs/studies.md"),
            "resnet20": Recipe(164, 0.1, 4, "91.25: He et al. 2015, table 6"),
        },
    ),
}  # fmt: skip


def network_for(name: str, shape: Shape) -> Network:
    """Return a network of dptrain, or ``resnet8``: the form of ``resnet20`` with n = 1."""
    if name == "resnet8":
        return small_resnet(name, (1, 1, 1), (16, 32, 64), "fc", 1e-4, shape, CLASSES)
    return get_network(name, input_shape=None if name == "cifar" else shape, outputs=CLASSES)


def train(network: Network, data: str, recipe: Recipe, backend: str, seed: int) -> Score:
    """Train with a seed and return the test accuracy after the last epoch."""
    begin = time.perf_counter()
    trainer = Trainer(
        network, data, progress=False, backend=backend, epochs=recipe.epochs, seed=seed,
        batch_size=128, optimizer="sgd", momentum=0.9, learning_rate=recipe.learning_rate,
        schedule="cosine", crop=recipe.crop, flip=True, evaluate_every=0, baseline_steps=0,
    )  # fmt: skip
    trainer.fit()
    assert trainer.summary is not None
    return Score(float(trainer.summary["test_accuracy"]), time.perf_counter() - begin)


def row(network: Network, recipe: Recipe, scores: Sequence[Score]) -> tuple[str, ...]:
    """Return the row of a network, with the mean of at least three accuracies."""
    accuracies = [score.accuracy for score in scores]
    mean = mean_over_seeds(accuracies)
    return (
        network.name, f"{network.num_parameters:,}", str(recipe.epochs),
        " ".join(f"{100 * value:.2f}" for value in accuracies),
        f"{100 * mean.value:.2f} ± {100 * (mean.high - mean.value):.2f}",
        recipe.published, f"{np.median([score.seconds for score in scores]):.0f}",
    )  # fmt: skip


COLUMNS = (
    "network", "parameters", "epochs", "accuracies %", "mean ± 95% interval %", "published %",
    "seconds of a run",
)  # fmt: skip


def measure(
    chosen: PublicSet, networks: Sequence[str], data: str, epochs: int, backend: str, seeds: int
) -> dict[str, list[Any]]:
    """Train each network with every seed; return each row of the table and its scores.

    Args:
        chosen: the data set.
        networks: names of its recipes.
        data: data specification.
        epochs: number of epochs; 0 for that of each recipe.
        backend: implementation of the layers.
        seeds: number of seeds, which are 0, 1, ….
    """
    rows, progress = {}, Progress()
    try:
        for name in networks:
            recipe, network = chosen.recipes[name], network_for(name, chosen.shape)
            recipe = replace(recipe, epochs=epochs or recipe.epochs)
            scores = []
            for seed in range(seeds):
                progress.step(f"{name}, seed {seed}")
                scores.append(train(network, data, recipe, backend, seed))
                progress.print(f"{name}, seed {seed}: {scores[-1].accuracy:.2%}")
            rows[name] = [row(network, recipe, scores), scores]
    finally:
        progress.close()
    return rows


def data_of(name: str) -> str:
    """Return the data specification of an installed set; raise `UserError` if there is none."""
    chosen = SETS[name]
    if chosen.data and Path(chosen.data.partition(":")[2]).is_dir():
        return chosen.data
    raise UserError(f"{name} is not installed; {chosen.advice}")


def checked_networks(name: str, networks: str | None) -> list[str]:
    """Return the networks of a comma-separated list; raise `UserError` if one has no recipe."""
    recipes = SETS[name].recipes
    found = networks.split(",") if networks else list(recipes)
    if unknown := [network for network in found if network not in recipes]:
        raise UserError(f"no recipe of {unknown[0]!r} for {name}; expected {', '.join(recipes)}")
    return found


@click.command()
@click.argument("name", type=click.Choice(list(SETS)), metavar="|".join(SETS))
@click.option("--data", help="Data specification.  [default: where Debian's package installs it]")
@click.option("--networks", help="Comma-separated networks.  [default: all with a recipe]")
@click.option("--epochs", default=0, type=click.IntRange(0), help="[default: from the recipe]")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(3))
@click.option("--backend", default="numba", show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the result files.  [default: none]")  # fmt: skip
def main(name: str, networks: str | None, output: Path | None, **options: Any) -> None:
    """Print the test accuracy on a public data set next to published ones.

    Exit status: 0, or 2 for bad options or data.
    """
    try:
        options["data"] = options["data"] or data_of(name)
        found = measure(SETS[name], checked_networks(name, networks), **options)
    except UserError as error:
        print(f"benchmarks.public: {error}", file=sys.stderr)
        sys.exit(2)
    conditions = about(set=name, **options)
    text = document(
        "Accuracy on public data", conditions, "the settings were not tuned",
        [make_table(name, COLUMNS, tuple(line for line, _ in found.values()))],
    )  # fmt: skip
    click.echo(text)
    if output is not None:
        paths = new_files(output, f"public-{name}", str(conditions["date"]))
        listed = {network: [vars(s) for s in scores] for network, (_, scores) in found.items()}
        paths[0].write_text(json.dumps({"about": conditions, "scores": listed}, indent=1) + "\n")
        paths[1].write_text(text)


if __name__ == "__main__":
    main()
