"""The tokens of a load's tenants: a TOML file with `[tokens]` and a line `NAME = "TOKEN"` for each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from cadenza.credentials import chosen_token
from cadenza.errors import OptionError
from cadenza_loadtest.requests import LoadTestError


def read_tenant_tokens(path: str) -> Mapping[str, str]:
    """The token of each tenant; raises LoadTestError, which shows no token."""
    where = f"--tenant-tokens {path}"
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise LoadTestError(f"{where}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise LoadTestError(f"{where}: this is not TOML") from None
    tokens = tables.get("tokens")
    if not isinstance(tokens, dict) or len(tables) != 1:
        raise LoadTestError(f'{where}: must have one table, [tokens], with lines NAME = "TOKEN"')
    for name, token in tokens.items():
        try:
            chosen_token(token)
        except OptionError:
            raise LoadTestError(f"{where}: [tokens] {name}: is no token") from None
    return tokens
