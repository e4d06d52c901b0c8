"""What a client asks for, checked field by field and turned into what the engine takes.

The wire form is unpacked by convert; here are plain values, each None where the client was silent. Errors name the
field by its path in GenerateRequest.
"""

from __future__ import annotations

import functools
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler_svc.core.errors import RequestRejectedError, SchedulerError
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.detokenizer import TextStream
from scheduler_svc.ports import EngineRequest, ModelDescription
from scheduler_svc.sampling_fields import (
    SamplingFields,
    check_sampling,
    finite,
    resolve_logprobs,
    resolve_sampling,
)
from scheduler_svc.tokenizer import ChatTemplateError, NoChatTemplateError, Tokenizer

MAX_ID_CHARS = 128
MAX_SALT_BYTES = 128
_CONTEXT_TOKENS = 6
"""Prompt tokens that a text stream starts from, so that a word's leading space comes out as in the prompt's text."""


_DEADLINE_SLACK_S = 1.0
"""The call's own deadline ends it by cancelling; the engine only looks to it in case that is lost."""


class PreconditionError(SchedulerError):
    """The service cannot do this as it was started; `field` is the path of the field that asks for it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


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
    expected_output_tokens: int | None = None
    later_fields: tuple[str, ...] = ()
    """Fields of later waves that are set."""
    body_digest: bytes = b""


class RequestBuilder:
    """Checks requests against the model, tokenizes them, and settles defaults and seeds."""

    def __init__(self, model: ModelDescription, tokenizer: Tokenizer | None, *, max_model_len: int) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def check(self, fields: RequestFields) -> None:
        """Check all that needs no tokenizer's work; raises RequestRejectedError."""
        if fields.later_fields:
            raise RequestRejectedError(fields.later_fields[0], f"{fields.later_fields[0]} is not supported yet")
        if fields.output_mode is None:
            raise RequestRejectedError("output_mode", "must be OUTPUT_MODE_DELTA or OUTPUT_MODE_FINAL")
        _check_length("request_id", fields.request_id, MAX_ID_CHARS, "characters")
        _check_length("tenant", fields.tenant, MAX_ID_CHARS, "characters")
        _check_length("cache_salt", fields.cache_salt, MAX_SALT_BYTES, "bytes")
        if fields.timeout_s is not None and not (finite("timeout_s", fields.timeout_s) > 0):
            raise RequestRejectedError("timeout_s", f"must be over 0 seconds, not {fields.timeout_s}")
        if fields.expected_output_tokens == 0:
            raise RequestRejectedError("expected_output_tokens", "must be 1 or more")
        if fields.resume_grace_s:
            raise RequestRejectedError("resume_grace_s", "resuming is not supported yet: only 0 is taken")
        check_sampling(fields.sampling, vocab_size=self._model.vocab_size, has_tokenizer=self.tokenizer is not None)
        resolve_logprobs(fields.sampling, self._model)
        self.check_prompt(fields.prompt)

    def check_prompt(self, prompt: Sequence[PromptFields]) -> None:
        """Check the parts of a prompt; raises RequestRejectedError, PreconditionError."""
        if not prompt:
            raise RequestRejectedError("prompt", "must have at least one part")
        for index, part in enumerate(prompt):
            self._check_part(part, f"prompt[{index}]", alone=len(prompt) == 1)

    def check_token_ids(self, token_ids: Sequence[int], path: str) -> None:
        """Check that ids are the model's; raises RequestRejectedError."""
        _check_token_ids(token_ids, path, self._model.vocab_size)

    def prompt_chars(self, prompt: Sequence[PromptFields]) -> int:
        """Characters to tokenize: how much work it will be."""
        return sum(_num_chars(part) for part in prompt)

    def is_short(self, fields: RequestFields) -> bool:
        """May `build` be called on the event loop."""
        return self.tokenizer is None or self.tokenizer.is_short(self.prompt_chars(fields.prompt))

    async def build_off_loop(self, fields: RequestFields, *, now: float, time_left_s: float | None) -> EngineRequest:
        """`build`, with a long prompt tokenized in a thread."""
        if self.tokenizer is None:
            return self.build(fields, now=now, time_left_s=time_left_s)
        work = functools.partial(self.build, fields, now=now, time_left_s=time_left_s)
        return await self.tokenizer.run(work, self.prompt_chars(fields.prompt))

    def build(self, fields: RequestFields, *, now: float, time_left_s: float | None) -> EngineRequest:
        """The engine's request. `now`: the engine's clock, seconds; `time_left_s`: until the call's own deadline.

        Raises RequestRejectedError, PreconditionError.
        """
        self.check(fields)
        prompt = self._fit(self.tokenize(fields.prompt), fields.sampling)
        sampling = resolve_sampling(fields.sampling, self._model, seed=_seed(fields.sampling))
        eos = frozenset[int]() if fields.sampling.ignore_eos else frozenset(self._model.eos_token_ids)
        spec = RequestSpec(
            request_id=fields.request_id or f"req-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            max_tokens=fields.sampling.max_tokens,
            eos_token_ids=eos,
            priority=fields.sampling.priority,
            tenant=fields.tenant,
        )
        limits = [] if fields.timeout_s is None else [fields.timeout_s]
        if time_left_s is not None:
            limits.append(time_left_s + _DEADLINE_SLACK_S)
        return EngineRequest(
            spec=spec,
            make_text=self._text_maker(fields.sampling, prompt),
            deadline=now + min(limits) if limits else None,
            body_digest=fields.body_digest,
        )

    def tokenize(self, prompt: Sequence[PromptFields], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of checked parts, joined; special tokens come before the first part if it is text."""
        token_ids: list[int] = []
        for index, part in enumerate(prompt):
            if part.token_ids is not None:
                token_ids += part.token_ids
            elif self.tokenizer is None:
                raise RequestRejectedError(f"prompt[{index}].text", "the service has no tokenizer: send token ids")
            elif part.text is not None:
                special = add_special_tokens and index == 0
                token_ids += self.tokenizer.encode(part.text, add_special_tokens=special)
            elif part.chat is not None:
                token_ids += self._encode_chat(part.chat, f"prompt[{index}].chat")
        return token_ids

    def _check_part(self, part: PromptFields, path: str, *, alone: bool) -> None:
        if part.token_ids is not None:
            _check_token_ids(part.token_ids, f"{path}.tokens.ids", self._model.vocab_size)
        elif part.text is not None:
            if self.tokenizer is None:
                raise RequestRejectedError(f"{path}.text", "the service has no tokenizer: send token ids")
        elif part.chat is not None:
            self._check_chat(part.chat, f"{path}.chat", alone=alone)
        elif part.has_media:
            raise RequestRejectedError(f"{path}.media", "media is not supported yet")
        else:
            raise RequestRejectedError(path, "must be one of text, tokens, chat")

    def _check_chat(self, chat: ChatFields, path: str, *, alone: bool) -> None:
        if self.tokenizer is None:
            raise RequestRejectedError(path, "the service has no tokenizer: send token ids")
        if not self.tokenizer.has_chat_template:
            raise PreconditionError(path, f"the tokenizer {self.tokenizer.source!r} has no chat template")
        if not alone:
            raise RequestRejectedError(path, "a chat must be the only part of a prompt")
        if not chat.messages:
            raise RequestRejectedError(f"{path}.messages", "must hold at least one message")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise RequestRejectedError(f"{path}.add_generation_prompt", "excludes continue_final_message")

    def _encode_chat(self, chat: ChatFields, path: str) -> list[int]:
        assert self.tokenizer is not None
        continues = bool(chat.continue_final_message)
        adds = chat.add_generation_prompt if chat.add_generation_prompt is not None else not continues
        try:
            return self.tokenizer.encode_chat(
                [{"role": role, "content": content} for role, content in chat.messages],
                add_generation_prompt=adds,
                continue_final_message=continues,
            )
        except NoChatTemplateError as exc:
            raise PreconditionError(path, str(exc)) from exc
        except ChatTemplateError as exc:
            raise RequestRejectedError(path, str(exc)) from exc

    def _fit(self, prompt: list[int], sampling: SamplingFields) -> list[int]:
        """Truncate from the left if asked to; what is empty or too long is refused."""
        if not prompt:
            raise RequestRejectedError("prompt", "is empty: at least one token is needed")
        keep = sampling.truncate_prompt_tokens
        if keep is not None:
            prompt = prompt[-(keep if keep > 0 else max(1, self.max_model_len - 1)) :]
        if len(prompt) + 1 > self.max_model_len:
            raise RequestRejectedError(
                "prompt",
                f"has {len(prompt)} tokens; with one for the output that exceeds max_model_len = {self.max_model_len}",
            )
        return prompt

    def _text_maker(self, sampling: SamplingFields, prompt: Sequence[int]) -> Callable[[], TextStream] | None:
        if self.tokenizer is None or not sampling.detokenize:
            return None
        return functools.partial(
            TextStream,
            self.tokenizer,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens or 0,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            context=tuple(prompt[-_CONTEXT_TOKENS:]),
        )


def _num_chars(part: PromptFields) -> int:
    if part.chat is not None:
        return sum(len(content) for _, content in part.chat.messages)
    return len(part.text or "")


def _seed(sampling: SamplingFields) -> int:
    return sampling.seed if sampling.seed is not None else secrets.randbits(64)


def _check_length(path: str, value: str | bytes, limit: int, unit: str) -> None:
    if len(value) > limit:
        raise RequestRejectedError(path, f"has {len(value)} {unit}; at most {limit} are allowed")


def _check_token_ids(token_ids: Sequence[int], path: str, vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise RequestRejectedError(
            f"{path}[{index}]", f"token id {token_ids[index]} is not below the vocabulary size {vocab_size}"
        )
