"""BibTeX entries of dptrain and of the methods that a page uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dptrain.report.elements.page import Page
from dptrain.tables import Number

AUTHOR, RELEASED = "The dptrain developers", "2026-11-26"
"""Facts of ``CITATION.cff``, which a test compares."""


@dataclass(frozen=True)
class Reference:
    """The source of a method.

    Attributes:
        key: key of the entry.
        use: the method.
        marks: patterns; the method is used if one matches a feature of the page, see `features`.
        kind: type of the entry.
        fields: the fields of the entry, in LaTeX.
    """

    key: str
    use: str
    marks: tuple[str, ...]
    kind: str
    fields: Mapping[str, str]

    def entry(self) -> str:
        """Return the entry in BibTeX."""
        fields = "".join(f"  {name} = {{{text}}},\n" for name, text in self.fields.items())
        return f"@{self.kind}{{{self.key},\n{fields}}}\n"


_STUDY = "dptrain scaling study"

REFERENCES = (
    Reference("student1908", "t intervals", (_STUDY, "dptrain sweep"), "article", {
        "author": "{Student}", "title": "The probable error of a mean", "journal": "Biometrika",
        "volume": "6", "number": "1", "pages": "1--25", "year": "1908",
        "doi": "10.1093/biomet/6.1.1"}),
    Reference("efron1993", "standard errors by resampling", (_STUDY,), "book", {
        "author": "Efron, Bradley and Tibshirani, Robert J.",
        "title": "An Introduction to the Bootstrap", "publisher": "Chapman \\& Hall",
        "year": "1993"}),
    Reference("hesterberg2015", "bootstrap of small samples", (_STUDY,), "article", {
        "author": "Hesterberg, Tim C.",
        "title": "What Teachers Should Know About the Bootstrap: Resampling in the Undergraduate "
        "Statistics Curriculum", "journal": "The American Statistician", "volume": "69",
        "number": "4", "pages": "371--386", "year": "2015",
        "doi": "10.1080/00031305.2015.1089789"}),
    Reference("welch1947", "ratios of independent groups", ("pop",), "article", {
        "author": "Welch, B. L.",
        "title": "The generalization of `Student's' problem when several different population "
        "variances are involved", "journal": "Biometrika", "volume": "34", "number": "1--2",
        "pages": "28--35", "year": "1947", "doi": "10.1093/biomet/34.1-2.28"}),
    Reference("wagner2017", "POP efficiencies", ("pop", "efficiencies"), "inproceedings", {
        "author": "Wagner, Michael and Mohr, Stephan and Gim{\\'e}nez, Judit and Labarta, "
        "Jes{\\'u}s", "title": "A Structured Approach to Performance Analysis",
        "booktitle": "Tools for High Performance Computing 2017", "publisher": "Springer",
        "year": "2019", "doi": "10.1007/978-3-030-11987-4_1"}),
    Reference("karp1990", "serial fraction", ("serial fraction",), "article", {
        "author": "Karp, Alan H. and Flatt, Horace P.",
        "title": "Measuring parallel processor performance",
        "journal": "Communications of the ACM", "volume": "33", "number": "5",
        "pages": "539--543", "year": "1990", "doi": "10.1145/78607.78614"}),
    Reference("amdahl1967", "Amdahl's law", ("serial fraction",), "inproceedings", {
        "author": "Amdahl, Gene M.",
        "title": "Validity of the single processor approach to achieving large scale computing "
        "capabilities", "booktitle": "AFIPS Spring Joint Computer Conference",
        "pages": "483--485", "year": "1967", "doi": "10.1145/1465482.1465560"}),
    Reference("thakur2005", "all-reduce algorithms", ("forecast",), "article", {
        "author": "Thakur, Rajeev and Rabenseifner, Rolf and Gropp, William",
        "title": "Optimization of collective communication operations in {MPICH}",
        "journal": "International Journal of High Performance Computing Applications",
        "volume": "19", "number": "1", "pages": "49--66", "year": "2005",
        "doi": "10.1177/1094342005051521"}),
    Reference("hockney1994", "cost of a message", ("forecast",), "article", {
        "author": "Hockney, Roger W.",
        "title": "The communication challenge for {MPP}: {Intel} {Paragon} and {Meiko} {CS-2}",
        "journal": "Parallel Computing", "volume": "20", "number": "3", "pages": "389--398",
        "year": "1994"}),
    Reference("williams2009", "roofline model", ("roofline",), "article", {
        "author": "Williams, Samuel and Waterman, Andrew and Patterson, David",
        "title": "Roofline: an insightful visual performance model for multicore architectures",
        "journal": "Communications of the ACM", "volume": "52", "number": "4", "pages": "65--76",
        "year": "2009", "doi": "10.1145/1498765.1498785"}),
    Reference("kingma2015", "Adam", ("adam",), "inproceedings", {
        "author": "Kingma, Diederik P. and Ba, Jimmy",
        "title": "{Adam}: a method for stochastic optimization",
        "booktitle": "International Conference on Learning Representations", "year": "2015",
        "note": "arXiv:1412.6980"}),
    Reference("loshchilov2019", "AdamW", ("adamw",), "inproceedings", {
        "author": "Loshchilov, Ilya and Hutter, Frank",
        "title": "Decoupled weight decay regularization",
        "booktitle": "International Conference on Learning Representations", "year": "2019",
        "note": "arXiv:1711.05101"}),
    Reference("you2017", "LARS", ("lars",), "misc", {
        "author": "You, Yang and Gitman, Igor and Ginsburg, Boris",
        "title": "Large batch training of convolutional networks", "year": "2017",
        "note": "arXiv:1708.03888"}),
    Reference("you2020", "LAMB", ("lamb",), "inproceedings", {
        "author": "You, Yang and others",
        "title": "Large batch optimization for deep learning: training {BERT} in 76 minutes",
        "booktitle": "International Conference on Learning Representations", "year": "2020",
        "note": "arXiv:1904.00962"}),
    Reference("he2016", "residual networks", (r"resnet-?\d+",), "inproceedings", {
        "author": "He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian",
        "title": "Deep residual learning for image recognition",
        "booktitle": "IEEE Conference on Computer Vision and Pattern Recognition",
        "pages": "770--778", "year": "2016", "doi": "10.1109/CVPR.2016.90"}),
    Reference("alpaydin1998", "digits", ("digits",), "misc", {
        "author": "Alpaydin, E. and Kaynak, C.",
        "title": "Optical Recognition of Handwritten Digits",
        "howpublished": "UCI Machine Learning Repository", "year": "1998",
        "doi": "10.24432/C50P49"}),
    Reference("krizhevsky2009", "CIFAR-10", ("cifar10",), "techreport", {
        "author": "Krizhevsky, Alex",
        "title": "Learning multiple layers of features from tiny images",
        "institution": "University of Toronto", "year": "2009"}),
    Reference("lecun1998", "MNIST", ("mnist",), "article", {
        "author": "LeCun, Yann and Bottou, L{\\'e}on and Bengio, Yoshua and Haffner, Patrick",
        "title": "Gradient-based learning applied to document recognition",
        "journal": "Proceedings of the IEEE", "volume": "86", "number": "11",
        "pages": "2278--2324", "year": "1998", "doi": "10.1109/5.726791"}),
)  # fmt: skip
"""Sources of methods and data, with facts from the publications."""


def dptrain_reference(version: str, commit: str) -> Reference:
    """Return the entry of dptrain.

    Args:
        version: version that made the measurements.
        commit: commit of the same; "" if it is not known.
    """
    fields = {
        "author": f"{{{AUTHOR}}}",
        "title": "{dptrain}: synchronous data-parallel training of convolutional networks",
        "version": version,
        "year": RELEASED[:4],
        "note": ", ".join(filter(None, (f"Version {version}", commit and f"commit {commit}"))),
    }
    return Reference("dptrain", "", (), "misc", fields)


def used_references(page: Page, job: Mapping[str, Any]) -> tuple[Reference, ...]:
    """Return the sources of the methods that a page uses.

    Args:
        page: the page.
        job: names of the network, the data and the optimizer.
    """
    found = {feature.lower() for feature in features(page, job)}
    return tuple(
        reference
        for reference in REFERENCES
        if any(re.fullmatch(mark, feature) for mark in reference.marks for feature in found)
    )


def features(page: Page, job: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kind of a page, the names of its plots and tables, and words in it."""
    yield page.kind
    yield from (value.partition(":")[0] for value in job.values() if isinstance(value, str))
    yield from re.findall(r"[\w-]+", f"{page.title} {page.about}")
    tables = [table for section in page.sections for table in section.tables]
    for name in (*(plot.name for plot in page.plots), *(table.name for table in tables)):
        yield from (name, name.partition("-")[0])
    for table in tables:
        for column in table.columns:
            yield column.head
            yield from _words(cell for cell in column.cells)


def _words(cells: Iterable[tuple[Number | str, ...]]) -> Iterator[str]:
    for cell in cells:
        yield from (part for part in cell if isinstance(part, str))
