"""A hub on this machine: as much of its protocol as huggingface_hub speaks to upload and download a model."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class LocalHub(ThreadingHTTPServer):
    """One repository, org/name. `files`: {path: content}; `requests`: what was asked for, as "METHOD path"."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.private: bool | None = None
        self.commits = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def commit(self) -> str:
        return f"{self.commits:040x}"


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        hub, path = self.server, urlparse(self.path).path
        hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            hub.private = json.loads(body).get("visibility") == "private" or bool(json.loads(body).get("private"))
            self.answer({"url": f"{hub.url}/org/name"})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in path:
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    hub.files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
                elif operation["key"] == "deletedFile":
                    del hub.files[operation["value"]["path"]]
            hub.commits += 1
            found = {"success": True, "commitOid": hub.commit, "commitUrl": f"{hub.url}/org/name/commit/{hub.commit}"}
            self.answer(found)
        elif path == "/api/validate-yaml":  # the metadata of README.md
            wrong = "license: none" in json.loads(body)["content"]
            self.answer(
                {"errors": [{"message": '"license" must be one of'}] if wrong else [], "warnings": []},
                400 if wrong else 200,
            )
        else:
            self.answer({}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlparse(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if "/tree/" in path:
            self.answer([{"type": "file", "path": name, **_about(content)} for name, content in hub.files.items()])
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in hub.files]
            self.answer({"id": "org/name", "private": hub.private, "sha": hub.commit, "siblings": siblings})
        elif "/resolve/" in path and (name := path.split("/", 5)[-1]) in hub.files:
            etag = f'"{_about(hub.files[name])["oid"]}"'
            self.answer(hub.files[name], ETag=etag, X_Repo_Commit=hub.commit)
        else:
            self.answer({}, 404, X_Error_Code="RepoNotFound")


def _about(content: bytes) -> dict[str, object]:
    return {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    with LocalHub() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
