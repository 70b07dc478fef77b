"""The web server of a labelling session, on this machine only, behind an address with a secret token; and its page."""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from string import ascii_lowercase
from typing import Any

from dubito.report.html import fill, read_asset, style
from dubito.web.labelling.session import Session
from dubito.web.labelling.task import Task


def keys(classes: tuple[str, ...]) -> tuple[str, ...]:
    """The key of every class: its name if all are single letters or digits, else 1 to 9 and 0, then letters; "" when these run out.

    >>> keys(("0", "1", "2")), keys(("cat", "dog"))
    (('0', '1', '2'), ('1', '2'))
    """
    if all(len(name) == 1 and name.isalnum() for name in classes) and len({name.lower() for name in classes}) == len(classes):
        return tuple(name.lower() for name in classes)
    known = [*"1234567890", *ascii_lowercase]
    return tuple(known[i] if i < len(known) else "" for i in range(len(classes)))


def page(task: Task) -> str:
    """The HTML of the page for a task."""
    settings = json.dumps({"classes": task.classes, "keys": keys(task.classes)}).replace("<", "\\u003c")
    package = "dubito.web.labelling"
    return fill(
        read_asset(package, "labelling.html"),
        name=escape(task.name),
        style=f"{style()}\n{read_asset(package, 'labelling.css').strip()}",
        settings=settings,
        script=read_asset(package, "labelling.js").strip(),
    )


HOST = "127.0.0.1"
LARGEST = 10_000  # bytes of a request: answers are short
NOTHING = "there is nothing here"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Serves one session on 127.0.0.1. `address` contains a random token, so pages of other sites cannot reach it.

    >>> import tempfile
    >>> from dubito.web.labelling import task
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     session = Session(task("digits", pool=4), folder)
    ...     server = Server(session)
    ...     print(server.address.replace(server.token, "TOKEN").replace(str(server.server_address[1]), "PORT"))
    ...     server.server_close()
    ...     session.close()
    http://127.0.0.1:PORT/TOKEN/
    """

    daemon_threads = True

    def __init__(self, session: Session, *, port: int = 0):
        super().__init__((HOST, port), Handler)
        self.session, self.token, self.stopped = session, secrets.token_urlsafe(16), False

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the page was closed before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        """End `serve_forever`, without waiting for it: a request may call this."""
        self.stopped = True
        threading.Thread(target=self.shutdown, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """GET: the page, `state` and `input/N`. POST, in JSON: `label`, `skip`, `undo` and `stop`, which answer with the new state."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer with the page, the state of the session, or an image."""
        path = self._path()
        if path is None:
            return
        session = self.server.session
        if path == "":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page(session.task).encode())
        elif path == "state":
            self._json(HTTPStatus.OK, session.state())
        else:
            self._image(path)

    def _image(self, path: str) -> None:
        task, image = self.server.session.task, None
        match = re.fullmatch(r"input/(\d{1,12})(/small)?", path)
        if match and int(match[1]) < len(task.pool):
            image = task.shown.png(int(match[1]), small=match[2] is not None)
        if image is None:
            return self._refuse(HTTPStatus.NOT_FOUND, NOTHING)
        return self._send(HTTPStatus.OK, "image/png", image, cache="private, max-age=3600")

    def do_POST(self) -> None:
        """Save an answer, take one back, or stop; answer with the new state."""
        path = self._path()
        body = None if path is None else self._body()
        if body is None:
            self.close_connection = True  # the rest of the request is unread
            return None
        session = self.server.session
        actions = {
            "label": lambda: session.answer(_whole(body, "index"), _whole(body, "label")),
            "skip": lambda: session.answer(_whole(body, "index"), None),
            "undo": lambda: session.undo(None if body.get("index") is None else _whole(body, "index")),
            "stop": self.server.stop,
        }
        if path not in actions:
            return self._refuse(HTTPStatus.NOT_FOUND, NOTHING)
        try:
            actions[path]()
        except ValueError as error:
            return self._refuse(HTTPStatus.CONFLICT, str(error))
        except OSError as error:  # the disk is full: nothing was saved
            return self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, str(error.strerror or error))
        return self._json(HTTPStatus.OK, session.state() | {"stopped": self.server.stopped})

    def _path(self) -> str | None:
        """The path after the token; None, with a refusal sent, if the token or the name of the host is wrong."""
        port = self.server.server_address[1]
        named = self.headers.get("Host", "") in (f"{HOST}:{port}", f"localhost:{port}")  # any other name: a site that points here
        _, _, rest = self.path.partition("?")[0].partition("/")
        token, _, path = rest.partition("/")
        if not named or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND, NOTHING)
            return None
        return path

    def _body(self) -> dict[str, Any] | None:
        """The JSON of a request. Browsers do not let pages of other sites send this content type."""
        length, body = self.headers.get("Content-Length", ""), None
        short = re.fullmatch(r"[0-9]{1,9}", length) is not None and int(length) <= LARGEST
        if short and self.headers.get("Content-Type") == "application/json":
            with suppress(ValueError, RecursionError):
                body = json.loads(self.rfile.read(int(length)))
        if isinstance(body, dict):
            return body
        return self._refuse(HTTPStatus.BAD_REQUEST, "a request must be a short JSON object")

    def _json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._json(status, {"refused": words})

    def _send(self, status: HTTPStatus, content_type: str, content: bytes, *, cache: str = "no-store") -> None:
        self.send_response(status)
        for name, value in {
            **HEADERS,
            "Content-Type": content_type,
            "Content-Length": str(len(content)),
            "Cache-Control": cache,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests would hide the address on the terminal."""


def _whole(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number; got {value!r}")
    return value
