"""How a module declares the settings that belong to it.

A group of settings is a frozen dataclass in the module that uses them, derived from `SettingGroup`.
`dptrain.training.settings.Settings` combines all groups. Flags, environment variables, keys of
files and arguments of `Trainer` follow from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, get_args, get_type_hints

from dptrain.bounds import Limits, as_number, convert, expected_number
from dptrain.errors import UserError, shown, suggest

if TYPE_CHECKING:
    from dptrain.network.zoo.recipes import Recipe

T = TypeVar("T")

UntilRecipe = TypeVar("UntilRecipe", bound=None)
"""A part of the type of a setting that is None until the recipe of the network is filled in."""

UntilStart = TypeVar("UntilStart", bound=None)
"""A part of the type of a setting that is None until the job starts: the backend, the data or the
machine decides."""

Known = NoReturn
"""Either of them when no setting can be None any more: `int | Known` is `int`."""

PREFIX = "DPTRAIN_"
"""First letters of the environment variables of settings."""

HEADINGS = ("model", "data", "optimisation", "parallelism", "output", "measurement")
"""Headings under which help texts list the settings, in order."""


def setting(
    heading: str,
    default: Any,
    help: str,
    *,
    otherwise: str = "from the network's recipe",
    unset: Any = None,
    hint: Callable[[Any], str] | None = None,
    convert: Callable[[Any], Any] | None = None,
    **limits: Any,
) -> Any:
    """Declare a setting of a group.

    Args:
        heading: one of `HEADINGS`.
        default: the value; None if it is resolved later.
        help: what it does, in the help texts and in the reference.
        otherwise: what replaces a default of None, as a phrase.
        unset: the value that means that nothing is set, such as 0 for no limit; it replaces None
            when the recipe of the network is filled in. None if there is no such value.
        hint: returns the end of the message for a value of a wrong type.
        convert: returns the value for one of another type, such as a text for a list.
        limits: see `Limits`.
    """
    assert heading in HEADINGS
    metadata = {
        "group": heading, "help": help, "otherwise": otherwise, "unset": unset, "hint": hint,
        "convert": convert, "limits": Limits(**limits),
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def first(value: T | None, otherwise: T) -> T:
    """Return the value of a setting, or what replaces it if it is not set."""
    return otherwise if value is None else value


def no_effect(name: str, value: Any, other: str, present: Any, values: Sequence[str]) -> str:
    """Return the message for a setting that has no effect with the value of another one.

    Args:
        name, value: of the setting.
        other, present: name and value of the other setting.
        values: of the other setting with which it has an effect; empty: all but 0.

    Example:
        >>> no_effect("power", 2.0, "schedule", "cosine", ["polynomial"])
        '--power is 2.0, but it has no effect with --schedule cosine; remove it, or use --schedule \
polynomial'
    """
    flag, other_flag = (f"--{each.replace('_', '-')}" for each in (name, other))
    if present is False:
        return (
            f"{flag} is {shown(value)}, but it has no effect without {other_flag}; remove it, or "
            f"add {other_flag}"
        )
    return (
        f"{flag} is {shown(value)}, but it has no effect with {other_flag} {present}; remove it, "
        f"or use {other_flag} {' or '.join(values) or 'above 0'}"
    )


def as_list_text(value: Any) -> Any:
    """Return the items of a list, or of a mapping, as a text; another value as it is.

    Example:
        >>> as_list_text(["conv1", "layer1.*"]), as_list_text({"fc": 10, "*": 0.5})
        ('conv1,layer1.*', 'fc=10,*=0.5')
    """
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return ",".join(map(str, value)) if is_list else value


@dataclass(frozen=True)
class SettingGroup(Generic[UntilRecipe, UntilStart]):
    """Settings that belong to one module."""

    def refuse_contradictions(self) -> None:
        """Raise `UserError` if two settings of the group contradict each other."""

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        """Return the settings that the recipe of a network fills in, also those that were set."""
        return {}


@dataclass(frozen=True)
class Setting:
    """One field of a group as a flag, an environment variable and a key of a file."""

    name: str
    type: type[Any]
    optional: bool
    default: Any
    group: str
    help: str
    otherwise: str
    unset: Any
    hint: Callable[[Any], str] | None
    convert: Callable[[Any], Any] | None
    limits: Limits

    @property
    def flag(self) -> str:
        """The flag, for example ``--batch-size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable, for example ``DPTRAIN_BATCH_SIZE``."""
        return PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default, or a phrase that states how the value is chosen."""
        if self.default is None:
            return self.otherwise
        return {True: "on", False: "off"}[self.default] if self.type is bool else str(self.default)

    @property
    def expected(self) -> str:
        """A phrase for the valid values."""
        if self.limits.choices is not None:
            return f"one of {', '.join(self.limits.choices)}"
        if self.type in (int, float):
            return expected_number(self.type, self.limits)
        return {bool: "true or false", Path: "a path"}.get(self.type, "text")

    def check(self, value: Any, source: str) -> Any:
        """Return `value` with the right type, or raise a `UserError` that names `source`."""
        if value is None and self.optional:
            return value
        value = as_number(value, self.type)
        if self.convert is not None:
            value = self.convert(value)
        if self.type in (Path, str) and isinstance(value, str | Path):
            value = self.type(value)
        is_right = isinstance(value, Path) if self.type is Path else type(value) is self.type
        if not (is_right and self.limits.allow(value)):
            text = f"'{shown(value)}'" if isinstance(value, str) else shown(value)
            hint = suggest(str(value), self.limits.choices or ())
            hint = hint or (self.hint(value) if self.hint is not None else "")
            raise UserError(f"{source} is {text}; expected {self.expected}{hint}")
        return value

    def parse(self, text: str, source: str) -> Any:
        """Convert the text of a flag or of a variable."""
        value: Any = text
        if self.type is bool:
            texts = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            value = texts.get(text.lower(), text)
        elif self.type in (int, float):
            if self.optional and text.lower() == "none":
                return None
            found = convert(text, self.type)
            value = text if found is None else found
        return self.check(value, source)


def settings_of(groups: type[SettingGroup[None, None]]) -> Iterator[Setting]:
    """Yield the settings of a class that combines groups, in the order of its bases."""
    hints, items = get_type_hints(groups), {item.name: item for item in fields(groups)}
    names = [name for cls in groups.__mro__ for name in vars(cls).get("__annotations__", ())]
    for name in names:
        if name not in items or "group" not in items[name].metadata:
            continue
        item = items[name]
        members = get_args(hints[name]) or (hints[name],)
        yield Setting(
            name=name,
            type=members[0],
            optional=len(members) > 1,
            default=item.default,
            **{**item.metadata, "limits": item.metadata["limits"].of(members[0])},
        )
