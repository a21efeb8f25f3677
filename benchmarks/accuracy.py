"""Compare the test accuracy of dptrain with PyTorch's: the same network, recipe and data.

    python -m benchmarks.accuracy --network resnet20 --epochs 8 --backend cuda --precision bf16

Both start from dptrain's initial parameters of a seed, and use SGD with momentum, the network's
weight decay, a cosine schedule, crops and mirrored images. Orders and changes of images are drawn
by each program itself. The test accuracies of several seeds agree if the means differ by no more
than the spread over seeds: the larger of the two standard deviations.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import about
from benchmarks.outside import find_network
from benchmarks.progress import Progress
from benchmarks.tables import Table, document, new_files
from dptrain.data import Dataset, Samples, open_data
from dptrain.errors import UserError
from dptrain.network import Network
from dptrain.training.schedules import Schedule
from dptrain.training.trainer import Trainer

CROP = 4
TEST_BATCH = 1000


@dataclass(frozen=True)
class Recipe:
    """How both programs train.

    Attributes:
        epochs, batch_size, learning_rate, momentum: of SGD; the rate falls along a cosine.
        backend, precision: of dptrain. PyTorch uses the same precision, on a GPU for ``cuda``
            and ``cudnn``. None for the backend's default.
        samples: training samples that are used, the first ones; 0 for all.
        crop: pixels by which a crop moves from the centre; outside of an image are zeros.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    backend: str
    precision: str | None
    samples: int = 0
    crop: int = CROP

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
        batch_size=recipe.batch_size, epochs=recipe.epochs, crop=recipe.crop, flip=True,
        optimizer="sgd", momentum=recipe.momentum, schedule="cosine",
        learning_rate=recipe.learning_rate, seed=seed, evaluate_every=0, baseline_steps=0,
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
    optimizer = torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)
    steps = math.ceil(len(x) / recipe.batch_size)
    schedule = Schedule(recipe.learning_rate, "cosine", total_steps=steps * recipe.epochs)
    bf16 = torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.precision == "bf16")
    for step in range(steps * recipe.epochs):
        if step % steps == 0:
            order = torch.randperm(len(x), device=device)
        start_of_batch = step % steps * recipe.batch_size
        index = order[start_of_batch : start_of_batch + recipe.batch_size]
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        with bf16:
            loss = functional.cross_entropy(modules(_changed(x[index])), y[index])
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


def _changed(x: Any) -> Any:
    """Return random crops (n, C, H, W) of padded images, half of them mirrored."""
    import torch
    from torch.nn import functional

    n, channels, height, width = x.shape
    padded = functional.pad(x, (CROP, CROP, CROP, CROP))
    top, left = torch.randint(0, 2 * CROP + 1, (2, n, 1), device=x.device)
    mirrored = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.arange(width, device=x.device)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    rows = top + torch.arange(height, device=x.device)
    where = torch.arange(n, device=x.device)[:, None, None, None]
    maps = torch.arange(channels, device=x.device)[None, :, None, None]
    return padded[where, maps, rows[:, None, :, None], columns[:, None, None, :]]


def compare(network: Network, dataset: Dataset, recipe: Recipe, seeds: int) -> dict[str, list[Any]]:
    """Train with every seed by both programs, in turn, and return their scores by program."""
    train = arrays(dataset.train, network, recipe.samples)
    test = arrays(dataset.test, network)
    scores: dict[str, list[Any]] = {"dptrain": [], "PyTorch": []}
    progress = Progress()
    try:
        for seed in range(seeds):
            progress.step(f"dptrain, seed {seed}")
            ours = (train, test) if recipe.samples else dataset
            scores["dptrain"].append(train_ours(network, ours, recipe, seed))
            progress.step(f"PyTorch, seed {seed}")
            scores["PyTorch"].append(train_torch(network, train, test, recipe, seed))
    finally:
        progress.close()
    return scores


def agree(scores: dict[str, list[Any]]) -> bool:
    """Return whether the means differ by no more than the larger standard deviation."""
    values = [np.array([s.accuracy for s in found]) for found in scores.values()]
    difference = abs(values[0].mean() - values[1].mean())
    return bool(difference <= max(v.std(ddof=1) for v in values))


def table(scores: dict[str, list[Any]]) -> Table:
    """Return the accuracies by seed, and their mean and standard deviation."""
    rows = []
    for name, found in scores.items():
        accuracy: NDArray[np.float64] = np.array([100 * s.accuracy for s in found])
        rows.append((
            name, " ".join(f"{a:.2f}" for a in accuracy),
            f"{accuracy.mean():.2f} ± {accuracy.std(ddof=1):.2f}",
            f"{np.median([s.seconds for s in found]):.1f}",
        ))  # fmt: skip
    columns = ("program", "accuracies %", "mean ± standard deviation %", "seconds of a run")
    return Table("Test accuracy", columns, tuple(rows))


def publish(
    kind: str, conditions: dict[str, Any], verdict: str, found: Table,
    scores: dict[str, list[Score]], output: Path | None,
) -> None:  # fmt: skip
    """Print a report of accuracies, and write it and the scores to new files of a folder."""
    text = document("Accuracy", conditions, verdict, [found])
    click.echo(text)
    if output is not None:
        paths = new_files(output, kind, str(conditions["date"]))
        listed = {name: [vars(s) for s in each] for name, each in scores.items()}
        paths[0].write_text(json.dumps({"about": conditions, "scores": listed}, indent=1) + "\n")
        paths[1].write_text(text)


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


@click.command()
@click.option("--network", default="resnet20", show_default=True, help="Network with class labels.")
@click.option("--data", default="shapes", show_default=True, help="Data specification.")
@click.option("--epochs", default=8, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=128, show_default=True, type=click.IntRange(1))
@click.option("--learning-rate", default=0.1, show_default=True)
@click.option("--momentum", default=0.9, show_default=True)
@click.option("--samples", default=0, help="Training samples.  [default: all]")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(2))
@click.option("--backend", default="numba", show_default=True)
@click.option("--precision", default="fp32", show_default=True)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the result files.  [default: none]")  # fmt: skip
def main(
    network: str, data: str, seeds: int, output: Path | None, **options: Any
) -> None:  # fmt: skip
    """Compare the test accuracy of dptrain with PyTorch's over several seeds.

    Exit status: 0 if they agree, 1 if they do not, 2 for bad options.
    """
    try:
        graph, recipe = find_network(network), Recipe(**options)
        scores = compare(graph, open_data(data, graph), recipe, seeds)
    except UserError as error:
        print(f"benchmarks.accuracy: {error}", file=sys.stderr)
        sys.exit(2)
    found, right = table(scores), agree(scores)
    verdict = "the accuracies agree" if right else "the accuracies differ"
    gpu = _gpu_name() if recipe.on_gpu else "none"
    conditions = about(gpu=gpu, network=network, data=data, seeds=seeds, **options)
    publish("accuracy", conditions, verdict, found, scores, output)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
