"""What the table of sampling fields is made of: how a field is checked, and in which form it travels to an executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.plan_loop.ports import ModelDescription

PATH = "sampling_params."


@dataclass(frozen=True, slots=True)
class Served:
    """What checks depend on beside the request."""

    model: ModelDescription
    has_tokenizer: bool


Check = Callable[[str, Any, Served], None]
"""(path, value, served): raises RequestRejectedError or PreconditionError, which name the path."""
Form = Callable[[Any, ModelDescription], Any]
"""(value, model): the value of the SequenceSampling field of the same name."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One row of the table: all that the scheduler knows of a sampling field beside its default."""

    check: Check | None = None
    """None: every value of its type is fine."""
    form: Form | None = None
    """None: the field does not travel by its own name; `requests.sampling` says what becomes of it."""
    is_off: Callable[[Any], bool] | None = None
    """Has this value no effect: then it is not sent to executors. None: only the default has no effect."""
    needs_draw: bool = False
    """It steers a draw, which a beam search has not: there only the default and values without effect are accepted."""
    edits_logits: bool = False
    """It needs an executor with logits processors."""


def finite(path: str, value: float) -> float:
    """The value; raises RequestRejectedError for NaN and infinities."""
    if not math.isfinite(value):
        raise RequestRejectedError(path, f"must be a finite number, not {value}")
    return value


def any_finite(path: str, value: float, _: Served) -> None:
    """Check that a number is finite."""
    finite(path, value)


def between(low: float, high: float) -> Check:
    """A finite number from low to high."""

    def check(path: str, value: float, _: Served) -> None:
        if not low <= finite(path, value) <= high:
            raise RequestRejectedError(path, f"must be {low:g} to {high!r}, not {value}")

    return check


def over_zero(high: float = math.inf) -> Check:
    """A finite number over 0, at most `high`."""
    limit = "" if math.isinf(high) else f" and at most {high:g}"

    def check(path: str, value: float, _: Served) -> None:
        if not 0 < finite(path, value) <= high:
            raise RequestRejectedError(path, f"must be over 0{limit}, not {value}")

    return check


def at_least(low: int) -> Check:
    """An integer of at least `low`."""

    def check(path: str, value: int, _: Served) -> None:
        if value < low:
            raise RequestRejectedError(path, f"must be {low} or more, not {value}")

    return check


def words(instead: str) -> Check:
    """Texts that are not empty, which need a tokenizer; `instead`: what to do without one."""

    def check(path: str, value: Sequence[str], served: Served) -> None:
        for index, word in enumerate(value):
            if not word:
                raise RequestRejectedError(f"{path}[{index}]", "must not be empty")
        if value and not served.has_tokenizer:
            name = path.removeprefix(PATH)
            raise PreconditionError(path, f"{name} needs a tokenizer, and the service has none: {instead}")

    return check


def token_ids(path: str, value: Sequence[int], served: Served) -> None:
    """Check that token ids are below the vocabulary size."""
    for index, token_id in enumerate(value):
        _check_token_id(f"{path}[{index}]", token_id, served)


def biases(path: str, value: Sequence[tuple[int, float]], served: Served) -> None:
    """Check pairs of a token id and a bias from -100 to 100."""
    for token_id, bias in value:
        of_token = f"{path}[{token_id}]"
        _check_token_id(of_token, token_id, served)
        between(-100, 100)(of_token, bias, served)


def top_logprobs(path: str, value: int | None, served: Served) -> None:
    """Check a number of logprobs against the executor's limit."""
    resolve_logprobs(path, value, served.model)


def resolve_logprobs(path: str, value: int | None, model: ModelDescription) -> int | None:
    """Number of top logprobs per token; -1 means the whole vocabulary. Raises RequestRejectedError."""
    if value is None:
        return None
    limit = min(model.max_logprobs, model.vocab_size)
    if value == -1:
        if limit < model.vocab_size:
            raise RequestRejectedError(
                path, f"-1 asks for all {model.vocab_size} token ids, but the executor returns at most {limit}"
            )
        return model.vocab_size
    if not 0 <= value <= limit:
        raise RequestRejectedError(path, f"must be 0 to {limit} or -1, not {value}")
    return value


def as_it_is(value: Any, _: ModelDescription) -> Any:
    """The form of a number that travels unchanged."""
    return value


def at_least_if_on(low: float) -> Form:
    """0, or a number that is raised to `low`: 32-bit floats must not make 0 of it."""
    return lambda value, _: max(value, low) if value else 0.0


def clamped(low: float, high: float) -> Form:
    """A number within these bounds."""
    return lambda value, _: min(max(value, low), high)


def _check_token_id(path: str, token_id: int, served: Served) -> None:
    if token_id >= served.model.vocab_size:
        raise RequestRejectedError(path, f"{token_id} is not below the vocabulary size {served.model.vocab_size}")
