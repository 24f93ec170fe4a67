"""A real headless Chromium, driven over its own pipe (Chrome DevTools Protocol): no driver, no port, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 120
# Chromium reads file descriptor 3 and writes 4; ours are put out of their way first.
ON_PIPES = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium_program() -> str | None:
    """Return the browser of this machine, None if it has none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One page of a browser that ends with the `with` block; `problems` is what its console complained of."""

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 900) -> None:
        program = chromium_program()
        assert program is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions"]
        # A container's root has no sandbox of its own; the page is ours.
        flags += ["--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--hide-scrollbars"]
        self._browser = subprocess.Popen(
            [sys.executable, "-c", ON_PIPES, str(to_browser), str(from_browser), program, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._last_id, self._session = b"", 0, None
        self.problems: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.kill()
        self._browser.wait()
        os.close(self._write)
        os.close(self._read)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page a size in CSS pixels, and a colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, wanted: Callable[[Any], bool] = bool) -> Any:
        """Return the expression's value once it is as wanted."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            value = self.evaluate(expression)
            if wanted(value):
                return value
            time.sleep(0.1)
        raise AssertionError(f"`{expression}` is still {value!r}; the page complained of {self.problems}")

    def screenshot(self, path: Path) -> None:
        """Save what is in sight as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its answer; what the page tells meanwhile is noted."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.problems.append(parameters["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._read, 1 << 16)
            assert got, "Chromium has ended"
            self._rest += got
        text, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(text)
        return answer
