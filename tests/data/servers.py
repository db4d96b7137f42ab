"""A web server of our own: files from memory, by byte ranges, with the failures that real ones have."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from threading import Lock, Thread

Failure = int | str


class RangeServer(ThreadingHTTPServer):
    """Serves ``files`` by name.

    ``requests`` lists what was asked for (name, first byte, last byte; -1 for HEAD). Of the GET requests, the next
    ``failures`` ones end in ``failure``: a status such as 503, "cut" for half of the bytes and a closed connection, or
    "reset" for a connection that breaks; so does every request for ``broken``, a byte of a file. With ``weather``, one
    request in ten ends in any of these, and one in 403. Every answer comes after ``delay`` seconds;
    ``most_at_a_time`` requests waited for theirs together.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests: list[tuple[str, int, int]] = []
        self.failures = 0
        self.failure: Failure = 503
        self.broken: tuple[str, int] | None = None
        self.weather: Random | None = None
        self.forbids = 1
        self.honours_ranges = True
        self.is_gone = False
        self.delay = 0.0
        self.most_at_a_time = 0
        self._waiting = 0
        self._lock = Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait(self) -> None:
        """The delay of an answer."""
        with self._lock:
            self._waiting += 1
            self.most_at_a_time = max(self.most_at_a_time, self._waiting)
        time.sleep(self.delay)
        with self._lock:
            self._waiting -= 1

    def failure_now(self, name: str, asked: range | None) -> Failure | None:
        """How a request for these bytes fails, if it does; for HEAD there are none."""
        with_body = asked is not None
        with self._lock:
            if asked is not None and self.broken is not None and self.broken[0] == name and self.broken[1] in asked:
                return self.failure
            if self.weather is not None and self.weather.random() < 0.1:
                kinds = [503, "reset", *["cut"] * with_body, *[403] * self.forbids]
                failure = self.weather.choice(kinds)
                self.forbids -= failure == 403
                return failure
            self.failures -= with_body
            return self.failure if with_body and self.failures >= 0 else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # each answer would take 40 ms
    server: RangeServer

    def do_HEAD(self) -> None:
        self._reply(with_body=False)

    def do_GET(self) -> None:
        self._reply(with_body=True)

    def _reply(self, with_body: bool) -> None:
        if self.server.is_gone:  # connections that are kept alive outlive the server's socket
            self.close_connection = True
            return
        self.server.wait()
        name, _, asked = self._asked()
        failure = self.server.failure_now(name, asked if with_body else None)
        if isinstance(failure, int):
            self.send_error(failure)
        elif failure == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(with_body, cut=failure == "cut")

    def _asked(self) -> tuple[str, bytes | None, range]:
        name = self.path.lstrip("/")
        data = self.server.files.get(name)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return name, data, range(int(wanted[1]), int(wanted[2]) + 1) if wanted else range(len(data or b""))

    def _answer(self, with_body: bool, cut: bool = False) -> None:
        name, data, asked = self._asked()
        if data is None:
            self.send_error(404)
            return
        self.server.requests.append((name, asked.start, asked.stop - 1) if with_body else (name, -1, -1))
        partial = "Range" in self.headers and self.server.honours_ranges
        part = data[asked.start : asked.stop] if partial else data
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {asked.start}-{asked.stop - 1}/{len(data)}")
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
