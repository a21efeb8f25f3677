"""The sections of a run on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks.batch import random_batch
from benchmarks.gpu import precision as precision_module
from benchmarks.gpu import ranks
from benchmarks.gpu.cases import GpuRun, measure_case
from benchmarks.gpu.compiling import Request, compiling, known_networks
from benchmarks.gpu.data import IMAGES, bare_step_us, generated_images, images_file, train_epochs
from benchmarks.gpu.streaming import (
    DECODED,
    FILES,
    MEMORY_MAPPED,
    STREAMED,
    image_files,
    measure_stream,
    streamed_files,
)
from benchmarks.outside import OUTSIDE, PERCEPTRON, find_network
from benchmarks.report import OURS, PRECISIONS
from benchmarks.session import Cases, release_memory
from benchmarks.timing import Series
from dptrain.network import Network

FAST = ("tf32", "bf16")
SET = ("model0", "model1", "model2", "cifar", "solar")
CASES: Mapping[str, Cases] = {
    "training": Cases(SET, (32, 256, 2048), FAST, (32,)),
    "shapes": Cases((*OUTSIDE, PERCEPTRON), (32, 512), FAST, (32,)),
    # ResNet-50 needs ``--networks resnet50 --batches 64``.
    "residual": Cases(("resnet20", "resnet18-cifar"), (128, 1024), PRECISIONS),
    "fp32": Cases(("model2", "cifar", "vgg"), (32, 256)),
    "precision": Cases(("model2", "cifar", "vgg"), (32, 256)),
    "inference": Cases(
        ("model0", "cifar", "solar", "lenet5", "vgg", "strided"), (1, 8, 32, 128, 1024, 2048),
        PRECISIONS, (1, 32, 1024),
    ),
    "data": Cases(("cifar",), (32, 128, 1024), FAST),
    "ranks": Cases(("model0", "cifar"), (32, 1024), ("tf32",)),
}  # fmt: skip
"""Cases by section."""

QUICK: Mapping[str, Cases] = {
    "training": Cases(SET, (32,), FAST),
    "shapes": Cases(("vgg", "strided", "perceptron"), (32,), FAST),
    "residual": Cases(("resnet20",), (128,), FAST),
    "fp32": Cases(("cifar",), (32,)),
    "precision": Cases(("cifar",), (32,)),
    "inference": Cases(("model0", "cifar", "vgg"), (1, 32), FAST),
    "data": Cases(("cifar",), (128,), ("bf16",)),
    "ranks": Cases(("model0",), (32,), ("tf32",)),
}
"""Cases of a quick run."""

TRAINING = ("training", "shapes", "residual", "fp32")


def cases_of(run: GpuRun, section: str) -> Cases:
    """Return the cases of a section."""
    settings = run.session.settings
    return (QUICK if settings.quick else CASES)[section].replaced(settings)


def _each(cases: Cases) -> Iterator[tuple[Network, int]]:
    for network in map(find_network, cases.networks):
        for batch_size in cases.batches:
            yield network, batch_size


def prepare(run: GpuRun) -> None:
    """Compute the references of all training steps while other processes compile their kernels."""
    found: dict[tuple[str, int, str], Network] = {}
    for section in TRAINING:
        cases = cases_of(run, section)
        for network, n in _each(cases) if section in run.session.settings.sections else ():
            found |= {(network.name, n, precision): network for precision in cases.precisions}
    known = known_networks(found.values())
    steps = [
        Request(name, backend, n, precision)
        for name, n, precision in found for backend in run.machine.backends if name in known
    ]  # fmt: skip
    with compiling(steps):
        for (_, n, precision), network in found.items() if run.exact is not None else ():
            assert run.exact is not None
            run.exact.of(network, n, precision)


def train(run: GpuRun, section: str) -> None:
    """Check and time training steps of all programs."""
    cases = cases_of(run, section)
    for network, n in _each(cases):
        compiled = n in cases.compiled
        builds = run.training_builds(network, n, cases.precisions, compiled=compiled)
        measure_case(run.session, section, network, n, builds)


def infer(run: GpuRun) -> None:
    """Check and time inference."""
    cases = cases_of(run, "inference")
    for network, n in _each(cases):
        compiled = n in cases.compiled
        builds = run.inference_builds(network, n, cases.precisions, compiled=compiled)
        measure_case(run.session, "inference", network, n, builds)


def measure_errors(run: GpuRun) -> None:
    """Measure the errors of fp32 in each layer with weights."""
    session, machine = run.session, run.machine
    for network, n in _each(cases_of(run, "precision")) if run.exact is not None else ():
        for name, layer in precision_module.layer_networks(network):
            with session.reported(f"errors of {network.name} {name}, batch {n}"):
                assert run.exact is not None
                expected = run.exact.of(layer, n, precision_module.PRECISION)
                found = {
                    f"{OURS} {backend}": precision_module.our_results(layer, backend, n)
                    for backend in machine.backends
                }
                if machine.timed_torch:
                    batch = random_batch(layer, n)
                    found["PyTorch"] = precision_module.torch_results(layer, *batch)
                for row in precision_module.errors(expected, found):
                    session.add("precision", None, network=network.name, batch=n, layer=name, **row)
            release_memory()
        session.save(session.report)


def train_on_images(run: GpuRun) -> None:
    """Time epochs of training on augmented images, with the first of the backends."""
    cases = cases_of(run, "data")
    for network in map(find_network, cases.networks):
        with images_file(network, IMAGES) as data:
            for n in cases.batches:
                for precision in cases.precisions:
                    _train_on_cached_images(run, network, data, precision, n)
        for source, write, count in ((MEMORY_MAPPED, streamed_files, STREAMED),
                                     (FILES, image_files, DECODED)):  # fmt: skip
            with write(network, count) as data:
                for n in cases.batches:
                    for precision in cases.precisions:
                        with run.session.reported(f"{source} images, batch {n}, {precision}"):
                            backend = run.machine.backends[0]
                            facts = measure_stream(network, data, backend, precision, n, source)
                            series = Series.of(facts.pop("us"))
                            run.session.add("streams", series, source=source, **facts)
                        release_memory()
                run.session.save(run.session.report)


def _train_on_cached_images(
    run: GpuRun, network: Network, data: str, precision: str, n: int
) -> None:
    session, backend = run.session, run.machine.backends[0]
    case = f"images of {network.name}, batch {n}, {precision}"

    def add(program: str, us: tuple[float, ...], gpus: int = 1, **facts: float) -> None:
        session.add(
            "data", Series.of(us), network=network.name, batch=n, precision=precision, gpus=gpus,
            program=program, **facts,
        )  # fmt: skip

    with session.reported(case):
        us = train_epochs(network, data, backend, precision, n)
        bare = bare_step_us(network, backend, precision, n)
        add(f"{OURS} {backend}", us, bare_ms=bare / 1e3)
    release_memory()
    if run.machine.timed_torch:
        from benchmarks.gpu.peers.data_peers import AugmentedSteps
        from benchmarks.gpu.peers.theirs import modes_for

        images, labels = generated_images(network, IMAGES)
        for mode in modes_for(network, precision, compiled=False):
            with session.reported(f"{case}, PyTorch {mode.name}", ours=False):
                if mode.graph:
                    steps = AugmentedSteps(network, images, labels, n, mode)
                    add(f"PyTorch {mode.name.partition(' ')[2]}", steps.epochs_us())
    for gpus in ranks.counts(run.machine.gpus)[1:]:
        with session.reported(f"{case} on each of {gpus} GPUs"):
            us = ranks.launch_epochs(network.name, gpus, n, precision, data)
            (bare,) = ranks.launch_steps([(network.name, n)], gpus, precision)
            add(f"{OURS} cuda", us, gpus, bare_ms=bare / 1e3)
    session.save(session.report)


def measure_ranks(run: GpuRun) -> None:
    """Time `dptrain train` on one GPU, and with PyTorch on several."""
    cases, machine = cases_of(run, "ranks"), run.machine
    pairs = [(name, n) for name in cases.networks for n in cases.batches]
    # One launch on one GPU shows how close training comes to the step alone.
    launches = run.session.settings.launches if machine.gpus > 1 else 1
    for gpus in ranks.counts(machine.gpus):
        with_torch = machine.timed_torch and machine.gpus > 1
        ranks.measure_ranks(
            run.session, pairs, gpus, cases.precisions[0], launches=launches, with_torch=with_torch
        )
        run.session.save(run.session.report)


SECTIONS: Mapping[str, Callable[[GpuRun], None]] = {
    **{name: partial(train, section=name) for name in TRAINING},
    "precision": measure_errors,
    "inference": infer,
    "data": train_on_images,
    "ranks": measure_ranks,
}
