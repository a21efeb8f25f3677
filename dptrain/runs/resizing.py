"""Requests for another number of ranks, in the file ``.resize`` of a run directory.

`dptrain resize` writes the file, and the process of `dptrain train --survive` takes it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from dptrain.errors import UserError
from dptrain.files import read_regular, write_whole

REQUEST = ".resize"

_TAKEN_S = 60.0
"""Time in which a request is taken: ranks that start must first make a step."""


def request_ranks(folder: Path, ranks: int) -> None:
    """Request another number of ranks, and wait until the request is taken.

    Args:
        folder: the run directory.
        ranks: number of ranks.

    Raises:
        UserError: no process takes the request.
    """
    path = folder / REQUEST
    write_whole(path, f"{ranks}\n")
    end = time.monotonic() + _TAKEN_S
    while path.exists():
        if time.monotonic() > end:
            path.unlink(missing_ok=True)
            raise UserError(
                f"no dptrain train --survive runs {folder}, so its number of ranks cannot change; "
                "continue it with: dptrain train --survive -n N --run-dir DIR"
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
