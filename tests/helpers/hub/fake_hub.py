"""The Hugging Face hub over HTTP, as far as huggingface-hub asks it for models: lists, heads, and parts of files."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_PIECE = 1 << 16


@dataclass
class FakeHub:
    """Repositories of folders, and what goes wrong."""

    repos: dict[str, Path]
    url: str = ""
    break_after: int | None = None
    """Bytes after which the next transfer of a large file breaks off, once."""
    bytes_per_s: float | None = None
    going: threading.Event = field(default_factory=threading.Event)
    """Unless it is set, a large file has no second piece."""
    wrong_bytes: bool = False
    """Whether large files come with other bytes than the list says."""
    token: str | None = None
    """What callers must show."""
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    """Each transfer: the file, its first byte, and how many bytes were sent."""
    shown: set[str] = field(default_factory=set)
    """Tokens that callers have shown."""


@contextmanager
def fake_hub(repos: dict[str, Path]) -> Iterator[FakeHub]:
    """Serve folders as repositories of models; HF_ENDPOINT is to be its url."""
    hub = FakeHub(repos)
    hub.going.set()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.going.set()
        if "huggingface_hub" in sys.modules:  # this process keeps connections open, and each has a thread here
            from huggingface_hub import close_session

            close_session()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeHub

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.state.shown.add(token)
        repos = self.state.repos if self.state.token in (None, token) else {}
        repo = next((repo for repo in repos if path.startswith((f"/api/models/{repo}", f"/{repo}/"))), None)
        if repo is None:
            self._refuse("RepoNotFound", 401)
        elif path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
            self._send_json(_info(repo, repos[repo]), with_body)
        elif path.startswith(f"/api/models/{repo}/tree/"):
            self._send_json(_tree(repos[repo]), with_body)
        else:
            _, _, name = path.removeprefix(f"/{repo}/resolve/").partition("/")
            if (repos[repo] / name).is_file():
                self._send_file(repos[repo] / name, name, _commit(repo), with_body)
            else:
                self._refuse("EntryNotFound", 404)

    def _refuse(self, code: str, status: int) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: Any, with_body: bool) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _send_file(self, path: Path, name: str, commit: str, with_body: bool) -> None:
        data, wanted = path.read_bytes(), self.headers.get("Range")
        start, end = 0, len(data)
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(len(data), int(last) + 1) if last else len(data)
        self.send_response(200 if wanted is None else 206)
        self.send_header("Content-Length", str(end - start))
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            self._send_bytes(data[start:end], name, start, _is_large(path))

    def _send_bytes(self, data: bytes, name: str, start: int, is_large: bool) -> None:
        hub = self.state
        if is_large and hub.wrong_bytes:
            data = bytes(byte ^ 1 for byte in data)
        breaks = is_large and hub.break_after is not None
        if breaks:
            data, hub.break_after = data[: hub.break_after], None
        count = 0
        try:
            for at in range(0, len(data), _PIECE):
                piece = data[at : at + _PIECE]
                self.wfile.write(piece)
                count += len(piece)
                if is_large and hub.bytes_per_s is not None:
                    time.sleep(len(piece) / hub.bytes_per_s)
                if is_large:
                    hub.going.wait(60)
        except ConnectionError:  # the caller is gone
            breaks = True
        hub.sent.append((name, start, count))
        if breaks:
            self.close_connection = True


def _commit(repo: str) -> str:
    return hashlib.sha256(repo.encode()).hexdigest()[:40]


def _is_large(path: Path) -> bool:
    return path.suffix in (".gguf", ".safetensors")


def _files(folder: Path) -> Iterator[tuple[str, int, str, bool]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        yield path.relative_to(folder).as_posix(), len(data), hashlib.sha256(data).hexdigest(), _is_large(path)


def _info(repo: str, folder: Path) -> dict[str, Any]:
    siblings = [
        {"rfilename": name, "size": size}
        | ({"lfs": {"sha256": sha256, "size": size, "pointerSize": 130}} if is_large else {})
        for name, size, sha256, is_large in _files(folder)
    ]
    return {"id": repo, "modelId": repo, "sha": _commit(repo), "siblings": siblings, "tags": [], "private": False}


def _tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": size, "oid": sha256[:40]}
        | ({"lfs": {"oid": sha256, "size": size, "pointerSize": 130}} if is_large else {})
        for name, size, sha256, is_large in _files(folder)
    ]
