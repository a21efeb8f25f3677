"""Names in Unicode: é may be one character (NFC) or two (NFD), and both are the same name."""

from __future__ import annotations

import os
from pathlib import Path
from unicodedata import is_normalized, normalize


def same_form(name: str) -> str:
    """Return a name in the form in which equal names are equal text (NFC).

    Example:
        >>> same_form("e" + chr(0x301)) == chr(0xE9)
        True
    """
    return name if name.isascii() or is_normalized("NFC", name) else normalize("NFC", name)


def printable(name: str) -> str:
    """Return a file name as valid UTF-8: other bytes are replaced by a question mark."""
    return name.encode("utf-8", "replace").decode("utf-8")


def find_path(path: Path) -> Path:
    """Return the path that exists and differs at most in the form of its names.

    macOS writes the names of files in NFD, and people type them in NFC.

    Returns:
        `path` if it exists, or if no other one does.
    """
    if str(path).isascii() or os.path.lexists(path):
        return path
    found = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        inner = found / part
        if not os.path.lexists(inner) and found.is_dir():
            wanted = same_form(part)
            others = (path for path in found.iterdir() if same_form(path.name) == wanted)
            inner = min(others, default=inner)
        found = inner
    return found if os.path.lexists(found) else path
