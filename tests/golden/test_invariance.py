"""A request's tokens and logprobs, to the bit, whatever it is batched with, on the real CPU executor.

Over batch composition, order of arrival, batching policies and orders of service, chunk and block sizes, plans in
flight, preemption by recompute and by swap in pools so small that it happens, the prefix cache and its host tier, and
sessions that break; in one process, where a run repeats itself exactly, and through both services over gRPC. All
decoding algorithms in one load; fp32 and bf16.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import AsyncClient, RequestOutput, SamplingParams
from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from scheduler_svc.core.types import BeamSpec, FinishDetail, RequestSpec, Sampling
from tests.checkpoints import blend, make_llama
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.helpers.core_model import Chat, Outcome, Rig, Setting
from tests.helpers.core_sampling import core_sampling
from tests.helpers.eagle3_heads import Format, HeadShape, make_head
from tests.helpers.known_drafts import KnownDrafts
from tests.helpers.marks import short_and_long
from tests.helpers.random_loads import draw_setting
from tests.helpers.services import cadenza_services

VOCAB_SIZE, MAX_TOKENS = 131, 20
STOPS = tuple(range(1, 131, 11))
"""So many that outputs end at all lengths."""


# --- the load --------------------------------------------------------------------------------------------------------


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(1000 * seed + length)
    return tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(length))


SYSTEM = text(43, seed=1)
DRAWN = core_sampling(temperature=0.9, seed=1_000_003)
GREEDY = Sampling()
BEAMS = core_sampling(stop_token_ids=STOPS)


def chat(name: str, prompt: tuple[int, ...], sampling: Sampling, turns: int = 0, **fields: Any) -> Chat:
    """With a tenant, a priority and an expected length by its name, and a seed of its own."""
    rng = random.Random(name)
    given = {
        "tenant": rng.choice(["", "", "other"]) if prompt[:8] != SYSTEM[:8] else "",
        "priority": rng.randrange(3),
        "expected_output_tokens": rng.choice([None, 5, 30]),
        "eos_token_ids": frozenset(STOPS[:2]),
        "max_drafts": random.Random(f"{name}, drafts").choice([None, None, None, 0, 1]),
        **fields,
    }
    spec = RequestSpec(name, prompt, replace(sampling, seed=rng.getrandbits(64)), MAX_TOKENS, **given)
    return Chat(spec, tuple(text(3 + 6 * turn, seed=turn) for turn in range(turns)))


def with_fields(sampling: Sampling, **fields: Any) -> Sampling:
    """The same but for these fields, whether the core reads them or not."""
    own = {each.name: getattr(sampling, each.name) for each in dataclasses.fields(sampling) if each.name != "values"}
    return core_sampling(**{**own, **sampling.values, **fields})


def load() -> list[Chat]:
    scored = with_fields(DRAWN, num_logprobs=3)
    punished = with_fields(scored, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    words = ((17,), (23, 42), *((i, i) for i in range(50, 131)))
    return [
        chat("one token", text(1), GREEDY),
        chat("greedy", text(64), with_fields(GREEDY, num_logprobs=2)),
        chat(
            "drawn, cut down", text(7),
            with_fields(scored, top_p=0.9, top_k=40, min_p=0.02, stop_token_ids=STOPS[:4]),
        ),
        chat("ends by itself", text(17), with_fields(DRAWN, stop_token_ids=STOPS)),
        chat("penalties", text(31), punished),
        chat(
            "bad words, late stops", text(16), with_fields(scored, bad_words=words, stop_token_ids=STOPS, min_tokens=9)
        ),
        chat("bias", text(33), with_fields(scored, bias_token_ids=(5, 60, 99), biases=(2.5, 3.0, -100.0))),
        chat("allowed", text(12), with_fields(scored, allowed_token_ids=tuple(range(3, 90, 4)))),
        chat("prompt logprobs", text(65), with_fields(scored, num_prompt_logprobs=2)),
        chat("three", text(32), scored, num_samples=3),
        chat("three, punished", text(21), with_fields(punished, stop_token_ids=STOPS, min_tokens=3), num_samples=3),
        chat("two beams", text(25), GREEDY, num_samples=2, beams=BeamSpec(2)),
        chat("four beams", text(8), BEAMS, num_samples=3, beams=BeamSpec(4, 2.0, None)),
        chat(
            "beams, edited", text(19), with_fields(BEAMS, min_tokens=5, repetition_penalty=1.2, num_prompt_logprobs=1),
            num_samples=4, beams=BeamSpec(4, 0.6, True),
        ),
        chat("first question", SYSTEM + text(5), GREEDY, turns=2),
        chat("second question", SYSTEM + text(9), with_fields(scored, stop_token_ids=STOPS[:3]), turns=2),
        chat("three answers", SYSTEM + text(6), scored, turns=1, num_samples=3),
        chat("beams over it", SYSTEM + text(3), BEAMS, turns=1, num_samples=1, beams=BeamSpec(4)),
        chat("its prompt told", SYSTEM + text(7), with_fields(DRAWN, num_prompt_logprobs=0)),
        chat("opted out", SYSTEM + text(11), scored, uses_prefix_cache=False),
        chat("salted", SYSTEM + text(2), scored, cache_salt=b"salt"),
    ]  # fmt: skip


# --- many ways -------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"block_size": 8, "num_blocks": 34}
ROOM: dict[str, Any] = {"num_host_blocks": 200}
NO_CACHE = {"enable_prefix_caching": False}
ALONE = Setting(num_blocks=100, max_num_batched_tokens=512, depth=1, arrivals="alone", options=NO_CACHE)


HITS = frozenset({"hits"})
DRAFTS = frozenset({"drafts"})
SWAPS = frozenset({"swap one", "swap samples", "swap beams"})
RECOMPUTES = frozenset({"recompute one", "recompute samples", "recompute beams"})

SETTINGS: dict[str, Setting] = {
    "all at once": Setting(happens=HITS),
    "no cache, one plan in flight": Setting(depth=1, options=NO_CACHE),
    "other order, three plans": Setting(depth=3, arrivals="shuffled", happens=HITS),
    "now and then, four plans": Setting(depth=4, arrivals="scattered", happens=HITS),
    "alone, cached": Setting(arrivals="alone", happens=HITS),
    "small chunks, few at once": Setting(block_size=8, max_num_seqs=7, max_num_batched_tokens=11, depth=3),
    "odd chunks, blocks of 32": Setting(block_size=32, max_num_batched_tokens=37, options=NO_CACHE),
    "long prompts in pieces, blocks of 64": Setting(block_size=64, options={"long_prefill_token_threshold": 11}),
    "static": Setting(arrivals="scattered", options={"batching": "static", "batch_size": 4}),
    "static, few blocks": Setting(**SMALL, max_num_seqs=9, options={"batching": "static", "batch_size": 5}),
    "dynamic": Setting(
        arrivals="scattered", depth=3, options={"batching": "dynamic", "batch_size": 5, "batch_window_ms": 40}
    ),
    "newcomers held back": Setting(
        max_num_seqs=6, options={"waiting_served_ratio": 2.0, "max_waiting_steps": 7, "order": "fair"}
    ),
    "recompute": Setting(**SMALL, happens=HITS | RECOMPUTES - {"recompute samples"}),
    "recompute, no cache, four plans": Setting(**SMALL, depth=4, options=NO_CACHE, happens=RECOMPUTES),
    "swap": Setting(**SMALL, **ROOM, options={"preemption": "swap"}, happens=HITS | SWAPS),
    "swap, no cache, one plan": Setting(
        **SMALL, **ROOM, depth=1, arrivals="scattered", options={"preemption": "swap"} | NO_CACHE, happens=SWAPS
    ),
    "swap, four plans, blocks of 16": Setting(
        num_blocks=22, num_host_blocks=200, depth=4, options={"preemption": "swap"}, happens=SWAPS
    ),
    "swap, a small host pool": Setting(
        **SMALL, num_host_blocks=14, options={"preemption": "swap"} | NO_CACHE, happens=SWAPS | {"recompute beams"}
    ),
    "auto": Setting(
        **SMALL, **ROOM, depth=3, arrivals="scattered", options={"preemption": "auto"},
        happens=SWAPS | {"recompute samples", "recompute beams"},
    ),
    "the urgent first": Setting(
        **SMALL, **ROOM, arrivals="scattered", options={"order": "priority", "preemption": "swap"},
        happens=SWAPS,
    ),
    "the short first": Setting(
        **SMALL, options={"order": "sjf", "max_wait_s": 0.3, "long_prefill_token_threshold": 9},
        happens=RECOMPUTES,
    ),
    "cached in the host pool": Setting(
        **SMALL, **ROOM, max_num_seqs=5, arrivals="scattered", happens=HITS | {"host hits"}
    ),
    "broken sessions": Setting(**SMALL, **ROOM, depth=3, loses_every=45, options={"preemption": "swap"}),
    "kept sessions, swap": Setting(
        **SMALL, **ROOM, cuts_every=7, options={"preemption": "swap"}, happens=SWAPS | {"kept sessions"}
    ),
    "kept sessions, recompute, small chunks": Setting(
        **SMALL, depth=3, max_num_batched_tokens=30, arrivals="scattered", cuts_every=9,
        options={"long_prefill_token_threshold": 9}, happens=HITS | {"kept sessions"},
    ),
    "kept sessions, no cache": Setting(
        **SMALL, depth=1, cuts_every=5, options={"preemption": "recompute"} | NO_CACHE,
        happens=frozenset({"kept sessions"}),
    ),
    "aborts": Setting(
        **SMALL, **ROOM, arrivals="scattered", aborts=True, options={"preemption": "swap"}, happens=SWAPS
    ),
    "drafts": Setting(max_num_seqs=100, max_drafts=5, happens=HITS | DRAFTS),
    "drafts, one plan in flight": Setting(max_num_seqs=60, depth=1, max_drafts=3, options=NO_CACHE, happens=DRAFTS),
    "drafts, four plans, now and then": Setting(
        max_num_seqs=60, depth=4, arrivals="scattered", max_drafts=4, happens=HITS | DRAFTS
    ),
    "drafts, small chunks": Setting(
        block_size=8, max_num_seqs=40, max_num_batched_tokens=41, depth=3, max_drafts=7, happens=DRAFTS
    ),
    "drafts, few rows of logits": Setting(max_num_seqs=7, max_num_batched_tokens=11, max_drafts=4, happens=DRAFTS),
    "drafts, recompute": Setting(**SMALL, max_num_seqs=50, max_drafts=4, happens=RECOMPUTES | DRAFTS),
    "drafts, swap": Setting(
        **SMALL, **ROOM, max_num_seqs=50, depth=4, max_drafts=4, options={"preemption": "swap"},
        happens=SWAPS | DRAFTS,
    ),
    "drafts, broken sessions": Setting(
        **SMALL, **ROOM, depth=3, loses_every=35, max_num_seqs=50, max_drafts=3, options={"preemption": "swap"},
        happens=DRAFTS,
    ),
    "drafts, kept sessions": Setting(
        **SMALL, **ROOM, cuts_every=7, max_num_seqs=50, max_drafts=4, options={"preemption": "swap"},
        happens=DRAFTS | {"kept sessions"},
    ),
    "drafts, aborts": Setting(
        **SMALL, arrivals="scattered", aborts=True, max_num_seqs=50, max_drafts=4, happens=DRAFTS
    ),
}  # fmt: skip

IN_BFLOAT16 = (
    "all at once", "small chunks, few at once", "long prompts in pieces, blocks of 64", "recompute", "swap",
    "cached in the host pool", "drafts", "drafts, swap",
)  # fmt: skip
"""One of each kind of chunk and of block moves: the scheduler knows nothing of the dtype."""


# --- the test --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """A model, and the outcome of each request of the load alone."""

    folder: Path
    model: Model
    expected: Outcome
    dtype: str


MODEL_DRAFTS = ("drafts", "drafts, one plan in flight", "drafts, recompute", "drafts, swap", "drafts, broken sessions",
                "drafts, kept sessions")  # fmt: skip
"""Settings with a draft model: what its layers of the blocks hold is moved, lost and kept."""


def run(model: Model, setting: Setting, expected: Outcome | None = None) -> tuple[Outcome, Counter[str]]:
    """expected: what drafts are made from; they are wrong now and then."""
    drafts = None
    if setting.max_drafts and expected is not None:
        drafts = KnownDrafts(known_texts(expected), VOCAB_SIZE, acceptance=0.8)
    rig = Rig(model, setting, drafts)
    return rig.run(load()), +rig.happened


def known_texts(outcome: Outcome) -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompts with an output of theirs."""
    known = []
    for first in load():
        chat = first
        while True:
            answers = [outcome[chat.spec.request_id, index].token_ids for index in range(chat.spec.num_samples)]
            known += [(chat.spec.prompt_token_ids, answer) for answer in answers]
            if not chat.says:
                break
            chat = chat.turn(answers[0])
    return known


DTYPES = "float32", "bfloat16"


@pytest.fixture(scope="module", params=DTYPES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_llama(tmp_path_factory.mktemp("model"), dtype=getattr(torch, request.param))
    model = Model(folder, dtype=request.param)
    expected, happened = run(model, ALONE)
    assert not happened
    yield Golden(folder, model, expected, request.param)
    torch.set_num_threads(before)


def check(golden: Golden, setting: Setting) -> None:
    found, happened = run(golden.model, setting, golden.expected)
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    assert setting.happens <= happened.keys()


def test_the_load_has_something_of_everything(golden: Golden) -> None:
    alone = list(golden.expected.values())
    assert len({tuple(one.token_ids) for one in alone}) == len(alone), "the outputs differ"
    assert {one.finish.detail for one in alone if one.finish} == {
        FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.MAX_TOKENS
    }  # fmt: skip
    assert sum(1 for one in alone if one.logprobs) > 15
    assert sum(1 for one in alone if one.prompt_logprobs) == 3
    assert sum(1 for one in alone if one.cumulative_logprob is not None) == 11


@pytest.mark.parametrize(
    ("golden", "name"),
    [*(("float32", name) for name in SETTINGS), *(("bfloat16", name) for name in IN_BFLOAT16)],
    indirect=["golden"],
    scope="module",  # or what each request gets alone would be computed again for each of them
)
def test_same_request_same_bits(golden: Golden, name: str) -> None:
    check(golden, SETTINGS[name])


@pytest.mark.parametrize(
    ("golden", "name", "share"),
    short_and_long(
        [(dtype, name, share) for dtype in DTYPES for name in MODEL_DRAFTS for share in (0.06, 0.0)],
        [
            *(("float32", name, 0.06) for name in MODEL_DRAFTS),
            ("float32", "drafts, swap", 0.0),
            ("float32", "drafts, kept sessions", 0.0),
            ("bfloat16", "drafts, swap", 0.06),
        ],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits_with_a_draft_model(golden: Golden, name: str, share: float, tmp_path: Path) -> None:
    """Of other weights, drafts are accepted and refused. With the target's own weights and noise all are accepted
    but those behind a stop token, or what the model has read of its KV was wrong."""
    folder = make_llama(tmp_path, seed=1, dtype=getattr(torch, golden.dtype))
    blend(folder, golden.folder, share)
    config = ExecutorConfig(**{**golden.model.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, golden.model.device, golden.model.loaded)
    rig = Rig(golden.model, SETTINGS[name], draft_model=draft)
    found = rig.run(load())
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    counts = rig.core.lanes[0].counts.drafts
    accepted = sum(counts.accepted) / sum(counts.drafted)
    assert accepted < 1 or not share
    assert accepted > (0.2 if share else 0.95), counts


@pytest.mark.parametrize(
    ("golden", "name", "layout"),
    short_and_long(
        [(dtype, name, layout) for dtype in DTYPES for name in MODEL_DRAFTS for layout in ("old", "new")],
        [
            *(("float32", name, ("old", "new")[index % 2]) for index, name in enumerate(MODEL_DRAFTS)),
            ("bfloat16", "drafts, swap", "old"),
        ],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits_with_a_head(golden: Golden, name: str, layout: Format, tmp_path: Path) -> None:
    """Its weights are random: drafts are right where few tokens are allowed, by noise that it shares."""
    folder = make_head(tmp_path, HeadShape(layout), dtype=getattr(torch, golden.dtype))
    config = ExecutorConfig(**{**golden.model.options, "speculative": "eagle3", "speculative_model": str(folder)})
    head = load_eagle3(str(folder), config, golden.model.device, golden.model.loaded)
    rig = Rig(golden.model, SETTINGS[name], draft_model=head)
    found = rig.run(load())
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    counts = rig.core.lanes[0].counts.drafts
    assert 0 < sum(counts.accepted) < sum(counts.drafted)


@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once(golden: Golden, seed: int) -> None:
    check(golden, draw_setting(random.Random(seed)))


# --- the same over gRPC ----------------------------------------------------------------------------------------------

SERVED: dict[str, dict[str, Any]] = {
    "roomy": {"num_gpu_blocks": 600, "max_num_batched_tokens": 64},
    "few blocks, swap": {
        "num_gpu_blocks": 34, "block_size": 8, "num_cpu_blocks": 200,
        "scheduler": {"preemption": "swap", "max_inflight_plans": 4},
    },
    "dynamic": {  # What is reserved is never fought over, few blocks as there are.
        "num_gpu_blocks": 34, "block_size": 8,
        "scheduler": {"batching": "dynamic", "batch_size": 6, "batch_window_ms": 20, "order": "sjf"},
    },
    "n-gram drafts": {"num_gpu_blocks": 600, "max_num_seqs": 100, "speculative": "ngram", "num_speculative_tokens": 3},
    "few blocks, suffix drafts": {
        "num_gpu_blocks": 34, "block_size": 8, "num_cpu_blocks": 200, "max_num_seqs": 60, "speculative": "suffix",
        "scheduler": {"preemption": "swap"},
    },
    "drafts as they pay": {"num_gpu_blocks": 600, "max_num_seqs": 100, "speculative": "auto"},
}  # fmt: skip


def to_params(spec: RequestSpec) -> SamplingParams:
    """The request as a client sends it; every stop token by its id."""
    sampling, beams = spec.sampling, spec.beams
    never = {True: True, False: False, None: "never"}
    search: dict[str, Any] = (
        {"beam_width": beams.width, "length_penalty": beams.length_penalty}
        | {"early_stopping": never[beams.early_stopping]}
        if beams
        else {}
    )
    values = dict(sampling.values)
    biases = dict(zip(values.pop("bias_token_ids", ()), values.pop("biases", ()), strict=True))
    return SamplingParams(
        n=spec.num_samples, seed=sampling.seed, max_tokens=spec.max_tokens, min_tokens=sampling.min_tokens,
        ignore_eos=True, stop_token_ids=list(sampling.stop_token_ids), logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs, priority=spec.priority, logit_bias=biases or None,
        **{"temperature": 0.0} | values, **search,
    )  # fmt: skip


def check_output(golden: Golden, request_id: str, output: RequestOutput) -> None:
    for sample in output.outputs:
        alone = golden.expected[request_id, sample.index]
        assert sample.token_ids == alone.token_ids, request_id
        rows = zip(sample.logprobs or (), sample.token_ids, strict=sample.logprobs is not None)
        assert [row[token_id].logprob for row, token_id in rows] == alone.chosen_logprobs, request_id
        if alone.cumulative_logprob is not None:
            assert sample.cumulative_logprob == alone.cumulative_logprob, request_id


@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [(dtype, name) for dtype in DTYPES for name in SERVED],
        [*(("float32", name) for name in SERVED), ("bfloat16", "few blocks, swap")],
    ),
    indirect=["golden"],
    scope="module",
)
async def test_the_same_through_both_services(golden: Golden, name: str) -> None:
    """What the core and the executor say of it in one process; words to ban need a tokenizer, and are left out."""
    chats = [chat for chat in load() if not chat.spec.sampling.values.get("bad_words")]
    options = {"max_num_seqs": 24, "num_threads": NUM_THREADS, **SERVED[name]}
    async with cadenza_services(golden.folder, dtype=golden.dtype, **options) as running:
        async with AsyncClient(running.target) as client:
            while chats:
                prompts = [
                    {"prompt_token_ids": list(chat.spec.prompt_token_ids), "cache_salt": chat.spec.cache_salt.hex()}
                    for chat in chats
                ]
                outputs = await client.generate(prompts, [to_params(chat.spec) for chat in chats])
                for chat, output in zip(chats, outputs, strict=True):
                    check_output(golden, chat.spec.request_id, output)
                answers = [output.outputs[0].token_ids for output in outputs]
                chats = [chat.turn(answer) for chat, answer in zip(chats, answers, strict=True) if chat.says]
        load_now = await running.load()
        assert (load_now.num_preemptions > 0) is name.startswith("few")
        assert load_now.num_prefix_hits > 0
        await running.wait_until_free()
