"""Random requests: prompts with common beginnings, all kinds of sampling, several samples, beams."""

from __future__ import annotations

from random import Random

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.types import BeamSpec, RequestSpec
from tests.fuzz.settings import TENANTS, Settings
from tests.helpers.core.core_sampling import core_sampling


def draw_stems(settings: Settings, rng: Random) -> list[tuple[int, ...]]:
    """What prompts may begin with."""
    return [_tokens(settings, rng, settings.max_prompt) for _ in range(settings.num_stems)]


def draw_request(
    settings: Settings, rng: Random, request_id: str, stems: list[tuple[int, ...]], past: list[tuple[int, ...]]
) -> RequestSpec:
    """A request; `past`: prompts and outputs of those before it, which a turn of a chat goes on from."""
    # What exceeds max_num_seqs is refused: now and then is enough.
    most = 5 if rng.random() < 0.05 else min(5, settings.spec.max_num_seqs)
    beams = _draw_beams(rng, most) if "beams" in settings.axes and most > 1 and rng.random() < 0.2 else None
    num_samples = rng.randint(1, most) if "samples" in settings.axes and rng.random() < 0.3 else 1
    if beams is not None:
        num_samples = rng.randint(1, beams.width)
    sampling = _draw_sampling(settings, rng, has_beams=beams is not None)
    stops = sampling.stop_token_ids
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=_draw_prompt(settings, rng, stems, past),
        sampling=sampling,
        max_tokens=rng.choice([None, rng.randint(1, 6), rng.randint(1, 30)]),
        eos_token_ids=frozenset(rng.sample(stops, rng.randint(0, len(stops)))),
        num_samples=num_samples,
        beams=beams,
        cache_salt=rng.choice([b"", b"", b"salt"]),
        uses_prefix_cache=rng.random() < 0.9,
        priority=rng.randint(-1, 1),
        tenant=rng.choice(TENANTS),
        expected_output_tokens=rng.choice([None, rng.randint(1, 30)]),
        max_drafts=rng.choice([None, None, 1, 0]),
    )


def _draw_prompt(
    settings: Settings, rng: Random, stems: list[tuple[int, ...]], past: list[tuple[int, ...]]
) -> tuple[int, ...]:
    stem = rng.choice(past) if past and rng.random() < 0.3 else rng.choice(stems)
    begin = stem[: rng.choice([len(stem), rng.randint(0, len(stem))])]
    return (begin + _tokens(settings, rng, rng.choice([0, 1, settings.max_prompt])))[: settings.max_prompt] or stem[:1]


def _draw_beams(rng: Random, most: int) -> BeamSpec:
    return BeamSpec(rng.randint(2, most), rng.choice([1.0, 0.0, 2.0, -1.0]), rng.choice([True, False, None]))


def _draw_sampling(settings: Settings, rng: Random, *, has_beams: bool) -> SequenceSampling:
    vocab = range(settings.vocab_size)
    has_logprobs = "logprobs" in settings.axes
    return core_sampling(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**64),
        stop_token_ids=tuple(rng.sample(vocab, rng.choice([0, 1, 3]))),
        min_tokens=rng.choice([0, 0, rng.randint(1, 6)]),
        num_logprobs=rng.choice([None, None, 0, 2]) if has_logprobs and not has_beams else None,
        num_prompt_logprobs=rng.choice([None, None, None, 0, 2]) if has_logprobs else None,
        # Few: with stop tokens ruled out too, none may be left.
        allowed_token_ids=tuple(rng.sample(vocab, rng.randint(1, 6))) if rng.random() < 0.1 else (),
        bad_words=tuple(_tokens(settings, rng, rng.randint(1, 2)) for _ in range(rng.choice([0, 0, 2]))),
    )


def _tokens(settings: Settings, rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(settings.vocab_size), k=count))
