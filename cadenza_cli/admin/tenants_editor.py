"""Changes a tenants file: adds tenants and tokens, removes tokens. All other text of the file stays as it is.

A changed text is checked before it replaces the file: it must say what was meant, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import OptionError
from scheduler_svc.tenants.tenant import HASH_PREFIX

if TYPE_CHECKING:
    from scheduler_svc.tenants.file import Tenants

_TOKEN_BYTES = 32
"""256 random bits: nobody guesses them, so that a plain hash of a token keeps it."""
_TOKEN_PREFIX = "cadenza_"
"""Scanners for leaked secrets find tokens by it."""
_TABLE = re.compile(r"^[ \t]*\[[ \t]*tenants[ \t]*\.[ \t]*(\"?)([A-Za-z0-9_.-]+)\1[ \t]*\][ \t]*(#.*)?$", re.MULTILINE)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NEXT_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)
_TOKENS = re.compile(r"^[ \t]*tokens[ \t]*=[ \t]*(\[[^\]]*\])", re.MULTILINE)


def new_token() -> str:
    """A token that nobody has."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def hash_of(token: str) -> str:
    """The token as the file holds it."""
    return HASH_PREFIX + hashlib.sha256(token.encode()).hexdigest()


@dataclass(slots=True)
class TenantsEditor:
    """A tenants file, read at construction."""

    path: str
    text: str
    tenants: Tenants

    @classmethod
    def open(cls, path: str, *, create: bool = False) -> TenantsEditor:
        """Read the file; with `create` a missing one is empty. Raises OptionError."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            if not create:
                raise OptionError(f"option file: {path}: there is no such file") from None
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"option file: {path}: {getattr(error, 'strerror', None) or error}") from None
        return cls(path, text, _parse(text, path))

    def hashes(self, name: str) -> list[str]:
        """The tokens of a tenant, as the file holds them; raises OptionError for an unknown tenant."""
        if name not in self.tenants.by_name:
            known = ", ".join(self.tenants.by_name) or "none"
            raise OptionError(f"{self.path} has no tenant {name!r}; it has {known}")
        return [HASH_PREFIX + digest.hex() for digest, owner in self.tenants.by_digest.items() if owner == name]

    def add_tenant(self, name: str, values: Mapping[str, Any]) -> str:
        """Add a tenant; returns its first token. Raises OptionError."""
        if name in self.tenants.by_name:
            raise OptionError(f"{self.path} has a tenant {name!r} already; `cadenza tenants token` gives it a token")
        token = new_token()
        key = name if _BARE_KEY.fullmatch(name) else json.dumps(name)
        lines = [f"[tenants.{key}]", f"tokens = {_array([hash_of(token)])}"]
        lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
        gap = "" if not self.text else "\n" if self.text.endswith("\n") else "\n\n"
        self._replace(self.text + gap + "\n".join(lines) + "\n")
        return token

    def add_token(self, name: str) -> str:
        """Give a tenant one more token; returns it. Raises OptionError."""
        token = new_token()
        self._set_tokens(name, [*self.hashes(name), hash_of(token)])
        return token

    def revoke(self, name: str, prefix: str) -> str:
        """Remove the token whose hash begins so; returns the hash. Raises OptionError unless there is one such."""
        hashes, start = self.hashes(name), HASH_PREFIX + prefix.removeprefix(HASH_PREFIX).lower()
        found = [each for each in hashes if each.startswith(start)]
        if len(found) != 1 or start == HASH_PREFIX:
            raise OptionError(f"{len(found)} tokens of {name} have a hash that begins with {prefix!r}; it must be one")
        self._set_tokens(name, [each for each in hashes if each != found[0]])
        return found[0]

    def _set_tokens(self, name: str, hashes: list[str]) -> None:
        """Replace the array of a tenant's tokens."""
        header = next((match for match in _TABLE.finditer(self.text) if match[2] == name), None)
        if header is None:
            raise OptionError(f"{self.path} has no line [tenants.{name}]: change its tokens by hand")
        following = _NEXT_TABLE.search(self.text, header.end())
        # An array's lines begin with [ only if it holds arrays, which tokens never do.
        end = len(self.text) if following is None else following.start()
        array = _TOKENS.search(self.text, header.end(), end)
        if array is None:
            text = f"{self.text[: header.end()]}\ntokens = {_array(hashes)}{self.text[header.end() :]}"
        else:
            text = self.text[: array.start(1)] + _array(hashes) + self.text[array.end(1) :]
        changed = _parse(text, self.path)
        meant = {digest: owner for digest, owner in self.tenants.by_digest.items() if owner != name}
        meant |= {bytes.fromhex(each.removeprefix(HASH_PREFIX)): name for each in hashes}
        if changed.by_digest != meant or changed.by_name != self.tenants.by_name:
            raise OptionError(f"{self.path}: the tokens of {name} are written in a way that is not understood here")
        self._replace(text)

    def _replace(self, text: str) -> None:
        """Replace the file as a whole, so that a service that reads it now reads one or the other."""
        tenants = _parse(text, self.path)
        path = os.path.realpath(self.path)
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0o600
            descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".tenants-")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporary, mode)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise OptionError(f"option file: {self.path}: {error.strerror or error}") from None
        self.text, self.tenants = text, tenants


def _parse(text: str, path: str) -> Tenants:
    from scheduler_svc.tenants.errors import TenantsFileError
    from scheduler_svc.tenants.file import parse_tenants

    try:
        return parse_tenants(text.encode(), path)
    except TenantsFileError as error:
        raise OptionError(str(error)) from None


def _array(hashes: list[str]) -> str:
    return "[" + "".join(f'\n  "{each}",' for each in hashes) + ("\n]" if hashes else "]")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(json.dumps, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
