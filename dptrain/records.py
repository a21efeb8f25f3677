"""JSON files with a version that contain one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, read_regular, write_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_IN_JSON: Mapping[Any, Any] = MappingProxyType({
    bool: bool, int: int, float: int | float, str: str, tuple: list | tuple,
    dict: Mapping, Mapping: Mapping,
})  # fmt: skip
"""Types of values by the type of a field."""

T = TypeVar("T")
Record = TypeVar("Record", bound="StoredRecord")


@dataclass(frozen=True)
class Form:
    """A file format.

    Attributes:
        noun: name of the format in messages, such as "profile".
        otherwise: end of the message if a file does not have the format: what was expected, or what
            to do.
        anew: end of the message if a file has another version: what to do.
        version: version of the files that are written. Only files of this version are read.
        dropped: fields that older files of this version have, which are ignored.
    """

    noun: str
    otherwise: str
    anew: str
    version: int = 1
    dropped: tuple[str, ...] = ()

    def text(self, record: DataclassInstance) -> str:
        """Return the record as JSON."""
        return dump_json({"version": self.version, **asdict(record)}, indent=1)

    def read(
        self, path: Path, kind: type[T], check: Callable[[T], None] = lambda record: None
    ) -> T:
        """Read a file.

        Args:
            path: the file.
            kind: dataclass of the record.
            check: raises `ValueError` if the record does not have the format.

        Raises:
            UserError: there is no such file, or it has another format or version.
        """
        try:
            values = parse_json(read_regular(path))
            found = values.pop("version")
            if found == self.version:
                kept = {key: values[key] for key in values if key not in self.dropped}
                record = from_values(kind, kept)
                check(record)
                return record
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            article = "an" if self.noun[0] in "aeiou" else "a"
            raise UserError(
                f"{path} is not {article} {self.noun} ({error}); {self.otherwise}"
            ) from None
        raise UserError(
            f"{path} has version {found}, but this version of dptrain reads {self.version}; "
            f"{self.anew}"
        )


class StoredRecord:
    """A dataclass with a file of its own.

    Attributes:
        FORM: format of the file.
    """

    FORM: ClassVar[Form]

    def text(self) -> str:
        """Return the contents of the file."""
        record: Any = self
        return self.FORM.text(record)

    def write(self, path: Path) -> None:
        """Write the file; after a crash it is complete or absent.

        Raises:
            UserError: it cannot be written.
        """
        write_whole(path, self.text() + "\n", "--output")

    def check(self) -> None:
        """Raise `ValueError` if the record lacks what every complete one has."""

    @classmethod
    def read(cls: type[Record], path: Path) -> Record:
        """Read a file that `write` has written.

        Raises:
            UserError: it does not exist, or has another format or version.
        """
        return cls.FORM.read(path, cls, cls.check)


def from_values(kind: type[T], values: Any) -> T:
    """Return the object of which `dataclasses.asdict` and JSON have made values.

    Args:
        kind: a dataclass whose fields are single values, dataclasses, or tuples, dictionaries or
            optional values of these; or a tuple of them.
        values: as JSON has them.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the values are not those of `kind`.

    Example:
        >>> from_values(Form, {"noun": "profile", "otherwise": "", "anew": ""}).version
        1
    """
    found: T = _convert(kind, values)
    return found


def _convert(kind: Any, values: Any) -> Any:
    if is_dataclass(kind):
        make = cast(Any, kind)
        types = _field_types(make)
        return make(**{name: _convert(types.get(name), value) for name, value in values.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if values is None else _convert(inner[0], values)
    if not isinstance(values, _IN_JSON.get(origin or kind, object)):
        raise TypeError(f"found {values!r:.40}, expected {kind.__name__}")
    if origin is tuple:
        kinds = [inner[0]] * len(values) if inner[-1] is Ellipsis else inner
        return tuple(_convert(*pair) for pair in zip(kinds, values, strict=True))
    if origin in (dict, Mapping):
        return {name: _convert(inner[1], value) for name, value in values.items()}
    return values


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
