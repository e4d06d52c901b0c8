"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.answering import answer_chat
from gateway_svc.openai.answers import AnswerHead, ChunkEvents, Chunks, prompt_size
from gateway_svc.openai.chat_message import delta_object, finish_with_calls, message_object
from gateway_svc.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from gateway_svc.openai.usage import final_usage
from gateway_svc.parsing.message import Message
from gateway_svc.parsing.output import OutputParser, Reading, read_output
from gateway_svc.parsing.parts import Part, Role, Thought
from gateway_svc.parsing.reasoning import Opening
from gateway_svc.requests.chat import read_chat
from gateway_svc.requests.prompts import last_assistant_text
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.scheduler.generation import Generation
from gateway_svc.scheduler.inbox import Taken


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    return await answer_chat(request, read_chat, _ChatAnswer)


class _ChatAnswer:
    """The answer to one request."""

    def __init__(self, request: GatewayRequest, reading: Reading, model: str) -> None:
        self.request = request
        self.reading = reading
        self.model = model
        self.echo = _echo(request, reading)
        """What the answer begins with."""

    def head(self, kind: str) -> AnswerHead:
        """The beginning of an answer, or of a chunk."""
        return AnswerHead(self.request.id, kind, self.model)

    @property
    def echoed(self) -> dict[str, Any]:
        """The first delta of a stream."""
        delta: dict[str, Any] = {"content": self.echo.content}
        if self.echo.thought and self.request.shows_thought:
            delta |= delta_object(Thought(self.echo.thought), self.reading.formats)
        return delta

    def logprobs(self, sample: CompletionOutput) -> dict[str, Any] | None:
        """The logprobs of a sample's tokens; None: not wanted."""
        num_top = self.request.num_top
        if num_top is None:
            return None
        names = TokenNames(self.request.names_tokens_by_id)
        return {"content": chat_logprobs(sample.logprobs or [], sample.token_ids, num_top, names)}

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object."""
        (result,) = results
        choices, num_reasoning = [], 0
        formats, request = self.reading.formats, self.request
        for sample in result.outputs:
            message = read_output(self.reading, sample, result.prompt_token_ids or [])
            num_reasoning += message.num_reasoning_tokens
            choice = {
                "index": sample.index,
                "message": message_object(message, formats, before=self.echo, shows_thought=request.shows_thought),
                "logprobs": self.logprobs(sample),
                **finish_with_calls(sample, has_calls=bool(message.calls)),
            }
            if request.shows_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        known = None if formats.reasoning is None else num_reasoning
        answer = self.head("chat.completion").fields(choices=choices, usage=final_usage(results, num_reasoning=known))
        if request.shows_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        if request.shows_token_ids:
            answer["prompt_token_ids"] = result.prompt_token_ids
        return answer

    def events(self, generation: Generation) -> _ChatChunks:
        """The answer as a stream."""
        return _ChatChunks(self, generation)


def _echo(request: GatewayRequest, reading: Reading) -> Message:
    """The message that is continued, where the answer is to begin with it."""
    text = last_assistant_text(request.prompts[0]) if request.echoes else ""
    if reading.opening is Opening.OPEN:
        before, mark, thought = text.partition(reading.formats.marker(Role.THOUGHT).text)
        if mark and not before.strip():
            return Message(thought=thought, content="")
    return Message(content=text)


class _ChatChunks(ChunkEvents):
    """Chunks of a streamed answer."""

    def __init__(self, read: _ChatAnswer, generation: Generation) -> None:
        self._read = read
        self._generation = generation
        self._chunks = Chunks(read.head("chat.completion.chunk"), read.request)
        self._parsers: dict[int, OutputParser] = {}
        request = read.request
        self._shows_tokens = request.num_top is not None or request.shows_token_ids or request.with_running_usage
        self._is_plain = read.reading.is_plain and not self._shows_tokens

    def deltas(self, taken: Taken) -> bytes:
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
        if self._read.request.shows_token_ids:
            chunk["prompt_token_ids"] = self._generation.prompt_token_ids(prompt)
        return self._chunks.choice(chunk, prompt_size(self._generation, prompt, delta))

    def _parsed(self, prompt: int, choice: int, delta: RequestOutput, sample: CompletionOutput) -> list[str]:
        """A chunk for each part of the delta; the tokens are in the first one, the end in the last one."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = OutputParser(self._read.reading, self._generation.prompt_token_ids(prompt))
            self._parsers[choice] = parser
        parts: list[Part] = [
            part for part in parser.feed(sample) if self._read.request.shows_thought or not isinstance(part, Thought)
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
        if self._read.request.shows_token_ids:
            chunk["token_ids"] = sample.token_ids
        size = prompt_size(self._generation, prompt, delta)
        return self._chunks.choice(chunk, size, len(sample.token_ids))
