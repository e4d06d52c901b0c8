"""Where a client resumes a request's stream, checked against the request's output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.engine.live_request import LiveRequest, LiveSample


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """The next token of one sample to send; `finished`: nothing more of it, not even its finish."""

    sample_index: int
    token_index: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Positions of some samples, the others start at 0; see ResumePoint in generation.proto."""

    positions: tuple[SamplePosition, ...] = ()
    prompt_logprobs_start: int = 0

    @property
    def after_output(self) -> bool:
        """Whether the client has received output, and so all prompt logprobs before."""
        return any(position.token_index or position.finished for position in self.positions)

    def prompt_logprobs_end(self, live: LiveRequest) -> int:
        """Index after the last prompt token whose logprobs the client has; 0: none."""
        if self.prompt_logprobs_start:
            return self.prompt_logprobs_start
        return len(live.request.spec.prompt_token_ids) if self.after_output else 0


def check_resume_point(point: ResumePoint, live: LiveRequest) -> None:
    """Check that the positions exist in the request's output; raises RequestRejectedError with the field's path.

    While a restored request has not caught up with the output that it had before the restart, positions may be ahead.
    """
    for path, message in _errors(point, live):
        raise RequestRejectedError(f"resume.{path}", message)


def _errors(point: ResumePoint, live: LiveRequest) -> Iterator[tuple[str, str]]:
    """(path below `resume`, message) of each error."""
    seen: set[int] = set()
    for number, position in enumerate(point.positions):
        path, index = f"positions[{number}]", position.sample_index
        if index >= live.num_returned:
            yield f"{path}.sample_index", f"must be below {live.num_returned}, the number of samples, not {index}"
            return
        if index in seen:
            yield f"{path}.sample_index", f"sample {index} is listed twice"
        seen.add(index)
        if not live.catches_up:
            sample = live.returned[index] if live.returned else None
            yield from ((f"{path}.{name}", message) for name, message in _position_errors(position, sample))
    start = point.prompt_logprobs_start
    if start:
        known = live.prompt_logprobs
        end = 0 if known is None else len(live.request.spec.prompt_token_ids) if live.catches_up else known.end
        if start > end:
            yield "prompt_logprobs_start", f"is {start}, beyond the prompt logprobs so far, which end at {end}"


def _position_errors(position: SamplePosition, sample: LiveSample | None) -> Iterator[tuple[str, str]]:
    """(field, message) of each error in one position; `sample` is None while no sample can be sent."""
    num_tokens = 0 if sample is None else len(sample.token_ids)
    if position.token_index > num_tokens:
        yield "token_index", f"is {position.token_index}, beyond the sample's {num_tokens} tokens so far"
    if position.finished and (sample is None or sample.finish is None):
        yield "finished", "the sample has not finished"
