"""Answers of completions and chats: what both have in common."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.http.errors import ApiError, openai_body
from gateway_svc.http.sending import DONE, data_event, dumps
from gateway_svc.openai.usage import final_usage, prompt_tokens, usage_of
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.scheduler.generation import Generation


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The beginning of an answer, and of each chunk of it."""

    id: str
    kind: str
    """As in the field `object`."""
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, **more: Any) -> dict[str, Any]:
        """The answer as an object."""
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, **more}

    def prefix(self) -> str:
        """What stands before the choices of a chunk, as text."""
        return f"data: {dumps(self.fields())[:-1]},"


class Chunks:
    """The chunks of one streamed answer. A choice is a sample of a prompt."""

    def __init__(self, head: AnswerHead, request: GatewayRequest) -> None:
        self._prefix = head.prefix()
        self._head = head
        self._n = request.params.n
        self._include_usage, self.is_continuous = request.with_usage, request.with_running_usage
        self._null_usage = ',"usage":null' if self._include_usage and not self.is_continuous else ""
        self._num_tokens: Counter[int] = Counter()
        self._begun: set[int] = set()

    def index_of(self, prompt: int, sample: CompletionOutput) -> int:
        """The index of a choice."""
        return prompt * self._n + sample.index

    def begins(self, choice: int) -> bool:
        """Whether a choice has its first chunk; True once."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def text(self, choice: int, before: str, text: str, after: str) -> str:
        """The chunk of a choice that has nothing but text; before and after: what is around it."""
        return f'{self._prefix}"choices":[{{"index":{choice},{before}{dumps(text)}{after}}}]{self._null_usage}}}\n\n'

    def choice(self, choice: dict[str, Any], num_prompt_tokens: int = 0, num_new_tokens: int = 0) -> str:
        """Any chunk of a choice."""
        usage = self._null_usage
        if self.is_continuous:
            self._num_tokens[choice["index"]] += num_new_tokens
            usage = f',"usage":{dumps(usage_of(num_prompt_tokens, self._num_tokens[choice["index"]]))}'
        return f'{self._prefix}"choices":[{dumps(choice)}]{usage}}}\n\n'

    def end(self, generation: Generation, num_hidden: int = 0, num_reasoning: int | None = None) -> bytes:
        """The last events; num_hidden, num_reasoning: as in `final_usage`."""
        if not (self._include_usage or self.is_continuous):
            return DONE
        usage = final_usage(generation.totals(), num_hidden=num_hidden, num_reasoning=num_reasoning)
        return data_event(self._head.fields(choices=[], usage=usage)) + DONE


class ChunkEvents:
    """What streams of chunks have in common: no events before the first output, and the error as the last one."""

    def begin(self) -> bytes:
        """The events before the first output."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The events of an answer that fails after its beginning."""
        return data_event(openai_body(error)) + DONE


def prompt_size(generation: Generation, prompt: int, delta: RequestOutput) -> int:
    """Number of a prompt's tokens, known with its first output."""
    return prompt_tokens(delta) or len(generation.prompt_token_ids(prompt))
