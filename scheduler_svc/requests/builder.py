"""Validates request fields and builds engine requests.

convert unpacks the wire form and rejects oversized fields. Errors name a field by its path in GenerateRequest.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, run_in_slices, slices_of
from cadenza_common.telemetry.trace_context import parse_traceparent
from cadenza_common.wire.limits import MAX_DRAFTS, MAX_GRACE_S
from scheduler_svc.core.adapters.lane_adapters import NO_ADAPTERS
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.plan_loop.ports import BestOf, EngineRequest, ModelDescription
from scheduler_svc.requests.chats.fields import ChatError
from scheduler_svc.requests.chats.renderer import check_chat, rejected
from scheduler_svc.requests.detokenizer import StoppedText
from scheduler_svc.requests.field_rules import PATH, finite
from scheduler_svc.requests.fields import PromptFields, RequestFields
from scheduler_svc.requests.grammar_door import GRAMMAR_PATH, NO_COMPILER, GrammarDoor
from scheduler_svc.requests.grammar_fields import GrammarFields
from scheduler_svc.requests.sample_counts import beam_spec, check_counts
from scheduler_svc.requests.sampling import BadWords, resolve_sampling, tokenize_bad_words
from scheduler_svc.requests.sampling_fields import SamplingFields, check_sampling, ignores_eos, sort_ids
from scheduler_svc.requests.tokenizer import MAX_PROMPT_TOKENS, Tokenizer, TooManyTokensError

_CONTEXT_TOKENS = 6
"""Number of prompt tokens that a text stream starts from, so that a word's leading space is as in the prompt's text."""
_MEDIA = "stands for an image, audio or video: this server takes text alone of the model"
_NO_TOKENIZER = (
    "the model has no tokenizer: send token ids (cadenza generate --ids 5,6,7; prompt_token_ids in Python), or start "
    "the server with --tokenizer"
)
_DEADLINE_SLACK_S = 1.0
"""The call's deadline cancels it; the engine's deadline is later, in case the cancellation is lost."""


class RequestBuilder:
    """Validates requests against the model, tokenizes them, and fills in defaults and seeds."""

    def __init__(
        self,
        model: ModelDescription,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        model_number: int | None = None,
        grammars: GrammarDoor | None = None,
    ) -> None:
        """`model_number`: the number of this description, for the requests; None: it never changes. grammars: compiles
        them; None: none are accepted."""
        self._model = model
        self._grammars = grammars
        self._model_number = model_number
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def with_end_ids(self, eos_token_ids: Sequence[int]) -> RequestBuilder:
        """The same, for a model whose outputs end with these token ids."""
        model = replace(self._model, eos_token_ids=tuple(eos_token_ids))
        return RequestBuilder(
            model,
            self.tokenizer,
            max_model_len=self.max_model_len,
            model_number=self._model_number,
            grammars=self._grammars,
        )

    def _check(self, fields: RequestFields) -> Work[None]:
        """Check everything that needs no tokenization; raises RequestRejectedError, PreconditionError."""
        _check_output_mode(fields)
        if fields.timeout_s is not None and not (finite("timeout_s", fields.timeout_s) > 0):
            raise RequestRejectedError("timeout_s", f"must be over 0 seconds, not {fields.timeout_s}")
        if fields.expected_output_tokens == 0:
            raise RequestRejectedError("expected_output_tokens", "must be 1 or more")
        if (fields.num_draft_tokens or 0) > MAX_DRAFTS:
            raise RequestRejectedError("speculation.num_draft_tokens", f"must be at most {MAX_DRAFTS}")
        _check_grace(fields.resume_grace_s)
        if fields.adapter and not self._model.max_loras:
            raise PreconditionError("adapter", NO_ADAPTERS.message)
        check_sampling(fields.sampling, self._model, has_tokenizer=self.tokenizer is not None)
        check_counts(fields.sampling, self._model)
        yield from self.check_prompt_in_slices(fields.prompt)

    def check_prompt_in_slices(self, prompt: Sequence[PromptFields]) -> Work[None]:
        """Check the parts of a prompt; raises RequestRejectedError, PreconditionError."""
        if not prompt:
            raise RequestRejectedError("prompt", "must have at least one part")
        for index, part in enumerate(prompt):
            if part.token_ids is None:
                self._check_part(part, f"prompt[{index}]")
            else:
                yield from self.check_ids_in_slices(
                    part.token_ids, f"prompt[{index}].tokens.ids", self._model.media_token_ids
                )

    def check_ids_in_slices(
        self, token_ids: Sequence[int], path: str, media: frozenset[int] = frozenset()
    ) -> Work[None]:
        """Check that the ids are in the model's vocabulary, and none is of `media`; raises RequestRejectedError."""
        vocab_size, first = self._model.vocab_size, 0
        for part in slices_of(token_ids):
            if not media.isdisjoint(part):
                index = next(index for index, token_id in enumerate(part) if token_id in media)
                raise RequestRejectedError(f"{path}[{first + index}]", f"token id {part[index]} {_MEDIA}")
            if max(part) >= vocab_size:
                index = next(index for index, token_id in enumerate(part) if token_id >= vocab_size)
                raise RequestRejectedError(
                    f"{path}[{first + index}]",
                    f"token id {part[index]} is not below the vocabulary size {vocab_size}",
                )
            first += len(part)
            if first < len(token_ids):
                yield

    def is_short(self, fields: RequestFields) -> bool:
        """Return whether `build` is fast enough for the event loop, and checks everything."""
        if fields.sampling.grammar is not None:
            return False
        num_ids = sum(len(part.token_ids or ()) for part in fields.prompt) + len(fields.sampling.allowed_token_ids)
        return num_ids <= SLICE_ITEMS and self._is_short_text(fields) and not _has_chat(fields.prompt)

    def _is_short_text(self, fields: RequestFields) -> bool:
        return self.tokenizer is None or self.tokenizer.is_short(self._num_chars(fields))

    async def _rendered(self, prompt: Sequence[PromptFields]) -> tuple[PromptFields, ...]:
        """Return the parts of a checked prompt, with chats as texts; raises RequestRejectedError."""
        parts: list[PromptFields] = []
        for index, part in enumerate(prompt):
            if part.chat is None or self.tokenizer is None:
                parts.append(part)
                continue
            try:
                parts.append(PromptFields(rendered=await self.tokenizer.chats.render(part.chat)))
            except ChatError as exc:
                raise rejected(exc, f"prompt[{index}].chat") from exc
        return tuple(parts)

    async def build_off_loop(
        self, fields: RequestFields, *, now: float, time_left_s: float | None, compiles: bool = True
    ) -> EngineRequest:
        """Build the engine's request: a long text is tokenized in a thread, and long lists of ids in slices.

        A chat is rendered in another process, and a grammar compiled, if `compiles`; a request whose time is over
        meanwhile has a deadline that has passed.

        Raises RequestRejectedError, PreconditionError, QueueFullError.
        """
        in_time = True
        has_chat = _has_chat(fields.prompt)
        if fields.sampling.grammar is not None or has_chat:
            await run_in_slices(self._check(fields))
        if fields.sampling.grammar is not None and compiles:
            in_time = await self._check_grammar(fields.sampling.grammar, fields.tenant, fields.timeout_s)
        if has_chat:
            fields = replace(fields, prompt=await self._rendered(fields.prompt))
        work = functools.partial(self._build, fields, now=now, time_left_s=time_left_s)
        if self.tokenizer is None or self._is_short_text(fields):
            request = await run_in_slices(work())
        else:
            request = await self.tokenizer.run(lambda: run_at_once(work()), self._num_chars(fields))
        return request if in_time else replace(request, deadline=now)

    async def _check_grammar(self, grammar: GrammarFields, tenant: str, timeout_s: float | None) -> bool:
        """Compile a request's grammar; returns whether that was done in its time."""
        if self._grammars is None:
            raise PreconditionError(GRAMMAR_PATH, NO_COMPILER)
        try:
            async with asyncio.timeout(timeout_s):
                await self._grammars.check(grammar.spec, grammar.wire, self._model.grammar_engine, tenant)
        except TimeoutError:
            return False
        return True

    def build(self, fields: RequestFields, *, now: float, time_left_s: float | None) -> EngineRequest:
        """Build the engine's request of a prompt without a chat, without compiling its grammar.

        now: seconds on the engine's clock; time_left_s: until the call's own deadline.

        Raises RequestRejectedError, PreconditionError.
        """
        return run_at_once(self._build(fields, now=now, time_left_s=time_left_s))

    def _build(self, fields: RequestFields, *, now: float, time_left_s: float | None) -> Work[EngineRequest]:
        """Do the work of `build`, with a pause after each slice."""
        yield from self._check(fields)
        prompt = self._truncate_prompt(self.tokenize(fields.prompt), fields.sampling)
        bad_words = self._bad_words(fields.sampling)
        allowed_ids = yield from sort_ids(fields.sampling.allowed_token_ids)
        sampling_fields = replace(fields.sampling, allowed_token_ids=allowed_ids)
        sampling = resolve_sampling(sampling_fields, self._model, seed=_seed(fields.sampling), bad_words=bad_words)
        if len(prompt) + len(fields.sampling.allowed_token_ids) > SLICE_ITEMS:
            yield
        eos = frozenset[int]() if ignores_eos(fields.sampling) else frozenset(self._model.eos_token_ids)
        spec = RequestSpec(
            request_id=fields.request_id or f"req-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            max_tokens=fields.sampling.max_tokens,
            eos_token_ids=eos,
            num_samples=fields.sampling.num_drawn,
            beams=beam_spec(fields.sampling),
            cache_salt=fields.cache_salt,
            uses_prefix_cache=fields.enable_prefix_caching,
            priority=fields.sampling.priority,
            tenant=fields.tenant,
            shared_prefixes=fields.shared_prefixes,
            expected_output_tokens=fields.expected_output_tokens,
            max_drafts=fields.num_draft_tokens,
        )
        limits = [] if fields.timeout_s is None else [fields.timeout_s]
        if time_left_s is not None:
            limits.append(time_left_s + _DEADLINE_SLACK_S)
        return EngineRequest(
            spec=spec,
            make_text=self._text_maker(fields.sampling, prompt),
            deadline=now + min(limits) if limits else None,
            body_digest=fields.body_digest,
            body=fields.body,
            resume_grace_s=fields.resume_grace_s or 0.0,
            best_of=_best_of(fields.sampling),
            model_number=self._model_number,
            adapter=fields.adapter,
            trace=parse_traceparent(fields.traceparent) if fields.traceparent else None,
        )

    def tokenize(self, prompt: Sequence[PromptFields], *, add_special_tokens: bool = True) -> list[int]:
        """Return the joined token ids of checked parts; special tokens are added to the first part if it is text.

        Raises RequestRejectedError for text with a token that the model does not have.
        """
        token_ids: list[int] = []
        for index, part in enumerate(prompt):
            if part.token_ids is not None:
                token_ids += part.token_ids
                continue
            token_ids += self._encode(part, f"prompt[{index}]", add_special_tokens=add_special_tokens and index == 0)
        if len(token_ids) > MAX_PROMPT_TOKENS:
            raise RequestRejectedError(
                "prompt", f"has {len(token_ids)} tokens; at most {MAX_PROMPT_TOKENS} are allowed"
            )
        return token_ids

    async def tokenize_off_loop(self, prompt: Sequence[PromptFields], *, add_special_tokens: bool = True) -> list[int]:
        """Check the parts of a prompt and return what `tokenize` does: long work in threads and processes.

        Raises RequestRejectedError, PreconditionError.
        """
        await run_in_slices(self.check_prompt_in_slices(prompt))
        if _has_chat(prompt):
            prompt = await self._rendered(prompt)
        work = functools.partial(self.tokenize, prompt, add_special_tokens=add_special_tokens)
        if self.tokenizer is None:
            return work()
        return await self.tokenizer.run(work, sum(map(_num_chars, prompt)))

    def _encode(self, part: PromptFields, path: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text or a rendered chat; raises RequestRejectedError."""
        assert self.tokenizer is not None, "checked before"
        assert part.chat is None, "rendered before"
        path += ".text" if part.text is not None else ".chat"
        try:
            if part.rendered is not None:
                token_ids = self.tokenizer.encode(part.rendered, add_special_tokens=False)
            else:
                token_ids = self.tokenizer.encode(part.text or "", add_special_tokens=add_special_tokens)
        except TooManyTokensError as exc:
            raise RequestRejectedError(path, str(exc)) from exc
        return self._check_known_ids(token_ids, path)

    def _check_known_ids(self, token_ids: list[int], path: str) -> list[int]:
        """Check ids of text: it may name images, and a tokenizer have added tokens beyond the model's vocabulary."""
        largest, media = max(token_ids, default=0), self._model.media_token_ids
        assert self.tokenizer is not None, "checked before"
        if not media.isdisjoint(token_ids):
            found = next(token_id for token_id in token_ids if token_id in media)
            text = self.tokenizer.token_text(found)
            raise RequestRejectedError(path, f"holds {text!r}, which {_MEDIA}")
        if largest >= self._model.vocab_size:
            raise RequestRejectedError(
                path,
                f"holds {self.tokenizer.token_text(largest)!r}, whose token id {largest} is not below the vocabulary "
                f"size {self._model.vocab_size}",
            )
        return token_ids

    def _check_part(self, part: PromptFields, path: str) -> None:
        if part.text is not None:
            if self.tokenizer is None:
                raise PreconditionError(f"{path}.text", _NO_TOKENIZER)
        elif part.chat is not None:
            if self.tokenizer is None:
                raise PreconditionError(f"{path}.chat", _NO_TOKENIZER)
            check_chat(part.chat, f"{path}.chat", self.tokenizer.chats)
        elif part.rendered is not None:
            return  # it was checked as a chat
        else:
            raise RequestRejectedError(path, "must be one of text, tokens, chat")

    def _truncate_prompt(self, prompt: list[int], sampling: SamplingFields) -> list[int]:
        """Apply truncate_prompt_tokens from the left; reject an empty or too long prompt."""
        if not prompt:
            raise RequestRejectedError("prompt", "is empty: at least one token is needed")
        keep = sampling.truncate_prompt_tokens
        if keep is not None:
            prompt = prompt[-(keep if keep > 0 else self._max_prompt_tokens(sampling.max_tokens)) :]
        if len(prompt) + 1 > self.max_model_len:
            raise RequestRejectedError(
                "prompt",
                f"has {len(prompt)} tokens; with one for the output that exceeds max_model_len = {self.max_model_len}",
            )
        return prompt

    def _max_prompt_tokens(self, max_tokens: int | None) -> int:
        """Return the prompt tokens that max_model_len allows in addition to max_tokens, or to one output token."""
        num_output = max_tokens or 1
        if num_output >= self.max_model_len:
            raise RequestRejectedError(
                PATH + "truncate_prompt_tokens",
                f"-1 keeps what max_model_len = {self.max_model_len} allows beside max_tokens = {num_output}: nothing",
            )
        return self.max_model_len - num_output

    def _num_chars(self, fields: RequestFields) -> int:
        """Return the number of characters to tokenize; bad words are tokenized twice."""
        return sum(map(_num_chars, fields.prompt)) + 2 * sum(map(len, fields.sampling.bad_words))

    def _bad_words(self, sampling: SamplingFields) -> BadWords:
        if self.tokenizer is None or not sampling.bad_words:
            return ()
        words = tokenize_bad_words(
            sampling.bad_words, functools.partial(self.tokenizer.encode, add_special_tokens=False)
        )
        # The model never generates tokens outside of its vocabulary, so these words need no ban.
        return tuple(word for word in words if max(word) < self._model.vocab_size)

    def _text_maker(self, sampling: SamplingFields, prompt: Sequence[int]) -> Callable[[], StoppedText] | None:
        if self.tokenizer is None or not sampling.detokenize:
            return None
        return functools.partial(
            StoppedText,
            self.tokenizer,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens or 0,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            context=tuple(prompt[-_CONTEXT_TOKENS:]),
        )


def check_resume(fields: RequestFields) -> None:
    """Check a message that resumes a stream, without the positions; raises RequestRejectedError."""
    for name in fields.new_request_fields:
        raise RequestRejectedError(name, "must be absent with resume: the request has it already")
    if not fields.request_id:
        raise RequestRejectedError("request_id", "must be given with resume")
    _check_output_mode(fields)


def _check_output_mode(fields: RequestFields) -> None:
    if fields.output_mode is None:
        raise RequestRejectedError("output_mode", "must be OUTPUT_MODE_DELTA or OUTPUT_MODE_FINAL")


def _check_grace(grace_s: float | None) -> None:
    if grace_s is not None and not 0 <= finite("resume_grace_s", grace_s) <= MAX_GRACE_S:
        raise RequestRejectedError("resume_grace_s", f"must be 0 to {MAX_GRACE_S} seconds, not {grace_s}")


def _has_chat(prompt: Sequence[PromptFields]) -> bool:
    """Return whether a prompt has a chat, which is rendered in another process."""
    return any(part.chat is not None for part in prompt)


def _num_chars(part: PromptFields) -> int:
    if part.chat is not None:
        return part.chat.num_chars
    return len(part.text or part.rendered or "")


def _best_of(sampling: SamplingFields) -> BestOf | None:
    if sampling.num_drawn == sampling.n:
        return None
    return BestOf(sampling.n, returns_logprobs=sampling.logprobs is not None)


def _seed(sampling: SamplingFields) -> int:
    return sampling.seed if sampling.seed is not None else secrets.randbits(64)
