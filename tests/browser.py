"""A page in headless Chromium, driven through a pipe by its own debugging protocol: nothing is needed but the browser."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds to wait for an answer: machines may be busy


def program() -> str:
    """The browser; a test that asks for it is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no headless browser here: none of {', '.join(NAMES)} is on the path")
    return found


class Browser:
    """One browser with one page. What it complains of, and what it wants to load, is kept."""

    def __init__(self, *flags: str):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self.write = os.pipe()
        self.read, theirs_out = os.pipe()
        quiet = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--mute-audio",
        ]
        options = [*quiet, "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", *flags, "about:blank"]
        # the browser speaks on the descriptors 3 and 4, whatever ours are
        place = "import os, sys; a, b = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2])); "
        place += "a, b = (x if x > 4 else os.dup(os.dup(os.dup(x))) for x in (a, b)); "
        place += "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
        command = [sys.executable, "-Ic", place, str(theirs_in), str(theirs_out), program(), *options]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), **silent)
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.number, self.session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        try:
            target = self.ask("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.write)
        os.close(self.read)
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is there; complaints and requests begin anew."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints, self.requests = [], []
        self.ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while self.run("document.readyState") != "complete" or self.run("location.protocol") != "file:":
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """What an expression is worth in the page."""
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def _note(self, event: dict[str, Any]) -> None:
        kind, params = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self.read, 2**16)
            assert part, "the browser has gone"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)
