"""Strategies for random histories of the core: what executors hold, rules, requests."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st

from cadenza.v1 import types_pb2
from cadenza_common.plan.sampling import Grammar
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.policies.batching import BatchingPolicy, ContinuousBatching, StaticBatching
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, PriorityOrder, ShortestFirstOrder
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, RequestSpec
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.known import VOCAB_SIZE

MAX_MODEL_LEN = 60

_rng = random.Random(0)
_BEGINNINGS = [tuple(_rng.randrange(VOCAB_SIZE) for _ in range(30)) for _ in range(2)]
"""What prompts have in common."""
_ENGINE = b"engine"
_GRAMMAR = Grammar(types_pb2.GrammarSpec(regex="a+").SerializeToString(), _ENGINE)
"""The executor does not follow it: it makes rows late."""
_TOKEN = st.integers(0, VOCAB_SIZE - 1)
_BATCHINGS: st.SearchStrategy[BatchingPolicy] = st.one_of(
    st.builds(ContinuousBatching),
    st.builds(ContinuousBatching),
    st.builds(ContinuousBatching, st.sampled_from([0.5, 1.0])),
    st.builds(StaticBatching, st.integers(1, 4)),
    st.builds(StaticBatching, st.integers(1, 4), st.floats(0, 9)),
)


@st.composite
def kv_groups(draw: st.DrawFn) -> tuple[KVGroup, ...]:
    """None, as most have; a full group, one with a window, or both, with 1 to 3 pages a block."""
    pages, window = st.integers(1, 3), st.sampled_from([8, 2, 5, 17, 1])
    kinds = draw(st.sampled_from(["", "", "full", "both", "both", "window", "two windows"]))
    groups = []
    if kinds in ("full", "both", "two windows"):
        groups.append(KVGroup(0, None, draw(pages)))
    for _ in range({"both": 1, "window": 1, "two windows": 2}.get(kinds, 0)):
        groups.append(KVGroup(len(groups), draw(window), draw(pages)))
    return tuple(groups)


@st.composite
def state_pages(draw: st.DrawFn) -> int:
    """None, or a recurrent state of 1 to 3 pages."""
    return draw(st.sampled_from([0, 0, 1, 2, 3]))


@st.composite
def executors(draw: st.DrawFn) -> ExecutorSpec:
    """Small ones: memory, slots and budget all run short."""
    block_size, max_num_seqs = draw(st.sampled_from([4, 1, 2, 8])), draw(st.sampled_from([4, 6, 8, 5, 3, 2, 1]))
    groups, pages_per_state = draw(kv_groups()), draw(state_pages())
    return ExecutorSpec(
        block_size=block_size,
        num_blocks=max(3, draw(st.sampled_from([64, 48, 160, 32, 80])) // block_size)
        * (sum(group.pages_per_block for group in groups) or 1)
        + pages_per_state * draw(st.sampled_from([max_num_seqs, 2, 2 * max_num_seqs])),
        kv_groups=groups,
        pages_per_state=pages_per_state,
        num_slots=max_num_seqs + draw(st.integers(0, 3)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([24, 8, 4, 12, 0])),
        max_model_len=MAX_MODEL_LEN,
        watermark=draw(st.sampled_from([0.0, 0.1])),
        num_host_blocks=draw(st.sampled_from([30, 0, 6, 30])),
        max_drafts=draw(st.sampled_from([0, 3, 1, 0, 6])),
        max_loras=(max_loras := draw(st.sampled_from([2, 1, 3]))),
        max_cpu_loras=max_loras + draw(st.sampled_from([1, 0, 4])),
        grammar_engine=_ENGINE,
    )


def policies() -> st.SearchStrategy[Policies]:
    """Every order, batching and preemption, caching on and off."""
    return st.builds(
        Policies,
        order=st.one_of(*map(st.builds, (FcfsOrder, PriorityOrder, ShortestFirstOrder, FairOrder))),
        batching=_BATCHINGS,
        max_wait_s=st.none() | st.floats(0, 60),
        long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
        prefix_caching=st.sampled_from([True, True, False]),
        preemption=st.sampled_from(["swap", "recompute", "auto"]),
    )


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Some begin alike."""
    beginning = st.builds(lambda tokens, count: tokens[:count], st.sampled_from(_BEGINNINGS), st.integers(0, 25))
    return st.builds(lambda begin, end: (*begin, *end), beginning, st.lists(_TOKEN, min_size=1, max_size=5))


@st.composite
def requests(draw: st.DrawFn, request_id: str, prompt: tuple[int, ...]) -> RequestSpec:
    """Greedy, sampled, n samples or beams, with all that rules tokens out."""
    kind = draw(st.sampled_from(["greedy", "sampled", "n", "beams"]))
    stop_ids = tuple(draw(st.lists(_TOKEN, max_size=3, unique=True)))
    max_tokens = draw(st.sampled_from([15, 1, 5, 25, 15, None]))
    sampling = core_sampling(
        temperature=0.0 if kind == "greedy" else 1.0,
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=stop_ids,
        min_tokens=min(draw(st.sampled_from([0, 0, 2])), max_tokens or 2),
        num_prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        allowed_token_ids=tuple(draw(st.sampled_from([[], [], [], list(range(0, VOCAB_SIZE, 7))]))),
        bad_words=tuple(draw(st.sampled_from([[], [], [(3,)], [(5, 6), (21,), (28,)]]))),
        grammar=draw(st.sampled_from([None, None, _GRAMMAR])),
    )
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        eos_token_ids=frozenset(stop_ids[:1]),
        cache_salt=draw(st.sampled_from([b"", b"", b"salt"])),
        uses_prefix_cache=draw(st.sampled_from([True, True, True, False])),
        priority=draw(st.integers(-1, 1)),
        tenant=draw(st.sampled_from(["", "", "a"])),
        expected_output_tokens=draw(st.none() | st.integers(1, 30)),
        max_drafts=draw(st.sampled_from([None, None, 2, 0])),
        **draw(_sequences(kind)),
    )


@st.composite
def _sequences(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    if kind == "n":
        return {"num_samples": draw(st.integers(2, 4))}
    if kind != "beams":
        return {}
    width = draw(st.integers(2, 4))
    beams = BeamSpec(width, draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])), draw(st.sampled_from([False, True, None])))
    return {"beams": beams, "num_samples": draw(st.integers(1, width))}
