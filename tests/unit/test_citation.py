"""CITATION.cff has the fields that CFF 1.2.0 requires, and the version of the package."""

import re
from pathlib import Path

from dptrain.report.paper.references import AUTHOR, RELEASED
from dptrain.toml import read_toml

ROOT = Path(__file__).parents[2]


def test_the_citation_is_complete_and_current() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([a-z-]+): *(.*)$", text, re.MULTILINE))
    assert fields.keys() >= {"cff-version", "message", "title", "authors"}
    assert fields["cff-version"] == "1.2.0"
    assert fields["type"] == "software"
    assert fields["version"] == read_toml(ROOT / "pyproject.toml")["project"]["version"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", fields["date-released"])
    assert fields["date-released"] == RELEASED
    assert f'- name: "{AUTHOR}"' in text
