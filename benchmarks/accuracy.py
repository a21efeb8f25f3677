"""Test accuracy over several seeds, next to published accuracies and to PyTorch's.

    python -m benchmarks.accuracy fashion-mnist --networks model0 --epochs 6
    python -m benchmarks.accuracy cifar10 --data cifar10:DIR --networks resnet20 --backend cuda
    python -m benchmarks.accuracy shapes --pytorch --backend cuda --precision bf16

Debian's package ``dataset-fashion-mnist`` contains the images of Fashion-MNIST, and its README the
published accuracies, which others submitted and its authors did not test. The binary version of
CIFAR-10 must be downloaded. ``accuracy.toml`` has the recipes: SGD with momentum 0.9, batches of
128 images, a cosine schedule, mirrored images. The accuracy is that of the last epoch.

PyTorch starts from dptrain's initial parameters of a seed, and uses the same recipe. Orders and
changes of images are drawn by each program itself. The accuracies of several seeds agree if the
means differ by no more than the larger of the two standard deviations.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.machine import about
from benchmarks.progress import Progress
from benchmarks.tables import Table, document, new_files
from dptrain.data import Samples, open_data
from dptrain.errors import UserError
from dptrain.experiments.sweep_results import mean_over_seeds
from dptrain.network import Network
from dptrain.network.files import get_network
from dptrain.network.layers import Shape
from dptrain.network.zoo.resnet import small_resnet
from dptrain.toml import read_toml
from dptrain.training.schedules import Schedule
from dptrain.training.trainer import Trainer

FILE = Path(__file__).with_suffix(".toml")
SETS = ("fashion-mnist", "cifar10", "shapes")
CLASSES, BATCH, MOMENTUM, TEST_BATCH = 10, 128, 0.9, 1000
COLUMNS = (
    "network", "program", "parameters", "epochs", "accuracies %", "mean ± 95% interval %",
    "published %", "seconds of a run",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How both programs train.

    Attributes:
        epochs, learning_rate: of SGD; the rate falls along a cosine.
        crop: pixels by which a crop moves from the centre; outside of an image are zeros.
        published: accuracy of a similar network in percent, with its source.
        backend, precision: of dptrain. PyTorch uses the same precision, on a GPU for ``cuda``
            and ``cudnn``. None for the backend's default.
    """

    epochs: int
    learning_rate: float
    crop: int
    published: str
    backend: str
    precision: str | None = None

    @property
    def on_gpu(self) -> bool:
        """True if both programs run on a GPU."""
        return self.backend in ("cuda", "cudnn")


@dataclass(frozen=True)
class Score:
    """The result of one run: test accuracy, and seconds of training and evaluation."""

    accuracy: float
    seconds: float


def arrays(samples: Samples, network: Network, count: int = 0) -> tuple[Any, Any]:
    """Return inputs float32 (n, C, H, W) and labels int64 (n,) of the first samples."""
    n = min(count, len(samples)) if count else len(samples)
    x = np.zeros((n, *network.input_shape), np.float32)
    y = np.zeros(n, np.int32)
    samples.read(np.arange(n), x, y)
    return x, y.astype(np.int64)


def train_ours(network: Network, data: Any, recipe: Recipe, seed: int) -> Score:
    """Train with dptrain."""
    begin = time.perf_counter()
    trainer = Trainer(
        network, data, progress=False, backend=recipe.backend, precision=recipe.precision,
        batch_size=BATCH, epochs=recipe.epochs, crop=recipe.crop, flip=True, optimizer="sgd",
        momentum=MOMENTUM, schedule="cosine", learning_rate=recipe.learning_rate, seed=seed,
        evaluate_every=0, baseline_steps=0,
    )  # fmt: skip
    trainer.fit()
    summary = trainer.summary
    assert summary is not None
    return Score(float(summary["test_accuracy"]), time.perf_counter() - begin)


def train_torch(
    network: Network, train: tuple[Any, Any], test: tuple[Any, Any], recipe: Recipe, seed: int
) -> Score:
    """Train with PyTorch; images are in memory of the device, and are changed there."""
    import torch
    from torch.nn import functional

    from benchmarks.gpu.peers.theirs import set_arithmetic
    from benchmarks.programs.torch_network import TorchNetwork
    from dptrain.network.initial import initial_parameters

    begin = time.perf_counter()
    torch.manual_seed(seed)
    device = torch.device("cuda" if recipe.on_gpu else "cpu")
    set_arithmetic(recipe.precision or "fp32")
    x, y = (torch.from_numpy(a).to(device) for a in train)
    initial = initial_parameters(network, seed)
    start = {name: np.asarray(value, np.float32) for name, value in initial.items()}
    modules = TorchNetwork(network, start).to(device)
    modules = modules.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    decays = [parameter.weight_decay for parameter in network.parameters]
    groups = [
        {"params": [weight], "weight_decay": decay}
        for weight, decay in zip(modules.parameters(), decays, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=MOMENTUM)
    steps = math.ceil(len(x) / BATCH)
    schedule = Schedule(recipe.learning_rate, "cosine", total_steps=steps * recipe.epochs)
    bf16 = torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16")
    for step in range(steps * recipe.epochs):
        if step % steps == 0:
            order = torch.randperm(len(x), device=device)
        start_of_batch = step % steps * BATCH
        index = order[start_of_batch : start_of_batch + BATCH]
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        with bf16:
            loss = functional.cross_entropy(modules(_changed(x[index], recipe.crop)), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct = 0
    modules.eval()
    with torch.inference_mode(), bf16:
        for first in range(0, len(test[0]), TEST_BATCH):
            batch = torch.from_numpy(test[0][first : first + TEST_BATCH]).to(device)
            found = modules(batch).argmax(1).cpu().numpy()
            correct += int((found == test[1][first : first + TEST_BATCH]).sum())
    return Score(correct / len(test[0]), time.perf_counter() - begin)


def _changed(x: Any, crop: int) -> Any:
    """Return random crops (n, C, H, W) of padded images, half of them mirrored."""
    import torch
    from torch.nn import functional

    n, channels, height, width = x.shape
    padded = functional.pad(x, (crop,) * 4)
    top, left = torch.randint(0, 2 * crop + 1, (2, n, 1), device=x.device)
    mirrored = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.arange(width, device=x.device)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    rows = top + torch.arange(height, device=x.device)
    where = torch.arange(n, device=x.device)[:, None, None, None]
    maps = torch.arange(channels, device=x.device)[None, :, None, None]
    return padded[where, maps, rows[:, None, :, None], columns[:, None, None, :]]


@cache
def sets() -> Mapping[str, Mapping[str, Any]]:
    """Return the data sets of the file by name."""
    return read_toml(FILE)


def network_for(name: str, shape: Shape) -> Network:
    """Return a network of dptrain, or ``resnet8``: the form of ``resnet20`` with n = 1."""
    if name == "resnet8":
        return small_resnet(name, (1, 1, 1), (16, 32, 64), "fc", 1e-4, shape, CLASSES)
    return get_network(name, input_shape=None if name == "cifar" else shape, outputs=CLASSES)


def recipes_of(name: str, networks: str | None, epochs: int, **how: Any) -> dict[str, Recipe]:
    """Return the recipes of a comma-separated list of networks; all of a set by default.

    Raises:
        UserError: the set has no recipe of a network.
    """
    known = sets()[name]["networks"]
    chosen = networks.split(",") if networks else list(known)
    if unknown := [network for network in chosen if network not in known]:
        raise UserError(f"no recipe of {unknown[0]!r} for {name}; expected {', '.join(known)}")
    return {
        each: Recipe(**{**known[each], "epochs": epochs or known[each]["epochs"]}, **how)
        for each in chosen
    }


def data_of(name: str) -> str:
    """Return the data specification of an installed set; raise `UserError` if there is none."""
    data = str(sets()[name].get("data", ""))
    kind, _, folder = data.partition(":")
    if kind and (not folder or Path(folder).is_dir()):
        return data
    raise UserError(f"{name} is not installed; {sets()[name]['advice']}")


def row(network: Network, program: str, recipe: Recipe, scores: Sequence[Score]) -> tuple[str, ...]:
    """Return the row of a network, with the mean of at least three accuracies."""
    accuracies = [score.accuracy for score in scores]
    mean = mean_over_seeds(accuracies)
    return (
        network.name, program, f"{network.num_parameters:,}", str(recipe.epochs),
        " ".join(f"{100 * value:.2f}" for value in accuracies),
        f"{100 * mean.value:.2f} ± {100 * (mean.high - mean.value):.2f}",
        recipe.published, f"{np.median([score.seconds for score in scores]):.0f}",
    )  # fmt: skip


def agree(ours: Sequence[Score], theirs: Sequence[Score]) -> bool:
    """Return whether the means differ by no more than the larger standard deviation."""
    values = [np.array([score.accuracy for score in found]) for found in (ours, theirs)]
    difference = abs(values[0].mean() - values[1].mean())
    return bool(difference <= max(v.std(ddof=1) for v in values))


def measure(
    network: Network, data: str, recipe: Recipe, *, seeds: int, samples: int, pytorch: bool
) -> dict[str, list[Score]]:
    """Train with every seed, by both programs in turn if `pytorch`; return scores by program.

    Args:
        network: the network.
        data: data specification.
        recipe: how it is trained.
        seeds: number of seeds, which are 0, 1, ….
        samples: training samples that are used, the first ones; 0 for all.
        pytorch: also train with PyTorch.
    """
    scores: dict[str, list[Score]] = {"dptrain": [], **({"PyTorch": []} if pytorch else {})}
    dataset, progress = open_data(data, network), Progress()
    train, test = (arrays(part, network, count) if pytorch or samples else (None, None)
                   for part, count in ((dataset.train, samples), (dataset.test, 0)))  # fmt: skip
    try:
        for seed in range(seeds):
            for program, found in scores.items():
                progress.step(f"{network.name}, {program}, seed {seed}")
                if program == "PyTorch":
                    found.append(train_torch(network, train, test, recipe, seed))
                else:
                    ours = (train, test) if samples else dataset
                    found.append(train_ours(network, ours, recipe, seed))
                progress.print(f"{network.name}, {program}, seed {seed}: {found[-1].accuracy:.2%}")
    finally:
        progress.close()
    return scores


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


@click.command()
@click.argument("name", type=click.Choice(SETS), metavar="|".join(SETS))
@click.option("--data", help="Data specification.  [default: of the installed set]")
@click.option("--networks", help="Comma-separated networks.  [default: all with a recipe]")
@click.option("--epochs", default=0, type=click.IntRange(0), help="[default: from the recipe]")
@click.option("--samples", default=0, help="Training samples.  [default: all]")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(3))
@click.option("--backend", default="numba", show_default=True)
@click.option("--precision", help="[default: the backend's]")
@click.option("--pytorch", is_flag=True, help="Also train with PyTorch.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the result files.  [default: none]")  # fmt: skip
def main(name: str, output: Path | None, **options: Any) -> None:
    """Print test accuracies next to published ones, and to PyTorch's.

    Exit status: 0; 1 if PyTorch's accuracy differs, 2 for bad options or data.
    """
    how = {key: options[key] for key in ("networks", "epochs", "backend", "precision")}
    given = {key: options[key] for key in ("seeds", "samples", "pytorch")}
    rows, listed, verdicts, on_gpu = [], dict[str, Any](), list[bool](), False
    try:
        options["data"] = options["data"] or data_of(name)
        for title, recipe in recipes_of(name, **how).items():
            network = network_for(title, tuple(sets()[name]["shape"]))
            scores = measure(network, options["data"], recipe, **given)
            rows += [row(network, program, recipe, each) for program, each in scores.items()]
            listed[title] = {k: [vars(score) for score in each] for k, each in scores.items()}
            verdicts += [agree(*scores.values())] if options["pytorch"] else []
            on_gpu = recipe.on_gpu
    except UserError as error:
        print(f"benchmarks.accuracy: {error}", file=sys.stderr)
        sys.exit(2)
    conditions = about(gpu=_gpu_name() if on_gpu else "none", set=name, **options)
    verdict = "the settings were not tuned"
    if verdicts:
        verdict += f"\n{sum(verdicts)} of {len(verdicts)} networks agree with PyTorch"
    text = document("Accuracy", conditions, verdict, [Table(name, COLUMNS, tuple(rows))])
    click.echo(text)
    if output is not None:
        paths = new_files(output, f"accuracy-{name}", str(conditions["date"]))
        content = {"about": conditions, "scores": listed}
        paths[0].write_text(json.dumps(content, indent=1) + "\n")
        paths[1].write_text(text)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
