"""Answers of a server with OpenAI's API: the events of a stream, and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cadenza_loadtest.driving.live import INCOMPLETE, RequestInFlight

BAD_RESPONSE = "BAD_RESPONSE"
"""The response is not a stream of this API's JSON events."""
SERVER_ERROR = "SERVER_ERROR"
"""An error event without an HTTP status."""


class StreamedAnswer:
    """Applies the events of one stream to its request."""

    def __init__(self, live: RequestInFlight) -> None:
        self._live = live
        self._usage: Mapping[str, Any] = {}
        self._now_s = 0.0
        self._silent_end_s: float | None = None
        self._complete = False

    def take(self, data: str, now_s: float) -> None:
        """Apply the data of an event received at `now_s`."""
        self._now_s = now_s
        if data == "[DONE]":
            self._complete = True
            return
        event = _json(data)
        if not isinstance(event, dict):
            self._live.failed(BAD_RESPONSE, data)
        elif event.get("error") or event.get("object") == "error":
            error = event.get("error") or event
            self._live.failed(_error_code(error), message_in(error))
        else:
            if isinstance(event.get("usage"), dict):
                self._usage = event["usage"]
            # The chunk with the usage has no choices.
            for choice in event.get("choices") or ():
                if isinstance(choice, dict):
                    self._choice(choice)

    def end(self) -> None:
        """The stream has ended."""
        live, usage = self._live, self._usage
        total = usage.get("completion_tokens")
        if isinstance(total, int) and total > 0:
            self._count_unseen(total - live.num_output_tokens)
            live.num_output_tokens = total
        if isinstance(usage.get("prompt_tokens"), int):
            live.num_prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            live.num_cached_tokens = details["cached_tokens"]
        if not self._complete:
            live.failed(INCOMPLETE, "the stream ended before the answer did")

    def _count_unseen(self, count: int) -> None:
        """Count tokens that only the usage reports; they arrived with an end event that showed none, as EOS does.

        Without such an event they arrived at unknown times between the others, or, if there are no others, with the
        usage.
        """
        when_s = self._silent_end_s
        if when_s is None and not self._live.num_output_tokens:
            when_s = self._now_s
        if count > 0 and when_s is not None:
            self._live.tokens(when_s, count, gap=count == 1)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        """Count the tokens of one choice of an event."""
        is_first_sample = not choice.get("index")
        message = choice["delta"] if isinstance(choice.get("delta"), dict) else choice
        text = (
            message.get("content")
            or message.get("text")
            or message.get("reasoning_content")
            or message.get("reasoning")
        )
        token_ids = choice.get("token_ids")
        if self._live.keep_output and is_first_sample:
            self._live.output_ids.extend(token_ids or ())
            self._live.output_text.append(text if isinstance(text, str) else "")
        count = len(token_ids) if isinstance(token_ids, list) else int(bool(text) or _is_held_back(choice, message))
        if choice.get("finish_reason"):
            self._complete = True
            self._silent_end_s = None if count else self._now_s
        if count:
            # Each sample has its own events: only the gaps of the first sample are inter-token latencies.
            self._live.tokens(self._now_s, count, gap=is_first_sample)


def _is_held_back(choice: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether an empty piece of text stands for a token: an invisible one, or part of an incomplete character.

    The first event of a chat has a role and the last one of an answer has a finish reason: these carry no token.
    """
    is_empty = "" in (message.get("content"), message.get("text"))
    return is_empty and "role" not in message and not choice.get("finish_reason")


def message_in(answer: object) -> str:
    """The readable message in a server's error, wherever it is; the whole error as JSON if there is none."""
    if not isinstance(answer, dict):
        return answer if isinstance(answer, str) else json.dumps(answer)
    for name in ("error", "message", "detail"):
        if answer.get(name):
            return message_in(answer[name])
    return json.dumps(answer)


def message_of(body: bytes) -> str:
    """The error's message in an answer that is not a stream, or the text itself."""
    text = body.decode("utf-8", "replace")
    answer = _json(text)
    return text if answer is None else message_in(answer)


def _json(text: str) -> Any:
    """The parsed JSON; None for invalid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _error_code(error: object) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return f"HTTP_{code}" if isinstance(code, int) and 400 <= code < 600 else SERVER_ERROR
