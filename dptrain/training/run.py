"""The command ``dptrain train``: a whole run, or a dry run that prints the specification."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path

from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.signals import EARLY_SIGNALS, StopRequest
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.console import make_console
from dptrain.numbers import value_text
from dptrain.runs.spans import Spans
from dptrain.tables import Records, Table, texts
from dptrain.training.callbacks import Progress
from dptrain.training.job import assemble
from dptrain.training.output.summary import data_lines, print_stop_advice
from dptrain.training.persistence.persistence import restore_run
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.settings import Settings
from dptrain.training.spec import RunSpec
from dptrain.training.trainer import Trainer


def train(chosen: Settings, world: World, *, verbose: bool = False) -> bool:
    """Train, and leave a run directory.

    Args:
        chosen: settings with the recipe filled in.
        world: the ranks; every rank calls this function.
        verbose: print all settings, all epochs, and tables of times.

    Returns:
        True if a signal ended training early, after a complete step and with a checkpoint.

    Raises:
        UserError: the second start in a row was stopped by SIGUSR1 after its first step.
    """
    print_stop_advice(world)
    # A request to stop may come before training begins. The run then makes one step, so that a job
    # that is started again and again makes progress. Ctrl-C ends it at once: nothing is lost yet.
    with (
        StopRequest(*EARLY_SIGNALS) as stop,
        Trainer.from_settings(chosen, world, callbacks=[Progress(verbose=verbose)]) as trainer,
    ):
        first = trainer.step
        trainer.fit(stop=stop)
        stop.finish()
        if trainer.progress.stopped and trainer.step - first <= 1:
            _refuse_endless_restarts(trainer, stop)
        return trainer.progress.stopped


def _refuse_endless_restarts(trainer: Trainer, stop: StopRequest) -> None:
    """Refuse to continue a job whose batch system warns it before it trains; on every rank.

    A job with a short time limit would be started again without end, for one step each time.

    Raises:
        UserError: SIGUSR1 stopped this start, and the one before made one step too.
    """
    world, run, step = trainer.job.world, trainer.job.run, trainer.step

    def check() -> None:
        if run is not None and makes_no_progress(Spans.read(run.path), step):
            raise UserError(
                f"{signal.SIGUSR1.name} stopped two starts in a row after one step each, so the "
                f"job would be started again without end; request a longer time limit, such as "
                f"--time=60 of sbatch, or a later signal; checkpoint: step {step} in {run.path}"
            )

    # Another rank may have received the signal first.
    if signal.SIGUSR1.name in world.all_gather_json(stop.signal_name):
        call_on_rank_zero(world, check)


def makes_no_progress(spans: Spans, step: int) -> bool:
    """Return True if each of the last two starts of a run made one step.

    Args:
        spans: the spans of the run.
        step: the last completed step.

    Example:
        >>> from dptrain.runs.spans import Span
        >>> makes_no_progress(Spans((Span(1, {}), Span(2, {}))), 2)
        True
    """
    last = spans.steps_made(step)[-2:]
    return len(last) == 2 and max(last) <= 1


def dry_run(chosen: Settings, world: World) -> None:
    """Do everything that precedes the first step, and print the specification on rank 0.

    Nothing is written.
    """
    job = assemble(chosen, world, keeps_run=False, allows_balance=True)

    def check_checkpoint() -> None:
        if chosen.resume is not None:
            restore_run(chosen, job.run_spec, RunDirectory.open(Path(chosen.resume)), job.replica)

    call_on_rank_zero(world, check_checkpoint)
    if world.is_rank_zero:
        console = make_console()
        for table in specification_tables(job.run_spec):
            console.print(table)
        for line in data_lines(job.network, job.dataset):
            console.print(line, soft_wrap=True)
        console.print(f"preprocessing: {job.dataset.preprocessing}", soft_wrap=True)
        if job.weights:
            console.print(job.weights, soft_wrap=True)
        total = sum(job.memory_bytes.values()) / 2**20
        console.print(f"memory: {total:.1f} MiB per rank")
        console.print(f"digest: {job.run_spec.digest[:16]}")


def specification_tables(spec: RunSpec) -> list[Table]:
    """Return a table of the settings with their origins, and one of the ranks."""
    settings = asdict(spec.job)
    ranks = Records.of(spec.ranks)
    return [
        Table(
            "Settings of the job",
            (
                texts("setting", list(settings), kind="prose"),
                texts("value", [value_text(value) for value in settings.values()], kind="prose"),
                texts("origin", [spec.origin(name) for name in settings], kind="prose"),
            ),
        ),
        Table(
            "Ranks",
            tuple(
                ranks.plain(name, name, "")
                for name in ("rank", "host", "processor", "device", "threads", "cores")
            ),
        ),
    ]
