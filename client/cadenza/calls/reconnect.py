"""When a client goes on after a lost connection, how long it tries, and where the output goes on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from cadenza.errors import CadenzaError, DamagedStreamError, UnavailableError, has_server_details
from cadenza.v1 import generation_pb2
from cadenza_common.wire.limits import MAX_GRACE_S

RECONNECT_TIMEOUT_S = 30.0
"""Default time for which a client tries to reach a server again."""
_GRACE_FACTOR = 2
"""The server may notice the loss before the client does, and the last attempt may take its time."""
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0
_MAX_DOUBLINGS = 10
_Message = TypeVar("_Message", generation_pb2.GenerateResponse, generation_pb2.SessionResponse)
_MAX_TAKEOVERS = 3
_MAX_DAMAGED = 10
_START = generation_pb2.SamplePosition()


def checked_timeout(value: object) -> float:
    """Return a reconnect_timeout_s; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"reconnect_timeout_s must be 0 or more seconds, not {value!r}")
    return float(value)


def grace_s(reconnect_timeout_s: float) -> float:
    """The resume_grace_s of requests of a client that tries for this long."""
    return min(_GRACE_FACTOR * reconnect_timeout_s, MAX_GRACE_S)


def is_lost_connection(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call may go on elsewhere or later: the connection broke, or the server starts, drains or stops."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return True
    # gRPC itself says this of streams that a dying server or a broken network has reset.
    is_reset = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    is_removed = error.code() is grpc.StatusCode.UNKNOWN and "Stream removed" in (error.details() or "")
    return (is_reset or is_removed) and not has_server_details(error)


def whole_message(message: object, kind: type[_Message], ended: str) -> _Message:
    """The message that a stream has brought; raises UnavailableError with the text `ended` at its end.

    gRPC returns None for a message that cannot be parsed: that raises DamagedStreamError.
    """
    if isinstance(message, kind):
        return message
    raise DamagedStreamError("a message cannot be read") if message is None else UnavailableError(ended)


class Attempts:
    """Decides after each lost connection whether to try again, and waits before.

    The waits grow exponentially with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog,
    2015), so that the clients of a restarted server do not come all at once. The time limit counts from the loss and
    starts anew with each response. The first one comes as soon as the server has accepted what was sent again.
    """

    def __init__(
        self,
        timeout_s: float,
        keeps_trying: Callable[[], bool],
        on_response: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`keeps_trying`: whether there is a point in waiting for the server."""
        self._clock = clock
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._keeps_trying = keeps_trying
        self._report = on_response
        self._lost_at: float | None = None
        self._count = 0
        self._num_takeovers = 0
        self._num_damaged = 0
        self.has_reconnected = False

    def on_response(self) -> None:
        """The server has sent something: the connection is there."""
        self._lost_at = None
        self._count = 0
        self._report()

    def on_damage(self) -> None:
        """Something has damaged a stream: after several times there is no other attempt."""
        self._num_damaged += 1

    def next_delay(self) -> float | None:
        """Seconds to wait before the next attempt; None if there is to be none."""
        now = self._clock()
        if self._lost_at is None:
            self._lost_at = now
        left_s = self._lost_at + self._timeout_s - now
        if left_s <= 0 or self._num_damaged > _MAX_DAMAGED or not self._keeps_trying():
            return None
        longest = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**self._count)
        self._count = min(self._count + 1, _MAX_DOUBLINGS)
        self.has_reconnected = True
        return min(left_s, random.uniform(0, longest))

    async def wait(self, error: CadenzaError) -> None:
        """Wait before the next attempt; raises `error` if there is to be none."""
        delay_s = self.next_delay()
        if delay_s is None:
            raise error from None
        await self._sleep(delay_s)
        if not self._keeps_trying():
            raise error from None

    def takes_back(self, code: grpc.StatusCode | None) -> bool:
        """Whether to take over a request that another stream has taken over: it may be this client's own.

        What a client sent before it lost its connection may reach a busy server after what it sent on the next one.
        """
        if code is not grpc.StatusCode.ABORTED or not self.has_reconnected:
            return False
        self._num_takeovers += 1
        return self._num_takeovers <= _MAX_TAKEOVERS


class Positions:
    """Counts the output of one request: finds what is lost or repeated, and says what to resume."""

    __slots__ = ("_num_chars", "_prompt_end", "_samples", "_who", "finished", "has_prompt_ids", "has_responses")

    def __init__(self, request_id: str) -> None:
        self._who = f"request {request_id}"
        self._samples: dict[int, generation_pb2.SamplePosition] = {}
        self._num_chars: dict[int, int] = {}  # code points of the text of each sample
        self._prompt_end: int | None = None  # where prompt logprobs go on
        self.finished = False  # the last response has come
        self.has_responses = False
        self.has_prompt_ids = False  # the server has sent the prompt's token ids

    @property
    def has_output(self) -> bool:
        """Whether there are tokens, a finish or prompt logprobs."""
        return bool(self._samples) or self._prompt_end is not None

    def advance(self, response: generation_pb2.GenerateResponse) -> None:
        """Count a response; raises DamagedStreamError, and counts nothing, if output before it is missing or
        repeated."""
        for output in response.outputs:
            self._check(output)
        if response.HasField("prompt_logprobs"):
            # The first prompt token has no logprobs, but a place in the list: the first part begins at 1.
            skipped, known = int(response.prompt_logprobs_start == 1), self._prompt_end or 0
            if (start := response.prompt_logprobs_start - skipped) != known:
                raise DamagedStreamError(
                    f"{self._who}: the server sent prompt logprobs from {start} where {known or 1} was next"
                )
            self._prompt_end = known + skipped + len(response.prompt_logprobs.chosen_logprobs)
        for output in response.outputs:
            index = output.sample_index
            sample = self._samples.get(index)
            if sample is None:
                sample = self._samples[index] = generation_pb2.SamplePosition(sample_index=index)
            sample.token_index += len(output.token_ids)
            sample.finished = output.HasField("finish")
            self._num_chars[index] = self._num_chars.get(index, 0) + len(output.text)
        self.has_responses = True
        if response.HasField("info") and response.info.prompt_token_ids:
            self.has_prompt_ids = True
        if response.HasField("stats"):
            self.finished = True

    def message(self, request: generation_pb2.GenerateRequest, *, again: bool) -> generation_pb2.GenerateRequest:
        """The message that brings the rest of the output; the request itself if there is no output yet.

        again: whether it was sent before. Then the server is to say at once that it has it, long before there is
        output: until it answers, a client takes it for away.
        """
        if not self.has_output:
            request.starts_at_once = again
            return request
        positions = [sample for _, sample in sorted(self._samples.items())]
        start = self._prompt_end or 0
        return generation_pb2.GenerateRequest(
            request_id=request.request_id,
            output_mode=request.output_mode,
            return_prompt_token_ids=request.return_prompt_token_ids and not self.has_prompt_ids,
            return_text_ends=request.return_text_ends,
            resume=generation_pb2.ResumePoint(positions=positions, prompt_logprobs_start=start),
        )

    def _check(self, output: generation_pb2.SampleOutput) -> None:
        known = self._samples.get(output.sample_index, _START)
        if known.finished:
            what = "output after its finish"
        elif output.token_ids and output.first_token_index != known.token_index:
            what = f"token {output.first_token_index} where {known.token_index} was next"
        elif output.text and output.text_offset != (num_chars := self._num_chars.get(output.sample_index, 0)):
            what = f"text from {output.text_offset} where {num_chars} was next"
        else:
            return
        raise DamagedStreamError(f"{self._who}, sample {output.sample_index}: the server sent {what}")
