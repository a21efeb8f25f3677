"""JSON files with a version that contain one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, write_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """A file format.

    Attributes:
        noun: name of the format in messages, such as "profile".
        otherwise: end of the message if a file does not have the format: what was expected, or what
            to do.
        anew: end of the message if a file has another version: what to do.
        version: version of the files that are written. Only files of this version are read.
    """

    noun: str
    otherwise: str
    anew: str
    version: int = 1

    def text(self, record: DataclassInstance) -> str:
        """Return the record as JSON."""
        return dump_json({"version": self.version, **asdict(record)}, indent=1)

    def write(self, record: DataclassInstance, path: Path) -> None:
        """Write a file; after a crash it is complete or absent.

        Raises:
            UserError: it cannot be written.
        """
        write_whole(path, self.text(record) + "\n", "--output")

    def read(self, path: Path, build: Callable[[dict[str, Any]], T]) -> T:
        """Read a file.

        Args:
            path: the file.
            build: makes the record from its fields. A `ValueError`, `KeyError`, `TypeError` or
                `AttributeError` means that the file does not have the format.

        Raises:
            UserError: there is no such file, or it has another format or version.
        """
        try:
            values = parse_json(path.read_bytes())
            found = values.pop("version")
            if found == self.version:
                return build(values)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a {self.noun} ({error}); {self.otherwise}") from None
        raise UserError(
            f"{path} has version {found}, but this version of dptrain reads {self.version}; "
            f"{self.anew}"
        )
