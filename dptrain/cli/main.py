"""The `dptrain` command: entry point, exit codes, and the commands by name."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout
from pathlib import Path

import click

import dptrain
from dptrain.cli.audit import audit
from dptrain.cli.bench import bench
from dptrain.cli.common import examples, guarded
from dptrain.cli.data import data
from dptrain.cli.describe import describe, layers
from dptrain.cli.doctor import doctor
from dptrain.cli.export import export
from dptrain.cli.find_rate import find_rate
from dptrain.cli.output import safe_output
from dptrain.cli.paper import paper
from dptrain.cli.profile import profile
from dptrain.cli.rehearse import rehearse
from dptrain.cli.report import report
from dptrain.cli.resize import resize
from dptrain.cli.runs import runs
from dptrain.cli.scale import scale
from dptrain.cli.study import study
from dptrain.cli.train import evaluate, predict, train
from dptrain.comm.launching.launcher import find_launch
from dptrain.errors import UserError, path_user_error
from dptrain.notes import notes_shown


def main() -> None:
    """Run the command line. Only rank 0 writes to standard output."""
    is_rank_zero = find_launch(os.environ).rank == 0
    with ExitStack() as stack:
        if not is_rank_zero:
            silence = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(silence))
        output = stack.enter_context(safe_output())
        code = output.exit_code(run(sys.argv[1:], is_rank_zero=is_rank_zero))
        end_if_compiling(code)
        sys.exit(code)


def end_if_compiling(code: int) -> None:
    """End the process without destructors if a thread still compiles after an interruption."""
    compilation = sys.modules.get("dptrain.native.compilation")
    if compilation is not None and compilation.is_compiling():
        from dptrain.comm.abort import exit_at_once

        exit_at_once(code)


def run(arguments: list[str], *, is_rank_zero: bool) -> int:
    """Run one command.

    If the launcher started several processes, all of them agree first that they run the same
    version and command, and a mistake in the flags of one of them ends all.

    Args:
        arguments: those after the program's name.
        is_rank_zero: whether this process prints the errors that all processes make.

    Returns:
        The exit code.
    """
    if find_launch(os.environ).size > 1:
        return guarded(lambda: _run_launched(arguments))
    try:
        return _call(arguments)
    except UserError as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    if is_rank_zero:
        click.echo(f"dptrain: {message}", err=True)
    return code


def _call(arguments: list[str]) -> int:
    """Run one command; errors of click become a `UserError` of one line."""
    is_rank_zero = find_launch(os.environ).rank == 0
    try:
        with notes_shown(_show_note) if is_rank_zero else nullcontext():
            result = cli.main(arguments, prog_name="dptrain", standalone_mode=False)
    except click.UsageError as error:
        # Click ends some messages with a full stop and a question.
        message = " ".join(error.format_message().split())
        path = error.ctx.command_path if error.ctx is not None else "dptrain"
        raise UserError(f"{message.rstrip('.')}; see {path} --help") from None
    except click.ClickException as error:
        raise UserError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None
    except OSError as error:
        raise path_user_error(error) or error from error
    return result if isinstance(result, int) else 0


def _show_note(note: str) -> None:
    """Print a note about data, on standard error if standard output is for a program."""
    context = click.get_current_context(silent=True)
    given = {} if context is None else context.params
    for_program = any(given.get(name) for name in ("as_json", "as_toml"))
    click.echo(f"{'dptrain: ' if for_program else ''}data: {note}", err=for_program)


def _run_launched(arguments: list[str]) -> int:
    """Run one command on one of several processes."""
    from dptrain.comm.world import AgreedError, World

    code = _call(arguments)
    if code == 0 and "mpi4py.MPI" not in sys.modules:
        # The command needs no MPI, but the other processes may run another one.
        try:
            World.connect(command=arguments[0] if arguments else "")
        except AgreedError:
            raise
        except UserError:
            return code  # Processes without a common MPI cannot wait for each other.
    return code


EXIT_CODES = """\b
Exit codes:
  0    success
  1    a bug, silent corruption, or a rank that was killed, hangs or exited
  2    a mistake in flags, files or data; the message shows how to correct it
  3    training diverged: the loss is not finite
  75   stopped early by a signal, with everything saved; the same command continues
  130  interrupted by Ctrl-C before there was anything to save
"""


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "mpirun -n 4 dptrain train                  # model0 on handwritten digits",
        "mpirun -n 4 dptrain train --network solar  # regression on simulated irradiance",
        "dptrain evaluate RUN_DIR                   # a trained network on its test data",
        "dptrain describe cifar --batch-size 128    # layers, FLOPs and memory",
        "mpirun -n 4 dptrain profile                # where the time of a step goes",
        "dptrain scale --ranks 1,2,4                # how training scales, and what limits it",
        "dptrain audit STUDY_DIR                    # whether intervals hold for this noise",
        "dptrain bench solar                        # time by batch size, and what fits",
        "mpirun -n 4 dptrain doctor                 # problems of this installation",
    )
    + "\n\n"
    + EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(dptrain.__version__, prog_name="dptrain", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train convolutional networks by synchronous data parallelism over MPI."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (
    train, rehearse, resize, evaluate, predict, find_rate, data, export, describe, layers, doctor,
    profile, report, paper, runs, scale, audit, bench, study,
):  # fmt: skip
    cli.add_command(command)
