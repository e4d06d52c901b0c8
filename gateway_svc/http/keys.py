"""Files of keys, which are read again when they change."""

from __future__ import annotations

import codecs
import hmac
import os

from cadenza.errors import OptionError
from cadenza_common.wire.limits import MAX_TOKEN_CHARS
from gateway_svc.http.errors import ApiError

_MAX_BYTES = 1024 * 1024


class KeyFile:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    A file that cannot be read any more holds no key.
    """

    def __init__(self, option: str, path: str) -> None:
        """Raises OptionError for a file that cannot be read, or without a key."""
        self._path = path
        self._signature: tuple[int, ...] = ()
        self._keys: tuple[bytes, ...] = ()
        try:
            self._read()
        except OSError as error:
            raise OptionError(f"option {option}: {path}: {(error.strerror or str(error)).lower()}") from None
        if not self._keys:
            raise OptionError(f"option {option}: {path}: there is no key in it")

    def holds(self, key: str | None) -> bool:
        """Whether a key is one of these; it takes the same time for all keys."""
        try:
            self._read()
        except OSError:
            return False
        given = (key or "").encode("utf-8", "replace")[:MAX_TOKEN_CHARS]
        return sum(hmac.compare_digest(given, each) for each in self._keys) > 0

    def check(self, key: str | None) -> None:
        """Raise the ApiError of a key that is none of these."""
        if not self.holds(key):
            raise ApiError(401, "the API key is missing or unknown", code="invalid_api_key")

    def _read(self) -> None:
        status = os.stat(self._path)
        signature = (status.st_ino, status.st_size, status.st_mtime_ns)
        if signature == self._signature:
            return
        with open(self._path, "rb") as file:
            text = file.read(_MAX_BYTES).removeprefix(codecs.BOM_UTF8)
        lines = [line.strip() for line in text.splitlines()]
        self._keys = tuple(line for line in lines if line and not line.startswith(b"#"))
        self._signature = signature
