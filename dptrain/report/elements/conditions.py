"""The conditions of a measurement, below the plots that a report writes as files.

A page states them once. A plot that is copied to another document leaves the page, so its file has
what was measured, the machine, the date, and whether other programs used its cores.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping
from html import escape
from typing import Any

from dptrain.report.elements.canvas import FONT, LIGHT, WIDTH, Plot
from dptrain.report.elements.page import Page
from dptrain.texts import without_folders

TEXT_PT, LINE_PT, MARGIN_PT = 5.5, 7.0, 3.0
"""Size of the text, distance of its lines, and space above and below, in points."""
LINE_LENGTH = 84
"""Letters of a line, which fits the width of a plot."""
LOAD = "Other programs"
"""Beginning of the restriction of a page that other programs used the machine."""


def conditions_text(page: Page, environment: Mapping[str, Any]) -> str:
    """Return what was measured where, in sentences.

    Args:
        page: the page of the plots.
        environment: contents of ``env.json``; empty if `Page.about` names the machine.
    """
    machine = []
    if environment.get("cpu"):
        machine.append(str(environment["cpu"]))
    if environment.get("cores"):
        machine.append(f"{environment['cores']} cores")
    if version := (environment.get("versions") or {}).get("dptrain"):
        machine.append(f"dptrain {version}")
    if environment.get("started"):
        machine.append(str(environment["started"])[:10])
    parts = [page.title, page.about, ", ".join(machine)]
    parts += [note for note in page.notes if note.startswith(LOAD)][:1]
    return " ".join(f"{without_folders(part).rstrip('.')}." for part in parts if part)


def svg_with(plot: Plot, text: str) -> str:
    """Return the SVG file of a plot with a text below it."""
    lines = textwrap.wrap(text, LINE_LENGTH)
    found = re.search(r'height="([\d.]+)pt" viewBox="0 0 ([\d.]+) ([\d.]+)"', plot.svg)
    assert found is not None
    height, width = float(found[3]), found[2]
    below = 2 * MARGIN_PT + LINE_PT * len(lines)
    total = f"{height + below:g}"
    drawn = [f'<rect y="{height:g}" width="{width}" height="{below:g}" fill="{LIGHT["paper"]}"/>']
    style = f'font-size="{TEXT_PT}" fill="{LIGHT["faint"]}" style="font-family: {FONT}"'
    for number, line in enumerate(lines):
        y = height + MARGIN_PT + LINE_PT * number + TEXT_PT
        drawn.append(f'<text x="1" y="{y:g}" {style}>{escape(line)}</text>')
    head = f'height="{total}pt" viewBox="0 0 {width} {total}"'
    whole = plot.svg.replace(found[0], head, 1)
    return whole.replace("</svg>", "\n ".join(["", *drawn]) + "\n</svg>")


def png_with(plot: Plot, text: str) -> bytes:
    """Return the PNG file of a plot with a text below it."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont
    from PIL.PngImagePlugin import PngInfo

    lines = textwrap.wrap(text, LINE_LENGTH)
    with Image.open(io.BytesIO(plot.png)) as drawn:
        drawn.load()
        scale = drawn.width / WIDTH
        below = round(scale * (2 * MARGIN_PT + LINE_PT * len(lines)))
        whole = Image.new("RGB", (drawn.width, drawn.height + below), LIGHT["paper"])
        whole.paste(drawn.convert("RGB"))
        known = {str(key): str(value) for key, value in drawn.info.items() if key != "dpi"}
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), round(scale * TEXT_PT))
    pen = ImageDraw.Draw(whole)
    for number, line in enumerate(lines):
        y = whole.height - below + round(scale * (MARGIN_PT + LINE_PT * number))
        pen.text((scale, y), line, font=font, fill=LIGHT["faint"])
    facts, buffer = PngInfo(), io.BytesIO()
    for key, value in known.items():
        facts.add_text(key, value)
    whole.save(buffer, format="PNG", dpi=(72 * scale, 72 * scale), pnginfo=facts)
    return buffer.getvalue()
