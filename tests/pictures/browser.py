"""A headless Chromium, driven over its own pipe: nothing but the browser is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60
"""Seconds without a word after which the browser counts as stuck."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str:
    """The browser's command; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"
        )
    return found


@dataclass
class Page:
    """One tab, and all that it complained of or asked for."""

    send: Callable[..., dict[str, Any]]
    wait: Callable[[str], None]
    """Wait for an event of the browser."""
    errors: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a file at this width of the window."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url="about:blank")  # the same address again would only scroll
        self.wait("Page.loadEventFired")
        self.requested.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.wait("Page.loadEventFired")

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def click(self, selector: str) -> None:
        """Click an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def overflow(self) -> int:
        """Pixels that the page is wider than its window."""
        root = "document.documentElement"
        return int(self.run(f"{root}.scrollWidth - {root}.clientWidth"))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **(
            {"clip": self.run(
                "({x: 0, y: 0, scale: 1, width: document.documentElement.clientWidth, "
                "height: document.documentElement.scrollHeight})"
            )} if whole else {}
        ))  # fmt: skip
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """Start the browser with one tab, and end it."""
    command = [find_browser(), *FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    told, asks = os.pipe()
    answers, answered = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # the pipe is file 3 and file 4 of the browser
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{told} 4>&{answered}', *command,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(told, answered), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(told)
        os.close(answered)
        pipe = _Pipe(asks, answers)
        try:
            yield pipe.page()
        finally:
            with suppress(OSError, AssertionError):
                pipe.send("Browser.close", session="")
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(asks)
            os.close(answers)


class _Pipe:
    """Messages of the DevTools protocol: JSON, each ended by a zero byte."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self._count, self._session, self._rest = 0, "", b""
        self._events: list[str] = []
        self._page = Page(self.send, self.wait)

    def page(self) -> Page:
        """Attach to the one tab."""
        targets = self.send("Target.getTargets", session="")["targetInfos"]
        (tab,) = (t["targetId"] for t in targets if t["type"] == "page")
        attached = self.send("Target.attachToTarget", session="", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self._page

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what happens in between is noted."""
        self._count += 1
        own = self._session if session is None else session
        message = {"id": self._count, "method": method, "params": params}
        self._write(json.dumps(message | ({"sessionId": own} if own else {})).encode() + b"\0")
        self._events.clear()
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer.get("method", ""), answer.get("params", {}))

    def wait(self, event: str) -> None:
        """Wait for an event after what was sent last."""
        while event not in self._events:
            message = self._read()
            self._note(message.get("method", ""), message.get("params", {}))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._asks, data) :]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, f"the browser has said nothing for {PATIENCE} seconds"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        match method:
            case "Runtime.exceptionThrown":
                self._page.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self._page.errors.append(str(params["args"]))
            case "Log.entryAdded":
                self._page.errors.append(str(params["entry"]))
            case "Network.requestWillBeSent":
                self._page.requested.append(params["request"]["url"])
