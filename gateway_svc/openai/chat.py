"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from gateway_svc.fields.field import read_fields, wrong_value
from gateway_svc.fields.sampling import answer_id, number_of_choices, require, sampling_params, stream_options
from gateway_svc.fields.tables import CHAT
from gateway_svc.http.errors import bad_request
from gateway_svc.http.reading import off_loop, read_object
from gateway_svc.openai.answers import Chunks, Head, failed, prompt_size
from gateway_svc.openai.chat_message import delta_object, finish_with_calls, message_object
from gateway_svc.openai.failures import whole
from gateway_svc.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from gateway_svc.openai.prompts import chat_prompt, last_assistant_text
from gateway_svc.openai.streaming import stream_answer
from gateway_svc.openai.usage import final_usage
from gateway_svc.parsing.output import Message, OutputParser, Reading, read_output
from gateway_svc.parsing.parts import Part, Role, Thought
from gateway_svc.parsing.reasoning import Opening
from gateway_svc.scheduler.generation import Generation, Job
from gateway_svc.scheduler.inbox import Taken
from gateway_svc.state import STATE
from gateway_svc.tools.definitions import chat_tools
from gateway_svc.tools.preparing import prepare


@dataclass(frozen=True, slots=True)
class _Chat:
    """One request, read."""

    values: Mapping[str, Any]
    reading: Reading
    n: int
    num_top: int | None
    """Top logprobs of each token; None: no logprobs."""
    echo: Message
    """What the answer begins with."""

    @property
    def shows_thought(self) -> bool:
        """Whether the thought is in the answer."""
        return bool(self.values.get("include_reasoning", True))

    @property
    def echoed(self) -> dict[str, Any]:
        """The first delta of a stream."""
        delta: dict[str, Any] = {"content": self.echo.content}
        if self.echo.thought and self.shows_thought:
            delta |= delta_object(Thought(self.echo.thought), self.reading.formats)
        return delta

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
    use = await off_loop(request, chat_tools, values)
    prompt = await off_loop(request, chat_prompt, require(values, "messages"), values, use)
    info = await caller.model()
    chosen = state.names.choose(values.get("model"), info)
    num_top = num_top_logprobs(values)
    prepared = await prepare(caller, prompt, use, state.formats(info), _params(values, num_top), values)
    echo = _echo(values, prompt, prepared.reading)
    read = _Chat(values, prepared.reading, number_of_choices(values), num_top, echo)
    identity = answer_id(values, "chatcmpl", uuid.uuid4().hex)
    job = Job([prompt], prepared.params, chosen.adapter, with_text_ends=not read.reading.is_plain)
    generation = Generation(caller, job, is_streamed=bool(values.get("stream")))
    with prepared.errors():
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


def _echo(values: Mapping[str, Any], prompt: Prompt, reading: Reading) -> Message:
    """The message that is continued, where the answer is to begin with it."""
    text = last_assistant_text(prompt) if values.get("echo") else ""
    if reading.opening is Opening.OPEN:
        before, mark, thought = text.partition(reading.formats.marker(Role.THOUGHT).text)
        if mark and not before.strip():
            return Message(thought=thought, content="")
    return Message(content=text)


def _answer(read: _Chat, head: Head, results: Sequence[RequestOutput]) -> dict[str, Any]:
    (result,) = results
    choices, num_reasoning = [], 0
    formats = read.reading.formats
    for sample in result.outputs:
        message = read_output(read.reading, sample, result.prompt_token_ids or [])
        num_reasoning += message.num_reasoning_tokens
        choice = {
            "index": sample.index,
            "message": message_object(message, formats, before=read.echo, shows_thought=read.shows_thought),
            "logprobs": read.logprobs(sample),
            **finish_with_calls(sample, has_calls=bool(message.calls)),
        }
        if read.values.get("return_token_ids"):
            choice["token_ids"] = sample.token_ids
        choices.append(choice)
    known = None if formats.reasoning is None else num_reasoning
    answer = head.fields(choices=choices, usage=final_usage(results, num_reasoning=known))
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
        self._parsers: dict[int, OutputParser] = {}
        self._shows_tokens = (
            read.num_top is not None or read.values.get("return_token_ids") or self._chunks.is_continuous
        )
        self._is_plain = read.reading.is_plain and not self._shows_tokens

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
                elif self._read.reading.is_plain:
                    content = {"content": sample.text} if sample.text or not sample.finished() else {}
                    texts.append(self._chunk(prompt, choice, delta, sample, content))
                else:
                    texts += self._parsed(prompt, choice, delta, sample)
        return "".join(texts).encode()

    def end(self) -> bytes:
        """The last events."""
        known = self._read.reading.formats.reasoning is not None
        num_reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers.values()) if known else None
        return self._chunks.end(self._generation, num_reasoning=num_reasoning)

    def _first(self, choice: int, prompt: int, delta: RequestOutput) -> str:
        """The chunk that says who speaks."""
        chunk: dict[str, Any] = {
            "index": choice,
            "delta": {"role": "assistant", **self._read.echoed},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._read.values.get("return_token_ids"):
            chunk["prompt_token_ids"] = self._generation.prompt_token_ids(prompt)
        return self._chunks.choice(chunk, prompt_size(self._generation, prompt, delta))

    def _parsed(self, prompt: int, choice: int, delta: RequestOutput, sample: CompletionOutput) -> list[str]:
        """A chunk for each part of the delta; the tokens are in the first one, the end in the last one."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = OutputParser(self._read.reading, self._generation.prompt_token_ids(prompt))
            self._parsers[choice] = parser
        parts: list[Part] = [
            part for part in parser.feed(sample) if self._read.shows_thought or not isinstance(part, Thought)
        ]
        deltas = [delta_object(part, self._read.reading.formats) for part in parts]
        if sample.finished() or (self._shows_tokens and not deltas):
            deltas.append({})
        texts = []
        for place, content in enumerate(deltas):
            is_last = place == len(deltas) - 1
            shown = replace(
                sample,
                token_ids=[] if place else sample.token_ids,
                finish_reason=sample.finish_reason if is_last else None,
                stop_reason=sample.stop_reason if is_last else None,
            )
            texts.append(self._chunk(prompt, choice, delta, shown, content, has_calls=parser.has_calls))
        return texts

    def _chunk(
        self,
        prompt: int,
        choice: int,
        delta: RequestOutput,
        sample: CompletionOutput,
        content: dict[str, Any],
        *,
        has_calls: bool = False,
    ) -> str:
        chunk: dict[str, Any] = {
            "index": choice,
            "delta": content,
            "logprobs": self._read.logprobs(sample) if sample.token_ids else None,
            **finish_with_calls(sample, has_calls=has_calls),
        }
        if self._read.values.get("return_token_ids"):
            chunk["token_ids"] = sample.token_ids
        size = prompt_size(self._generation, prompt, delta)
        return self._chunks.choice(chunk, size, len(sample.token_ids))
