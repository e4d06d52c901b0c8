"""A request's tokens and logprobs, to the bit, whatever it is batched with: the core over the real CPU executor.

Over batch composition, order of arrival, batching policies and orders of service, chunk and block sizes, plans in
flight, preemption by recompute and by swap in pools so small that it happens, the prefix cache and its host tier, and
sessions that break. All decoding algorithms in one load; fp32 and bf16. KV that nobody has computed is NaN.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.convert import plan_from_wire, result_to_wire
from executor_svc.description import limits_of
from executor_svc.model_runner import ModelRunner
from executor_svc.step import StepExecutor
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.convert.execution import step_plan, step_result
from scheduler_svc.core.news import News
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import (
    BeamSpec,
    ExecutorSpec,
    Finish,
    FinishDetail,
    RequestSpec,
    Sampling,
    StepPlan,
    StepResult,
)
from scheduler_svc.make_rules import make_rules
from tests.checkpoints import make_llama
from tests.kernels.driver import NUM_THREADS, Model

VOCAB_SIZE, MAX_TOKENS = 131, 20
STOPS = tuple(range(1, 131, 11))
"""So many that outputs end at all lengths."""
NO_EOS: frozenset[int] = frozenset()


# --- the load --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """A request, and what the user says after each answer: every turn's prompt is all that was said before."""

    spec: RequestSpec
    says: tuple[tuple[int, ...], ...] = ()

    def turn(self, answer: list[int]) -> Chat:
        """The next one."""
        prompt = (*self.spec.prompt_token_ids, *answer, *self.says[0])
        return Chat(
            replace(self.spec, request_id=f"{self.spec.request_id}, on", prompt_token_ids=prompt), self.says[1:]
        )


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(1000 * seed + length)
    return tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(length))


SYSTEM = text(43, seed=1)
DRAWN = Sampling(temperature=0.9, seed=1_000_003)
GREEDY = Sampling(temperature=0.0)
BEAMS = Sampling(temperature=0.0, stop_token_ids=STOPS)


def chat(name: str, prompt: tuple[int, ...], sampling: Sampling, turns: int = 0, **fields: Any) -> Chat:
    """With a tenant, a priority and an expected length by its name, and a seed of its own."""
    rng = random.Random(name)
    given = {
        "tenant": rng.choice(["", "", "other"]) if prompt[:8] != SYSTEM[:8] else "",
        "priority": rng.randrange(3),
        "expected_output_tokens": rng.choice([None, 5, 30]),
        "eos_token_ids": frozenset(STOPS[:2]),
        **fields,
    }
    spec = RequestSpec(name, prompt, replace(sampling, seed=rng.getrandbits(64)), MAX_TOKENS, **given)
    return Chat(spec, tuple(text(3 + 6 * turn, seed=turn) for turn in range(turns)))


def load() -> list[Chat]:
    asked = replace(DRAWN, num_logprobs=3)
    punished = replace(asked, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    words = ((17,), (23, 42), *((i, i) for i in range(50, 131)))
    return [
        chat("one token", text(1), GREEDY),
        chat("greedy", text(64), replace(GREEDY, num_logprobs=2)),
        chat("drawn, cut down", text(7), replace(asked, top_p=0.9, top_k=40, min_p=0.02, stop_token_ids=STOPS[:4])),
        chat("ends by itself", text(17), replace(DRAWN, stop_token_ids=STOPS)),
        chat("penalties", text(31), punished),
        chat("bad words, late stops", text(16), replace(asked, bad_words=words, stop_token_ids=STOPS, min_tokens=9)),
        chat("bias", text(33), replace(asked, bias_token_ids=(5, 60, 99), biases=(2.5, 3.0, -100.0))),
        chat("allowed", text(12), replace(asked, allowed_token_ids=tuple(range(3, 90, 4)))),
        chat("prompt logprobs", text(65), replace(asked, num_prompt_logprobs=2)),
        chat("three", text(32), asked, num_samples=3),
        chat("three, punished", text(21), replace(punished, stop_token_ids=STOPS, min_tokens=3), num_samples=3),
        chat("two beams", text(25), GREEDY, num_samples=2, beams=BeamSpec(2)),
        chat("four beams", text(8), BEAMS, num_samples=3, beams=BeamSpec(4, 2.0, None)),
        chat(
            "beams, edited", text(19), replace(BEAMS, min_tokens=5, repetition_penalty=1.2, num_prompt_logprobs=1),
            num_samples=4, beams=BeamSpec(4, 0.6, True),
        ),
        chat("first question", SYSTEM + text(5), GREEDY, turns=2),
        chat("second question", SYSTEM + text(9), replace(asked, stop_token_ids=STOPS[:3]), turns=2),
        chat("three answers", SYSTEM + text(6), asked, turns=1, num_samples=3),
        chat("beams over it", SYSTEM + text(3), BEAMS, turns=1, num_samples=1, beams=BeamSpec(4)),
        chat("its prompt told", SYSTEM + text(7), replace(DRAWN, num_prompt_logprobs=0)),
        chat("opted out", SYSTEM + text(11), asked, uses_prefix_cache=False),
        chat("salted", SYSTEM + text(2), asked, cache_salt=b"salt"),
    ]  # fmt: skip


@dataclass
class Told:
    """All that was told of a sample; the bits of its logprobs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    cumulative_logprob: float | None = None
    finish: Finish | None = None


Outcome = dict[tuple[str, int], Told]
"""By request id and sample index."""


# --- one way to run it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Sizes, options of the scheduler, who comes when, and what must happen: no more, no less."""

    block_size: int = 16
    num_blocks: int = 600
    num_host_blocks: int = 0
    max_num_seqs: int = 24
    max_num_batched_tokens: int = 256
    depth: int = 2
    arrivals: str = "together"
    """Or alone, one after the other; shuffled; scattered over the steps."""
    loses_every: int = 0
    """The session with the executor breaks after so many steps."""
    aborts: bool = False
    """Others come that are aborted."""
    happens: frozenset[str] = frozenset()
    """Of recompute, swap, hits and host hits."""
    options: dict[str, Any] = field(default_factory=dict)


class Rig:
    """The core, a model's executor, and the plans in flight between them; time is counted, not taken."""

    def __init__(self, model: Model, setting: Setting) -> None:
        config = ExecutorConfig(
            **model.options
            | {
                "block_size": setting.block_size,
                "num_gpu_blocks": setting.num_blocks,
                "num_cpu_blocks": setting.num_host_blocks,
                "max_num_seqs": setting.max_num_seqs,
                "max_num_batched_tokens": setting.max_num_batched_tokens,
            }
        )
        geometry = model.loaded.geometry
        self.setting = setting
        self.pools = model.device.new_kv_cache(geometry, config)
        limits = limits_of(config, geometry, self.pools)
        self.executor = StepExecutor(ModelRunner(model.loaded, model.device, self.pools), self.pools, limits)
        self.core = Scheduler(make_rules(SchedulerConfig(**setting.options)))
        spec = ExecutorSpec(
            block_size=limits.block_size,
            num_blocks=limits.num_device_blocks,
            num_slots=limits.num_slots,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_host_blocks=limits.num_host_blocks,
            bytes_per_block=self.pools.bytes_per_block,
        )
        self.core.add_executor(0, spec)
        self.plans: deque[StepPlan] = deque()
        self.chats: dict[str, Chat] = {}
        self.doomed: deque[RequestSpec] = deque()
        self.outcome: Outcome = {}
        self.happened: Counter[str] = Counter()
        self.now = 0.0
        self.num_applied = 0
        self.lose_memory()

    def lose_memory(self) -> None:
        """Whoever reads what was not computed since then fails."""
        self.executor.clear()
        for layer in (*self.pools.layers, *self.pools._host_layers):
            layer.fill_(float("nan"))

    def run(self, coming: Iterator[list[Chat]]) -> Outcome:
        """Until all is told. `coming`: who comes before each step; it may look at what is there."""
        for chats in coming:
            for one in chats:
                self.add(one)
            self.step()
        while self.core.groups or self.plans:
            self.step()
        self.step()
        lane = self.core.lanes[0]
        assert lane.blocks.num_free == self.setting.num_blocks
        assert lane.blocks.num_used_host == 0
        assert not self.executor.slots.admitted.any()
        if self.core.lanes[0].blocks.num_prefix_hits:
            self.happened["hits"] += 1
        return self.outcome

    def add(self, one: Chat) -> None:
        self.chats[one.spec.request_id] = one
        self.core.add_request(one.spec, self.now)
        self.core.drain(False)
        for index in range(one.spec.num_samples):
            self.outcome[one.spec.request_id, index] = Told()

    def disturb(self, rng: random.Random) -> None:
        """One comes that is aborted before it ends."""
        fields = rng.choice([{"num_samples": 3}, {"beams": BeamSpec(3), "num_samples": 2}, {}])
        doomed = chat(f"doomed at {self.now}", SYSTEM[: rng.randrange(8, 43)], DRAWN, **fields)
        self.add(doomed)
        self.doomed.append(doomed.spec)
        if len(self.doomed) > 2:
            self.take(self.core.abort(self.doomed.popleft().key, FinishDetail.ABORTED))

    def step(self) -> None:
        """Plan as far ahead as may be, then let the oldest plan run."""
        self.now += 0.01
        while len(self.plans) < self.setting.depth and self.plan():
            pass
        if self.plans:
            self.apply()
            self.num_applied += 1
            if self.setting.loses_every and self.num_applied % self.setting.loses_every == 0:
                self.plans.clear()
                self.lose_memory()
                self.take(self.core.executor_lost(0, self.now))
        elif (wakes_at := self.core.wakes_at(0, self.now)) is not None:
            self.now = wakes_at
        elif self.core.groups:
            self.core.drain(True)

    def plan(self) -> bool:
        plan = self.core.plan_step(0, self.now)
        self.take(self.core.take_news())
        self.core.check_integrity()
        if plan is None:
            return False
        self.plans.append(plan)
        step = self.core.lanes[0].inflight[-1]
        self.happened["swap"] += len(step.swapped_out)
        self.happened["recompute"] += len(step.preempted) - len(step.swapped_out)
        self.happened["host hits"] += bool(plan.swapped_in and not step.swapped_in)
        return True

    def apply(self) -> None:
        plan = self.plans.popleft()
        result = step_result(result_to_wire(self.executor.execute(plan_from_wire(step_plan(plan, 1)), 0), 1, 1))
        assert not result.error_slots
        news = self.core.apply_result(0, modelled(plan, result), self.now)[1]
        self.core.check_integrity()
        self.take(news)

    def take(self, news: News) -> None:
        for delta in news:
            told = self.outcome[delta.key[1], delta.sample_index]
            assert told.finish is None, "news of a sample that has ended"
            told.token_ids += delta.token_ids
            for row in delta.logprobs:
                ids = array("q", (row.rank, *row.top_token_ids)).tobytes()
                told.logprobs += ids + bits(row.logprob, *row.top_logprobs)
            if (prompt := delta.prompt_logprobs) is not None:
                for at, logprob in enumerate(prompt.logprobs):
                    top = slice(at * prompt.num_top, (at + 1) * prompt.num_top)
                    ids = array("q", (prompt.start + at, prompt.ranks[at], *prompt.top_token_ids[top])).tobytes()
                    told.prompt_logprobs += ids + bits(logprob, *prompt.top_logprobs[top])
            if delta.finish is not None:
                told.finish, told.cumulative_logprob = delta.finish, delta.cumulative_logprob
                self.talk_on(delta.key[1])

    def talk_on(self, request_id: str) -> None:
        """With all its samples told, a chat goes on from the first."""
        one = self.chats[request_id]
        every = [self.outcome[request_id, index] for index in range(one.spec.num_samples)]
        if one.says and all(told.finish for told in every):
            self.add(one.turn(every[0].token_ids))


def bits(*values: float) -> bytes:
    return array("d", values).tobytes()


def modelled(plan: StepPlan, result: StepResult) -> StepResult:
    """With times that are the same in every run: swaps are the cheaper in 16 steps, computing in the next 16."""
    num_tokens = sum(plan.scheduled_num_tokens) + len(result.slots)
    num_moves = len(plan.swapped_out) + len(plan.swapped_in)
    return replace(result, device_ns=num_tokens * (1 if plan.step_id // 16 % 2 else 1000), moves_ns=2000 * num_moves)


def coming(rig: Rig, chats: list[Chat]) -> Iterator[list[Chat]]:
    """Who comes before each step, as the setting says."""
    chats, rng = list(chats), random.Random(3)
    if rig.setting.arrivals in ("shuffled", "scattered"):
        rng.shuffle(chats)
    if rig.setting.arrivals in ("together", "shuffled"):
        yield chats
        chats = []
    while chats or rig.core.groups:
        alone = rig.setting.arrivals == "alone"
        count = not rig.core.groups if alone else rng.choice([0, 0, 0, 1, 1, 3])
        yield chats[:count]
        del chats[:count]
        if rig.setting.aborts and rng.random() < 0.3 and len(rig.chats) < 60:
            rig.disturb(rng)


# --- many ways -------------------------------------------------------------------------------------------------------

SMALL = {"block_size": 8, "num_blocks": 34}
ROOM = {"num_host_blocks": 200}
NO_CACHE = {"enable_prefix_caching": False}
ALONE = Setting(num_blocks=100, max_num_batched_tokens=512, depth=1, arrivals="alone", options=NO_CACHE)


def kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


SETTINGS: dict[str, Setting] = {
    "all at once": Setting(happens=kinds("hits")),
    "no cache, one plan in flight": Setting(depth=1, options=NO_CACHE),
    "other order, three plans": Setting(depth=3, arrivals="shuffled", happens=kinds("hits")),
    "now and then, four plans": Setting(depth=4, arrivals="scattered", happens=kinds("hits")),
    "alone, cached": Setting(arrivals="alone", happens=kinds("hits")),
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
    "recompute": Setting(**SMALL, happens=kinds("recompute", "hits")),
    "recompute, no cache, four plans": Setting(**SMALL, depth=4, options=NO_CACHE, happens=kinds("recompute")),
    "swap": Setting(**SMALL, **ROOM, options={"preemption": "swap"}, happens=kinds("swap", "hits")),
    "swap, no cache, one plan": Setting(
        **SMALL, **ROOM, depth=1, arrivals="scattered", options={"preemption": "swap"} | NO_CACHE, happens=kinds("swap")
    ),
    "swap, four plans, blocks of 16": Setting(
        num_blocks=22, num_host_blocks=200, depth=4, options={"preemption": "swap"}, happens=kinds("swap")
    ),
    "swap, a small host pool": Setting(
        **SMALL, num_host_blocks=14, options={"preemption": "swap"} | NO_CACHE, happens=kinds("swap", "recompute")
    ),
    "auto": Setting(
        **SMALL, **ROOM, depth=3, arrivals="scattered", options={"preemption": "auto"},
        happens=kinds("swap", "recompute"),
    ),
    "the urgent first": Setting(
        **SMALL, **ROOM, arrivals="scattered", options={"order": "priority", "preemption": "swap"},
        happens=kinds("swap"),
    ),
    "the short first": Setting(
        **SMALL, options={"order": "sjf", "max_wait_s": 0.3, "long_prefill_token_threshold": 9},
        happens=kinds("recompute"),
    ),
    "cached in the host pool": Setting(
        **SMALL, **ROOM, max_num_seqs=5, arrivals="scattered", happens=kinds("hits", "host hits")
    ),
    "broken sessions": Setting(**SMALL, **ROOM, depth=3, loses_every=45, options={"preemption": "swap"}),
    "aborts": Setting(
        **SMALL, **ROOM, arrivals="scattered", aborts=True, options={"preemption": "swap"}, happens=kinds("swap")
    ),
}  # fmt: skip


def mixture(seed: int) -> Setting:
    """Everything at once, at random."""
    rng = random.Random(seed)
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
        aborts=rng.random() < 0.4,
        options=options,
    )


# --- the test --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """A model, and what each request of the load is told alone."""

    model: Model
    expected: Outcome


def run(model: Model, setting: Setting) -> tuple[Outcome, Counter[str]]:
    rig = Rig(model, setting)
    return rig.run(coming(rig, load())), +rig.happened


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_llama(tmp_path_factory.mktemp("model"), dtype=getattr(torch, request.param))
    model = Model(folder, dtype=request.param)
    expected, happened = run(model, ALONE)
    assert not happened
    yield Golden(model, expected)
    torch.set_num_threads(before)


def check(golden: Golden, setting: Setting) -> None:
    found, happened = run(golden.model, setting)
    for key, told in golden.expected.items():
        assert found[key] == told, key
    assert setting.happens <= happened.keys()


def test_the_load_has_something_of_everything(golden: Golden) -> None:
    told = list(golden.expected.values())
    assert len({tuple(one.token_ids) for one in told}) == len(told), "the outputs differ"
    assert {one.finish.detail for one in told if one.finish} == {
        FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.MAX_TOKENS
    }  # fmt: skip
    assert sum(1 for one in told if one.logprobs) > 15
    assert sum(1 for one in told if one.prompt_logprobs) == 3
    assert sum(1 for one in told if one.cumulative_logprob is not None) == 11


@pytest.mark.parametrize("name", SETTINGS)
def test_same_request_same_bits(golden: Golden, name: str) -> None:
    check(golden, SETTINGS[name])


@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once(golden: Golden, seed: int) -> None:
    check(golden, mixture(seed))
