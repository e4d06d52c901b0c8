"""Cadenza's client: offline with `LLM`, online with `Client` and `AsyncClient`.

    from cadenza import LLM, SamplingParams

    with LLM(model="models/cadenza-demo") as llm:
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Everything is loaded on first use: importing `cadenza.v1`, as the services do, loads no client. `LLM` and
`LocalServices` start the two services: they are the launcher's, and a wheel of the client alone does not have them.
Types: `__init__.pyi`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "cadenza_launcher.llm": ("LLM",),
    "cadenza_launcher.local": ("LocalServices",),
    "cadenza.client": ("Client",),
    "cadenza.async_client": ("AsyncClient",),
    "cadenza_common.wire.tls": ("TLS",),
    "cadenza.sampling_params": ("SamplingParams",),
    "cadenza.structured_outputs": ("StructuredOutputsParams",),
    "cadenza.chats": ("ChatMessage", "ToolCall"),
    "cadenza.outputs": ("RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics"),
    "cadenza.info": (
        "ModelInfo",
        "AddedToken",
        "ChatExamples",
        "ServerInfo",
        "ServerLoad",
        "ExecutorInfo",
        "TenantInfo",
    ),
    "cadenza.errors": (
        "CadenzaError",
        "InvalidRequestError",
        "FieldViolation",
        "QueueFullError",
        "NotFoundError",
        "AlreadyExistsError",
        "FailedPreconditionError",
        "UnauthenticatedError",
        "PermissionDeniedError",
        "DeadlineError",
        "UnavailableError",
        "RequestLostError",
        "UnsupportedError",
        "InternalError",
        "LocalServiceError",
        "OptionError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cadenza' has no attribute {name!r}")
    home = _HOME_OF[name]
    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as missing:
        if missing.name != "cadenza_launcher":
            raise
        raise ImportError(
            f"cadenza.{name} starts services, which are not installed: this is the client alone, and a wheel of all of "
            "Cadenza has them (`make wheel` in its repository)",
            name=home,
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
