"""Reading ``name:path?key=value&key=value``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dptrain.data.base import Dataset
from dptrain.errors import UserError, suggest
from dptrain.network.network import Network


@dataclass(frozen=True)
class Request:
    """What the user asked for, taken apart.

    Attributes:
        name: of the source.
        path: between the colon and the question mark, as given.
        options: behind the question mark.
        network: which the data is for.
        seed: of the run; generated data starts from it.
        ranks_per_node: ranks that open the data set on this node, each with its own copy.
    """

    name: str
    path: str
    options: Mapping[str, str]
    network: Network
    seed: int
    ranks_per_node: int = 1

    def number(self, key: str, default: int, *, minimum: int = 1) -> int:
        """A whole number among the options."""
        text = self.options.get(key)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise UserError(
                f"{self.name}: {key} is '{text}'; expected a whole number of at least {minimum}"
            )
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """One of some words among the options; the first where it is left out."""
        value = self.options.get(key, choices[0])
        if value not in choices:
            raise UserError(
                f"{self.name}: {key} is '{value}'; expected {' or '.join(choices)}"
                + suggest(value, choices)
            )
        return value

    def existing(self, kind: str) -> Path:
        """The path, which must be a ``file`` or a ``directory``."""
        return existing(Path(self.path), kind)


@dataclass(frozen=True)
class Source:
    """A kind of data that users can name.

    Attributes:
        open: makes the data set.
        summary: one line of help.
        example: a whole spec.
        path: placeholder for what stands behind the colon, "" where nothing does.
        options: key to placeholder.
        required: keys among them that must be given.
    """

    open: Callable[[Request], Dataset]
    summary: str
    example: str
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def form(self, name: str) -> str:
        """How a spec of this source is written, optional parts in brackets."""
        text = f"{name}:{self.path}" if self.path else name
        must = "&".join(f"{key}={self.options[key]}" for key in self.required)
        may = [f"{key}={value}" for key, value in self.options.items() if key not in self.required]
        first = "&" if must else "?"
        text += f"?{must}" if must else ""
        return text + "".join(f"[{first if not i else '&'}{part}]" for i, part in enumerate(may))


def existing(path: Path, kind: str) -> Path:
    """`path`, or `UserError` unless it is a ``file`` or a ``directory`` as `kind` says."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a {kind}")
    if not (path.is_dir() if kind == "directory" else path.is_file()):
        raise UserError(f"{path} is not a {kind}")
    return path


def _at_home(path: str) -> str:
    # Behind a colon no shell puts the home directory in.
    return str(Path(path).expanduser()) if path[:2] == "~/" else path


def absolute(spec: str, folder: Path | None = None) -> str:
    """Return `spec` with absolute paths, so that it means the same in any directory.

    Args:
        spec: of the data.
        folder: to which relative paths belong; the current directory if it is None.
    """
    place, question, tail = spec.partition("?")
    name, _, path = place.partition(":")
    if not path:
        return spec
    parts = path.split(",") if name == "npy" else [path]
    path = ",".join(str((folder or Path()).joinpath(_at_home(part)).absolute()) for part in parts)
    return f"{name}:{path}{question}{tail}"


def parse(
    spec: str,
    sources: Mapping[str, Source],
    network: Network,
    seed: int,
    ranks_per_node: int = 1,
) -> Request:
    """Take a spec apart and check it against the sources.

    Raises:
        UserError: an unknown source or option, a path that is missing or not wanted.
    """
    if any(letter < " " or "\ud800" <= letter <= "\udfff" for letter in spec):
        raise UserError(f"data {spec!a} is no plain text; rename what it names")
    place, question, tail = spec.partition("?")
    name, colon, path = place.partition(":")
    path = ",".join(map(_at_home, path.split(",")))
    if name not in sources:
        raise UserError(
            f"unknown data '{name}'; expected one of {', '.join(sources)}" + suggest(name, sources)
        )
    source = sources[name]
    form = source.form(name)
    if bool(path) != bool(source.path) or (colon and not path):
        problem = f"needs {source.path}" if source.path else "takes no path"
        raise UserError(f"data '{spec}': {name} {problem}; expected {form}")
    options: dict[str, str] = {}
    for part in tail.split("&") if question else ():
        key, equals, value = part.partition("=")
        if key not in source.options:
            known = f"it has {', '.join(source.options)}" if source.options else "it has none"
            raise UserError(f"{name} has no option '{key}'; {known}" + suggest(key, source.options))
        if not equals or not value or key in options:
            raise UserError(f"data '{spec}': expected {key}={source.options[key]}, once")
        options[key] = value
    for key in source.required:
        if key not in options:
            raise UserError(f"data '{spec}': {key} is missing; expected {form}")
    return Request(name, path, options, network, seed, ranks_per_node)
