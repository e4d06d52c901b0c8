"""A load with all decoding algorithms, the settings that it is run in, and what each of its requests gets alone."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.types import BeamSpec, RequestSpec
from tests.checkpoints import make_llama
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.helpers.core.core_chats import Chat, Outcome, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.executor.known_drafts import KnownDrafts
from tests.helpers.kept import kept_copy

VOCAB_SIZE, MAX_TOKENS = 131, 12
STOPS = tuple(range(1, 131, 11))
"""So many that outputs end at all lengths."""


# --- the load --------------------------------------------------------------------------------------------------------


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(1000 * seed + length)
    return tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(length))


SYSTEM = text(43, seed=1)
DRAWN = core_sampling(temperature=0.9, seed=1_000_003)
GREEDY = SequenceSampling()
BEAMS = core_sampling(stop_token_ids=STOPS)


def chat(name: str, prompt: tuple[int, ...], sampling: SequenceSampling, turns: int = 0, **fields: Any) -> Chat:
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


def with_fields(sampling: SequenceSampling, **fields: Any) -> SequenceSampling:
    """The same but for these fields, whether the core reads them or not."""
    return replace(sampling, **fields)


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
        chat(
            "ends by itself", text(17), with_fields(DRAWN, stop_token_ids=STOPS), eos_token_ids=frozenset(STOPS)
        ),
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

SMALL: dict[str, Any] = {"block_size": 8, "num_blocks": 24}
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
    "newcomers held back": Setting(max_num_seqs=6, options={"waiting_served_ratio": 2.0, "order": "fair"}),
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
        **SMALL, num_host_blocks=9, options={"preemption": "swap"} | NO_CACHE, happens=SWAPS | {"recompute beams"}
    ),
    "auto": Setting(
        **SMALL, **ROOM, depth=4, arrivals="scattered", options={"preemption": "auto"},
        happens=SWAPS | {"recompute samples"},
    ),
    "auto, more blocks": Setting(
        block_size=8, num_blocks=26, **ROOM, depth=3, arrivals="scattered", options={"preemption": "auto"},
        happens=SWAPS | {"recompute beams"},
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


# --- what each request gets alone -------------------------------------------------------------------------------------


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


def kept_outcome(folder: Path, wanted: object, make: Callable[[], Outcome]) -> Outcome:
    """Return what `make` returns; called once for equal `wanted` in a run of the tests. folder: a new one."""
    kept_copy(folder, ("outcome", wanted), lambda made: _write(made / "outcome", make()))
    outcome: Outcome = pickle.loads((folder / "outcome").read_bytes())
    return outcome


def _write(path: Path, outcome: Outcome) -> None:
    path.write_bytes(pickle.dumps(outcome))


def golden_in(dtype: str, folder: Path) -> Iterator[Golden]:
    """For fixtures: the load's outcome on a model of this dtype."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_llama(folder, dtype=getattr(torch, dtype))
    model = Model(folder, dtype=dtype)

    def alone() -> Outcome:
        expected, happened = run(model, ALONE)
        assert not happened
        return expected

    yield Golden(folder, model, kept_outcome(folder / "alone", dtype, alone), dtype)
    torch.set_num_threads(before)
