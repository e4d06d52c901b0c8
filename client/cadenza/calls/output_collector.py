"""Merges a request's deltas, and detects lost or repeated ones."""

from __future__ import annotations

from cadenza.errors import DamagedStreamError
from cadenza.outputs import CompletionOutput, Delta, RequestOutput


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

        Raises DamagedStreamError, and adds nothing, if tokens or text before it are missing or repeated.
        """
        self._check(delta)
        new, total = delta.output, self._total
        self.has_responses = True
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

    def _check(self, delta: Delta) -> None:
        new = delta.output
        for sample, token_index, text_offset in zip(
            new.outputs, delta.first_token_index, delta.text_offset, strict=True
        ):
            known = self._samples.get(sample.index) or CompletionOutput(sample.index)
            where = f"request {self._total.request_id}, sample {sample.index}: the server sent"
            if known.finished():
                raise DamagedStreamError(f"{where} output after its finish")
            if sample.token_ids and token_index != len(known.token_ids):
                raise DamagedStreamError(f"{where} token {token_index} where {len(known.token_ids)} was next")
            if sample.text and text_offset != len(known.text):
                raise DamagedStreamError(f"{where} text from {text_offset} where {len(known.text)} was next")
        num_known, start = len(self._total.prompt_logprobs or ()), delta.prompt_logprobs_start
        if new.prompt_logprobs is not None and start != num_known:
            raise DamagedStreamError(
                f"request {self._total.request_id}: the server sent prompt logprobs from {start} "
                f"where {num_known or 1} was next"
            )

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
