"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cadenza.gateway.fields.field import read_fields, wrong_value
from cadenza.gateway.fields.sampling import answer_id, number_of_choices, require, sampling_params, stream_options
from cadenza.gateway.fields.tables import CHAT
from cadenza.gateway.http.errors import bad_request
from cadenza.gateway.http.reading import off_loop, read_object
from cadenza.gateway.openai.answers import Chunks, Head, failed, prompt_size
from cadenza.gateway.openai.failures import whole
from cadenza.gateway.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from cadenza.gateway.openai.prompts import chat_prompt, last_assistant_text
from cadenza.gateway.openai.streaming import stream_answer
from cadenza.gateway.openai.usage import final_usage, finish_of
from cadenza.gateway.scheduler.generation import Generation, Job
from cadenza.gateway.scheduler.inbox import Taken
from cadenza.gateway.state import STATE
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Chat:
    """One request, read."""

    values: Mapping[str, Any]
    n: int
    num_top: int | None
    """Top logprobs of each token; None: no logprobs."""
    echo: str
    """The text that the answer begins with."""

    @property
    def names(self) -> TokenNames:
        """How tokens are named."""
        return TokenNames(self.values.get("return_tokens_as_token_ids", False))

    def logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        """The logprobs of a sample's tokens; None: not wanted."""
        if self.num_top is None:
            return None
        return {"content": chat_logprobs(sample.logprobs or [], sample.token_ids, self.num_top, self.names)}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    state = request.app[STATE]
    caller = await state.generating(request)
    values = await off_loop(request, read_fields, CHAT, await read_object(request))
    prompt = await off_loop(request, chat_prompt, require(values, "messages"), values)
    chosen = state.names.choose(values.get("model"), await caller.model())
    num_top = num_top_logprobs(values)
    params = _params(values, num_top)
    read = _Chat(values, number_of_choices(values), num_top, _echo(values, prompt))
    identity = answer_id(values, "chatcmpl", uuid.uuid4().hex)
    generation = Generation(caller, Job([prompt], params, chosen.adapter), is_streamed=bool(values.get("stream")))
    async with generation:
        if values.get("stream"):
            chunks = _ChatChunks(read, Head(identity, "chat.completion.chunk", chosen.name), generation)
            return await stream_answer(request, generation, events_of=chunks.events, end=chunks.end, failed=failed)
        results = whole(await generation.results())
    head = Head(identity, "chat.completion", chosen.name)
    return web.json_response(_answer(read, head, results))


def num_top_logprobs(values: Mapping[str, Any]) -> int | None:
    """Top logprobs of each token, None for no logprobs; raises ApiError."""
    number = values.get("top_logprobs")
    if not values.get("logprobs"):
        if number:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        return None
    if number is not None and number < 0:
        raise wrong_value("top_logprobs", "must be 0 or more", number)
    return number or 0


def _params(values: Mapping[str, Any], num_top: int | None) -> SamplingParams:
    stream_options(values)
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
    if len(given) == 2 and values[given[0]] != values[given[1]]:
        raise bad_request("max_tokens and max_completion_tokens are one thing, and differ", "max_tokens")
    if values.get("stream") and values.get("prompt_logprobs") is not None:
        raise bad_request("prompt_logprobs is not for stream=true", "prompt_logprobs")
    max_tokens = values[given[0]] if given else None
    renamed = {"logprobs": "top_logprobs", "max_tokens": given[0] if given else "max_tokens"}
    return sampling_params(values, renamed, n=number_of_choices(values), max_tokens=max_tokens, logprobs=num_top)


def _echo(values: Mapping[str, Any], prompt: Prompt) -> str:
    return last_assistant_text(prompt) if values.get("echo") else ""


def _answer(read: _Chat, head: Head, results: Sequence[RequestOutput]) -> dict[str, Any]:
    (result,) = results
    choices = []
    for sample in result.outputs:
        choice = {
            "index": sample.index,
            "message": {"role": "assistant", "content": read.echo + sample.text, "refusal": None},
            "logprobs": read.logprobs(sample),
            **finish_of(sample),
        }
        if read.values.get("return_token_ids"):
            choice["token_ids"] = sample.token_ids
        choices.append(choice)
    answer = head.fields(choices=choices, usage=final_usage(results))
    if read.values.get("prompt_logprobs") is not None:
        answer["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    if read.values.get("return_token_ids"):
        answer["prompt_token_ids"] = result.prompt_token_ids
    return answer


class _ChatChunks:
    """Chunks of a streamed answer."""

    def __init__(self, read: _Chat, head: Head, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._chunks = Chunks(head, read.values, read.n)
        self._is_plain = not (
            read.num_top is not None or read.values.get("return_token_ids") or self._chunks.is_continuous
        )

    def events(self, taken: Taken) -> bytes:
        """The events of new deltas."""
        chunks, texts = self._chunks, list[str]()
        for prompt, delta in taken:
            for sample in delta.outputs:
                choice = chunks.index_of(prompt, sample)
                if chunks.begins(choice):
                    texts.append(self._first(choice, prompt, delta))
                if self._is_plain and not sample.finished():
                    if sample.text:
                        texts.append(
                            chunks.text(
                                choice,
                                '"delta":{"content":',
                                sample.text,
                                '},"logprobs":null,"finish_reason":null',
                            )
                        )
                else:
                    texts.append(self._chunk(prompt, choice, delta, sample))
        return "".join(texts).encode()

    def end(self) -> bytes:
        """The last events."""
        return self._chunks.end(self._generation)

    def _first(self, choice: int, prompt: int, delta: RequestOutput) -> str:
        """The chunk that says who speaks."""
        chunk: dict[str, Any] = {
            "index": choice,
            "delta": {"role": "assistant", "content": self._read.echo},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._read.values.get("return_token_ids"):
            chunk["prompt_token_ids"] = self._generation.prompt_token_ids(prompt)
        return self._chunks.choice(chunk, prompt_size(self._generation, prompt, delta))

    def _chunk(self, prompt: int, choice: int, delta: RequestOutput, sample: CompletionOutput) -> str:
        chunk: dict[str, Any] = {
            "index": choice,
            "delta": {"content": sample.text} if sample.text or not sample.finished() else {},
            "logprobs": self._read.logprobs(sample) if sample.token_ids else None,
            **finish_of(sample),
        }
        if self._read.values.get("return_token_ids"):
            chunk["token_ids"] = sample.token_ids
        size = prompt_size(self._generation, prompt, delta)
        return self._chunks.choice(chunk, size, len(sample.token_ids))
