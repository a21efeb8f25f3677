"""Record a command in a terminal, and draw its output: `python -m docs.figures.terminal`.

The command really runs, in an empty folder, in a pseudo-terminal of 100 columns. Long lines are
wrapped, and lines that `OMITTED` matches are left out.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from docs.figures.__main__ import IMAGES

COMMAND = "mpirun -n 2 dptrain train"
COLUMNS = 100
OMITTED = re.compile(r"^dptrain: compiling")
ERASED = re.compile(r"\x1b\[[12]?[JK]")
"""Codes of a terminal that clear the line of the cursor."""
CURSOR_UP = "\x1b[1A"
THEME = TerminalTheme(
    (255, 255, 255), (27, 39, 51),
    [(27, 39, 51), (184, 50, 50), (47, 133, 90), (199, 125, 20), (43, 108, 176), (128, 70, 160),
     (20, 130, 140), (92, 107, 120)],
)  # fmt: skip
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
aria-label="Output of mpirun -n 2 dptrain train in a terminal">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#fff" stroke="#b9c4cf" />
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""The frame of the drawing, which loads no fonts."""


def record(command: str) -> str:
    """Run a command in a pseudo-terminal and return what it printed."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    main, side = pty.openpty()
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        process = subprocess.Popen(
            ["bash", "-c", f"stty cols {COLUMNS}; exec {command}"], cwd=folder, env=variables,
            stdin=side, stdout=side, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(side)
        found = bytearray()
        while True:
            try:
                block = os.read(main, 65536)
            except OSError:  # The other side is closed.
                break
            if not block:
                break
            found += block
        if process.wait():
            raise SystemExit(f"{command} failed:\n{found.decode()}")
    os.close(main)
    return found.decode().replace("\r\n", "\n")


def shown_lines(text: str) -> list[str]:
    """Return the lines as they remain on the screen, without those that are omitted."""
    lines: list[str] = []
    for line in text.split("\n"):
        above = line.count(CURSOR_UP)
        lines = lines[: len(lines) - above] if above else lines
        remaining = ERASED.split(line.rpartition("\r")[2])[-1]
        plain = Text.from_ansi(remaining).plain
        if not OMITTED.match(plain):
            lines.append(remaining)
    return lines


def draw(command: str, lines: list[str], path: Path) -> None:
    """Draw a command and its output as SVG."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(f"[bold]$ {command}[/bold]")
        for line in lines:
            console.print(Text.from_ansi(line), soft_wrap=False)
        console.save_svg(str(path), theme=THEME, code_format=FORMAT, unique_id="terminal")
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    image = IMAGES / "terminal.svg"
    draw(COMMAND, shown_lines(record(COMMAND)), image)
    print(image)
