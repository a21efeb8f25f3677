"""LaTeX of texts and of tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dptrain.numbers import THOUSANDS_SEPARATOR
from dptrain.tables.cells import Column, texts_of

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


def _row(cells: Sequence[str]) -> str:
    row = " & ".join(map(latex, cells))
    # After the \\ of the row above, LaTeX reads [ and * as an argument.
    return rf"{'{}' * row.startswith(('[', '*'))}{row} \\"


def tabular(title: str, columns: Sequence[Column], note: str) -> str:
    """Return a table as a ``tabular`` without packages; its title and note are comments."""
    kinds = "".join("r" if column.is_numeric else "l" for column in columns)
    first, *others = map(_row, texts_of(columns))
    return "\n".join([
        comment(title),
        *([comment(note)] if note else []),
        rf"\begin{{tabular}}{{{kinds}}}",
        r"\hline",
        first,
        r"\hline",
        *others,
        r"\hline",
        r"\end{tabular}",
        "",
    ])  # fmt: skip
