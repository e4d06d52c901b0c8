"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.prompts import Prompt
from gateway_svc.fields.constraints import errors_of_constraint
from gateway_svc.http.errors import bad_request
from gateway_svc.openai.answers import AnswerHead, ChunkEvents, Chunks, prompt_size
from gateway_svc.openai.logprobs import (
    CompletionLogprobs,
    TokenNames,
    bytes_of,
    num_characters,
    prompt_logprobs,
    prompt_offsets,
)
from gateway_svc.openai.usage import final_usage, finish_of
from gateway_svc.requests.completions import read_completion
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.scheduler.caller import SchedulerCaller
from gateway_svc.scheduler.generation import Generation, GenerationJob
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE
from gateway_svc.streaming import answer_with


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt that is repeated before its output."""

    text: str
    first_token: str
    """The text of its first token, which has no logprobs."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete prompts."""
    asked, state, caller = await request.app[STATE].asked(request, read_completion)
    info = await caller.model()
    asked = replace(asked, params=asked.suggested(info.default_sampling))
    chosen = state.names.choose(asked.model, info)
    prompts, echoes = await _prepared(caller, asked)
    answer = _CompletionAnswer(asked, AnswerHead(asked.id, "text_completion", chosen.name), echoes)
    job = GenerationJob(prompts, asked.params, chosen.adapter, with_text_ends=asked.num_top is not None)
    generation = Generation(caller, job, is_streamed=asked.is_streamed)
    errors = errors_of_constraint(asked.constrained_by)
    return await answer_with(request, generation, answer, is_streamed=asked.is_streamed, errors=errors)


async def _prepared(caller: SchedulerCaller, request: GatewayRequest) -> tuple[list[Prompt], list[_Echo]]:
    """The prompts as they are run, and what repeats them if they are to be repeated."""
    prompts, echoes = list(request.prompts), list[_Echo]()
    for index, prompt in enumerate(prompts):
        if prompt.text is not None and not request.add_special_tokens:
            ids = await caller.tokenize(prompt, add_special_tokens=False)
            if not ids:
                raise bad_request(f"prompt {index} has no tokens without special ones", "prompt")
            prompts[index] = replace(prompt, text=None, token_ids=ids)
    for given, prompt in zip(request.prompts, prompts, strict=True) if request.echoes else ():
        text = given.text
        if text is None:
            skip = request.params.skip_special_tokens
            text = await caller.detokenize(prompt.token_ids or [], skip_special_tokens=skip)
        first = ""
        if request.num_top is not None:
            ids = prompt.token_ids or await caller.tokenize(prompt)
            first = await caller.detokenize(ids[:1], skip_special_tokens=False) if ids else ""
        echoes.append(_Echo(text, first))
    return prompts, echoes


@dataclass(frozen=True, slots=True)
class _CompletionAnswer:
    """The answer to one request."""

    request: GatewayRequest
    head: AnswerHead
    echoes: Sequence[_Echo]
    """Of the prompts; empty: they are not repeated."""

    def finish(self, sample: CompletionOutput) -> dict[str, Any]:
        """Why a choice ends: for a prompt alone, whatever the token that is not shown, its length."""
        if self.request.is_prompt_alone and sample.finished():
            return {"finish_reason": "length", "stop_reason": None}
        return finish_of(sample)

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object."""
        choices = [each for index, result in enumerate(results) for each in self._choices(index, result)]
        hidden = 0
        if self.request.is_prompt_alone:
            hidden = sum(len(each.token_ids) for result in results for each in result.outputs)
        return self.head.fields(choices=choices, usage=final_usage(results, num_hidden=hidden))

    def events(self, generation: Generation) -> _CompletionChunks:
        """The answer as a stream."""
        return _CompletionChunks(self, generation)

    def _choices(self, prompt: int, result: RequestOutput) -> list[dict[str, Any]]:
        request, choices = self.request, []
        for sample in result.outputs:
            shown = CompletionOutput(sample.index, logprobs=[]) if request.is_prompt_alone else sample
            parts = _Parts(self, prompt)
            choice = {
                "index": prompt * request.params.n + sample.index,
                "text": parts.text(shown.text),
                "logprobs": parts.logprobs(lambda: result, shown),
                **self.finish(sample),
            }
            if request.shows_prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
            if request.shows_token_ids:
                choice |= {"prompt_token_ids": result.prompt_token_ids, "token_ids": shown.token_ids}
            choices.append(choice)
        return choices


class _Parts:
    """The parts of one choice, of which the first has the prompt if it is to be repeated."""

    def __init__(self, read: _CompletionAnswer, prompt: int) -> None:
        self._echo = read.echoes[prompt] if read.echoes else None
        self._is_first = True
        request = read.request
        names = TokenNames(request.names_tokens_by_id)
        self._columns = None if request.num_top is None else CompletionLogprobs(names, request.num_top)
        self._end = 0
        """Where the text of the sample's last token ends."""

    def text(self, text: str) -> str:
        """The text of the next part; call it before `logprobs`."""
        return self._echo.text + text if self._echo is not None and self._is_first else text

    def logprobs(self, total: Callable[[], RequestOutput], new: CompletionOutput) -> Any:
        """The logprobs of the next part; total: returns what there is of the prompt."""
        is_first, self._is_first = self._is_first, False
        if self._columns is None:
            return None
        rows, ids = list(new.logprobs or ()), list(new.token_ids)
        raw = [bytes_of(row[each]) for each, row in zip(ids, rows, strict=True)]
        offsets, self._end = _begins(new.text_ends, raw, self._end, 0 if self._echo is None else len(self._echo.text))
        if self._echo is not None and is_first:
            found = total()
            of_prompt, prompt_ids = found.prompt_logprobs or [], found.prompt_token_ids or []
            pieces = [
                self._echo.first_token.encode() if row is None else bytes_of(row[each]) or b""
                for each, row in zip(prompt_ids, of_prompt, strict=True)
            ]
            offsets = [*prompt_offsets(self._echo.text, pieces), *offsets]
            return self._columns.columns([*of_prompt, *rows], [*prompt_ids, *ids], offsets, [self._echo.first_token])
        return self._columns.columns(rows, ids, offsets)


def _begins(ends: Sequence[int], raw: Sequence[bytes | None], last_end: int, num_before: int) -> tuple[list[int], int]:
    """Where tokens begin whose text ends there, behind a text of `num_before` characters; and where the last one ends.

    raw: the tokens' bytes. A part of a character begins with the character, a token that is in no text where it would
    stand, and a token whose text comes together with what its predecessors have left unfinished behind that.
    """
    begins = list[int]()
    for end, each in zip(ends, raw, strict=True):
        own = end - last_end if each is None else num_characters(each)
        begins.append(num_before + max(last_end, end - own))
        last_end = end
    return begins, last_end


class _CompletionChunks(ChunkEvents):
    """Chunks of a streamed answer."""

    def __init__(self, read: _CompletionAnswer, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._chunks = Chunks(read.head, read.request)
        self._parts: dict[int, _Parts] = {}
        self._num_hidden = 0
        request = read.request
        self._is_plain = not (
            read.echoes or request.num_top is not None or request.shows_token_ids or request.with_running_usage
        )

    def deltas(self, taken: Taken) -> bytes:
        """The events of new deltas."""
        texts: list[str] = []
        for prompt, delta in taken:
            for sample in delta.outputs:
                choice = self._chunks.index_of(prompt, sample)
                if self._is_plain and not sample.finished():
                    if sample.text:
                        texts.append(
                            self._chunks.text(choice, '"text":', sample.text, ',"logprobs":null,"finish_reason":null')
                        )
                else:
                    texts.append(self._chunk(prompt, choice, delta, sample))
        return "".join(texts).encode()

    def end(self) -> bytes:
        """The last events."""
        return self._chunks.end(self._generation, self._num_hidden)

    def _chunk(self, prompt: int, choice: int, delta: RequestOutput, sample: CompletionOutput) -> str:
        read = self._read
        parts = self._parts.setdefault(choice, _Parts(read, prompt))
        if read.request.is_prompt_alone:
            self._num_hidden += len(sample.token_ids)
            sample = replace(sample, text="", token_ids=[], logprobs=[], text_ends=[])
        chunk: dict[str, Any] = {
            "index": choice,
            "text": parts.text(sample.text),
            "logprobs": parts.logprobs(partial(self._generation.total, prompt), sample),
            **read.finish(sample),
        }
        if read.request.shows_token_ids:
            chunk["token_ids"] = sample.token_ids
            if self._chunks.begins(choice):
                chunk["prompt_token_ids"] = self._generation.prompt_token_ids(prompt)
        size = prompt_size(self._generation, prompt, delta)
        return self._chunks.choice(chunk, size, len(sample.token_ids))
