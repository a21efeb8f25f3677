"""Read TOML files and report mistakes in them in one line."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from dptrain.errors import UserError, shown
from dptrain.files import MAX_TEXT_BYTES, read_regular

_PIPES = (Path("/dev/stdin"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Names that a user chooses on purpose, for example by ``--config <(command)`` in a shell."""

MOST_PARTS = 64
"""Largest number of parts of a dotted key. The parser takes time and memory in proportion to the
square of the number: 2.6 GiB for 26,000 parts, a file of 52 KB."""

_KEY_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*(?:{_KEY_PART}\.[ \t]*){{{MOST_PARTS}}}", re.MULTILINE)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        UserError: the file does not exist, cannot be read, is a special file, or is not TOML.
    """
    # tomllib is in the standard library since Python 3.11; tomli is the same code.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        is_pipe = path in _PIPES or path.parent in _PIPES
        content = path.read_bytes() if is_pipe else read_regular(path, MAX_TEXT_BYTES)
        text = content.decode()
        if _LONG_KEY.search(text):
            raise UserError(f"{path}: a key has more than {MOST_PARTS} parts; expected fewer dots")
        values: dict[str, Any] = parser.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the file is not text in UTF-8; expected TOML") from None
    except RecursionError:
        raise UserError(f"{path}: not TOML: the brackets are nested too deeply") from None
    except UserError:
        raise
    except ValueError as error:
        # TOMLDecodeError, or the plain ValueError of an integer with more than 4,300 digits.
        raise UserError(f"{path}: not TOML: {shown(error, 200)}") from None
    return values
