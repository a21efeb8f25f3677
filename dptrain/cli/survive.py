"""`dptrain train --survive`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dptrain.cli.common import number
from dptrain.cli.options import RUN_DIR
from dptrain.cli.parsing import parse_launcher
from dptrain.comm.launching.launcher import find_launch
from dptrain.errors import UserError
from dptrain.machine import available_cores
from dptrain.runs.names import CONFIG
from dptrain.survival import MOST_REPAIRS

if TYPE_CHECKING:
    from dptrain.scaling.launching import Launcher
    from dptrain.training.settings import Settings

MOST_RESTARTS = 20

SURVIVAL = (
    click.option(
        "--survive",
        is_flag=True,
        help="Start the ranks by mpirun or srun, and start them again if one is lost; training "
        "continues from the newest snapshot or checkpoint. Used without mpirun: dptrain train "
        "--survive -n 4.",
    ),
    number(
        "-n", "--ranks", "ranks", at_least=1,
        help="Number of ranks to start.  [default: of --hosts or Slurm, or one per core]",
    ),
    number("--min-ranks", at_least=1, default=1, help="Smallest number of ranks that continue."),
    number(
        "--max-restarts", at_least=0, default=MOST_RESTARTS,
        help="Restarts after which a further fault ends the job.",
    ),
    click.option(
        "--repair", is_flag=True,
        help="Also continue after silent corruption, from the newest state that was checked, at "
        f"most {MOST_REPAIRS} times.",
    ),
    click.option(
        "--launcher", default="auto", show_default=True, metavar="COMMAND",
        help="What starts the ranks, such as \"srun --mpi=pmi2\".",
    ),
    click.option(
        "--hosts", default="", metavar="NAME:RANKS,…",
        help="Hosts on which mpirun starts the ranks; those that are lost are left out.",
    ),
)  # fmt: skip
"""Flags for jobs that outlive a rank, none of which is a setting."""

DEFAULTS = {
    "survive": False, "ranks": None, "min_ranks": 1, "max_restarts": MOST_RESTARTS,
    "repair": False, "launcher": "auto", "hosts": "",
}  # fmt: skip
"""Names of these flags, and their values if they are not set."""


def split_flags(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings among the flags of `dptrain train`, and the flags `SURVIVAL`.

    Raises:
        UserError: one of the latter is set without ``--survive``.
    """
    survival = {name: values[name] for name in DEFAULTS}
    for name, value in survival.items():
        if value != DEFAULTS[name] and not survival["survive"]:
            flag = name.replace("_", "-")
            advice = ", or start ranks by mpirun -n" if name == "ranks" else ""
            raise UserError(f"--{flag} has no effect without --survive; add it{advice}")
    return {name: value for name, value in values.items() if name not in DEFAULTS}, survival


def survival_flags(
    omit: Collection[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the flags `SURVIVAL` to a command.

    Args:
        omit: names, as in `DEFAULTS`, of those that have no meaning for the command.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, option in reversed([*zip(DEFAULTS, SURVIVAL, strict=True)]):
            if name not in omit:
                command = option(command)
        return command

    return decorate


def survive(
    values: Mapping[str, Any],
    file: Path | None,
    *,
    verbose: bool = False,
    planned: Sequence[tuple[str, str]] = (),
) -> int:
    """Train on ranks that this process starts, as often as necessary; return the exit code.

    Args:
        values: the flags of `dptrain train`.
        file: the file of ``--config``.
        verbose: as in `dptrain train`.
        planned: kinds and texts of the faults of a rehearsal, such as ``("kill", "1@100")``.

    Raises:
        UserError: a mistake in the flags, or there is no launcher.
    """
    from dptrain.cli.printing import print_tables
    from dptrain.scaling.launching import find_launcher
    from dptrain.survival.nodes import on_hosts, parse_hosts, slurm_number
    from dptrain.survival.rehearsal import Rehearsal, incidents_table, parse_fault
    from dptrain.survival.supervisor import Job, Supervisor

    flags, survival = split_flags(values)
    _refuse_launcher()
    given = _with_snapshots({k: v for k, v in flags.items() if v is not None}, file)
    chosen, run_dir = _load(given, file, is_new=bool(planned))
    hosts = parse_hosts(survival["hosts"])
    slots = sum(host.slots for host in hosts) or slurm_number(os.environ, "SLURM_NTASKS")
    ranks = survival["ranks"] or slots or available_cores()
    _check(chosen, ranks, survival["min_ranks"])
    launcher = find_launcher(parse_launcher(survival["launcher"]))
    faults = [parse_fault(kind, text, ranks) for kind, text in planned]
    if faults and not launcher.starts_here:
        raise UserError("rehearse signals ranks of this machine, which srun does not start")
    if hosts and launcher.is_srun:
        raise UserError("--hosts is for mpirun; srun starts ranks on the nodes of its allocation")
    _try_out(on_hosts(launcher, hosts))
    run_dir = run_dir or _new_folder(chosen)
    program = [sys.executable, "-m", "dptrain", "train", *_words({**given, "run_dir": run_dir})]
    program += [*(["--config", str(file)] if file else []), *(["--verbose"] if verbose else [])]
    threads = chosen.threads or slurm_number(os.environ, "SLURM_CPUS_PER_TASK")
    threads = threads or int(launcher.is_srun)
    job = Job(
        launcher, (*program, "--resume"), run_dir, ranks, survival["min_ranks"],
        survival["max_restarts"], threads, chosen.timeout, hosts, survival["repair"],
    )  # fmt: skip
    click.echo(_introduction(ranks, survival, chosen, run_dir))
    sys.stdout.flush()
    rehearsal = Rehearsal(faults, run_dir)
    supervisor = Supervisor(job, rehearsal)
    code = supervisor.run()
    if planned:
        print_tables([incidents_table(supervisor.incidents)] if supervisor.incidents else [])
        for fault in rehearsal.left:
            click.echo(f"{fault}: training ended before this fault")
    return code


def _refuse_launcher() -> None:
    launch = find_launch(os.environ)
    if launch.size > 1:
        raise UserError(
            f"--survive starts the ranks itself, but a launcher has started {launch.size} "
            f"({launch.source}); use: dptrain train --survive -n {launch.size}, without mpirun or "
            "srun"
        )


def _load(
    given: dict[str, Any], file: Path | None, *, is_new: bool
) -> tuple[Settings, Path | None]:
    """Return the settings and the run directory; None if the user names none.

    Args:
        given: the flags; ``resume`` is removed, since each start resumes the run directory.
        file: the file of ``--config``.
        is_new: refuse to continue a run.
    """
    from dptrain.training.persistence.rundir import RunDirectory
    from dptrain.training.settings import load_settings

    resume = given.pop("resume", None)
    named = given.get("run_dir", os.environ.get("DPTRAIN_RUN_DIR"))
    run_dir = None if named is None else Path(named)
    if resume not in (None, RUN_DIR):
        run_dir = RunDirectory.open(Path(resume)).path
    if run_dir is None or not (run_dir / CONFIG).is_file():
        return load_settings(given, os.environ, file), run_dir
    if is_new:
        raise UserError(f"{run_dir} has a run; choose another --run-dir for a rehearsal")
    return load_settings({**given, "resume": run_dir}, os.environ), run_dir


def _with_snapshots(given: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Return the flags with the setting `snapshots`, unless the user has set it."""
    from dptrain.training.presets import find_config
    from dptrain.training.settings import read_settings

    if "DPTRAIN_SNAPSHOTS" in os.environ:
        return given
    values = {} if file is None else read_settings(find_config(file))
    return {"snapshots": values.get("snapshots", True), **given}


def _try_out(launcher: Launcher) -> None:
    """Find mistakes in the arguments of a launcher; a fault at this moment is none.

    Raises:
        UserError: the launcher starts no rank three times in a row.
    """
    for is_last in (False, False, True):
        try:
            launcher.try_out()
            break
        except UserError:
            if is_last:
                raise


def _new_folder(chosen: Settings) -> Path:
    from dptrain.training.persistence.rundir import new_folder

    return new_folder(chosen.network, chosen.data, datetime.now())


def _check(chosen: Settings, ranks: int, least: int) -> None:
    if least > ranks:
        raise UserError(f"--min-ranks is {least}, but --ranks is {ranks}; use at most {ranks}")
    if 0 < chosen.shards < ranks:
        raise UserError(
            f"--shards is {chosen.shards}, but --ranks is {ranks}, and each rank needs a "
            f"micro-shard; use --shards {ranks} or more"
        )


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _introduction(ranks: int, survival: Mapping[str, Any], chosen: Settings, run_dir: Path) -> str:
    """Return what the user should know before the first start."""
    least, most = survival["min_ranks"], survival["max_restarts"]
    fewer = f", or those that are left, at least {least}" if least < ranks else ""
    started = f"{ranks} are started again{fewer}" if ranks > 1 else "it is started again"
    bits = (
        "final parameters do not depend on faults"
        if chosen.shards or least == ranks
        else "with another number of ranks, the last bits of the parameters differ; --shards "
        f"{ranks} keeps them"
    )
    return f"{run_dir}: if a rank is lost, {started}; at most {most} times; {bits}"
