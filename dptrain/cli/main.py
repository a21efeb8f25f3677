"""The `dptrain` command: entry point, exit codes, and the commands by name."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import click

import dptrain
from dptrain.backends import BACKENDS
from dptrain.cli.bench import bench
from dptrain.cli.common import EXISTING, JSON, STOPPED, examples, guarded
from dptrain.cli.options import RUN_DIR, given, setting_flags
from dptrain.cli.output import safe_output
from dptrain.cli.profile import profile
from dptrain.cli.report import report
from dptrain.cli.scale import scale
from dptrain.cli.study import study
from dptrain.comm.launcher import find_launch
from dptrain.errors import UserError
from dptrain.training.settings import load_settings


def main() -> None:
    """Run the command line. Only rank 0 writes to standard output."""
    is_rank_zero = find_launch(os.environ).rank == 0
    with ExitStack() as stack:
        if not is_rank_zero:
            silence = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(silence))
        output = stack.enter_context(safe_output())
        sys.exit(output.exit_code(run(sys.argv[1:], is_rank_zero=is_rank_zero)))


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
    try:
        result = cli.main(arguments, prog_name="dptrain", standalone_mode=False)
    except click.UsageError as error:
        # Click ends some messages in a full stop and a question.
        message = " ".join(error.format_message().split())
        path = error.ctx.command_path if error.ctx is not None else "dptrain"
        raise UserError(f"{message.rstrip('.')}; see {path} --help") from None
    except click.ClickException as error:
        raise UserError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


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


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "mpirun -n 4 dptrain train                  # model0 on handwritten digits",
        "mpirun -n 4 dptrain train --network solar  # a regression, on simulated irradiance",
        "dptrain evaluate RUN_DIR                   # a trained network on its test data",
        "dptrain describe cifar --batch-size 128    # layers, FLOPs and memory",
        "mpirun -n 4 dptrain profile                # where the time of training goes",
        "dptrain scale --ranks 1,2,4                # how training scales, and what limits it",
        "dptrain bench solar                        # time by batch size, and what fits",
        "mpirun -n 4 dptrain doctor                 # what is wrong here, and what to do",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(dptrain.__version__, prog_name="dptrain", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train convolutional networks by synchronous data parallelism over MPI."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(
    epilog=examples(
        "mpirun -n 4 dptrain train",
        "mpirun -n 2 dptrain train --network cifar --data cifar10:DIR --crop 4 --flip",
        "mpirun -n 4 dptrain train --network mine.toml --data npz:FILE --steps 500",
        "mpirun -n 4 dptrain train --resume RUN_DIR",
    )
)
@click.option("--config", "file", type=EXISTING, metavar="FILE", help="TOML file of settings.")
@click.option("--dry-run", "dry", is_flag=True,
              help="Check everything, print the resolved settings and stop.")  # fmt: skip
@setting_flags()
def train(file: Path | None, dry: bool, **flags: Any) -> int:
    """Train a network on all ranks.

    Each setting can be a key of the --config FILE (batch_size = 64), an environment variable
    (DPTRAIN_BATCH_SIZE=64) or a flag (--batch-size 64); flags win, then the environment.

    Ctrl-C, SIGTERM and SIGUSR1 end training at the next step, with a checkpoint; the exit code is
    then 75, and --resume goes on from there. It is 2 for a mistake of yours, 1 for one of ours.
    """

    def action() -> int:
        from dptrain.training.rundir import RunDirectory

        chosen = given(flags)
        if "resume" in chosen:
            RunDirectory.open(Path(chosen["resume"]))
        # A run that was begun by the same command has taken in what the file says.
        goes_on = "resume" in chosen and flags["resume"] == RUN_DIR
        config = load_settings(chosen, os.environ, None if goes_on else file)
        from dptrain.comm.world import World
        from dptrain.training.run import dry_run, train

        world = World.connect(timeout=config.timeout, command="train")
        if dry:
            dry_run(config, world)
            return 0
        stopped = train(config, world)
        # A warning of the batch system that time is short must not kill a finished run.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return STOPPED if stopped else 0

    return guarded(action)


@cli.command(
    epilog=examples(
        "dptrain evaluate RUN_DIR",
        "mpirun -n 4 dptrain evaluate RUN_DIR --checkpoint 450",
    )
)
@click.argument("run_dir", type=EXISTING)
@click.option("--data", metavar="NAME", help="Other data than the run's, as in train.")
@click.option("--checkpoint", type=int, metavar="STEP", help="Step to evaluate; the last one.")
@JSON
def evaluate(run_dir: Path, data: str | None, checkpoint: int | None, as_json: bool) -> int:
    """Evaluate a trained network on test data."""

    def action() -> int:
        from dptrain.cli.printing import print_values
        from dptrain.comm.world import World
        from dptrain.training.evaluation import evaluate_model
        from dptrain.training.model import load_on_all_ranks

        world = World.connect(command="evaluate")
        model = load_on_all_ranks(run_dir, world, checkpoint)
        result = evaluate_model(model, data, world)
        if world.is_rank_zero:
            print_warning(model.warning)
            print_values(result, as_json=as_json)
        return 0

    return guarded(action)


def print_warning(warning: str | None) -> None:
    """Print a warning on standard error."""
    if warning is not None:
        click.echo(f"dptrain: warning: {warning}", err=True)


@cli.command(epilog=examples("dptrain predict RUN_DIR -i images/ -o answers.csv"))
@click.argument("run_dir", type=EXISTING)
@click.option("-i", "--data", "source", type=EXISTING, required=True, metavar="INPUT",
              help="A .npy, .npz or .csv file, or a folder of images.")  # fmt: skip
@click.option("-o", "--output", type=EXISTING, required=True, metavar="FILE",
              help="CSV file to write, a line a sample.")  # fmt: skip
@click.option("--checkpoint", type=int, metavar="STEP", help="Step to use; the last one.")
def predict(run_dir: Path, source: Path, output: Path, checkpoint: int | None) -> int:
    """Write what a trained network says about new samples."""

    def action() -> int:
        from dptrain.comm.world import World
        from dptrain.training.model import load_on_all_ranks
        from dptrain.training.prediction import predict_to_file

        world = World.connect(command="predict")
        model = load_on_all_ranks(run_dir, world, checkpoint)
        count = predict_to_file(model, source, output, world)
        if world.is_rank_zero:
            print_warning(model.warning)
            click.echo(f"{count} predictions by the model of step {model.step} in {output}")
        return 0

    return guarded(action)


@cli.command(
    short_help="Show layers, FLOPs and memory of a network.",
    epilog=examples(
        "dptrain describe",
        "dptrain describe model0",
        "dptrain describe mlp-25600-12800-6656 --batch-size 1000 --optimizer adam",
    ),
)
@click.argument("network", required=False)
@click.option("--batch-size", type=int, default=32, show_default=True, metavar="N",
              help="Samples of one rank in a step.")  # fmt: skip
@click.option("--backend", type=str, default=BACKENDS[0], show_default=True,
              metavar=f"[{'|'.join(BACKENDS)}]", help="What computes.")  # fmt: skip
@click.option("--precision", metavar="NAME", help="Arithmetic, a word of the backend's.")
@click.option("--optimizer", type=click.Choice(["sgd", "adam"]),
              help="Update rule; what suits the network where left out.")  # fmt: skip
@click.option("--threads", type=int, default=1, show_default=True, metavar="N",
              help="Threads of a rank.")  # fmt: skip
@click.option("--inference", is_flag=True, help="Without gradients and updates.")
@JSON
def describe(network: str | None, as_json: bool, inference: bool, **choices: Any) -> None:
    """Show a network's layers, FLOPs, and the memory that training takes on one rank.

    NETWORK is a name or a .toml file; without it, the networks that there are. Nothing is
    allocated, so it also answers for what does not fit.
    """
    from dptrain.cli.printing import print_description, print_networks

    if network is None:
        from dptrain.describe import list_networks

        print_networks(list_networks(), as_json=as_json)
        return
    from dptrain.describe import describe_plan, plan_for
    from dptrain.network.files import get_network

    plan = plan_for(get_network(network), training=not inference, **choices)
    print_description(describe_plan(plan), as_json=as_json)


@cli.command(
    short_help="Time every layer of a step, with one backend or several.",
    epilog=examples(
        "dptrain layers model2",
        "dptrain layers cifar --backend cuda --backend cudnn --precision tf32 --batch-size 2048",
    ),
)
@click.argument("network")
@click.option("--backend", "backends", type=str, multiple=True, default=BACKENDS[:1],
              show_default=True, metavar=f"[{'|'.join(BACKENDS)}]",
              help="What computes; more than one are put side by side.")  # fmt: skip
@click.option("--batch-size", type=int, default=32, show_default=True, metavar="N",
              help="Samples of the step.")  # fmt: skip
@click.option("--precision", metavar="NAME", help="Arithmetic, a word of every backend's.")
@click.option("--threads", type=int, default=1, show_default=True, metavar="N",
              help="Threads that compute.")  # fmt: skip
@JSON
def layers(network: str, backends: tuple[str, ...], as_json: bool, **choices: Any) -> None:
    """Time each layer of a training step alone, forward and backward, on random numbers.

    NETWORK is a name or a .toml file. Times are medians with their quartiles. With more than one
    backend the last columns say how many times as long the first takes.
    """
    from dptrain.cli.printing import print_layers
    from dptrain.measure.layers import time_layers
    from dptrain.network.files import get_network

    described = get_network(network)
    rows = time_layers(described, list(dict.fromkeys(backends)), **choices)
    print_layers(rows, described, as_json=as_json, **choices)


@cli.command(
    short_help="Look for what is wrong here, and what to do.",
    epilog=examples(
        "dptrain doctor",
        "mpirun -n 4 dptrain doctor",
    ),
)
@JSON
def doctor(as_json: bool) -> int:
    """Look for what is wrong with MPI, threads, kernels, caches and GPUs, and say what to do.

    The exit code is 1 if there is a problem.
    """

    def action() -> int:
        from dptrain.cli.printing import print_findings
        from dptrain.doctor import examine
        from dptrain.doctor.finding import PROBLEM

        findings = examine()
        if findings:
            print_findings(findings, as_json=as_json)
        return int(any(finding.status == PROBLEM for finding in findings))

    return guarded(action)


cli.add_command(profile)
cli.add_command(report)
cli.add_command(scale)
cli.add_command(bench)
cli.add_command(study)
