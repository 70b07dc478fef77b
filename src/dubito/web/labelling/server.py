"""The web server of a labelling session: on this machine only, and only for who knows its address."""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dubito.web.labelling.page import page
from dubito.web.labelling.session import Session

HOST = "127.0.0.1"
LARGEST = 10_000  # bytes of a request: an answer is short
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Serves one session on 127.0.0.1. `address` holds a random token: pages of other sites do not know it, and get nothing.

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
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed before it had its answer is no error to be told of."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        """End `serve_forever`; from within a request, it must not be waited for."""
        self.stopped = True
        threading.Thread(target=self.shutdown, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """GET: the page, `state` and `input/N`. POST, in JSON: `label`, `skip`, `undo` and `stop`, which answer with the new state."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        session = self.server.session
        if path == "":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page(session.task).encode())
        elif path == "state":
            self._json(HTTPStatus.OK, session.state())
        elif (found := re.fullmatch(r"input/(\d{1,12})(/small)?", path)) and int(found[1]) < len(session.task.pool):
            image = session.task.shown.png(int(found[1]), small=found[2] is not None)
            if image is None:
                self._refuse(HTTPStatus.NOT_FOUND, "this input is no image")
            else:
                self._send(HTTPStatus.OK, "image/png", image, cache="private, max-age=3600")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        path = self._path()
        body = None if path is None else self._body()
        if body is None:
            self.close_connection = True  # what is left of it unread is no next request
            return
        session = self.server.session
        try:
            if path == "label":
                session.answer(_whole(body, "index"), _whole(body, "label"))
            elif path == "skip":
                session.answer(_whole(body, "index"), None)
            elif path == "undo":
                session.undo(None if body.get("index") is None else _whole(body, "index"))
            elif path == "stop":
                self.server.stop()
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
                return
        except ValueError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except OSError as error:  # the disk is full: nothing was taken
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, str(error.strerror or error))
        else:
            self._json(HTTPStatus.OK, session.state() | {"stopped": self.server.stopped})

    def _path(self) -> str | None:
        """What is asked for behind the token. Who does not know the token, or came here under another name, gets nothing."""
        port = self.server.server_address[1]
        named = self.headers.get("Host", "") in (f"{HOST}:{port}", f"localhost:{port}")  # another: a site that points here
        _, _, rest = self.path.partition("?")[0].partition("/")
        token, _, path = rest.partition("/")
        if not named or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
            return None
        return path

    def _body(self) -> dict[str, Any] | None:
        """The JSON of a request. Other pages cannot send that kind without being asked whether they may, and they may not."""
        length = self.headers.get("Content-Length", "")
        short = re.fullmatch(r"[0-9]{1,9}", length) is not None and int(length) <= LARGEST
        if not short or self.headers.get("Content-Type") != "application/json":
            self._refuse(HTTPStatus.BAD_REQUEST, "a request is a short JSON object")
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "a request is a short JSON object")
            return None
        return body

    def _json(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._json(status, {"refused": words})

    def _send(self, status: HTTPStatus, kind: str, content: bytes, *, cache: str = "no-store") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": cache}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a terminal full of requests would hide the address."""


def _whole(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number; got {value!r}")
    return value
