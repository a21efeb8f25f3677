"""Objects whose public attributes cannot be set from outside, and values that cannot change."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from dptrain.errors import ReadOnlyError, UserError, suggest


class Sealed:
    """After `seal`, refuses assignments to public attributes, with advice.

    Names that begin with an underscore can be set. A class that a user derives may have further
    attributes of its own. Objects that are not sealed do not check assignments, of which a training
    step makes tens.
    """

    _settable: ClassVar[frozenset[str]] = frozenset()
    _instead_of_pickle: ClassVar[str] = ""
    _instead_of: ClassVar[Mapping[str, str]] = {}
    """What to call instead of methods that classes of other libraries have, by their names."""
    _sealed_names: frozenset[str] = frozenset()

    def seal(self) -> None:
        """Refuse assignments from now on."""
        self._sealed_names = frozenset(vars(self))
        own: Any = type(self)
        self.__class__ = _guarded(own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle and to copy objects that contain threads and memory of devices."""
        name = type(self).__name__
        raise UserError(f"a {name} cannot be pickled or copied; {self._instead_of_pickle}")

    def _may_set(self, name: str) -> bool:
        if name.startswith("_") or name in self._settable:
            return True
        is_own = type(self).__module__.partition(".")[0] == "dptrain"
        return not is_own and not self._has(name) and self._advice(name, None) is None

    def _has(self, name: str) -> bool:
        """Return True if dptrain defines this attribute."""
        own = [cls for cls in type(self).__mro__ if cls.__module__.partition(".")[0] == "dptrain"]
        return name in self._sealed_names or any(name in vars(cls) for cls in own)

    def _advice(self, name: str, value: Any) -> str | None:
        """Return what to use instead of an assignment to `name`; None if nothing is known."""
        return None

    if not TYPE_CHECKING:  # Type checkers would accept any name.

        def __getattr__(self, name: str) -> Any:
            what = f"{type(self).__name__} has no attribute '{name}'"
            advice = self._instead_of.get(name)
            raise AttributeError(f"{what}; {advice}" if advice else what, name=name, obj=self)

    def _refusal(self, name: str, value: Any) -> str:
        what, advice = f"{type(self).__name__}.{name}", self._advice(name, value)
        if advice is not None:
            return f"{what} cannot be set; {advice}"
        names = [known for known in dir(self) if not known.startswith("_")]
        if name in names:
            return f"{what} is read-only"
        return f"{type(self).__name__} has no attribute '{name}'{suggest(name, names)}"


class _Guard(Sealed):
    """The checks of sealed objects."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name[:1] != "_" and not self._may_set(name):
            raise ReadOnlyError(self._refusal(name, value))
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name[:1] != "_":
            raise ReadOnlyError(f"{type(self).__name__}.{name} cannot be deleted")
        super().__delattr__(name)


@functools.cache
def _guarded(cls: Any) -> Any:
    """Return the class of sealed objects of a class: the same, with checks."""
    if issubclass(cls, _Guard):
        return cls
    same = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Guard, cls), {**same, "__qualname__": cls.__qualname__})


class ReadOnlyDict(dict[str, Any]):
    """A dictionary that refuses changes; ``dict(values)`` is a copy that can be changed."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ReadOnlyError("this dictionary is read-only; change a copy: dict(values)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that refuses changes; ``list(values)`` is a copy that can be changed."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ReadOnlyError("this list is read-only; change a copy: list(values)")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = clear = extend = insert = _refuse
    pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def read_only(value: Any) -> Any:
    """Return JSON values as dictionaries and lists that refuse changes."""
    if isinstance(value, Mapping):
        return ReadOnlyDict((name, read_only(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return ReadOnlyList(map(read_only, value))
    return value
