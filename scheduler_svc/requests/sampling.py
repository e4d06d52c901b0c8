"""Converts checked SamplingParams to the form for executors: every field as numbers and token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cadenza_common.plan.sampling import Grammar, SequenceSampling
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.field_rules import PATH, resolve_logprobs
from scheduler_svc.requests.sample_counts import num_candidates
from scheduler_svc.requests.sampling_fields import FIELD_RULES, SamplingFields, ignores_eos, is_off

BadWords = tuple[tuple[int, ...], ...]


def resolve_sampling(
    fields: SamplingFields, model: ModelDescription, *, seed: int, bad_words: BadWords = ()
) -> SequenceSampling:
    """Return the executor's sampling parameters; raises RequestRejectedError if the fields allow no first token."""
    stop_token_ids = _stop_token_ids(fields, model)
    _check_leaves_a_token(fields, model, stop_token_ids, bad_words)
    return SequenceSampling(
        seed=seed,
        stop_token_ids=stop_token_ids,
        min_tokens=fields.min_tokens or 0,
        num_logprobs=_num_logprobs(fields, model),
        num_prompt_logprobs=resolve_logprobs(PATH + "prompt_logprobs", fields.prompt_logprobs, model),
        num_candidates=num_candidates(fields, len(stop_token_ids), model.vocab_size),
        grammar=None if fields.grammar is None else Grammar(fields.grammar.wire, model.grammar_engine),
        **_values(fields, model, bad_words),
    )


def _values(fields: SamplingFields, model: ModelDescription, bad_words: BadWords) -> dict[str, Any]:
    """Return the fields that only executors read and that have an effect."""
    values: dict[str, Any] = {
        name: rule.form(getattr(fields, name), model)
        for name, rule in FIELD_RULES.items()
        if rule.form is not None and not is_off(fields, name)
    }
    if fields.logit_bias:
        values["bias_token_ids"] = tuple(token_id for token_id, _ in fields.logit_bias)
        values["biases"] = tuple(bias for _, bias in fields.logit_bias)
    if bad_words:
        values["bad_words"] = bad_words
    return values


def tokenize_bad_words(words: Sequence[str], encode: Callable[[str], list[int]]) -> BadWords:
    """Return the token sequences to ban, as in vLLM; raises RequestRejectedError for a word without tokens.

    A word is banned with its tokens at the start of a text and also with its tokens after a space, if these are as
    many and begin with another token. `encode` adds no special tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = tuple(encode(word.lstrip()))
        if not bare:
            raise RequestRejectedError(f"{PATH}bad_words[{index}]", f"{word!r} has no tokens")
        sequences[bare] = None
        spaced = tuple(encode(" " + word.lstrip()))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences[spaced] = None
    return tuple(sequences)


def _stop_token_ids(fields: SamplingFields, model: ModelDescription) -> tuple[int, ...]:
    """Return every id that ends the sequence."""
    eos = () if ignores_eos(fields) else model.eos_token_ids
    return tuple(sorted({*eos, *fields.stop_token_ids}))


def _num_logprobs(fields: SamplingFields, model: ModelDescription) -> int | None:
    """Return the requested number of top logprobs, or 0 if best_of needs the logprobs of tokens to choose samples."""
    num_logprobs = resolve_logprobs(PATH + "logprobs", fields.logprobs, model)
    return 0 if num_logprobs is None and fields.num_drawn > fields.n else num_logprobs


def _check_leaves_a_token(
    fields: SamplingFields, model: ModelDescription, stop_token_ids: Sequence[int], bad_words: BadWords
) -> None:
    """Reject parameters that allow no first token; the error names the most restrictive field."""
    stops = set(stop_token_ids) if fields.min_tokens else set()
    banned = stops | {word[0] for word in bad_words if len(word) == 1}
    allowed = fields.allowed_token_ids
    # Stops at the first id that is left: the list may be long.
    if not banned.issuperset(allowed) if allowed else model.vocab_size > len(banned):
        return
    if allowed:
        name, what = "allowed_token_ids", f"the {len(set(allowed))} allowed token ids"
    else:
        name = "bad_words" if len(stops) < model.vocab_size else "stop_token_ids"
        what = f"the {model.vocab_size} token ids of the vocabulary"
    raise RequestRejectedError(
        PATH + name,
        f"no token is left to choose: of {what} all are among the bad words or, until min_tokens, stop tokens or EOS",
    )
