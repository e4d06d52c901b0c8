"""What an executor is told of checked SamplingParams: every field as numbers and token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.types import Sampling
from scheduler_svc.engine.ports import ModelDescription
from scheduler_svc.requests.sample_counts import num_candidates
from scheduler_svc.requests.sampling_fields import PATH, SamplingFields, resolve_logprobs

# The executor takes 32-bit floats: what is over 0 must not become 0 there, nor overflow what it is applied to.
_MIN_TEMPERATURE = 0.01
"""As in vLLM: what is smaller, but not 0, would overflow the logits, and is raised to this."""
_MIN_TOP_P = 1e-6
"""Keeps the most likely token alone, as any smaller one would."""
_MIN_MIN_P = 1e-37
_MAX_REPETITION_PENALTY = 1e30
"""And its inverse is the smallest: beyond, logits would overflow, and the order of tokens would be no other."""

BadWords = tuple[tuple[int, ...], ...]


def resolve_sampling(
    fields: SamplingFields, model: ModelDescription, *, seed: int, bad_words: BadWords = ()
) -> Sampling:
    """What the executor is told, from checked fields; raises RequestRejectedError if they leave no token to choose."""
    temperature, penalty = fields.temperature, fields.repetition_penalty
    stop_token_ids = _stop_token_ids(fields, model)
    _check_leaves_a_token(fields, model, stop_token_ids, bad_words)
    return Sampling(
        temperature=max(temperature, _MIN_TEMPERATURE) if temperature else 0.0,
        top_p=max(fields.top_p, _MIN_TOP_P),
        top_k=fields.top_k if 0 < fields.top_k < model.vocab_size else 0,
        min_p=max(fields.min_p, _MIN_MIN_P) if fields.min_p else 0.0,
        seed=seed,
        stop_token_ids=stop_token_ids,
        min_tokens=fields.min_tokens or 0,
        num_logprobs=_num_logprobs(fields, model),
        num_prompt_logprobs=resolve_logprobs("prompt_logprobs", fields.prompt_logprobs, model),
        repetition_penalty=min(max(penalty, 1 / _MAX_REPETITION_PENALTY), _MAX_REPETITION_PENALTY),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        bias_token_ids=tuple(token_id for token_id, _ in fields.logit_bias),
        biases=tuple(bias for _, bias in fields.logit_bias),
        allowed_token_ids=tuple(sorted(set(fields.allowed_token_ids))),
        bad_words=bad_words,
        num_candidates=num_candidates(fields, len(stop_token_ids), model.vocab_size),
    )


def tokenize_bad_words(words: Sequence[str], encode: Callable[[str], list[int]]) -> BadWords:
    """The token sequences to ban, as vLLM finds them; raises RequestRejectedError for a word without tokens.

    A word is banned as it stands at the start of a text and, where a space before it gives another first token and
    as many tokens, as it stands within one. `encode` adds no special tokens.
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
    """Every id that ends the sequence."""
    eos = () if fields.ignore_eos else model.eos_token_ids
    return tuple(sorted({*eos, *fields.stop_token_ids}))


def _num_logprobs(fields: SamplingFields, model: ModelDescription) -> int | None:
    """As asked; where the best samples are to be chosen the logprobs of their tokens are needed in any case."""
    asked = resolve_logprobs("logprobs", fields.logprobs, model)
    return 0 if asked is None and fields.num_drawn > fields.n else asked


def _check_leaves_a_token(
    fields: SamplingFields, model: ModelDescription, stop_token_ids: Sequence[int], bad_words: BadWords
) -> None:
    """Refuse what can never choose its first token; the path is that of the narrowest field."""
    stops = set(stop_token_ids) if fields.min_tokens else set()
    banned = stops | {word[0] for word in bad_words if len(word) == 1}
    allowed = set(fields.allowed_token_ids)
    num_left = len(allowed - banned) if allowed else model.vocab_size - len(banned)
    if num_left > 0:
        return
    if allowed:
        name, what = "allowed_token_ids", f"the {len(allowed)} allowed token ids"
    else:
        name = "bad_words" if len(stops) < model.vocab_size else "stop_token_ids"
        what = f"the {model.vocab_size} token ids of the vocabulary"
    raise RequestRejectedError(
        PATH + name,
        f"no token is left to choose: of {what} all are among the bad words or, until min_tokens, stop tokens or EOS",
    )
