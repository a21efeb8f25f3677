r"""The macros ``\dpvalue`` and ``\dpdefine``, which print and define a value of a paper."""

from __future__ import annotations

from dptrain.report.paper.values import Value
from dptrain.tables.latex import latex

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


def definition(value: Value) -> str:
    r"""Return the line that defines a value; if it is withheld, ``\dpvalue`` is an error.

    Example:
        >>> definition(Value("points-weak.2.efficiency", "85%"))
        '\\dpdefine{points-weak.2.efficiency}{85\\%}'
    """
    text = latex(value.text) if value.text else rf"\dpwithheld{{{value.key}}}"
    return rf"\dpdefine{{{value.key}}}{{{text}}}"
