"""A headless Chromium that opens a page from a file, for tests: driven through two pipes, nothing is installed.

    with Browser(tmp_path) as browser:
        browser.open(path, width=1200, height=800)
        browser.run("document.title")            the value of an expression
        browser.mouse("mouseMoved", x, y)        as a user's
        browser.complaints                       what its console, its content policy or an uncaught error said

The protocol is Chromium's own (`--remote-debugging-pipe`): JSON messages that end with a zero byte, on descriptors 3
and 4. No network is asked for, and none is there: every address resolves to nothing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
READY = (
    "document.readyState === 'complete' && "
    "[...document.querySelectorAll('.plotly-graph-div')].every(d => d.querySelector('.xtick'))"
)
SECONDS = 60.0  # for one answer: machines of CI are slow


def executable() -> str | None:
    """The browser on this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in one browser."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.unread = b""
        self.session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        to_read, self.to = os.pipe()
        self.source, to_write = os.pipe()
        command = [executable() or NAMES[0], *FLAGS, f"--user-data-dir={self.folder / 'profile'}"]
        # The browser reads descriptor 3 and writes 4: a shell puts ours there, whatever their numbers.
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.session = None
        with contextlib.suppress(Exception):
            self.send("Browser.close")
        os.close(self.to)
        os.close(self.source)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._heard(answer.get("method", ""), answer.get("params", {}))

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.source], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {SECONDS} seconds")
            more = os.read(self.source, 1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self.unread += more
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def _heard(self, method: str, told: dict[str, Any]) -> None:
        """Keep what a page should not say."""
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(str([each.get("value") for each in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Open a page, and wait until its figures are drawn."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait(READY)

    def wait(self, condition: str) -> None:
        """Wait until an expression holds."""
        until = time.monotonic() + SECONDS
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} never held; the page said {self.complaints}")
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of an expression; of a promise, what it resolves to."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Where an element is in the window, scrolled to: left, top, width, height."""
        rectangle = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )
        x, y, width, height = self.run(rectangle)
        return x, y, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """`mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel`, at a place of the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, name: str, shift: bool = False) -> None:
        """A key, pressed and released."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": name} if len(name) == 1 and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=name, modifiers=8 * shift, **text)

    def picture(self, path: Path, whole: bool = False) -> None:
        """What the window shows, or the whole page, as a PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
