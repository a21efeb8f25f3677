"""Parts that the pages of experiments have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dptrain.report.elements.page import Section

HIDDEN = ("layers", "axes", "network_files")
"""Settings that a page does not list: they are long, or in the table."""


def settings_section(settings: Mapping[str, Any], of: str) -> Section:
    """Return the folded section with the settings of ``all runs`` or ``all cases``."""
    facts = tuple(
        (key.replace("_", " "), _text(value)) for key, value in settings.items()
        if key not in HIDDEN
    )  # fmt: skip
    return Section("settings", f"Settings of {of}", facts=facts, folded=True)


def closing(name: str) -> str:
    """Return the last line of the page of the files with a name."""
    return (
        f"Written by dptrain from {name}.csv and {name}.json, which contain each number in full "
        "precision."
    )


def _text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
