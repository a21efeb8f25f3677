"""Texts as people read them: their width on a terminal, line breaks, and paths of machines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

WRAPPED = 12
"""Least width of texts that are wrapped and keep their indentation."""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except ends of lines, marks of direction, and bytes that are no UTF-8."""
BREAKS = "+/_-,="
"""Characters after which a long word is broken."""


def without_folders(text: str) -> str:
    """Return a text with the last part of each absolute path, since a page may be published.

    Example:
        >>> without_folders("folder:/data/flowers?classes=a,b at 3 images/s")
        'folder:flowers?classes=a,b at 3 images/s'
    """
    return re.sub(r"(?<![^\s:=,('\"])/(?:[^\s/:;,'\"]+/)*(?=[^\s/])", "", text)


def command_line(*words: object) -> str:
    """Return a command of dptrain that a shell reads as these words.

    Examples:
        >>> command_line("report", "runs/learning rate 0.1")
        "dptrain report 'runs/learning rate 0.1'"
        >>> command_line("report", Path("-0.1"))  # Not an option.
        'dptrain report ./-0.1'
    """
    return shlex.join(["dptrain", *map(_word, words)])


def _word(value: object) -> str:
    return f"./{value}" if isinstance(value, Path) and str(value)[0] == "-" else str(value)


def with_escapes(text: str) -> str:
    r"""Return a text in which a terminal sees no control character but ends of lines.

    Names of classes and columns come from files, and could otherwise change a terminal.

    Example:
        >>> with_escapes("red\x1b[31m\n")
        'red\\x1b[31m\n'
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def width_of(text: str) -> int:
    """Return the number of columns of a terminal that a text takes.

    Example:
        >>> width_of("step"), width_of("猫")
        (4, 2)
    """
    from rich.cells import cell_len

    return cell_len(text)


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text, broken at spaces; words that are wider are broken anywhere.

    Args:
        text: one or several lines.
        width: columns of a terminal, at least 2.

    Example:
        >>> wrap("95% interval of abcdefghij", 8)
        ['95%', 'interval', 'of', 'abcdefgh', 'ij']
    """
    found = []
    for line in text.split("\n"):
        if width_of(line) <= width:
            found.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())] if width > WRAPPED else ""
        present = ""
        for word in _pieces(line.split(), width - len(indent)):
            joined = f"{present} {word}" if present else indent + word
            if present and width_of(joined) > width:
                found.append(present)
                joined = indent + word
            present = joined
        found.append(present)
    return found


def _pieces(words: Iterable[str], width: int) -> Iterator[str]:
    """Yield words; one that is wider than `width` in pieces, if possible after punctuation."""
    for word in words:
        piece = ""
        for letter in word:
            while piece and width_of(piece + letter) > width:
                end = max(piece.rfind(mark) for mark in BREAKS) + 1 or len(piece)
                yield piece[:end]
                piece = piece[end:]
            piece += letter
        yield piece
