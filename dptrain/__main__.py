"""`python -m dptrain` and the `dptrain` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line.

    Signals are kept, and a rank of several reports to the watchdog of its node, before larger
    modules are imported: what happens meanwhile is then treated as during training.
    """
    from dptrain.comm.launcher import find_launch

    launch = find_launch()
    try:
        if sys.argv[1:2] in (["train"], ["study"]):
            from dptrain.comm.signals import remember_early_signals

            remember_early_signals()
        if launch.size > 1:
            from dptrain.comm.job import start_job

            start_job(launch.rank, launch.size)
        from dptrain.cli.main import main as run_command_line
    except KeyboardInterrupt:
        if launch.rank == 0:
            sys.stderr.write("dptrain: interrupted\n")
        sys.exit(130)
    run_command_line()


if __name__ == "__main__":
    main()
