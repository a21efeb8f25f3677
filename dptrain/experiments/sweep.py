"""`dptrain study sweep`: trains a network with several values of settings and several seeds.

Each combination of values is a *point*, each point with one seed a *case*, and each case a training
run of its own, from whose directory the results are read. So the same command continues a sweep
that was stopped, several processes can each train a part of it, and `dptrain runs` works on the
cases.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World
from dptrain.errors import UserError, shown, suggest
from dptrain.experiments.case_runs import CaseRuns, finished_run
from dptrain.experiments.display import CaseDisplay
from dptrain.experiments.ledger import Ledger, machine, read_settings, write_csv
from dptrain.experiments.variants import AXES, change_layers
from dptrain.files import write_whole
from dptrain.measure.machine.environment import environment
from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.measure.student import student
from dptrain.network.network import Network
from dptrain.runs.records import read_record
from dptrain.runs.settings import DIRECTORY_SETTINGS
from dptrain.training.job import open_network
from dptrain.training.settings import Settings, settings

NAME = "sweep"
"""Name of the files."""

MakeSettings = Callable[[Mapping[str, str]], Settings]
"""Returns the settings of the command with some of them replaced by texts."""


@dataclass(frozen=True)
class Case:
    """A point with a seed.

    Attributes:
        point: values by axis, as the user wrote them.
        seed: the seed.
        settings: settings of the run.
        network: the changed network; None if it is the one of the settings.
    """

    point: Mapping[str, str]
    seed: int
    settings: Settings
    network: Network | None

    @property
    def name(self) -> str:
        """Values and seed in words."""
        return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in self._values().items())

    @property
    def slug(self) -> str:
        """Name of the run directory."""
        text = ",".join(f"{name}={value}" for name, value in self._values().items())
        return re.sub(r"[^A-Za-z0-9.,=_-]+", "-", text)

    def _values(self) -> dict[str, str]:
        return {**self.point, "seed": str(self.seed)}


@dataclass(frozen=True)
class PointResult:
    """Results of a point over its seeds.

    Attributes:
        point: values by axis.
        runs: number of runs that made all their steps.
        failed: number of runs that ended with an error, such as a loss that is not finite.
        score: mean over the seeds of the accuracy, or of the loss for networks that predict values,
            with its 95% interval by Student's distribution; None without results.
        scored: ``validation accuracy``, ``test accuracy``, ``validation loss`` or ``test loss``.
        step_ms: median over the seeds of the median step in ms.
        training_s: mean over the seeds of steps × median step, in s.
        memory_bytes: memory of a rank according to the plan.
        parameters: number of parameters.
    """

    point: Mapping[str, str]
    runs: int
    failed: int
    score: Estimate | None
    scored: str
    step_ms: float | None
    training_s: float | None
    memory_bytes: int | None
    parameters: int | None


def list_cases(
    make: MakeSettings,
    axes: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    ranks_per_node: int = 1,
) -> list[Case]:
    """Return all combinations of the values of the axes, each with all seeds.

    Args:
        make: returns the settings of the command with others replaced.
        axes: values by the name of a setting, or by a change of the network (see
            `dptrain.experiments.variants.AXES`).
        seeds: the seeds.
        ranks_per_node: ranks on this node that call this function at the same time.

    Raises:
        UserError: an axis or a value is invalid, or a network is not possible.
    """
    for name in axes:
        _check_axis(name)
    cases: list[Case] = []
    networks: dict[tuple[str, str | None], Network] = {}
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        changes = {name: value for name, value in point.items() if name in AXES}
        rest = {name: value for name, value in point.items() if name not in AXES}
        for seed in seeds:
            chosen = make({**rest, "seed": str(seed)})
            network, key = None, (chosen.network, chosen.data)
            if changes:
                if key not in networks:
                    networks[key] = open_network(chosen, ranks_per_node)
                network = change_layers(networks[key], changes)
            cases.append(Case(point, seed, chosen, network))
    return cases


def _check_axis(name: str) -> None:
    names = [s.name for s in settings() if s.name not in (*DIRECTORY_SETTINGS, "seed")]
    if name not in (*names, *AXES):
        hint = "; use --seeds" if name == "seed" else suggest(name, (*names, *AXES))
        raise UserError(
            f"--set {shown(name)}: expected a setting of dptrain train or one of "
            f"{', '.join(AXES)}{hint}"
        )


def part_of(cases: Sequence[Case], part: tuple[int, int]) -> list[Case]:
    """Return part I of N of the cases: every N-th, from the I-th on, counted from 1."""
    index, count = part
    return list(cases[index - 1 :: count])


def run_sweep(
    make: MakeSettings,
    axes: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    folder: Path,
    world: World,
    *,
    part: tuple[int, int] = (1, 1),
    verbose: bool = True,
) -> dict[str, Any]:
    """Train the cases that `folder` does not contain, print the results, write CSV and a plot.

    Args:
        make, axes, seeds: see `list_cases`.
        folder: directory of the results; each case has a run directory in it.
        world: the ranks; every rank calls this.
        part: the part of the cases to train, see `part_of`; a part writes no results of the whole.
        verbose: True to print on rank 0.

    Returns:
        On rank 0 the values that ``--json`` prints; on every rank ``stopped``.

    Raises:
        UserError: a mistake that the user can correct; the same on every rank. An error of a later
            case alone becomes its result.
    """
    cases = call_on_all_ranks(world, lambda: list_cases(make, axes, seeds, world.local_size))
    facts = _facts(make, axes, seeds, environment(world))
    call_on_rank_zero(world, lambda: Ledger.open(folder, NAME, facts))
    own = part_of(cases, part)
    done = [c.slug for c in own if world.is_rank_zero and _is_done(folder, c)]
    done = world.broadcast_json(done)
    left = [case for case in own if case.slug not in done]
    display = CaseDisplay(verbose and world.is_rank_zero, ())
    display.print(_opening(len(left), len(own), len(cases), folder))
    with StopRequest() as stop:
        stopped = _train_all(left, CaseRuns(folder, world, stop, display.print), display)
    if not world.is_rank_zero:
        return {"stopped": stopped}
    results = [point_result(folder, group) for group in by_point(cases)]
    if len(own) == len(cases):
        conclude(results, cases, folder, display)
    else:
        display.print("after all parts, the same command without --part writes the results")
    return {"settings": facts, "results": [_record(r) for r in results], "stopped": stopped}


def _facts(
    make: MakeSettings,
    axes: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    machine_facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what identifies the sweep; a command with other values is refused."""
    common = make({}).to_toml_values()
    kept = {name: value for name, value in common.items() if name not in (*axes, "seed")}
    swept = {name: list(values) for name, values in axes.items()}
    ranks = {"ranks": machine_facts["size"], **machine(machine_facts)}
    return {**kept, "axes": swept, "seeds": list(seeds), **ranks}


def _failure(folder: Path, case: Case) -> Path:
    return folder / "runs" / f"{case.slug}.failed"


def _is_done(folder: Path, case: Case) -> bool:
    return _failure(folder, case).exists() or finished_run(folder, case.slug) is not None


def _opening(left: int, own: int, total: int, folder: Path) -> str:
    part = "" if own == total else f" of {total}"
    kept = f" ({own - left} are trained already)" if left < own else ""
    return f"{left} run{'s' * (left != 1)}{part} to train{kept}; results: {folder}"


def _train_all(left: Sequence[Case], runs: CaseRuns, display: CaseDisplay) -> bool:
    """Train the cases; return True if a signal ended the sweep early."""
    for number, case in enumerate(left, 1):
        try:
            summary = runs.train(case.name, case.slug, case.settings, case.network)
        except UserError as error:
            if number == 1 and len(left) > 1 and getattr(error, "exit_code", 2) == 2:
                # A mistake in the first case concerns all cases.
                raise
            text = str(error)
            path = _failure(runs.folder, case)
            call_on_rank_zero(runs.world, lambda path=path, text=text: write_whole(path, text))  # type: ignore[misc]
            display.print(f"{number}/{len(left)}  {case.name}: {text}")
            continue
        if summary["stopped"]:
            display.print("stopped on request; repeat the command to continue")
            return True
        display.print(f"{number}/{len(left)}  {case.name}: {_outcome(summary)}")
    return False


def _outcome(summary: Mapping[str, Any]) -> str:
    name, value = _score(summary)
    return f"{name} {_value_text(name, value)}"


def _score(values: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the name and the value by which points are compared.

    Validation data comes before test data, on which settings should not be selected.
    """
    for name in ("validation_accuracy", "test_accuracy", "validation_loss", "test_loss"):
        if values.get(name) is not None:
            return name.replace("_", " "), float(values[name])
    return "test loss", None


def by_point(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases of each point."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case.point.values()), []).append(case)
    return list(groups.values())


def point_result(folder: Path, cases: Sequence[Case]) -> PointResult:
    """Return the results of the cases of one point that were trained."""
    paths = [finished_run(folder, case.slug) for case in cases]
    records = [read_record(path) for path in paths if path is not None]
    found = [_score(record) for record in records]
    scores = [value for _, value in found if value is not None]
    steps = [record["step_ms"] for record in records if record["step_ms"] is not None]
    times = [r["steps"] * r["step_ms"] / 1e3 for r in records if r["step_ms"] is not None]
    return PointResult(
        point=cases[0].point,
        runs=len(records),
        failed=sum(_failure(folder, case).exists() for case in cases),
        score=mean_over_seeds(scores) if scores else None,
        scored=found[0][0] if found else "",
        step_ms=float(np.median(steps)) if steps else None,
        training_s=float(np.mean(times)) if times else None,
        memory_bytes=records[0]["memory_bytes"] if records else None,
        parameters=records[0]["parameters"] if records else None,
    )


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean with its 95% interval by Student's distribution.

    The interval of fewer than `FEWEST` values is infinite.

    Example:
        >>> found = mean_over_seeds([0.9, 0.92, 0.94])
        >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
        (0.92, 0.87, 0.97)
    """
    n, mean = len(values), float(np.mean(values))
    if n < FEWEST:
        return Estimate(mean, -math.inf, math.inf, n)
    half = student(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def _record(result: PointResult) -> dict[str, Any]:
    """Return the result as plain values: a row of the CSV file."""
    score = result.score
    has_interval = score is not None and math.isfinite(score.low)
    return {
        **result.point,
        "runs": result.runs,
        "failed": result.failed,
        "scored": result.scored,
        "score": None if score is None else score.value,
        "low": score.low if score is not None and has_interval else None,
        "high": score.high if score is not None and has_interval else None,
        "step_ms": result.step_ms,
        "training_s": result.training_s,
        "memory_bytes": result.memory_bytes,
        "parameters": result.parameters,
    }


def read_results(folder: Path) -> tuple[dict[str, Any], list[PointResult]]:
    """Return the settings and the results that `conclude` has written.

    Raises:
        UserError: the sweep has not ended, or a file cannot be read.
    """
    if not (folder / f"{NAME}.csv").exists():
        raise UserError(
            f"{folder} contains a sweep without results, because not all runs have ended; repeat "
            "its `dptrain study sweep` command without --part"
        )
    facts = read_settings(folder, NAME, "repeat its `dptrain study sweep` command with")
    try:
        rows = list(csv.DictReader(io.StringIO((folder / f"{NAME}.csv").read_text("utf-8"))))
        if not rows or any(None in (*row, *row.values()) for row in rows):
            raise ValueError("a row is not complete")
        return facts, [_point(row, list(facts["axes"])) for row in rows]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"cannot read {folder / f'{NAME}.csv'} ({shown(error)}); repeat the `dptrain study "
            "sweep` command, which writes it again"
        ) from None


def _point(row: Mapping[str, str], axes: Sequence[str]) -> PointResult:
    """Return the result of a row of the CSV file."""
    number = {
        name: float(text) if text else None
        for name, text in row.items()
        if name not in (*axes, "scored")
    }
    value, low, high = number["score"], number["low"], number["high"]
    runs, memory, parameters = number["runs"] or 0, number["memory_bytes"], number["parameters"]
    score = (
        None
        if value is None
        else Estimate(
            value, -math.inf if low is None else low, math.inf if high is None else high, int(runs)
        )
    )
    return PointResult(
        point={name: row[name] for name in axes},
        runs=int(runs),
        failed=int(number["failed"] or 0),
        score=score,
        scored=row["scored"],
        step_ms=number["step_ms"],
        training_s=number["training_s"],
        memory_bytes=None if memory is None else int(memory),
        parameters=None if parameters is None else int(parameters),
    )


def conclude(
    results: Sequence[PointResult], cases: Sequence[Case], folder: Path, display: CaseDisplay
) -> None:
    """Print the table of points; write it, the runs, and a plot."""
    from dptrain.experiments.sweep_tables import plot_sweep, sweep_table

    display.print(sweep_table(results))
    written = [write_csv(folder / f"{NAME}.csv", [_record(result) for result in results])]
    paths = [finished_run(folder, case.slug) for case in cases]
    records = [read_record(path) for path in paths if path is not None]
    if records:
        written.append(write_csv(folder / "runs.csv", records))
    written += plot_sweep(results, folder)
    for path in written:
        display.print(f"written: {path}")
    display.print(f"for one page with the table and the plot: dptrain report {folder}")


def _value_text(name: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"
