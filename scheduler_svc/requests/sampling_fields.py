"""SamplingParams as they came, and their checks, field by field. Ranges as in types.proto."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.engine.ports import ModelDescription

PATH = "sampling_params."
_FLOAT32_MAX = 3.4028234e38


class EarlyStopping(Enum):
    """When a beam search is done."""

    FALSE = auto()
    TRUE = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """SamplingParams as they came; None where 0 or silence means something else."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), ids ascending."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping | None = EarlyStopping.FALSE
    """None: a number that is none of the enum's."""
    later_fields: tuple[str, ...] = ()
    """Fields of later waves that are set to something else than their default."""

    @property
    def num_drawn(self) -> int:
        """Samples that are drawn, of which `n` are returned; with beams nothing is drawn, and it is `n`."""
        return self.n if self.best_of is None else self.best_of


def finite(path: str, value: float) -> float:
    """The value; raises RequestRejectedError for NaN and infinities."""
    if not math.isfinite(value):
        raise RequestRejectedError(path, f"must be a finite number, not {value}")
    return value


def check_sampling(fields: SamplingFields, model: ModelDescription, *, has_tokenizer: bool) -> None:
    """Check each field; raises RequestRejectedError or PreconditionError with the field's path."""
    _check_numbers(fields)
    _check_penalties(fields)
    _check_counts(fields)
    _check_words("stop", fields.stop, has_tokenizer)
    _check_words("bad_words", fields.bad_words, has_tokenizer)
    if fields.stop and not fields.detokenize:
        raise RequestRejectedError(PATH + "stop", "stop strings are looked for in the text: detokenize must be on")
    _check_token_ids("stop_token_ids", fields.stop_token_ids, model.vocab_size)
    _check_token_ids("allowed_token_ids", fields.allowed_token_ids, model.vocab_size)
    _check_logit_bias(fields, model.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        resolve_logprobs(name, getattr(fields, name), model)
    if fields.later_fields:
        name = fields.later_fields[0]
        raise RequestRejectedError(PATH + name, f"{name} is not supported yet")
    _check_features(fields, model)


def resolve_logprobs(name: str, asked: int | None, model: ModelDescription) -> int | None:
    """Number of top logprobs per token; -1 asks for the whole vocabulary. Raises RequestRejectedError."""
    if asked is None:
        return None
    limit = min(model.max_logprobs, model.vocab_size)
    if asked == -1:
        if limit < model.vocab_size:
            raise RequestRejectedError(
                PATH + name, f"-1 asks for all {model.vocab_size} token ids, but the executor returns at most {limit}"
            )
        return model.vocab_size
    if not 0 <= asked <= limit:
        raise RequestRejectedError(PATH + name, f"must be 0 to {limit} or -1, not {asked}")
    return asked


def _check_numbers(fields: SamplingFields) -> None:
    if not 0 <= finite(PATH + "temperature", fields.temperature) <= _FLOAT32_MAX:
        raise RequestRejectedError(PATH + "temperature", f"must be 0 to {_FLOAT32_MAX}, not {fields.temperature}")
    if not 0 < finite(PATH + "top_p", fields.top_p) <= 1:
        raise RequestRejectedError(PATH + "top_p", f"must be over 0 and at most 1, not {fields.top_p}")
    if fields.top_k < -1:
        raise RequestRejectedError(PATH + "top_k", f"must be -1 or more, not {fields.top_k}")
    if not 0 <= finite(PATH + "min_p", fields.min_p) <= 1:
        raise RequestRejectedError(PATH + "min_p", f"must be 0 to 1, not {fields.min_p}")


def _check_penalties(fields: SamplingFields) -> None:
    if not finite(PATH + "repetition_penalty", fields.repetition_penalty) > 0:
        raise RequestRejectedError(PATH + "repetition_penalty", f"must be over 0, not {fields.repetition_penalty}")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(fields, name)
        if not -2 <= finite(PATH + name, penalty) <= 2:
            raise RequestRejectedError(PATH + name, f"must be -2 to 2, not {penalty}")


def _check_counts(fields: SamplingFields) -> None:
    if fields.max_tokens is not None and fields.max_tokens < 1:
        raise RequestRejectedError(PATH + "max_tokens", "must be 1 or more")
    if fields.max_tokens is not None and fields.min_tokens is not None and fields.min_tokens > fields.max_tokens:
        raise RequestRejectedError(
            PATH + "min_tokens", f"must be at most max_tokens = {fields.max_tokens}, not {fields.min_tokens}"
        )
    keep = fields.truncate_prompt_tokens
    if keep is not None and keep < 1 and keep != -1:
        raise RequestRejectedError(PATH + "truncate_prompt_tokens", f"must be 1 or more, or -1, not {keep}")


def _check_words(name: str, words: Sequence[str], has_tokenizer: bool) -> None:
    for index, word in enumerate(words):
        if not word:
            raise RequestRejectedError(f"{PATH}{name}[{index}]", "must not be empty")
    if words and not has_tokenizer:
        instead = "use stop_token_ids" if name == "stop" else "logit_bias can ban token ids"
        raise PreconditionError(PATH + name, f"{name} needs a tokenizer, and the service has none: {instead}")


def _check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise RequestRejectedError(
                f"{PATH}{name}[{index}]", f"{token_id} is not below the vocabulary size {vocab_size}"
            )


def _check_logit_bias(fields: SamplingFields, vocab_size: int) -> None:
    for token_id, bias in fields.logit_bias:
        path = f"{PATH}logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise RequestRejectedError(path, f"{token_id} is not below the vocabulary size {vocab_size}")
        if not -100 <= finite(path, bias) <= 100:
            raise RequestRejectedError(path, f"must be -100 to 100, not {bias}")


def _check_features(fields: SamplingFields, model: ModelDescription) -> None:
    """What the executor cannot do is refused here: it could only refuse the plan, with all other requests in it."""
    if fields.prompt_logprobs is not None and not model.gives_prompt_logprobs:
        raise PreconditionError(PATH + "prompt_logprobs", "the executor gives no prompt logprobs")
    if model.has_logits_processors:
        return
    defaults = SamplingFields()
    for name in (
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    ):  # fmt: skip
        if getattr(fields, name) != getattr(defaults, name):
            raise PreconditionError(PATH + name, f"the executor has no {name}")
