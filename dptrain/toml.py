"""Reading TOML files, with a user's mistakes as one line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from dptrain.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; `UserError` if it is absent, unreadable or no TOML."""
    # tomllib is in the standard library from 3.11 on; before that, tomli is the same code.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = parser.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8; expected TOML") from None
    except parser.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    return values
