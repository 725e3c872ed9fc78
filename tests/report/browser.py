"""A headless Chromium that shows a page, driven by chromedriver over plain HTTP (W3C WebDriver and Chromium's CDP)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]  # fmt: skip
MISSING = None if shutil.which("chromedriver") and shutil.which("chromium") else "no chromium and chromedriver on PATH"


class Browser:
    """Raises `RuntimeError` with chromedriver's message if a command fails."""

    def __init__(self, port: int) -> None:
        self._start, self._session = f"http://127.0.0.1:{port}", ""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._start + self._session + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error

    def begin(self, profile: Path) -> None:
        for _ in range(100):
            try:
                if self.call("GET", "/status")["ready"]:
                    break
            except OSError:
                time.sleep(0.1)
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str) -> Any:
        """Returns what the function body returns in the page."""
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Shows a file in a window of that many CSS pixels."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.call("POST", "/url", {"url": path.as_uri()})

    def resize(self, width: int) -> None:
        mobile = width < 600
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)

    def press(self, key: str) -> None:
        """Presses Tab or Enter."""
        code, text = {"Tab": (9, {}), "Enter": (13, {"text": "\r"})}[key]
        for kind, typed in (("keyDown", text), ("keyUp", {})):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def console(self) -> list[str]:
        """What the console has received since the last call."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]


@contextmanager
def browser_with(profile: Path) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["chromedriver", f"--port={port}"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        browser = Browser(port)
        browser.begin(profile)
        yield browser
        browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(20)
