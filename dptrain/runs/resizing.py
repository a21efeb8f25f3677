"""Requests for another number of ranks, in the file ``.resize`` of a run directory.

`dptrain resize` writes the file, and the process of `dptrain train --survive` takes it.
"""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path

from dptrain.errors import UserError
from dptrain.files import read_regular, write_whole
from dptrain.runs.locks import is_locked
from dptrain.runs.names import SUPERVISOR

REQUEST = ".resize"


def request_ranks(folder: Path, ranks: int) -> None:
    """Request another number of ranks, and wait until the request is taken.

    Ranks that start take it after their first step.

    Args:
        folder: the run directory.
        ranks: number of ranks.

    Raises:
        UserError: no `dptrain train --survive` runs there, or it ends before.
    """
    path = folder / REQUEST
    write_whole(path, f"{ranks}\n")
    while path.exists():
        if not is_locked(folder / SUPERVISOR):
            path.unlink(missing_ok=True)
            run = shlex.quote(str(folder))
            raise UserError(
                f"no dptrain train --survive runs {folder}, so its number of ranks cannot change; "
                f"continue it with: dptrain train --survive -n {ranks} --run-dir {run}"
            )
        time.sleep(0.05)


def take_request(folder: Path) -> int | None:
    """Return the requested number of ranks, once; None if there is no request."""
    path = folder / REQUEST
    with suppress(OSError, ValueError):
        ranks = int(read_regular(path, 20))
        path.unlink()
        return ranks if ranks > 0 else None
    return None
