"""What may become of a request: the output of an undisturbed run, or a part of it if somebody ended the request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cadenza.errors import CadenzaError, NotFoundError, RequestLostError

_LATE_S = 0.05


@dataclass(slots=True)
class Outcome:
    """One request, and what its client has."""

    request_id: str
    body: int
    """Its place in the catalogue."""
    way: str
    """How its client reads it."""
    searches: bool
    """Beams or best_of: nothing is shown before the end, and samples of a part are not parts of the samples."""
    draws_seed: bool
    began_s: float
    ended_s: float = 0.0
    content: dict[str, Any] | None = None
    """What has come, in the form of `requests.content`; None: nothing."""
    finished: bool = False
    error: Exception | None = None
    ended_by: set[str] = field(default_factory=set)
    """What has happened to it: "cancel", "leave", "deadline", "poison", "clock jump"."""
    timeout_s: float | None = None


class Violation(Exception):
    """A broken promise."""


def check(outcome: Outcome, expected: dict[str, Any] | None) -> None:
    """Raise Violation unless this is allowed; expected: of the undisturbed run, if it is known."""
    if "poison" in outcome.ended_by:
        _check_poison(outcome)
        return
    _check_end(outcome)
    if outcome.content is None or expected is None:
        return
    whole = not any(sample["finish"] in (None, "abort", "aborted", "deadline") for sample in outcome.content["samples"])
    if outcome.finished and whole:
        _require_equal(outcome.content, expected)
    elif not outcome.searches:
        _check_part(outcome.content, expected)


def _check_poison(outcome: Outcome) -> None:
    finishes = [sample["finish"] for sample in outcome.content["samples"]] if outcome.content else []
    if outcome.error is not None or finishes != ["executor_error"]:
        raise Violation(f"the poisonous request ended with {outcome.error!r}, {finishes}")


def _check_end(outcome: Outcome) -> None:
    if outcome.error is not None:
        gone = isinstance(outcome.error, (NotFoundError, RequestLostError)) and outcome.ended_by & {"cancel", "leave"}
        if not gone:
            kind = "" if isinstance(outcome.error, CadenzaError) else "not even a CadenzaError: "
            raise Violation(f"it failed: {kind}{outcome.error!r}")
        return
    if not outcome.finished:
        if "leave" not in outcome.ended_by:
            raise Violation("it never ended")
        return
    assert outcome.content is not None
    for sample in outcome.content["samples"]:
        reason, finish = sample["reason"], sample["finish"]
        if finish is None:
            raise Violation(f"sample {sample['index']} has no finish")
        if finish == "deadline":
            _check_deadline(outcome)
        elif reason == "abort":
            if not outcome.ended_by & {"cancel", "leave"}:
                raise Violation("it was aborted, and nobody had done that")
        elif reason == "error":
            raise Violation(f"it ended with {finish}")


def _check_deadline(outcome: Outcome) -> None:
    if outcome.timeout_s is None:
        raise Violation("it ended by a deadline, and has none")
    early_s = outcome.timeout_s - (outcome.ended_s - outcome.began_s)
    # The journal keeps deadlines in wall time; so a clock that jumps while no scheduler runs moves them.
    if early_s > _LATE_S and "clock jump" not in outcome.ended_by:
        raise Violation(f"its deadline came {early_s:.2f} s too early")


def _require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "samples":
            for mine, theirs in zip(found["samples"], value, strict=True):
                for field_name in theirs:
                    if mine[field_name] != theirs[field_name]:
                        difference = f"is {mine[field_name]!r}, not {theirs[field_name]!r}"
                        raise Violation(f"{field_name} of sample {mine['index']} {difference}")
        elif found[name] != value:
            raise Violation(f"{name} is {found[name]!r}, not {value!r}")


def _check_part(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All that has come begins as the undisturbed run's does."""
    wholes = {sample["index"]: sample for sample in expected["samples"]}
    rows = found["prompt_logprobs"] or []
    if rows and expected["prompt_logprobs"][: len(rows)] != rows:
        raise Violation("prompt logprobs of a part differ")
    for sample in found["samples"]:
        whole = wholes[sample["index"]]
        for name in ("token_ids", "text", "logprobs"):
            part, of = sample[name] or type(whole[name] or [])(), whole[name] or []
            if isinstance(part, str) and sample["finish"] is not None:
                # A character that was begun when the request was ended comes out as U+FFFD.
                part = part.removesuffix("\ufffd")
            if len(part) > 0 and of[: len(part)] != part:
                raise Violation(f"{name} of sample {sample['index']} is {part!r}, not a part of {of!r}")
        natural = sample["finish"] not in (None, "deadline") and sample["reason"] != "abort"
        if natural and sample != whole:
            raise Violation(f"sample {sample['index']} is {sample!r}, not {whole!r}")
