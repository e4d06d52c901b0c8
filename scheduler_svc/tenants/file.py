"""The tenants file: a TOML table for each tenant (docs/tenants.md)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from scheduler_svc.tenants.errors import TenantsFileError
from scheduler_svc.tenants.tenant import HASH_PREFIX, Tenant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HASH = re.compile(HASH_PREFIX + "[0-9a-f]{64}")
_INT32 = 2**31
_MAX_PATTERN = 128
"""Characters, as in an adapter's name."""


class _TenantTable(BaseModel):
    """One tenant's table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: list[str] = []
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_requests: int | None = Field(None, ge=1)
    max_queued_tokens: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_priority: int | None = Field(None, ge=-_INT32, lt=_INT32)
    shared_prefixes: str = ""
    adapters: list[str] = ["*"]
    may_load_adapters: bool = False
    may_name_tenants: bool = False
    admin: bool = False

    @field_validator("tokens")
    @classmethod
    def _check_tokens(cls, tokens: list[str]) -> list[str]:
        for index, token in enumerate(tokens):
            if not _HASH.fullmatch(token):
                # Not shown: it may be a token itself.
                raise ValueError(f"entry {index} is not {HASH_PREFIX} and 64 hexadecimal digits in lower case")
        return tokens

    @field_validator("adapters")
    @classmethod
    def _check_adapters(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            if not 0 < len(pattern) <= _MAX_PATTERN:
                raise ValueError(f"{pattern!r:.80} is no name or pattern of 1 to {_MAX_PATTERN} characters")
        return patterns

    @field_validator("shared_prefixes")
    @classmethod
    def _check_shared(cls, name: str) -> str:
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is no name: {_NAME_RULE}")
        return name


_NAME_RULE = "letters, digits, . _ and -, at most 64 characters, the first a letter or digit"


@dataclass(frozen=True, slots=True)
class Tenants:
    """The contents of a tenants file."""

    by_name: Mapping[str, Tenant] = field(default_factory=dict)
    by_digest: Mapping[bytes, str] = field(default_factory=dict)
    """Tenant's name by the digest of each token."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each tenant."""
        return {name: tenant.weight for name, tenant in self.by_name.items()}


def read_tenants(path: str) -> Tenants:
    """Read a tenants file; raises TenantsFileError."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as exc:
        raise TenantsFileError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None
    return parse_tenants(content, path)


def parse_tenants(content: bytes, path: str) -> Tenants:
    """Return what the content of a tenants file says; raises TenantsFileError, which names `path`."""
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise TenantsFileError(f"{path}: this is not TOML: {exc}") from None
    for key in tables:
        if key != "tenants":
            raise TenantsFileError(f"{path}: {key}: only tables [tenants.NAME] are known")
    tenants = tables.get("tenants", {})
    if not isinstance(tenants, dict):
        raise TenantsFileError(f"{path}: tenants: must hold tables [tenants.NAME]")
    by_name: dict[str, Tenant] = {}
    by_digest: dict[bytes, str] = {}
    for name, table in tenants.items():
        entry = _checked(name, table, path)
        keys = entry.model_dump(exclude={"tokens", "adapters"})
        by_name[name] = Tenant(name=name, adapters=tuple(entry.adapters), **keys)
        for index, token in enumerate(entry.tokens):
            digest = bytes.fromhex(token.removeprefix(HASH_PREFIX))
            if digest in by_digest:
                other = by_digest[digest]
                raise TenantsFileError(f"{path}: [tenants.{name}] tokens: entry {index} is a token of {other} too")
            by_digest[digest] = name
    return Tenants(by_name, by_digest)


def _checked(name: str, table: object, path: str) -> _TenantTable:
    where = f"{path}: [tenants.{name}]"
    if not _NAME.fullmatch(name):
        raise TenantsFileError(f"{path}: [tenants.{name!r:.80}]: this is no name of a tenant: {_NAME_RULE}")
    if not isinstance(table, dict):
        raise TenantsFileError(f"{where}: must be a table")
    try:
        return _TenantTable.model_validate(_with_numbers(table))
    except ValidationError as exc:
        problem = exc.errors()[0]
        key = str(problem["loc"][0]) if problem["loc"] else ""
        raise TenantsFileError(f"{where} {key}: {_reason(problem, key)}") from None


def _with_numbers(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with an integer weight as a float, and 3.0 as 3 elsewhere: people do not tell them apart."""
    return {
        name: float(value)
        if name == "weight" and type(value) is int
        else int(value)
        if name != "weight" and isinstance(value, float) and value.is_integer()
        else value
        for name, value in table.items()
    }


def _reason(problem: ErrorDetails, key: str) -> str:
    """Return what is wrong; a value of `tokens` is never shown."""
    if problem["type"] == "extra_forbidden":
        return f"there is no such key; keys are {', '.join(_TenantTable.model_fields)}"
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    return problem["msg"] if key == "tokens" else f"{problem['msg']}, not {problem['input']!r:.60}"
