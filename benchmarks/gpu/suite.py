"""Run the sections of the benchmark: first check results, then time programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import dptrain
from benchmarks.batch import random_batch
from benchmarks.gpu import ranks
from benchmarks.gpu.clock import BLOCKS, Program
from benchmarks.gpu.compiling import StepCase, compiling, known_networks
from benchmarks.gpu.data import (
    IMAGES,
    DataResult,
    bare_step_us,
    generated_images,
    images_file,
    train_epochs,
)
from benchmarks.gpu.inference import BuildInference, Judge, measure_inference, without_dropout
from benchmarks.gpu.machine import Machine, about
from benchmarks.gpu.ours import Step
from benchmarks.gpu.precision import (
    PRECISION,
    layer_errors,
    layer_networks,
    our_results,
    torch_results,
)
from benchmarks.gpu.report import Checked, Results
from benchmarks.gpu.stages import (
    LayerRow,
    StageResult,
    layer_rows,
    measure_stages,
    study_runs,
    unfused,
)
from benchmarks.gpu.streaming import (
    DECODED,
    FILES,
    MEMORY_MAPPED,
    STREAMED,
    image_files,
    measure_stream,
    streamed_files,
)
from benchmarks.gpu.training import (
    PRECISIONS,
    Build,
    measure_case,
    reason,
    release_memory,
)
from benchmarks.outside import OUTSIDE, PERCEPTRON, find_network
from benchmarks.progress import Progress
from dptrain.network import Dropout, Network

if TYPE_CHECKING:
    # Needs PyTorch.
    from benchmarks.check import Array, Expected

SECTIONS = (
    "check",
    "training",
    "shapes",
    "residual",
    "precision",
    "inference",
    "data",
    "stages",
    "layers",
    "ranks",
)
STUDY = ("model2", "model-large")
"""Networks of the comparison of layers."""


@dataclass(frozen=True)
class Cases:
    """Cases of a section that has its own.

    Attributes:
        networks, batches, precisions: names and sizes.
        compiled: batch sizes that also run with torch.compile.
    """

    networks: tuple[str, ...]
    batches: tuple[int, ...]
    precisions: tuple[str, ...]
    compiled: tuple[int, ...]

    def replaced(
        self,
        networks: tuple[str, ...],
        batches: tuple[int, ...],
        precisions: tuple[str, ...],
        compiled: tuple[int, ...] | None,
    ) -> Cases:
        """Return these cases with the values of the command line, if they are not empty."""
        return Cases(
            networks or self.networks, batches or self.batches, precisions or self.precisions,
            self.compiled if compiled is None else compiled,
        )  # fmt: skip


INFERENCE = Cases(
    ("model0", "cifar", "solar", "lenet5", "vgg", "strided"), (1, 8, 32, 128, 1024, 2048),
    PRECISIONS, (1, 32, 1024),
)  # fmt: skip
"""Cases of inference: networks of the benchmark set and some outside it."""

SHAPES = Cases((*OUTSIDE, PERCEPTRON.name), (32, 512), ("tf32", "bf16"), (32,))
"""Cases of training outside the benchmark set. `FP32` has those of the third precision."""

RESIDUAL = Cases(("resnet20", "resnet18-cifar"), (128, 1024), PRECISIONS, ())
"""Cases with residual connections. ResNet-50 needs ``--networks resnet50 --batches 64``."""

QUICK_SHAPES = Cases(("vgg", "strided", "perceptron"), (32,), ("tf32", "bf16"), ())

FP32 = Cases(("model2", "cifar", "vgg"), (32, 256), (PRECISION,), ())
"""Cases of errors and speed of fp32."""

QUICK_FP32 = Cases(("cifar",), (32,), (PRECISION,), ())

DATA = Cases(("cifar",), (32, 128, 1024), ("tf32", "bf16"), ())
"""Cases of training on images."""

QUICK_DATA = Cases(("cifar",), (128,), ("bf16",), ())

QUICK_INFERENCE = Cases(("model0", "cifar", "vgg"), (1, 32), ("tf32", "bf16"), ())


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        networks, sections, batches, precisions: names and sizes.
        compiled: batch sizes that also run with torch.compile.
        blocks: number of blocks of each program.
        stage_batches: batch sizes of stages and layers.
        rank_networks, rank_batches: networks on several GPUs, and samples per GPU.
        launches: launches of each job with several ranks.
        shapes, residual, fp32, inference, data: cases of these sections.
    """

    networks: tuple[str, ...] = ("model0", "model1", "model2", "cifar", "solar")
    sections: tuple[str, ...] = SECTIONS
    batches: tuple[int, ...] = (32, 256, 2048)
    precisions: tuple[str, ...] = ("tf32", "bf16")
    compiled: tuple[int, ...] = (32,)
    blocks: int = BLOCKS
    stage_batches: tuple[int, ...] = (32, 2048)
    rank_networks: tuple[str, ...] = ("model0", "cifar")
    rank_batches: tuple[int, ...] = (32, 1024)
    launches: int = 3
    shapes: Cases = SHAPES
    residual: Cases = RESIDUAL
    fp32: Cases = FP32
    inference: Cases = INFERENCE
    data: Cases = DATA

    @property
    def training(self) -> Cases:
        """Cases of the section training."""
        return Cases(self.networks, self.batches, self.precisions, self.compiled)


GROSS_ERROR = 8.0
"""A mode of PyTorch is excluded if its error exceeds the allowed error by this factor, because it
then computes something else. Smaller differences come from rounding."""

Save = Callable[[Results], None]


def run(settings: Settings, machine: Machine, progress: Progress, save: Save) -> Results:
    """Run every section, and call `save` after each case so that no result is lost.

    A wrong result ends the run before anything is timed (see `Results.right`).
    """
    results = Results(about(
        machine,
        blocks=f"{settings.blocks} of each program, alternating, of 3 to 100 steps",
        launches=settings.launches,
        **{"torch.compile": f"at batch {', '.join(map(str, settings.compiled))}"
           if settings.compiled else "not measured"},
    ))  # fmt: skip
    sections = _Run(settings, machine, progress, save, results)
    sections.check()
    if not results.right:
        return results
    if {"stages", "training"} & set(settings.sections):
        results.limits = machine.limits(settings.precisions)
    by_name = {
        "training": lambda: sections.train(settings.training),
        "shapes": lambda: sections.train(settings.shapes),
        "residual": lambda: sections.train(settings.residual),
        "precision": sections.fp32,
        "inference": sections.infer,
        "data": sections.data,
        "stages": sections.stages,
        "layers": sections.layers,
        "ranks": sections.ranks,
    }
    for name, section in by_name.items():
        if name in settings.sections:
            section()
    return results


class _Exact:
    """Reference results of PyTorch in float64, computed once for each network and batch size.

    The errors that rounding causes are computed for each precision.
    """

    def __init__(self, device: str, progress: Progress) -> None:
        self._device, self._progress = device, progress
        self._exact: dict[tuple[str, int], Mapping[str, Array]] = {}
        self._cached: dict[tuple[str, int, str], Expected] = {}

    def of(self, network: Network, batch_size: int, precision: str) -> Expected:
        """Return the reference results and the allowed errors of a precision."""
        from benchmarks.check import expect
        from benchmarks.gpu.check import OPERAND
        from benchmarks.programs.own_programs import initial

        key = network.name, batch_size, precision
        if key not in self._cached:
            self._progress.step(f"reference of {network.name}, batch {batch_size}, {precision}")
            x, y = random_batch(network, batch_size)
            parameters = {k: np.asarray(v, np.float64) for k, v in initial(network).items()}
            self._cached[key] = expected = expect(
                network, parameters, x.astype(np.float64), y, operand=OPERAND[precision],
                device=self._device, exact=self._exact.get(key[:2]),
            )  # fmt: skip
            self._exact[key[:2]] = expected.exact
            release_memory()
        return self._cached[key]


class _Run:
    """The sections of a run and their shared state."""

    def __init__(
        self, settings: Settings, machine: Machine, progress: Progress, save: Save, results: Results
    ) -> None:
        self.settings, self.machine, self.progress = settings, machine, progress
        self.save, self.results = save, results
        self.networks = [find_network(name) for name in settings.networks]
        self.exact = None if machine.torch is None else _Exact(machine.torch, progress)

    @contextmanager
    def _reported(self, case: str) -> Iterator[None]:
        """Show what is measured, and record an error instead of raising it."""
        self.progress.step(case)
        try:
            yield
        except Exception as error:
            self.results.failed[case] = reason(error)
        release_memory()

    def check(self) -> None:
        """Check every program of dptrain that will be timed."""
        if self.exact is None:
            return
        checked = list(self._checked())
        known = known_networks(network for network, _, _ in checked)
        steps = [
            StepCase(network.name, n, backend, precision)
            for network, n, precision in checked
            for backend in self.machine.backends
            if network.name in known
        ]
        with compiling(steps):
            # The references first, which need no kernels.
            for case in checked:
                self.exact.of(*case)
            for case in checked:
                self._check_case(*case)

    def _check_case(self, network: Network, n: int, precision: str) -> None:
        from benchmarks.gpu.check import check_step

        assert self.exact is not None
        expected = self.exact.of(network, n, precision)
        for backend in self.machine.backends:
            with self._reported(f"check of {network.name}, batch {n}, {backend} {precision}"):
                found = check_step(network, Step(network, backend, precision, n), expected)
                self.results.checks += [Checked(backend, precision, check) for check in found]

    def _checked(self) -> Iterator[tuple[Network, int, str]]:
        """Yield the cases of the selected sections. Tests check training on several ranks."""
        settings, sections = self.settings, set(self.settings.sections)
        cases: dict[tuple[str, int, str], Network] = {}
        if sections & {"check", "training", "stages"}:
            for network in self.networks:
                for n in settings.batches:
                    cases |= {(network.name, n, p): network for p in settings.precisions}
        for section, own in (("shapes", settings.shapes), ("residual", settings.residual),
                             ("precision", settings.fp32),
                             ("data", settings.data)):  # fmt: skip
            for network in map(find_network, own.networks if section in sections else ()):
                for n in own.batches:
                    cases |= {(network.name, n, p): network for p in own.precisions}
        if "layers" in sections:
            for network in map(dptrain.get_network, STUDY):
                for form in (network, unfused(network)):
                    for n in settings.stage_batches:
                        cases.setdefault((form.name, n, settings.precisions[0]), form)
        for (_, n, precision), network in cases.items():
            yield network, n, precision

    def train(self, cases: Cases) -> None:
        """Time the training steps of all programs."""
        ours = [(b, p) for b in self.machine.backends for p in cases.precisions]
        for network in map(find_network, cases.networks):
            for n in cases.batches:
                with self._reported(f"training of {network.name}, batch {n}"):
                    theirs: dict[str, Build] = {}
                    if self.exact is not None and self.machine.timed_torch:
                        theirs = torch_builds(network, n, cases, self.exact, self.progress)
                    case = measure_case(network, n, ours, theirs, self.settings.blocks)
                    self.results.cases.append(case)
                self.save(self.results)

    def fp32(self) -> None:
        """Measure the errors of fp32 in each layer with weights, then its speed."""
        cases = self.settings.fp32
        for network in map(find_network, cases.networks):
            for n in cases.batches:
                for name, layer in layer_networks(network):
                    with self._reported(f"errors of {network.name} {name}, batch {n}"):
                        self._measure_errors(network, n, name, layer)
            self.save(self.results)
        self.train(cases)

    def _measure_errors(self, network: Network, n: int, name: str, layer: Network) -> None:
        if self.exact is None:
            return
        expected = self.exact.of(layer, n, PRECISION)
        ours = {backend: our_results(layer, backend, n) for backend in self.machine.backends}
        theirs = torch_results(layer, *random_batch(layer, n)) if self.machine.timed_torch else None
        self.results.errors += layer_errors(network.name, n, name, expected, ours, theirs)

    def infer(self) -> None:
        """Check and time inference."""
        cases = self.settings.inference
        for network in map(find_network, cases.networks):
            for n in cases.batches:
                for precision in cases.precisions:
                    with self._reported(f"inference of {network.name}, batch {n}, {precision}"):
                        self._infer(network, n, precision, compiled=n in cases.compiled)
                self.save(self.results)

    def _infer(self, network: Network, n: int, precision: str, *, compiled: bool) -> None:
        judge: Judge = lambda name, output: None  # noqa: E731 - nothing to compare with
        theirs: dict[str, BuildInference] = {}
        if self.exact is not None:
            judge = self._judge_inference(network, n, precision)
            if self.machine.timed_torch:
                from benchmarks.gpu.peers.inference_peers import peer_builds

                x, _ = random_batch(network, n)
                theirs = peer_builds(network, x, precision, compiled=compiled)
        self.results.inference.append(
            measure_inference(
                network, n, precision, self.machine.backends, theirs, judge, self.settings.blocks
            )
        )

    def _judge_inference(self, network: Network, n: int, precision: str) -> Judge:
        """Return the check of outputs: dptrain's are recorded, wrong ones of peers excluded."""
        from benchmarks.check import judge

        assert self.exact is not None
        expected = self.exact.of(without_dropout(network), n, precision)

        def check(name: str, output: NDArray[Any]) -> None:
            exact = expected.exact["output"]
            found = judge(network.name, n, {"output": output.reshape(exact.shape)}, expected)
            ours = name in self.machine.backends
            if ours:
                self.results.checks.append(Checked(name, f"{precision} inference", found))
            if not found.error <= found.allowed * (1.0 if ours else GROSS_ERROR):
                raise ArithmeticError(f"the relative error of the output is {found.error:.1e}")

        return check

    def data(self) -> None:
        """Time epochs of training on augmented images, with the first of the backends."""
        cases, backend = self.settings.data, self.machine.backends[0]
        for network in map(find_network, cases.networks):
            with images_file(network, IMAGES) as data:
                for n in cases.batches:
                    for precision in cases.precisions:
                        case = f"images of {network.name}, batch {n}, {precision}"
                        with self._reported(case):
                            self._train_on_images(network, data, backend, precision, n)
                        for gpus in ranks.counts(self.machine.gpus)[1:]:
                            with self._reported(f"{case} on each of {gpus} GPUs"):
                                self._train_on_images_by_ranks(network, data, precision, n, gpus)
                        self.save(self.results)

        for source in (MEMORY_MAPPED, FILES):
            self._stream_images(source)

    def _stream_images(self, source: str) -> None:
        cases, backend = self.settings.data, self.machine.backends[0]
        write, count = streamed_files, STREAMED
        if source == FILES:
            write, count = image_files, DECODED
        for network in map(find_network, cases.networks):
            with write(network, count) as data:
                for n in cases.batches:
                    for precision in cases.precisions:
                        with self._reported(f"{source} images, batch {n}, {precision}"):
                            found = measure_stream(network, data, backend, precision, n, source)
                            self.results.streams.append(found)
                            release_memory()
                        self.save(self.results)

    def _train_on_images(
        self, network: Network, data: str, backend: str, precision: str, n: int
    ) -> None:
        us = train_epochs(network, data, backend, precision, n)
        bare = bare_step_us(network, backend, precision, n)
        release_memory()
        theirs: dict[str, tuple[float, ...]] = {}
        if self.machine.timed_torch:
            from benchmarks.gpu.peers.data_peers import AugmentedSteps
            from benchmarks.gpu.peers.theirs import modes_for

            images, labels = generated_images(network, IMAGES)
            for mode in modes_for(network, precision, compiled=False):
                if mode.graph:
                    steps = AugmentedSteps(network, images, labels, n, mode)
                    theirs[mode.name] = steps.epochs_us()
        self.results.data.append(DataResult(network.name, n, precision, backend, us, bare, theirs))

    def _train_on_images_by_ranks(
        self, network: Network, data: str, precision: str, n: int, gpus: int
    ) -> None:
        us = ranks.launch_epochs(network.name, gpus, n, precision, data)
        case = ranks.RankResult(network.name, gpus, n, {}, [])
        (bare,) = ranks.launch_steps([case], gpus, precision)
        self.results.data.append(
            DataResult(network.name, n, precision, "cuda", us, bare, {}, gpus)
        )  # fmt: skip

    def stages(self) -> None:
        """Time the stages of all steps."""
        for network in self.networks:
            for n in self.settings.stage_batches:
                for precision in self.settings.precisions:
                    for backend in self.machine.backends:
                        with self._reported(
                            f"stages of {network.name}, batch {n}, {backend} {precision}"
                        ):
                            self.results.stages += measure_stages(network, backend, precision, n)
            self.save(self.results)

    def layers(self) -> None:
        """Compare layers, in the first of the precisions."""
        for name in STUDY:
            for n in self.settings.stage_batches:
                self.results.layers += self._layers(dptrain.get_network(name), n)
                self.save(self.results)

    def _layers(self, network: Network, n: int) -> list[LayerRow]:
        """Time each layer alone, and each group of fused layers."""
        precision = self.settings.precisions[0]
        alone, runs = study_runs(network)
        split: list[StageResult] = []
        fused: list[StageResult] = []
        theirs: dict[tuple[str, str], float] = {}
        for backend in self.machine.backends:
            with self._reported(f"layers of {network.name}, batch {n}, {backend} {precision}"):
                split += measure_stages(unfused(network), backend, precision, n)
                fused += measure_stages(network, backend, precision, n)
        if self.machine.timed_torch:
            from benchmarks.gpu.peers.torch_layers import torch_layer_times

            with self._reported(f"layers of {network.name}, batch {n}, PyTorch {precision}"):
                theirs = torch_layer_times(network, n, precision)
        return [*layer_rows(split, theirs, alone), *layer_rows(fused, {}, runs)]

    def ranks(self) -> None:
        """Time `dptrain train` on one GPU, and with PyTorch on several."""
        settings = self.settings
        cases = [(name, n) for name in settings.rank_networks for n in settings.rank_batches]
        # One launch on one GPU shows how close training comes to the step alone.
        launches = settings.launches if self.machine.gpus > 1 else 1
        for count in ranks.counts(self.machine.gpus):
            found, failed = ranks.measure_ranks(
                cases, count, settings.precisions[0], launches=launches,
                with_torch=self.machine.timed_torch and self.machine.gpus > 1,
                progress=self.progress,
            )  # fmt: skip
            self.results.ranks += found
            self.results.failed.update(failed)
            self.save(self.results)


def torch_builds(
    network: Network, batch_size: int, cases: Cases, exact: _Exact, progress: Progress
) -> dict[str, Build]:
    """Return the functions that build PyTorch's programs, by mode."""
    from benchmarks.check import judge
    from benchmarks.gpu.peers.theirs import GPUMode, TorchProgram, modes_for

    x, y = random_batch(network, batch_size)
    # PyTorch draws other dropout masks, so results with dropout cannot be compared.
    drops = any(isinstance(node.layer, Dropout) for node in network.nodes)

    def build(mode: GPUMode) -> tuple[Program, int]:
        progress.step(f"PyTorch {mode.name} of {network.name}, batch {batch_size}")
        program = TorchProgram(network, x, y, mode)
        if not drops:
            expected = exact.of(network, batch_size, mode.precision)
            found = judge(network.name, batch_size, program.results(), expected)
            if not found.error <= GROSS_ERROR * found.allowed:
                raise ArithmeticError(
                    f"the relative error of {found.quantity} is {found.error:.1e}"
                )
        return program.program, program.memory_bytes

    modes = [
        mode
        for precision in cases.precisions
        for mode in modes_for(network, precision, compiled=batch_size in cases.compiled)
    ]
    return {mode.name: partial(build, mode) for mode in modes}
