"""Draw docs/images/run-report.png, the top of the report of a run, with a headless Chromium.

`python -m docs.figures.run_report RUN_DIR/report.html` overwrites it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from docs.figures.__main__ import IMAGES

WIDTH, HEIGHT = 1100, 865
CHROMIUM = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
    f"--window-size={WIDTH},{HEIGHT}",
)  # fmt: skip


def draw(page: Path, path: Path) -> None:
    """Draw the top of a page as PNG."""
    with tempfile.TemporaryDirectory() as folder:
        screenshot = Path(folder) / "page.png"
        command = [*CHROMIUM, f"--screenshot={screenshot}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        with Image.open(screenshot) as image:
            image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    target = IMAGES / "run-report.png"
    draw(Path(sys.argv[1]), target)
    print(target)
