"""A headless Chromium, asked through the DevTools protocol over two pipes; no driver is needed.

Source: https://chromedevtools.github.io/devtools-protocol/; with ``--remote-debugging-pipe``
messages are JSON that ends in a zero byte, read from descriptor 3 and written to descriptor 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One Chromium with one page.

    Attributes:
        events: of the page opened last, as the protocol has them.
    """

    def __init__(self, program: str, folder: Path) -> None:
        """Start it.

        Args:
            program: path of Chromium.
            folder: new and empty, for its profile.
        """
        self.events: list[dict[str, Any]] = []
        self._sent = 0
        self._session: str | None = None
        read, theirs = os.pipe()
        ours, write = os.pipe()
        # The shell gives the pipes the numbers that Chromium expects.
        script = f'exec "$@" 3<&{ours} 4>&{theirs}'
        command = ["bash", "-c", script, "chromium", program, *FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            command, pass_fds=(ours, theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        self._input = os.fdopen(write, "wb", buffering=0)
        self._output = os.fdopen(read, "rb")
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (EOFError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._input.close()
            self._output.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer; events are kept."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._input.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._sent:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._output.read(1)) != b"\0":
            if not byte:
                raise EOFError("Chromium has ended")
            text += byte
        found: dict[str, Any] = json.loads(text)
        if "method" in found:
            self.events.append(found)
        return found

    def resize(self, width: int, *, height: int = 800) -> None:
        """Give the page that many CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """As if the reader's screen were ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        done = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(done["data"])

    def print(self) -> bytes:
        """The page as PDF with an outline, on the paper that its style asks for."""
        done = self.call(
            "Page.printToPDF", preferCSSPageSize=True, printBackground=True,
            generateDocumentOutline=True, generateTaggedPDF=True,
        )  # fmt: skip
        return base64.b64decode(done["data"])
