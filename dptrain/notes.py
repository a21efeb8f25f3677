"""Notes about data: what is left out, and what is converted by which rule.

`open_data`, `dataset_from` and `open_inputs` show the notes of what they opened. A program that
shows them listens while it opens data, so no command can forget them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_show: ContextVar[Callable[[str], None] | None] = ContextVar("show_notes", default=None)


@contextmanager
def notes_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` once with each different note of data that is opened within the block.

    Example:
        >>> with notes_shown(print):
        ...     show_notes(["arrays are left out: z"])
        ...     show_notes(["arrays are left out: z"])
        arrays are left out: z
    """
    known: set[str] = set()

    def show_once(note: str) -> None:
        if note not in known:
            known.add(note)
            show(note)

    token = _show.set(show_once)
    try:
        yield
    finally:
        _show.reset(token)


def show_notes(notes: Iterable[str]) -> None:
    """Show notes if anything listens."""
    show = _show.get()
    if show is not None:
        for note in notes:
            show(note)
