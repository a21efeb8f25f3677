"""`python -m dptrain` and the `dptrain` command."""

from __future__ import annotations

import sys

COMMANDS_WITH_MPI = ("train", "evaluate", "predict", "profile", "study", "doctor")


def main() -> None:
    """Run the command line."""
    try:
        _start()
    except KeyboardInterrupt:  # Commands handle it; it came before they were imported.
        sys.stderr.write("dptrain: interrupted\n")
        sys.exit(130)


def _start() -> None:
    """Prepare the process, and run the command.

    Signals are kept, and a rank of several reports to the watchdog of its node, before larger
    modules are imported: what happens meanwhile is then treated as during training.
    """
    from dptrain.cli.output import open_standard_streams

    open_standard_streams()
    from dptrain.comm.job import exit_on_interrupt, start_job
    from dptrain.comm.launching.launcher import find_launch
    from dptrain.comm.signals import receive_early_signals, remember_early_signals

    command, launch = "".join(sys.argv[1:2]), find_launch()
    if command in COMMANDS_WITH_MPI:
        exit_on_interrupt(launch.rank, launch.size)
    if command in ("train", "study"):
        remember_early_signals()
    if launch.size > 1:
        receive_early_signals()
        start_job(launch.rank, launch.size)
    from dptrain.cli.main import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
