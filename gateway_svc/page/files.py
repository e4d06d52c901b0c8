"""The page's files: read once, served with a policy that lets the browser load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    body: bytes
    content_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """All files by their path in the page, such as "index.html" and "vendor/uPlot.iife.min.js"."""
    return dict(_files(resources.files("gateway_svc.page") / "static", ""))


def _files(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        elif (suffix := entry.name[entry.name.rfind(".") :]) in _TYPES:
            body = entry.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:20]
            found.append((f"{prefix}{entry.name}", PageFile(body, _TYPES[suffix], etag)))
    return found
