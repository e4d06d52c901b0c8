"""What a server with OpenAI's API answers: the events of a stream, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cadenza.loadtest.live import LiveRequest

INCOMPLETE = "INCOMPLETE"
"""The stream ended in the middle."""
BAD_RESPONSE = "BAD_RESPONSE"
"""What came is no stream of JSON events of this API."""
SERVER_ERROR = "SERVER_ERROR"
"""An error event without an HTTP status."""


class Answer:
    """What the events of one stream say of a request."""

    def __init__(self, live: LiveRequest) -> None:
        self._live = live
        self._usage: Mapping[str, Any] = {}
        self._now_s = 0.0
        self._silent_end_s: float | None = None
        self._complete = False

    def take(self, data: str, now_s: float) -> None:
        """An event's data, here at `now_s`."""
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
        """Tokens that only the usage tells of came with an end that showed none: an end of text does.

        Without such an end they came somewhere between the others; where there are no others, with the usage.
        """
        when_s = self._silent_end_s
        if when_s is None and not self._live.num_output_tokens:
            when_s = self._now_s
        if count > 0 and when_s is not None:
            self._live.tokens(when_s, count, gap=count == 1)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        """The tokens that one choice of an event brings."""
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
            # Samples come in events of their own: those of the first alone are a token apart.
            self._live.tokens(self._now_s, count, gap=is_first_sample)


def _is_held_back(choice: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Is an empty piece of text a token: one that shows nothing, or a part of a character that is not whole yet.

    The event that opens a chat has a role, the last one of an answer its end: these bring no token of their own.
    """
    is_empty = "" in (message.get("content"), message.get("text"))
    return is_empty and "role" not in message and not choice.get("finish_reason")


def message_in(answer: object) -> str:
    """The words for people in what a server says of an error, wherever it has them; as JSON if nowhere."""
    if not isinstance(answer, dict):
        return answer if isinstance(answer, str) else json.dumps(answer)
    for name in ("error", "message", "detail"):
        if answer.get(name):
            return message_in(answer[name])
    return json.dumps(answer)


def message_of(body: bytes) -> str:
    """Of an answer that is no stream: its error's message, or the text itself."""
    text = body.decode("utf-8", "replace")
    answer = _json(text)
    return text if answer is None else message_in(answer)


def _json(text: str) -> Any:
    """None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _error_code(error: object) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return f"HTTP_{code}" if isinstance(code, int) and 400 <= code < 600 else SERVER_ERROR
