"""Text files that people write on Windows begin with a byte order mark: it is no part of a key, a token or a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza.credentials import read_token
from cadenza_cli.admin.tenants_editor import TenantsEditor
from cadenza_cli.structured import _read as read_schema
from cadenza_common.metrics.server import _has_token
from cadenza_common.settings.file import read_file
from gateway_svc.http.keys import KeyFile
from scheduler_svc.requests.chats.option import read_template
from scheduler_svc.tenants.file import read_tenants

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("text", "read", "expected"),
    [
        ("a-key\r\nanother\r\n", lambda path: KeyFile("http-api-key-file", path).holds("a-key"), True),
        ("a-token\r\n", read_token, "a-token"),
        ("a-token\r\n", lambda path: _has_token("Bearer a-token", path), True),
        ("[tenants.gold]\r\nweight = 4\r\n", lambda path: read_tenants(path).weights["gold"], 4),
        ("[tenants.gold]\r\n", lambda path: list(TenantsEditor.open(path).tenants.by_name), ["gold"]),
        ("port = 8000\r\nmodel = 'é'\r\n", lambda path: read_file(path).top, {"port": "8000", "model": "é"}),
        ("{{ messages[0].content }}", read_template, "{{ messages[0].content }}"),
        ('{"type": "object"}', read_schema, '{"type": "object"}'),
    ],
)
def test_the_mark_is_left_out(text: str, read: Callable[[str], Any], expected: object, tmp_path: Path) -> None:
    for start in (b"", MARK):
        path = tmp_path / f"file{len(start)}"
        path.write_bytes(start + text.encode())
        assert read(str(path)) == expected
