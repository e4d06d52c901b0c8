"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from gateway_svc.fields.constraints import errors_of_constraint, field_of_constraint
from gateway_svc.fields.field import read_fields, wrong_value
from gateway_svc.fields.sampling import answer_id, number_of_choices, require, sampling_params, stream_options
from gateway_svc.fields.tables import COMPLETIONS
from gateway_svc.http.errors import bad_request
from gateway_svc.http.reading import off_loop, read_object
from gateway_svc.openai.answers import Chunks, Head, failed, prompt_size
from gateway_svc.openai.failures import whole
from gateway_svc.openai.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from gateway_svc.openai.prompts import completion_prompts
from gateway_svc.openai.streaming import stream_answer
from gateway_svc.openai.usage import final_usage, finish_of
from gateway_svc.scheduler.caller import Caller
from gateway_svc.scheduler.generation import Generation, Job
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE

_DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Echo:
    """A prompt that is repeated before its output."""

    text: str = ""
    first_token: str = ""
    """The text of its first token, which has no logprobs."""


@dataclass(slots=True)
class _Completion:
    """One request, read."""

    head: Head
    values: Mapping[str, Any]
    n: int
    params: SamplingParams
    is_prompt_alone: bool
    """max_tokens is 0: a token is drawn, and not shown."""
    echoes: list[_Echo] = field(default_factory=list)

    @property
    def num_top(self) -> int | None:
        """Top logprobs of each token; None: no logprobs."""
        number: int | None = self.values.get("logprobs")
        return number

    @property
    def names(self) -> TokenNames:
        """How tokens are named."""
        return TokenNames(self.values.get("return_tokens_as_token_ids", False))

    def finish(self, sample: CompletionOutput) -> dict[str, Any]:
        """Why a choice ends: for a prompt alone, whatever the token that is not shown, its length."""
        if self.is_prompt_alone and sample.finished():
            return {"finish_reason": "length", "stop_reason": None}
        return finish_of(sample)


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete prompts."""
    state = request.app[STATE]
    caller = await state.generating(request)
    values = await off_loop(request, read_fields, COMPLETIONS, await read_object(request))
    prompts = await off_loop(request, completion_prompts, require(values, "prompt"), values.get("cache_salt"))
    chosen = state.names.choose(values.get("model"), await caller.model())
    params, is_prompt_alone = _params(values)
    head = Head(answer_id(values, "cmpl", uuid.uuid4().hex), "text_completion", chosen.name)
    read = _Completion(head, values, number_of_choices(values), params, is_prompt_alone)
    prompts = await _prepared(caller, prompts, read)
    generation = Generation(caller, Job(prompts, params, chosen.adapter), is_streamed=bool(values.get("stream")))
    with errors_of_constraint(field_of_constraint(values)):
        async with generation:
            if values.get("stream"):
                chunks = _CompletionChunks(read, generation)
                return await stream_answer(request, generation, events_of=chunks.events, end=chunks.end, failed=failed)
            results = whole(await generation.results())
    choices = [each for index, result in enumerate(results) for each in _choices(read, index, result)]
    hidden = sum(len(each.token_ids) for result in results for each in result.outputs) if is_prompt_alone else 0
    usage = final_usage(results, num_hidden=hidden)
    return web.json_response(head.fields(choices=choices, usage=usage))


def _params(values: Mapping[str, Any]) -> tuple[SamplingParams, bool]:
    """The parameters, and whether the prompt alone is wanted; raises ApiError."""
    stream_options(values)
    n, stream, echo = number_of_choices(values), values.get("stream", False), values.get("echo", False)
    best_of = values.get("best_of")
    if stream and best_of is not None and best_of > n:
        raise wrong_value("best_of", f"must be n={n} with stream: the best are known at the end", best_of)
    if stream and values.get("prompt_logprobs") is not None:
        raise bad_request("prompt_logprobs is not for stream=true", "prompt_logprobs")
    max_tokens = values.get("max_tokens", _DEFAULT_MAX_TOKENS)
    is_prompt_alone = bool(echo and max_tokens == 0)
    own: dict[str, Any] = {"n": n, "max_tokens": 1 if is_prompt_alone else max_tokens}
    if values.get("logprobs") is not None:
        own["logprobs"] = values["logprobs"]
        if echo:
            own["prompt_logprobs"] = max(values["logprobs"], values.get("prompt_logprobs", 0))
    return sampling_params(values, **own), is_prompt_alone


async def _prepared(caller: Caller, prompts: Sequence[Prompt], read: _Completion) -> list[Prompt]:
    """The prompts as they are run; what is needed to repeat them is in `read.echoes`."""
    prepared = list(prompts)
    if not read.values.get("add_special_tokens", True):
        for index, prompt in enumerate(prepared):
            if prompt.text is not None:
                ids = await caller.tokenize(prompt, add_special_tokens=False)
                if not ids:
                    raise bad_request(f"prompt {index} has no tokens without special ones", "prompt")
                prepared[index] = replace(prompt, text=None, token_ids=ids)
    if read.values.get("echo"):
        for given, prompt in zip(prompts, prepared, strict=True):
            text = given.text
            if text is None:
                skip = read.values.get("skip_special_tokens", True)
                text = await caller.detokenize(prompt.token_ids or [], skip_special_tokens=skip)
            first = ""
            if read.num_top is not None:
                ids = prompt.token_ids or await caller.tokenize(prompt)
                first = await caller.detokenize(ids[:1], skip_special_tokens=False) if ids else ""
            read.echoes.append(_Echo(text, first))
    return prepared


def _choices(read: _Completion, prompt: int, result: RequestOutput) -> list[dict[str, Any]]:
    choices = []
    for sample in result.outputs:
        shown = CompletionOutput(sample.index, logprobs=[]) if read.is_prompt_alone else sample
        parts = _Parts(read, prompt)
        choice = {
            "index": prompt * read.n + sample.index,
            "text": parts.text(shown.text),
            "logprobs": parts.logprobs(lambda: result, shown),
            **read.finish(sample),
        }
        if read.values.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        if read.values.get("return_token_ids"):
            choice |= {"prompt_token_ids": result.prompt_token_ids, "token_ids": shown.token_ids}
        choices.append(choice)
    return choices


class _Parts:
    """The parts of one choice, of which the first has the prompt if it is to be repeated."""

    def __init__(self, read: _Completion, prompt: int) -> None:
        self._echo = read.echoes[prompt] if read.echoes else None
        self._is_first = True
        self._columns = None if read.num_top is None else CompletionLogprobs(read.names, read.num_top)

    def text(self, text: str) -> str:
        """The text of the next part; call it before `logprobs`."""
        return self._echo.text + text if self._echo is not None and self._is_first else text

    def logprobs(self, total: Callable[[], RequestOutput], new: CompletionOutput) -> Any:
        """The logprobs of the next part; total: returns what there is of the prompt."""
        is_first, self._is_first = self._is_first, False
        if self._columns is None:
            return None
        rows, ids = list(new.logprobs or ()), list(new.token_ids)
        if self._echo is not None and is_first:
            found = total()
            rows, ids = [*(found.prompt_logprobs or ()), *rows], [*(found.prompt_token_ids or []), *ids]
            return self._columns.columns(rows, ids, [self._echo.first_token])
        return self._columns.columns(rows, ids)


class _CompletionChunks:
    """Chunks of a streamed answer."""

    def __init__(self, read: _Completion, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._chunks = Chunks(read.head, read.values, read.n)
        self._parts: dict[int, _Parts] = {}
        self._num_hidden = 0
        self._is_plain = not (
            read.echoes or read.num_top is not None or read.values.get("return_token_ids") or self._chunks.is_continuous
        )

    def events(self, taken: Taken) -> bytes:
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
        if read.is_prompt_alone:
            self._num_hidden += len(sample.token_ids)
            sample = replace(sample, text="", token_ids=[], logprobs=[])
        chunk: dict[str, Any] = {
            "index": choice,
            "text": parts.text(sample.text),
            "logprobs": parts.logprobs(partial(self._generation.total, prompt), sample),
            **read.finish(sample),
        }
        if read.values.get("return_token_ids"):
            chunk["token_ids"] = sample.token_ids
            if self._chunks.begins(choice):
                chunk["prompt_token_ids"] = self._generation.prompt_token_ids(prompt)
        size = prompt_size(self._generation, prompt, delta)
        return self._chunks.choice(chunk, size, len(sample.token_ids))
