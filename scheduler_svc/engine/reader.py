"""Readers of a live request. A reader's lag is an index into the output, never a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from scheduler_svc.core.errors import DataLossError
from scheduler_svc.core.types import Finish, FinishDetail
from scheduler_svc.engine.live_request import LiveRequest, LiveSample
from scheduler_svc.engine.resume_point import ResumePoint, check_resume_point

MAX_CHUNK_BYTES = 1 << 20
"""Approximate maximum size of a response; a reader that is far behind gets several."""
PROMPT_TOKEN_BYTES = 3
"""Approximate bytes per prompt token id in the first response, if requested."""
_SAMPLE_BYTES = 64
_TOKEN_BYTES = 8
_CHAR_BYTES = 3
_LOGPROB_BYTES = 24
_TOP_LOGPROB_BYTES = 20
_IMPOSED_ENDS = (FinishDetail.ABORTED, FinishDetail.DEADLINE)
"""They end a sample after any token."""


@dataclass(slots=True)
class SampleChunk:
    """New output of one sample; see SampleOutput in generation.proto."""

    sample_index: int
    first_token_index: int
    token_ids: list[int]
    text: str
    text_offset: int
    logprobs: Sequence[TokenLogprobs]
    finish: Finish | None
    num_bytes: int
    """Approximate size on the wire."""
    is_whole: bool
    """Whether it holds all of the sample's current output."""
    text_ends: Sequence[int] = ()
    """Where the tokens' texts end, if the client asks for it; as TextStream.token_ends."""


@dataclass(slots=True)
class OutputChunk:
    """New output of one request, as much as fits one response."""

    samples: list[SampleChunk] = field(default_factory=list)
    prompt_logprobs: LogprobColumns | None = None
    """New rows; empty rows if there will be none."""
    is_first: bool = False
    is_last: bool = False
    is_whole: bool = True
    """Whether it holds all current output."""
    num_bytes: int = 0


class Cursor:
    """Position of a reader in one sample."""

    __slots__ = ("done", "text", "token")

    def __init__(self) -> None:
        self.token = 0
        self.text: int | None = 0
        """None: after the text of the tokens before `token`."""
        self.done = False


class RequestReader:
    """Reads one live request to its end, from the beginning or from a resume point.

    Several readers can read the same request.
    """

    __slots__ = (
        "_cursors",
        "_final_only",
        "_is_first",
        "_prompt_end",
        "_starts_at_once",
        "done",
        "live",
        "with_text_ends",
    )

    def __init__(
        self,
        live: LiveRequest,
        *,
        final_only: bool = False,
        resume: ResumePoint | None = None,
        starts_at_once: bool = False,
        with_text_ends: bool = False,
    ) -> None:
        """`starts_at_once`: the first chunk does not wait for output. `with_text_ends`: chunks say where tokens end.

        Raises RequestRejectedError for a resume point beyond the output.
        """
        self.live = live
        self.with_text_ends = with_text_ends
        self.done = False
        """Whether all output has been taken and the request has finished."""
        self._final_only = final_only
        self._is_first = True
        self._starts_at_once = starts_at_once
        self._prompt_end = 0
        """Logprobs of prompt tokens before this index were taken."""
        self._cursors = [Cursor() for _ in range(live.num_returned)]
        if resume is not None:
            check_resume_point(resume, live)
            self._prompt_end = resume.prompt_logprobs_end(live)
            for position in resume.positions:
                cursor = self._cursors[position.sample_index]
                cursor.token, cursor.text, cursor.done = position.token_index, None, position.finished

    @property
    def has_output(self) -> bool:
        """Whether `take` may return something, or the request has ended with an error; cheap, for each step."""
        return not self._final_only or self.live.has_finishes or self.live.error is not None

    @property
    def plain_position(self) -> Cursor | None:
        """The position of a reader that has taken its first chunk, and gets tokens and text until the finish.

        None for other modes, and for requests with several samples, beams or logprobs.
        """
        request = self.live.request
        sampling = request.spec.sampling
        is_plain = (
            not (self._final_only or self._is_first)
            and len(self.live.samples) == 1
            and request.best_of is None
            and request.spec.beams is None
            and sampling.num_logprobs is None
            and sampling.num_prompt_logprobs is None
        )
        return self._cursors[0] if is_plain else None

    def take(self, max_bytes: int = MAX_CHUNK_BYTES) -> OutputChunk | None:
        """New output of about `max_bytes` at most, but at least a token; None if there is none, or after the end.

        Raises DataLossError if a request that was to catch up has ended by itself before the client's position.
        """
        if self.done or self.live.hidden:
            return None
        chunk = OutputChunk()
        self._take_prompt(chunk, max_bytes)
        if chunk.is_whole:
            self._take_samples(chunk, max_bytes)
        is_start = self._is_first and self._starts_at_once
        if not chunk.samples and chunk.prompt_logprobs is None and not is_start:
            return None
        if chunk.samples and self._prompt_end == 0 and self.live.prompt_logprobs is not None:
            # There will be no prompt logprobs: the prompt has one token, or the request finished before it ran.
            chunk.prompt_logprobs = self.live.prompt_logprobs.rows(1, 1)
            self._prompt_end = 1
        chunk.is_first, self._is_first = self._is_first, False
        chunk.is_last = self.done
        return chunk

    def _take_prompt(self, chunk: OutputChunk, max_bytes: int) -> None:
        """Take new prompt logprobs; output follows only after all of them."""
        known = self.live.prompt_logprobs
        if known is None or (self._final_only and all(sample.shown_finish is None for sample in self.live.returned)):
            return
        start = max(1, self._prompt_end)
        if start >= known.end:
            return
        row_bytes = _TOKEN_BYTES + _LOGPROB_BYTES + _TOP_LOGPROB_BYTES * known.num_top
        end = min(known.end, start + max(1, max_bytes // row_bytes))
        chunk.prompt_logprobs = known.rows(start, end)
        chunk.num_bytes += (end - start) * row_bytes
        chunk.is_whole = end == known.end
        self._prompt_end = end

    def _take_samples(self, chunk: OutputChunk, max_bytes: int) -> None:
        """Take new output of the samples; sets `done` after the finish of the last sample."""
        if not self.live.returned:
            return
        # A stream may resume after the finish of all samples.
        ended = self._is_first
        for index, (sample, cursor) in enumerate(zip(self.live.returned, self._cursors, strict=True)):
            if cursor.done or (self._final_only and sample.shown_finish is None):
                continue
            if chunk.num_bytes >= max_bytes:
                chunk.is_whole = False
                break
            part = _advance(index, sample, cursor, max_bytes - chunk.num_bytes)
            if part is not None:
                if self.with_text_ends and sample.text is not None:
                    start = part.first_token_index
                    part.text_ends = sample.text.token_ends[start : start + len(part.token_ids)]
                chunk.samples.append(part)
                chunk.num_bytes += part.num_bytes
                chunk.is_whole = chunk.is_whole and part.is_whole
                ended = ended or cursor.done
        self.done = ended and all(cursor.done for cursor in self._cursors)


def _advance(index: int, sample: LiveSample, cursor: Cursor, max_bytes: int) -> SampleChunk | None:
    """Take new output of one sample and move its cursor; None if there is none."""
    text, finish = "" if sample.text is None else sample.text.text, sample.shown_finish
    if cursor.text is None:
        num_known = len(sample.token_ids)
        if cursor.token > num_known:
            if finish is None:
                return None
            if finish.detail not in _IMPOSED_ENDS:
                raise DataLossError(f"sample {index} ended after {num_known} tokens, before token {cursor.token}")
            # It was being computed again, and the client has more of it.
            cursor.done = True
            return SampleChunk(index, cursor.token, [], "", 0, (), finish, _SAMPLE_BYTES, is_whole=True)
        cursor.text = sample.text.text_ends[cursor.token - 1] if sample.text is not None and cursor.token else 0
    start, text_start = cursor.token, cursor.text
    num_tokens, num_chars = map(max, sample.shown_ends(), (start, text_start))
    if start == num_tokens and text_start == num_chars and finish is None:
        return None
    token_end, text_end, num_bytes = _fit(sample, (start, text_start), num_tokens, num_chars, max_bytes)
    is_whole = token_end == num_tokens and text_end == num_chars
    finish = finish if is_whole else None
    cursor.token, cursor.text, cursor.done = token_end, text_end, finish is not None
    return SampleChunk(
        sample_index=index,
        first_token_index=start,
        token_ids=sample.token_ids[start:token_end],
        text=text[text_start:text_end],
        text_offset=text_start,
        logprobs=sample.logprobs[start:token_end] if sample.logprobs else (),
        finish=finish,
        num_bytes=num_bytes,
        is_whole=is_whole,
    )


def _fit(
    sample: LiveSample, start: tuple[int, int], num_tokens: int, num_chars: int, max_bytes: int
) -> tuple[int, int, int]:
    """The end token index and end character index of a chunk of at most `max_bytes`, and its size in bytes.

    `start`: its first token index and first character index.
    """
    first_token, first_char = start
    token_end, text_end = num_tokens, num_chars
    num_bytes = _num_bytes(sample, token_end - first_token, text_end - first_char)
    while num_bytes > max_bytes and token_end - first_token > 1:
        token_end = first_token + (token_end - first_token) // 2
        text_end = sample.text.text_ends[token_end - 1] if sample.text is not None else 0
        num_bytes = _num_bytes(sample, token_end - first_token, text_end - first_char)
    return token_end, text_end, num_bytes


def _num_bytes(sample: LiveSample, num_tokens: int, num_chars: int) -> int:
    per_token = _TOKEN_BYTES
    if sample.logprobs:
        per_token += _LOGPROB_BYTES + _TOP_LOGPROB_BYTES * len(sample.logprobs[0].top_token_ids)
    return _SAMPLE_BYTES + num_tokens * per_token + num_chars * _CHAR_BYTES
