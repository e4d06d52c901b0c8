"""A GenerateRequest as received, in plain values; None for unset fields where the default differs from unset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler_svc.engine.resume_point import ResumePoint
from scheduler_svc.requests.chats.fields import ChatFields
from scheduler_svc.requests.sampling_fields import SamplingFields


class OutputMode(Enum):
    """The contents of a response stream."""

    DELTA = auto()
    FINAL = auto()


@dataclass(frozen=True, slots=True)
class PromptFields:
    """One part of a prompt: at most one of these fields is set."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    chat: ChatFields | None = None
    rendered: str | None = None
    """A chat that is rendered already."""


@dataclass(frozen=True, slots=True)
class RequestFields:
    """A GenerateRequest as received."""

    request_id: str = ""
    tenant: str = ""
    """Name of the tenant, which the call's token states."""
    shared_prefixes: str = ""
    """As in RequestSpec."""
    prompt: tuple[PromptFields, ...] = ()
    sampling: SamplingFields = field(default_factory=SamplingFields)
    timeout_s: float | None = None
    resume_grace_s: float | None = None
    resume: ResumePoint | None = None
    """Where to resume the stream of an existing request; None: this is a new request."""
    new_request_fields: tuple[str, ...] = ()
    """Names of the fields that are set and say what a new request is to do."""
    output_mode: OutputMode | None = OutputMode.DELTA
    """None: an unknown number."""
    return_prompt_token_ids: bool = False
    return_text_ends: bool = False
    starts_at_once: bool = False
    """Whether the first response does not wait for output."""
    cache_salt: bytes = b""
    enable_prefix_caching: bool = True
    expected_output_tokens: int | None = None
    num_draft_tokens: int | None = None
    adapter: str = ""
    """Name of its LoRA adapter; empty: none."""
    body: bytes = b""
    """The serialized message."""
    traceparent: str = ""
    """The caller's span, as W3C has it."""
    body_digest: bytes = b""
