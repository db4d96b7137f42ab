"""A headless Chromium, driven over its debugging pipe: no package, no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One open page.

    Args:
        profile: An empty folder for the browser.
        patience: Seconds that an answer may take.
    """

    def __init__(self, profile: Path, patience: float = 60.0) -> None:
        assert CHROMIUM is not None
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage"
        options += f" --user-data-dir={profile}"
        # The browser reads commands from descriptor 3 and answers on 4.
        line = f"exec {CHROMIUM} {options} --remote-debugging-pipe about:blank 3<&{to_browser} 4>&{from_browser}"
        descriptors = (to_browser, from_browser)
        self._process = subprocess.Popen(
            ["bash", "-c", line], pass_fds=descriptors, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for descriptor in descriptors:
            os.close(descriptor)
        self._patience = patience
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def show(self, file: Path, width: int, height: int, scheme: Literal["light", "dark"]) -> None:
        """Opens a file in a window of CSS pixels, and waits until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        deadline = time.monotonic() + self._patience
        while self.evaluate("document.readyState + location.href") != f"complete{file.as_uri()}":
            assert time.monotonic() < deadline, f"{file} was not loaded"

    def evaluate(self, expression: str) -> Any:
        """Returns the value of some JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, whole: bool = True) -> bytes:
        """The page as a PNG, all of its height or what the window shows."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        return base64.b64decode(answer["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], self._patience)
            assert ready, f"Chromium did not answer within {self._patience} s"
            received = os.read(self._answers, 1 << 16)
            assert received, "Chromium has ended"
            self._buffer += received
        first, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
