"""Files that hold one record: JSON with a version, read back or refused in one line."""

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
    """A kind of such files.

    Attributes:
        noun: kind of the file, as an error message names it.
        otherwise: what is said where it is none: what was expected, or what to try.
        anew: what to try where it is of another version.
        version: of what is written; nothing else is read.
    """

    noun: str
    otherwise: str
    anew: str
    version: int = 1

    def text(self, record: DataclassInstance) -> str:
        """The file's JSON."""
        return dump_json({"version": self.version, **asdict(record)}, indent=1)

    def write(self, record: DataclassInstance, path: Path) -> None:
        """Write the file whole.

        Raises:
            UserError: it cannot be written.
        """
        write_whole(path, self.text(record) + "\n", "--output")

    def read(self, path: Path, build: Callable[[dict[str, Any]], T]) -> T:
        """Read a file.

        Args:
            path: of the file.
            build: makes the record from its fields; whatever it raises says that it is none.

        Raises:
            UserError: there is no such file, or it is not of this form or version.
        """
        try:
            values = parse_json(path.read_bytes())
            found = values.pop("version")
            if found == self.version:
                return build(values)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no {self.noun} ({error}); {self.otherwise}") from None
        raise UserError(
            f"{path} is of version {found}, this dptrain reads {self.version}; {self.anew}"
        )
