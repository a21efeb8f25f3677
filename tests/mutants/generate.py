"""Candidates for mutants of a file: one changed operator, bound, barrier or order of arguments.

    python -m tests.mutants.generate dptrain/plan/shards.py dptrain/backends/cuda/pooling.cu

prints the first candidates of each file as rows of `generated.toml`. The order of the candidates of
a file is that of a hash of `SEED`, the file's name and the change, so that it does not depend on
the rest of the file.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import ROOT

SEED = 1
FIRST = 5
"""A row of `generated.toml` is one of this many first candidates of its file."""

OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "**": "*",
    "+=": "-=", "-=": "+=", "*=": "+=", "/=": "*=", "<<": ">>", ">>": "<<", "^": "|",
    "and": "or", "or": "and", "&&": "||", "||": "&&", "min": "max", "max": "min",
    "True": "False", "False": "True", "true": "false", "false": "true",
}  # fmt: skip
"""Replacements of tokens."""

BARRIER = re.compile(
    r"^\s*(__syncthreads\(\);|__syncwarp\(.*\);|__threadfence\w*\(\);|[\w.]*barrier\(\))\s*$"
)
"""Lines that wait for other threads or ranks; a mutant removes one."""

SWAPPED = re.compile(r"(?<![\w.])(?P<name>[\w.]+)\((?P<a>[a-z_]\w*), (?P<b>[a-z_]\w*)(?=[,)])")
"""Calls with two names as their first arguments, whose order a mutant reverses."""

C_TOKEN = re.compile(
    r"(?P<skip>//.*|\"(?:\\.|[^\"])*\"|'(?:\\.|[^'])*'|0[xX]\w+|\d*\.\d\w*|->|::|\+\+|--|<<<|>>>)"
    r"|(?P<token>\b\d+\b|[A-Za-z_]\w*|<<|>>|[<>=!+\-*/]=|&&|\|\||[-+*/%<>^])"
)


@dataclass(frozen=True)
class Candidate:
    """A change of the passage `before` of a file to `after`."""

    file: str
    before: str
    after: str

    @property
    def digest(self) -> str:
        """A hash of the seed and the change."""
        facts = SEED, self.file, " ".join(self.before.split()), " ".join(self.after.split())
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def candidates(file: str) -> list[Candidate]:
    """Return the candidates of a file in their order."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for number, changed in _changes(file, text):
        before, after = _unique(text, lines, number, changed)
        candidate = Candidate(file, before, after)
        found[candidate.digest] = candidate
    return [found[digest] for digest in sorted(found)]


def _changes(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of a line and what replaces it, for every change of one token or line."""
    tokens = list(_python_tokens(text) if file.endswith(".py") else _c_tokens(text))
    starts = {(row, column) for row, column, _ in tokens}
    lines = text.splitlines()
    for row, column, token in tokens:
        line, stop = lines[row], column + len(token)
        # Signs, pointers, unpacked arguments and the brackets of templates have no space around.
        is_binary = token[0].isalnum() or line[column - 1 : stop + 1] == f" {token} "
        if is_binary and (changed := _replacement(token)):
            yield row, line[:column] + changed + line[stop:]
    for row, line in enumerate(lines):
        if BARRIER.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            yield row, indent + ("pass" if file.endswith(".py") else ";")
        for call in SWAPPED.finditer(line):
            if call["a"] != call["b"] and (row, call.start("a")) in starts:
                changed = f"{call['name']}({call['b']}, {call['a']}"
                yield row, line[: call.start()] + changed + line[call.end() :]


def _replacement(token: str) -> str | None:
    return str(int(token) + 1) if token.isdigit() else OPERATORS.get(token)


def _python_tokens(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield row, column and text of operators, names and numbers, without those of signatures,
    annotations and strings.
    """
    depth = 0  # Since Python 3.12, the expressions in a string are tokens.
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        is_skipped = re.match(r"\s*((def|class|from|import)\b|@|\*{0,2}\w+: |\) ->)", token.line)
        if kind in ("OP", "NAME", "NUMBER") and not depth and not is_skipped:
            yield token.start[0] - 1, token.start[1], token.string


def _c_tokens(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield row, column and text of operators, names and numbers of CUDA C++, without those of
    declarations and directives.
    """
    for row, line in enumerate(text.splitlines()):
        if re.match(r"\s*(#|template|static_assert|using)|\S* ?__(global|device)__", line):
            continue
        for found in C_TOKEN.finditer(line):
            if token := found["token"]:
                yield row, found.start(), token


def _unique(text: str, lines: list[str], number: int, changed: str) -> tuple[str, str]:
    """Return the passage that ends with a line, long enough to occur once, and its replacement."""
    first = number
    while text.count("\n".join(lines[first : number + 1])) > 1 and first:
        first -= 1
    passage = lines[first : number + 1]
    return "\n".join(passage), "\n".join([*passage[:-1], changed])


def main(files: list[str]) -> None:
    """Print the first candidates of each file."""
    for file in files:
        for candidate in candidates(file)[:FIRST]:
            name = f"{Path(file).stem.replace('_', '-')}-{candidate.digest[:4]}"
            print(f'\n[[mutant]]\nid = "{name}"\nkind = ""\nfile = "{file}"')
            print(f"before = '''\n{candidate.before}'''\nafter = '''\n{candidate.after}'''")
            print('breaks = ""\ntests = ""')


if __name__ == "__main__":
    main(sys.argv[1:])
