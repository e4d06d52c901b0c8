"""A GenerateRequest as it came, in plain values: None where the client was silent and that means something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler_svc.requests.sampling_fields import SamplingFields


class OutputMode(Enum):
    """What a stream carries."""

    DELTA = auto()
    FINAL = auto()


@dataclass(frozen=True, slots=True)
class ChatFields:
    """A chat, as role and content of each turn."""

    messages: tuple[tuple[str, str], ...]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class PromptFields:
    """One part of a prompt: at most one of these is set."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    chat: ChatFields | None = None
    has_media: bool = False


@dataclass(frozen=True, slots=True)
class RequestFields:
    """A GenerateRequest as it came."""

    request_id: str = ""
    tenant: str = ""
    prompt: tuple[PromptFields, ...] = ()
    sampling: SamplingFields = field(default_factory=SamplingFields)
    timeout_s: float | None = None
    resume_grace_s: float | None = None
    output_mode: OutputMode | None = OutputMode.DELTA
    """None: a number that is none of the modes."""
    return_prompt_token_ids: bool = False
    cache_salt: bytes = b""
    enable_prefix_caching: bool = True
    expected_output_tokens: int | None = None
    later_fields: tuple[str, ...] = ()
    """Fields of later waves that are set."""
    body_digest: bytes = b""
