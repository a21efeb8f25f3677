"""The files of a paper, which are replaced only if they are as the command wrote them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import dptrain
from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, write_whole, writing
from dptrain.report.elements.conditions import conditions_text
from dptrain.report.elements.page import Page
from dptrain.report.files import environment_of, make_page, read_result
from dptrain.report.paper.macros import MACROS, definition
from dptrain.report.paper.methods import Methods, launch_sentences, methods
from dptrain.report.paper.references import dptrain_reference, used_references
from dptrain.report.paper.values import Group, Sentences, Value, number_groups, sentence_groups
from dptrain.report.profiles.profile_page import MeasuredProfile
from dptrain.scaling.study import Study
from dptrain.tables.latex import comment, latex
from dptrain.tables.text import markdown

RECORD = "paper.json"
"""Name of the file with the SHA-256 of all others."""
FLAG = "--output"
GENERATOR = "dptrain paper"
WITHHELD = "withheld: the report shows no number"
"""Text in place of a value that the report withholds."""
PARENTHESES = "Parentheses contain 95% intervals, unless they name something else."
_PREFIX = re.compile(r"[a-z0-9][a-z0-9+-]*")


def write_paper(
    folder: Path, output: Path | None = None, *, prefix: str = "", replace: bool = False
) -> Path:
    """Write the numbers, sentences, methods, figures and references of a result for a paper.

    The numbers and sentences are those of the report; what the report withholds is withheld. Equal
    results have equal files. Files of an older result that this one lacks are removed if they were
    not changed.

    Args:
        folder: as for `dptrain.report.files.write_report`.
        output: folder of the files [default: the folder ``paper`` in `folder`].
        prefix: beginning of all keys, followed by ``/``, for a text with several results.
        replace: whether to overwrite files that were changed or that the command did not write.

    Returns:
        The folder of the files.

    Raises:
        UserError: there is no result, a file cannot be written or would be overwritten, or the
            prefix contains other characters than small letters, digits, ``+`` and ``-``.
    """
    if prefix and not _PREFIX.fullmatch(prefix):
        raise UserError(
            f"--prefix {prefix} is not valid in keys; expected small letters, digits, + and -, "
            "such as node-a"
        )
    target = folder / "paper" if output is None else output
    files = paper_files(folder, prefix=prefix)
    before = _recorded(target / RECORD)
    if not replace:
        for name, contents in files.items():
            _check_unchanged(target / name, contents, before.get(name))
        if (target / RECORD).exists() and not before:
            raise _changed(target / RECORD)
    for name, contents in files.items():
        with writing(target / name, FLAG):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(target / name, contents, FLAG)
    _remove_older(target, {name: before[name] for name in before.keys() - files.keys()})
    record = {name: _digest(contents) for name, contents in files.items()}
    text = dump_json({"version": 1, "sha256": record}, indent=1) + "\n"
    write_whole(target / RECORD, text, FLAG)
    return target


def paper_files(folder: Path, *, prefix: str = "") -> dict[str, str | bytes]:
    """Return the contents of the files of a paper by name.

    Args:
        folder, prefix: as for `write_paper`.
    """
    result = read_result(folder)
    page, environment = make_page(result, folder), environment_of(result)
    job = result.job if isinstance(result, Study) else {}
    if isinstance(result, MeasuredProfile):
        job = result.profile.job
    launches = launch_sentences(result, folder) if isinstance(result, Study) else []
    references = used_references(page, job)
    version = (environment.get("versions") or {}).get("dptrain", dptrain.__version__)
    own = dptrain_reference(str(version), str(environment.get("commit") or ""))
    numbers, sentences = number_groups(page), sentence_groups(page)
    conditions = conditions_text(page, environment)
    captions = [
        Value(f"caption.{p.name}", f"{p.title}. {p.caption} {conditions}") for p in page.plots
    ]
    described = methods(page, environment, launches, references)
    start = f"{prefix}/" if prefix else ""
    files: dict[str, str | bytes] = {
        "values.tex": _values_tex(page, numbers, sentences, captions, start),
        "values.md": _values_markdown(page, numbers, start),
        "sentences.tex": _sentences_tex(sentences, start),
        "sentences.md": _sentences_markdown(sentences),
        "methods.tex": _methods_tex(described),
        "methods.md": _methods_markdown(described),
        "references.bib": "\n".join(each.entry() for each in (own, *references)),
    }
    for section in page.sections:
        for table in section.tables:
            files |= {
                f"tables/{table.name}.tex": table.to_latex(),
                f"tables/{table.name}.md": table.to_markdown(),
                f"tables/{table.name}.csv": table.to_csv(),
            }
    for plot in page.plots:
        files |= {f"figures/{plot.name}.pdf": plot.pdf(), f"figures/{plot.name}.svg": plot.svg}
    return files


def _values_tex(
    page: Page,
    numbers: Sequence[Group],
    sentences: Sequence[Sentences],
    captions: Sequence[Value],
    start: str,
) -> str:
    r"""Return the macros, and a definition of each number, sentence and caption."""
    lines = [comment(f"{page.title}. Written by {GENERATOR}. {PARENTHESES}"), MACROS]
    for group in numbers:
        lines += [comment(f"{group.title}. {group.note}"), *_definitions(group.values, start)]
    for subject in sentences:
        lines += [comment(f"{subject.title}."), *_definitions(subject.values, start)]
    lines += [comment("Captions of the figures."), *_definitions(captions, start)]
    return "\n".join(lines) + "\n"


def _definitions(values: Iterable[Value], start: str) -> list[str]:
    return [definition(Value(start + value.key, value.text)) for value in values]


def _values_markdown(page: Page, numbers: Sequence[Group], start: str) -> str:
    lines = [f"# {markdown(page.title)}", "", markdown(page.about), "", PARENTHESES, ""]
    for group in numbers:
        lines += [f"## {markdown(group.title)}", ""]
        lines += [markdown(group.note), ""] if group.note else []
        lines += ["| key | value |", "|---|---|"]
        lines += [f"| `{start}{v.key}` | {markdown(v.text or WITHHELD)} |" for v in group.values]
        lines.append("")
    return "\n".join(lines)


def _sentences_tex(sentences: Sequence[Sentences], start: str) -> str:
    r"""Return a paragraph for each subject, in which each sentence is a ``\dpvalue``."""
    parts = []
    for subject in sentences:
        texts = [rf"\dpvalue{{{start}{value.key}}}" for value in subject.values]
        parts.append("\n".join([rf"\paragraph{{{latex(subject.title)}}}", *texts, ""]))
    return "\n".join(parts)


def _sentences_markdown(sentences: Sequence[Sentences]) -> str:
    parts = []
    for subject in sentences:
        items = "\n".join(f"- {markdown(text)}" for text in subject.items)
        parts.append(f"## {markdown(subject.title)}\n\n{items}\n")
    return "\n".join(parts)


def _methods_tex(found: Methods) -> str:
    text = "\n".join(statement.latex() for statement in found.statements)
    items = [rf"\item[{latex(each.label)}] {latex(each.meaning)}" for each in found.definitions]
    if not items:
        return f"{text}\n"
    listed = "\n".join([r"\begin{description}", *items, r"\end{description}"])
    return f"{text}\n\n{listed}\n"


def _methods_markdown(found: Methods) -> str:
    text = "\n".join(markdown(statement.markdown()) for statement in found.statements)
    items = [f"- **{each.label}**: {markdown(each.meaning)}" for each in found.definitions]
    return f"{text}\n" + (f"\n{chr(10).join(items)}\n" if items else "")


def _digest(contents: str | bytes) -> str:
    data = contents.encode() if isinstance(contents, str) else contents
    return hashlib.sha256(data).hexdigest()


def _recorded(path: Path) -> Mapping[str, str]:
    """Return the digests of the files that the command wrote before; {} if there are none."""
    if not path.exists():
        return {}
    with writing(path, FLAG):
        text = path.read_bytes()
    try:
        found = dict(parse_json(text)["sha256"])
    except (ValueError, KeyError, TypeError):
        return {}
    return {str(name): str(digest) for name, digest in found.items()}


def _check_unchanged(path: Path, contents: str | bytes, before: str | None) -> None:
    """Refuse to overwrite a file that the user has written or changed."""
    if not path.exists():
        return
    with writing(path, FLAG):
        there = _digest(path.read_bytes())
    if there not in (before, _digest(contents)):
        raise _changed(path)


def _remove_older(target: Path, recorded: Mapping[str, str]) -> None:
    """Remove files of an older result, such as a figure that this one lacks, if unchanged."""
    for name, digest in recorded.items():
        path = target / name
        inside = path.resolve().is_relative_to(target.resolve())
        with writing(path, FLAG):
            if inside and path.is_file() and _digest(path.read_bytes()) == digest:
                path.unlink()


def _changed(path: Path) -> UserError:
    return UserError(
        f"{path} exists and is not as {GENERATOR} wrote it; move it, choose another {FLAG}, or use "
        f"{GENERATOR} --replace"
    )
