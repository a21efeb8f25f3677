"""`dptrain study variants`: trains, evaluates and times variants of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.experiments.case_runs import CaseRuns, work
from dptrain.experiments.display import CaseDisplay
from dptrain.experiments.ledger import (
    OUTPUT,
    Ledger,
    machine,
    read_ledger,
    write_csv,
)
from dptrain.experiments.study_tables import study_report
from dptrain.experiments.tables import duration
from dptrain.experiments.variants import Variant, list_variants
from dptrain.measure.machine.environment import environment
from dptrain.network.adaptation import adaptation_lines
from dptrain.network.layers import Conv2d
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase
from dptrain.training.engines import FIRST_TIMED
from dptrain.training.job import open_network
from dptrain.training.settings import Settings

NAME = "variants"
"""Name of the files."""

MANY_STEPS = 100_000
"""Number of steps for which the training time is estimated."""


@dataclass(frozen=True)
class KindTime:
    """Time of all stages of one kind of operation.

    Attributes:
        kind: layers that are computed together, ``conv+relu+pool``, or ``loss`` or ``update``.
        forward_ms, backward_ms: sums over stages of the median over steps of the mean over ranks.
        share, cumulative_share: share of the forward pass; the slowest kind is first.
        forward_bytes: bytes that a forward pass reads and writes.
    """

    kind: str
    forward_ms: float
    backward_ms: float
    share: float
    cumulative_share: float
    forward_bytes: int


@dataclass(frozen=True)
class VariantResult:
    """Result of a variant.

    Attributes:
        variant: name of the variant.
        changes: values by axis.
        possible: True if the network exists and its training was completed.
        why: the reason if it is not possible.
        parameters: number of parameters of the network.
        memory_bytes: memory of a rank according to the plan.
        steps: number of training steps.
        accuracy: accuracy on the test data; None for regression.
        test_loss: mean loss on the test data.
        step_ms, step_q1_ms, step_q3_ms: median and quartiles of the time per step.
        samples_per_s: throughput of all ranks.
        conv_forward_ms, conv_forward_share: time of the stages with a convolution in a forward
            pass, as in `KindTime`, and their share of the forward pass.
        conv_step_ms, conv_step_share: the same for a whole step, with backward and update.
        training_s: number of steps × time per step.
        many_steps_s: `MANY_STEPS` × time per step.
        kinds: times by kind of operation, the slowest first.
    """

    variant: str
    changes: Mapping[str, str]
    possible: bool
    why: str = ""
    parameters: int = 0
    memory_bytes: int = 0
    steps: int = 0
    accuracy: float | None = None
    test_loss: float = 0.0
    step_ms: float = 0.0
    step_q1_ms: float = 0.0
    step_q3_ms: float = 0.0
    samples_per_s: float = 0.0
    conv_forward_ms: float = 0.0
    conv_forward_share: float = 0.0
    conv_step_ms: float = 0.0
    conv_step_share: float = 0.0
    training_s: float = 0.0
    many_steps_s: float = 0.0
    kinds: tuple[KindTime, ...] = ()


def study_variants(
    config: Settings,
    axes: Mapping[str, Sequence[str]],
    folder: Path,
    world: World,
    *,
    cross: bool = False,
    verbose: bool = True,
) -> dict[str, Any]:
    """Train the variants that `folder` does not contain, print all results, write CSV and a plot.

    Args:
        config: settings of the training, with the original network.
        axes, cross: see `list_variants`.
        folder: directory of the results; each variant has a run directory in it.
        world: the ranks; every rank calls this.
        verbose: True to print on rank 0.

    Returns:
        On rank 0 the values that ``--json`` prints: settings, environment and results; on every
        rank ``stopped``, True if a signal ended the study early.

    Raises:
        UserError: a mistake that the user can correct; the same on every rank. An error of a later
            variant alone becomes its result.
    """
    network = call_on_all_ranks(world, lambda: open_network(config, world.local_size))
    variants = call_on_all_ranks(world, lambda: list_variants(network, axes, cross=cross))
    config = replace(
        config,
        baseline_steps=0,
        evaluate_every=0,
        until_accuracy=0.0,
        patience=0,
        best_by="none",
    )
    machine_facts = environment(world)
    settings = _settings(config, network, variants, machine_facts)
    ledger = call_on_rank_zero(world, lambda: Ledger.open(folder, NAME, settings))
    done = set(world.broadcast_json(None if ledger is None else list(ledger.records)))
    left = [variant for variant in variants if variant.name not in done]
    with StopRequest() as stop:
        display = CaseDisplay(verbose and world.is_rank_zero, ())
        for line in adaptation_lines(network):  # The variants are networks from files.
            display.print(line)
        runs = _Runs(config, CaseRuns(folder, world, stop, display.print), ledger)
        stopped = _train_all(left, len(variants), runs, folder, display)
    if ledger is None:
        return {"stopped": stopped}
    found = list(ledger.results(VariantResult).values())
    conclude(network, config, found, folder, verbose=verbose)
    return {
        "settings": settings,
        "environment": machine_facts,
        "results": [asdict(result) for result in found],
        "stopped": stopped,
    }


def read_results(folder: Path) -> tuple[dict[str, Any], list[VariantResult]]:
    """Return the settings and the results of a study in the order of training.

    Raises:
        UserError: no variant was trained, or a file cannot be read.
    """
    return read_ledger(folder, NAME, VariantResult, "study", "dptrain study variants")


def _settings(
    config: Settings,
    network: Network,
    variants: Sequence[Variant],
    machine_facts: Mapping[str, Any],
) -> dict[str, Any]:
    settings = config.to_toml_values()
    return {
        **settings,
        "network": network.name,
        "layers": [repr(layer) for layer in network.layers],
        "variants": [variant.name for variant in variants],
        "ranks": machine_facts["size"],
        **machine(machine_facts),
    }


@dataclass(frozen=True)
class _Runs:
    """Trains variants, each in its own run directory.

    Attributes:
        ledger: the results on rank 0; None on other ranks.
    """

    config: Settings
    cases: CaseRuns
    ledger: Ledger | None

    def train(self, variant: Variant) -> dict[str, Any]:
        """Train a variant, or resume its training; return the summary, the same on every rank.

        If a resumed run has too few steps left to time its layers, the variant is trained again.
        """
        case = (variant.name, variant.slug, self.config, variant.network)
        summary = self.cases.train(*case)
        if not summary["stages"] and not summary["stopped"]:
            summary = self.cases.train(*case, from_start=True)
        return summary

    def keep(self, result: VariantResult) -> None:
        """Append the result to the ledger, on rank 0."""
        if self.ledger is not None:
            self.ledger.append(result.variant, asdict(result))


def _train_all(
    left: Sequence[Variant], total: int, runs: _Runs, folder: Path, display: CaseDisplay
) -> bool:
    """Train the variants; return True if a signal ended the study early."""
    display.print(_opening(len(left), total, runs.config, folder))
    start, work_done = monotonic(), 0
    first = len(left) == total
    for number, variant in enumerate(left):
        if variant.network is None:
            runs.keep(VariantResult(variant.name, variant.changes, False, variant.why))
            display.print(f"{number + 1}/{len(left)}  {variant.name}: not possible")
            continue
        try:
            summary = runs.train(variant)
            if summary["stopped"]:
                display.print("stopped on request; repeat the command to continue")
                return True
            result = result_of(variant, summary)
        except UserError as error:
            if first:
                # An error of the first variant concerns all variants.
                raise
            result = VariantResult(variant.name, variant.changes, False, str(error))
        first = False
        runs.keep(result)
        work_done += _work(variant)
        left_s = (monotonic() - start) / work_done * sum(map(_work, left[number + 1 :]))
        display.print(f"{number + 1}/{len(left)}  {_outcome(result)}{_left(left_s)}")
    return False


def _opening(left: int, total: int, config: Settings, folder: Path) -> str:
    if not left:
        return f"{folder} contains all {total} variants; pass another {OUTPUT} to train again"
    number, unit = (config.steps, "step") if config.steps else (config.epochs, "epoch")
    kept = f" ({total - left} of {total} are trained already)" if left < total else ""
    return (
        f"{_count(left, 'variant')} to train{kept}, {_count(number or 0, unit)} with batch size "
        f"{config.batch_size} on {config.data}; results: {folder}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _outcome(result: VariantResult) -> str:
    if not result.possible:
        return f"{result.variant}: {result.why}"
    loss = f"loss {result.test_loss:.4g}"
    score = loss if result.accuracy is None else f"{result.accuracy:.1%}"
    return (
        f"{result.variant}: {result.step_ms:.3f} ms per step, convolutions "
        f"{result.conv_step_share:.0%} of it, {score}"
    )


def _left(seconds: float) -> str:
    return f"  (about {duration(seconds)} left)" if seconds >= 1 else ""


def _work(variant: Variant) -> int:
    """Return the operations of training with one sample; 0 for an impossible network."""
    return 0 if variant.network is None else work(variant.network)


def result_of(variant: Variant, summary: Mapping[str, Any]) -> VariantResult:
    """Return the result of a variant from the summary of its run.

    Raises:
        UserError: no step was timed layer by layer; the same on every rank.
    """
    stages, step = summary["stages"], summary["step_ms"]
    if not stages:
        raise UserError(
            f"{variant.name}: none of the {summary['steps']} steps was timed by layer; on a GPU "
            f"the first timed step is step {FIRST_TIMED + 1}; use --steps {2 * FIRST_TIMED}"
        )
    forward = [stage for stage in stages if stage["phase"] == Phase.FORWARD.value]
    step_ms = float(step["median"])
    return VariantResult(
        variant=variant.name,
        changes=variant.changes,
        possible=True,
        parameters=summary["parameters"],
        memory_bytes=sum(summary["memory"].values()),
        steps=summary["steps"],
        accuracy=summary["test_accuracy"],
        test_loss=summary["test_loss"],
        step_ms=step_ms,
        step_q1_ms=step["q1"],
        step_q3_ms=step["q3"],
        samples_per_s=summary["samples_per_s"],
        conv_forward_ms=_time(forward, Conv2d.kind),
        conv_forward_share=_time(forward, Conv2d.kind) / _time(forward),
        conv_step_ms=_time(stages, Conv2d.kind),
        conv_step_share=_time(stages, Conv2d.kind) / _time(stages),
        training_s=summary["steps"] * step_ms / 1e3,
        many_steps_s=MANY_STEPS * step_ms / 1e3,
        kinds=kind_times(stages),
    )


def _time(stages: Sequence[Mapping[str, Any]], kind: str | None = None) -> float:
    """Return the time in ms of all stages, or of the stages that contain a kind of layer."""
    chosen = [s for s in stages if kind is None or kind in s["kind"].split("+")]
    return float(sum(stage["time_ms"]["median"] for stage in chosen))


def kind_times(stages: Sequence[Mapping[str, Any]]) -> tuple[KindTime, ...]:
    """Return the times of the stages by kind, the slowest in a forward pass first."""
    forward: dict[str, list[Mapping[str, Any]]] = {}
    for stage in stages:
        if stage["phase"] == Phase.FORWARD.value:
            forward.setdefault(stage["kind"], []).append(stage)
    whole, cumulative, found = sum(map(_time, forward.values())), 0.0, []
    for kind, own in sorted(forward.items(), key=lambda item: -_time(item[1])):
        cumulative += _time(own)
        moved = int(sum(stage["bytes_moved"] for stage in own))
        back = _time([s for s in stages if s["kind"] == kind]) - _time(own)
        found.append(
            KindTime(kind, _time(own), back, _time(own) / whole, cumulative / whole, moved)
        )
    return tuple(found)


def conclude(
    network: Network,
    config: Settings,
    results: Sequence[VariantResult],
    folder: Path,
    *,
    verbose: bool,
) -> None:
    """Print the tables and write the CSV files and the plot."""
    if not results:
        return
    from dptrain.experiments.plots import plot_variants

    rows = [
        {**asdict(r), "changes": ", ".join(f"{k}={v}" for k, v in r.changes.items())}
        for r in results
    ]
    kinds = [
        {"variant": r.variant, **kind}
        for r, row in zip(results, rows, strict=True)
        for kind in row["kinds"]
    ]
    for row in rows:
        del row["kinds"]
    written = [write_csv(folder / f"{NAME}.csv", rows)]
    if kinds:
        written.append(write_csv(folder / "kinds.csv", kinds))
    written += plot_variants(network.name, results, folder)
    display = CaseDisplay(verbose, ())
    for part in study_report(network, config, results):
        display.print(part)
    for path in written:
        display.print(f"written: {path}")
    display.print(f"for one page with the table and the plot: dptrain report {folder}")
