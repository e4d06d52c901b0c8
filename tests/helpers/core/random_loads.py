"""Requests and settings at random, the same for the same random numbers. For tests only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.types import BeamSpec, RequestSpec
from tests.helpers.core.core_chats import Chat, Setting
from tests.helpers.core.core_sampling import core_sampling

_MOST_TOKENS = 20
_LONGEST_PROMPT = 45
_LONGEST_TURN = 9


def draw_setting(rng: random.Random) -> Setting:
    """Everything at once, at random: sizes, policies, plans in flight, and pools that just hold the largest request."""
    block_size = rng.choice([8, 8, 16, 32])
    max_num_seqs = rng.choice([5, 9, 24])
    options = {
        "batching": rng.choice(["continuous", "continuous", "continuous", "static", "dynamic"]),
        "order": rng.choice(["fcfs", "priority", "fair", "sjf"]),
        "preemption": rng.choice(["recompute", "swap", "auto"]),
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 0, 7, 30]),
        "max_wait_s": rng.choice([None, 0.1]),
        "waiting_served_ratio": rng.choice([0.0, 0.0, 1.5]),
        "batch_size": rng.choice([3, 8]),
    }
    return Setting(
        block_size=block_size,
        num_blocks=rng.choice([{8: 28, 16: 18, 32: 12}[block_size], 60]),
        num_host_blocks=rng.choice([0, 9, 100]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 8, 60]),
        depth=rng.randint(1, 4),
        arrivals=rng.choice(["together", "shuffled", "scattered", "scattered"]),
        loses_every=rng.choice([0, 0, 0, 60]),
        cuts_every=rng.choice([0, 0, 11, 40]),
        aborts=rng.random() < 0.4,
        options=options,
        max_drafts=rng.choice([0, 2, 5]),
    )


def draw_load(rng: random.Random, vocab_size: int, number: int) -> list[Chat]:
    """Chats of any kind, some of which begin alike: greedy, drawn, samples, beams, with logprobs of all sorts."""
    systems = [_text(rng, vocab_size, rng.randint(8, 40)) for _ in range(2)]
    return [_draw_chat(rng, vocab_size, f"chat {index}", systems) for index in range(number)]


def _draw_chat(rng: random.Random, vocab_size: int, name: str, systems: Sequence[tuple[int, ...]]) -> Chat:
    begun = rng.choice(systems) if rng.random() < 0.6 else ()
    prompt = begun + _text(rng, vocab_size, rng.randint(1, _LONGEST_PROMPT - len(begun)))
    kind = rng.choice(["greedy", "drawn", "drawn", "samples", "beams"])
    fields: dict[str, Any] = {}
    if kind == "samples":
        fields["num_samples"] = rng.randint(2, 3)
    if kind == "beams":
        width = rng.randint(2, 4)
        fields |= {"beams": BeamSpec(width, rng.choice([0.6, 1.0, 2.0]), False), "num_samples": rng.randint(1, width)}
    spec = RequestSpec(
        name,
        prompt,
        _draw_sampling(rng, vocab_size, kind),
        rng.randint(1, _MOST_TOKENS),
        tenant=rng.choice(["", "", "other"]),
        priority=rng.randrange(3),
        uses_prefix_cache=rng.random() < 0.9,
        eos_token_ids=frozenset(rng.sample(range(vocab_size), 2)),
        **fields,
    )
    turns = tuple(_text(rng, vocab_size, rng.randint(1, _LONGEST_TURN)) for _ in range(rng.choice([0, 0, 1])))
    return Chat(spec, turns)


def _draw_sampling(rng: random.Random, vocab_size: int, kind: str) -> SequenceSampling:
    fields: dict[str, Any] = {"num_prompt_logprobs": rng.choice([None, None, None, 0, 2])}
    if kind != "beams":
        fields["num_logprobs"] = rng.choice([None, 0, 3])
    if rng.random() < 0.5:
        fields["stop_token_ids"] = tuple(rng.sample(range(vocab_size), 5))
    if rng.random() < 0.3:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    if kind in ("drawn", "samples"):
        fields |= {"temperature": rng.choice([0.6, 0.9, 1.3]), "top_p": rng.choice([1.0, 0.9])}
        fields |= {"top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.02])}
    else:
        fields["temperature"] = 0.0
    seed = rng.getrandbits(64)
    if kind in ("drawn", "samples"):
        fields["top_n_sigma"] = 0.0 if seed % 3 else 1.5
    return core_sampling(seed=seed, **fields)


def _text(rng: random.Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(length))
