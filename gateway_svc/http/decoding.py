"""Bodies that come compressed (https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1).

They are decoded here and not by aiohttp, whose parser ends the connection over an encoding that it does not know: no
handler could answer in the shape of its API.
"""

from __future__ import annotations

import zlib

from gateway_svc.http.errors import ENCODINGS, ApiError, bad_request, too_large

_GZIP = 16 + zlib.MAX_WBITS
_MAX_SHOWN = 40
_NONE = ("", "identity")


def decoded(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Undo a body's Content-Encoding; raises ApiError, also if the decoded body is over the limit."""
    encoding = encoding.strip().lower()
    if encoding in _NONE:
        return body
    if encoding.removeprefix("x-") not in ENCODINGS:
        message = f"Content-Encoding {encoding[:_MAX_SHOWN]!a} is not supported: {' and '.join(ENCODINGS)} are"
        raise ApiError(415, message)
    decoder = zlib.decompressobj(_GZIP if encoding.endswith("gzip") else _bits_of_deflate(body))
    try:
        found = decoder.decompress(body, limit_bytes + 1)
    except zlib.error:
        found = b""
    if len(found) > limit_bytes:
        raise too_large(limit_bytes)
    if not decoder.eof or decoder.unused_data:
        raise bad_request(f"the body cannot be decoded: its Content-Encoding is said to be {encoding!a}")
    return found


def _bits_of_deflate(body: bytes) -> int:
    """zlib's format, as the standard has it, or the bare stream that some clients send; their first bytes differ."""
    return zlib.MAX_WBITS if body[:1] and body[0] & 0x0F == 8 else -zlib.MAX_WBITS
