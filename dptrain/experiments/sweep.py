"""`dptrain study`: trains a network with several values of settings, changes and seeds.

Each combination of values is a *point*, each point with one seed a *case*, and each case a training
run of its own, from whose directory the results are read. So the same command continues a sweep
that was stopped, several processes can each train a part of it, and `dptrain runs` works on the
cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.experiments.case_runs import CaseRuns, finished_run, work
from dptrain.experiments.display import CaseDisplay
from dptrain.experiments.ledger import Ledger, machine, write_csv
from dptrain.experiments.sweep_cases import (
    Case,
    Design,
    MakeSettings,
    by_point,
    list_cases,
    part_of,
)
from dptrain.experiments.sweep_results import (
    NAME,
    PointResult,
    failure,
    point_result,
    record,
    score,
)
from dptrain.experiments.tables import digits, duration
from dptrain.files import write_whole
from dptrain.measure.machine.environment import environment
from dptrain.runs.records import read_record
from dptrain.texts import command_line


def run_sweep(
    make: MakeSettings,
    design: Design,
    folder: Path,
    world: World,
    *,
    part: tuple[int, int] = (1, 1),
    verbose: bool = True,
) -> dict[str, Any]:
    """Train the cases that `folder` does not contain, print the results, write CSV and plots.

    Args:
        make, design: see `list_cases`.
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
    cases = call_on_all_ranks(world, lambda: list_cases(make, design, world.local_size))
    machine_facts = environment(world)
    facts = _facts(make, design, cases, machine_facts)
    call_on_rank_zero(world, lambda: Ledger.open(folder, NAME, facts))
    own = [case for case in part_of(cases, part) if not case.why]
    done = [c.slug for c in own if world.is_rank_zero and _is_done(folder, c)]
    done = world.broadcast_json(done)
    left = [case for case in own if case.slug not in done]
    total = sum(not case.why for case in cases)
    display = CaseDisplay(verbose and world.is_rank_zero, ())
    display.print(_opening(len(left), len(own), total, folder))
    for line in dict.fromkeys(line for case in cases for line in case.adaptation):
        display.print(line)
    with StopRequest() as stop:
        stopped = _train_all(left, CaseRuns(folder, world, stop, display.print), display)
    if not world.is_rank_zero:
        return {"stopped": stopped}
    results = [point_result(folder, group) for group in by_point(cases)]
    if part == (1, 1):
        conclude(results, cases, design, folder, display)
    else:
        display.print("after all parts, the same command without --part writes the results")
    return {
        "settings": facts,
        "environment": machine_facts,
        "results": [{**record(r, list(design.axes)), "kinds": _kinds(r)} for r in results],
        "stopped": stopped,
    }


def _facts(
    make: MakeSettings, design: Design, cases: Sequence[Case], machine_facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what identifies the sweep; a command with other values is refused."""
    common = make({}).to_toml_values()
    kept = {name: value for name, value in common.items() if name not in (*design.axes, "seed")}
    digests = {}
    # The network of a file may change between two commands.
    for name in dict.fromkeys(case.settings.network for case in cases):
        with suppress(OSError):
            digests[name] = sha256(Path(name).read_bytes()).hexdigest()
    return {
        **kept,
        **({"network_files": digests} if digests else {}),
        **design.facts(),
        "ranks": machine_facts["size"],
        **machine(machine_facts),
    }


def _is_done(folder: Path, case: Case) -> bool:
    return failure(folder, case).exists() or finished_run(folder, case.slug) is not None


def _opening(left: int, own: int, total: int, folder: Path) -> str:
    part = "" if own == total else f" of {total}"
    kept = f" ({own - left} are trained already)" if left < own else ""
    return f"{left} run{'s' * (left != 1)}{part} to train{kept}; results: {folder}"


def _train_all(left: Sequence[Case], runs: CaseRuns, display: CaseDisplay) -> bool:
    """Train the cases; return True if a signal ended the sweep early."""
    costs = [1 if case.network is None else work(case.network) for case in left]
    start = monotonic()
    for number, case in enumerate(left, 1):
        try:
            summary = runs.train(case.name, case.slug, case.settings, case.network)
        except UserError as error:
            if number == 1 and len(left) > 1 and getattr(error, "exit_code", 2) == 2:
                # A mistake in the first case concerns all cases.
                raise
            text = str(error)
            path = failure(runs.folder, case)
            call_on_rank_zero(runs.world, lambda path=path, text=text: write_whole(path, text))  # type: ignore[misc]
            display.print(f"{number}/{len(left)}  {case.name}: {text}")
            continue
        if summary["stopped"]:
            display.print("stopped on request; repeat the command to continue")
            return True
        left_s = (monotonic() - start) * sum(costs[number:]) / sum(costs[:number])
        about = f"  (about {duration(left_s)} left)" if left_s >= 1 else ""
        display.print(f"{number}/{len(left)}  {case.name}: {_outcome(summary)}{about}")
    return False


def _outcome(summary: Mapping[str, Any]) -> str:
    name, value = score(summary)
    step = summary["step_ms"]
    time = "" if step is None else f", {digits(step['median'])} ms per step"
    if value is None:
        return f"{name} unknown{time}"
    return f"{name} {f'{value:.2%}' if name.endswith('accuracy') else f'{value:.4g}'}{time}"


def _kinds(result: PointResult) -> list[dict[str, Any]]:
    return [asdict(kind) for kind in result.kinds]


def conclude(
    results: Sequence[PointResult],
    cases: Sequence[Case],
    design: Design,
    folder: Path,
    display: CaseDisplay,
) -> None:
    """Print the tables of points; write them, the runs, and the plots."""
    from dptrain.experiments.sweep_tables import plot_sweep, sweep_report

    for table in sweep_report(results):
        display.print(table)
    axes = list(design.axes)
    written = [write_csv(folder / f"{NAME}.csv", [record(result, axes) for result in results])]
    kinds = [
        {**{name: r.point.get(name, "") for name in axes}, **kind}
        for r in results
        for kind in _kinds(r)
    ]
    paths = [finished_run(folder, case.slug) for case in cases]
    records = [read_record(path) for path in paths if path is not None]
    for name, rows in (("kinds.csv", kinds), ("runs.csv", records)):
        if rows:
            written.append(write_csv(folder / name, rows))
    written += plot_sweep(results, folder)
    for path in written:
        display.print(f"written: {path}")
    display.print(f"for one page with the tables and the plots: {command_line('report', folder)}")
