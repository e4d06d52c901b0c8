"""The checker finds every kind of broken promise, and allows what may happen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cadenza.errors import InternalError, RequestLostError, UnavailableError
from tests.chaos.checker import Outcome, Violation, check


def content() -> dict[str, Any]:
    """Two samples; the second one ended by a stop string."""
    samples = [
        {
            "index": index, "text": "abcd", "token_ids": [5, 6, 7, 8], "cumulative_logprob": -2.0,
            "logprobs": [[[token, -0.5, 1, "x"]] for token in (5, 6, 7, 8)],
            "finish": finish, "reason": reason, "stop_reason": None,
        }
        for index, (finish, reason) in enumerate([("max_tokens", "length"), ("stop_string", "stop")])
    ]  # fmt: skip
    return {"seed": 3, "prompt": [1, 2], "prompt_logprobs": None, "num_completion_tokens": 8, "samples": samples}


def outcome(found: dict[str, Any] | None, *ended_by: str, **changes: Any) -> Outcome:
    """Of a stream that has ended after 1 s."""
    values: dict[str, Any] = {"searches": False, "draws_seed": False, "began_s": 1.0, "ended_s": 2.0, "finished": True}
    return Outcome("r", 0, "stream", **values | changes, content=found, ended_by=set(ended_by))


def part(num_tokens: int, finish: str | None, reason: str | None) -> dict[str, Any]:
    """The beginning of both samples."""
    found = content()
    found["num_completion_tokens"] = 2 * num_tokens
    for sample in found["samples"]:
        for name in ("text", "token_ids", "logprobs"):
            sample[name] = sample[name][:num_tokens]
        sample.update(finish=finish, reason=reason, cumulative_logprob=None)
    return found


def change(found: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The same with another value in its last sample."""
    found["samples"][-1][name] = value
    return found


ALLOWED: dict[str, Outcome] = {
    "whole": outcome(content()),
    "cancelled in time": outcome(part(2, "aborted", "abort"), "cancel"),
    "cancelled too late": outcome(content(), "cancel"),
    "left": outcome(part(3, None, None), "leave", finished=False),
    "left before anything came": outcome(None, "leave", finished=False),
    "cancelled while the stream was lost": outcome(
        part(1, None, None), "cancel", finished=False, error=RequestLostError("gone")
    ),
    "past its deadline": outcome(part(2, "deadline", "abort"), timeout_s=1.0),
    "a deadline that the clock has moved": outcome(part(2, "deadline", "abort"), "clock jump", timeout_s=50.0),
    "past its deadline within a character": outcome(
        change(part(2, "deadline", "abort"), "text", "a\ufffd"), timeout_s=1.0
    ),
    "one sample ended, the other was cancelled": outcome(
        change(part(4, "aborted", "abort"), "finish", "aborted"), "cancel"
    ),
    "the beams of a cancelled search": outcome(
        change(part(4, "aborted", "abort"), "token_ids", [9]), "cancel", searches=True
    ),
    "poison": outcome(change({**content(), "samples": content()["samples"][:1]}, "finish", "executor_error"), "poison"),
}  # fmt: skip

BROKEN: dict[str, tuple[Callable[[], Outcome], str]] = {
    "a token differs": (lambda: outcome(change(content(), "token_ids", [5, 6, 7, 9])), "token_ids of sample 1"),
    "a token is lost": (lambda: outcome(change(content(), "token_ids", [5, 6, 7])), "token_ids of sample 1"),
    "a token is repeated": (lambda: outcome(change(content(), "token_ids", [5, 6, 7, 8, 8])), "token_ids of sample 1"),
    "text differs": (lambda: outcome(change(content(), "text", "abce")), "text of sample 1"),
    "a logprob differs": (
        lambda: outcome(change(content(), "logprobs", [*content()["samples"][0]["logprobs"][:3], [[8, -0.6, 1, "x"]]])),
        "logprobs of sample 1",
    ),
    "another finish": (lambda: outcome(change(content(), "finish", "eos")), "finish of sample 1"),
    "another seed": (lambda: outcome({**content(), "seed": 4}), "seed is 4"),
    "no end": (lambda: outcome(part(2, None, None), finished=False), "it never ended"),
    "an end without a finish": (lambda: outcome(part(2, None, None)), "has no finish"),
    "unavailable": (lambda: outcome(None, error=UnavailableError("down")), "it failed"),
    "a lost request that nobody ended": (lambda: outcome(None, error=RequestLostError("gone")), "it failed"),
    "another error of a cancelled one": (lambda: outcome(None, "cancel", error=InternalError("bug")), "it failed"),
    "aborted by nobody": (lambda: outcome(part(2, "aborted", "abort")), "nobody had done that"),
    "an executor's error": (lambda: outcome(part(2, "executor_error", "error")), "ended with executor_error"),
    "a deadline that it does not have": (lambda: outcome(part(2, "deadline", "abort")), "has none"),
    "a deadline too early": (lambda: outcome(part(2, "deadline", "abort"), timeout_s=1.5), "0.50 s too early"),
    "a part that is no part": (
        lambda: outcome(change(part(2, "aborted", "abort"), "token_ids", [5, 7]), "cancel"),
        "not a part of",
    ),
    "a part whose text is no part": (
        lambda: outcome(change(part(2, None, None), "text", "b"), "leave", finished=False),
        "not a part of",
    ),
    "text that differs within a character": (
        lambda: outcome(change(part(2, None, None), "text", "a\ufffd"), "leave", finished=False),
        "not a part of",
    ),
    "a finished sample of a part that differs": (
        lambda: outcome(change(part(2, None, None), "finish", "eos") | {}, "leave", finished=False),
        "sample 1 is",
    ),
    "poison that does not end": (lambda: outcome(content(), "poison"), "the poisonous request ended with"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_may_happen_is_allowed(name: str) -> None:
    check(copy.deepcopy(ALLOWED[name]), content())


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(Violation, match=message):
        check(make(), content())
