"""The command ``dptrain train``: a whole run, or a dry run that prints the specification."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from dptrain.comm.collective import call_on_rank_zero
from dptrain.comm.signals import EARLY_SIGNALS, StopRequest
from dptrain.comm.world import World
from dptrain.measure.console import make_console
from dptrain.measure.tables import fitted_table
from dptrain.network.adaptation import describe_adaptation
from dptrain.training.callbacks import Progress
from dptrain.training.job import assemble
from dptrain.training.persistence import restore_run
from dptrain.training.rundir import RunDirectory
from dptrain.training.settings import Settings
from dptrain.training.spec import RunSpec
from dptrain.training.trainer import Trainer


def train(chosen: Settings, world: World) -> bool:
    """Train, and leave a run directory.

    Args:
        chosen: settings with the recipe filled in.
        world: the ranks; every rank calls this function.

    Returns:
        True if a signal ended training early, after a complete step and with a checkpoint.
    """
    # A request to stop may come before training begins. The run then makes one step, so that a job
    # that is started again and again makes progress. Ctrl-C ends it at once: nothing is lost yet.
    with (
        StopRequest(*EARLY_SIGNALS) as stop,
        Trainer.from_settings(chosen, world, callbacks=[Progress(tables=True)]) as trainer,
    ):
        trainer.fit(stop)
        stop.finish()
        return trainer.progress.stopped


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
        adaptation = describe_adaptation(job.network)
        if adaptation:
            console.print(f"network: {job.network.name} {adaptation}", soft_wrap=True)
        for line in (job.dataset.description, *job.dataset.notes):
            console.print(f"data: {line}", soft_wrap=True)
        console.print(f"preprocessing: {job.dataset.preprocessing}", soft_wrap=True)
        total = sum(job.memory_bytes.values()) / 2**20
        console.print(f"memory: {total:.1f} MiB per rank")
        console.print(f"digest: {job.run_spec.digest[:16]}")


def specification_tables(spec: RunSpec) -> list[object]:
    """Return a table of the settings with their origins, and one of the ranks."""
    settings = [(name, _text(value), spec.origin(name)) for name, value in asdict(spec.job).items()]
    ranks = [
        (str(r.rank), r.host, r.processor, r.device, str(r.threads), str(r.cores))
        for r in spec.ranks
    ]
    names = ("setting", "value", "origin")
    columns = ("rank", "host", "processor", "device", "threads", "cores")
    return [
        fitted_table("Settings of the job", names, settings, text=names),
        fitted_table("Ranks", columns, ranks, text=("host", "processor", "device")),
    ]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
