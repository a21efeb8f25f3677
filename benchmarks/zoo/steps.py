r"""Time training steps of published classifiers next to PyTorch, and append them to a file.

    python -m benchmarks zoo-steps --threads 2 --batch-size 8 'mobilenet*' convnext_tiny
    python -m benchmarks zoo-steps --backend cuda --precision bf16 --batch-size 64 --size 224

Each classifier of ``classifiers.csv`` that is read is exported to ONNX and trained as by ``dptrain
train --network FILE.onnx``. Its steps alternate in rounds with those of the module of torchvision
or timm with fused SGD with momentum: on a CPU eager and with ``channels_last``, on a GPU with
``channels_last`` as one CUDA graph, under autocast for bf16. The losses of the first step must
agree. With one thread CPU time counts, otherwise wall time. Install the extra ``zoo``.
"""

from __future__ import annotations

import csv
import fnmatch
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from benchmarks.gpu.clock import Program, Start
from benchmarks.machine import keep_freed_memory, load, versions
from benchmarks.report import OURS
from benchmarks.session import release_memory
from benchmarks.timing import measure, quotient
from benchmarks.zoo.__main__ import Row, read_rows
from benchmarks.zoo.sources import export, make_module
from dptrain.data.loading.sharding import epoch_order
from dptrain.measure.machine.environment import environment
from dptrain.training.baseline import open_loader
from dptrain.training.trainer import Trainer

if TYPE_CHECKING:
    from benchmarks.programs.torch_programs import Mode

FILE = Path(__file__).parents[1] / "results" / "zoo-steps.csv"
LEARNING_RATE, MOMENTUM = 1e-12, 0.9
LIMITS = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
"""Largest relative difference of the losses of the first step."""
PACKAGES = ("torch", "torchvision", "timm", "numba")
BATCHES = 4
"""Minibatches of the data set."""
WARM_UP = 40
"""Steps on a GPU before timing, in which steps are captured."""

Make = Callable[[int], float]
"""Makes a number of steps and returns the loss of the last one."""
LINE = (
    "{ratio} ({low} to {high}) {library} {network}: {samples/s} samples/s, PyTorch {peer} "
    "{peer samples/s}, first step {first step s} s, loss {loss}, load {load}"
)


@dataclass(frozen=True)
class Case:
    """How networks are trained; `block_s` is the time of a program in a round."""

    backend: str
    precision: str
    threads: int
    batch_size: int
    rounds: int
    block_s: float
    compiled: bool

    @property
    def is_gpu(self) -> bool:
        """Return whether PyTorch runs on a GPU."""
        return self.backend in ("cuda", "cudnn")

    def modes(self) -> Sequence[Mode]:
        """Return the modes of PyTorch."""
        from benchmarks.programs.torch_programs import Mode

        if not self.is_gpu:
            modes = [Mode("eager"), Mode("channels_last", channels_last=True)]
            return modes + [Mode("compile", compiled=True)] * self.compiled
        from benchmarks.gpu.peers.theirs import GPUMode

        given: dict[str, Any] = {"channels_last": True, "precision": self.precision}
        graph, compiled = GPUMode("graph", **given), GPUMode("compile", compiled=True, **given)
        return [graph] + [compiled] * self.compiled


def timed_us(clock: Callable[[], int], make: Make, _start: Start, steps: int) -> float:
    """Make steps and return their time in µs by a clock in ns."""
    begin = clock()
    make(steps)
    return (clock() - begin) / 1e3


def torch_steps(module: Any, x: Any, y: Any, mode: Mode, case: Case) -> Make:
    """Return the steps of a copy of a module on a batch (N, 3, H, W) with classes (N,)."""
    import torch
    from torch import nn

    torch.set_num_threads(case.threads)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if case.is_gpu else "cpu"
    module = deepcopy(module).to(device)
    for part in module.modules():
        # Exported files have no dropout, and batch normalisations use the minibatch's moments.
        part.train(isinstance(part, nn.modules.batchnorm._BatchNorm))
    for parameter in module.parameters():
        parameter.data = mode.layout(parameter.data)
    inputs = mode.layout(torch.from_numpy(x)).to(device)
    targets = torch.from_numpy(y).to(device)
    compute = mode.function(lambda a, b: nn.functional.cross_entropy(module(a), b))
    rule = torch.optim.SGD(module.parameters(), LEARNING_RATE, momentum=MOMENTUM, fused=True)
    loss: Any = None

    def step() -> None:
        nonlocal loss
        rule.zero_grad()
        loss = compute(inputs, targets)
        loss.backward()
        rule.step()

    start: Callable[[], object] = step
    if case.is_gpu:
        from benchmarks.gpu.peers.theirs import capture, set_arithmetic

        set_arithmetic(case.precision)
        start = capture(step)

    def make(steps: int) -> float:
        for _ in range(steps):
            start()
        return float(loss.detach())

    return make


@contextmanager
def own_steps(path: Path, x: Any, y: Any, case: Case) -> Iterator[Make]:
    """Yield the steps of dptrain, with the loader and the engine of training."""
    n = case.batch_size
    trainer = Trainer(
        str(path), (x, y, x[:n], y[:n]), progress=False, seed=0, epochs=10**6, validation=0,
        backend=case.backend, precision=case.precision, batch_size=n, threads=case.threads,
        optimizer="sgd", momentum=MOMENTUM, weight_decay=0.0, schedule="constant",
        learning_rate=LEARNING_RATE, evaluate_every=0, baseline_steps=0,
    )  # fmt: skip
    with trainer:
        job = trainer.job
        steps = range(job.spec.steps)
        with job.engine as engine, open_loader(job, steps, batch_size=n) as batches:

            def make(steps: int) -> float:
                results = []
                for _ in range(steps):
                    engine.step(batches, LEARNING_RATE)
                    results += engine.results()
                return [*results, *engine.results(wait=True)][-1].loss

            yield make


def time_steps(row: Row, size: int, case: Case, folder: Path) -> Row:
    """Return the results of a classifier as a row of the file.

    Raises:
        ArithmeticError: PyTorch computes another loss.
    """
    import torch

    path, rng = folder / f"{row['library']}-{row['name']}-{size}.onnx", np.random.default_rng(3)
    module, n = make_module(row["library"], row["name"], size), case.batch_size
    if not path.exists():
        export(module, path, size, "torchscript")
    x = rng.standard_normal((BATCHES * n, 3, size, size)).astype(np.float32)
    y = np.arange(len(x)) * 999 // (len(x) - 1)
    first = epoch_order(len(x), 0, 0)[:n]
    begin, by_cpu = time.perf_counter(), case.threads == 1 and not case.is_gpu
    timer = partial(timed_us, time.process_time_ns if by_cpu else time.perf_counter_ns)
    with own_steps(path, x, y, case) as own:
        loss, first_s = own(1), time.perf_counter() - begin
        programs = {OURS: Program(lambda: None, partial(timer, own))}
        for mode in case.modes():
            steps = torch_steps(module, x[first], y[first], mode, case)
            programs[mode.name] = Program(lambda: None, partial(timer, steps), "PyTorch")
            theirs = steps(1)
            if not abs(theirs - loss) <= LIMITS[case.precision] * abs(loss):
                raise ArithmeticError(f"the loss is {loss:.6g}, but {theirs:.6g} of {mode.name}")
        if case.is_gpu:
            own(WARM_UP)
        series = measure(programs, rounds=case.rounds, block_s=case.block_s)
    times = {name: each.medians for name, each in series.items()}
    ours = times.pop(OURS)
    best = min(times, key=lambda name: float(np.median(times[name])))
    ratio = quotient(times[best], ours)
    result = {
        "library": row["library"], "network": row["name"], "size": size,
        "backend": case.backend, "precision": case.precision, "threads": case.threads, "batch": n,
        "samples/s": f"{1e3 * n / np.median(ours):.4g}",
        "peer": best, "peer samples/s": f"{1e3 * n / np.median(times[best]):.4g}",
        "ratio": f"{ratio.value:.3f}", "low": f"{ratio.low:.3f}", "high": f"{ratio.high:.3f}",
        "first step s": f"{first_s:.1f}", "loss": f"{loss:.6g}",
        "machine": torch.cuda.get_device_name() if case.is_gpu else environment()["cpu"],
        "versions": " ".join(f"{k} {v}" for k, v in versions(*PACKAGES).items()),
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"), "load": load()[0],
    }  # fmt: skip
    return {name: str(value) for name, value in result.items()}


def append(row: Row, path: Path) -> None:
    """Append a row to a CSV file, which gets a head with the first one."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


@click.command(help=__doc__, epilog="See docs/developers/benchmarks.md.")
@click.option("--backend", default="numba", show_default=True, help="Backend of dptrain.")
@click.option("--precision", type=click.Choice(list(LIMITS)), default="fp32", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True)
@click.option("--size", type=click.IntRange(1), help="Height and width.  [default: of the list]")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--block-s", type=float, default=0.5, show_default=True,
              help="Time of a program in a round in s; it makes at least one step.")  # fmt: skip
@click.option("--compile", "compiled", is_flag=True, help="Also time torch.compile.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=FILE,
              help="File of the results.  [default: benchmarks/results/zoo-steps.csv]")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder that keeps exported files.  [default: none]")  # fmt: skip
@click.argument("names", nargs=-1)
def main(
    size: int | None, output: Path, folder: Path | None, names: tuple[str, ...], **given: Any
) -> None:
    """Time the classifiers whose names match NAMES, or all."""
    case, failed = Case(**given), 0
    keep_freed_memory()
    for row in read_rows():
        matches = not names or any(fnmatch.fnmatch(row["name"], each) for each in names)
        if row["read"] != "yes" or not matches:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            try:
                found = time_steps(row, size or int(row["size"]), case, folder or Path(temporary))
            except Exception as error:  # One network should not end the run.
                failed, text = failed + 1, f"{type(error).__name__}: {error}"
                click.echo(f"{row['library']} {row['name']}: {' '.join(text.split())[:200]}")
            else:
                append(found, output)
                click.echo(LINE.format_map(found))
        release_memory()
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
