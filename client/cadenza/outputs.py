"""Results, shaped as vLLM shapes them, and how a request's deltas are put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cadenza.errors import InternalError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's logprob: natural logarithm under the model's own distribution, before temperature and filters."""

    logprob: float
    rank: int | None = None  # in the vocabulary, from 1
    decoded_token: str | None = None  # None with detokenize off


LogprobRow = dict[int, Logprob]  # of one position: the chosen token first, then the top ones, best first


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request; in a delta, only what is new of it."""

    index: int  # which sample; with best_of and beams the best is 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = (
        None  # known at the end, if logprobs were asked for; with best_of and of beams always
    )
    logprobs: list[LogprobRow] | None = None  # one row per token of token_ids
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string; None for EOS
    finish_detail: str | None = None  # the exact reason, such as "eos", "max_tokens" or "kv_capacity"

    def finished(self) -> bool:
        """Has this sample ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Counts and times of a finished request as the server measured them; times in seconds from its arrival."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_preemptions: int
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(slots=True)
class RequestOutput:
    """The results of one request. From `stream` it is a delta: only new text, tokens and logprobs."""

    request_id: str
    prompt: str | None = None  # None for token ids and chats
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None  # the first prompt token has none
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None  # prompt tokens from the prefix cache; known at the end
    seed: int | None = None  # the seed in use, given or drawn
    metrics: RequestMetrics | None = None  # known at the end


@dataclass(slots=True)
class Delta:
    """What one response says, with the positions that prove that nothing was lost."""

    output: RequestOutput
    first_token_index: list[int]  # for each of output.outputs
    text_offset: list[int]  # for each of output.outputs, in code points
    prompt_logprobs_start: int = 0


class OutputCollector:
    """Puts a request's deltas together into one RequestOutput."""

    def __init__(self, request_id: str, *, prompt: str | None, prompt_token_ids: list[int] | None) -> None:
        self._total = RequestOutput(request_id, prompt=prompt, prompt_token_ids=prompt_token_ids)
        self._samples: dict[int, CompletionOutput] = {}

    @property
    def finished(self) -> bool:
        """Has the request ended."""
        return self._total.finished

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt's token ids as far as they are known."""
        return self._total.prompt_token_ids

    def add(self, delta: Delta) -> RequestOutput:
        """Take the next delta and return it as `stream` shows it.

        Raises InternalError if tokens or text are missing before it, or come twice.
        """
        new, total = delta.output, self._total
        for sample, token_index, text_offset in zip(
            new.outputs, delta.first_token_index, delta.text_offset, strict=True
        ):
            self._add_sample(sample, token_index, text_offset)
        if new.prompt_logprobs is not None:
            self._add_prompt_logprobs(new.prompt_logprobs, delta.prompt_logprobs_start)
        if new.prompt_token_ids is not None:
            total.prompt_token_ids = new.prompt_token_ids
        total.seed = new.seed if new.seed is not None else total.seed
        total.metrics = new.metrics or total.metrics
        if new.num_cached_tokens is not None:
            total.num_cached_tokens = new.num_cached_tokens
        total.finished = total.finished or new.finished
        new.prompt, new.prompt_token_ids, new.seed = total.prompt, total.prompt_token_ids, total.seed
        return new

    def result(self) -> RequestOutput:
        """Everything so far; samples in the order of their index."""
        self._total.outputs = [self._samples[index] for index in sorted(self._samples)]
        return self._total

    def _add_sample(self, new: CompletionOutput, token_index: int, text_offset: int) -> None:
        known = self._samples.setdefault(new.index, CompletionOutput(new.index))
        if new.token_ids and token_index != len(known.token_ids):
            raise InternalError(
                f"request {self._total.request_id}, sample {new.index}: the server sent token {token_index} "
                f"where {len(known.token_ids)} was next"
            )
        if new.text and text_offset != len(known.text):
            raise InternalError(
                f"request {self._total.request_id}, sample {new.index}: the server sent text from {text_offset} "
                f"where {len(known.text)} was next"
            )
        known.text += new.text
        known.token_ids += new.token_ids
        if new.logprobs is not None:
            known.logprobs = known.logprobs or []
            known.logprobs += new.logprobs
        if new.finished():
            known.finish_reason, known.finish_detail = new.finish_reason, new.finish_detail
            known.stop_reason, known.cumulative_logprob = new.stop_reason, new.cumulative_logprob

    def _add_prompt_logprobs(self, rows: list[LogprobRow | None], start: int) -> None:
        known = self._total.prompt_logprobs = self._total.prompt_logprobs or []
        if start != len(known):
            raise InternalError(
                f"request {self._total.request_id}: the server sent prompt logprobs from {start} "
                f"where {len(known) or 1} was next"
            )
        known += rows
