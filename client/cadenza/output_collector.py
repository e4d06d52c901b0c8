"""Merges a request's deltas, and detects lost or repeated ones."""

from __future__ import annotations

from cadenza.errors import InternalError
from cadenza.outputs import CompletionOutput, Delta, LogprobRow, RequestOutput


class OutputCollector:
    """Merges a request's deltas into one RequestOutput."""

    def __init__(self, request_id: str, *, prompt: str | None, prompt_token_ids: list[int] | None) -> None:
        self._total = RequestOutput(request_id, prompt=prompt, prompt_token_ids=prompt_token_ids)
        self._samples: dict[int, CompletionOutput] = {}
        self.has_responses = False
        """Whether anything was added."""

    @property
    def has_output(self) -> bool:
        """Whether there are tokens, a finish or prompt logprobs."""
        return bool(self._samples) or self._total.prompt_logprobs is not None

    def clear(self) -> None:
        """Forget all output: the request starts anew."""
        total = self._total
        self._total = RequestOutput(total.request_id, prompt=total.prompt, prompt_token_ids=total.prompt_token_ids)
        self._samples.clear()

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self._total.finished

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt's token ids, if they are known."""
        return self._total.prompt_token_ids

    def add(self, delta: Delta) -> RequestOutput:
        """Add the next delta and return it in the form that `stream` yields.

        Raises InternalError if tokens or text before it are missing or repeated.
        """
        new, total = delta.output, self._total
        self.has_responses = True
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
        """The result so far, with samples in the order of their index."""
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
