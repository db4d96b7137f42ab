"""A web server of our own: files from memory, by byte ranges, with the failures that real ones have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread


class RangeServer(ThreadingHTTPServer):
    """Serves ``files`` by name.

    ``requests`` lists what was asked for (name, first byte, last byte; -1 for HEAD). Of the GET requests, the next
    ``failures`` ones end in ``failure``: a status such as 503, or "cut" for half of the bytes and a closed connection.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests: list[tuple[str, int, int]] = []
        self.failures = 0
        self.failure: int | str = 503
        self.honours_ranges = True
        self.is_gone = False
        self._lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fails_now(self) -> bool:
        with self._lock:
            self.failures -= 1
            return self.failures >= 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def do_HEAD(self) -> None:
        if self.server.is_gone:
            self.close_connection = True
        else:
            self._answer(with_body=False)

    def do_GET(self) -> None:
        if self.server.is_gone:  # connections that are kept alive outlive the server's socket
            self.close_connection = True
        elif not self.server.fails_now():
            self._answer(with_body=True)
        elif isinstance(self.server.failure, int):
            self.send_error(self.server.failure)
        else:
            self._answer(with_body=True, cut=True)

    def _answer(self, with_body: bool, cut: bool = False) -> None:
        name = self.path.lstrip("/")
        data = self.server.files.get(name)
        if data is None:
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, len(data) - 1)
        self.server.requests.append((name, first, last) if with_body else (name, -1, -1))
        partial = wanted is not None and self.server.honours_ranges
        part = data[first : last + 1] if partial else data
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        if with_body:
            self.wfile.write(part[: len(part) // 2] if cut else part)
            self.close_connection = cut

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[RangeServer]:
    """Serves these files as long as the block runs."""
    server = RangeServer(files)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_gone = True
        server.shutdown()
        server.server_close()
        thread.join()
