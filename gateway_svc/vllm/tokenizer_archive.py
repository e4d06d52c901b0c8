"""The tokenizer's files as one zip archive."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping

from gateway_svc.dialects import smg_common_pb2 as pb

_PIECE_BYTES = 64 * 1024
_TIME = (1980, 1, 1, 0, 0, 0)
"""Of each file: equal files make equal archives."""


def archive(files: Mapping[str, bytes]) -> bytes:
    """The archive; a second for large ones, so for a thread."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in sorted(files.items()):
            zipped.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def pieces(content: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """The archive in pieces; the last has its hash."""
    last = max(0, len(content) - 1) // _PIECE_BYTES
    for index in range(last + 1):
        piece = content[index * _PIECE_BYTES : (index + 1) * _PIECE_BYTES]
        yield pb.GetTokenizerChunk(data=piece, sha256=hashlib.sha256(content).hexdigest() if index == last else "")
