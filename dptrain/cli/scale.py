"""`dptrain scale`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dptrain.bounds import MAX_RUNS
from dptrain.cli.common import CONFIG, EXISTING, JSON, STOPPED, examples, number, output_folder
from dptrain.cli.options import GroupedCommand, set_flags, setting_flags
from dptrain.cli.parsing import Number, parse_launcher, parse_numbers, parse_part
from dptrain.cli.profile import OMITTED
from dptrain.errors import UserError, suggest

if TYPE_CHECKING:
    from dptrain.scaling.design import Design
    from dptrain.scaling.scale import Selection
    from dptrain.scaling.study import Study

DEFAULTS: dict[str, Any] = {
    "ranks": "1,2,4",
    "threads": "1",
    "scaling": "weak,strong",
    "launches": 5,
    "steps": 50,
    "launcher": "auto",
    "known_losses": True,
    "until": 0.0,
    "most_launches": 30,
}
"""Defaults of a new study; a study that continues has its own values."""

OMITTED_HERE = {*OMITTED, "threads"} - {"epochs", "until_accuracy"}
"""Settings of training that a study does not have."""


@click.command(
    cls=GroupedCommand,
    short_help="Measure how training scales, and what limits it.",
    epilog=examples(
        "dptrain scale                                    # 1, 2 and 4 ranks, on this machine",
        "dptrain scale --ranks 1,2,4,8 --network cifar --batch-size 128 --output DIR",
        "dptrain scale --ranks 1,2,4 --network cifar --backend cuda --precision tf32",
        "dptrain scale --output DIR                       # continue a study that was stopped",
        'dptrain scale --ranks 4,8,16 --launcher "srun --mpi=pmi2" --output DIR',
        "dptrain scale --output DIR --part $SLURM_ARRAY_TASK_ID/5   # a job array",
        "dptrain scale --collect DIR                      # a study of the launches so far",
        "dptrain scale --collect DIR --register           # store its forecast",
        "dptrain scale --collect DIR --collect LARGER --output ALL   # score that forecast",
    ),
)
@CONFIG
@click.option("--ranks", metavar="N,N,…", help="Numbers of ranks.  [default: 1,2,4]")
@click.option(
    "--threads",
    metavar="N,N,…",
    help="Compute threads of a rank; each is measured with all numbers of ranks.  [default: 1]",
)
@click.option(
    "--scaling",
    metavar="NAME,NAME",
    help="weak: the samples per compute thread stay; strong: the global minibatch "
    "stays.  [default: weak,strong]",
)
@number(
    "--launches",
    at_least=1,
    at_most=MAX_RUNS,
    help="Independent launches of each point.  [default: 5]",
)
@click.option(
    "--until",
    type=Number(float, at_least=0, at_most=1),
    metavar="WIDTH",
    help="Launch more rounds after the first --launches, until the 95% interval of every "
    "efficiency is at most ±WIDTH, such as 0.02, in 29 rounds or more.  [default: no more rounds]",
)
@number(
    "--most-launches",
    at_least=1,
    at_most=MAX_RUNS,
    help="Largest number of launches of each point with --until.  [default: 30]",
)
@number(
    "--steps",
    at_least=1,
    at_most=MAX_RUNS,
    help="Steps that are timed in each launch.  [default: 50]",
)
@click.option(
    "--known-losses/--no-known-losses",
    default=None,
    help="Inject losses of known size into each launch, in at most a third of its time; the table "
    "of losses is withheld if they are not recovered.  [default: known-losses]",
)
@click.option(
    "--launcher",
    metavar="COMMAND",
    help="Program that starts the ranks, mpirun or srun, with arguments if needed, such "
    "as 'mpirun --allow-run-as-root'.  [default: the mpirun next to Python, or the "
    "first on PATH]",
)
@output_folder(
    "Folder of the study; a study that was started there continues.  [default: a "
    "new folder in studies/]"
)
@click.option(
    "--only",
    multiple=True,
    metavar="POINT",
    help="Launch only this point, such as weak-r4-t1; may be repeated.",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Launch only the I-th of N parts, for job arrays; the part that completes the "
    "study writes it.",
)
@click.option(
    "--collect",
    multiple=True,
    type=EXISTING,
    metavar="DIR",
    help="Launch nothing; read the launches in this folder and below; may be repeated. "
    "Registered forecasts in these folders are scored.",
)
@click.option(
    "--register",
    "registers",
    is_flag=True,
    help="Store the forecast of the study with its hash, before the larger job runs.",
)
@JSON
@setting_flags(omit=OMITTED_HERE)
def scale(
    file: Path | None,
    output: Path | None,
    only: tuple[str, ...],
    part: str | None,
    collect: tuple[Path, ...],
    registers: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Measure how training scales: weak and strong, over numbers of ranks and threads.

    The command starts `dptrain profile` with mpirun or srun, every point several times. It reports
    how far training scales, where efficiency is lost, and what efficiency to expect on more ranks,
    of the same node or of more nodes. --batch-size is the global minibatch of the smallest number
    of compute threads (ranks × threads).

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the study and keep finished launches, with exit code
    75; the same command continues. docs/reference/study.md defines every value.
    """
    from dptrain.comm.launching.launcher import find_launch
    from dptrain.scaling.registered import refuse_second, refuse_without_forecast

    if find_launch(os.environ).size > 1:
        raise UserError("dptrain scale starts ranks itself; start it without mpirun or srun")
    if collect:
        folder = output or collect[0]
        if output is None and len(collect) > 1:
            raise UserError("--collect names several folders; expected --output DIR for the study")
        if unused := set_flags({**flags, "only": only or None, "part": part, "config": file}):
            name = next(iter(unused)).replace("_", "-")
            raise UserError(f"--collect launches nothing, so --{name} has no effect; remove it")
        if registers:
            refuse_second(folder)
        _conclude(collect, folder, registers=registers, as_json=as_json)
        return 0
    chosen = _selection(only, part)
    if registers and not chosen.is_all:
        raise UserError("--register needs all launches, so it excludes --only and --part")
    folder, design = _design(file, output, set_flags(flags))
    if registers:
        refuse_second(folder)
        refuse_without_forecast(design)
    return _launch(folder, design, chosen, registers=registers, as_json=as_json)


def _launch(
    folder: Path, design: Design, chosen: Selection, *, registers: bool, as_json: bool
) -> int:
    from dptrain.scaling.display import StudyDisplay
    from dptrain.scaling.running import LaunchError
    from dptrain.scaling.scale import launch_study, missing

    display = StudyDisplay(errors=as_json)
    for line in _data_lines(design):
        display.print(f"dptrain: {line}" if as_json else line)
    again = f"dptrain scale --output {shlex.quote(str(folder))}{' --register' * registers}"
    try:
        done, design = launch_study(folder, design, chosen, display)
    except LaunchError as error:
        click.echo(f"dptrain: {error}", err=True)
        click.echo(f"finished launches are kept; continue with: {again}", err=True)
        return error.code
    left = missing(folder, design)
    total = len(design.tasks())
    if not done:
        display.print(
            f"stopped on request, {total - left} of {total} launches are complete; "
            f"continue with: {again}"
        )
        return STOPPED
    if left:
        display.print(
            f"{total - left} of {total} launches are complete; the part that completes "
            "them writes the study; before that, this does: "
            f"dptrain scale --collect {shlex.quote(str(folder))}"
        )
        return 0
    _conclude([folder], folder, registers=registers, as_json=as_json)
    return 0


def _data_lines(design: Design) -> list[str]:
    """Return what network and data the launches have, before anything is written or launched.

    Raises:
        UserError: the network or the data does not exist, or they do not fit.
    """
    from dptrain.data import open_data
    from dptrain.network.adaptation import resize
    from dptrain.training.output.summary import data_lines
    from dptrain.training.settings import load_settings

    config = load_settings({**design.settings, "batch_size": design.batch_size}, {}, None)
    network = config.load_network()
    data = open_data(str(config.data), network, seed=config.seed)
    return data_lines(resize(network, data.input_shape, data.num_outputs), data)


def _conclude(folders: Sequence[Path], output: Path, *, registers: bool, as_json: bool) -> None:
    """Write the study, its report and, if requested, its forecast; print the study."""
    from dptrain.report.files import write_report
    from dptrain.scaling.registered import REGISTERED, register
    from dptrain.scaling.scale import conclude_study

    study = conclude_study(folders, output)
    write_report(output)
    _print(study, output, as_json=as_json)
    if registers:
        record = register(study, output)
        line = f"registered: {output / REGISTERED}, SHA-256 {record.sha256}"
        click.echo(line, err=as_json)


def _print(study: Study, folder: Path, *, as_json: bool) -> None:
    from dptrain.cli.printing import print_study

    print_study(study, folder, as_json=as_json)


def _design(
    file: Path | None, output: Path | None, flags: Mapping[str, Any]
) -> tuple[Path, Design]:
    """Return the folder of the study, and its design: the stored one, or that of the flags."""
    from dptrain.scaling.design import Design, new_folder, refuse_difference
    from dptrain.scaling.running import common_prefetch
    from dptrain.scaling.study import WEAK
    from dptrain.training.settings import load_settings

    stored = None if output is None else Design.read(output)
    own = {name: flags[name] for name in DEFAULTS if name in flags}
    settings = {name: value for name, value in flags.items() if name not in DEFAULTS}
    if stored is not None and file is None:
        settings = {**stored.settings, "batch_size": stored.batch_size, **settings}
    config = load_settings(settings, os.environ, file)
    if config.until_accuracy:
        config.check_until_accuracy(config.load_network())
    values = {k: v for k, v in config.to_toml_values().items() if k not in OMITTED_HERE}
    chosen = {**DEFAULTS, **own}
    if "until_accuracy" not in values:
        values.pop("epochs", None)
        if "epochs" in flags:
            raise UserError(
                "--epochs limits the training of --until-accuracy; add --until-accuracy, such as "
                "0.97, or remove --epochs"
            )
    design = Design(
        ranks=parse_numbers(chosen["ranks"], "--ranks"),
        threads=parse_numbers(chosen["threads"], "--threads"),
        scalings=_scalings(chosen["scaling"]),
        launches=chosen["launches"],
        steps=chosen["steps"],
        seed=config.seed,
        launcher=parse_launcher(chosen["launcher"]),
        batch_size=int(values.pop("batch_size")),
        settings=values,
        known_losses=chosen["known_losses"],
        until=chosen["until"],
        most_launches=chosen["most_launches"],
    )
    design.points()
    if "until_accuracy" in values and WEAK not in design.scalings:
        raise UserError(
            "--until-accuracy measures weak scaling, whose minibatch grows; add weak to --scaling"
        )
    if stored is None:
        values.setdefault("prefetch", common_prefetch(design))
    elif "prefetch" in stored.settings:
        values.setdefault("prefetch", stored.settings["prefetch"])
    if stored is None:
        _check_limit(design)
        return output or new_folder(config.network), design
    fields = {"scaling": "scalings"}
    default_names = [fields.get(name, name) for name in DEFAULTS if name not in own]
    design = design.with_fields_of(stored, default_names)
    assert output is not None
    refuse_difference(output, stored, design)
    # With --until, the study may have more rounds than the command that started it requests.
    design = replace(design, launches=max(design.launches, stored.launches))
    _check_limit(design)
    return output, design


def _check_limit(design: Design) -> None:
    """Refuse `most_launches` that the launches exceed before --until is considered.

    Raises:
        UserError: there are more launches.
    """
    if design.until and design.most_launches < design.launches:
        raise UserError(
            f"--most-launches is {design.most_launches}, but every point has {design.launches} "
            f"launches before --until adds any; use --most-launches {design.launches} or more"
        )


def _scalings(text: str) -> tuple[str, ...]:
    known = ("weak", "strong")
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(
                f"--scaling is '{text}'; expected weak, strong or both{suggest(name, known)}"
            )
    return tuple(name for name in known if name in names)


def _selection(only: tuple[str, ...], part: str | None) -> Selection:
    from dptrain.scaling.scale import Selection

    if part is None:
        return Selection(only)
    return Selection(only, *parse_part(part))
