r"""LaTeX of texts, of tables, and of the macros ``\dpvalue`` and ``\dpdefine``."""

from __future__ import annotations

import re

from dptrain.report.elements.numbers import THOUSANDS_SEPARATOR
from dptrain.report.elements.tables import Number, Table
from dptrain.report.paper.values import Value

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "`": r"\textasciigrave{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"\char34{}", "\n": " ", "\r": " ", "\t": " ",
    "–": "--", "—": "---", "…": r"\ldots{}", "“": "``", "”": "''", "‘": "`", "’": "'",
    "\u00a0": "~", THOUSANDS_SEPARATOR: r"\,",
}  # fmt: skip
_MATHEMATICS = {
    "−": "-", "×": r"\times", "·": r"\cdot", "±": r"\pm", "≈": r"\approx", "≤": r"\leq",
    "≥": r"\geq", "∞": r"\infty", "√": r"\surd", "→": r"\rightarrow", "÷": r"\div", "°": r"^\circ",
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "ε": r"\varepsilon",
    "κ": r"\kappa", "λ": r"\lambda", "μ": r"\mu", "µ": r"\mu", "ρ": r"\rho", "σ": r"\sigma",
    "τ": r"\tau", "φ": r"\varphi", "ω": r"\omega", "Δ": r"\Delta", "Σ": r"\Sigma", "¹": "^1",
    "²": "^2", "³": "^3", **{c: f"^{i}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹") if i not in (1, 2, 3)},
    "⁻": "^-", **{c: f"_{i}" for i, c in enumerate("₀₁₂₃₄₅₆₇₈₉")},
}  # fmt: skip

MACROS = r"""\makeatletter
\ifcsname dpvalue\endcsname\else
\def\dp@tables{}
\def\dp@table#1.#2\@nil{#1}
\newcommand*\dpdefine[2]{%
  \ifcsname dp@#1\endcsname
    \PackageError{dptrain}{The value '#1' is defined twice}{%
      Write one of the results with dptrain paper --prefix NAME.}%
  \fi
  \expandafter\gdef\csname dp@#1\endcsname{#2}%
  \edef\dp@name{\dp@table#1.\@nil}%
  \ifcsname dpkeys@\dp@name\endcsname\else
    \expandafter\gdef\csname dpkeys@\dp@name\endcsname{}%
    \xdef\dp@tables{\dp@tables\space\dp@name}%
  \fi
  \expandafter\xdef\csname dpkeys@\dp@name\endcsname{\csname dpkeys@\dp@name\endcsname\space#1}}
\DeclareRobustCommand*\dpvalue[1]{%
  \ifcsname dp@#1\endcsname\csname dp@#1\endcsname\else
    \edef\dp@name{\dp@table#1.\@nil}%
    \ifcsname dpkeys@\dp@name\endcsname
      \PackageError{dptrain}{There is no value '#1'. The keys of '\dp@name' are:%
        \csname dpkeys@\dp@name\endcsname}{values.md explains them.}%
    \else
      \PackageError{dptrain}{There is no value '#1'. Keys begin with one of:\dp@tables}{%
        values.md explains them.}%
    \fi
    \textbf{??}%
  \fi}
\DeclareRobustCommand*\dpwithheld[1]{%
  \PackageError{dptrain}{The value '#1' is withheld: the report shows no number there}{%
    sentences.md has the reasons and restrictions.}%
  \textbf{withheld}}
\fi
\makeatother
"""


def latex(text: str) -> str:
    r"""Return LaTeX that prints a text; text between backticks is printed in a fixed width.

    Characters that are neither ASCII nor in a table, such as é, are not changed: LaTeX reads UTF-8.

    Example:
        >>> latex("85% (95% interval 58–125%), `batch_size` × 2")
        '85\\% (95\\% interval 58--125\\%), \\texttt{batch\\_size} \\ensuremath{\\times} 2'
    """
    pieces = re.split("`([^`]+)`", text)
    return "".join(
        rf"\texttt{{{_escape(piece)}}}" if i % 2 else _escape(piece)
        for i, piece in enumerate(pieces)
    )


def _escape(text: str) -> str:
    # Without a group between them, two symbols would become another one: -- is a dash.
    pieces = re.split("(?<=[-–—])(?=[-–—])|(?<=['’])(?=['’])|(?<=,)(?=,)", text)
    return "{}".join("".join(map(_symbol, piece)) for piece in pieces)


def _symbol(symbol: str) -> str:
    if symbol in _MATHEMATICS:
        return rf"\ensuremath{{{_MATHEMATICS[symbol]}}}"
    return _SPECIAL.get(symbol, symbol if symbol.isprintable() else "")


def comment(text: str) -> str:
    """Return a text as one line of a comment."""
    return f"% {' '.join(text.split())}"


def definition(value: Value) -> str:
    r"""Return the line that defines a value; if it is withheld, ``\dpvalue`` is an error.

    Example:
        >>> definition(Value("points-weak.2.efficiency", "85%"))
        '\\dpdefine{points-weak.2.efficiency}{85\\%}'
    """
    text = latex(value.text) if value.text else rf"\dpwithheld{{{value.key}}}"
    return rf"\dpdefine{{{value.key}}}{{{text}}}"


def tabular(table: Table) -> str:
    """Return a table as a ``tabular`` without packages; its title and note are comments."""
    kinds = "".join(
        "r" if column.kind in ("number", "computed") else "l" for column in table.columns
    )
    heads = [" ".join((column.head, column.unit)).strip() for column in table.columns]
    rows = [
        ["".join(p.text if isinstance(p, Number) else p for p in cell) for cell in row]
        for row in table.rows
    ]
    lines = [rf"{' & '.join(map(latex, cells))} \\" for cells in (heads, *rows)]
    return "\n".join([
        comment(table.title),
        *([comment(table.note)] if table.note else []),
        rf"\begin{{tabular}}{{{kinds}}}",
        r"\hline",
        lines[0],
        r"\hline",
        *lines[1:],
        r"\hline",
        r"\end{tabular}",
        "",
    ])  # fmt: skip
