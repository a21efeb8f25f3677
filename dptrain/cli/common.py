"""Flags, exit codes and helpers that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dptrain.backends import BACKENDS
from dptrain.cli.parsing import Number

MISTAKE = 2
"""Exit code for a mistake that the user can correct."""

STOPPED = 75
"""Exit code of a command that a signal ended early after it saved its state (EX_TEMPFAIL)."""

EXISTING = click.Path(path_type=Path)

Decorator = Callable[[Any], Any]


def number(*flags: str, default: float | None = None, help: str, **limits: Any) -> Decorator:
    """Return the flag of a whole number, or of another one if its default is one.

    Args:
        flags: flags, and the name of the parameter if it differs.
        default: value without the flag.
        help: what it does.
        limits: as in `Number`.
    """
    kind = float if isinstance(default, float) else int
    return click.option(
        *flags,
        type=Number(kind, **limits),
        default=default,
        show_default=default is not None,
        metavar="N" if kind is int else "X",
        help=help,
    )


def output_folder(help: str, *, file_okay: bool = True) -> Decorator:
    """Return the flag ``--output`` of a folder.

    Args:
        help: what is written there.
        file_okay: whether the command itself refuses a file.
    """
    kind = click.Path(path_type=Path, file_okay=file_okay)
    return click.option("--output", type=kind, metavar="DIR", help=help)


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
THREADS = number(
    "--threads", at_least=1, at_most=1024, help="Compute threads.  [default: all cores]"
)


def guarded(action: Callable[[], int]) -> int:
    """Run an action so that a failure on one rank ends all ranks, and is printed once."""
    from dptrain.comm.abort import guard

    return guard(action)


def examples(*lines: str) -> str:
    """Return the end of a help text, with these lines unchanged."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
