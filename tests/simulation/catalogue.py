"""The requests of all histories, and what an undisturbed run gives each of them.

There are a few hundred, the same in every process, so that their tokens are computed once. A request is known by its
seed, and an executor by its numerics: another one draws other tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np

from cadenza_common.plan.result import Candidates, LogprobColumns, TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.expected_tokens import expected_candidates, expected_logprobs, expected_tokens
from executor_svc.simulated.hashing import mix
from executor_svc.simulated.tokens import SimulatedContext
from scheduler_svc.core.types import BeamSpec, FinishDetail, RequestSpec
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.core.core_sampling import core_sampling, for_executor
from tests.helpers.core.known import (
    VOCAB_SIZE,
    adapter_hash,
    known_beams,
    known_cuts,
    known_prompt_logprobs,
    known_sample,
)
from tests.simulation.executor.drafting import RESOLUTION
from tests.simulation.executor.slot import Slot

NUM_ENTRIES = 240
NUM_STEMS = 6
MAX_PROMPT_TOKENS = 26
_MOST_TOKENS = 64
_LETTERS = "abcdefghij"


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of the catalogue; its seed is its number + 1."""

    spec: RequestSpec
    stop: tuple[str, ...] = ()
    """Stop strings; its text is decoded if there are any."""
    kind: str = "greedy"
    stem: int = 0
    """Entries of one stem have prompts that begin alike."""

    def text_stream(self) -> StoppedText:
        """A detokenizer for one sample."""
        return StoppedText(LettersDecoder(), stop=self.stop, min_tokens=self.spec.sampling.min_tokens)


class LettersDecoder:
    """A TokenDecoder: each token is a letter."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        return "".join(map(self.token_text, token_ids))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        return _LETTERS[token_id % len(_LETTERS)]

    def token_bytes(self, token_id: int) -> bytes:
        """Return nothing: its text's."""
        return b""

    def fixed_text(self, token_id: int) -> str:
        """Return the text that a token adds after any other."""
        return self.token_text(token_id)


@cache
def catalogue() -> list[Entry]:
    """All entries."""
    rng = Random("catalogue")
    stems = [_tokens(rng, MAX_PROMPT_TOKENS) for _ in range(NUM_STEMS)]
    return [_draw_entry(rng, index, stems) for index in range(NUM_ENTRIES)]


def _draw_entry(rng: Random, index: int, stems: list[tuple[int, ...]]) -> Entry:
    kind = rng.choice(["greedy", "drawn", "drawn", "samples", "beams", "text", "logprobs"])
    stem = rng.randrange(len(stems))
    shared = stems[stem][: rng.choice([0, 4, 8, 12, 16, 20])]
    prompt = (shared + _tokens(rng, rng.choice([1, 1, 3, 6, 12])))[:MAX_PROMPT_TOKENS]
    stops = tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 3])))
    # With nothing but stop tokens allowed and no stop before min_tokens, no token is left.
    impossible = bool(stops) and rng.random() < 0.1
    allowed = stops if impossible else tuple(rng.sample(range(VOCAB_SIZE), 3)) if rng.random() < 0.05 else ()
    sampling = core_sampling(
        temperature=0.0 if kind in ("greedy", "beams") else 1.0,
        seed=index + 1,
        stop_token_ids=stops,
        min_tokens=3 if impossible else rng.choice([0, 0, 0, 3]),
        num_logprobs=rng.choice([0, 2]) if kind == "logprobs" else None,
        num_prompt_logprobs=rng.choice([0, 2]) if kind == "logprobs" and rng.random() < 0.6 else None,
        allowed_token_ids=allowed,
        bad_words=((3,), (5, 6)) if rng.random() < 0.1 else (),
    )
    width = rng.choice([2, 2, 3])
    beams = BeamSpec(width, rng.choice([1.0, 0.0]), rng.choice([True, False, None])) if kind == "beams" else None
    spec = RequestSpec(
        "",
        prompt,
        sampling,
        eos_token_ids=frozenset(stops[:1]),
        num_samples=rng.choice([2, 2, 3]) if kind == "samples" else rng.randint(1, width) if beams else 1,
        beams=beams,
        cache_salt=b"salt" if rng.random() < 0.1 else b"",
        uses_prefix_cache=rng.random() < 0.9,
    )
    stop = tuple("".join(rng.choices(_LETTERS, k=rng.choice([1, 2, 2]))) for _ in range(2)) if kind == "text" else ()
    return Entry(spec, stop, kind, stem)


@cache
def entries_of_stem(stem: int) -> list[int]:
    """The entries whose prompts begin alike."""
    return [index for index, entry in enumerate(catalogue()) if entry.stem == stem]


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB_SIZE), k=count))


# --- what an undisturbed run gives -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Whole:
    """One sample of a request that nothing disturbs."""

    token_ids: list[int]
    detail: FinishDetail


@cache
def _spec(index: int, max_tokens: int | None, content: int) -> RequestSpec:
    """An entry's request; known tokens follow from an adapter's content where a request has its index."""
    return replace(catalogue()[index].spec, max_tokens=max_tokens, adapter_index=content)


@cache
def _unlimited(index: int, sample_index: int, content: int) -> Whole:
    spec = _spec(index, _MOST_TOKENS, content)
    return Whole(*known_sample(spec, MAX_PROMPT_TOKENS + _MOST_TOKENS, sample_index))


@cache
def whole_sample(index: int, sample_index: int, max_tokens: int | None, max_model_len: int, content: int = 0) -> Whole:
    """Its tokens, and how it ends; without stop strings, which the engine finds. content: of its adapter."""
    full, room = _unlimited(index, sample_index, content), max_model_len - len(catalogue()[index].spec.prompt_token_ids)
    limit, detail = room, FinishDetail.MAX_MODEL_LEN
    if max_tokens is not None and max_tokens <= room:
        limit, detail = max_tokens, FinishDetail.MAX_TOKENS
    assert limit < _MOST_TOKENS
    if len(full.token_ids) > limit:
        return Whole(full.token_ids[:limit], detail)
    if len(full.token_ids) == limit and full.detail is FinishDetail.NO_ALLOWED_TOKEN:
        return Whole(full.token_ids, detail)
    return full


@cache
def whole_beams(index: int, max_tokens: int | None, max_model_len: int, content: int = 0) -> list[tuple[int, ...]]:
    """What its beam search returns, best first."""
    return [found.token_ids for found in known_beams(_spec(index, max_tokens, content), max_model_len)]


@cache
def cut_beams(index: int, max_tokens: int | None, max_model_len: int, content: int = 0) -> list[list[tuple[int, ...]]]:
    """What it returns when it is cut short, after one round or two and so on."""
    cuts = known_cuts(_spec(index, max_tokens, content), max_model_len, FinishDetail.ABORTED)
    return [[found.token_ids for found in cut] for cut in cuts]


@cache
def token_logprobs(index: int, output: tuple[int, ...], num_top: int, content: int = 0) -> TokenLogprobs:
    """Logprobs of the last token of an output."""
    tokens = [*catalogue()[index].spec.prompt_token_ids, *output]
    logprob, rank, top, top_logprobs = expected_logprobs(
        tokens, len(tokens) - 1, num_top, VOCAB_SIZE, adapter_hash(content)
    )
    return TokenLogprobs(_float32([logprob])[0], rank, top, _float32(top_logprobs))


@cache
def prompt_logprobs(index: int, content: int = 0) -> LogprobColumns:
    """Those of the whole prompt."""
    spec = catalogue()[index].spec
    assert spec.sampling.num_prompt_logprobs is not None
    return known_prompt_logprobs(spec.prompt_token_ids, spec.sampling.num_prompt_logprobs, adapter_index=content)


@cache
def _for_executor(index: int, numerics: int) -> SequenceSampling:
    sampling = catalogue()[index].spec.sampling
    return for_executor(replace(sampling, seed=sampling.seed + numerics * 1_000_003))


@cache
def next_token(index: int, sample_index: int, output: tuple[int, ...], numerics: int, content: int = 0) -> int | None:
    """The token after any output, likely or not; None if none is allowed."""
    sampling, prompt = _for_executor(index, numerics), catalogue()[index].spec.prompt_token_ids
    adapter = adapter_hash(content)
    found = expected_tokens(
        prompt, sampling, 1, VOCAB_SIZE, sample_index=sample_index, output=output, adapter_hash=adapter
    )
    return found[0] if found else None


@cache
def draft(index: int, sample_index: int, output: tuple[int, ...], numerics: int, content: int = 0) -> tuple[int, int]:
    """What the simulated source drafts after any output, if it is right, and how hard that is: masks are unknown."""
    sampling, prompt = _for_executor(index, numerics), catalogue()[index].spec.prompt_token_ids
    free = replace(sampling, min_tokens=0, allowed_token_ids=sampling.allowed_token_ids[:0], bad_words=())
    adapter = adapter_hash(content)
    (token_id,) = expected_tokens(
        prompt, free, 1, VOCAB_SIZE, sample_index=sample_index, output=output, adapter_hash=adapter
    )
    context = np.array([SimulatedContext([*prompt, *output], adapter).logits_hash()], np.uint64)
    return token_id, int(mix(context)[0]) % RESOLUTION


@cache
def _candidates(index: int, output: tuple[int, ...], count: int, content: int) -> Candidates:
    prompt, sampling = catalogue()[index].spec.prompt_token_ids, _for_executor(index, 0)
    found = expected_candidates(prompt, output, sampling, count, VOCAB_SIZE, adapter_hash(content))
    return Candidates([token_id for token_id, _ in found], _float32([logprob for _, logprob in found]))


def _float32(values: list[float]) -> list[float]:
    return array("f", values).tolist()


@dataclass(slots=True)
class KnownTokens:
    """The TokenSource of an executor with these numerics; 0: those of the catalogue."""

    numerics: int = 0

    def next_token(self, slot: Slot) -> int | None:
        """The token after the slot's tokens; None if none is allowed."""
        index, sample_index = _index(slot.sampling), slot.sample_index
        output = slot.tokens[slot.num_prompt :]
        if not self.numerics:
            full = _unlimited(index, sample_index, slot.content).token_ids
            if len(output) < len(full) and full[: len(output)] == output:
                return full[len(output)]
        return next_token(index, sample_index, tuple(output), self.numerics, slot.content)

    def draft(self, slot: Slot) -> tuple[int, int]:
        """A guess of the token after the slot's tokens, and how hard it is."""
        output = tuple(slot.tokens[slot.num_prompt :])
        return draft(_index(slot.sampling), slot.sample_index, output, self.numerics, slot.content)

    def token_logprobs(self, slot: Slot, token_id: int) -> TokenLogprobs:
        """Logprobs of that token."""
        output = (*slot.tokens[slot.num_prompt :], token_id)
        return token_logprobs(_index(slot.sampling), output, slot.sampling.num_logprobs or 0, slot.content)

    def candidates(self, slot: Slot) -> Candidates:
        """The best next tokens."""
        output = tuple(slot.tokens[slot.num_prompt :])
        return _candidates(_index(slot.sampling), output, slot.sampling.num_candidates, slot.content)

    def prompt_logprobs(self, slot: Slot, start: int, end: int) -> LogprobColumns:
        """Those of the prompt tokens `start` to `end - 1`."""
        return prompt_logprobs(_index(slot.sampling), slot.content).rows(start, end)


def _index(sampling: SequenceSampling) -> int:
    return sampling.seed - 1
