"""Fields of a request as SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from cadenza.sampling_params import SamplingParams
from gateway_svc.fields.constraints import Constraint
from gateway_svc.fields.field import check_keys, check_kind, wrong_value
from gateway_svc.fields.limits import MAX_CONSTRAINT_CHARS, MAX_ENTRIES, check_entries
from gateway_svc.http.errors import ApiError, bad_request

_SAME = frozenset(each.name for each in fields(SamplingParams)) - {
    "logprobs", "max_tokens", "n", "beam_width", "structured_outputs",
}  # fmt: skip
_DRAWS = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
_LIMITS = frozenset(("max_tokens",))
MAX_LOGPROBS = 20
"""Most top logprobs of a token, as with OpenAI and by vLLM's default: with a whole vocabulary for each, an answer
would have gigabytes."""
_LEAST_SEED = -(2**63)
"""OpenAI's seeds have signs: a negative one is the same bits without."""
_OF_BEAMS = {"length_penalty": 1.0, "early_stopping": False}
"""Fields for beams alone, with their defaults."""
MAX_CHOICES = 64
"""As the scheduler has it (scheduler_svc/requests/sample_counts.py)."""
_NO_CONSTRAINT = Constraint()


def sampling_params(
    values: Mapping[str, Any],
    renamed: Mapping[str, str] | None = None,
    constraint: Constraint = _NO_CONSTRAINT,
    **own: Any,
) -> SamplingParams:
    """The parameters; `own`: those that are not taken as they are.

    `renamed`: the name in the API of parameters that have another one there. Raises ApiError that names the field.
    """
    renamed = {"structured_outputs": constraint.field, **(renamed or {})}
    given = {name: value for name, value in values.items() if name in _SAME} | own
    given["structured_outputs"] = constraint.form
    for name in ("logprobs", "prompt_logprobs"):
        number = given.get(name)
        if number is not None and not -1 < number <= MAX_LOGPROBS:
            raise wrong_value(renamed.get(name, name), f"must be 0 to {MAX_LOGPROBS}", number)
    seed = given.get("seed")
    if seed is not None and _LEAST_SEED <= seed < -1:
        given["seed"] = seed + 2**64
    given |= _beams(values, given)
    check_lists(given, renamed)
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        message = str(error)
        name = message.partition(" ")[0].partition(".")[0]
        field = renamed.get(name, name)
        raise bad_request(f"{field}{message[len(name) :]}"[:500], field) from None
    check_constraint(params, constraint.field)
    return params


def check_lists(given: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
    """Raise ApiError for parameters with more entries than the scheduler takes."""
    for name, most in MAX_ENTRIES.items():
        value = given.get(name)
        if isinstance(value, (list, dict)):
            check_entries(renamed.get(name, name), value, most)


def check_constraint(params: SamplingParams, field: str) -> None:
    """Raise ApiError for a constraint with a longer text than the scheduler takes."""
    form = params.structured_outputs
    for text in () if form is None else (form.json, form.regex, form.grammar, form.structural_tag):
        if isinstance(text, str) and len(text) > MAX_CONSTRAINT_CHARS:
            message = f"{field} has {len(text)} characters; at most {MAX_CONSTRAINT_CHARS} are allowed"
            raise bad_request(message, field)


def unset_sampling(values: Mapping[str, Any], max_tokens: int | None = None) -> frozenset[str]:
    """The parameters of a request for which the model's own files may speak (ModelInfo.default_sampling)."""
    names = _LIMITS if values.get("use_beam_search") else _DRAWS | _LIMITS
    given = {name for name in names if values.get(name) is not None}
    return names - given - (_LIMITS if max_tokens is not None else frozenset())


def _beams(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's beam search: n beams. One beam is greedy."""
    if not values.get("use_beam_search"):
        for name, default in _OF_BEAMS.items():
            if values.get(name, default) != default:
                raise bad_request(f"{name} needs use_beam_search=true", name)
        return {}
    n = int(given.get("n") or 1)
    if n == 1:
        return {"temperature": 0.0}
    best_of = given.get("best_of")
    return {"beam_width": n if best_of is None else max(n, int(best_of)), "best_of": None}


def number_of_choices(values: Mapping[str, Any]) -> int:
    """n; raises ApiError."""
    n = int(values.get("n", 1))
    check_number_of_choices(n)
    return n


def check_number_of_choices(n: int, field: str = "n") -> None:
    """Raise ApiError for a number that the scheduler refuses: answers have a place for each choice from the start."""
    if not 1 <= n <= MAX_CHOICES:
        raise wrong_value(field, f"must be 1 to {MAX_CHOICES}", n)


def stream_options(values: Mapping[str, Any]) -> tuple[bool, bool]:
    """(include_usage, continuous_usage_stats); raises ApiError."""
    options = values.get("stream_options")
    if options is None:
        return False, False
    check_stream_options(values, ("include_usage", "continuous_usage_stats"))
    return bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))


def check_stream_options(values: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Raise ApiError for stream_options that are not known, or of a wrong type, or without a stream."""
    options = values.get("stream_options")
    if options is None:
        return
    if not values.get("stream"):
        raise bad_request("stream_options needs stream=true", "stream_options")
    check_keys("stream_options", options, (*known, "include_obfuscation"), "stream_options")
    for name, value in options.items():
        if value is not None:
            check_kind(f"stream_options.{name}", "a boolean", value)
    if options.get("include_obfuscation"):
        raise bad_request(
            "stream_options.include_obfuscation is not supported: chunks are not padded", "stream_options"
        )


def answer_id(values: Mapping[str, Any], prefix: str, unique: str) -> str:
    """The id of an answer; raises ApiError for a request_id that cannot be in one."""
    given = values.get("request_id")
    if given is None:
        return f"{prefix}-{unique}"
    if not 0 < len(given) <= 128 or not given.isprintable():
        raise wrong_value("request_id", "must have 1 to 128 printable characters", given)
    return f"{prefix}-{given}"


def require(values: Mapping[str, Any], name: str) -> Any:
    """A field that must be given; raises ApiError."""
    if name not in values:
        raise bad_request(f"{name} is missing", name)
    return values[name]


def utf8(value: str, name: str) -> str:
    """A text without lone surrogates; raises ApiError."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{name} holds a lone surrogate, which is no character", param=name) from None
    return value
