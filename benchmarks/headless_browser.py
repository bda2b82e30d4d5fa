"""A headless Chromium driven over the WebDriver protocol (W3C) with the standard library alone."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars")  # fmt: skip


class Browser:
    """Use as a context manager; ``scheme`` is what prefers-color-scheme answers."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def __enter__(self) -> Browser:
        self._driver = subprocess.Popen(["chromedriver", f"--port={self._port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(100):
            try:
                self._call("GET", "/status")
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        options = {"goog:chromeOptions": {"args": [*FLAGS, f"--user-data-dir={self._profile}"]}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = "/session/" + self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def _call(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, **parameters: object):
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def script(self, text: str):
        return self._call("POST", f"{self._session}/execute/sync", {"script": text, "args": []})

    def open(self, page: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file at a window size and wait until every figure is drawn."""
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})
        until = time.monotonic() + 30
        while self.script("return document.documentElement.dataset.ready") != "all":
            assert time.monotonic() < until, self.complaints()
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """Warnings and errors that the page printed to the console since last asked."""
        return [entry["message"] for entry in self._call("POST", f"{self._session}/se/log", {"type": "browser"}) if entry["level"] in ("WARNING", "SEVERE")]

    def picture(self, file: Path) -> None:
        """Write a screenshot of the whole page."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def paper(self, file: Path) -> int:
        """Write the page as PDF; return the number of pages."""
        printed = base64.b64decode(self.devtools("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])
        file.write_bytes(printed)
        return printed.count(b"/Type /Page\n") or printed.count(b"/Type /Page ") or printed.count(b"/Type/Page/")
