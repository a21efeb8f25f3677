"""Data specs: ``name:path?key=value&key=value``.

In a path, or in the name of a column or a class, ``?``, ``&`` and ``,`` are written as ``%3F``,
``%26`` and ``%2C``, and ``%`` as ``%25`` if one of these codes would follow. Any other ``%`` is
itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dptrain.bounds import Limits, parse_number, wrong_number
from dptrain.data.base import Dataset
from dptrain.data.preprocessing.classes import MOST_NAMES, Names, names_from, read_names
from dptrain.data.preprocessing.names import find_path
from dptrain.data.preprocessing.preprocessing import FITS, Preprocessing
from dptrain.errors import UserError, shown, suggest
from dptrain.network.network import Network

CLASSES = "classes"
"""The option with the names of labels."""
NAMES_SUFFIX = ".txt"
"""Ending of the path of a file with the names of labels."""
_NUMBERED = re.compile(r"(-?[0-9]{1,18}):(.+)")

PYTHON_DATA = ("arrays", "samples")
"""Names of data sets that were made from Python objects; see `dptrain.data.sources.objects`."""

_CODE = re.compile("%(3F|26|2C|25)", re.IGNORECASE)


def escape(text: str, *, commas: bool = True, ampersands: bool = False) -> str:
    """Return a path or a name as it is written in a data spec; see the description of this module.

    Args:
        text: any path or name.
        commas: False if the spec has one path at this position, in which commas need no code.
        ampersands: True in the value of an option.

    Example:
        >>> escape("why?/50%.npy")
        'why%3F/50%.npy'
    """
    text = re.sub("%(?=3F|26|2C|25)", "%25", text, flags=re.IGNORECASE).replace("?", "%3F")
    text = text.replace(",", "%2C") if commas else text
    return text.replace("&", "%26") if ampersands else text


def unescape(text: str) -> str:
    """Return the path or the name that a part of a data spec stands for.

    Example:
        >>> unescape("why%3F/50%.npy")
        'why?/50%.npy'
    """
    return _CODE.sub(lambda code: chr(int(code[1], 16)), text)


@dataclass(frozen=True)
class Request:
    """A parsed data spec and what the data is opened for.

    Attributes:
        name: of the source.
        path: the part between the colon and the question mark, as given; `paths` and `existing`
            return what it stands for.
        options: the part after the question mark, as given.
        network: for which the data is preprocessed.
        seed: of the run; generated data depends on it.
        ranks_per_node: ranks on this node that open the data set, each with its own copy.
        preprocessing: saved with the model; None if it is to be determined.
        split: False if a data set without a split of its own is used as a whole.
        names: of the labels, if the user states them.
    """

    name: str
    path: str
    options: Mapping[str, str]
    network: Network
    seed: int
    ranks_per_node: int = 1
    preprocessing: Preprocessing | None = None
    split: bool = True
    names: Names | None = None

    @property
    def text(self) -> str:
        """Name of the data without its options, for messages."""
        return f"{self.name}:{self.path}" if self.path else self.name

    def example_of_names(self, names: Names) -> str:
        """Return how a user states the names of the labels of this data."""
        if self.name in PYTHON_DATA:
            stated = list(names.values()) if in_order(names) else dict(names)
            some = stated if len(names) <= MOST_NAMES else "NAMES, a list or a mapping of them"
            return f"classes={some}"
        options = "".join(f"{key}={text}&" for key, text in self.options.items())
        return f"{self.text}?{options}classes={example_of_option(names)}"

    @property
    def is_named(self) -> bool:
        """False if the data are objects in Python."""
        return self.name not in ("arrays", "samples")

    @property
    def fit(self) -> str:
        """``resize`` or ``crop``: from the options, else from the saved preprocessing."""
        saved = self.preprocessing
        if saved is None:
            return self.choice("fit", FITS)
        if self.options.get("fit", saved.fit) != saved.fit:
            raise UserError(
                f"{self.text}: fit is '{self.options['fit']}', but the network was trained with "
                f"fit={saved.fit}; leave it out"
            )
        return saved.fit

    def number(self, key: str, default: int, *, minimum: int = 1) -> int:
        """Return an option that is a whole number."""
        text = self.options.get(key)
        if text is None:
            return default
        limits = Limits(at_least=minimum)
        value = parse_number(text, int, limits)
        if value is None:
            raise UserError(wrong_number(f"{self.name}: {key}", text, int, limits))
        return int(value)

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """Return an option that is one of `choices`; the first one is the default."""
        value = self.options.get(key, choices[0])
        if value not in choices:
            raise UserError(
                f"{self.name}: {key} is '{shown(value)}'; expected {' or '.join(choices)}"
                + suggest(value, choices)
            )
        return value

    def existing(self, kind: str) -> Path:
        """Return the path, which must be a ``file`` or a ``directory``."""
        return existing(Path(unescape(self.path)), kind)

    @property
    def paths(self) -> list[str]:
        """The paths of a list that is separated by commas."""
        return [unescape(part) for part in self.path.split(",")]


@dataclass(frozen=True)
class Source:
    """A kind of data that a spec can name.

    Attributes:
        open: makes the data set.
        summary: one line of help.
        example: a complete spec.
        path: placeholder for the part after the colon; "" if there is none.
        options: key to placeholder.
        required: keys among them that must be given; `open` checks them.
        details: lines of help about the format.
        probe: returns a linear network for the samples, without opening all of them, and raises
            `UserError` if a file is missing or damaged; None if any network's shape will do.
        paths: True if the path is a list of files, separated by commas.
    """

    open: Callable[[Request], Dataset]
    summary: str
    example: str
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    probe: Callable[[Request], Network] | None = None
    paths: bool = False

    def form(self, name: str) -> str:
        """Return how a spec of this source is written, with optional parts in brackets."""
        text = f"{name}:{self.path}" if self.path else name
        must = "&".join(f"{key}={self.options[key]}" for key in self.required)
        may = [f"{key}={value}" for key, value in self.options.items() if key not in self.required]
        first = "&" if must else "?"
        text += f"?{must}" if must else ""
        return text + "".join(f"[{first if not i else '&'}{part}]" for i, part in enumerate(may))


def existing(path: Path, kind: str) -> Path:
    """Return `path`; raise `UserError` unless it is a ``file`` or a ``directory`` as required."""
    path = find_path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a {kind}")
    if not (path.is_dir() if kind == "directory" else path.is_file()):
        raise UserError(f"{path} is not a {kind}")
    return path


_KINDS = {
    ".csv": "csv", ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".tar": "webdataset",
}  # fmt: skip
"""Sources of files by their suffix."""


def _form_of_path(text: str) -> str:
    """Return how to name an existing file or folder as data; "" if it is none of known type."""
    path = Path(_expand_home(text))
    kind = "folder" if path.is_dir() else _KINDS.get(path.suffix.lower())
    if kind is None or not text or not path.exists():
        return ""
    option = "?target=COLUMN" if kind == "csv" else ""
    return f"it is a {'folder' if path.is_dir() else 'file'}, so use {kind}:{shown(text)}{option}"


def _split_path(path: str, *, paths: bool) -> list[str]:
    """Return the parts of the path of a spec, which are expanded and still escaped."""
    parts = path.split(",") if paths else [path]
    return [_expand_home(part) for part in parts]


def _expand_home(path: str) -> str:
    # A shell does not expand ~ after a colon.
    return escape(str(Path.home()), ampersands=True) + path[1:] if path[:2] == "~/" else path


def absolute(spec: str, sources: Mapping[str, Source], base: Path | None = None) -> str:
    """Return `spec` with absolute paths, so that it means the same from any directory.

    Args:
        spec: of the data; of an unknown source, its path is one file.
        sources: every source by its name.
        base: directory to which relative paths refer; None: the current directory.
    """
    front, question, tail = spec.partition("?")
    name, _, path = front.partition(":")
    if not path:
        return spec
    base = base or Path()
    paths = name in sources and sources[name].paths
    parts = (str((base / unescape(part)).absolute()) for part in _split_path(path, paths=paths))
    path = ",".join(escape(part, commas=paths) for part in parts)
    options = [_absolute_option(option, base) for option in tail.split("&")]
    return f"{name}:{path}{question}{'&'.join(options)}"


def have_same_samples(one: str, other: str) -> bool:
    """Return True if two specifications with absolute paths differ in weights of samples at most.

    Example:
        >>> have_same_samples("csv:/a.csv?target=y&weight=w", "csv:/a.csv?target=y")
        True
    """

    def samples(spec: str) -> tuple[str, list[str]]:
        front, _, tail = spec.partition("?")
        options = [option for option in tail.split("&") if option.partition("=")[0] != "weight"]
        return front, options if options != [""] else []

    return samples(one) == samples(other)


def _absolute_option(option: str, base: Path) -> str:
    """Return an option of a spec, with an absolute path if its value is a file of names."""
    key, _, value = option.partition("=")
    if key != CLASSES or not value.endswith(NAMES_SUFFIX):
        return option
    path = (base / unescape(_expand_home(value))).absolute()
    return f"{key}={escape(str(path), commas=False, ampersands=True)}"


def in_order(names: Names) -> bool:
    """Return True if the labels are 0, 1, …, so that a list of the names states them."""
    return list(names) == list(range(len(names)))


def example_of_option(names: Names) -> str:
    """Return what `parse_names` reads, or a description of it.

    Example:
        >>> example_of_option({0: "cat", 1: "dog"}), example_of_option({-1: "cat", 1: "dog"})
        ('cat,dog', '-1:cat,1:dog')
    """
    texts = {label: escape(name, ampersands=True) for label, name in names.items()}
    plain = in_order(names) and not all(map(_NUMBERED.fullmatch, texts.values()))
    value = ",".join(text if plain else f"{label}:{text}" for label, text in texts.items())
    is_readable = all(name == name.strip() for name in names.values())
    if is_readable and len(names) <= MOST_NAMES and not value.endswith(NAMES_SUFFIX):
        return value
    if in_order(names):
        return f"NAMES{NAMES_SUFFIX}, a file with a name on each line"
    return "LABEL:NAME,LABEL:NAME,… for all classes"


def parse_names(text: str, where: str) -> Names:
    """Return the names of labels in an option.

    Args:
        text: ``cat,dog``, ``1:cat,2:dog``, or the path of a file that ends in ``.txt`` and has the
            name of a class on each line; written as in a spec.
        where: name of the option, for messages.

    Raises:
        UserError: two names are equal, or the file cannot be read.

    Example:
        >>> parse_names("1:cat,2:dog", "classes")
        {1: 'cat', 2: 'dog'}
    """
    if text.endswith(NAMES_SUFFIX):
        path = find_path(Path(unescape(_expand_home(text))))
        return names_from(read_names(path), str(path))
    parts = [part.strip() for part in text.split(",")]
    numbered = [_NUMBERED.fullmatch(part) for part in parts]
    if all(numbered):
        pairs = [(int(match[1]), match[2]) for match in numbered if match is not None]
        if len(dict(pairs)) == len(pairs):
            return names_from({label: unescape(name.strip()) for label, name in pairs}, where)
    return names_from([unescape(part) for part in parts], where)


def parse(
    spec: str,
    sources: Mapping[str, Source],
    network: Network,
    seed: int,
    *,
    ranks_per_node: int = 1,
    preprocessing: Preprocessing | None = None,
    split: bool = True,
) -> Request:
    """Parse a spec and check it against the sources; other arguments are those of `Request`.

    Raises:
        UserError: an unknown source or option, a missing or an unexpected path.
    """
    if any(letter < " " or "\ud800" <= letter <= "\udfff" for letter in spec):
        raise UserError(
            f"data {spec!a} contains control characters or bytes that are not UTF-8; rename what "
            "it names"
        )
    front, question, tail = spec.partition("?")
    name, colon, path = front.partition(":")
    path = ",".join(_split_path(path, paths=name in sources and sources[name].paths))
    if name in PYTHON_DATA:
        raise UserError(
            f"data '{name}' are Python objects, which dptrain cannot open by name; pass them from "
            "Python: Trainer.resume(RUN_DIR, data) or load(RUN_DIR).evaluate(data)"
        )
    if name not in sources:
        raise UserError(
            f"unknown data '{shown(name)}'; "
            + (
                _form_of_path(front)
                or f"expected one of {', '.join(sources)}{suggest(name, sources)}"
            )
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
            hint = "; write a question mark in a path as %3F" if source.path else ""
            raise UserError(
                f"{name} has no option '{shown(key)}'; {known}"
                + (suggest(key, source.options) or hint)
            )
        if not equals or not value or key in options:
            raise UserError(f"data '{spec}': expected {key}={source.options[key]}, once")
        options[key] = value
    names = None
    if CLASSES in options:
        names = parse_names(options[CLASSES], f"{name}: {CLASSES}")
    return Request(name, path, options, network, seed, ranks_per_node, preprocessing, split, names)
