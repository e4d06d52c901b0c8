"""Where the output of a request goes on: finds lost and repeated output, and says what to resume."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.errors import DamagedStreamError
from cadenza.v1 import generation_pb2


@dataclass(slots=True)
class _SampleEnd:
    """How much of one sample has come."""

    num_tokens: int = 0
    num_chars: int = 0  # code points of its text
    finished: bool = False


_NOTHING = _SampleEnd()


class Positions:
    """Counts the output of one request."""

    __slots__ = ("_num_prompt_logprobs", "_samples", "_who", "finished", "has_prompt_ids", "has_responses")

    def __init__(self, request_id: str) -> None:
        self._who = f"request {request_id}"
        self._samples: dict[int, _SampleEnd] = {}
        self._num_prompt_logprobs: int | None = None
        self.finished = False
        """Whether the last response has come."""
        self.has_responses = False
        self.has_prompt_ids = False
        """Whether the server has sent the prompt's token ids."""

    @property
    def has_output(self) -> bool:
        """Whether there are tokens, a finish or prompt logprobs."""
        return bool(self._samples) or self._num_prompt_logprobs is not None

    def advance(self, response: generation_pb2.GenerateResponse) -> None:
        """Count a response; raises DamagedStreamError, and counts nothing, if output before it is missing or
        repeated."""
        for output in response.outputs:
            self._check(output)
        if response.HasField("prompt_logprobs"):
            # The first prompt token has no logprobs, but a place in the list: the first part begins at 1.
            skipped, known = int(response.prompt_logprobs_start == 1), self._num_prompt_logprobs or 0
            if (start := response.prompt_logprobs_start - skipped) != known:
                raise DamagedStreamError(
                    f"{self._who}: the server sent prompt logprobs from {start} where {known or 1} was next"
                )
            self._num_prompt_logprobs = known + skipped + len(response.prompt_logprobs.chosen_logprobs)
        for output in response.outputs:
            sample = self._samples.get(output.sample_index)
            if sample is None:
                sample = self._samples[output.sample_index] = _SampleEnd()
            sample.num_tokens += len(output.token_ids)
            sample.num_chars += len(output.text)
            sample.finished = output.HasField("finish")
        self.has_responses = True
        if response.HasField("info") and response.info.prompt_token_ids:
            self.has_prompt_ids = True
        if response.HasField("stats"):
            self.finished = True

    def message(self, request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateRequest:
        """The message that brings the rest of the output; the request itself if there is no output yet."""
        if not self.has_output:
            return request
        positions = [
            generation_pb2.SamplePosition(sample_index=index, token_index=sample.num_tokens, finished=sample.finished)
            for index, sample in sorted(self._samples.items())
        ]
        return generation_pb2.GenerateRequest(
            request_id=request.request_id,
            output_mode=request.output_mode,
            return_prompt_token_ids=request.return_prompt_token_ids and not self.has_prompt_ids,
            return_text_ends=request.return_text_ends,
            resume=generation_pb2.ResumePoint(
                positions=positions, prompt_logprobs_start=self._num_prompt_logprobs or 0
            ),
        )

    def _check(self, output: generation_pb2.SampleOutput) -> None:
        known = self._samples.get(output.sample_index, _NOTHING)
        if known.finished:
            what = "output after its finish"
        elif output.token_ids and output.first_token_index != known.num_tokens:
            what = f"token {output.first_token_index} where {known.num_tokens} was next"
        elif output.text and output.text_offset != known.num_chars:
            what = f"text from {output.text_offset} where {known.num_chars} was next"
        else:
            return
        raise DamagedStreamError(f"{self._who}, sample {output.sample_index}: the server sent {what}")
