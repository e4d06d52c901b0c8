"""Targets: `session` and `cadenza` for Cadenza, `openai` for any server with that API over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza_loadtest.driving.target import Target

if TYPE_CHECKING:
    from cadenza_loadtest.settings import LoadSettings


def make_target(settings: LoadSettings, address: str, environment: Mapping[str, str] | None = None) -> Target:
    """The target that the settings name, at HOST:PORT or, over HTTP, at a base URL; it is not connected yet.

    Raises LoadTestError for an invalid URL or file of tokens.
    """
    if settings.api == "openai":
        from cadenza_loadtest.targets.openai import OpenAITarget

        return OpenAITarget(
            address,
            endpoint=settings.endpoint,
            model=settings.served_model_name,
            api_key=(os.environ if environment is None else environment).get(settings.api_key_variable),
            plain_fields=settings.plain_fields,
            connections=settings.connections,
            temperature=settings.temperature,
            seed=settings.seed,
        )
    options: dict[str, Any] = {
        "connections": settings.connections or 1,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }
    if settings.tenant_tokens is not None:
        from cadenza_loadtest.targets.cadenza import read_tenant_tokens

        options["tenant_tokens"] = read_tenant_tokens(settings.tenant_tokens)
    if settings.api == "generate":
        from cadenza_loadtest.targets.cadenza import GenerateTarget

        return GenerateTarget(address, **options)
    from cadenza_loadtest.targets.session import SessionTarget

    return SessionTarget(address, **options)
