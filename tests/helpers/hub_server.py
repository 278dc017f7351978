"""A stand-in of the Hugging Face Hub's HTTP API on this machine: repositories, branches, LFS uploads and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, USER = "hf_of_the_test_0123456789", "someone"
LFS_SUFFIXES = ".safetensors", ".png"
COMMIT = "c0ffee0000000000000000000000000000000000"


@dataclass
class Repo:
    is_private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b"*.png lfs\n"}})


@dataclass
class Hub:
    """State of the stand-in.

    faults: by the method and a pattern of the path, the statuses of the next answers; 0 closes the connection.
    requests: method, path and body of all requests. is_writable: whether the token may write.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    is_writable: bool = True

    def sent(self, method: str, pattern: str) -> list[tuple[str, bytes]]:
        """Return path and body of the requests that match."""
        return [(path, body) for kind, path, body in self.requests if kind == method and re.search(pattern, path)]


class _Answer(Exception):
    def __init__(self, status: int, tree: Any) -> None:
        self.status, self.tree = status, tree


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, body))
        try:
            self._fault(path)
            tree = self._route(path, body)
            status = 200
        except _Answer as answer:
            status, tree = answer.status, answer.tree
        if status == 0:
            self.close_connection = True
            self.connection.close()
            return
        data = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _handle

    def _fault(self, path: str) -> None:
        for (method, pattern), statuses in self.hub.faults.items():
            if method == self.command and re.search(pattern, path) and statuses:
                raise _Answer(statuses.pop(0), {"error": "a fault of the test"})

    def _route(self, path: str, body: bytes) -> Any:
        if match := re.fullmatch(r"/lfs/(\w+)", path):  # like S3: authorized by the URL
            if hashlib.sha256(body).hexdigest() != match[1]:
                raise _Answer(400, {"error": "another hash"})
            self.hub.objects[match[1]] = body
            return {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _Answer(401, {"error": "Invalid credentials in Authorization header"})
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git)?(?:/(.*))?", path)
        repo = self.hub.repos.get(match[1]) if match else None
        if match is None or repo is None:
            raise _Answer(404, {"error": "Repository not found"})
        action, _, revision = (match[2] or "").partition("/")
        revision = unquote(revision)
        if self.command == "POST" and not self.hub.is_writable:
            raise _Answer(403, {"error": "You must use a write token"})
        if action in ("", "revision"):
            names = [{"rfilename": name} for name in repo.branches["main"]]
            return {"id": match[1], "private": repo.is_private, "sha": COMMIT, "siblings": names}
        if action == "branch":
            if revision in repo.branches:
                raise _Answer(409, {"error": "Reference already exists"})
            repo.branches[revision] = dict(repo.branches["main"])
            return {}
        if action == "info":
            return self._batch(json.loads(body))
        if revision not in repo.branches:
            raise _Answer(404, {"error": f"Invalid rev id: {revision}"})
        files = repo.branches[revision]
        if action == "tree":
            return [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
        if action == "preupload":
            return {"files": [self._mode(entry["path"], files) for entry in json.loads(body)["files"]]}
        assert action == "commit", path
        self._commit(files, [json.loads(line) for line in body.splitlines()])
        return {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{match[1]}/commit/{COMMIT}"}

    def _create(self, tree: dict[str, Any]) -> dict[str, str]:
        if not self.hub.is_writable:
            raise _Answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        name = f"{tree.get('organization') or USER}/{tree['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repos:
            raise _Answer(409, {"error": "You already created this model repo", **url})
        self.hub.repos[name] = Repo(is_private=tree.get("visibility") == "private")
        return url

    def _mode(self, name: str, files: dict[str, bytes]) -> dict[str, Any]:
        is_lfs = name.endswith(LFS_SUFFIXES)
        entry = {"path": name, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
        if name in files:
            data = files[name]
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry["oid"] = hashlib.sha256(data).hexdigest() if is_lfs else blob
        return entry

    def _batch(self, tree: dict[str, Any]) -> dict[str, Any]:
        objects = []
        for entry in tree["objects"]:
            target = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"}}
            objects.append(entry if entry["oid"] in self.hub.objects else entry | {"actions": target})
        return {"transfer": "basic", "objects": objects}

    def _commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        changed = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del changed[value["path"]]
            else:
                assert line["key"] == "header", line
        files.clear()
        files.update(changed)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a Hub without repositories, at `Hub.url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
