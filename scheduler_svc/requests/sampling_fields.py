"""The table of sampling fields: one row for each field of SamplingParams, with its default and its rule.

Converters, checks and plans read this table. Ranges as in types.proto.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, slices_of
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.field_rules import (
    PATH,
    CheckContext,
    FieldRule,
    any_finite,
    at_least,
    at_least_if_on,
    between,
    biases,
    clamped,
    over_zero,
    token_ids,
    top_logprobs,
    unchanged,
    words,
)
from scheduler_svc.requests.grammar_fields import GrammarFields, check_grammar

_FLOAT32_MAX = 3.4028234e38
_MIN_TEMPERATURE = 0.01
"""Minimum, as in vLLM: a smaller temperature would overflow the logits, and is raised to this."""
_MIN_TOP_P = 1e-6
"""Minimum: it keeps only the most likely token, as any smaller value would."""
_SMALLEST = 1e-37
"""Minimum of values over 0, so that they stay over 0 as 32-bit floats."""
_MAX_REPETITION_PENALTY = 1e30
"""Maximum; the minimum is its inverse. Values beyond would overflow the logits without changing the tokens' order."""


class AscendingIds(tuple[int, ...]):
    """Token ids in ascending order, each once."""

    __slots__ = ()


def ascending_ids(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids in ascending order, each once."""
    return token_ids if isinstance(token_ids, AscendingIds) else run_at_once(sort_ids(token_ids))


def sort_ids(token_ids: tuple[int, ...]) -> Work[AscendingIds]:
    """Sort ids, with a pause after each slice of a long list."""
    unique: set[int] = set()
    for part in slices_of(token_ids):
        unique.update(part)
        if len(token_ids) > SLICE_ITEMS:
            yield
    # Small numbers leave a set almost in order, so that sorting 131,072 of them takes 1 ms (measured).
    ordered = sorted(unique)
    if len(token_ids) > SLICE_ITEMS:
        yield
    return AscendingIds(ordered)


class EarlyStopping(Enum):
    """The condition that ends a beam search."""

    FALSE = auto()
    TRUE = auto()
    NEVER = auto()


def _row(default: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """Return a field with its default and its FieldRule."""
    return dataclasses.field(default=default, metadata={"rule": FieldRule(**rule)})


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """SamplingParams of one request as received; None for unset fields where 0 or the default differs from unset."""

    temperature: float = _row(
        1.0,
        check=between(0, _FLOAT32_MAX),
        form=at_least_if_on(_MIN_TEMPERATURE),
        is_off=lambda value: value == 0,
        needs_draw=True,
    )
    top_p: float = _row(1.0, check=over_zero(1), form=clamped(_MIN_TOP_P, 1.0), needs_draw=True)
    top_k: int = _row(
        0, check=at_least(-1), form=lambda value, model: value if 0 < value < model.vocab_size else 0,
        is_off=lambda value: value in (-1, 0), needs_draw=True,
    )  # fmt: skip
    min_p: float = _row(0.0, check=between(0, 1), form=at_least_if_on(_SMALLEST), needs_draw=True)
    top_n_sigma: float = _row(
        0.0,
        check=any_finite,
        form=clamped(_SMALLEST, _FLOAT32_MAX),
        is_off=lambda value: value <= 0,
        needs_draw=True,
    )
    repetition_penalty: float = _row(
        1.0, check=over_zero(), form=clamped(1 / _MAX_REPETITION_PENALTY, _MAX_REPETITION_PENALTY), edits_logits=True
    )
    presence_penalty: float = _row(0.0, check=between(-2, 2), form=unchanged, edits_logits=True)
    frequency_penalty: float = _row(0.0, check=between(-2, 2), form=unchanged, edits_logits=True)
    seed: int | None = _row(None)
    max_tokens: int | None = _row(None)
    min_tokens: int | None = _row(None)
    stop: tuple[str, ...] = _row((), check=words("use stop_token_ids"))
    bad_words: tuple[str, ...] = _row((), check=words("logit_bias can ban token ids"), edits_logits=True)
    stop_token_ids: tuple[int, ...] = _row((), check=token_ids)
    ignore_eos: bool = _row(False)
    allowed_token_ids: tuple[int, ...] = _row(
        (), check=token_ids, form=lambda value, _: ascending_ids(value), edits_logits=True
    )
    logit_bias: tuple[tuple[int, float], ...] = _row((), check=biases, edits_logits=True)
    """(token id, bias), ids ascending."""
    logprobs: int | None = _row(None, check=top_logprobs)
    prompt_logprobs: int | None = _row(None, check=top_logprobs)
    include_stop_str_in_output: bool = _row(False)
    skip_special_tokens: bool = _row(True)
    detokenize: bool = _row(True)
    truncate_prompt_tokens: int | None = _row(None)
    priority: int = _row(0)
    n: int = _row(1)
    best_of: int | None = _row(None, needs_draw=True)
    beam_width: int | None = _row(None)
    length_penalty: float = _row(1.0, check=any_finite)
    early_stopping: EarlyStopping | None = _row(EarlyStopping.FALSE)  # noqa: RUF009
    """None: an unknown number."""
    grammar: GrammarFields | None = _row(None, check=check_grammar)  # noqa: RUF009
    later_fields: tuple[str, ...] = ()
    """Fields that are set but not supported yet."""

    @property
    def num_drawn(self) -> int:
        """Return the number of samples drawn, of which `n` are returned; with beams `n`, although nothing is drawn."""
        return self.n if self.best_of is None else self.best_of


DEFAULTS = SamplingFields()
FIELD_RULES: dict[str, FieldRule] = {
    each.name: each.metadata["rule"] for each in dataclasses.fields(SamplingFields) if "rule" in each.metadata
}
"""Rules by the field's name, in the order of the table."""


def ignores_eos(fields: SamplingFields) -> bool:
    """Return whether EOS does not end the output; with a grammar it comes only where nothing else may, and ends it."""
    return fields.ignore_eos and fields.grammar is None


def is_off(fields: SamplingFields, name: str) -> bool:
    """Return whether this field has a value without effect."""
    is_off = FIELD_RULES[name].is_off
    return is_default(fields, name) if is_off is None else is_off(getattr(fields, name))


def is_default(fields: SamplingFields, name: str) -> bool:
    """Return whether this field has its default value."""
    return bool(getattr(fields, name) == getattr(DEFAULTS, name))


def check_sampling(fields: SamplingFields, model: ModelDescription, *, has_tokenizer: bool) -> None:
    """Check each field; raises RequestRejectedError or PreconditionError with the field's path."""
    context = CheckContext(model, has_tokenizer)
    for name, rule in FIELD_RULES.items():
        if rule.check is not None:
            rule.check(PATH + name, getattr(fields, name), context)
    _check_counts(fields)
    if fields.stop and not fields.detokenize:
        raise RequestRejectedError(PATH + "stop", "stop strings are looked for in the text: detokenize must be on")
    if fields.later_fields:
        name = fields.later_fields[0]
        raise RequestRejectedError(PATH + name, f"{name} is not supported yet")
    _check_features(fields, model)


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


def _check_features(fields: SamplingFields, model: ModelDescription) -> None:
    """Reject features that the executor lacks: it would have to refuse the whole plan with all its requests."""
    if fields.prompt_logprobs is not None and not model.gives_prompt_logprobs:
        raise PreconditionError(PATH + "prompt_logprobs", "the executor gives no prompt logprobs")
    if model.has_logits_processors:
        return
    for name, rule in FIELD_RULES.items():
        if rule.edits_logits and not is_off(fields, name):
            raise PreconditionError(PATH + name, f"the executor has no {name}")
