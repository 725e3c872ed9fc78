"""Serves a folder over HTTP on this machine, with ranges, ETags and faults: `http.server` has none of them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Served:
    """The server. The attributes that a test may change are read at every request."""

    folder: Path
    address: str = ""
    requests: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(method, name of the file, first byte, byte after the last) of every request of a file."""
    tags: bool = True  # ETag
    times: bool = True  # Last-Modified
    ranges: bool = True
    failing: int = 0  # so many requests of bytes that come next break off
    status: int = 0  # of all answers, if not 0
    silent: float = 0.0  # seconds before each answer

    def bodies(self, suffix: str = "") -> list[tuple[str, int, int]]:
        """The bytes that were read: (name of the file, first, last + 1)."""
        return [(name, *span) for method, name, *span in self.requests if method == "GET" and name.endswith(suffix)]


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, *message: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        time.sleep(self.served.silent)
        path = self.served.folder / unquote(self.path).lstrip("/")
        if self.served.status or not path.exists():
            self.send_response(self.served.status or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path.is_dir():
            links = "".join(f'<a href="{one.name}{"/" * one.is_dir()}">x</a>\n' for one in sorted(path.iterdir()))
            self._send(200, links.encode() if body else b"", {"Content-Type": "text/html"})
        else:
            self._send_file(path, body)

    def _send_file(self, path: Path, body: bool) -> None:
        status = path.stat()
        about = {"Accept-Ranges": "bytes"} if self.served.ranges else {}
        if self.served.tags:
            about["ETag"] = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        if self.served.times:
            about["Last-Modified"] = self.date_time_string(status.st_mtime)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop, code = 0, status.st_size, 200
        if asked and self.served.ranges:
            start, stop, code = int(asked[1]), min(int(asked[2]) + 1, status.st_size), 206
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{status.st_size}"
        self.served.requests.append((self.command, path.name, start, stop))
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start) if body else b""
        breaks = body and self.served.failing > 0
        self.served.failing -= breaks
        self._send(code, data[: len(data) // 2] if breaks else data, about, stop - start)
        if breaks:
            self.close_connection = True

    def _send(self, code: int, data: bytes, about: dict[str, str], length: int | None = None) -> None:
        self.send_response(code)
        for name, value in about.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed breaks its connection: no fault of the server."""


@contextmanager
def served(folder: Path, port: int = 0) -> Iterator[Served]:
    """Context in which the folder is at `address`, which has no slash at its end. Port 0: any that is free."""
    about = Served(folder)
    server = QuietServer(("127.0.0.1", port), type("OwnHandler", (Handler,), {"served": about}))
    about.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield about
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
