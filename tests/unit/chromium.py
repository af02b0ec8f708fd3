"""A real Chromium without a window, told what to do over a pipe (DevTools protocol): no port, no driver."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0


def binary() -> str | None:
    """The browser of this machine; $CHROMIUM names another one."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in BINARIES if (found := shutil.which(name))), None)


class Unable(Exception):
    """The browser does not start on this machine."""


class Page:
    """One open page of a size in CSS pixels."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **params)

    def open(self, url: str, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        """Loads it, with scripts switched off, and waits for the end of it."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._ask(f"{domain}.enable")
        self._ask("Emulation.setScriptExecutionDisabled", value=True)
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=url)
        self._browser.wait_event("Page.loadEventFired", self._session)

    def value(self, expression: str) -> Any:
        """What an expression of the test's, not the page's, says."""
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def screenshot(self, whole: bool = True) -> bytes:
        """PNG."""
        told = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])

    def seen(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of a kind so far."""
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] == method and event.get("sessionId") == self._session
        ]


class Browser:
    """A running browser; `launch` makes one."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        os.set_blocking(back, False)

    def _message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            try:
                piece = os.read(self._back, 1 << 20)
            except BlockingIOError:
                piece = None
            if piece == b"" or self._process.poll() is not None:
                raise Unable(f"{self._process.args[0]} ended with {self._process.wait()}")  # type: ignore[index]
            if piece is None:
                if time.monotonic() > end:
                    raise Unable("no answer in time")
                time.sleep(0.01)
                continue
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(text)
        if "method" in told:
            self.events.append(told)
        return told

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        text = json.dumps(asked | ({"sessionId": session} if session else {})).encode() + b"\0"
        os.write(self._to, text)
        end = time.monotonic() + START_S
        while True:
            told = self._message(end)
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result

    def wait_event(self, method: str, session: str) -> None:
        """Waits until such an event came."""
        end = time.monotonic() + START_S
        while not any(e["method"] == method and e.get("sessionId") == session for e in self.events):
            self._message(end)

    def page(self) -> Page:
        """A new, empty page."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


@contextmanager
def launch(folder: Path) -> Iterator[Browser]:
    """A browser with its profile below `folder`. Raises Unable where none starts."""
    found = binary()
    if found is None:
        raise Unable("no chromium on this machine: apt-get install chromium")
    words = [found, "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"]
    words += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"]
    words += ["--no-proxy-server", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    words += ["--no-sandbox"] if os.geteuid() == 0 else []
    inner, to = os.pipe()
    back, outer = os.pipe()

    def place() -> None:
        high = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (inner, outer)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [*words, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=place,
            pass_fds=(3, 4),
            start_new_session=True,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
        )
    os.close(inner)
    os.close(outer)
    try:
        browser = Browser(process, to, back)
        browser.ask("Browser.getVersion")
        yield browser
    finally:
        _end(process)
        os.close(to)
        os.close(back)
