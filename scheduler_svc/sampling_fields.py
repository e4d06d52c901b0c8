"""SamplingParams as they came, their checks, and what an executor is told of them. Ranges as in types.proto."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.types import Sampling
from scheduler_svc.ports import ModelDescription

_PATH = "sampling_params."
_FLOAT32_MAX = 3.4028234e38
_MIN_TEMPERATURE = 0.01
"""As in vLLM: what is smaller, but not 0, would overflow the logits, and is raised to this."""
_MIN_TOP_P = 1e-6
"""Keeps the most likely token alone, as any smaller one would; smaller ones could become 0 as 32-bit floats."""


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """SamplingParams as they came; None where 0 or silence means something else."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    n: int = 1
    later_fields: tuple[str, ...] = ()
    """Fields of later waves that are set to something else than their default."""


def finite(path: str, value: float) -> float:
    """The value; raises RequestRejectedError for NaN and infinities."""
    if not math.isfinite(value):
        raise RequestRejectedError(path, f"must be a finite number, not {value}")
    return value


def check_sampling(fields: SamplingFields, *, vocab_size: int, has_tokenizer: bool) -> None:
    """Check each field; raises RequestRejectedError with the field's path."""
    _check_numbers(fields)
    _check_counts(fields)
    _check_stops(fields, vocab_size, has_tokenizer)
    if fields.n != 1:
        reason = "must be at least 1" if fields.n < 1 else "more than one sample is not supported yet"
        raise RequestRejectedError(_PATH + "n", reason)
    if fields.later_fields:
        name = fields.later_fields[0]
        raise RequestRejectedError(_PATH + name, f"{name} is not supported yet")


def resolve_logprobs(fields: SamplingFields, model: ModelDescription) -> int | None:
    """Number of top logprobs per token; -1 asks for the whole vocabulary. Raises RequestRejectedError."""
    if fields.logprobs is None:
        return None
    path, limit = _PATH + "logprobs", min(model.max_logprobs, model.vocab_size)
    if fields.logprobs == -1:
        if limit < model.vocab_size:
            raise RequestRejectedError(
                path, f"-1 asks for all {model.vocab_size} token ids, but the executor returns at most {limit}"
            )
        return model.vocab_size
    if not 0 <= fields.logprobs <= limit:
        raise RequestRejectedError(path, f"must be 0 to {limit} or -1, not {fields.logprobs}")
    return fields.logprobs


def resolve_sampling(fields: SamplingFields, model: ModelDescription, *, seed: int) -> Sampling:
    """What the executor is told, from checked fields; raises RequestRejectedError."""
    temperature = fields.temperature
    return Sampling(
        temperature=max(temperature, _MIN_TEMPERATURE) if temperature else 0.0,
        top_p=max(fields.top_p, _MIN_TOP_P),
        top_k=fields.top_k if 0 < fields.top_k < model.vocab_size else 0,
        min_p=fields.min_p,
        seed=seed,
        stop_token_ids=_stop_token_ids(fields, model),
        min_tokens=fields.min_tokens or 0,
        num_logprobs=resolve_logprobs(fields, model),
    )


def _stop_token_ids(fields: SamplingFields, model: ModelDescription) -> tuple[int, ...]:
    """Every id that ends the sequence; raises RequestRejectedError if min_tokens then leaves none to choose."""
    eos = () if fields.ignore_eos else model.eos_token_ids
    stop_ids = {*eos, *fields.stop_token_ids}
    if fields.min_tokens and len(stop_ids) >= model.vocab_size:
        raise RequestRejectedError(
            _PATH + "stop_token_ids", "with EOS they are the whole vocabulary: min_tokens leaves no token to choose"
        )
    return tuple(sorted(stop_ids))


def _check_numbers(fields: SamplingFields) -> None:
    if not 0 <= finite(_PATH + "temperature", fields.temperature) <= _FLOAT32_MAX:
        raise RequestRejectedError(_PATH + "temperature", f"must be 0 or more, not {fields.temperature}")
    if not 0 < finite(_PATH + "top_p", fields.top_p) <= 1:
        raise RequestRejectedError(_PATH + "top_p", f"must be over 0 and at most 1, not {fields.top_p}")
    if fields.top_k < -1:
        raise RequestRejectedError(_PATH + "top_k", f"must be -1 or more, not {fields.top_k}")
    if not 0 <= finite(_PATH + "min_p", fields.min_p) <= 1:
        raise RequestRejectedError(_PATH + "min_p", f"must be 0 to 1, not {fields.min_p}")


def _check_counts(fields: SamplingFields) -> None:
    if fields.max_tokens is not None and fields.max_tokens < 1:
        raise RequestRejectedError(_PATH + "max_tokens", "must be 1 or more")
    if fields.max_tokens is not None and fields.min_tokens is not None and fields.min_tokens > fields.max_tokens:
        raise RequestRejectedError(
            _PATH + "min_tokens", f"must be at most max_tokens = {fields.max_tokens}, not {fields.min_tokens}"
        )
    keep = fields.truncate_prompt_tokens
    if keep is not None and keep < 1 and keep != -1:
        raise RequestRejectedError(_PATH + "truncate_prompt_tokens", f"must be 1 or more, or -1, not {keep}")


def _check_stops(fields: SamplingFields, vocab_size: int, has_tokenizer: bool) -> None:
    for index, stop_string in enumerate(fields.stop):
        if not stop_string:
            raise RequestRejectedError(f"{_PATH}stop[{index}]", "must not be empty")
    if fields.stop and not fields.detokenize:
        raise RequestRejectedError(_PATH + "stop", "stop strings are looked for in the text: detokenize must be on")
    if fields.stop and not has_tokenizer:
        raise RequestRejectedError(_PATH + "stop", "the service has no tokenizer: use stop_token_ids")
    for index, token_id in enumerate(fields.stop_token_ids):
        if token_id >= vocab_size:
            raise RequestRejectedError(
                f"{_PATH}stop_token_ids[{index}]", f"{token_id} is not below the vocabulary size {vocab_size}"
            )
