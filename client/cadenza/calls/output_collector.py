"""Merges a request's deltas."""

from __future__ import annotations

from cadenza.calls.convert import delta_from_proto
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.prompts import Prompt
from cadenza.v1 import generation_pb2


class OutputCollector:
    """Merges a request's deltas into one RequestOutput."""

    def __init__(self, request_id: str, prompt: Prompt) -> None:
        self._total = RequestOutput(request_id, prompt=prompt.text, prompt_token_ids=prompt.token_ids)
        self._samples: dict[int, CompletionOutput] = {}

    def clear(self) -> None:
        """Forget all output: the request starts anew."""
        total = self._total
        self._total = RequestOutput(total.request_id, prompt=total.prompt, prompt_token_ids=total.prompt_token_ids)
        self._samples.clear()

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt's token ids, if they are known."""
        return self._total.prompt_token_ids

    def add(self, response: generation_pb2.GenerateResponse) -> RequestOutput:
        """Add the next response and return it in the form that `stream` yields."""
        new, total = delta_from_proto(response, self._total.prompt_token_ids), self._total
        for sample in new.outputs:
            self._add_sample(sample)
        if new.prompt_logprobs is not None:
            total.prompt_logprobs = total.prompt_logprobs or []
            total.prompt_logprobs += new.prompt_logprobs
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

    def _add_sample(self, new: CompletionOutput) -> None:
        known = self._samples.setdefault(new.index, CompletionOutput(new.index))
        known.text += new.text
        known.token_ids += new.token_ids
        known.text_ends += new.text_ends
        if new.logprobs is not None:
            known.logprobs = known.logprobs or []
            known.logprobs += new.logprobs
        if new.finished():
            known.finish_reason, known.finish_detail = new.finish_reason, new.finish_detail
            known.stop_reason, known.cumulative_logprob = new.stop_reason, new.cumulative_logprob
