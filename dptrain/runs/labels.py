"""Tags and a note of a run, in the file ``labels.toml`` of its directory.

They say what a run is for and change nothing that it computes, so that they may be changed at any
time, also while the run trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dptrain.errors import UserError, shown
from dptrain.files import write_whole
from dptrain.toml import read_toml

FILE = "labels.toml"
TAG = re.compile(r"[\w.+-]+")
"""A tag: letters, digits, ``_``, ``.``, ``+`` and ``-``."""


@dataclass(frozen=True)
class Labels:
    """Tags and a note.

    Attributes:
        tags: the tags, each once, in the order in which they were added.
        note: any text.
    """

    tags: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def read(cls, folder: Path) -> Labels:
        """Return the labels of a run; none if it has no file of them.

        Raises:
            UserError: the file is damaged; the message names it.
        """
        path = folder / FILE
        if not path.exists():
            return cls()
        values = read_toml(path)
        tags, note = values.get("tags", []), values.get("note", "")
        if not isinstance(tags, list) or not isinstance(note, str):
            raise UserError(f'{path}: expected tags = ["…"] and note = "…"; correct the file')
        return cls(parse_tags(map(str, tags)), note)

    def write(self, folder: Path) -> None:
        """Write the labels of a run."""
        import tomli_w

        text = tomli_w.dumps({"tags": list(self.tags), "note": self.note})
        write_whole(folder / FILE, text)

    def changed(
        self, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None
    ) -> Labels:
        """Return the labels with some tags added and removed, and another note unless None.

        Raises:
            UserError: a tag to remove is not there.
        """
        kept = dict.fromkeys((*self.tags, *add))
        for tag in remove:
            if tag not in kept:
                has = ", ".join(self.tags) or "none"
                raise UserError(f"there is no tag '{shown(tag)}' to remove; the tags are: {has}")
            del kept[tag]
        return Labels(tuple(kept), self.note if note is None else note)


def parse_tags(texts: Iterable[str]) -> tuple[str, ...]:
    """Return tags from texts that may contain several, separated by commas.

    Raises:
        UserError: a tag contains another character than `TAG` allows.

    Example:
        >>> parse_tags(["final,batch-512", "final"])
        ('final', 'batch-512')
    """
    tags = [tag.strip() for text in texts for tag in text.split(",") if tag.strip()]
    for tag in tags:
        if not TAG.fullmatch(tag):
            raise UserError(
                f"'{shown(tag)}' is not a tag; expected letters, digits, '_', '.', '+' and '-'"
            )
    return tuple(dict.fromkeys(tags))
