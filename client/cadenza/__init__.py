"""Cadenza's client: offline with `LLM`, online with `Client` and `AsyncClient`.

    from cadenza import LLM, SamplingParams

    with LLM(model="models/cadenza-demo") as llm:
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Everything is loaded on first use: importing `cadenza.v1`, as the services do, loads no client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.async_client import AsyncClient
    from cadenza.chats import ChatMessage, ToolCall
    from cadenza.client import Client
    from cadenza.errors import (
        AlreadyExistsError,
        CadenzaError,
        DeadlineError,
        FailedPreconditionError,
        FieldViolation,
        InternalError,
        InvalidRequestError,
        LocalServiceError,
        NotFoundError,
        OptionError,
        PermissionDeniedError,
        QueueFullError,
        RequestLostError,
        UnauthenticatedError,
        UnavailableError,
        UnsupportedError,
    )
    from cadenza.info import AddedToken, ExecutorInfo, ModelInfo, ServerInfo, ServerLoad, TenantInfo
    from cadenza.llm import LLM
    from cadenza.local import LocalServices
    from cadenza.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from cadenza.sampling_params import SamplingParams
    from cadenza.structured_outputs import StructuredOutputsParams
    from cadenza.tls import TLS

__version__ = "0.1.0"

_HOMES = {
    "cadenza.async_client": ("AsyncClient",),
    "cadenza.chats": ("ChatMessage", "ToolCall"),
    "cadenza.client": ("Client",),
    "cadenza.errors": (
        "AlreadyExistsError",
        "CadenzaError",
        "DeadlineError",
        "FailedPreconditionError",
        "FieldViolation",
        "InternalError",
        "InvalidRequestError",
        "LocalServiceError",
        "NotFoundError",
        "OptionError",
        "PermissionDeniedError",
        "QueueFullError",
        "RequestLostError",
        "UnauthenticatedError",
        "UnavailableError",
        "UnsupportedError",
    ),
    "cadenza.info": ("AddedToken", "ExecutorInfo", "ModelInfo", "ServerInfo", "ServerLoad", "TenantInfo"),
    "cadenza.llm": ("LLM",),
    "cadenza.local": ("LocalServices",),
    "cadenza.outputs": ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
    "cadenza.sampling_params": ("SamplingParams",),
    "cadenza.structured_outputs": ("StructuredOutputsParams",),
    "cadenza.tls": ("TLS",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - by kind
    "LLM",
    "Client",
    "AsyncClient",
    "TLS",
    "SamplingParams",
    "StructuredOutputsParams",
    "ChatMessage",
    "ToolCall",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "ModelInfo",
    "AddedToken",
    "ServerInfo",
    "ServerLoad",
    "ExecutorInfo",
    "TenantInfo",
    "LocalServices",
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
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cadenza' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
