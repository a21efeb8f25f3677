"""Flags, exit codes and helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from dptrain.backends import BACKENDS
from dptrain.cli.parsing import Number

MISTAKE = 2
"""Exit code for a mistake that the user can correct."""

STOPPED = 75
"""Exit code of a command that a signal ended early after it saved its state (EX_TEMPFAIL)."""

EXISTING = click.Path(path_type=Path)

BACKEND_LIST = click.option(
    "--backends",
    "--backend",
    "backends",
    default=BACKENDS[0],
    show_default=True,
    metavar="NAME,…",
    help=f"Implementations of the layers: {', '.join(BACKENDS)}.",
)
DATA = click.option(
    "--data",
    metavar="SPEC",
    help="Data to which a network that is named is adapted, as in train.  "
    "[default: the published size]",
)
WEIGHTS = click.option(
    "--weights",
    type=EXISTING,
    metavar="FILE",
    help="A safetensors or ONNX file whose parameters replace those of the checkpoint.",
)
CHECKPOINT = click.option(
    "--checkpoint",
    type=Number(int, at_least=0),
    metavar="STEP",
    help="Step of the checkpoint.  [default: the best one by the validation data, or the last one]",
)
CONFIG = click.option(
    "--config",
    "file",
    type=EXISTING,
    metavar="FILE",
    help="TOML file of settings, or the name of a preset, see dptrain describe.  [default: none]",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
NETWORK = click.option("--network", metavar="NAME", help="The same as the argument NETWORK.")
PRECISION = click.option(
    "--precision",
    metavar="[fp32|fp32-direct|tf32|bf16|fp64]",
    help="Precision of the arithmetic: fp32; numba also fp32-direct (without "
    "Winograd); cuda and cudnn also tf32 and bf16; reference also fp64.  "
    "[default: the first precision of the "
    "backend]",
)
THREADS = click.option(
    "--threads",
    type=Number(int, at_least=1, at_most=1024),
    metavar="N",
    help="Compute threads.  [default: all cores]",
)


def guarded(action: Callable[[], int]) -> int:
    """Run an action so that a failure on one rank ends all ranks, and is printed once."""
    from dptrain.comm.abort import guard

    return guard(action)


def examples(*lines: str) -> str:
    """Return the end of a help text, with these lines unchanged."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
