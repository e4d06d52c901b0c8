"""The parts of the table of sampling fields: the check of a field, and its form in messages to executors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.plan_loop.ports import ModelDescription

PATH = "sampling_params."


@dataclass(frozen=True, slots=True)
class CheckContext:
    """The properties of the service that checks depend on."""

    model: ModelDescription
    has_tokenizer: bool


Check = Callable[[str, Any, CheckContext], None]
"""(path, value, context): raises RequestRejectedError or PreconditionError, which name the path."""
Form = Callable[[Any, ModelDescription], Any]
"""(value, model): the value of the SequenceSampling field of the same name."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One row of the table: the rule of a sampling field; its default is in the dataclass field."""

    check: Check | None = None
    """None: every value of its type is valid."""
    form: Form | None = None
    """None: the field is not sent under its own name; `requests.sampling` converts it."""
    is_off: Callable[[Any], bool] | None = None
    """Whether a value has no effect and is not sent to executors. None: only the default has no effect."""
    needs_draw: bool = False
    """Whether only a draw reads the field: beam search accepts only its default and values without effect."""
    edits_logits: bool = False
    """Whether the field needs an executor with logits processors."""


def finite(path: str, value: float) -> float:
    """Return the value; raises RequestRejectedError for NaN and infinities."""
    if not math.isfinite(value):
        raise RequestRejectedError(path, f"must be a finite number, not {value}")
    return value


def any_finite(path: str, value: float, _: CheckContext) -> None:
    """Check that a number is finite."""
    finite(path, value)


def between(low: float, high: float) -> Check:
    """Return a check for a finite number from low to high."""

    def check(path: str, value: float, _: CheckContext) -> None:
        if not low <= finite(path, value) <= high:
            raise RequestRejectedError(path, f"must be {low:g} to {high!r}, not {value}")

    return check


def over_zero(high: float = math.inf) -> Check:
    """Return a check for a finite number over 0, at most `high`."""
    limit = "" if math.isinf(high) else f" and at most {high:g}"

    def check(path: str, value: float, _: CheckContext) -> None:
        if not 0 < finite(path, value) <= high:
            raise RequestRejectedError(path, f"must be over 0{limit}, not {value}")

    return check


def at_least(low: int) -> Check:
    """Return a check for an integer of at least `low`."""

    def check(path: str, value: int, _: CheckContext) -> None:
        if value < low:
            raise RequestRejectedError(path, f"must be {low} or more, not {value}")

    return check


def words(instead: str) -> Check:
    """Return a check for non-empty texts, which need a tokenizer; `instead`: the alternative without a tokenizer."""

    def check(path: str, value: Sequence[str], context: CheckContext) -> None:
        for index, word in enumerate(value):
            if not word:
                raise RequestRejectedError(f"{path}[{index}]", "must not be empty")
        if value and not context.has_tokenizer:
            name = path.removeprefix(PATH)
            raise PreconditionError(path, f"{name} needs a tokenizer, and the service has none: {instead}")

    return check


def token_ids(path: str, value: Sequence[int], context: CheckContext) -> None:
    """Check that token ids are below the vocabulary size."""
    if value and max(value) >= context.model.vocab_size:
        for index, token_id in enumerate(value):
            _check_token_id(f"{path}[{index}]", token_id, context)


def biases(path: str, value: Sequence[tuple[int, float]], context: CheckContext) -> None:
    """Check pairs of a token id and a bias from -100 to 100."""
    if not value or (max(value)[0] < context.model.vocab_size and all(-100 <= bias <= 100 for _, bias in value)):
        return
    for token_id, bias in value:
        of_token = f"{path}[{token_id}]"
        _check_token_id(of_token, token_id, context)
        between(-100, 100)(of_token, bias, context)


def top_logprobs(path: str, value: int | None, context: CheckContext) -> None:
    """Check a number of logprobs against the executor's limit."""
    resolve_logprobs(path, value, context.model)


def resolve_logprobs(path: str, value: int | None, model: ModelDescription) -> int | None:
    """Return the number of top logprobs per token; -1 means the whole vocabulary. Raises RequestRejectedError."""
    if value is None:
        return None
    limit = min(model.max_logprobs, model.vocab_size)
    if value == -1:
        if limit < model.vocab_size:
            raise RequestRejectedError(
                path, f"-1 requests all {model.vocab_size} token ids, but the executor returns at most {limit}"
            )
        return model.vocab_size
    if not 0 <= value <= limit:
        raise RequestRejectedError(path, f"must be 0 to {limit} or -1, not {value}")
    return value


def unchanged(value: Any, _: ModelDescription) -> Any:
    """Return a number that is sent unchanged."""
    return value


def at_least_if_on(low: float) -> Form:
    """Return a form that keeps 0 and raises other numbers to `low`, so that 32-bit floats do not round them to 0."""
    return lambda value, _: max(value, low) if value else 0.0


def clamped(low: float, high: float) -> Form:
    """Return a form that clamps a number to these bounds."""
    return lambda value, _: min(max(value, low), high)


def _check_token_id(path: str, token_id: int, context: CheckContext) -> None:
    if token_id >= context.model.vocab_size:
        raise RequestRejectedError(path, f"{token_id} is not below the vocabulary size {context.model.vocab_size}")
